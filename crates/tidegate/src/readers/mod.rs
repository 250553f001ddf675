//! Several readers on one bound socket, each with a queue of its own.
//!
//! The thread that runs the stack copies each datagram into the ring of one
//! reader; answers come back by another ring. No two readers ever touch the
//! same index, and none takes a lock for a datagram: `tidegate lab queues`
//! shows why.

pub(crate) mod group;
pub(crate) mod lane;

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use crate::net::{Shared, elsewhere};
use crate::poll::Pollable;
use crate::udp::{Received, UdpSocket};
use crate::wait::{self, Patience};
use lane::{Outbox, ReaderEnd};

/// At most so many datagrams are answered before the answers leave.
const BATCH: usize = 64;

/// Looks at a queue before its reader goes to sleep: a few microseconds.
const LOOKS_BEFORE_SLEEP: usize = 64;

/// A queue is nearly empty when it is no fuller than one part of so many: below
/// the gate's usual low-water mark.
const FEW_PART: usize = 5;

/// Which reader gets a datagram.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Distribution {
    /// The one that the peer's address and port lead to, so that one peer's
    /// datagrams stay in order. What that reader has no room for is dropped.
    #[default]
    FlowHash,
    /// Each in turn, leaving out those that have no room.
    RoundRobin,
    /// The one that has the fewest datagrams waiting.
    LeastLoaded,
}

/// How the readers of a socket shall be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadersConfig {
    /// Which reader gets a datagram.
    pub distribution: Distribution,
    /// How many datagrams may wait for each reader. So many of its answers may
    /// wait to be sent as well.
    pub queue_packets: usize,
    /// How many bytes of them may wait for each reader.
    pub queue_bytes: usize,
    /// How long an answer of [`UdpReader::exchange`] may be.
    pub answer_bytes: usize,
}

impl Default for ReadersConfig {
    fn default() -> Self {
        Self {
            distribution: Distribution::default(),
            queue_packets: 256,
            queue_bytes: 512 << 10,
            answer_bytes: 2048,
        }
    }
}

impl ReadersConfig {
    /// The most datagrams that a queue may hold.
    pub const MOST_PACKETS: usize = 1 << 20;

    fn check(&self) -> io::Result<()> {
        let what = if self.queue_packets == 0 || self.queue_packets > Self::MOST_PACKETS {
            format!("queue_packets is {}: give 1 to {}", self.queue_packets, Self::MOST_PACKETS)
        } else if self.queue_bytes == 0 || self.answer_bytes == 0 {
            "queue_bytes and answer_bytes must be at least 1".to_owned()
        } else {
            return Ok(());
        };
        Err(io::Error::new(io::ErrorKind::InvalidInput, what))
    }
}

/// The readers of one socket. Cheap to clone; they are gone when the last clone
/// and the last reader are.
///
/// While there is a reader, datagrams go to readers and not to
/// [`UdpSocket::recv_from`].
#[derive(Clone, Debug)]
pub struct UdpReaders {
    shared: Arc<Shared>,
    socket: UdpSocket,
    config: ReadersConfig,
}

/// One reader of a socket, for one thread. Dropping it removes it: what it had
/// not read goes to the other readers.
pub struct UdpReader {
    readers: UdpReaders,
    number: u64,
    end: ReaderEnd,
    outbox: Arc<Outbox>,
    answer_bytes: usize,
    /// With so many datagrams left there is room again.
    few_packets: usize,
    read_timeout: Option<Duration>,
    nonblocking: bool,
}

impl UdpSocket {
    /// Lets this socket have several readers. There are none at first: see
    /// [`UdpReaders::add`].
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] for limits of nothing, or if no thread of
    /// its own runs the stack; [`io::ErrorKind::AlreadyExists`] for the second
    /// time.
    pub fn readers(&self, config: ReadersConfig) -> io::Result<UdpReaders> {
        config.check()?;
        if !self.net().has_threads() {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "several readers need a stack with a thread of its own: \
                 open the Net with NetConfig::own_thread(true)",
            ));
        }
        let shared = self.net().here().ok_or_else(|| elsewhere("a socket with several readers"))?;
        shared.lock().groups.open(self.udp_id(), config)?;
        Ok(UdpReaders { shared: Arc::clone(shared), socket: self.clone(), config })
    }
}

impl UdpReaders {
    /// Adds a reader. Its share of the datagrams comes to it from now on;
    /// nothing that waits for others is touched, so for a moment a peer may
    /// have datagrams with two readers.
    ///
    /// # Errors
    /// None while the socket is open.
    pub fn add(&self) -> io::Result<UdpReader> {
        let mut core = self.shared.lock();
        let core = &mut *core;
        let added = core.groups.add(self.socket.udp_id(), &mut core.engine);
        let (number, end) = added.ok_or(io::ErrorKind::NotConnected)?;
        Ok(UdpReader {
            readers: self.clone(),
            number,
            end,
            outbox: Arc::clone(&core.groups.outbox),
            answer_bytes: self.config.answer_bytes,
            few_packets: self.config.queue_packets / FEW_PART,
            read_timeout: None,
            nonblocking: false,
        })
    }

    /// How many readers there are.
    pub fn count(&self) -> usize {
        self.shared.lock().groups.count(self.socket.udp_id())
    }

    /// The socket.
    pub fn socket(&self) -> &UdpSocket {
        &self.socket
    }
}

impl UdpReader {
    /// How long receiving calls wait; `None`, as at first, for ever.
    pub fn set_read_timeout(&mut self, timeout: Option<Duration>) {
        self.read_timeout = timeout;
    }

    /// Whether receiving calls return at once with
    /// [`io::ErrorKind::WouldBlock`] instead of waiting.
    pub fn set_nonblocking(&mut self, nonblocking: bool) {
        self.nonblocking = nonblocking;
    }

    /// How many datagrams wait for this reader.
    pub fn readable(&mut self) -> usize {
        self.end.requests.ready(usize::MAX)
    }

    /// Receives one datagram. What does not fit in `buf` is lost.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] when the time-out is over or the reader is
    /// non-blocking and there is nothing; when the stack has ended.
    pub fn recv_from(&mut self, buf: &mut [u8]) -> io::Result<Received> {
        self.wait()?;
        let (received, bytes) = self.end.requests.slot(0, |slot| {
            let bytes = slot.bytes();
            let len = bytes.len().min(buf.len());
            buf[..len].copy_from_slice(&bytes[..len]);
            let truncated = len < bytes.len();
            let datagram_len = bytes.len();
            (
                Received { len, truncated, datagram_len, from: slot.remote, to: slot.local },
                datagram_len,
            )
        });
        self.end.release(1, bytes);
        self.made_room();
        Ok(received)
    }

    /// Sends one datagram to `to`, from the address `from` of ours. It leaves
    /// when the thread that runs the stack comes by.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] when too many wait to leave.
    pub fn send_to(&mut self, payload: &[u8], to: SocketAddr, from: IpAddr) -> io::Result<()> {
        if self.end.replies.free(1) == 0 {
            self.outbox.ring();
            return Err(io::ErrorKind::WouldBlock.into());
        }
        self.end.replies.slot(0, |slot| slot.fill(to, from, payload));
        self.publish(1);
        Ok(())
    }

    /// Waits for at least one datagram, hands each to `answer` with room to
    /// write the answer to, and sends as many bytes of that as `answer` says;
    /// `None` sends nothing. An answer leaves from the address that was asked.
    /// Returns how many datagrams were taken, at most 64: 0 when the answers
    /// before have not left yet.
    ///
    /// # Errors
    /// As [`UdpReader::recv_from`].
    pub fn exchange(
        &mut self,
        mut answer: impl FnMut(&[u8], SocketAddr, &mut [u8]) -> Option<usize>,
    ) -> io::Result<usize> {
        self.wait()?;
        let room = self.end.replies.free(BATCH).min(BATCH);
        let count = self.end.requests.ready(BATCH).min(room);
        if count == 0 {
            self.outbox.ring();
            std::thread::yield_now();
            return Ok(0);
        }
        let (mut answers, mut bytes) = (0, 0);
        let ReaderEnd { requests, replies, .. } = &mut self.end;
        for ahead in 0..count {
            requests.slot(ahead, |request| {
                bytes += request.bytes().len();
                replies.slot(answers, |reply| {
                    let room = reply.room(self.answer_bytes);
                    let Some(len) = answer(request.bytes(), request.remote, room) else { return };
                    reply.set_len(len);
                    (reply.remote, reply.local) = (request.remote, request.local);
                    answers += 1;
                });
            });
        }
        self.end.release(count, bytes);
        self.publish(answers);
        self.made_room();
        Ok(count)
    }

    /// Waits until a datagram is there, as the reader is set to.
    fn wait(&mut self) -> io::Result<()> {
        let patience =
            if self.nonblocking { Patience::None } else { Patience::timeout(self.read_timeout) };
        if wait_for_any(&mut [self], patience)? {
            return Ok(());
        }
        Err(io::ErrorKind::WouldBlock.into())
    }

    fn publish(&mut self, answers: usize) {
        if answers > 0 {
            self.end.replies.publish(answers);
            let id = self.readers.socket.udp_id();
            self.outbox.list(&self.end.shared, id, self.number);
        }
    }

    /// The engine may wait for that. It is told before the queue is empty, so
    /// that there is something to read while it wakes up.
    fn made_room(&mut self) {
        let few = self.few_packets;
        if self.outbox.wants_room() && self.end.requests.ready(few + 1) <= few {
            self.outbox.ring();
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

/// Waits until one of these readers, of one or of several sockets, has a
/// datagram, at most `timeout` (`None`: for ever). Says whether one has.
///
/// # Errors
/// When a stack has ended.
pub fn wait_readable(readers: &mut [UdpReader], timeout: Option<Duration>) -> io::Result<bool> {
    let mut readers: Vec<&mut UdpReader> = readers.iter_mut().collect();
    wait_for_any(&mut readers, Patience::timeout(timeout))
}

fn wait_for_any(readers: &mut [&mut UdpReader], patience: Patience) -> io::Result<bool> {
    loop {
        for _ in 0..LOOKS_BEFORE_SLEEP {
            if readers.iter_mut().any(|reader| reader.end.requests.ready(1) > 0) {
                return Ok(true);
            }
            std::hint::spin_loop();
        }
        if let Some(reader) = readers.iter().find(|reader| reader.outbox.has_failed()) {
            return Err(reader.failure());
        }
        let left = patience.left();
        if left.is_some_and(|left| left.is_zero()) {
            return Ok(false);
        }
        let bell = wait::thread_bell()?;
        bell.arm();
        for reader in &*readers {
            reader.end.shared.arm(&bell);
        }
        let ready = readers
            .iter_mut()
            .any(|reader| reader.end.requests.ready(1) > 0 || reader.outbox.has_failed());
        let slept = if ready { Ok(()) } else { wait::sleep([], &bell, left) };
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
        core.groups.remove(id, self.number, &mut self.end.requests, &mut core.engine);
        // A port that fails says so to whoever runs the engine next.
        let _ = core.engine.flush();
        core.mind_timers();
    }
}
