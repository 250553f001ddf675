//! Ring of a program.

use std::io;
use std::time::Duration;

use super::buffers::{BufferIndex, BufferTable};
use super::entry::{Completion, Operation, Submission};
use super::sockets::{Socket, SocketKey, SocketTable};
use super::state::RingState;
use crate::net::handle::Net;
use crate::types::deadline::Deadline;
use crate::types::sleeper::{PollSleeper, Sleeper};
use crate::types::socket_id::SocketId;

/// Limits of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct RingConfig {
    /// Submissions that can be queued, and operations that can be in flight, each; the
    /// completion queue is twice as long. At most 32,768; 256 by default.
    pub entries: u32,
    /// Buffers, at most 65,536; 256 by default.
    pub buffers: u32,
    /// Bytes of a buffer, at most 1 MiB; 2,048 by default.
    pub buffer_bytes: u32,
    /// Sockets, at most 1,048,576; 4,096 by default.
    pub sockets: u32,
}

impl Default for RingConfig {
    fn default() -> Self {
        Self { entries: 256, buffers: 256, buffer_bytes: 2_048, sockets: 4_096 }
    }
}

impl RingConfig {
    /// Sets [`RingConfig::entries`].
    pub fn entries(self, entries: u32) -> Self {
        Self { entries, ..self }
    }

    /// Sets [`RingConfig::buffers`] and [`RingConfig::buffer_bytes`].
    pub fn buffers(self, buffers: u32, buffer_bytes: u32) -> Self {
        Self { buffers, buffer_bytes, ..self }
    }

    /// Sets [`RingConfig::sockets`].
    pub fn sockets(self, sockets: u32) -> Self {
        Self { sockets, ..self }
    }

    fn check(&self) -> io::Result<()> {
        let limits = [
            ("entries", self.entries, 1 << 15),
            ("buffers", self.buffers, 1 << 16),
            ("buffer_bytes", self.buffer_bytes, 1 << 20),
            ("sockets", self.sockets, 1 << 20),
        ];
        for (name, value, max) in limits {
            if !(1..=max).contains(&value) {
                let text = format!("RingConfig::{name} is {value}: choose 1 to {max}");
                return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
            }
        }
        Ok(())
    }
}

/// Ring on a [`Net`], for one thread at a time: submissions, completions, sockets and buffers.
///
/// Dropping a ring cancels what is in flight, and drops the ring's handles of its sockets. See the
/// [module](crate::ring) for an example.
pub struct Ring {
    net: Net,
    config: RingConfig,
    state: RingState,
}

fn invalid_input(text: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, text)
}

impl Ring {
    /// Creates a ring.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] for limits out of range.
    pub fn new(net: &Net, config: RingConfig) -> io::Result<Self> {
        config.check()?;
        let set = net.with(|ops| ops.poll_sets().add());
        let buffers = BufferTable::new(config.buffers, config.buffer_bytes as usize);
        let sockets = SocketTable::new(config.sockets as usize);
        let state = RingState::new(set, config.entries as usize, buffers, sockets);
        Ok(Self { net: net.clone(), config, state })
    }

    /// Limits of the ring.
    pub fn config(&self) -> RingConfig {
        self.config
    }

    /// Adds a handle of a socket: the socket stays open until it is closed in the ring.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] for a socket of another [`Net`],
    /// [`io::ErrorKind::AlreadyExists`] for one that is in the ring, and `EMFILE` at the limit.
    pub fn add(&mut self, socket: impl Into<Socket>) -> io::Result<SocketKey> {
        let socket = socket.into();
        if !socket.net().is_same(&self.net) {
            return Err(invalid_input("the socket belongs to another Net: use one Ring per Net"));
        }
        let state = &mut self.state;
        let added = self.net.with(|ops| state.add(ops, socket));
        self.state.closing.clear();
        added
    }

    /// Removes a socket at once, and returns the ring's handle. The operations of the socket in flight
    /// complete with `ECANCELED`. Returns `None` if the socket is not in the ring.
    pub fn remove(&mut self, key: SocketKey) -> Option<Socket> {
        let state = &mut self.state;
        let removed = self.net.with(|ops| state.remove(ops, key));
        self.state.closing.clear();
        removed
    }

    /// Socket of the ring; `None` after it was closed or removed.
    pub fn socket(&self, key: SocketKey) -> Option<&Socket> {
        self.state.sockets.get(key).map(|slot| &slot.socket)
    }

    /// Takes a free buffer; `None` if there is none. The program holds the buffer until it sends or
    /// releases it.
    pub fn take_buffer(&mut self) -> Option<BufferIndex> {
        self.state.buffers.take()
    }

    /// Frees a buffer that the program holds. Nothing happens to other buffers.
    pub fn release_buffer(&mut self, buffer: BufferIndex) {
        self.state.buffers.release(buffer);
    }

    /// Whole buffer; what was received is at its beginning.
    ///
    /// # Panics
    /// If the ring has no such buffer.
    pub fn buffer(&self, buffer: BufferIndex) -> &[u8] {
        self.state.buffers.bytes(buffer)
    }

    /// Whole buffer, to be written. What is written while a send is in flight may be sent.
    ///
    /// # Panics
    /// If the ring has no such buffer.
    pub fn buffer_mut(&mut self, buffer: BufferIndex) -> &mut [u8] {
        self.state.buffers.bytes_mut(buffer)
    }

    /// Queues an operation for the next submit. The buffer of a send belongs to the ring then.
    ///
    /// # Errors
    /// [`io::ErrorKind::ResourceBusy`] when the submission queue is full,
    /// [`io::ErrorKind::InvalidInput`] for a buffer that the program does not hold.
    pub fn push(&mut self, submission: Submission) -> io::Result<()> {
        if self.state.submissions.len() == self.state.max_in_flight {
            return Err(io::Error::new(
                io::ErrorKind::ResourceBusy,
                "the submission queue is full: submit, take completions, and push again",
            ));
        }
        if let Operation::Send { buffer, len, .. } = submission.operation {
            self.state.buffers.lend(buffer, len)?;
        }
        self.state.submissions.push_back(submission);
        Ok(())
    }

    /// Starts the queued operations, and transmits what they send, without waiting. Returns the
    /// number started. Operations beyond the limit of operations in flight stay queued, and start
    /// when there is space; so do all while the completion queue is full.
    ///
    /// # Errors
    /// [`io::ErrorKind::ResourceBusy`] when none could start: take completions first, or cancel
    /// operations. An error when the device has failed.
    pub fn submit(&mut self) -> io::Result<usize> {
        let queued = self.state.submissions.len();
        let Self { net, state, .. } = self;
        let turned = net.with(|ops| state.turn(net, ops));
        self.state.closing.clear();
        turned?;
        match queued - self.state.submissions.len() {
            0 if queued > 0 => Err(io::Error::new(
                io::ErrorKind::ResourceBusy,
                "the ring is full: take completions, or cancel operations in flight",
            )),
            started => Ok(started),
        }
    }

    /// Submits, and waits until `count` completions can be taken, for at most `timeout` (`None`: no
    /// limit). Returns the number of completions that can be taken: fewer when the time is over, or
    /// when operations wait for a free buffer or for space to send a datagram. With a count of 0 this
    /// looks for completions of operations in flight, without waiting.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] for a `count` above [`RingConfig::entries`].
    /// `ENOBUFS` when nothing can complete before the program releases a buffer. An error when the
    /// device has failed.
    pub fn submit_and_wait(
        &mut self,
        count: usize,
        timeout: Option<Duration>,
    ) -> io::Result<usize> {
        self.submit_and_wait_with(count, timeout, &mut PollSleeper)
    }

    /// Like [`Ring::submit_and_wait`]; the thread sleeps by `sleeper`, whose own events end the wait.
    ///
    /// # Errors
    /// As [`Ring::submit_and_wait`], and the error of `sleeper`.
    pub fn submit_and_wait_with(
        &mut self,
        count: usize,
        timeout: Option<Duration>,
        sleeper: &mut dyn Sleeper,
    ) -> io::Result<usize> {
        if count > self.state.max_in_flight {
            return Err(invalid_input("a wait for more completions than RingConfig::entries"));
        }
        let Self { net, state, .. } = self;
        net.with(|ops| state.turn(net, ops))?;
        let deadline = match (count, timeout) {
            (0, _) | (_, Some(Duration::ZERO)) => Deadline::Now,
            _ => Deadline::after(timeout),
        };
        let ids = [SocketId::Poll(state.set)];
        let is_done = |state: &RingState| count > 0 && state.has_waited(count);
        // The handles of closed sockets lock the stack: a wait is interrupted for them.
        state.closing.clear();
        while !is_done(state) {
            let mut turned = Ok(());
            let waited = net.wait_for(&ids, deadline, sleeper, |ops| {
                turned = state.turn_of_wait(net, ops);
                turned.is_err() || !state.closing.is_empty() || is_done(state)
            });
            let has_closed = !state.closing.is_empty();
            state.closing.clear();
            waited.and(turned)?;
            if !has_closed || count == 0 {
                break;
            }
        }
        match self.state.completions.len() {
            0 if self.state.needs_buffer() => Err(rustix::io::Errno::NOBUFS.into()),
            found => Ok(found),
        }
    }

    /// Takes the oldest completion.
    pub fn completion(&mut self) -> Option<Completion> {
        self.state.completions.pop_front()
    }

    /// Number of operations in flight.
    pub fn in_flight(&self) -> usize {
        self.state.in_flight.len()
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        self.net.with(|ops| ops.poll_sets().drop_set(self.state.set));
    }
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ring")
            .field("config", &self.config)
            .field("in_flight", &self.in_flight())
            .field("completions", &self.state.completions.len())
            .finish_non_exhaustive()
    }
}
