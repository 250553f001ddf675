//! A program with a stack for each of its threads.

use std::io::{ErrorKind, Read, Write};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use tidegate::mem::{MemConfig, wire};
use tidegate::{
    AddressProbe, Net, NetConfig, TcpListener, TcpOptions, TcpStream, UdpOptions, UdpSocket,
};

const CORES: usize = 3;
const CONNECTIONS: usize = 30;
const TIMEOUT: Duration = Duration::from_secs(20);

fn config(device: tidegate::mem::MemDevice, host: u8) -> NetConfig {
    NetConfig::new(device)
        .address(format!("192.0.2.{host}/24").parse().unwrap())
        .address(format!("2001:db8::{host}/64").parse().unwrap())
        .address_probe(AddressProbe::Off)
}

/// A host of several cores, whose device has a single queue, and a peer.
fn hosts() -> (Vec<Net>, Net) {
    let (device, peer) = wire(&MemConfig::default()).unwrap();
    let cores = Net::open_cores(config(device, 1), CORES).unwrap();
    (cores, Net::open(config(peer, 2)).unwrap())
}

/// Every connection of a shared port is served, and what its thread has sent arrives, although the
/// threads drop their stacks at once and in any order.
#[test]
fn connections_end_in_order_with_their_threads() {
    for address in ["192.0.2.1:7", "[2001:db8::1]:7"] {
        let address: SocketAddr = address.parse().unwrap();
        let (cores, peer) = hosts();
        let accepted = &AtomicUsize::new(0);
        thread::scope(|scope| {
            let serve = |net: Net| {
                let options = TcpOptions::default().reuse_port(true);
                let listener = TcpListener::bind_with(&net, address, 64, options).unwrap();
                listener.set_nonblocking(true).unwrap();
                move || {
                    let mut streams = Vec::new();
                    while accepted.load(Ordering::Relaxed) < CONNECTIONS {
                        match listener.accept() {
                            Ok((stream, _)) => {
                                accepted.fetch_add(1, Ordering::Relaxed);
                                streams.push(stream);
                            }
                            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
                        }
                        net.run_once().unwrap();
                    }
                    let count = streams.len();
                    for mut stream in streams {
                        stream.write_all(&[7; 3000]).unwrap();
                    }
                    count
                }
            };
            // All listen before the first connection comes.
            let threads: Vec<_> = cores.into_iter().map(serve).collect();
            let threads: Vec<_> = threads.into_iter().map(|serve| scope.spawn(serve)).collect();
            let connect = |_| TcpStream::connect(&peer, address).unwrap();
            let streams: Vec<_> = (0..CONNECTIONS).map(connect).collect();
            for mut stream in streams {
                stream.set_read_timeout(Some(TIMEOUT)).unwrap();
                let mut bytes = Vec::new();
                stream.read_to_end(&mut bytes).unwrap();
                assert_eq!(bytes, [7; 3000]);
                // Nobody acknowledges an end to a host that is gone.
                stream.set_reset_on_close(true);
            }
            // The peer has yet to acknowledge the ends.
            while !threads.iter().all(thread::ScopedJoinHandle::is_finished) {
                peer.run_once().unwrap();
            }
            let counts = threads.into_iter().map(|thread| thread.join().unwrap());
            assert_eq!(counts.sum::<usize>(), CONNECTIONS);
        });
    }
}

#[test]
fn port_belongs_to_the_stack_that_binds_it() {
    let (cores, _peer) = hosts();
    let bind = |core: usize, options| UdpSocket::bind_with(&cores[core], "192.0.2.1:53", options);
    let own = bind(1, UdpOptions::default()).unwrap();
    for other in [0, 2] {
        let refused = bind(other, UdpOptions::default()).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::AddrInUse);
    }
    drop(own);
    let shared = UdpOptions::default().reuse_port(true);
    let sockets: Vec<_> = (0..CORES).map(|core| bind(core, shared).unwrap()).collect();
    assert_eq!(bind(0, UdpOptions::default()).unwrap_err().kind(), ErrorKind::AddrInUse);
    drop(sockets);
    bind(2, UdpOptions::default()).unwrap();
}
