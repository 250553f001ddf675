//! Applications that behave, and lose nothing whatever others do.

use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError, mpsc};
use std::thread;
use std::time::Duration;

use tidegate::{Net, TcpListener, TcpStream, UdpSocket};

use super::data::{Numbers, PIECE};
use super::peers::{PATIENCE, PIECES, check, is_time_out};
use super::site::{Site, datagrams_at, own, streams_at};
use crate::LabError;
use crate::stop::StopAtEnd;

/// Applications that connect, and that listen.
const CLIENTS: usize = 4;
const SERVERS: usize = 2;

/// The first port that honest listeners have.
const LISTENERS: u16 = 8000;

/// The longest datagram.
const DATAGRAM: usize = 1400;

/// A wire may lose a datagram, when its ring is full: it is sent again.
const LOST_AFTER: Duration = Duration::from_millis(200);
const TRIES: u64 = 50;

/// What all of them have seen.
#[derive(Debug, Default)]
pub(super) struct Honest {
    /// Bytes that came back as they were.
    pub(super) bytes: AtomicU64,
    /// Datagrams that came back as they were.
    pub(super) datagrams: AtomicU64,
    /// Datagrams that were sent again.
    pub(super) resent: AtomicU64,
    /// Connections that ended well.
    pub(super) connections: AtomicU64,
    /// What went wrong.
    errors: Mutex<Vec<String>>,
}

impl Honest {
    fn note(&self, who: &str, result: io::Result<u64>) {
        match result {
            Ok(bytes) => {
                self.bytes.fetch_add(bytes, Ordering::Relaxed);
                self.connections.fetch_add(1, Ordering::Relaxed);
            }
            Err(error) => {
                let said = format!("{who}: {error}");
                eprintln!("{said}");
                self.errors.lock().unwrap_or_else(PoisonError::into_inner).push(said);
            }
        }
    }

    /// What went wrong, in the words of who saw it.
    pub(super) fn errors(&self) -> Vec<String> {
        self.errors.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Runs honest applications while `work` does.
pub(super) fn beside<R>(
    site: &Site,
    honest: &Honest,
    work: impl FnOnce() -> Result<R, LabError>,
) -> Result<R, LabError> {
    let (clients_stop, servers_stop) = (&AtomicBool::new(false), &AtomicBool::new(false));
    let path = &site.socket();
    thread::scope(|scope| {
        // However this ends, everybody ends.
        let (stop_clients, _stop_servers) = (StopAtEnd(clients_stop), StopAtEnd(servers_stop));
        let mut clients = Vec::new();
        for number in 0..CLIENTS {
            clients.push(scope.spawn(move || {
                while !clients_stop.load(Ordering::Relaxed) {
                    honest.note("an honest client", client(path, number, clients_stop, honest));
                }
            }));
        }
        for number in 0..SERVERS {
            let address = SocketAddr::new(own(number), LISTENERS + number as u16);
            let (listens, listening) = mpsc::channel();
            scope.spawn(move || {
                if let Err(error) = server(path, address, servers_stop, listens) {
                    honest.note("an honest server", Err(error));
                }
            });
            let namespace = &site.pair.a.namespace;
            clients.push(scope.spawn(move || {
                // One that cannot listen has said why, and its clients do not come.
                if listening.recv().is_err() {
                    return;
                }
                let mut seed = 1000 * number as u64;
                let visits = namespace.enter(|| {
                    while !clients_stop.load(Ordering::Relaxed) {
                        seed += 1;
                        let checked = check(address, seed, clients_stop);
                        honest.note("a client of an honest server", checked);
                    }
                });
                if let Err(error) = visits {
                    honest.note("a client of an honest server", Err(io::Error::other(error)));
                }
            }));
        }
        let result = work();
        drop(stop_clients);
        for client in clients {
            // A panic was reported by the thread itself, and fails the scope.
            let _ = client.join();
        }
        result
    })
}

/// One life of an application: connects, exchanges numbers both ways, and goes.
fn client(path: &Path, number: usize, stop: &AtomicBool, honest: &Honest) -> io::Result<u64> {
    let net = Net::attach(path, "honest")?;
    let mut stream = TcpStream::connect_timeout(&net, streams_at(number), PATIENCE)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let socket = UdpSocket::bind(&net, (own(number), 0))?;
    socket.set_read_timeout(Some(LOST_AFTER))?;
    let mut numbers = Numbers::new(number as u64);
    let mut datagrams = Numbers::new(!(number as u64));
    for count in 0..PIECES as u64 {
        numbers.exchange(&mut stream).map_err(over("TCP"))?;
        let resent = exchange(&socket, datagrams_at(number), &mut datagrams, count);
        honest.resent.fetch_add(resent.map_err(over("UDP"))?, Ordering::Relaxed);
        honest.datagrams.fetch_add(1, Ordering::Relaxed);
        if stop.load(Ordering::Relaxed) {
            break;
        }
    }
    Ok(numbers.bytes() + datagrams.bytes())
}

/// Sends a numbered datagram until it comes back, and checks it. Returns how
/// often it was sent again.
fn exchange(
    socket: &UdpSocket,
    to: SocketAddr,
    numbers: &mut Numbers,
    count: u64,
) -> io::Result<u64> {
    let number = count.to_be_bytes();
    let datagram = [&number, numbers.next(DATAGRAM)].concat();
    let mut came = [0; 2 * DATAGRAM];
    for resent in 0..TRIES {
        socket.send_to(&datagram, to)?;
        loop {
            let len = match socket.recv_from(&mut came) {
                Ok((len, from)) if from == to => len,
                // To who had this port before.
                Ok(_) => continue,
                Err(error) if is_time_out(&error) => break,
                Err(error) => return Err(error),
            };
            let (head, rest) = came[..len].split_at(number.len().min(len));
            // Of one that was sent twice both may come back.
            if head >= &number[..] {
                numbers.check(if head == number { rest } else { head })?;
                return Ok(resent);
            }
        }
    }
    Err(io::Error::new(io::ErrorKind::TimedOut, format!("{TRIES} datagrams were lost in a row")))
}

/// Says what an error is of.
fn over(protocol: &str) -> impl Fn(io::Error) -> io::Error {
    move |error| io::Error::new(error.kind(), format!("{protocol}: {error}"))
}

/// An application that sends back what comes, and says when it can.
fn server(
    path: &Path,
    address: SocketAddr,
    stop: &AtomicBool,
    listens: mpsc::Sender<()>,
) -> io::Result<()> {
    let net = Net::attach(path, "honest")?;
    let listener = TcpListener::bind(&net, address)?;
    // Its client waits for this as long as it takes.
    let _ = listens.send(());
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
        stream.set_read_timeout(Some(PATIENCE))?;
        let mut piece = vec![0; PIECE];
        // Its client says whether all of it came back, and ends by a reset.
        while let Ok(len @ 1..) = stream.read(&mut piece) {
            if stream.write_all(&piece[..len]).is_err() {
                break;
            }
        }
    }
    Ok(())
}
