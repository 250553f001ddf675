//! Runs a [`Responder`] on Tidegate, with the stack embedded in this process.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tidegate::{DatagramMeta, Net, Poll, ServiceTimes, TcpListener, Token, UdpRequest, UdpSocket};

use crate::messages::MessageServer;
use crate::responder::unix_time_ns;
use crate::{DurationCounts, MessageLimits, Responder, ServeCounters};

/// Requests received per batch from a stack that has its own threads.
const BATCH_DATAGRAMS: usize = 64;

/// Longest datagram received from or sent to a stack that has its own threads.
const MAX_DATAGRAM_BYTES: usize = 65_535;

/// Interval at which an idle server checks its stop flag.
const STOP_CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// State that a serving loop shares with other threads.
#[derive(Clone, Copy, Debug)]
pub struct ServeState<'a> {
    /// Ends the loop.
    pub stop: &'a AtomicBool,
    /// Counts requests and replies.
    pub counters: &'a ServeCounters,
    /// Counts the service times of datagrams, unless `None`: from the arrival of a burst in the core
    /// until the device has the replies. With readers until the core has them; not counted on
    /// another stack that has its own threads.
    pub durations: Option<&'a DurationCounts>,
}

/// Serves all `sockets` of the stack `net` with `responder` until `stop` is set, which is noticed
/// within 100 ms. Sleeps while no datagram arrives.
///
/// Requests are answered in place, without a copy. A stack with its own threads is the exception:
/// its threads must not wait for the responder, so requests and replies are copied. Replies leave
/// from the address that the request was sent to.
///
/// The sockets are made non-blocking. Each set of counters belongs to one serving loop.
///
/// # Errors
/// When the device fails for good. A reply that cannot be sent is counted by the stack and is no
/// error.
///
/// # Examples
/// An echo server at one end of an in-memory link:
/// ```no_run
/// use std::sync::atomic::AtomicBool;
///
/// use tidegate::{Net, NetConfig, UdpSocket};
/// use tidegate_apps::ServeCounters;
/// use tidegate_apps::echo::Echo;
/// use tidegate_apps::embedded::serve_embedded;
///
/// let (device, _peer) = tidegate::mem::wire(&Default::default())?;
/// let net = Net::open(NetConfig::new(device).address("192.0.2.1/24".parse()?))?;
/// let socket = UdpSocket::bind(&net, "192.0.2.1:7")?;
/// let (stop, counters) = (AtomicBool::new(false), ServeCounters::new());
/// serve_embedded(&net, &[socket], &mut Echo, &stop, &counters)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn serve_embedded(
    net: &Net,
    sockets: &[UdpSocket],
    responder: &mut impl Responder,
    stop: &AtomicBool,
    counters: &ServeCounters,
) -> io::Result<()> {
    let state = ServeState { stop, counters, durations: None };
    serve_udp_and_tcp(net, sockets, &[], MessageLimits::default(), responder, state)
}

/// As [`serve_embedded`], and also serves messages over TCP connections accepted from
/// `listeners`, within `limits`. Each message has a two-byte length prefix, as in DNS over TCP
/// (RFC 7766). While datagrams arrive as fast as they can be answered, connections are served
/// between batches of datagrams.
///
/// # Errors
/// As [`serve_embedded`].
pub fn serve_udp_and_tcp(
    net: &Net,
    sockets: &[UdpSocket],
    listeners: &[TcpListener],
    limits: MessageLimits,
    responder: &mut impl Responder,
    state: ServeState<'_>,
) -> io::Result<()> {
    let ServeState { stop, counters, durations } = state;
    let mut poll = Poll::new(net);
    for (index, socket) in sockets.iter().enumerate() {
        socket.set_nonblocking(true)?;
        poll.register(socket, Token(index))?;
    }
    let poll = poll;
    let mut streams = MessageServer::new(net, &poll, listeners, sockets.len(), limits)?;
    let mut ready = Vec::with_capacity(sockets.len());
    let mut batch_buffers = net.has_threads().then(BatchBuffers::new);
    let mut times: Vec<_> = sockets.iter().map(|_| ServiceTimes::default()).collect();
    while !stop.load(Ordering::Relaxed) {
        responder.start_batch(&unix_time_ns);
        let mut served = 0;
        for (socket, times) in sockets.iter().zip(&mut times) {
            served += match &mut batch_buffers {
                Some(buffers) => buffers.serve_batch(socket, responder, counters)?,
                None => {
                    let timed = durations.map(|durations| (times, durations));
                    serve_batch(socket, responder, counters, timed)?
                }
            };
        }
        if served == 0 {
            responder.on_idle();
            poll.wait(&mut ready, Some(STOP_CHECK_INTERVAL))?;
        } else if streams.has_listeners() {
            poll.ready_now(&mut ready);
        }
        streams.serve(&ready, responder, counters)?;
    }
    Ok(())
}

/// Answers a batch of datagrams in their frames, and counts them, also by their service times if
/// `timed`. Returns their number.
fn serve_batch(
    socket: &UdpSocket,
    responder: &mut impl Responder,
    counters: &ServeCounters,
    timed: Option<(&mut ServiceTimes, &DurationCounts)>,
) -> io::Result<usize> {
    let mut replies = 0;
    let respond = |request: UdpRequest<'_>, reply: &mut [u8]| {
        let len = responder.respond(request.bytes, request.from, reply);
        replies += u64::from(len.is_some());
        len
    };
    let exchanged = match timed {
        None => socket.exchange(respond),
        Some((times, durations)) => {
            let exchanged = socket.exchange_timed(times, respond);
            durations.record_last(times);
            exchanged
        }
    };
    match exchanged {
        Ok(requests) => {
            ServeCounters::add(&counters.requests, requests as u64);
            ServeCounters::add(&counters.replies, replies);
            Ok(requests)
        }
        Err(error) if is_transient(&error) => Ok(0),
        Err(error) => Err(error),
    }
}

/// Buffers for the requests and replies of one batch.
struct BatchBuffers {
    requests: Vec<u8>,
    replies: Vec<u8>,
    received: Vec<DatagramMeta>,
}

impl BatchBuffers {
    fn new() -> Self {
        let new_buffer = || vec![0; BATCH_DATAGRAMS * MAX_DATAGRAM_BYTES];
        Self {
            requests: new_buffer(),
            replies: new_buffer(),
            received: Vec::with_capacity(BATCH_DATAGRAMS),
        }
    }

    /// As [`serve_batch`], without locking the stack while the responder runs.
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
            Err(error) if is_transient(&error) => return Ok(0),
            Err(error) => return Err(error),
        }
        let mut replies = Vec::with_capacity(self.received.len());
        let reply_buffers = self.replies.chunks_exact_mut(MAX_DATAGRAM_BYTES);
        for ((request, received), reply) in buffers.iter().zip(&self.received).zip(reply_buffers) {
            let len = responder.respond(&request[..received.len], received.from, reply);
            // Counted one by one: a batch of slow replies takes long.
            ServeCounters::add(&counters.requests, 1);
            if let Some(len) = len {
                replies.push((&reply[..len], received.from));
            }
        }
        ServeCounters::add(&counters.replies, replies.len() as u64);
        match socket.send_batch(&replies) {
            Ok(_) => {}
            // Replies that cannot be sent are lost, as on any network.
            Err(error) if is_transient(&error) => {}
            Err(error) => return Err(error),
        }
        Ok(self.received.len())
    }
}

/// True when no datagram is ready, or when an earlier reply did not reach its peer: the socket
/// itself is fine in both cases.
fn is_transient(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock
            | io::ErrorKind::Interrupted
            | io::ErrorKind::ConnectionRefused
            | io::ErrorKind::HostUnreachable
            | io::ErrorKind::NetworkUnreachable
    )
}
