//! Kernel side of the veth pair: echo servers, and clients that connect to the applications'
//! listeners.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::thread;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::echo_checker::{EchoChecker, MAX_PIECE_BYTES};
use crate::LabError;

/// TCP port of the echo server for connections.
pub(super) const STREAM_PORT: u16 = 7000;
/// UDP port of the echo server for datagrams of well-behaved applications.
pub(super) const DATAGRAM_PORT: u16 = 7001;
/// UDP port of the echo server for unchecked traffic, which applications send as fast as they
/// can: the kernel drops what the server cannot receive.
pub(super) const UNCHECKED_PORT: u16 = 7002;

/// Interval between two checks of the stop flag.
const STOP_CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Maximum time to wait for a reply in an exchange with a well-behaved application.
pub(super) const REPLY_TIMEOUT: Duration = Duration::from_secs(10);

/// Echoes the data of TCP connections. When a client closes a connection, the server resets it,
/// so that neither side keeps state.
pub(super) fn echo_streams(
    address: IpAddr,
    stop: &Arc<AtomicBool>,
    ready: &Sender<()>,
) -> Result<(), LabError> {
    let failed = || LabError::io("the kernel's server failed");
    let listener = TcpListener::bind((address, STREAM_PORT)).map_err(failed())?;
    listener.set_nonblocking(true).map_err(failed())?;
    // The receiver waits for this signal with a time limit.
    let _ = ready.send(());
    let limit = Timespec { tv_sec: 0, tv_nsec: STOP_CHECK_INTERVAL.as_nanos() as i64 };
    let mut serving = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let mut fds = [PollFd::from_borrowed_fd(listener.as_fd(), PollFlags::IN)];
        poll(&mut fds, Some(&limit)).map_err(LabError::io("the kernel's server failed"))?;
        while let Ok((stream, _)) = listener.accept() {
            let stop = Arc::clone(stop);
            // The application at the other end may be killed at any time.
            serving.push(thread::spawn(move || drop(echo(stream, &stop))));
        }
        serving.retain(|thread| !thread.is_finished());
    }
    for thread in serving {
        let _ = thread.join();
    }
    Ok(())
}

fn echo(mut stream: TcpStream, stop: &AtomicBool) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(STOP_CHECK_INTERVAL))?;
    stream.set_write_timeout(Some(STOP_CHECK_INTERVAL))?;
    rustix::net::sockopt::set_socket_linger(&stream, Some(Duration::ZERO))?;
    let mut piece = vec![0; MAX_PIECE_BYTES];
    while !stop.load(Ordering::Relaxed) {
        let len = match stream.read(&mut piece) {
            Ok(0) => return Ok(()),
            Ok(len) => len,
            Err(error) if is_time_out(&error) => continue,
            Err(error) => return Err(error),
        };
        let mut left = &piece[..len];
        while !left.is_empty() && !stop.load(Ordering::Relaxed) {
            match stream.write(left) {
                Ok(written) => left = &left[written..],
                Err(error) if is_time_out(&error) => {}
                Err(error) => return Err(error),
            }
        }
    }
    Ok(())
}

/// Echoes datagrams of well-behaved applications.
pub(super) fn echo_datagrams(
    address: IpAddr,
    stop: &Arc<AtomicBool>,
    ready: &Sender<()>,
) -> Result<(), LabError> {
    echo_datagrams_at((address, DATAGRAM_PORT).into(), stop, ready)
}

/// Echoes datagrams of all other applications.
pub(super) fn echo_unchecked(
    address: IpAddr,
    stop: &Arc<AtomicBool>,
    ready: &Sender<()>,
) -> Result<(), LabError> {
    echo_datagrams_at((address, UNCHECKED_PORT).into(), stop, ready)
}

fn echo_datagrams_at(
    address: SocketAddr,
    stop: &Arc<AtomicBool>,
    ready: &Sender<()>,
) -> Result<(), LabError> {
    let failed = || LabError::io("the kernel's server failed");
    let socket = UdpSocket::bind(address).map_err(failed())?;
    socket.set_read_timeout(Some(STOP_CHECK_INTERVAL)).map_err(failed())?;
    // The receiver waits for this signal with a time limit.
    let _ = ready.send(());
    let mut bytes = vec![0; 65_536];
    while !stop.load(Ordering::Relaxed) {
        if let Ok((len, from)) = socket.recv_from(&mut bytes) {
            // The sender may have been killed, so a failure to send is ignored.
            let _ = socket.send_to(&bytes[..len], from);
        }
    }
    Ok(())
}

/// Connects to the listeners repeatedly, writes some data and closes old connections.
pub(super) fn connect_repeatedly(listeners: &[SocketAddr], stop: &AtomicBool) {
    let mut streams = std::collections::VecDeque::new();
    let mut rng = fastrand::Rng::with_seed(1);
    while !stop.load(Ordering::Relaxed) {
        for address in listeners {
            if let Ok(mut stream) = TcpStream::connect_timeout(address, STOP_CHECK_INTERVAL) {
                let _ = stream.set_nonblocking(true);
                let _ = rustix::net::sockopt::set_socket_linger(&stream, Some(Duration::ZERO));
                let _ = stream.write(&vec![7; rng.usize(1..MAX_PIECE_BYTES)]);
                streams.push_back(stream);
            }
        }
        if streams.len() > 32 {
            streams.pop_front();
        }
        thread::sleep(Duration::from_millis(2));
    }
}

/// Sends test data to a well-behaved listener and checks the echo. Returns the number of checked
/// bytes.
pub(super) fn check_echo(address: SocketAddr, seed: u64, stop: &AtomicBool) -> io::Result<u64> {
    let mut stream = TcpStream::connect_timeout(&address, REPLY_TIMEOUT)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(REPLY_TIMEOUT))?;
    stream.set_write_timeout(Some(REPLY_TIMEOUT))?;
    let mut checker = EchoChecker::new(seed);
    for _ in 0..PIECES_PER_CONNECTION {
        checker.exchange(&mut stream)?;
        if stop.load(Ordering::Relaxed) {
            break;
        }
    }
    // Close with a reset, after which the application's side keeps no connection state.
    rustix::net::sockopt::set_socket_linger(&stream, Some(Duration::ZERO))?;
    Ok(checker.checked_bytes())
}

/// Pieces of data to exchange over one connection.
pub(super) const PIECES_PER_CONNECTION: usize = 50;

pub(super) fn is_time_out(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted)
}
