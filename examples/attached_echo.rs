//! UDP echo on the stack of a daemon, by shared memory. It needs no privilege but the right to attach.
//!
//! As root: `tidegate daemon --iface eth0 --address 192.0.2.7/24`; then
//! `cargo run --release -p tidegate --example attached_echo -- /run/tidegate/tidegate.sock`, and on
//! another machine `nc -u 192.0.2.7 7`.

use tidegate::{Net, UdpSocket};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args().nth(1).ok_or("usage: attached_echo SOCKET")?;
    let net = Net::attach(path, "attached_echo")?;
    // Both families.
    let socket = UdpSocket::bind(&net, "[::]:7")?;
    println!("ready");
    let mut buffer = [0; 2048];
    loop {
        let (len, from) = socket.recv_from(&mut buffer)?;
        socket.send_to(&buffer[..len], from)?;
    }
}
