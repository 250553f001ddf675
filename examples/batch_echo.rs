//! UDP echo in batches: a closure answers up to 64 datagrams under one lock. Requests are read where
//! they lie in the packet buffers; only the answer is copied.
//!
//! As root: `cargo run --release -p tidegate --example batch_echo -- eth0 192.0.2.7/24`; then on
//! another machine `nc -u 192.0.2.7 7`.

use tidegate::device::xdp::XdpConfig;
use tidegate::{IpCidr, Net, NetConfig, UdpSocket};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let usage = "usage: batch_echo INTERFACE ADDRESS/BITS";
    let mut arguments = std::env::args().skip(1);
    let interface = arguments.next().ok_or(usage)?;
    let address: IpCidr = arguments.next().ok_or(usage)?.parse()?;

    let net = Net::open(NetConfig::new(XdpConfig::new(interface)).address(address))?;
    let socket = UdpSocket::bind(&net, (address.address(), 7))?;
    net.wait_for_addresses()?;
    println!("ready");
    loop {
        socket.exchange(|request, reply| {
            let answer = reply.get_mut(..request.bytes.len())?;
            answer.copy_from_slice(request.bytes);
            Some(answer.len())
        })?;
    }
}
