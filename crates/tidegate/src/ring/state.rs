//! State of a ring, and what happens to it while the stack is locked.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;

use rustix::io::Errno;
use tidegate_stack::TcpOptions;

use super::attempt::{Outcome, Stall, attempt};
use super::buffers::BufferTable;
use super::entry::{Completion, ConnectSettings, Operation, Submission};
use super::in_flight::{Direction, Op, OpKind, OpQueue, OpTable};
use super::sockets::{Socket, SocketKey, SocketSlot, SocketTable};
use crate::net::handle::Net;
use crate::tcp::TcpStream;
use crate::types::readiness::{Interest, Token};
use crate::types::socket_id::{PollSetId, SocketId};
use crate::types::socket_ops::SocketOps;

/// Most operations that a wait attempts without events of their sockets.
const MAX_ATTEMPTS: usize = 64;

/// State of a ring.
pub(super) struct RingState {
    /// Poll set that notes which sockets have changed.
    pub(super) set: PollSetId,
    pub(super) submissions: VecDeque<Submission>,
    pub(super) completions: VecDeque<Completion>,
    pub(super) buffers: BufferTable,
    pub(super) sockets: SocketTable,
    pub(super) in_flight: OpTable,
    /// Sockets that left the ring; their last handles are dropped when the stack is unlocked.
    pub(super) closing: Vec<Socket>,
    /// Limit of operations in flight.
    pub(super) max_in_flight: usize,
    /// Slots of sockets that have changed.
    changed: VecDeque<u32>,
    /// Slots of sockets that wait for a free buffer, for space to send, or for space in the completion
    /// queue.
    waiting: VecDeque<u32>,
    /// Sockets of which datagrams were received during a turn.
    read: Vec<SocketId>,
}

fn not_in_ring() -> io::Error {
    io::Error::new(io::ErrorKind::NotConnected, "the socket is not in the ring, or was closed")
}

impl RingState {
    pub(super) fn new(
        set: PollSetId,
        entries: usize,
        buffers: BufferTable,
        sockets: SocketTable,
    ) -> Self {
        Self {
            set,
            submissions: VecDeque::with_capacity(entries),
            completions: VecDeque::with_capacity(2 * entries),
            buffers,
            sockets,
            in_flight: OpTable::new(entries),
            closing: Vec::new(),
            max_in_flight: entries,
            changed: VecDeque::new(),
            waiting: VecDeque::new(),
            read: Vec::new(),
        }
    }

    /// True if a completion fits beside those of the operations in flight.
    fn has_completion_space(&self) -> bool {
        self.completions.len() + self.in_flight.len() < 2 * self.max_in_flight
    }

    /// True if nothing can complete before the program releases a buffer.
    pub(super) fn needs_buffer(&self) -> bool {
        !self.waiting.is_empty() && !self.buffers.has_free() && !self.in_flight.has_sends()
    }

    /// True if a wait for `count` completions is to end.
    pub(super) fn has_waited(&self, count: usize) -> bool {
        let found = self.completions.len();
        found >= count || !self.waiting.is_empty() && found > 0 || self.needs_buffer()
    }

    /// Like [`RingState::turn`], for a thread that waits: operations in flight, if they are few, are
    /// attempted without an event of their sockets, which comes later than their data.
    pub(super) fn turn_of_wait(&mut self, net: &Net, ops: &mut dyn SocketOps) -> io::Result<()> {
        ops.begin_batch();
        if ops.has_early_data() && self.in_flight.len() <= MAX_ATTEMPTS {
            for index in 0..MAX_ATTEMPTS {
                if let Some((slot, direction)) = self.in_flight.waits_at(index) {
                    self.run(ops, slot, direction);
                }
            }
        }
        self.end_turn(net, ops)
    }

    /// Starts the submissions, as far as there is space, and goes on with the operations in flight
    /// whose sockets have changed.
    pub(super) fn turn(&mut self, net: &Net, ops: &mut dyn SocketOps) -> io::Result<()> {
        ops.begin_batch();
        self.end_turn(net, ops)
    }

    fn end_turn(&mut self, net: &Net, ops: &mut dyn SocketOps) -> io::Result<()> {
        self.start_all(net, ops);
        self.run_changed(ops);
        let ended = ops.end_batch(&self.read);
        self.read.clear();
        ended
    }

    fn start_all(&mut self, net: &Net, ops: &mut dyn SocketOps) {
        let mut is_blocked = false;
        for _ in 0..self.submissions.len() {
            let Some(submission) = self.submissions.pop_front() else { break };
            let is_full = submission.may_stay() && self.in_flight.len() == self.max_in_flight;
            let waits = is_full || is_blocked && !submission.may_overtake();
            if waits || !self.has_completion_space() {
                is_blocked = true;
                self.submissions.push_back(submission);
                continue;
            }
            self.start(net, ops, submission);
        }
    }

    fn start(&mut self, net: &Net, ops: &mut dyn SocketOps, submission: Submission) {
        let Submission { operation, user_data, is_multishot, skips_success } = submission;
        let finished = match operation {
            Operation::Recv { socket } => self.kind_on(socket, OpKind::Recv),
            Operation::Accept { listener } => self.kind_on(listener, OpKind::Accept),
            Operation::Send { socket, buffer, len, to } => {
                let kind = OpKind::Send { buffer, len, sent: 0, to };
                let found = self.kind_on(socket, kind);
                if found.is_err() {
                    self.buffers.give_back(buffer);
                    let completion = Completion::new(user_data, Err(not_in_ring()));
                    let completion = Completion { buffer: Some(buffer), ..completion };
                    return self.completions.push_back(completion);
                }
                found
            }
            Operation::Connect { remote, settings } => {
                let settings = settings.map(|settings| *settings);
                let connecting = self.start_connect(net, ops, remote, settings);
                connecting.map(|key| (key, OpKind::Connect { owns_socket: true }))
            }
            Operation::FinishConnect { stream } => {
                self.kind_on(stream, OpKind::Connect { owns_socket: false })
            }
            Operation::Nop => return self.finish_plain(user_data, Ok(0), skips_success),
            Operation::Close { socket } => self.kind_on(socket, OpKind::Close),
            Operation::Cancel { user_data: wanted } => {
                let cancelled = self.cancel(ops, wanted);
                return self.finish_plain(user_data, cancelled, skips_success);
            }
        };
        match finished {
            Ok((SocketKey { slot, .. }, kind)) => {
                self.start_op(ops, Op { user_data, kind, is_multishot, skips_success, slot });
            }
            Err(error) => self.finish_plain(user_data, Err(error), false),
        }
    }

    fn kind_on(&self, socket: SocketKey, kind: OpKind) -> io::Result<(SocketKey, OpKind)> {
        self.sockets.get(socket).ok_or_else(not_in_ring).map(|_| (socket, kind))
    }

    fn finish_plain(&mut self, user_data: u64, result: io::Result<usize>, skips_success: bool) {
        if !(skips_success && result.is_ok()) {
            self.completions.push_back(Completion::new(user_data, result));
        }
    }

    /// Adds a socket to the table and to the poll set.
    pub(super) fn add(&mut self, ops: &mut dyn SocketOps, socket: Socket) -> io::Result<SocketKey> {
        if !self.sockets.has_space() {
            self.closing.push(socket);
            return Err(Errno::MFILE.into());
        }
        let id = socket.id();
        let key = self.sockets.insert(socket);
        let token = Token(key.slot as usize);
        if let Err(error) = ops.poll_sets().insert(self.set, id, token, Interest::Both) {
            self.closing.extend(self.sockets.remove(key));
            return Err(error);
        }
        Ok(key)
    }

    fn start_connect(
        &mut self,
        net: &Net,
        ops: &mut dyn SocketOps,
        remote: SocketAddr,
        settings: Option<ConnectSettings>,
    ) -> io::Result<SocketKey> {
        self.sockets.has_space().then_some(()).ok_or(Errno::MFILE)?;
        let (local, options) =
            settings.map_or((None, TcpOptions::default()), |from| (from.local, from.options));
        let stream = TcpStream::start_connect(net, ops, local, remote, options)?;
        self.add(ops, stream.into())
    }

    /// Starts an operation: attempts it at once if no other one of the socket waits.
    fn start_op(&mut self, ops: &mut dyn SocketOps, mut op: Op) {
        let (slot, direction) = (op.slot, op.direction());
        let has_socket_space = self.sockets.has_space();
        let Self { sockets, buffers, in_flight, read, .. } = self;
        let Some(SocketSlot { socket, queues, .. }) = sockets.slot_mut(slot) else { return };
        let queue = &mut queues[direction as usize];
        let is_first = queue.is_empty();
        if is_first && !op.is_multishot && !matches!(op.kind, OpKind::Close) {
            match attempt(ops, socket, &mut op, buffers, has_socket_space) {
                Ok(outcome) => {
                    note_read(read, socket, &outcome);
                    self.finish(ops, op, outcome);
                }
                Err(stall) => {
                    in_flight.push(queue, op);
                    if stall == Stall::NoSpace {
                        self.wait_for_space(slot);
                    }
                }
            }
            return;
        }
        in_flight.push(queue, op);
        if is_first {
            self.run(ops, slot, direction);
        }
    }

    /// Goes on with the operations of sockets that have changed or wait for space.
    fn run_changed(&mut self, ops: &mut dyn SocketOps) {
        loop {
            for slot in self.waiting.drain(..) {
                if let Some(socket) = self.sockets.slot_mut(slot) {
                    socket.waits_for_space = false;
                }
                self.changed.push_back(slot);
            }
            let changed = &mut self.changed;
            ops.poll_sets().take_changed(self.set, |token| changed.push_back(token.0 as u32));
            let before = (self.in_flight.len(), self.completions.len());
            while let Some(slot) = self.changed.pop_front() {
                // What is sent frees buffers.
                self.run(ops, slot, Direction::Write);
                self.run(ops, slot, Direction::Read);
            }
            let after = (self.in_flight.len(), self.completions.len());
            if self.waiting.is_empty() || before == after {
                return;
            }
        }
    }

    /// Attempts the operations of a socket in one direction until one does not finish.
    fn run(&mut self, ops: &mut dyn SocketOps, slot: u32, direction: Direction) {
        loop {
            let has_space = self.has_completion_space();
            let has_socket_space = self.sockets.has_space();
            let Self { sockets, buffers, in_flight, read, .. } = self;
            let Some(SocketSlot { socket, queues, .. }) = sockets.slot_mut(slot) else { return };
            let queue = &mut queues[direction as usize];
            let Some(op) = in_flight.first(queue) else { return };
            if op.is_multishot && !has_space {
                return self.wait_for_space(slot);
            }
            if matches!(op.kind, OpKind::Close) {
                if let Some(op) = in_flight.pop(queue) {
                    self.finish_close(ops, &op);
                }
                return;
            }
            match attempt(ops, socket, op, buffers, has_socket_space) {
                Ok(outcome) => {
                    note_read(read, socket, &outcome);
                    let goes_on = op.is_multishot && continues(&op.kind, &outcome);
                    if goes_on {
                        let user_data = op.user_data;
                        let completion = self.completion(ops, user_data, slot, outcome);
                        self.completions.push_back(Completion { has_more: true, ..completion });
                    } else if let Some(op) = in_flight.pop(queue) {
                        self.finish(ops, op, outcome);
                    }
                }
                Err(Stall::Blocked) => return,
                Err(Stall::NoSpace) => return self.wait_for_space(slot),
            }
        }
    }

    fn wait_for_space(&mut self, slot: u32) {
        if let Some(socket) = self.sockets.slot_mut(slot)
            && !std::mem::replace(&mut socket.waits_for_space, true)
        {
            self.waiting.push_back(slot);
        }
    }

    /// Removes the socket of a close from the ring.
    fn finish_close(&mut self, ops: &mut dyn SocketOps, op: &Op) {
        let key = self.sockets.key_of(op.slot);
        let socket = key.and_then(|key| self.remove(ops, key));
        self.closing.extend(socket);
        self.finish_plain(op.user_data, Ok(0), op.skips_success);
    }

    /// Completes an operation.
    fn finish(&mut self, ops: &mut dyn SocketOps, op: Op, outcome: Outcome) {
        let is_success = outcome.result.is_ok();
        let mut completion = self.completion(ops, op.user_data, op.slot, outcome);
        match op.kind {
            OpKind::Send { buffer, len, .. } => {
                self.buffers.give_back(buffer);
                if op.skips_success && matches!(completion.result, Ok(sent) if sent == len) {
                    self.buffers.release(buffer);
                    return;
                }
                completion.buffer = Some(buffer);
            }
            OpKind::Connect { owns_socket: true } if !is_success => {
                let socket = completion.socket.take().and_then(|key| self.take_out(ops, key));
                self.closing.extend(socket);
            }
            OpKind::Connect { .. } | OpKind::Recv | OpKind::Accept | OpKind::Close => {}
        }
        self.completions.push_back(completion);
    }

    /// Completion of an outcome. An accepted connection is added to the ring.
    fn completion(
        &mut self,
        ops: &mut dyn SocketOps,
        user_data: u64,
        slot: u32,
        outcome: Outcome,
    ) -> Completion {
        let Outcome { mut result, buffer, from, is_truncated, accepted } = outcome;
        let socket = self.sockets.key_of(slot);
        let accepted = accepted.and_then(|stream| {
            let added = self.add(ops, stream.into());
            added.map_err(|error| result = Err(error)).ok()
        });
        let has_more = false;
        Completion { user_data, result, buffer, from, socket, accepted, is_truncated, has_more }
    }

    /// Cancels the operations with this user data. Returns their number.
    fn cancel(&mut self, ops: &mut dyn SocketOps, user_data: u64) -> io::Result<usize> {
        let slots: Vec<u32> = self.in_flight.slots_with(user_data).collect();
        for &slot in &slots {
            self.cancel_of(ops, slot, |op| op.user_data == user_data);
        }
        match slots.len() {
            0 => Err(Errno::NOENT.into()),
            count => Ok(count),
        }
    }

    /// Cancels operations of a socket.
    fn cancel_of(&mut self, ops: &mut dyn SocketOps, slot: u32, is_wanted: impl Fn(&Op) -> bool) {
        let Self { sockets, in_flight, .. } = self;
        let Some(SocketSlot { queues, .. }) = sockets.slot_mut(slot) else { return };
        let mut removed = Vec::new();
        let mut remove = |queue: &mut OpQueue| {
            in_flight.remove_where(queue, &is_wanted, &mut removed);
        };
        queues.iter_mut().for_each(&mut remove);
        for op in removed {
            let result = match op.kind {
                OpKind::Send { sent: sent @ 1.., .. } => Ok(sent),
                _ => Err(Errno::CANCELED.into()),
            };
            self.finish(ops, op, Outcome::new(result));
        }
    }

    /// Removes a socket, and cancels its operations in flight.
    pub(super) fn remove(&mut self, ops: &mut dyn SocketOps, key: SocketKey) -> Option<Socket> {
        self.sockets.get(key)?;
        self.cancel_of(ops, key.slot, |_| true);
        self.take_out(ops, key).or_else(|| self.closing.pop())
    }

    /// Removes a socket from the table and from the poll set.
    fn take_out(&mut self, ops: &mut dyn SocketOps, key: SocketKey) -> Option<Socket> {
        let socket = self.sockets.remove(key)?;
        ops.poll_sets().remove(self.set, socket.id());
        Some(socket)
    }
}

/// Notes that datagrams of a socket were received.
fn note_read(read: &mut Vec<SocketId>, socket: &Socket, outcome: &Outcome) {
    if let (Socket::Udp(udp), Some(_)) = (socket, outcome.buffer) {
        read.push(SocketId::Udp(udp.udp_id()));
    }
}

/// True if a multishot operation stays in flight after this outcome.
fn continues(kind: &OpKind, outcome: &Outcome) -> bool {
    match kind {
        // A datagram may be empty; the end of a stream has no buffer.
        OpKind::Recv => outcome.buffer.is_some(),
        OpKind::Accept => outcome.result.is_ok(),
        OpKind::Connect { .. } | OpKind::Send { .. } | OpKind::Close => false,
    }
}
