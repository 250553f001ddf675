//! Which requests are on their way.

/// What is remembered of a request until its answer comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pending {
    /// When it was meant to be sent.
    pub intended_ns: u64,
    /// What the sender wants to know again: the number of the query.
    pub tag: u32,
}

/// Requests on their way, each with a flow and an id within it.
///
/// A fixed table: the id of a request is given here, and goes around. A
/// request whose place is needed again without an answer is lost.
pub struct Slots {
    table: Box<[Option<Pending>]>,
    next_id: Box<[u16]>,
    ids: u32,
}

/// About how many requests may be on their way at once. At a million a second
/// that is a quarter of a second.
const CAPACITY: u32 = 1 << 18;

impl Slots {
    /// A table for `flows` flows (at least one).
    pub fn new(flows: u32) -> Self {
        let flows = flows.max(1);
        let ids = (CAPACITY / flows).clamp(16, 1 << 16);
        Self {
            table: vec![None; (ids * flows) as usize].into_boxed_slice(),
            next_id: vec![0; flows as usize].into_boxed_slice(),
            ids,
        }
    }

    /// Takes the next id of `flow` for a request.
    #[inline]
    pub fn send(&mut self, flow: u32, pending: Pending) -> u16 {
        let next = &mut self.next_id[flow as usize];
        let id = *next;
        *next = if u32::from(id) + 1 == self.ids { 0 } else { id + 1 };
        let place = self.place(flow, id);
        self.table[place] = Some(pending);
        id
    }

    /// Takes the request that an answer on `flow` with `id` belongs to; `None`
    /// when there is none, or it had its answer already.
    #[inline]
    pub fn answer(&mut self, flow: u32, id: u16) -> Option<Pending> {
        if u32::from(id) >= self.ids || flow as usize >= self.next_id.len() {
            return None;
        }
        let place = self.place(flow, id);
        self.table[place].take()
    }

    /// Undoes [`Slots::answer`] when the answer turns out to be another's.
    #[inline]
    pub fn put_back(&mut self, flow: u32, id: u16, pending: Pending) {
        let place = self.place(flow, id);
        self.table[place] = Some(pending);
    }

    #[inline]
    fn place(&self, flow: u32, id: u16) -> usize {
        // Neighbours in time are neighbours in memory.
        usize::from(id) * self.next_id.len() + flow as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pending(tag: u32) -> Pending {
        Pending { intended_ns: u64::from(tag) * 10, tag }
    }

    #[test]
    fn each_request_is_answered_once_and_on_its_own_flow() {
        let mut slots = Slots::new(2);
        let first = slots.send(0, pending(1));
        let other = slots.send(1, pending(2));
        let second = slots.send(0, pending(3));
        assert_ne!(first, second);
        assert_eq!(slots.answer(0, second), Some(pending(3)));
        assert_eq!(slots.answer(0, second), None, "twice");
        assert_eq!(slots.answer(1, other), Some(pending(2)));
        assert_eq!(slots.answer(0, first), Some(pending(1)));
        assert_eq!(slots.answer(2, 0), None, "no such flow");
    }

    #[test]
    fn ids_go_around_and_the_oldest_is_given_up() {
        for flows in [1, 3, 64, 1 << 16] {
            let mut slots = Slots::new(flows);
            let ids = slots.ids;
            for tag in 0..=ids {
                slots.send(0, pending(tag));
            }
            assert_eq!(slots.answer(0, 0), Some(pending(ids)), "{flows} flows");
            assert_eq!(slots.answer(0, (ids - 1) as u16), Some(pending(ids - 1)));
        }
    }
}
