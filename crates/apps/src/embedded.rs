//! Runs a [`Responder`] on Tidegate, embedded in this program.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tidegate::{Net, Poll, Token, UdpSocket};

use crate::{Responder, ServeCounters};

/// How often an idle server looks at its stop flag.
const STOP_CHECK: Duration = Duration::from_millis(100);

/// Serves `sockets`, all of the stack `net`, with `responder` until `stop` is
/// set, which is noticed within a tenth of a second. Sleeps while nothing
/// arrives. Requests are answered where they lie: nothing is copied. Replies
/// leave from the address that was asked.
///
/// The sockets are made non-blocking. Each set of counters belongs to one
/// serving loop.
///
/// # Errors
/// When the port is of no further use. A reply that cannot be sent is counted
/// by the stack, not an error.
pub fn serve_embedded(
    net: &Net,
    sockets: &[UdpSocket],
    responder: &mut impl Responder,
    stop: &AtomicBool,
    counters: &ServeCounters,
) -> io::Result<()> {
    let mut poll = Poll::new(net);
    for (index, socket) in sockets.iter().enumerate() {
        socket.set_nonblocking(true)?;
        poll.register(socket, Token(index))?;
    }
    let mut ready = Vec::with_capacity(sockets.len());
    while !stop.load(Ordering::Relaxed) {
        let mut served = 0;
        for socket in sockets {
            served += serve_batch(socket, responder, counters)?;
        }
        if served == 0 {
            poll.wait(&mut ready, Some(STOP_CHECK))?;
        }
    }
    Ok(())
}

/// Answers what waits on one socket, at most a batch. Returns how many
/// datagrams were taken.
fn serve_batch(
    socket: &UdpSocket,
    responder: &mut impl Responder,
    counters: &ServeCounters,
) -> io::Result<usize> {
    let mut answers = 0;
    let exchanged = socket.exchange(|request, reply| {
        let len = responder.respond(request.bytes, request.from, reply);
        answers += u64::from(len.is_some());
        len
    });
    match exchanged {
        Ok(requests) => {
            ServeCounters::add(&counters.requests, requests as u64);
            ServeCounters::add(&counters.answers, answers);
            Ok(requests)
        }
        Err(error) if is_about_one_peer(&error) => Ok(0),
        Err(error) => Err(error),
    }
}

/// Nothing to do right now, or an earlier answer did not arrive: both are no
/// trouble of the socket.
fn is_about_one_peer(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock
            | io::ErrorKind::Interrupted
            | io::ErrorKind::ConnectionRefused
            | io::ErrorKind::HostUnreachable
            | io::ErrorKind::NetworkUnreachable
    )
}
