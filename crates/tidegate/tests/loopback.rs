//! Programs that speak to addresses of their own host.

mod two_hosts;

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr};
use std::thread;
use std::time::Duration;

use tidegate::gate::{Config, Mode, Settings};
use tidegate::{Net, OpenError, TcpListener, TcpStream, UdpSocket};
use two_hosts::{CORES, FAMILIES};

const LIMIT: Duration = Duration::from_secs(20);
const FRAMES: u32 = 1024;
const PORT: u16 = 7;

/// The first host's address in each family, with a port.
fn addresses() -> [SocketAddr; 2] {
    FAMILIES.map(|[own, _]| SocketAddr::new(own.parse().unwrap(), PORT))
}

/// Checks two programs of one host: one stack in this program, and a daemon to
/// which both are attached, or just one.
fn on_one_host(check: impl Fn(&Net, &Net, SocketAddr)) {
    for own in addresses() {
        let [alone, _other] = two_hosts::open(FRAMES, |config| config);
        check(&alone, &alone, own);
        for (programs, cores) in [1, 2].into_iter().flat_map(|n| CORES.map(|cores| (n, cores))) {
            let daemons = two_hosts::daemons(FRAMES, cores);
            let both = [0, 1].map(|_| daemons.attach()[0].clone());
            check(&both[0], &both[programs - 1], own);
        }
    }
}

fn bind(net: &Net, local: SocketAddr) -> UdpSocket {
    let socket = UdpSocket::bind(net, local).unwrap();
    socket.set_read_timeout(Some(LIMIT)).unwrap();
    socket.set_write_timeout(Some(LIMIT)).unwrap();
    socket
}

fn limited(stream: TcpStream) -> TcpStream {
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream.set_write_timeout(Some(LIMIT)).unwrap();
    stream
}

/// A hundred datagrams there and back, each side on a thread of its own.
fn exchange_datagrams(client: &Net, server: &Net, own: SocketAddr) {
    let server = bind(server, own);
    let client = bind(client, SocketAddr::new(own.ip(), 0));
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut buf = [0; 4000];
            for _ in 0..100 {
                let (len, from) = server.recv_from(&mut buf).unwrap();
                assert_eq!(from, client.local_addr().unwrap());
                server.send_to(&buf[..len], from).unwrap();
            }
        });
        let mut buf = [0; 4000];
        for count in 0..100_u8 {
            // Some of them in fragments.
            let sent = vec![count; usize::from(count) * 30 + 1];
            client.send_to(&sent, own).unwrap();
            let (len, from) = client.recv_from(&mut buf).unwrap();
            assert_eq!((from, &buf[..len]), (own, &*sent));
        }
    });
}

#[test]
fn datagrams_come_back() {
    on_one_host(exchange_datagrams);
}

#[test]
fn a_stream_comes_back_whole_and_ends() {
    on_one_host(|client, server, own| {
        let listener = TcpListener::bind(server, own).unwrap();
        let sent: Vec<u8> = (0..2_000_000_u32).map(|n| (n % 251) as u8).collect();
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut stream = limited(listener.accept().unwrap().0);
                let mut buf = vec![0; 10_000];
                loop {
                    let len = stream.read(&mut buf).unwrap();
                    if len == 0 {
                        return stream.shutdown(Shutdown::Write).unwrap();
                    }
                    stream.write_all(&buf[..len]).unwrap();
                }
            });
            let mut stream = limited(TcpStream::connect(client, own).unwrap());
            let mut writer = stream.try_clone().unwrap();
            let sent = &sent;
            scope.spawn(move || {
                writer.write_all(sent).unwrap();
                writer.shutdown(Shutdown::Write).unwrap();
            });
            let mut received = Vec::new();
            stream.read_to_end(&mut received).unwrap();
            assert!(received == *sent);
        });
    });
}

/// Whoever sends to itself does not run the stack for long: who waits for it is
/// woken, and in each mode somebody else takes the frames.
#[test]
fn who_sleeps_is_woken_in_every_mode() {
    for (mode, own_thread) in [
        (Mode::Interrupt, false),
        (Mode::Moderated, false),
        (Mode::Napi, false),
        (Mode::Polled, false),
        (Mode::Polled, true),
    ] {
        let gate = Config { mode, ..Config::default() };
        let opened = two_hosts::try_open(FRAMES, |config| {
            config.gate(Settings::new(gate.clone()).unwrap()).own_thread(own_thread)
        });
        let [host, _] = match opened {
            Ok(hosts) => hosts,
            Err(OpenError::Io(error)) if error.kind() == std::io::ErrorKind::PermissionDenied => {
                eprintln!("skipped: {error}");
                continue;
            }
            Err(error) => panic!("{error}"),
        };
        for own in addresses() {
            exchange_datagrams(&host, &host, own);
        }
    }
}
