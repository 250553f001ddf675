//! A hierarchical timing wheel (Varghese and Lauck, "Hashed and Hierarchical
//! Timing Wheels", scheme 7): setting and clearing a timer takes constant time
//! for any number of connections.
//!
//! Each connection has one entry in the wheel, for its earliest deadline. When the deadline
//! moves back, the entry stays: it expires early once and is then set again.

use super::slots::Connections;
use crate::tcp::timers::{NEVER, NO_INDEX, TICK_BITS, tick_of};

const SLOT_BITS: u32 = 6;
const SLOTS: usize = 1 << SLOT_BITS;
/// Levels of the wheel; together they reach 2^36 ticks, two years.
const LEVELS: usize = 6;
/// Entries whose deadlines [`TimerWheel::next_deadline`] reads.
const MAX_READ_DEADLINES: usize = 16;

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
        self.slots().next()
    }

    /// Slots with entries, in the order of their ticks: level, index and tick.
    fn slots(&self) -> impl Iterator<Item = (usize, usize, u64)> {
        (0..LEVELS).flat_map(|level| {
            let shift = SLOT_BITS as usize * level;
            let position = self.now_tick >> shift;
            let at = position as usize % SLOTS;
            let first_tick = position / SLOTS as u64 * SLOTS as u64;
            let mut later = self.occupied[level] & u64::MAX.checked_shl(at as u32 + 1).unwrap_or(0);
            std::iter::from_fn(move || {
                let slot = (later != 0).then(|| later.trailing_zeros() as usize)?;
                later &= later - 1;
                Some((level, slot, (first_tick + slot as u64) << shift))
            })
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

    /// Time until which a sleep may last; `None` without deadlines. Later than
    /// [`TimerWheel::next_timeout`] if deadlines have moved back, or if the next slot is a coarse one.
    /// Earlier than the deadline where [`MAX_READ_DEADLINES`] entries are not enough to find it.
    pub(crate) fn next_deadline(&self, connections: &Connections) -> Option<u64> {
        let mut earliest: Option<u64> = None;
        let mut read = 0;
        for (level, slot, slot_tick) in self.slots() {
            if earliest.is_some_and(|tick| tick <= slot_tick) {
                break;
            }
            let mut index = self.heads[level][slot];
            while let Some(connection) = connections.at(index) {
                if read == MAX_READ_DEADLINES {
                    let tick = earliest.map_or(slot_tick, |tick| tick.min(slot_tick));
                    return Some(tick << TICK_BITS);
                }
                read += 1;
                let deadline_ns = connection.timers.deadline_ns();
                if deadline_ns != NEVER {
                    // A deadline that had passed when it was set expires with its entry.
                    let tick = tick_of(deadline_ns).max(connection.links.tick());
                    earliest = Some(earliest.map_or(tick, |other| other.min(tick)));
                }
                index = connection.links.timer_next;
            }
        }
        earliest.map(|tick| tick << TICK_BITS)
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

    fn set_deadline(connections: &mut Connections, index: u32, deadline_ns: u64) {
        connections.at_mut(index).unwrap().timers.idle_deadline_ns = deadline_ns;
    }

    proptest! {
        /// No timer expires late for a thread that sleeps until the next deadline.
        #[test]
        fn sleep_lasts_until_the_next_deadline(
            start_ns in 0u64..1 << 50,
            timers in prop::collection::vec(
                (0u64..1 << 40, prop_oneof![Just(0), 0u64..1 << 40, Just(NEVER)]), 1..40),
        ) {
            let (mut connections, indices) = connections(timers.len() as u32);
            let mut wheel = TimerWheel::new(start_ns);
            let mut ticks = Vec::new();
            for (&index, &(set_ns, moved_ns)) in indices.iter().zip(&timers) {
                wheel.set(&mut connections, index, start_ns + set_ns);
                let deadline_ns = (start_ns + set_ns).saturating_add(moved_ns);
                set_deadline(&mut connections, index, deadline_ns);
                let set_tick = connections.at(index).unwrap().links.tick();
                if deadline_ns != NEVER {
                    ticks.push(tick_of(deadline_ns).max(set_tick));
                }
            }
            let next_ns = ticks.iter().min().map(|tick| tick << TICK_BITS);
            let found_ns = wheel.next_deadline(&connections);
            if timers.len() <= MAX_READ_DEADLINES {
                prop_assert_eq!(found_ns, next_ns);
            } else {
                let (found_ns, next_ns) = (found_ns.unwrap_or(NEVER), next_ns.unwrap_or(NEVER));
                prop_assert!(wheel.next_timeout() <= Some(found_ns) && found_ns <= next_ns);
            }
        }
    }

    #[test]
    fn a_sleep_ends_neither_for_a_deadline_that_moved_back_nor_for_a_coarse_slot() {
        let (mut connections, indices) = connections(2);
        let mut wheel = TimerWheel::new(0);
        for (index, tick) in [(indices[0], 1_000), (indices[1], 90)] {
            wheel.set(&mut connections, index, tick << TICK_BITS);
            set_deadline(&mut connections, index, tick << TICK_BITS);
        }
        assert_eq!(wheel.next_timeout(), Some(64 << TICK_BITS), "the slot of 64 to 127");
        assert_eq!(wheel.next_deadline(&connections), Some(90 << TICK_BITS));
        set_deadline(&mut connections, indices[1], 2_000 << TICK_BITS);
        assert_eq!(wheel.next_deadline(&connections), Some(1_000 << TICK_BITS));
        set_deadline(&mut connections, indices[0], NEVER);
        assert_eq!(wheel.next_deadline(&connections), Some(2_000 << TICK_BITS));
        set_deadline(&mut connections, indices[1], NEVER);
        assert_eq!(wheel.next_deadline(&connections), None);
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
