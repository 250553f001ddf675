//! The kernel's side: servers that send back what they get, and clients that
//! come to listeners of applications.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::thread;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::data::{Numbers, PIECE};
use crate::LabError;

/// The port of the server for connections.
pub(super) const STREAMS: u16 = 7000;
/// The port of the server for datagrams of honest applications.
pub(super) const DATAGRAMS: u16 = 7001;
/// The port of the server for what others send as fast as they can: what that
/// loses is lost by the kernel.
pub(super) const NOISE: u16 = 7002;

/// How often to look whether it is time to stop.
const LOOK: Duration = Duration::from_millis(100);

/// How long an honest answer may take.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);

/// Sends back what comes by connections. Who closes one is answered by a reset,
/// so that neither side remembers it.
pub(super) fn echo_streams(
    address: IpAddr,
    stop: &Arc<AtomicBool>,
    ready: &Sender<()>,
) -> Result<(), LabError> {
    let failed = || LabError::io("the kernel's server failed");
    let listener = TcpListener::bind((address, STREAMS)).map_err(failed())?;
    listener.set_nonblocking(true).map_err(failed())?;
    // Who waits for it has a limit.
    let _ = ready.send(());
    let limit = Timespec { tv_sec: 0, tv_nsec: LOOK.as_nanos() as i64 };
    let mut serving = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let mut fds = [PollFd::from_borrowed_fd(listener.as_fd(), PollFlags::IN)];
        poll(&mut fds, Some(&limit)).map_err(LabError::io("the kernel's server failed"))?;
        while let Ok((stream, _)) = listener.accept() {
            let stop = Arc::clone(stop);
            // The one at the other end may be killed at any time.
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
    stream.set_read_timeout(Some(LOOK))?;
    stream.set_write_timeout(Some(LOOK))?;
    rustix::net::sockopt::set_socket_linger(&stream, Some(Duration::ZERO))?;
    let mut piece = vec![0; PIECE];
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

/// Sends datagrams back to honest applications.
pub(super) fn echo_datagrams(
    address: IpAddr,
    stop: &Arc<AtomicBool>,
    ready: &Sender<()>,
) -> Result<(), LabError> {
    echo_at((address, DATAGRAMS).into(), stop, ready)
}

/// Sends datagrams back to everybody else.
pub(super) fn echo_noise(
    address: IpAddr,
    stop: &Arc<AtomicBool>,
    ready: &Sender<()>,
) -> Result<(), LabError> {
    echo_at((address, NOISE).into(), stop, ready)
}

fn echo_at(
    address: SocketAddr,
    stop: &Arc<AtomicBool>,
    ready: &Sender<()>,
) -> Result<(), LabError> {
    let failed = || LabError::io("the kernel's server failed");
    let socket = UdpSocket::bind(address).map_err(failed())?;
    socket.set_read_timeout(Some(LOOK)).map_err(failed())?;
    // Who waits for it has a limit.
    let _ = ready.send(());
    let mut bytes = vec![0; 65_536];
    while !stop.load(Ordering::Relaxed) {
        if let Ok((len, from)) = socket.recv_from(&mut bytes) {
            // Somebody who is dead by now gets no answer.
            let _ = socket.send_to(&bytes[..len], from);
        }
    }
    Ok(())
}

/// Comes to listeners again and again, says something and goes.
pub(super) fn visit(listeners: &[SocketAddr], stop: &AtomicBool) {
    let mut visitors = std::collections::VecDeque::new();
    let mut chance = fastrand::Rng::with_seed(1);
    while !stop.load(Ordering::Relaxed) {
        for address in listeners {
            if let Ok(mut stream) = TcpStream::connect_timeout(address, LOOK) {
                let _ = stream.set_nonblocking(true);
                let _ = rustix::net::sockopt::set_socket_linger(&stream, Some(Duration::ZERO));
                let _ = stream.write(&vec![7; chance.usize(1..PIECE)]);
                visitors.push_back(stream);
            }
        }
        if visitors.len() > 32 {
            visitors.pop_front();
        }
        thread::sleep(Duration::from_millis(2));
    }
}

/// Sends numbered bytes to an honest listener and checks what comes back.
/// Returns how many bytes that was.
pub(super) fn check(address: SocketAddr, seed: u64, stop: &AtomicBool) -> io::Result<u64> {
    let mut stream = TcpStream::connect_timeout(&address, PATIENCE)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut numbers = Numbers::new(seed);
    for _ in 0..PIECES {
        numbers.exchange(&mut stream)?;
        if stop.load(Ordering::Relaxed) {
            break;
        }
    }
    // The other side closes: it remembers nothing after a reset.
    rustix::net::sockopt::set_socket_linger(&stream, Some(Duration::ZERO))?;
    Ok(numbers.bytes())
}

/// Pieces that go over one connection.
pub(super) const PIECES: usize = 50;

pub(super) fn is_time_out(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted)
}
