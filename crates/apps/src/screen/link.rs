//! The router's side of a packet screen.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recv,
    send, socket_with,
};
use tidegate::{Arena, DropReason};
use tidegate_stack::Transit;

use super::Verdict;
use super::message::{VERDICTS_MAX_BYTES, put_request, verdicts};

/// The packets that wait for a verdict at most (Mogul and Ramakrishnan,
/// section 6.6.1).
pub const QUEUE_PACKETS: usize = 32;
/// How long a screen may think about a packet.
const VERDICT_TIMEOUT_NS: u64 = 1_000_000_000;
/// How often to look for a screen that is gone.
const RECONNECT_NS: u64 = 100_000_000;

/// Where the screen is.
#[derive(Clone, Debug)]
pub struct ScreenConfig {
    /// The path of the Unix socket that the screen listens on.
    pub path: PathBuf,
    /// The most packets that one message shows to the screen. 1 is one system
    /// call for each packet, as in the paper.
    pub batch: usize,
}

impl ScreenConfig {
    /// A screen at this path, with one message for each packet.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), batch: 1 }
    }
}

/// What passed through a screen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScreenCounters {
    /// Packets that were shown to the screen.
    pub asked: u64,
    /// Packets that it let pass.
    pub passed: u64,
    /// Packets that it refused.
    pub refused: u64,
    /// Times that a connection was made.
    pub connections: u64,
    /// Verdicts about packets that did not wait for one.
    pub stray: u64,
}

/// A packet that waits for its verdict, or a free place for one.
#[derive(Default)]
struct Place {
    transit: Option<Transit>,
    asked_ns: u64,
    /// Counts the packets that had this place, so that a late verdict is not
    /// taken for the next one's.
    generation: u32,
}

/// The connection to a packet screen, and the packets that wait for it.
pub struct ScreenLink {
    config: ScreenConfig,
    socket: Option<OwnedFd>,
    connect_at_ns: u64,
    places: Box<[Place; QUEUE_PACKETS]>,
    free: Vec<usize>,
    /// Requests that were not sent yet, and how many.
    message: Vec<u8>,
    unsent: Vec<usize>,
    buffer: Box<[u8; VERDICTS_MAX_BYTES]>,
    counters: ScreenCounters,
}

impl ScreenLink {
    /// A link that connects when the first packet comes.
    pub fn new(config: ScreenConfig) -> Self {
        Self {
            config,
            socket: None,
            connect_at_ns: 0,
            places: Box::new(std::array::from_fn(|_| Place::default())),
            free: (0..QUEUE_PACKETS).rev().collect(),
            message: Vec::new(),
            unsent: Vec::new(),
            buffer: Box::new([0; VERDICTS_MAX_BYTES]),
            counters: ScreenCounters::default(),
        }
    }

    /// The packets that wait.
    #[inline]
    pub fn waiting(&self) -> usize {
        QUEUE_PACKETS - self.free.len()
    }

    /// What passed so far.
    pub fn counters(&self) -> ScreenCounters {
        self.counters
    }

    /// Whether the screen is there.
    pub fn is_connected(&self) -> bool {
        self.socket.is_some()
    }

    /// Readable when verdicts have come; `None` while there is no screen.
    pub fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        self.socket.as_ref().map(AsFd::as_fd)
    }

    /// Lets a packet wait for its verdict. [`ScreenLink::flush`] sends what
    /// was not sent at once.
    ///
    /// # Errors
    /// Gives the packet back with the reason to drop it for: the queue is
    /// full, or there is no screen.
    pub fn offer(
        &mut self,
        now_ns: u64,
        transit: Transit,
        arena: &Arena,
    ) -> Result<(), (Transit, DropReason)> {
        if self.socket.is_none() && !self.connect(now_ns) {
            return Err((transit, DropReason::ScreenGone));
        }
        let Some(at) = self.free.pop() else {
            return Err((transit, DropReason::ScreenQueueFull));
        };
        let place = &mut self.places[at];
        place.generation = place.generation.wrapping_add(1);
        place.asked_ns = now_ns;
        put_request(&mut self.message, number(at, place.generation), transit.bytes(arena));
        place.transit = Some(transit);
        self.unsent.push(at);
        self.counters.asked += 1;
        Ok(())
    }

    /// Whether as many packets wait to be sent as go into one message.
    #[inline]
    pub fn wants_flush(&self) -> bool {
        self.unsent.len() >= self.config.batch.max(1)
    }

    /// Sends the requests that wait. `dropped` gets the packets that nobody
    /// will judge any more, with the reason.
    pub fn flush(&mut self, dropped: &mut impl FnMut(Transit, DropReason)) {
        if self.unsent.is_empty() {
            return;
        }
        let sent = match &self.socket {
            Some(socket) => send(socket, &self.message, SendFlags::DONTWAIT | SendFlags::NOSIGNAL),
            None => Err(Errno::PIPE),
        };
        self.message.clear();
        match sent {
            Ok(_) => self.unsent.clear(),
            Err(Errno::AGAIN | Errno::NOBUFS | Errno::INTR) => {
                for at in std::mem::take(&mut self.unsent) {
                    self.give_up(at, DropReason::ScreenQueueFull, dropped);
                }
            }
            Err(_) => self.disconnect(dropped),
        }
    }

    /// Takes messages of verdicts until `quota` packets are judged; returns how
    /// many were. `judged` gets each packet and whether it passes; `dropped`
    /// those that nobody will judge any more. No more messages are read than
    /// packets can wait, so that a screen that talks without end stops nothing.
    pub fn collect(
        &mut self,
        quota: usize,
        judged: &mut impl FnMut(Transit, Verdict),
        dropped: &mut impl FnMut(Transit, DropReason),
    ) -> usize {
        let mut count = 0;
        for _ in 0..QUEUE_PACKETS {
            if count >= quota {
                break;
            }
            let Some(socket) = &self.socket else { break };
            match recv(socket, &mut self.buffer[..], RecvFlags::DONTWAIT) {
                Ok((0, _)) => self.disconnect(dropped),
                Ok((len, _)) => count += self.judge(len, judged),
                Err(Errno::AGAIN) => break,
                Err(Errno::INTR) => {}
                Err(_) => self.disconnect(dropped),
            }
        }
        count
    }

    /// Gives up the packets that a screen has thought about for too long: one
    /// that is stopped must not hold them for ever. To be called now and then.
    pub fn expire(&mut self, now_ns: u64, dropped: &mut impl FnMut(Transit, DropReason)) {
        for at in 0..QUEUE_PACKETS {
            let place = &self.places[at];
            let late = now_ns.saturating_sub(place.asked_ns) >= VERDICT_TIMEOUT_NS;
            if place.transit.is_some() && late {
                self.give_up(at, DropReason::ScreenGone, dropped);
            }
        }
    }

    /// Reads the first `len` bytes of the buffer, which may hold anything.
    fn judge(&mut self, len: usize, judged: &mut impl FnMut(Transit, Verdict)) -> usize {
        let mut count = 0;
        let message = self.buffer.get(..len).unwrap_or(&self.buffer[..]);
        for (number, verdict) in verdicts(message) {
            let at = number as usize % QUEUE_PACKETS;
            let place = &mut self.places[at];
            let waits = self::number(at, place.generation) == number;
            let Some(transit) = place.transit.take_if(|_| waits) else {
                self.counters.stray += 1;
                continue;
            };
            self.free.push(at);
            count += 1;
            match verdict {
                Verdict::Pass => self.counters.passed += 1,
                Verdict::Refuse => self.counters.refused += 1,
            }
            judged(transit, verdict);
        }
        count
    }

    fn give_up(
        &mut self,
        at: usize,
        reason: DropReason,
        dropped: &mut impl FnMut(Transit, DropReason),
    ) {
        if let Some(transit) = self.places[at].transit.take() {
            self.free.push(at);
            dropped(transit, reason);
        }
    }

    /// The screen is gone, and with it every verdict that was to come.
    fn disconnect(&mut self, dropped: &mut impl FnMut(Transit, DropReason)) {
        self.socket = None;
        self.unsent.clear();
        self.message.clear();
        for at in 0..QUEUE_PACKETS {
            self.give_up(at, DropReason::ScreenGone, dropped);
        }
    }

    #[cold]
    fn connect(&mut self, now_ns: u64) -> bool {
        if now_ns < self.connect_at_ns {
            return false;
        }
        self.connect_at_ns = now_ns.saturating_add(RECONNECT_NS);
        self.socket = open(&self.config.path).ok();
        self.counters.connections += u64::from(self.socket.is_some());
        self.socket.is_some()
    }

    /// Every packet that waits: for when the router is taken down.
    pub fn release(&mut self, dropped: &mut impl FnMut(Transit, DropReason)) {
        self.disconnect(dropped);
    }
}

fn open(path: &Path) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

/// The number of the packet at a place.
fn number(at: usize, generation: u32) -> u32 {
    generation.wrapping_mul(QUEUE_PACKETS as u32).wrapping_add(at as u32)
}
