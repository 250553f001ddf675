//! Operations in flight: submitted and not completed.

use std::net::SocketAddr;

use super::buffers::BufferIndex;

/// End of a queue.
const NONE: u32 = u32::MAX;

/// Direction of a socket that an operation waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    Read,
    Write,
}

/// Kind of an operation that can be in flight.
#[derive(Debug)]
pub(super) enum OpKind {
    Accept,
    Recv,
    /// The socket of an operation that `owns_socket` leaves the ring if connecting fails.
    Connect {
        owns_socket: bool,
    },
    /// Waits for the sends before it.
    Close,
    Send {
        buffer: BufferIndex,
        len: usize,
        sent: usize,
        to: Option<SocketAddr>,
    },
}

/// Operation that is started.
#[derive(Debug)]
pub(super) struct Op {
    pub(super) user_data: u64,
    pub(super) kind: OpKind,
    pub(super) is_multishot: bool,
    pub(super) skips_success: bool,
    /// Slot of the socket.
    pub(super) slot: u32,
}

impl Op {
    pub(super) fn direction(&self) -> Direction {
        match self.kind {
            OpKind::Accept | OpKind::Recv => Direction::Read,
            OpKind::Connect { .. } | OpKind::Send { .. } | OpKind::Close => Direction::Write,
        }
    }
}

/// Queue of the operations of a socket in one direction, oldest first.
pub(super) struct OpQueue {
    first: u32,
    last: u32,
}

impl Default for OpQueue {
    fn default() -> Self {
        Self { first: NONE, last: NONE }
    }
}

impl OpQueue {
    pub(super) fn is_empty(&self) -> bool {
        self.first == NONE
    }
}

/// All operations in flight. Queues link them, so that none is allocated.
pub(super) struct OpTable {
    /// Operations, each with the next one of its queue.
    ops: Vec<(Option<Op>, u32)>,
    free: Vec<u32>,
    /// Number of sends among them.
    sends: usize,
}

impl OpTable {
    pub(super) fn new(max: usize) -> Self {
        Self { ops: Vec::with_capacity(max), free: Vec::new(), sends: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.ops.len() - self.free.len()
    }

    pub(super) fn has_sends(&self) -> bool {
        self.sends > 0
    }

    /// Adds an operation to a queue.
    pub(super) fn push(&mut self, queue: &mut OpQueue, op: Op) {
        self.sends += usize::from(matches!(op.kind, OpKind::Send { .. }));
        let entry = (Some(op), NONE);
        let index = match self.free.pop() {
            Some(index) => {
                self.ops[index as usize] = entry;
                index
            }
            None => {
                self.ops.push(entry);
                self.ops.len() as u32 - 1
            }
        };
        match queue.is_empty() {
            true => queue.first = index,
            false => self.ops[queue.last as usize].1 = index,
        }
        queue.last = index;
    }

    /// First operation of a queue.
    pub(super) fn first(&mut self, queue: &OpQueue) -> Option<&mut Op> {
        self.ops.get_mut(queue.first as usize)?.0.as_mut()
    }

    /// Removes the first operation of a queue.
    pub(super) fn pop(&mut self, queue: &mut OpQueue) -> Option<Op> {
        let index = queue.first;
        let (op, next) = self.ops.get_mut(index as usize)?;
        let op = op.take()?;
        queue.first = *next;
        self.free.push(index);
        self.sends -= usize::from(matches!(op.kind, OpKind::Send { .. }));
        Some(op)
    }

    /// Slot and direction of the operation with this index.
    pub(super) fn waits_at(&self, index: usize) -> Option<(u32, Direction)> {
        let op = self.ops.get(index)?.0.as_ref()?;
        Some((op.slot, op.direction()))
    }

    /// Slots of the sockets with an operation of this user data.
    pub(super) fn slots_with(&self, user_data: u64) -> impl Iterator<Item = u32> {
        let all = self.ops.iter().filter_map(|(op, _)| op.as_ref());
        all.filter(move |op| op.user_data == user_data).map(|op| op.slot)
    }

    /// Removes the operations of a queue that meet a condition, oldest first; the others keep their
    /// order.
    pub(super) fn remove_where(
        &mut self,
        queue: &mut OpQueue,
        mut is_wanted: impl FnMut(&Op) -> bool,
        removed: &mut Vec<Op>,
    ) {
        let mut kept = OpQueue::default();
        while let Some(op) = self.pop(queue) {
            match is_wanted(&op) {
                true => removed.push(op),
                false => self.push(&mut kept, op),
            }
        }
        *queue = kept;
    }
}
