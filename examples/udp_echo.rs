//! UDP echo, with the stack inside the program, on AF_XDP.
//!
//! As root: `cargo run --release -p tidegate --example udp_echo -- eth0 192.0.2.7/24`; then on
//! another machine `nc -u 192.0.2.7 7`.

use tidegate::device::xdp::XdpConfig;
use tidegate::{IpCidr, Net, NetConfig, UdpSocket};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let usage = "usage: udp_echo INTERFACE ADDRESS/BITS";
    let mut arguments = std::env::args().skip(1);
    let interface = arguments.next().ok_or(usage)?;
    let address: IpCidr = arguments.next().ok_or(usage)?.parse()?;

    let net = Net::open(NetConfig::new(XdpConfig::new(interface)).address(address))?;
    let socket = UdpSocket::bind(&net, (address.address(), 7))?;
    net.wait_for_addresses()?;
    println!("ready");
    let mut buffer = [0; 2048];
    loop {
        // The thread that waits runs the stack.
        let (len, from) = socket.recv_from(&mut buffer)?;
        socket.send_to(&buffer[..len], from)?;
    }
}
