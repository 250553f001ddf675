//! Several readers on one bound UDP socket, each with a queue of its own.
//!
//! The thread that runs the stack copies each datagram into the ring of one reader; replies
//! return through a second ring. Each ring has one producer and one consumer, and no lock is
//! taken per datagram: `tidegate lab queues` measures the difference.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use tidegate_engine::Clock;

use super::socket::UdpSocket;
use crate::backend::embedded::reader_ring::{PendingReplies, ReaderEnd};
use crate::backend::embedded::stack::EmbeddedStack;
use crate::net::source::Pollable;
use crate::types::datagram::DatagramMeta;
use crate::types::deadline::Deadline;
use crate::types::errors::unsupported_when_attached;
use crate::types::readers::ReadersConfig;
use crate::types::service_times::ServiceTimes;
use crate::types::sleeper;

/// Most datagrams answered before the replies are transmitted.
const MAX_BATCH_DATAGRAMS: usize = 64;

/// Polls of a queue before its reader sleeps: a few microseconds.
const POLLS_BEFORE_SLEEP: usize = 64;

/// A queue is at its low-water mark when at most 1/5 full: below the gate's usual low-water
/// mark.
const LOW_WATER_DIVISOR: usize = 5;

/// Readers of one socket. Cheap to clone; they keep the socket open until the last clone and
/// the last reader are dropped.
///
/// While there is a reader, datagrams go to readers and not to [`UdpSocket::recv_from`].
///
/// # Examples
/// ```
/// use tidegate::{Net, NetConfig, ReadersConfig, UdpSocket};
///
/// let (device_a, device_b) = tidegate::mem::wire(&Default::default())?;
/// let server = NetConfig::new(device_a).address("192.0.2.1/24".parse().unwrap());
/// // Readers need a thread that drives the stack.
/// let server = Net::open(server.own_thread(true))?;
/// let client = NetConfig::new(device_b).address("192.0.2.2/24".parse().unwrap());
/// let client = Net::open(client.own_thread(true))?;
///
/// let readers = UdpSocket::bind(&server, "192.0.2.1:7")?.readers(ReadersConfig::default())?;
/// let mut reader = readers.add()?;
/// let echo = std::thread::spawn(move || {
///     // Copies each request into the reply buffer and sends it back.
///     reader.exchange(|request, _peer, reply| {
///         reply[..request.len()].copy_from_slice(request);
///         Some(request.len())
///     })
/// });
///
/// let socket = UdpSocket::bind(&client, "192.0.2.2:0")?;
/// socket.send_to(b"hello", "192.0.2.1:7")?;
/// let mut buf = [0; 64];
/// let (len, _) = socket.recv_from(&mut buf)?;
/// assert_eq!(&buf[..len], b"hello");
/// assert_eq!(echo.join().unwrap()?, 1);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct UdpReaders {
    shared: Arc<EmbeddedStack>,
    socket: UdpSocket,
    config: ReadersConfig,
}

/// One reader of a socket, for one thread. Dropping a reader removes it: its unread datagrams
/// go to the other readers.
pub struct UdpReader {
    readers: UdpReaders,
    number: u64,
    end: ReaderEnd,
    pending_replies: Arc<PendingReplies>,
    max_reply_bytes: usize,
    /// Low-water mark in datagrams: at or below it, the reader reports freed space.
    low_water_packets: usize,
    read_timeout: Option<Duration>,
    nonblocking: bool,
    /// Clock of the core, while service times are measured.
    clock: Option<Clock>,
}

impl UdpSocket {
    /// Allows several readers on this socket. There are none at first: see
    /// [`UdpReaders::add`].
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] for limits out of range, or if no dedicated thread
    /// drives the stack; [`io::ErrorKind::AlreadyExists`] if the socket already has readers.
    pub fn readers(&self, config: ReadersConfig) -> io::Result<UdpReaders> {
        config.check()?;
        if !self.net().has_threads() {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "several readers need a dedicated thread that drives the stack: \
                 open the Net with NetConfig::own_thread(true)",
            ));
        }
        let shared = self
            .net()
            .embedded()
            .ok_or_else(|| unsupported_when_attached("a socket with several readers"))?;
        shared.lock().reader_groups.open(self.udp_id(), config)?;
        Ok(UdpReaders { shared: Arc::clone(shared), socket: self.clone(), config })
    }
}

impl UdpReaders {
    /// Adds a reader. New datagrams are distributed over it from now on. Datagrams queued for
    /// other readers stay there, so one peer may have datagrams with two readers for a moment.
    ///
    /// # Errors
    /// None while the socket is open.
    pub fn add(&self) -> io::Result<UdpReader> {
        let mut core = self.shared.lock();
        let core = &mut *core;
        let added = core.reader_groups.add(self.socket.udp_id(), &mut core.engine);
        let (number, end) = added.ok_or(io::ErrorKind::NotConnected)?;
        Ok(UdpReader {
            readers: self.clone(),
            number,
            end,
            pending_replies: Arc::clone(&core.reader_groups.pending_replies),
            max_reply_bytes: self.config.max_reply_bytes,
            low_water_packets: self.config.queue_packets / LOW_WATER_DIVISOR,
            read_timeout: None,
            nonblocking: false,
            clock: None,
        })
    }

    /// Number of readers.
    pub fn count(&self) -> usize {
        self.shared.lock().reader_groups.count(self.socket.udp_id())
    }

    /// The socket that is read.
    pub fn socket(&self) -> &UdpSocket {
        &self.socket
    }
}

impl UdpReader {
    /// Sets the timeout of receiving calls; `None`, the default, waits without limit.
    pub fn set_read_timeout(&mut self, timeout: Option<Duration>) {
        self.read_timeout = timeout;
    }

    /// Makes receiving calls return [`io::ErrorKind::WouldBlock`] instead of waiting.
    pub fn set_nonblocking(&mut self, nonblocking: bool) {
        self.nonblocking = nonblocking;
    }

    /// Number of datagrams queued for this reader.
    pub fn readable(&mut self) -> usize {
        self.end.requests.ready_slots(usize::MAX)
    }

    /// Receives one datagram. Bytes beyond the length of `buf` are lost.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] when the timeout expires, or the reader is non-blocking and
    /// its queue is empty; the stack's error when the stack has failed.
    pub fn recv_from(&mut self, buf: &mut [u8]) -> io::Result<DatagramMeta> {
        self.wait()?;
        let (received, bytes) = self.end.requests.slot(0, |slot| {
            let bytes = slot.bytes();
            let len = bytes.len().min(buf.len());
            buf[..len].copy_from_slice(&bytes[..len]);
            let truncated = len < bytes.len();
            let datagram_len = bytes.len();
            let received = DatagramMeta {
                len,
                truncated,
                datagram_len,
                from: slot.remote,
                to: slot.local,
                hop_limit: None,
                traffic_class: None,
                received_ns: None,
            };
            (received, datagram_len)
        });
        self.end.release(1, bytes);
        self.on_space_freed();
        Ok(received)
    }

    /// Sends one datagram to `to` from the local address `from`. The thread that drives the
    /// stack transmits it.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] when the reply queue is full.
    pub fn send_to(&mut self, payload: &[u8], to: SocketAddr, from: IpAddr) -> io::Result<()> {
        if self.end.replies.free_slots(1) == 0 {
            self.pending_replies.ring();
            return Err(io::ErrorKind::WouldBlock.into());
        }
        self.end.replies.slot(0, |slot| slot.fill(to, from, payload));
        self.publish(1);
        Ok(())
    }

    /// Waits for at least one datagram, and passes each to `respond` with a buffer for the
    /// reply. `respond` returns the reply's length in bytes, or `None` to send nothing. The
    /// reply leaves from the address that the datagram was sent to. Returns the number of
    /// datagrams taken, at most 64; 0 when the reply queue is full.
    ///
    /// # Errors
    /// As [`UdpReader::recv_from`].
    pub fn exchange(
        &mut self,
        respond: impl FnMut(&[u8], SocketAddr, &mut [u8]) -> Option<usize>,
    ) -> io::Result<usize> {
        self.exchange_batch(respond, |_| ())
    }

    /// Like [`UdpReader::exchange`], and measures how long the datagrams took from their arrival in
    /// the core until the replies were on their way back to it. Afterwards [`ServiceTimes::last`]
    /// has the times of this exchange. `times` belongs to this reader alone, and to all of its
    /// exchanges.
    ///
    /// # Errors
    /// As [`UdpReader::exchange`].
    pub fn exchange_timed(
        &mut self,
        times: &mut ServiceTimes,
        respond: impl FnMut(&[u8], SocketAddr, &mut [u8]) -> Option<usize>,
    ) -> io::Result<usize> {
        times.clear_last();
        let clock = *self.clock.get_or_insert_with(|| {
            let mut core = self.readers.shared.lock();
            core.engine.measure_arrivals();
            core.engine.clock()
        });
        let taken = self.exchange_batch(respond, |arrival_ns| times.on_taken(arrival_ns))?;
        times.on_answered(taken, || clock.now_ns());
        Ok(taken)
    }

    /// Answers a batch of datagrams, each noted with the time of its arrival.
    fn exchange_batch(
        &mut self,
        mut respond: impl FnMut(&[u8], SocketAddr, &mut [u8]) -> Option<usize>,
        mut note: impl FnMut(Option<u64>),
    ) -> io::Result<usize> {
        self.wait()?;
        let space = self.end.replies.free_slots(MAX_BATCH_DATAGRAMS).min(MAX_BATCH_DATAGRAMS);
        let count = self.end.requests.ready_slots(MAX_BATCH_DATAGRAMS).min(space);
        if count == 0 {
            self.pending_replies.ring();
            std::thread::yield_now();
            return Ok(0);
        }
        let (mut reply_count, mut bytes) = (0, 0);
        let ReaderEnd { requests, replies, .. } = &mut self.end;
        for ahead in 0..count {
            requests.slot(ahead, |request| {
                bytes += request.bytes().len();
                note(request.arrival_ns);
                replies.slot(reply_count, |reply| {
                    let buffer = reply.buffer_mut(self.max_reply_bytes);
                    let Some(len) = respond(request.bytes(), request.remote, buffer) else {
                        return;
                    };
                    reply.set_len(len);
                    (reply.remote, reply.local) = (request.remote, request.local);
                    reply_count += 1;
                });
            });
        }
        self.end.release(count, bytes);
        self.publish(reply_count);
        self.on_space_freed();
        Ok(count)
    }

    /// Waits for a datagram, for at most the configured timeout.
    fn wait(&mut self) -> io::Result<()> {
        let deadline =
            if self.nonblocking { Deadline::Now } else { Deadline::after(self.read_timeout) };
        if wait_for_any(&mut [self], deadline)? {
            return Ok(());
        }
        Err(io::ErrorKind::WouldBlock.into())
    }

    fn publish(&mut self, count: usize) {
        if count > 0 {
            self.end.replies.publish(count);
            let id = self.readers.socket.udp_id();
            self.pending_replies.mark_pending(&self.end.shared, id, self.number);
        }
    }

    /// Reports freed space to a waiting engine. The report comes before the queue is empty, so
    /// that the reader has work while the engine wakes up.
    fn on_space_freed(&mut self) {
        let low_water = self.low_water_packets;
        if self.pending_replies.wants_space()
            && self.end.requests.ready_slots(low_water + 1) <= low_water
        {
            self.pending_replies.ring();
        }
    }

    fn failure(&self) -> io::Error {
        let core = self.readers.shared.lock();
        let failure = core.failure.as_ref();
        failure.map_or_else(
            || io::ErrorKind::NotConnected.into(),
            |failure| io::Error::new(failure.kind(), failure.to_string()),
        )
    }
}

/// Waits until one of the readers, of one or of several sockets, has a datagram, for at most
/// `timeout` (`None`: no limit). Returns true if a reader has one.
///
/// # Errors
/// When a stack has failed.
pub fn wait_readable(readers: &mut [UdpReader], timeout: Option<Duration>) -> io::Result<bool> {
    let mut readers: Vec<&mut UdpReader> = readers.iter_mut().collect();
    wait_for_any(&mut readers, Deadline::after(timeout))
}

fn wait_for_any(readers: &mut [&mut UdpReader], deadline: Deadline) -> io::Result<bool> {
    // A call that does not wait asks once.
    let polls = if matches!(deadline, Deadline::Now) { 1 } else { POLLS_BEFORE_SLEEP };
    loop {
        for _ in 0..polls {
            if readers.iter_mut().any(|reader| reader.end.requests.ready_slots(1) > 0) {
                return Ok(true);
            }
            std::hint::spin_loop();
        }
        if let Some(reader) = readers.iter().find(|reader| reader.pending_replies.has_failed()) {
            return Err(reader.failure());
        }
        let remaining = deadline.remaining();
        if remaining.is_some_and(|left| left.is_zero()) {
            return Ok(false);
        }
        let bell = sleeper::thread_bell()?;
        bell.arm();
        for reader in &*readers {
            reader.end.shared.arm(&bell);
        }
        let ready = readers.iter_mut().any(|reader| {
            reader.end.requests.ready_slots(1) > 0 || reader.pending_replies.has_failed()
        });
        let slept = if ready { Ok(()) } else { sleeper::sleep([], &bell, remaining) };
        for reader in &*readers {
            reader.end.shared.disarm();
        }
        bell.disarm();
        slept?;
    }
}

impl std::fmt::Debug for UdpReader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("UdpReader")
            .field("socket", &self.readers.socket)
            .field("number", &self.number)
            .finish_non_exhaustive()
    }
}

impl Drop for UdpReader {
    fn drop(&mut self) {
        let mut core = self.readers.shared.lock();
        let core = &mut *core;
        let id = self.readers.socket.udp_id();
        core.reader_groups.remove(id, self.number, &mut self.end.requests, &mut core.engine);
        // A device error is reported by the engine's next run.
        let _ = core.engine.flush();
        core.wake_for_timers();
    }
}
