//! Readiness: wait for the first of many sockets.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::io;
use std::time::Duration;

use tidegate_stack::TcpId;

use crate::net::Net;
use crate::readiness::Readiness;
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
    /// Nothing but errors and the end of both directions, which are told
    /// whatever is waited for.
    Neither,
}

/// How often a socket that is ready is reported.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Trigger {
    /// As long as it is ready.
    #[default]
    Level,
    /// When something happened since it was reported last.
    Edge,
    /// Once, until it is registered again by [`Poll::reregister`].
    OneShot,
}

/// A socket that was found ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ready {
    /// What the program calls it.
    pub token: Token,
    /// All that it is ready for, also what was not waited for.
    pub readiness: Readiness,
}

impl Interest {
    pub(crate) fn has(self, other: Interest) -> bool {
        self == other || self == Interest::Both
    }
}

/// A socket that can be waited for: [`crate::UdpSocket`],
/// [`crate::TcpListener`] and [`crate::TcpStream`]. A [`Poll`] is one too, for
/// [`Net::wait`]: it is readable when one of its sockets is ready.
#[expect(private_bounds, reason = "only sockets of this crate can be waited for")]
pub trait Source: Pollable {
    /// What it is ready for now. Neither waits nor runs the stack.
    fn readiness(&self) -> Readiness {
        self.net().with(|calls| calls.readiness(self.id()))
    }
}

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
        let number = net.with(|calls| calls.polls().add());
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
        self.net.with(|calls| {
            calls.polls().insert(self.number, socket.id(), token, interest)?;
            calls.waiters().wake(SocketId::Poll(self.number));
            Ok(())
        })
    }

    /// Sets how often a socket of the set is reported, from now on; it may be
    /// ready already.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotFound`] when the socket is not in the set.
    pub fn set_trigger(&mut self, socket: &impl Source, trigger: Trigger) -> io::Result<()> {
        let changed =
            self.net.with(|calls| calls.polls().set_trigger(self.number, socket.id(), trigger));
        if changed { Ok(()) } else { Err(io::ErrorKind::NotFound.into()) }
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
        let changed =
            self.net.with(|calls| calls.polls().change(self.number, socket.id(), token, interest));
        if changed { Ok(()) } else { Err(io::ErrorKind::NotFound.into()) }
    }

    /// Takes a socket out of the set. One that is closed leaves by itself.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotFound`] when it is not in the set.
    pub fn deregister(&mut self, socket: &impl Source) -> io::Result<()> {
        let removed = self.net.with(|calls| calls.polls().remove(self.number, socket.id()));
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
        let found = self.net.wait_for(&ids, Patience::timeout(timeout), |calls| {
            calls.collect(self.number, usize::MAX, &mut |found| ready.push(found.token));
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
        self.net.with(|calls| {
            calls.collect(self.number, usize::MAX, &mut |found| ready.push(found.token));
        });
    }

    /// Puts at most `limit` sockets that are ready behind those in `found`,
    /// with what they are ready for. Neither waits nor runs the stack; those
    /// that were left out come first the next time.
    pub fn collect(&self, found: &mut Vec<Ready>, limit: usize) {
        self.net.with(|calls| calls.collect(self.number, limit, &mut |ready| found.push(ready)));
    }
}

impl Source for Poll {}

impl Pollable for Poll {
    fn net(&self) -> &Net {
        &self.net
    }

    fn id(&self) -> SocketId {
        SocketId::Poll(self.number)
    }
}

impl Drop for Poll {
    fn drop(&mut self) {
        self.net.with(|calls| calls.polls().drop_set(self.number));
    }
}

/// A socket in a set.
#[derive(Clone, Copy)]
struct Member {
    /// The number of the set.
    set: SetNumber,
    token: Token,
    interest: Interest,
    trigger: Trigger,
    /// It was reported once, and that was all that was asked for.
    is_spent: bool,
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
        let trigger = Trigger::Level;
        let entry = Member { set, token, interest, trigger, is_spent: false, queued: true };
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
        self.look_again(set, id);
        true
    }

    /// Whether the socket is in the set.
    pub(crate) fn set_trigger(&mut self, set: SetNumber, id: SocketId, trigger: Trigger) -> bool {
        let Some(entry) = self.find(set, id) else { return false };
        entry.trigger = trigger;
        self.look_again(set, id);
        true
    }

    /// A member was changed, and may be ready for that already.
    fn look_again(&mut self, set: SetNumber, id: SocketId) {
        let Some(entry) = self.find(set, id) else { return };
        entry.is_spent = false;
        if !std::mem::replace(&mut entry.queued, true)
            && let Some(waiting) = self.maybe_ready.get_mut(&set)
        {
            waiting.push_back(id);
        }
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

    /// Something happened to all sockets.
    pub(crate) fn on_event_for_all(&mut self, waiters: &Waiters) {
        let streams = self.streams.iter().flatten().map(|&(id, _)| SocketId::Stream(id));
        let all: Vec<SocketId> = streams.chain(self.others.keys().copied()).collect();
        all.into_iter().for_each(|id| self.on_event(id, waiters));
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

    /// Tells of at most `limit` that are ready.
    pub(crate) fn collect(
        &mut self,
        set: SetNumber,
        of: &mut dyn FnMut(SocketId) -> Readiness,
        limit: usize,
        tell: &mut dyn FnMut(Ready),
    ) {
        let Some(waiting) = self.maybe_ready.get_mut(&set) else { return };
        let mut waiting = std::mem::take(waiting);
        let mut told = 0;
        for _ in 0..waiting.len() {
            if told == limit {
                break;
            }
            let Some(id) = waiting.pop_front() else { break };
            let Some(entry) = self.find(set, id) else { continue };
            entry.queued = false;
            let readiness = of(id);
            if entry.is_spent || !readiness.meets(entry.interest) {
                continue;
            }
            told += 1;
            tell(Ready { token: entry.token, readiness });
            match entry.trigger {
                Trigger::Level => {
                    entry.queued = true;
                    waiting.push_back(id);
                }
                Trigger::Edge => {}
                Trigger::OneShot => entry.is_spent = true,
            }
        }
        self.maybe_ready.insert(set, waiting);
    }

    /// Whether a socket of the set would be reported.
    pub(crate) fn has_ready(
        &mut self,
        set: SetNumber,
        of: &mut dyn FnMut(SocketId) -> Readiness,
    ) -> bool {
        let Some(waiting) = self.maybe_ready.get_mut(&set) else { return false };
        let waiting = std::mem::take(waiting);
        let found = waiting.iter().any(|&id| {
            let Some(entry) = self.find(set, id) else { return false };
            !entry.is_spent && of(id).meets(entry.interest)
        });
        self.maybe_ready.insert(set, waiting);
        found
    }
}
