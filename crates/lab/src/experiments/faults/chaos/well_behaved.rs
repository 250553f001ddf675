//! Well-behaved applications, which must lose nothing whatever other applications do.

use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError, mpsc};
use std::thread;
use std::time::Duration;

use tidegate::{Net, TcpListener, TcpStream, UdpSocket};

use super::echo_checker::{EchoChecker, MAX_PIECE_BYTES};
use super::peers::{PIECES_PER_CONNECTION, REPLY_TIMEOUT, check_echo, is_time_out};
use super::testbed::{ChaosTestbed, daemon_address, datagram_server, stream_server};
use crate::LabError;
use crate::testbed::stop::StopOnDrop;

/// Number of applications that connect, and of applications that listen.
const CLIENT_COUNT: usize = 4;
const SERVER_COUNT: usize = 2;

/// First port of the well-behaved listeners.
const FIRST_LISTENER_PORT: u16 = 8000;

/// Maximum payload of a datagram in bytes, without its number.
const MAX_DATAGRAM_BYTES: usize = 1400;

/// Time after which a datagram counts as lost and is sent again: the veth pair drops on ring
/// overflow.
const LOSS_TIMEOUT: Duration = Duration::from_millis(200);
const MAX_TRIES: u64 = 50;

/// Counters and errors of all well-behaved applications.
#[derive(Debug, Default)]
pub(super) struct WellBehaved {
    /// Bytes that were echoed unchanged.
    pub(super) checked_bytes: AtomicU64,
    /// Datagrams that were echoed unchanged.
    pub(super) datagrams: AtomicU64,
    /// Retransmissions of datagrams.
    pub(super) retransmitted: AtomicU64,
    /// Connections that ended without an error.
    pub(super) connections: AtomicU64,
    /// Errors, each with the name of the application that reported it.
    errors: Mutex<Vec<String>>,
}

impl WellBehaved {
    fn record(&self, who: &str, result: io::Result<u64>) {
        match result {
            Ok(bytes) => {
                self.checked_bytes.fetch_add(bytes, Ordering::Relaxed);
                self.connections.fetch_add(1, Ordering::Relaxed);
            }
            Err(error) => {
                let said = format!("{who}: {error}");
                eprintln!("{said}");
                self.errors.lock().unwrap_or_else(PoisonError::into_inner).push(said);
            }
        }
    }

    /// Errors of all applications, each prefixed with the kind of the reporter.
    pub(super) fn errors(&self) -> Vec<String> {
        self.errors.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Runs the well-behaved applications while `work` runs.
pub(super) fn with_well_behaved<R>(
    testbed: &ChaosTestbed,
    well_behaved: &WellBehaved,
    work: impl FnOnce() -> Result<R, LabError>,
) -> Result<R, LabError> {
    let (clients_stop, servers_stop) = (&AtomicBool::new(false), &AtomicBool::new(false));
    let path = &testbed.socket();
    thread::scope(|scope| {
        // The guards stop all threads on every exit from this scope.
        let (stop_clients, _stop_servers) = (StopOnDrop(clients_stop), StopOnDrop(servers_stop));
        let mut clients = Vec::new();
        for number in 0..CLIENT_COUNT {
            clients.push(scope.spawn(move || {
                while !clients_stop.load(Ordering::Relaxed) {
                    well_behaved.record(
                        "a well-behaved client",
                        run_client(path, number, clients_stop, well_behaved),
                    );
                }
            }));
        }
        for number in 0..SERVER_COUNT {
            let address =
                SocketAddr::new(daemon_address(number), FIRST_LISTENER_PORT + number as u16);
            let (listens, listening) = mpsc::channel();
            scope.spawn(move || {
                if let Err(error) = run_server(path, address, servers_stop, listens) {
                    well_behaved.record("a well-behaved server", Err(error));
                }
            });
            let namespace = &testbed.pair.a.namespace;
            clients.push(scope.spawn(move || {
                // A server that cannot listen has recorded its error; its client does not start.
                if listening.recv().is_err() {
                    return;
                }
                let mut seed = 1000 * number as u64;
                let visited = namespace.enter(|| {
                    while !clients_stop.load(Ordering::Relaxed) {
                        seed += 1;
                        let checked = check_echo(address, seed, clients_stop);
                        well_behaved.record("a client of a well-behaved server", checked);
                    }
                });
                if let Err(error) = visited {
                    well_behaved
                        .record("a client of a well-behaved server", Err(io::Error::other(error)));
                }
            }));
        }
        let result = work();
        drop(stop_clients);
        for client in clients {
            // The thread has reported its panic, which also makes the scope panic.
            let _ = client.join();
        }
        result
    })
}

/// One run of a client application: connects, exchanges data over TCP and UDP, and exits.
/// Returns the number of checked bytes.
fn run_client(
    path: &Path,
    number: usize,
    stop: &AtomicBool,
    well_behaved: &WellBehaved,
) -> io::Result<u64> {
    let net = Net::attach(path, "honest")?;
    let mut stream = TcpStream::connect_timeout(&net, stream_server(number), REPLY_TIMEOUT)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(REPLY_TIMEOUT))?;
    stream.set_write_timeout(Some(REPLY_TIMEOUT))?;
    let socket = UdpSocket::bind(&net, (daemon_address(number), 0))?;
    socket.set_read_timeout(Some(LOSS_TIMEOUT))?;
    let mut checker = EchoChecker::new(number as u64);
    let mut datagrams = EchoChecker::new(!(number as u64));
    for count in 0..PIECES_PER_CONNECTION as u64 {
        checker.exchange(&mut stream).map_err(add_protocol("TCP"))?;
        let retransmitted =
            exchange_datagram(&socket, datagram_server(number), &mut datagrams, count);
        well_behaved
            .retransmitted
            .fetch_add(retransmitted.map_err(add_protocol("UDP"))?, Ordering::Relaxed);
        well_behaved.datagrams.fetch_add(1, Ordering::Relaxed);
        if stop.load(Ordering::Relaxed) {
            break;
        }
    }
    Ok(checker.checked_bytes() + datagrams.checked_bytes())
}

/// Sends a numbered datagram until its echo arrives, and checks the echo. Returns the number of
/// retransmissions.
fn exchange_datagram(
    socket: &UdpSocket,
    to: SocketAddr,
    checker: &mut EchoChecker,
    count: u64,
) -> io::Result<u64> {
    let number = count.to_be_bytes();
    let datagram = [&number, checker.next_piece(MAX_DATAGRAM_BYTES)].concat();
    let mut received = [0; 2 * MAX_DATAGRAM_BYTES];
    for retransmitted in 0..MAX_TRIES {
        socket.send_to(&datagram, to)?;
        loop {
            let len = match socket.recv_from(&mut received) {
                Ok((len, from)) if from == to => len,
                // Echo for the previous owner of this port.
                Ok(_) => continue,
                Err(error) if is_time_out(&error) => break,
                Err(error) => return Err(error),
            };
            let (head, rest) = received[..len].split_at(number.len().min(len));
            // The echo of an earlier datagram that was sent twice has a lower number.
            if head >= &number[..] {
                checker.check(if head == number { rest } else { head })?;
                return Ok(retransmitted);
            }
        }
    }
    Err(io::Error::new(
        io::ErrorKind::TimedOut,
        format!("{MAX_TRIES} datagrams were lost in a row"),
    ))
}

/// Adds the protocol to the message of an error.
fn add_protocol(protocol: &str) -> impl Fn(io::Error) -> io::Error {
    move |error| io::Error::new(error.kind(), format!("{protocol}: {error}"))
}

/// Echo server application; signals `is_listening` once it listens.
fn run_server(
    path: &Path,
    address: SocketAddr,
    stop: &AtomicBool,
    is_listening: mpsc::Sender<()>,
) -> io::Result<()> {
    let net = Net::attach(path, "honest")?;
    let listener = TcpListener::bind(&net, address)?;
    // The client waits for this signal without a timeout.
    let _ = is_listening.send(());
    listener.set_nonblocking(true)?;
    while !stop.load(Ordering::Relaxed) {
        let mut stream = match listener.accept() {
            Ok((stream, _)) => stream,
            Err(error) if is_time_out(&error) => {
                thread::sleep(Duration::from_millis(1));
                continue;
            }
            Err(error) => return Err(error),
        };
        stream.set_nonblocking(false)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(REPLY_TIMEOUT))?;
        let mut piece = vec![0; MAX_PIECE_BYTES];
        // The client checks that all bytes came back, and ends the connection with a reset.
        while let Ok(len @ 1..) = stream.read(&mut piece) {
            if stream.write_all(&piece[..len]).is_err() {
                break;
            }
        }
    }
    Ok(())
}
