//! Sharded sockets: one socket of the application is one socket per attachment in the daemon,
//! all sharing the port.

use std::collections::HashMap;

/// Shards of all sharded sockets, by socket number.
#[derive(Default)]
pub(super) struct Shards {
    /// Sharded sockets by the number of their first shard, which is the socket's number.
    sockets: HashMap<u64, ShardedSocket>,
    /// Socket number of every shard but the first.
    socket_by_shard: HashMap<u64, u64>,
}

struct ShardedSocket {
    shards: Vec<u64>,
    /// Index of the shard that the next receive polls first.
    next: usize,
    /// Index of the shard that a datagram or connection was last received from.
    last_used: usize,
}

/// Position of the shard that an operation runs on.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum ShardRank {
    First,
    Other,
}

impl Shards {
    /// Records the shards of a socket. A single shard needs no record.
    pub(super) fn insert(&mut self, shards: Vec<u64>) {
        let [first, others @ ..] = shards.as_slice() else { return };
        if others.is_empty() {
            return;
        }
        self.socket_by_shard.extend(others.iter().map(|&other| (other, *first)));
        self.sockets.insert(*first, ShardedSocket { shards, next: 0, last_used: 0 });
    }

    /// Shards of a socket; the socket itself if it is not sharded.
    pub(super) fn shards_of(&self, socket: u64) -> Vec<u64> {
        match self.sockets.get(&socket) {
            Some(sharded) => sharded.shards.clone(),
            None => vec![socket],
        }
    }

    /// First shard, which always exists.
    #[inline]
    pub(super) fn first(&self, socket: u64) -> u64 {
        if self.sockets.is_empty() {
            return socket;
        }
        self.sockets.get(&socket).map_or(socket, |sharded| sharded.shards[0])
    }

    /// All shards of a socket but the first.
    #[inline]
    pub(super) fn others(&self, socket: u64) -> &[u64] {
        if self.sockets.is_empty() {
            return &[];
        }
        self.sockets.get(&socket).map_or(&[], |sharded| &sharded.shards[1..])
    }

    /// Socket that a shard belongs to.
    pub(super) fn socket_of(&self, shard: u64) -> u64 {
        if self.sockets.is_empty() {
            return shard;
        }
        self.socket_by_shard.get(&shard).copied().unwrap_or(shard)
    }

    /// Forgets a socket. Returns its shards, or the socket itself if it is not sharded.
    pub(super) fn remove(&mut self, socket: u64) -> Vec<u64> {
        if self.sockets.is_empty() {
            return vec![socket];
        }
        let Some(sharded) = self.sockets.remove(&socket) else { return vec![socket] };
        sharded.shards.iter().for_each(|part| _ = self.socket_by_shard.remove(part));
        sharded.shards
    }

    /// Reduces a socket to the shard that was last received from. Returns that shard and the
    /// others.
    pub(super) fn collapse_to_last_used(&mut self, socket: u64) -> (u64, Vec<u64>) {
        let Some(sharded) = self.get_mut(socket) else { return (socket, Vec::new()) };
        let last = sharded.shards.swap_remove(sharded.last_used);
        let others = std::mem::replace(&mut sharded.shards, vec![last]);
        (sharded.next, sharded.last_used) = (0, 0);
        others.iter().for_each(|other| _ = self.socket_by_shard.remove(other));
        (last, others)
    }

    /// Polls the shards in turn until one returns a value. The next call starts after that
    /// shard, or with it after a `peek`.
    pub(super) fn receive_in_turn<R>(
        &mut self,
        socket: u64,
        peek: bool,
        mut receive: impl FnMut(u64, ShardRank) -> Option<R>,
    ) -> Option<R> {
        let Some(sharded) = self.get_mut(socket) else { return receive(socket, ShardRank::First) };
        let count = sharded.shards.len();
        for offset in 0..count {
            let index = (sharded.next + offset) % count;
            let rank = if index == 0 { ShardRank::First } else { ShardRank::Other };
            if let Some(received) = receive(sharded.shards[index], rank) {
                sharded.last_used = index;
                sharded.next = if peek { index } else { (index + 1) % count };
                return Some(received);
            }
        }
        None
    }

    /// Sends through the shard that was last received from, or else through the first of the
    /// others that accepts.
    pub(super) fn send_from_last_used<R>(
        &mut self,
        socket: u64,
        mut send: impl FnMut(u64) -> Option<R>,
    ) -> Option<R> {
        let Some(sharded) = self.get_mut(socket) else { return send(socket) };
        let count = sharded.shards.len();
        (0..count).find_map(|offset| send(sharded.shards[(sharded.last_used + offset) % count]))
    }

    #[inline]
    fn get_mut(&mut self, socket: u64) -> Option<&mut ShardedSocket> {
        if self.sockets.is_empty() { None } else { self.sockets.get_mut(&socket) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn receives_round_robin_and_sends_from_last_used_shard() {
        let mut shards = Shards::default();
        shards.insert(vec![3, 4, 5]);
        let mut waiting = HashMap::from([(3, 2), (4, 2), (5, 0)]);
        let mut take = |part: u64, peek: bool| {
            let count = waiting.get_mut(&part).filter(|count| **count > 0)?;
            *count -= u32::from(!peek);
            Some(part)
        };
        let mut given = Vec::new();
        for peek in [true, false, false, false, false, false] {
            given.push(shards.receive_in_turn(3, peek, |part, _| take(part, peek)));
        }
        assert_eq!(given, [Some(3), Some(3), Some(4), Some(3), Some(4), None]);
        assert_eq!(shards.send_from_last_used(3, Some), Some(4));
        assert_eq!(shards.send_from_last_used(3, |part| (part != 4).then_some(part)), Some(5));
        assert_eq!((shards.socket_of(5), shards.socket_of(6)), (3, 6));
        assert_eq!((shards.shards_of(3), shards.shards_of(6)), (vec![3, 4, 5], vec![6]));
        assert_eq!(shards.collapse_to_last_used(3), (4, vec![3, 5]));
        assert_eq!((shards.first(3), shards.socket_of(4), shards.socket_of(5)), (4, 3, 5));
        assert_eq!(shards.receive_in_turn(3, false, |part, _| Some(part)), Some(4));
        assert_eq!((shards.remove(3), shards.remove(3)), (vec![4], vec![3]));
        assert_eq!((shards.socket_of(4), shards.shards_of(3), shards.first(3)), (4, vec![3], 3));
        assert_eq!(shards.receive_in_turn(3, false, |part, _| Some(part)), Some(3));
    }

    #[test]
    fn single_shard_is_not_recorded() {
        let mut shards = Shards::default();
        shards.insert(vec![3]);
        assert!(shards.sockets.is_empty() && shards.socket_by_shard.is_empty());
    }
}
