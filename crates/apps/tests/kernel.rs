//! Serving loop on kernel sockets, in both address families.

use std::net::{SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use tidegate_apps::ServeCounters;
use tidegate_apps::echo::Echo;
use tidegate_apps::kernel::{KernelError, KernelOptions, KernelSocket, serve_kernel};

/// Binds wildcard sockets in both families, serves echo on them and calls
/// `client` with their ports.
fn with_echo(max_datagram_bytes: usize, client: impl FnOnce([u16; 2])) -> ServeCounters {
    let sockets = ["0.0.0.0:0", "[::]:0"]
        .map(|address| KernelSocket::bind(address.parse().unwrap(), &KernelOptions::default()))
        .map(Result::unwrap);
    let ports = [sockets[0].local_addr().port(), sockets[1].local_addr().port()];
    let stop = AtomicBool::new(false);
    let counters = ServeCounters::new();
    thread::scope(|scope| {
        let server =
            scope.spawn(|| serve_kernel(&sockets, &mut Echo, max_datagram_bytes, &stop, &counters));
        client(ports);
        stop.store(true, Ordering::Relaxed);
        server.join().unwrap().unwrap();
    });
    counters
}

fn connect(ip: &str, port: u16) -> UdpSocket {
    let address = SocketAddr::new(ip.parse().unwrap(), port);
    let any = if address.is_ipv4() { "127.0.0.1:0" } else { "[::1]:0" };
    let socket = UdpSocket::bind(any).unwrap();
    socket.connect(address).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    socket
}

#[test]
fn replies_from_the_requested_address() {
    // A connected socket receives datagrams from its peer only, so a reply from
    // another loopback address would never arrive.
    let counters = with_echo(2048, |[v4, v6]| {
        for (ip, port) in [("127.0.0.1", v4), ("127.0.0.53", v4), ("127.9.9.9", v4), ("::1", v6)] {
            let socket = connect(ip, port);
            socket.send(b"tide").unwrap();
            let mut reply = [0; 16];
            assert_eq!(socket.recv(&mut reply).unwrap(), 4, "{ip}");
        }
    });
    assert_eq!(counters.requests.into_inner(), 4);
    assert_eq!(counters.replies.into_inner(), 4);
}

#[test]
fn answers_more_than_one_batch() {
    let counters = with_echo(2048, |[v4, v6]| {
        for socket in [connect("127.0.0.1", v4), connect("::1", v6)] {
            for number in 0..200_u32 {
                socket.send(&number.to_be_bytes()).unwrap();
            }
            let mut seen = Vec::new();
            let mut reply = [0; 16];
            for _ in 0..200 {
                let len = socket.recv(&mut reply).unwrap();
                seen.push(u32::from_be_bytes(reply[..len].try_into().unwrap()));
            }
            seen.sort_unstable();
            assert_eq!(seen, (0..200).collect::<Vec<_>>());
        }
    });
    assert_eq!(counters.replies.into_inner(), 400);
}

#[test]
fn counts_and_drops_oversized_datagrams() {
    let counters = with_echo(64, |[v4, v6]| {
        for socket in [connect("127.0.0.1", v4), connect("::1", v6)] {
            socket.send(&[1; 65]).unwrap();
            socket.send(&[2; 64]).unwrap();
            let mut reply = [0; 128];
            assert_eq!(socket.recv(&mut reply).unwrap(), 64);
            assert_eq!(reply[0], 2);
        }
    });
    assert_eq!(counters.oversized.into_inner(), 2);
    assert_eq!(counters.replies.into_inner(), 2);
}

#[test]
fn address_in_use_error_suggests_ss() {
    for ip in ["127.0.0.1", "::1"] {
        let address = SocketAddr::new(ip.parse().unwrap(), 0);
        let first = KernelSocket::bind(address, &KernelOptions::default()).unwrap();
        let error = KernelSocket::bind(first.local_addr(), &KernelOptions::default()).unwrap_err();
        assert!(matches!(error, KernelError::Bind { .. }));
        assert!(error.to_string().contains("ss -lunp"), "{error}");
    }
}

#[test]
fn sockets_share_a_port_with_reuse_port() {
    for ip in ["127.0.0.1", "::1"] {
        let options = KernelOptions { reuse_port: true, ..KernelOptions::default() };
        let address = SocketAddr::new(ip.parse().unwrap(), 0);
        let first = KernelSocket::bind(address, &options).unwrap();
        let second = KernelSocket::bind(first.local_addr(), &options).unwrap();
        assert_eq!(first.local_addr(), second.local_addr());
    }
}
