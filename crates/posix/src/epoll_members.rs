//! Members of an epoll set: its sockets, by descriptor.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use libc::{c_int, epoll_event};
use tidegate::Ready;

use crate::epoll_events::event_bits;

/// Events that are reported without being asked for.
const ALWAYS: u32 = (libc::EPOLLERR | libc::EPOLLHUP) as u32;

/// Socket in an epoll set.
pub struct Member<S> {
    socket: Weak<S>,
    /// Event bits that the program waits for.
    pub events: u32,
    /// Data that the program gets with an event.
    pub data: u64,
}

/// Sockets of an epoll set. Each has a slot, whose number is the token of its events.
pub struct MemberTable<S> {
    slots: Vec<Option<Member<S>>>,
    by_fd: HashMap<c_int, usize>,
    free_slots: Vec<usize>,
}

impl<S> Default for MemberTable<S> {
    fn default() -> Self {
        Self { slots: Vec::new(), by_fd: HashMap::new(), free_slots: Vec::new() }
    }
}

impl<S> MemberTable<S> {
    /// Slot of a descriptor, if the descriptor still refers to the socket that was added.
    pub fn find(&mut self, fd: c_int, socket: &Arc<S>) -> Option<usize> {
        let slot = *self.by_fd.get(&fd)?;
        if self.get(slot)?.socket.ptr_eq(&Arc::downgrade(socket)) {
            return Some(slot);
        }
        // The socket was closed, and the kernel reused its descriptor.
        self.remove(fd);
        None
    }

    /// Adds a socket; returns its slot.
    pub fn insert(&mut self, fd: c_int, socket: Weak<S>, events: u32, data: u64) -> usize {
        let slot = self.free_slots.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() - 1
        });
        self.slots[slot] = Some(Member { socket, events, data });
        self.by_fd.insert(fd, slot);
        slot
    }

    /// Removes a descriptor, if it is a member.
    pub fn remove(&mut self, fd: c_int) {
        if let Some(slot) = self.by_fd.remove(&fd) {
            self.slots[slot] = None;
            self.free_slots.push(slot);
        }
    }

    /// Member in a slot.
    pub fn get(&self, slot: usize) -> Option<&Member<S>> {
        self.slots.get(slot)?.as_ref()
    }

    /// Member in a slot, to change what the program waits for.
    pub fn get_mut(&mut self, slot: usize) -> Option<&mut Member<S>> {
        self.slots.get_mut(slot)?.as_mut()
    }

    /// Members that are this socket, with their slots.
    pub fn of_socket(&self, socket: &Arc<S>) -> impl Iterator<Item = (usize, &Member<S>)> {
        let socket = Arc::downgrade(socket);
        let members = self.slots.iter().enumerate();
        members
            .filter_map(|(slot, member)| Some((slot, member.as_ref()?)))
            .filter(move |(_, member)| member.socket.ptr_eq(&socket))
    }

    /// Writes the events of ready members to the front of `events`, which has space for all; returns
    /// their number.
    pub fn write_events(&self, ready: &[Ready], events: &mut [epoll_event]) -> usize {
        let mut count = 0;
        for one in ready {
            let Some(member) = self.get(one.token.0) else { continue };
            let bits = event_bits(one.readiness) & (member.events | ALWAYS);
            if bits != 0 {
                events[count] = epoll_event { events: bits, u64: member.data };
                count += 1;
            }
        }
        count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reuses_slots_of_removed_members() {
        let mut members = MemberTable::<()>::default();
        let first = members.insert(5, Weak::new(), 1, 7);
        let second = members.insert(6, Weak::new(), 1, 7);
        assert_ne!(first, second);
        members.remove(5);
        members.remove(5);
        assert_eq!(members.insert(9, Weak::new(), 1, 7), first);
        assert_eq!(members.by_fd.len(), 2);
    }
}
