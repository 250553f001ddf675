//! Measures `capi_cost`: the same calls through the C library and through the Rust library, for
//! `scripts/cost`, which counts their instructions.
//!
//! `capi_cost c|rust udp|tcp COUNT` sends and receives COUNT times on one stack, which runs in between:
//! no call waits.

use std::error::Error;
use std::net::SocketAddr;

use libc::{c_int, c_void, sockaddr, sockaddr_in, socklen_t};
use tidegate::{AddressProbe, Net, NetConfig, TcpListener, TcpStream, UdpSocket};
use tidegate_capi::tg;

const ADDRESS: &str = "192.0.2.1:7000";
const PAYLOAD: [u8; 64] = [7; 64];

fn address() -> sockaddr_in {
    sockaddr_in {
        sin_family: libc::AF_INET as u16,
        sin_port: 7000_u16.to_be(),
        sin_addr: libc::in_addr { s_addr: u32::from_be_bytes([192, 0, 2, 1]).to_be() },
        sin_zero: [0; 8],
    }
}

fn rust_udp(net: &Net, count: u32) -> Result<(), Box<dyn Error>> {
    let socket = UdpSocket::bind(net, ADDRESS)?;
    let to: SocketAddr = ADDRESS.parse()?;
    let mut buf = [0; 64];
    for _ in 0..count {
        assert_eq!(socket.send_to(&PAYLOAD, to)?, 64);
        net.run_once()?;
        assert_eq!(socket.recv_from(&mut buf)?, (64, to));
    }
    Ok(())
}

fn rust_tcp(net: &Net, count: u32) -> Result<(), Box<dyn Error>> {
    let listener = TcpListener::bind(net, ADDRESS)?;
    let sender = TcpStream::connect(net, ADDRESS)?;
    let (receiver, _) = listener.accept()?;
    // A segment that waited for an acknowledgement would make the next call wait.
    sender.set_nodelay(true)?;
    let mut buf = [0; 64];
    for _ in 0..count {
        assert_eq!(sender.send(&PAYLOAD)?, 64);
        net.run_once()?;
        assert_eq!(receiver.recv(&mut buf)?, 64);
    }
    Ok(())
}

/// Socket that is bound to the address.
fn bound(kind: c_int) -> c_int {
    let address = address();
    // SAFETY: the address has the size of its type.
    unsafe {
        let fd = tg::tg_socket(libc::AF_INET, kind, 0);
        assert_eq!(tg::tg_bind(fd, (&raw const address).cast(), size_of_val(&address) as u32), 0);
        fd
    }
}

fn c_udp(net: &Net, count: u32) -> Result<(), Box<dyn Error>> {
    let (fd, to) = (bound(libc::SOCK_DGRAM), address());
    let mut buf = [0_u8; 64];
    let mut from = address();
    for _ in 0..count {
        // SAFETY: buffers and addresses have the given lengths.
        unsafe {
            let to: *const sockaddr = (&raw const to).cast();
            let size = size_of::<sockaddr_in>() as socklen_t;
            assert_eq!(tg::tg_sendto(fd, PAYLOAD.as_ptr().cast(), 64, 0, to, size), 64);
            net.run_once()?;
            let mut len = size;
            let from: *mut sockaddr = (&raw mut from).cast();
            let data: *mut c_void = buf.as_mut_ptr().cast();
            assert_eq!(tg::tg_recvfrom(fd, data, 64, 0, from, &raw mut len), 64);
            assert_eq!(len, size);
        }
    }
    Ok(())
}

fn c_tcp(net: &Net, count: u32) -> Result<(), Box<dyn Error>> {
    let (listener, to) = (bound(libc::SOCK_STREAM), address());
    let mut buf = [0_u8; 64];
    // SAFETY: buffers and addresses have the given lengths.
    unsafe {
        assert_eq!(tg::tg_listen(listener, 1), 0);
        let sender = tg::tg_socket(libc::AF_INET, libc::SOCK_STREAM, 0);
        let size = size_of::<sockaddr_in>() as socklen_t;
        assert_eq!(tg::tg_connect(sender, (&raw const to).cast(), size), 0);
        let receiver = tg::tg_accept(listener, std::ptr::null_mut(), std::ptr::null_mut());
        let on: c_int = 1;
        let (value, len) = ((&raw const on).cast(), size_of_val(&on) as socklen_t);
        let set = tg::tg_setsockopt(sender, libc::IPPROTO_TCP, libc::TCP_NODELAY, value, len);
        assert_eq!(set, 0);
        for _ in 0..count {
            assert_eq!(tg::tg_send(sender, PAYLOAD.as_ptr().cast(), 64, 0), 64);
            net.run_once()?;
            assert_eq!(tg::tg_recv(receiver, buf.as_mut_ptr().cast(), 64, 0), 64);
        }
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [library, transport, count] = arguments.as_slice() else {
        return Err("usage: capi_cost c|rust udp|tcp COUNT".into());
    };
    let count = count.parse()?;
    let (device, _peer) = tidegate::mem::wire(&Default::default())?;
    let config =
        NetConfig::new(device).address("192.0.2.1/24".parse()?).address_probe(AddressProbe::Off);
    let net = Net::open(config)?;
    tidegate_capi::use_net(net.clone());
    match (library.as_str(), transport.as_str()) {
        ("rust", "udp") => rust_udp(&net, count),
        ("rust", "tcp") => rust_tcp(&net, count),
        ("c", "udp") => c_udp(&net, count),
        ("c", "tcp") => c_tcp(&net, count),
        _ => Err("usage: capi_cost c|rust udp|tcp COUNT".into()),
    }
}
