//! Runs a [`Responder`] on Tidegate, embedded in this program.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tidegate::{Net, Poll, Received, TcpListener, Token, UdpSocket};

use crate::messages::MessageServer;
use crate::{MessageLimits, Responder, ServeCounters};

/// How many requests are taken at once from a stack with threads of its own.
const BATCH: usize = 64;

/// The longest datagram that is taken from or given to such a stack.
const MAX_DATAGRAM_BYTES: usize = 65_535;

/// How often an idle server looks at its stop flag.
const STOP_CHECK: Duration = Duration::from_millis(100);

/// Serves `sockets`, all of the stack `net`, with `responder` until `stop` is
/// set, which is noticed within a tenth of a second. Sleeps while nothing
/// arrives. Requests are answered where they lie: nothing is copied, unless
/// threads of the stack's own run it: those must not wait for an answer, so
/// requests and replies are copied then. Replies leave from the address that
/// was asked.
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
    serve_both(net, sockets, &[], MessageLimits::default(), responder, stop, counters)
}

/// As [`serve_embedded`], and answers messages over streams too, each with its
/// length in two bytes in front, as DNS has them (RFC 7766): connections
/// through `listeners`, within `limits`. While datagrams come as fast as they
/// can be answered, streams have their turns in between.
///
/// # Errors
/// As [`serve_embedded`].
pub fn serve_both(
    net: &Net,
    sockets: &[UdpSocket],
    listeners: &[TcpListener],
    limits: MessageLimits,
    responder: &mut impl Responder,
    stop: &AtomicBool,
    counters: &ServeCounters,
) -> io::Result<()> {
    let mut poll = Poll::new(net);
    for (index, socket) in sockets.iter().enumerate() {
        socket.set_nonblocking(true)?;
        poll.register(socket, Token(index))?;
    }
    let poll = poll;
    let mut streams = MessageServer::new(net, &poll, listeners, sockets.len(), limits)?;
    let mut ready = Vec::with_capacity(sockets.len());
    let mut copies = net.has_threads().then(Copies::new);
    while !stop.load(Ordering::Relaxed) {
        let mut served = 0;
        for socket in sockets {
            served += match &mut copies {
                Some(copies) => copies.serve_batch(socket, responder, counters)?,
                None => serve_batch(socket, responder, counters)?,
            };
        }
        if served == 0 {
            poll.wait(&mut ready, Some(STOP_CHECK))?;
        } else if streams.is_used() {
            poll.ready_now(&mut ready);
        }
        streams.serve(&ready, responder, counters)?;
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

/// Requests and replies of one batch.
struct Copies {
    requests: Vec<u8>,
    replies: Vec<u8>,
    received: Vec<Received>,
}

impl Copies {
    fn new() -> Self {
        let room = || vec![0; BATCH * MAX_DATAGRAM_BYTES];
        Self { requests: room(), replies: room(), received: Vec::with_capacity(BATCH) }
    }

    /// As [`serve_batch`], without holding the stack meanwhile.
    fn serve_batch(
        &mut self,
        socket: &UdpSocket,
        responder: &mut impl Responder,
        counters: &ServeCounters,
    ) -> io::Result<usize> {
        let mut buffers: Vec<&mut [u8]> =
            self.requests.chunks_exact_mut(MAX_DATAGRAM_BYTES).collect();
        match socket.recv_batch(&mut buffers, &mut self.received) {
            Ok(()) => {}
            Err(error) if is_about_one_peer(&error) => return Ok(0),
            Err(error) => return Err(error),
        }
        let mut answers = Vec::with_capacity(self.received.len());
        let rooms = self.replies.chunks_exact_mut(MAX_DATAGRAM_BYTES);
        for ((request, received), reply) in buffers.iter().zip(&self.received).zip(rooms) {
            let len = responder.respond(&request[..received.len], received.from, reply);
            // Counted one by one: a batch of slow answers is long.
            ServeCounters::add(&counters.requests, 1);
            if let Some(len) = len {
                answers.push((&reply[..len], received.from));
            }
        }
        ServeCounters::add(&counters.answers, answers.len() as u64);
        match socket.send_batch(&answers) {
            Ok(_) => {}
            // What cannot be sent is lost, as on any network.
            Err(error) if is_about_one_peer(&error) => {}
            Err(error) => return Err(error),
        }
        Ok(self.received.len())
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
