//! Registrations of sockets in poll sets.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::hash::BuildHasherDefault;
use std::io;

use tidegate_stack::TcpId;

use super::readiness::{Change, Interest, Readiness, Ready, Token, Trigger};
use super::socket_id::{IdHasher, PollSetId, SocketId, SocketMap};
use super::waiters::Waiters;

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
    maybe_ready: HashMap<PollSetId, VecDeque<SocketId>, BuildHasherDefault<IdHasher>>,
    /// Registrations of streams, by slot: nearly all sockets are streams in one set.
    streams: Vec<Option<(TcpId, Member)>>,
    /// Registrations of other sockets, and of streams in more than one set.
    others: SocketMap<Vec<Member>>,
    last_set: PollSetId,
}

impl PollSets {
    /// Creates an empty set.
    pub(crate) fn add(&mut self) -> PollSetId {
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

    /// Removes a set with all its registrations.
    pub(crate) fn drop_set(&mut self, set: PollSetId) {
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
    #[cfg(feature = "attach")]
    pub(crate) fn on_event_for_all(&mut self, waiters: &Waiters) {
        let streams = self.streams.iter().flatten().map(|&(id, _)| SocketId::Stream(id));
        let all: Vec<SocketId> = streams.chain(self.others.keys().copied()).collect();
        all.into_iter().for_each(|id| self.on_event(id, Change::Any, waiters));
    }

    /// Queues a socket after a change that its registrations are about, and wakes the threads that
    /// wait for its sets.
    pub(crate) fn on_event(&mut self, id: SocketId, change: Change, waiters: &Waiters) {
        let Self { maybe_ready, streams, others, .. } = self;
        let mut enqueue = |entry: &mut Member| {
            if change == Change::Space && !entry.interest.has(Interest::Writable) {
                return;
            }
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

    /// Takes the sockets of a set that had an event since they were taken last, ready or not, and
    /// reports their tokens.
    pub(crate) fn take_changed(&mut self, set: PollSetId, mut report: impl FnMut(Token)) {
        let Some(changed) = self.maybe_ready.get_mut(&set) else { return };
        if changed.is_empty() {
            return;
        }
        let mut changed = std::mem::take(changed);
        for id in changed.drain(..) {
            if let Some(entry) = self.find(set, id) {
                entry.queued = false;
                report(entry.token);
            }
        }
        self.maybe_ready.insert(set, changed);
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
