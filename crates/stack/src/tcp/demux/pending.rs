//! Order in which connections with pending output have their turns: short messages come before the
//! rest of long ones, as in FQ-CoDel (RFC 8290 section 4.2).

use std::collections::VecDeque;

use crate::tcp::connection::Connection;
use crate::tcp::flags::ConnFlags;

/// First turns in a row while connections wait for a further one: they have their share, however
/// many connections begin.
const MAX_FIRST_TURNS: u32 = 16;

/// Turn of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// The connection had no output before.
    First,
    /// The connection had more output than its last turn permits.
    Further,
}

/// Connections with pending output, by slot, each at most once. Entries of connections that have
/// ended may remain.
#[derive(Default)]
pub(crate) struct PendingOutput {
    first: VecDeque<u32>,
    further: VecDeque<u32>,
    /// First turns since the last further one.
    first_turns: u32,
}

impl PendingOutput {
    /// Adds a connection for a turn.
    #[inline(always)]
    pub(super) fn push(&mut self, index: u32, turn: Turn) {
        match turn {
            Turn::First => self.first.push_back(index),
            Turn::Further => self.further.push_back(index),
        }
    }

    /// Adds a connection that has something to send, unless it waits already.
    #[inline(always)]
    pub(crate) fn schedule(&mut self, connection: &mut Connection, index: u32, turn: Turn) {
        let waiting = ConnFlags::WANTS_OUTPUT | ConnFlags::PENDING;
        if connection.flags.intersection(waiting).bits() == ConnFlags::WANTS_OUTPUT.bits() {
            connection.flags.insert(ConnFlags::PENDING);
            self.push(index, turn);
        }
    }

    /// Takes the next connection.
    pub(super) fn pop(&mut self) -> Option<(u32, Turn)> {
        let is_first_due = self.first_turns < MAX_FIRST_TURNS || self.further.is_empty();
        if is_first_due && let Some(index) = self.first.pop_front() {
            self.first_turns += 1;
            return Some((index, Turn::First));
        }
        self.first_turns = 0;
        self.further.pop_front().map(|index| (index, Turn::Further))
    }

    /// Returns a connection that was taken and has not had its turn.
    pub(super) fn put_back(&mut self, index: u32, turn: Turn) {
        match turn {
            Turn::First => self.first.push_front(index),
            Turn::Further => self.further.push_front(index),
        }
    }

    /// True if no connection waits.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.first.is_empty() && self.further.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_turns_come_first_and_leave_a_share_to_the_others() {
        let mut pending = PendingOutput::default();
        (0..2).for_each(|index| pending.push(index, Turn::Further));
        (100..140).for_each(|index| pending.push(index, Turn::First));
        let order: Vec<u32> =
            std::iter::from_fn(|| pending.pop().map(|(index, _)| index)).collect();
        let expected: Vec<u32> =
            (100..116).chain([0]).chain(116..132).chain([1]).chain(132..140).collect();
        assert_eq!(order, expected);
        assert!(pending.is_empty());
    }

    #[test]
    fn connection_without_its_turn_is_the_next_one() {
        let mut pending = PendingOutput::default();
        for turn in [Turn::First, Turn::Further] {
            (0..2).for_each(|index| pending.push(index, turn));
            let taken = pending.pop().unwrap();
            assert_eq!(taken, (0, turn));
            pending.put_back(taken.0, taken.1);
            assert_eq!([pending.pop(), pending.pop()], [Some((0, turn)), Some((1, turn))]);
        }
    }
}
