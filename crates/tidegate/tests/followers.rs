//! Threads that wait for sockets of one stack: one leads, the others follow.

mod two_hosts;

use std::net::SocketAddr;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Duration;

use tidegate::{Net, UdpSocket};
use two_hosts::FAMILIES;

const THREADS: u16 = 8;

fn address(ip: &str, port: u16) -> SocketAddr {
    SocketAddr::new(ip.parse().unwrap(), port)
}

/// Binds a socket with a timeout: a lost datagram fails the test instead of hanging it.
fn bind(net: &Net, address: SocketAddr) -> UdpSocket {
    let socket = UdpSocket::bind(net, address).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    socket
}

/// Echoes datagrams on a thread until an empty one. The thread waits for a permit before it echoes
/// one that begins with `w`.
fn echo(net: &Net, address: SocketAddr, permitted: Receiver<()>) -> thread::JoinHandle<()> {
    let socket = bind(net, address);
    thread::spawn(move || {
        let mut buf = [0; 16];
        loop {
            let (len, from) = socket.recv_from(&mut buf).unwrap();
            if buf[..len].starts_with(b"w") {
                permitted.recv().unwrap();
            }
            socket.send_to(&buf[..len], from).unwrap();
            if len == 0 {
                return;
            }
        }
    })
}

/// A server with [`THREADS`] threads, on ports from 7000 on, and a client.
struct Hosts {
    ip: &'static str,
    permits: Vec<Sender<()>>,
    client: UdpSocket,
}

impl Hosts {
    fn send(&self, thread: u16, payload: &[u8]) {
        self.client.send_to(payload, address(self.ip, 7000 + thread)).unwrap();
    }

    fn expect(&self, thread: u16, payload: &[u8]) {
        let mut buf = [0; 16];
        let (len, from) = self.client.recv_from(&mut buf).unwrap();
        assert_eq!((&buf[..len], from), (payload, address(self.ip, 7000 + thread)));
    }

    fn round_trip(&self, thread: u16, payload: &[u8]) {
        self.send(thread, payload);
        self.expect(thread, payload);
    }

    fn permit(&self, thread: u16) {
        self.permits[usize::from(thread)].send(()).unwrap();
    }
}

fn on_both_families(check: impl Fn(&Hosts)) {
    for [a, ip] in FAMILIES {
        two_hosts::in_both_forms(1024, |[client, server]| {
            let (permits, threads): (Vec<_>, Vec<_>) = (0..THREADS)
                .map(|n| {
                    let (permit, permitted) = channel();
                    (permit, echo(&server, address(ip, 7000 + n), permitted))
                })
                .unzip();
            let hosts = Hosts { ip, permits, client: bind(&client, address(a, 0)) };
            (0..THREADS).for_each(|n| hosts.round_trip(n, b"hello"));
            check(&hosts);
            (0..THREADS).for_each(|n| hosts.round_trip(n, b""));
            threads.into_iter().for_each(|thread| thread.join().unwrap());
        });
    }
}

#[test]
fn each_thread_in_turn_gets_its_datagrams() {
    on_both_families(|hosts| {
        (0..30 * THREADS).for_each(|n| hosts.round_trip(n * 3 % THREADS, b"ping"));
    });
}

#[test]
fn thread_that_stays_away_leaves_the_device_to_the_others() {
    on_both_families(|hosts| {
        for away in 0..THREADS {
            hosts.send(away, b"wait");
            (0..THREADS).filter(|&n| n != away).for_each(|n| hosts.round_trip(n, b"ping"));
            hosts.permit(away);
            hosts.expect(away, b"wait");
        }
    });
}
