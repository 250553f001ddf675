//! A hierarchical timing wheel (Varghese and Lauck, "Hashed and Hierarchical
//! Timing Wheels", scheme 7): setting and clearing a timer takes constant time
//! for any number of connections.
//!
//! Each connection has one entry in the wheel, for its earliest deadline. When the deadline
//! moves back, the entry stays: it expires early once and is then set again.

use super::slots::Connections;
use crate::tcp::timers::{NO_INDEX, TICK_BITS, tick_of};

const SLOT_BITS: u32 = 6;
const SLOTS: usize = 1 << SLOT_BITS;
/// Levels of the wheel; together they reach 2^36 ticks, two years.
const LEVELS: usize = 6;

pub(crate) struct TimerWheel {
    heads: [[u32; SLOTS]; LEVELS],
    /// Bit mask of the non-empty slots of each level.
    occupied: [u64; LEVELS],
    /// All ticks up to this tick are processed.
    now_tick: u64,
}

impl TimerWheel {
    pub(crate) fn new(now_ns: u64) -> Self {
        Self {
            heads: [[NO_INDEX; SLOTS]; LEVELS],
            occupied: [0; LEVELS],
            now_tick: now_ns >> TICK_BITS,
        }
    }

    /// Sets the timer of a connection: it expires no later than one tick after `at_ns`.
    pub(crate) fn set(&mut self, connections: &mut Connections, index: u32, at_ns: u64) {
        let Some(links) = connections.at(index).map(|connection| &connection.links) else { return };
        let tick = tick_of(at_ns).max(self.now_tick + 1);
        if links.timer_slot != NO_INDEX {
            if links.tick() <= tick {
                return;
            }
            self.clear(connections, index);
        }
        self.insert(connections, index, tick);
    }

    fn insert(&mut self, connections: &mut Connections, index: u32, tick: u64) {
        let differing = (tick ^ self.now_tick).max(1);
        let level = ((63 - differing.leading_zeros()) / SLOT_BITS) as usize;
        // Beyond the range of the wheel: use the last slot and move the timer again from there.
        let (level, slot) = match level < LEVELS {
            true => (level, (tick >> (SLOT_BITS as usize * level)) as usize % SLOTS),
            false => (LEVELS - 1, SLOTS - 1),
        };
        let head = self.heads[level][slot];
        if let Some(next) = connections.at_mut(head) {
            next.links.timer_previous = index;
        }
        if let Some(connection) = connections.at_mut(index) {
            connection.links.timer_previous = NO_INDEX;
            connection.links.timer_next = head;
            connection.links.timer_slot = (level * SLOTS + slot) as u32;
            connection.links.set_tick(tick);
        }
        self.heads[level][slot] = index;
        self.occupied[level] |= 1 << slot;
    }

    /// Removes a connection from the wheel.
    pub(crate) fn clear(&mut self, connections: &mut Connections, index: u32) {
        let Some(connection) = connections.at_mut(index) else { return };
        let links = connection.links;
        if links.timer_slot == NO_INDEX {
            return;
        }
        connection.links.timer_slot = NO_INDEX;
        if let Some(next) = connections.at_mut(links.timer_next) {
            next.links.timer_previous = links.timer_previous;
        }
        let (level, slot) = (links.timer_slot as usize / SLOTS, links.timer_slot as usize % SLOTS);
        match connections.at_mut(links.timer_previous) {
            Some(previous) => previous.links.timer_next = links.timer_next,
            None => {
                self.heads[level][slot] = links.timer_next;
                if links.timer_next == NO_INDEX {
                    self.occupied[level] &= !(1 << slot);
                }
            }
        }
    }

    /// Next slot to process: its level, its index and its tick.
    fn next_slot(&self) -> Option<(usize, usize, u64)> {
        (0..LEVELS).find_map(|level| {
            let shift = SLOT_BITS as usize * level;
            let position = self.now_tick >> shift;
            let at = position as usize % SLOTS;
            let later = self.occupied[level] & u64::MAX.checked_shl(at as u32 + 1).unwrap_or(0);
            let slot = later.trailing_zeros() as usize;
            let tick = (position / SLOTS as u64 * SLOTS as u64 + slot as u64) << shift;
            (later != 0).then_some((level, slot, tick))
        })
    }

    /// Earliest time at which [`TimerWheel::expire`] has something to do; `None` if the wheel is empty.
    #[inline]
    pub(crate) fn next_timeout(&self) -> Option<u64> {
        if self.occupied == [0; LEVELS] {
            return None;
        }
        self.next_slot().map(|(_, _, tick)| tick << TICK_BITS)
    }

    /// Removes and returns one connection whose timer has expired.
    pub(crate) fn expire(&mut self, connections: &mut Connections, now_ns: u64) -> Option<u32> {
        let now_tick = now_ns >> TICK_BITS;
        loop {
            // Timers due at this tick are in the slot of the tick.
            let due = self.heads[0][self.now_tick as usize % SLOTS];
            let is_due = connections.at(due).is_some_and(|c| c.links.tick() <= self.now_tick);
            if due != NO_INDEX && is_due {
                self.clear(connections, due);
                return Some(due);
            }
            let Some((level, slot, tick)) = self.next_slot().filter(|next| next.2 <= now_tick)
            else {
                self.now_tick = self.now_tick.max(now_tick);
                return None;
            };
            self.now_tick = tick;
            if level > 0 {
                self.cascade(connections, level, slot);
            }
        }
    }

    /// Moves the timers of a slot of a coarse level to their slots in finer levels.
    fn cascade(&mut self, connections: &mut Connections, level: usize, slot: usize) {
        let mut index = std::mem::replace(&mut self.heads[level][slot], NO_INDEX);
        self.occupied[level] &= !(1 << slot);
        while let Some(connection) = connections.at_mut(index) {
            let links = connection.links;
            connection.links.timer_slot = NO_INDEX;
            self.insert(connections, index, links.tick().max(self.now_tick));
            index = links.timer_next;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tcp::connection::Connection;
    use crate::tcp::segment::FourTuple;
    use crate::tcp::seq::Seq;
    use proptest::prelude::*;
    use std::sync::Arc;

    fn connections(count: u32) -> (Connections, Vec<u32>) {
        let mut connections = Connections::new(count as usize);
        let tuple = FourTuple::new("192.0.2.1:1".parse().unwrap(), "192.0.2.2:2".parse().unwrap());
        let indices = (0..count).map(|_| {
            let connection = Connection::new(0, tuple, Arc::default(), Seq(0), 0);
            connections.insert(connection).unwrap().index
        });
        let indices = indices.collect();
        (connections, indices)
    }

    proptest! {
        #[test]
        fn each_timer_expires_once_and_on_time(
            start_ns in 0u64..1 << 50,
            delays in prop::collection::vec(0u64..1 << 44, 1..60),
            cleared in prop::collection::vec(any::<bool>(), 60),
        ) {
            let (mut connections, places) = connections(delays.len() as u32);
            let mut wheel = TimerWheel::new(start_ns);
            for (&index, &delay) in places.iter().zip(&delays) {
                wheel.set(&mut connections, index, start_ns + delay);
            }
            let mut left: Vec<_> = Vec::new();
            for (at, (&index, &delay)) in places.iter().zip(&delays).enumerate() {
                if cleared[at] {
                    wheel.clear(&mut connections, index);
                } else {
                    left.push((index, start_ns + delay));
                }
            }
            let mut steps = 0;
            while let Some(due_ns) = wheel.next_timeout() {
                steps += 1;
                prop_assert!(steps < 1000);
                while let Some(index) = wheel.expire(&mut connections, due_ns) {
                    let at = left.iter().position(|entry| entry.0 == index);
                    let at_ns = left.remove(at.expect("each timer expires once")).1;
                    let earliest = start_ns.max(at_ns);
                    prop_assert!(earliest <= due_ns && due_ns <= earliest + (2 << TICK_BITS),
                        "{at_ns} expired at {due_ns}");
                }
            }
            prop_assert!(left.is_empty(), "{left:?}");
        }
    }

    #[test]
    fn only_an_earlier_deadline_moves_a_timer() {
        let (mut connections, indices) = connections(1);
        let mut wheel = TimerWheel::new(0);
        wheel.set(&mut connections, indices[0], 100 << TICK_BITS);
        wheel.set(&mut connections, indices[0], 500 << TICK_BITS);
        wheel.set(&mut connections, indices[0], 50 << TICK_BITS);
        assert_eq!(wheel.expire(&mut connections, 49 << TICK_BITS), None);
        assert_eq!(wheel.expire(&mut connections, 50 << TICK_BITS), Some(indices[0]));
        assert_eq!(wheel.next_timeout(), None);
    }
}
