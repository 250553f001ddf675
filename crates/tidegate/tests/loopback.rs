//! Applications that talk to addresses of their own host.

mod two_hosts;

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr};
use std::thread;
use std::time::Duration;

use tidegate::gate::{Config, Mode, Settings};
use tidegate::{Net, OpenError, TcpListener, TcpStream, UdpSocket};
use two_hosts::{CORES, FAMILIES};

const TIMEOUT: Duration = Duration::from_secs(20);
const FRAMES: u32 = 1024;
const PORT: u16 = 7;

/// Addresses of the first host, one in each family.
fn addresses() -> [SocketAddr; 2] {
    FAMILIES.map(|[own, _]| SocketAddr::new(own.parse().unwrap(), PORT))
}

/// Runs `check` with client and server on one host: on one embedded stack, in one application
/// that is attached to a daemon, and in two attached applications.
fn on_one_host(check: impl Fn(&Net, &Net, SocketAddr)) {
    for own in addresses() {
        let [embedded, _other] = two_hosts::open(FRAMES, |config| config);
        check(&embedded, &embedded, own);
        for (process_count, cores) in [1, 2].into_iter().flat_map(|n| CORES.map(|cores| (n, cores)))
        {
            let daemons = two_hosts::daemons(FRAMES, cores);
            let nets = [0, 1].map(|_| daemons.attach()[0].clone());
            check(&nets[0], &nets[process_count - 1], own);
        }
    }
}

fn bind(net: &Net, local: SocketAddr) -> UdpSocket {
    let socket = UdpSocket::bind(net, local).unwrap();
    socket.set_read_timeout(Some(TIMEOUT)).unwrap();
    socket.set_write_timeout(Some(TIMEOUT)).unwrap();
    socket
}

fn with_timeouts(stream: TcpStream) -> TcpStream {
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    stream.set_write_timeout(Some(TIMEOUT)).unwrap();
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
            // The large ones are fragmented.
            let sent = vec![count; usize::from(count) * 30 + 1];
            client.send_to(&sent, own).unwrap();
            let (len, from) = client.recv_from(&mut buf).unwrap();
            assert_eq!((from, &buf[..len]), (own, &*sent));
        }
    });
}

#[test]
fn echoes_datagrams_to_own_address() {
    on_one_host(exchange_datagrams);
}

#[test]
fn echoes_stream_and_closes() {
    on_one_host(|client, server, own| {
        let listener = TcpListener::bind(server, own).unwrap();
        let sent: Vec<u8> = (0..2_000_000_u32).map(|n| (n % 251) as u8).collect();
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut stream = with_timeouts(listener.accept().unwrap().0);
                let mut buf = vec![0; 10_000];
                loop {
                    let len = stream.read(&mut buf).unwrap();
                    if len == 0 {
                        return stream.shutdown(Shutdown::Write).unwrap();
                    }
                    stream.write_all(&buf[..len]).unwrap();
                }
            });
            let mut stream = with_timeouts(TcpStream::connect(client, own).unwrap());
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

/// A sender to its own host runs the stack only briefly. A sleeping receiver is woken, and in
/// each mode a different thread takes the frames.
#[test]
fn wakes_sleeping_receiver_in_every_mode() {
    for (mode, own_thread) in [
        (Mode::Interrupt, false),
        (Mode::Moderated, false),
        (Mode::Napi, false),
        (Mode::Polled, false),
        (Mode::Polled, true),
    ] {
        let gate = Config::default().mode(mode);
        let opened = two_hosts::try_open(FRAMES, |config| {
            config.gate(Settings::new(gate.clone()).unwrap()).own_thread(own_thread)
        });
        let [host, _] = match opened {
            Ok(hosts) => hosts,
            Err(OpenError::Io(error)) if error.kind() == std::io::ErrorKind::PermissionDenied => {
                tidegate_needs::skip("real-time priorities", error);
                continue;
            }
            Err(error) => panic!("{error}"),
        };
        for own in addresses() {
            exchange_datagrams(&host, &host, own);
        }
    }
}
