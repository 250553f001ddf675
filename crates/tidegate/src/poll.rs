//! Readiness of many sockets: poll sets, in the style of epoll.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::io;
use std::time::Duration;

use tidegate_stack::TcpId;

use crate::net::Net;
use crate::readiness::Readiness;
use crate::wait::{Deadline, PollSetId, SocketId, SocketMap, Waiters};

/// Name that the application gives to a registered socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Token(pub usize);

/// Readiness that the application waits for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Interest {
    /// Readable: data, end of stream, a connection to accept, or an error.
    #[default]
    Readable,
    /// Writable, or a connection that is established or has failed. A UDP socket is always
    /// writable.
    Writable,
    /// Readable or writable.
    Both,
    /// Errors and the end of both directions only; these are always reported.
    Neither,
}

/// Condition for reporting a ready socket again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Trigger {
    /// Reported as long as the socket is ready.
    #[default]
    Level,
    /// Reported after a new event only.
    Edge,
    /// Reported once, until registered again by [`Poll::reregister`].
    OneShot,
}

/// Ready socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ready {
    /// Token of the socket.
    pub token: Token,
    /// Full readiness, including conditions that were not asked for.
    pub readiness: Readiness,
}

impl Interest {
    pub(crate) fn has(self, other: Interest) -> bool {
        self == other || self == Interest::Both
    }
}

/// Socket that can be waited for: [`crate::UdpSocket`], [`crate::TcpListener`] and
/// [`crate::TcpStream`]. A [`Poll`] is a source too, for [`Net::wait`]: it is readable when one
/// of its sockets is ready.
#[expect(private_bounds, reason = "only sockets of this crate can be waited for")]
pub trait Source: Pollable {
    /// Current readiness. Neither blocks nor runs the stack.
    fn readiness(&self) -> Readiness {
        self.net().with(|ops| ops.readiness(self.id()))
    }
}

/// Stack and identifier of a source.
pub(crate) trait Pollable {
    fn net(&self) -> &Net;
    fn id(&self) -> SocketId;
}

/// Poll set: sockets of one [`Net`] to wait for, in the style of epoll.
///
/// The cost of a wait depends on the number of ready sockets, not of registered sockets. Level
/// triggered by default (see [`Poll::set_trigger`]).
///
/// # Examples
/// ```
/// use std::time::Duration;
///
/// use tidegate::{Interest, Net, NetConfig, Poll, TcpListener, Token, UdpSocket};
///
/// const QUERIES: Token = Token(0);
/// const CONNECTIONS: Token = Token(1);
///
/// let (device, _peer) = tidegate::mem::wire(&Default::default())?;
/// let net = Net::open(NetConfig::new(device).address("192.0.2.1/24".parse().unwrap()))?;
/// let socket = UdpSocket::bind(&net, "192.0.2.1:53")?;
/// let listener = TcpListener::bind(&net, "192.0.2.1:53")?;
///
/// let mut poll = Poll::new(&net);
/// poll.register(&socket, QUERIES)?;
/// poll.register_for(&listener, CONNECTIONS, Interest::Readable)?;
///
/// let mut ready = Vec::new();
/// poll.wait(&mut ready, Some(Duration::from_millis(1)))?;
/// for token in &ready {
///     match *token {
///         QUERIES => println!("a datagram is waiting"),
///         CONNECTIONS => println!("a connection is waiting"),
///         _ => unreachable!(),
///     }
/// }
/// assert!(ready.is_empty(), "the timeout expired first");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Poll {
    net: Net,
    set: PollSetId,
}

impl Poll {
    /// Creates an empty set.
    pub fn new(net: &Net) -> Self {
        let set = net.with(|ops| ops.poll_sets().add());
        Self { net: net.clone(), set }
    }

    pub(crate) fn set_id(&self) -> PollSetId {
        self.set
    }

    /// Adds a socket, to wait until it is readable.
    ///
    /// # Errors
    /// As [`Poll::register_for`].
    pub fn register(&mut self, socket: &impl Source, token: Token) -> io::Result<()> {
        self.register_for(socket, token, Interest::Readable)
    }

    /// Adds a socket, to wait for `interest`.
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
        self.net.with(|ops| {
            ops.poll_sets().insert(self.set, socket.id(), token, interest)?;
            ops.waiters().wake(SocketId::Poll(self.set));
            Ok(())
        })
    }

    /// Sets the condition for reporting a socket of the set again, from now on. The socket may
    /// be reported at once.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotFound`] when the socket is not in the set.
    pub fn set_trigger(&mut self, socket: &impl Source, trigger: Trigger) -> io::Result<()> {
        let changed =
            self.net.with(|ops| ops.poll_sets().set_trigger(self.set, socket.id(), trigger));
        if changed { Ok(()) } else { Err(io::ErrorKind::NotFound.into()) }
    }

    /// Changes the token and the interest of a socket of the set.
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
            self.net.with(|ops| ops.poll_sets().change(self.set, socket.id(), token, interest));
        if changed { Ok(()) } else { Err(io::ErrorKind::NotFound.into()) }
    }

    /// Removes a socket from the set. Closing a socket removes it as well.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotFound`] when the socket is not in the set.
    pub fn deregister(&mut self, socket: &impl Source) -> io::Result<()> {
        let removed = self.net.with(|ops| ops.poll_sets().remove(self.set, socket.id()));
        if removed { Ok(()) } else { Err(io::ErrorKind::NotFound.into()) }
    }

    /// Waits until a socket of the set is ready, for at most `timeout` (`None`: no limit).
    /// Clears `ready` and fills it with the tokens of all ready sockets. An empty `ready` means
    /// that the timeout expired.
    ///
    /// # Errors
    /// When the device has failed.
    pub fn wait(&self, ready: &mut Vec<Token>, timeout: Option<Duration>) -> io::Result<()> {
        ready.clear();
        let ids = [SocketId::Poll(self.set)];
        let found = self.net.wait_until(&ids, Deadline::after(timeout), |ops| {
            ops.collect_ready(self.set, usize::MAX, &mut |found| ready.push(found.token));
            (!ready.is_empty()).then_some(Ok(()))
        });
        match found {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
            result => result,
        }
    }
}

impl Poll {
    /// Like [`Poll::wait`], but neither blocks nor runs the stack: for applications that run
    /// the stack by other calls.
    pub fn ready_now(&self, ready: &mut Vec<Token>) {
        ready.clear();
        self.net.with(|ops| {
            ops.collect_ready(self.set, usize::MAX, &mut |found| ready.push(found.token));
        });
    }

    /// Appends at most `limit` ready sockets to `found`, with their readiness. Neither blocks
    /// nor runs the stack. Sockets beyond the limit come first in the next call.
    pub fn collect_ready(&self, found: &mut Vec<Ready>, limit: usize) {
        self.net.with(|ops| ops.collect_ready(self.set, limit, &mut |ready| found.push(ready)));
    }
}

impl Source for Poll {}

impl Pollable for Poll {
    fn net(&self) -> &Net {
        &self.net
    }

    fn id(&self) -> SocketId {
        SocketId::Poll(self.set)
    }
}

impl Drop for Poll {
    fn drop(&mut self) {
        self.net.with(|ops| ops.poll_sets().drop_set(self.set));
    }
}

/// Registration of a socket in a set.
#[derive(Clone, Copy)]
struct Member {
    /// Set that the registration belongs to.
    set: PollSetId,
    token: Token,
    interest: Interest,
    trigger: Trigger,
    /// One-shot registration that was reported: disabled until changed.
    is_disarmed: bool,
    /// The socket is in the set's queue of possibly ready sockets.
    queued: bool,
}

/// All poll sets of one stack.
#[derive(Default)]
pub(crate) struct PollSets {
    /// Per set, the sockets that were ready at the last check or had an event since.
    maybe_ready: HashMap<PollSetId, VecDeque<SocketId>>,
    /// Registrations of streams, by slot: nearly all sockets are streams in one set.
    streams: Vec<Option<(TcpId, Member)>>,
    /// Registrations of other sockets, and of streams in more than one set.
    others: SocketMap<Vec<Member>>,
    last_set: PollSetId,
}

impl PollSets {
    fn add(&mut self) -> PollSetId {
        loop {
            self.last_set = self.last_set.wrapping_add(1);
            // After a wrap-around the number may still be in use by a long-lived set.
            if let Entry::Vacant(vacant) = self.maybe_ready.entry(self.last_set) {
                vacant.insert(VecDeque::new());
                return self.last_set;
            }
        }
    }

    /// Registration of a socket in a set.
    fn find(&mut self, set: PollSetId, id: SocketId) -> Option<&mut Member> {
        if let SocketId::Stream(stream) = id
            && let Some(Some((same, entry))) = self.streams.get_mut(stream.slot())
            && *same == stream
            && entry.set == set
        {
            return Some(entry);
        }
        self.others.get_mut(&id)?.iter_mut().find(|entry| entry.set == set)
    }

    pub(crate) fn insert(
        &mut self,
        set: PollSetId,
        id: SocketId,
        token: Token,
        interest: Interest,
    ) -> io::Result<()> {
        if self.find(set, id).is_some() {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        // The socket may already be ready.
        let waiting = self.maybe_ready.get_mut(&set).ok_or(io::ErrorKind::NotFound)?;
        waiting.push_back(id);
        let trigger = Trigger::Level;
        let entry = Member { set, token, interest, trigger, is_disarmed: false, queued: true };
        if let SocketId::Stream(stream) = id {
            let index = stream.slot();
            if index >= self.streams.len() {
                self.streams.resize(index + 1, None);
            }
            let slot = &mut self.streams[index];
            // Another stream in the slot is closed: its registration is stale.
            if slot.is_none_or(|(other, _)| other != stream) {
                *slot = Some((stream, entry));
                return Ok(());
            }
        }
        self.others.entry(id).or_default().push(entry);
        Ok(())
    }

    /// Changes a registration. Returns false if the socket is not in the set.
    pub(crate) fn change(
        &mut self,
        set: PollSetId,
        id: SocketId,
        token: Token,
        interest: Interest,
    ) -> bool {
        let Some(entry) = self.find(set, id) else { return false };
        (entry.token, entry.interest) = (token, interest);
        self.requeue(set, id);
        true
    }

    /// Changes a trigger. Returns false if the socket is not in the set.
    pub(crate) fn set_trigger(&mut self, set: PollSetId, id: SocketId, trigger: Trigger) -> bool {
        let Some(entry) = self.find(set, id) else { return false };
        entry.trigger = trigger;
        self.requeue(set, id);
        true
    }

    /// Re-enables a changed registration and queues its socket, which may already be ready.
    fn requeue(&mut self, set: PollSetId, id: SocketId) {
        let Some(entry) = self.find(set, id) else { return };
        entry.is_disarmed = false;
        if !std::mem::replace(&mut entry.queued, true)
            && let Some(waiting) = self.maybe_ready.get_mut(&set)
        {
            waiting.push_back(id);
        }
    }

    pub(crate) fn remove(&mut self, set: PollSetId, id: SocketId) -> bool {
        if self.find(set, id).is_none() {
            return false;
        }
        if let Some(waiting) = self.maybe_ready.get_mut(&set) {
            waiting.retain(|&queued| queued != id);
        }
        if let SocketId::Stream(stream) = id
            && let Some(slot) = self.streams.get_mut(stream.slot())
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

    fn drop_set(&mut self, set: PollSetId) {
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

    /// Removes a closed socket. Its queue entries are skipped later.
    pub(crate) fn forget(&mut self, id: SocketId) {
        if let SocketId::Stream(stream) = id
            && let Some(slot) = self.streams.get_mut(stream.slot())
            && slot.is_some_and(|(same, _)| same == stream)
        {
            *slot = None;
        }
        if !self.others.is_empty() {
            self.others.remove(&id);
        }
    }

    /// Queues all sockets, after an event that concerns every one of them.
    pub(crate) fn on_event_for_all(&mut self, waiters: &Waiters) {
        let streams = self.streams.iter().flatten().map(|&(id, _)| SocketId::Stream(id));
        let all: Vec<SocketId> = streams.chain(self.others.keys().copied()).collect();
        all.into_iter().for_each(|id| self.on_event(id, waiters));
    }

    /// Queues a socket after an event, and wakes the threads that wait for its sets.
    pub(crate) fn on_event(&mut self, id: SocketId, waiters: &Waiters) {
        let Self { maybe_ready, streams, others, .. } = self;
        let mut enqueue = |entry: &mut Member| {
            let Some(waiting) = maybe_ready.get_mut(&entry.set) else { return };
            if !std::mem::replace(&mut entry.queued, true) {
                waiting.push_back(id);
            }
            waiters.wake(SocketId::Poll(entry.set));
        };
        if let SocketId::Stream(stream) = id
            && let Some(Some((same, entry))) = streams.get_mut(stream.slot())
            && *same == stream
        {
            enqueue(entry);
        }
        if !others.is_empty()
            && let Some(entries) = others.get_mut(&id)
        {
            entries.iter_mut().for_each(enqueue);
        }
    }

    /// Reports at most `limit` ready sockets of a set.
    pub(crate) fn collect_ready(
        &mut self,
        set: PollSetId,
        readiness_of: &mut dyn FnMut(SocketId) -> Readiness,
        limit: usize,
        report: &mut dyn FnMut(Ready),
    ) {
        let Some(waiting) = self.maybe_ready.get_mut(&set) else { return };
        let mut waiting = std::mem::take(waiting);
        let mut reported = 0;
        for _ in 0..waiting.len() {
            if reported == limit {
                break;
            }
            let Some(id) = waiting.pop_front() else { break };
            let Some(entry) = self.find(set, id) else { continue };
            entry.queued = false;
            let readiness = readiness_of(id);
            if entry.is_disarmed || !readiness.meets(entry.interest) {
                continue;
            }
            reported += 1;
            report(Ready { token: entry.token, readiness });
            match entry.trigger {
                Trigger::Level => {
                    entry.queued = true;
                    waiting.push_back(id);
                }
                Trigger::Edge => {}
                Trigger::OneShot => entry.is_disarmed = true,
            }
        }
        self.maybe_ready.insert(set, waiting);
    }

    /// True if a socket of the set would be reported.
    pub(crate) fn has_ready(
        &mut self,
        set: PollSetId,
        readiness_of: &mut dyn FnMut(SocketId) -> Readiness,
    ) -> bool {
        let Some(waiting) = self.maybe_ready.get_mut(&set) else { return false };
        let waiting = std::mem::take(waiting);
        let found = waiting.iter().any(|&id| {
            let Some(entry) = self.find(set, id) else { return false };
            !entry.is_disarmed && readiness_of(id).meets(entry.interest)
        });
        self.maybe_ready.insert(set, waiting);
        found
    }
}
