//! Flows of a class: fair turns by bytes (deficit round robin), new flows first, as in FQ-CoDel
//! (RFC 8290 sections 4.1 and 4.2).

use super::chains::{Chain, Chains};

/// Flows of a class; two flows with the same hash share one.
pub(super) const FLOWS: usize = 1024;

/// Bytes of a turn: a full frame on Ethernet.
const QUANTUM_BYTES: i32 = 1514;

/// End of a list of flows.
const NONE: u16 = u16::MAX;

/// Frame in the queue of a flow.
pub struct Queued<T> {
    /// Value that stands for the frame.
    pub value: T,
    /// Bytes that the frame takes on the link.
    pub bytes: u32,
    /// Time after which the frame is of no more use; `u64::MAX` for never.
    pub expires_ns: u64,
}

/// Frames of a flow, and the connections that wait until they have left.
#[derive(Clone, Default)]
pub(super) struct Flow {
    queue: Chain,
    pub(super) frames: u32,
    pub(super) bytes: u32,
    pub(super) waiting: Chain,
    deficit_bytes: i32,
    is_listed: bool,
    next: u16,
}

/// List of flows, by index.
struct FlowList {
    first: u16,
    last: u16,
}

impl FlowList {
    const EMPTY: Self = Self { first: NONE, last: NONE };

    fn push(&mut self, flows: &mut [Flow], index: u16) {
        flows[usize::from(index)].next = NONE;
        match flows.get_mut(usize::from(self.last)) {
            Some(last) => last.next = index,
            None => self.first = index,
        }
        self.last = index;
    }

    fn pop(&mut self, flows: &[Flow]) {
        let Some(first) = flows.get(usize::from(self.first)) else { return };
        self.first = first.next;
        if self.first == NONE {
            self.last = NONE;
        }
    }

    fn is_empty(&self) -> bool {
        self.first == NONE
    }
}

/// The flows of one class.
pub(super) struct FlowQueues {
    flows: Box<[Flow]>,
    /// Flows that had no frames before.
    new: FlowList,
    old: FlowList,
}

impl FlowQueues {
    pub(super) fn new() -> Self {
        let flows = vec![Flow::default(); FLOWS].into_boxed_slice();
        Self { flows, new: FlowList::EMPTY, old: FlowList::EMPTY }
    }

    /// The flow at an index below [`FLOWS`].
    #[inline]
    pub(super) fn flow(&mut self, index: u16) -> &mut Flow {
        &mut self.flows[usize::from(index) % FLOWS]
    }

    /// Appends a frame to a flow.
    pub(super) fn push<T>(
        &mut self,
        frames: &mut Chains<Queued<T>>,
        index: u16,
        queued: Queued<T>,
    ) {
        let flow = self.flow(index);
        flow.frames += 1;
        flow.bytes += queued.bytes;
        frames.push(&mut flow.queue, queued);
        if !flow.is_listed {
            flow.is_listed = true;
            flow.deficit_bytes = QUANTUM_BYTES;
            self.new.push(&mut self.flows, index);
        }
    }

    /// Removes the next frame; also returns the index of its flow. `None` if there is none.
    pub(super) fn pop<T>(&mut self, frames: &mut Chains<Queued<T>>) -> Option<(u16, Queued<T>)> {
        loop {
            let is_new = !self.new.is_empty();
            let list = if is_new { &mut self.new } else { &mut self.old };
            let index = list.first;
            let flow = self.flows.get_mut(usize::from(index))?;
            if flow.deficit_bytes > 0
                && let Some(queued) = frames.pop(&mut flow.queue)
            {
                flow.frames -= 1;
                flow.bytes -= queued.bytes;
                flow.deficit_bytes -= queued.bytes.cast_signed();
                return Some((index, queued));
            }
            let is_spent = flow.deficit_bytes <= 0;
            if is_spent {
                flow.deficit_bytes += QUANTUM_BYTES;
            }
            list.pop(&self.flows);
            // An empty new flow goes behind the old ones once, or it would be new again at once.
            if is_spent || is_new && !self.old.is_empty() {
                self.old.push(&mut self.flows, index);
            } else {
                self.flow(index).is_listed = false;
            }
        }
    }
}
