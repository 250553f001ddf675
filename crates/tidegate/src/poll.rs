//! Readiness: wait for the first of many sockets.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::io;
use std::time::Duration;

use tidegate_stack::{Stack, TcpId};

use crate::net::Net;
use crate::wait::{ById, Patience, SetNumber, SocketId, Waiters};

/// What a program calls a socket that it has registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Token(pub usize);

/// What a program waits for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Interest {
    /// That something can be read: data, the end of it, a connection to be
    /// accepted, an error.
    #[default]
    Readable,
    /// That something can be written, or that a connection is established or
    /// has failed. A UDP socket is always writable.
    Writable,
    /// Either.
    Both,
}

impl Interest {
    fn has(self, other: Interest) -> bool {
        self == other || self == Interest::Both
    }
}

/// A socket that a [`Poll`] can wait for: [`crate::UdpSocket`],
/// [`crate::TcpListener`] and [`crate::TcpStream`].
#[expect(private_bounds, reason = "only sockets of this crate can be waited for")]
pub trait Source: Pollable {}

/// What a [`Poll`] needs to know of a socket.
pub(crate) trait Pollable {
    fn net(&self) -> &Net;
    fn id(&self) -> SocketId;
}

/// A set of sockets of one [`Net`] to wait for. It costs nothing to have many
/// sockets in a set, only those that are ready.
///
/// Level triggered: a socket is reported as long as it is ready.
#[derive(Debug)]
pub struct Poll {
    net: Net,
    number: SetNumber,
}

impl Poll {
    /// An empty set.
    pub fn new(net: &Net) -> Self {
        let number = net.lock().polls.add();
        Self { net: net.clone(), number }
    }

    pub(crate) fn number(&self) -> SetNumber {
        self.number
    }

    /// Adds a socket, to wait until it is readable.
    ///
    /// # Errors
    /// As [`Poll::register_for`].
    pub fn register(&mut self, socket: &impl Source, token: Token) -> io::Result<()> {
        self.register_for(socket, token, Interest::Readable)
    }

    /// Adds a socket.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] when the socket is of another [`Net`],
    /// [`io::ErrorKind::AlreadyExists`] when it is in the set.
    pub fn register_for(
        &mut self,
        socket: &impl Source,
        token: Token,
        interest: Interest,
    ) -> io::Result<()> {
        if !socket.net().is_same(&self.net) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "the socket belongs to another Net: use one Poll per Net",
            ));
        }
        let mut core = self.net.lock();
        core.polls.insert(self.number, socket.id(), token, interest)
    }

    /// Changes what to wait for.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotFound`] when the socket is not in the set.
    pub fn reregister(
        &mut self,
        socket: &impl Source,
        token: Token,
        interest: Interest,
    ) -> io::Result<()> {
        let changed = self.net.lock().polls.change(self.number, socket.id(), token, interest);
        if changed { Ok(()) } else { Err(io::ErrorKind::NotFound.into()) }
    }

    /// Takes a socket out of the set. One that is closed leaves by itself.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotFound`] when it is not in the set.
    pub fn deregister(&mut self, socket: &impl Source) -> io::Result<()> {
        let removed = self.net.lock().polls.remove(self.number, socket.id());
        if removed { Ok(()) } else { Err(io::ErrorKind::NotFound.into()) }
    }

    /// Waits until a socket of the set is ready, at most `timeout` (`None`: for
    /// ever), and puts the tokens of all that are into `ready`, which is
    /// cleared first. An empty `ready` says that the time is over.
    ///
    /// # Errors
    /// When the port is of no further use.
    pub fn wait(&self, ready: &mut Vec<Token>, timeout: Option<Duration>) -> io::Result<()> {
        ready.clear();
        let ids = [SocketId::Poll(self.number)];
        let found = self.net.wait_for(&ids, Patience::timeout(timeout), |core| {
            core.polls.collect(self.number, core.engine.stack(), ready);
            (!ready.is_empty()).then_some(Ok(()))
        });
        match found {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
            result => result,
        }
    }
}

impl Poll {
    /// As [`Poll::wait`], but neither waits nor runs the stack: for programs
    /// that run it by other calls.
    pub fn ready_now(&self, ready: &mut Vec<Token>) {
        ready.clear();
        let mut core = self.net.lock();
        let core = &mut *core;
        core.polls.collect(self.number, core.engine.stack(), ready);
    }
}

impl Drop for Poll {
    fn drop(&mut self) {
        self.net.lock().polls.drop_set(self.number);
    }
}

/// A socket in a set.
#[derive(Clone, Copy)]
struct Member {
    /// The number of the set.
    set: SetNumber,
    token: Token,
    interest: Interest,
    /// It stands in the queue of those that may be ready.
    queued: bool,
}

/// All sets of one stack.
#[derive(Default)]
pub(crate) struct Polls {
    /// By set, the sockets that were ready when last asked, or had an event
    /// since.
    maybe_ready: HashMap<SetNumber, VecDeque<SocketId>>,
    /// Streams by their places: nearly all sockets are streams, in one set.
    streams: Vec<Option<(TcpId, Member)>>,
    /// The other sockets, and streams that are in more than one set.
    others: ById<Vec<Member>>,
    last: SetNumber,
}

impl Polls {
    fn add(&mut self) -> SetNumber {
        loop {
            self.last = self.last.wrapping_add(1);
            // A set may live as long as four billion others took to come and go.
            if let Entry::Vacant(place) = self.maybe_ready.entry(self.last) {
                place.insert(VecDeque::new());
                return self.last;
            }
        }
    }

    /// The socket in a set.
    fn find(&mut self, set: SetNumber, id: SocketId) -> Option<&mut Member> {
        if let SocketId::Stream(stream) = id
            && let Some(Some((same, entry))) = self.streams.get_mut(stream.place())
            && *same == stream
            && entry.set == set
        {
            return Some(entry);
        }
        self.others.get_mut(&id)?.iter_mut().find(|entry| entry.set == set)
    }

    pub(crate) fn insert(
        &mut self,
        set: SetNumber,
        id: SocketId,
        token: Token,
        interest: Interest,
    ) -> io::Result<()> {
        if self.find(set, id).is_some() {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        // It may be ready already.
        let waiting = self.maybe_ready.get_mut(&set).ok_or(io::ErrorKind::NotFound)?;
        waiting.push_back(id);
        let entry = Member { set, token, interest, queued: true };
        if let SocketId::Stream(stream) = id {
            let place = stream.place();
            if place >= self.streams.len() {
                self.streams.resize(place + 1, None);
            }
            let slot = &mut self.streams[place];
            // One that was there before is closed.
            if slot.is_none_or(|(other, _)| other != stream) {
                *slot = Some((stream, entry));
                return Ok(());
            }
        }
        self.others.entry(id).or_default().push(entry);
        Ok(())
    }

    /// Whether the socket is in the set.
    pub(crate) fn change(
        &mut self,
        set: SetNumber,
        id: SocketId,
        token: Token,
        interest: Interest,
    ) -> bool {
        let Some(entry) = self.find(set, id) else { return false };
        (entry.token, entry.interest) = (token, interest);
        // It may be ready for that already.
        if !std::mem::replace(&mut entry.queued, true)
            && let Some(waiting) = self.maybe_ready.get_mut(&set)
        {
            waiting.push_back(id);
        }
        true
    }

    pub(crate) fn remove(&mut self, set: SetNumber, id: SocketId) -> bool {
        if self.find(set, id).is_none() {
            return false;
        }
        if let Some(waiting) = self.maybe_ready.get_mut(&set) {
            waiting.retain(|&queued| queued != id);
        }
        if let SocketId::Stream(stream) = id
            && let Some(slot) = self.streams.get_mut(stream.place())
            && slot.is_some_and(|(same, entry)| same == stream && entry.set == set)
        {
            *slot = None;
        } else if let Some(entries) = self.others.get_mut(&id) {
            entries.retain(|entry| entry.set != set);
            if entries.is_empty() {
                self.others.remove(&id);
            }
        }
        true
    }

    fn drop_set(&mut self, set: SetNumber) {
        self.maybe_ready.remove(&set);
        for slot in &mut self.streams {
            if slot.is_some_and(|(_, entry)| entry.set == set) {
                *slot = None;
            }
        }
        for entries in self.others.values_mut() {
            entries.retain(|entry| entry.set != set);
        }
        self.others.retain(|_, entries| !entries.is_empty());
    }

    /// A socket is closed. Its place in a queue is skipped when its turn comes.
    pub(crate) fn forget(&mut self, id: SocketId) {
        if let SocketId::Stream(stream) = id
            && let Some(slot) = self.streams.get_mut(stream.place())
            && slot.is_some_and(|(same, _)| same == stream)
        {
            *slot = None;
        }
        if !self.others.is_empty() {
            self.others.remove(&id);
        }
    }

    /// Something happened to a socket.
    pub(crate) fn on_event(&mut self, id: SocketId, waiters: &Waiters) {
        let Self { maybe_ready, streams, others, .. } = self;
        let mut tell = |entry: &mut Member| {
            let Some(waiting) = maybe_ready.get_mut(&entry.set) else { return };
            if !std::mem::replace(&mut entry.queued, true) {
                waiting.push_back(id);
            }
            waiters.wake(SocketId::Poll(entry.set));
        };
        if let SocketId::Stream(stream) = id
            && let Some(Some((same, entry))) = streams.get_mut(stream.place())
            && *same == stream
        {
            tell(entry);
        }
        if !others.is_empty()
            && let Some(entries) = others.get_mut(&id)
        {
            entries.iter_mut().for_each(tell);
        }
    }

    /// The tokens of those that are ready.
    fn collect(&mut self, set: SetNumber, stack: &Stack, ready: &mut Vec<Token>) {
        let Some(waiting) = self.maybe_ready.get_mut(&set) else { return };
        let mut waiting = std::mem::take(waiting);
        for _ in 0..waiting.len() {
            let Some(id) = waiting.pop_front() else { break };
            let Some(entry) = self.find(set, id) else { continue };
            entry.queued = is_ready(stack, id, entry.interest);
            if entry.queued {
                ready.push(entry.token);
                waiting.push_back(id);
            }
        }
        self.maybe_ready.insert(set, waiting);
    }
}

fn is_ready(stack: &Stack, id: SocketId, interest: Interest) -> bool {
    let (reads, writes) = (interest.has(Interest::Readable), interest.has(Interest::Writable));
    match id {
        SocketId::Udp(id) => writes || stack.udp_readable(id) > 0,
        SocketId::Listener(id) => reads && stack.tcp_acceptable(id) > 0,
        SocketId::Stream(id) => {
            let readiness = stack.tcp_readiness(id);
            reads && readiness.readable || writes && readiness.writable
        }
        SocketId::Poll(_) => false,
    }
}
