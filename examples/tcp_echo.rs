//! TCP echo with a thread for each connection, with the stack inside the program, on AF_PACKET.
//!
//! As root: `cargo run --release -p tidegate --example tcp_echo -- eth0 192.0.2.7/24`; then on
//! another machine `nc 192.0.2.7 7`.

use tidegate::device::packet::PacketConfig;
use tidegate::{IpCidr, Net, NetConfig, TcpListener};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let usage = "usage: tcp_echo INTERFACE ADDRESS/BITS";
    let mut arguments = std::env::args().skip(1);
    let interface = arguments.next().ok_or(usage)?;
    let address: IpCidr = arguments.next().ok_or(usage)?.parse()?;

    let net = Net::open(NetConfig::new(PacketConfig::new(interface)).address(address))?;
    let listener = TcpListener::bind(&net, (address.address(), 7))?;
    net.wait_for_addresses()?;
    println!("ready");
    loop {
        let (stream, peer) = listener.accept()?;
        // Of the threads that wait one runs the stack, the others sleep.
        std::thread::spawn(move || match std::io::copy(&mut &stream, &mut &stream) {
            Ok(bytes) => println!("{peer}: {bytes} bytes"),
            Err(error) => println!("{peer}: {error}"),
        });
    }
}
