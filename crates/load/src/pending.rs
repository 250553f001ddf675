//! Table of outstanding requests.

/// Outstanding request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PendingRequest {
    /// Intended send time, in nanoseconds.
    pub intended_ns: u64,
    /// Tag of the sender: index of the query, or number of the packet.
    pub tag: u32,
}

/// Outstanding requests by flow and id.
///
/// The table has a fixed size. It assigns the ids, which wrap around per flow. A request whose
/// slot is reused before its response arrives is lost.
pub struct PendingTable {
    slots: Box<[Option<PendingRequest>]>,
    next_id: Box<[u16]>,
    ids_per_flow: u32,
}

/// Approximate number of slots: a quarter of a second at a million requests per second.
const TARGET_CAPACITY: u32 = 1 << 18;

impl PendingTable {
    /// Creates a table for `flows` flows (at least one).
    pub fn new(flows: u32) -> Self {
        let flows = flows.max(1);
        let ids_per_flow = (TARGET_CAPACITY / flows).clamp(16, 1 << 16);
        Self {
            slots: vec![None; (ids_per_flow * flows) as usize].into_boxed_slice(),
            next_id: vec![0; flows as usize].into_boxed_slice(),
            ids_per_flow,
        }
    }

    /// Stores a request and returns its id: the next id of `flow`.
    #[inline]
    pub fn insert(&mut self, flow: u32, pending: PendingRequest) -> u16 {
        let next = &mut self.next_id[flow as usize];
        let id = *next;
        *next = if u32::from(id) + 1 == self.ids_per_flow { 0 } else { id + 1 };
        let slot = self.slot_index(flow, id);
        self.slots[slot] = Some(pending);
        id
    }

    /// Removes and returns the request that a response on `flow` with `id` belongs to; `None` when
    /// no such request is outstanding.
    #[inline]
    pub fn take(&mut self, flow: u32, id: u16) -> Option<PendingRequest> {
        if u32::from(id) >= self.ids_per_flow || flow as usize >= self.next_id.len() {
            return None;
        }
        let slot = self.slot_index(flow, id);
        self.slots[slot].take()
    }

    /// Restores a request that [`Self::take`] returned for a response to an older request.
    #[inline]
    pub fn restore(&mut self, flow: u32, id: u16, pending: PendingRequest) {
        let slot = self.slot_index(flow, id);
        self.slots[slot] = Some(pending);
    }

    #[inline]
    fn slot_index(&self, flow: u32, id: u16) -> usize {
        // Requests close in time are close in memory.
        usize::from(id) * self.next_id.len() + flow as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pending(tag: u32) -> PendingRequest {
        PendingRequest { intended_ns: u64::from(tag) * 10, tag }
    }

    #[test]
    fn takes_each_request_once_and_on_its_own_flow() {
        let mut table = PendingTable::new(2);
        let first = table.insert(0, pending(1));
        let other = table.insert(1, pending(2));
        let second = table.insert(0, pending(3));
        assert_ne!(first, second);
        assert_eq!(table.take(0, second), Some(pending(3)));
        assert_eq!(table.take(0, second), None, "twice");
        assert_eq!(table.take(1, other), Some(pending(2)));
        assert_eq!(table.take(0, first), Some(pending(1)));
        assert_eq!(table.take(2, 0), None, "no such flow");
    }

    #[test]
    fn wrapped_ids_replace_the_oldest_request() {
        for flows in [1, 3, 64, 1 << 16] {
            let mut table = PendingTable::new(flows);
            let ids = table.ids_per_flow;
            for tag in 0..=ids {
                table.insert(0, pending(tag));
            }
            assert_eq!(table.take(0, 0), Some(pending(ids)), "{flows} flows");
            assert_eq!(table.take(0, (ids - 1) as u16), Some(pending(ids - 1)));
        }
    }
}
