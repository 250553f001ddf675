//! Socket readiness, and waiting for sockets together with other events of an application.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use tidegate_engine::IdleStep;
use tidegate_stack::{Stack, TcpReadiness};

use crate::net::Net;
use crate::poll::{Interest, Source};
use crate::socket_ops::SocketOps;
use crate::wait::{self, Deadline, SocketId};

/// Readiness of a socket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Readiness {
    /// A read returns at once: data, end of stream, a connection to accept, or an error.
    pub readable: bool,
    /// A write returns at once: there is send-buffer space, or an error.
    pub writable: bool,
    /// The receive direction is closed: nothing more will arrive.
    pub read_closed: bool,
    /// The send direction is closed: nothing more can be written.
    pub write_closed: bool,
    /// An error is waiting for `take_error`.
    pub failed: bool,
}

impl Readiness {
    /// Combined readiness of two sockets.
    pub(crate) fn union(self, other: Self) -> Self {
        Self {
            readable: self.readable || other.readable,
            writable: self.writable || other.writable,
            read_closed: self.read_closed || other.read_closed,
            write_closed: self.write_closed || other.write_closed,
            failed: self.failed || other.failed,
        }
    }
}

impl From<TcpReadiness> for Readiness {
    fn from(found: TcpReadiness) -> Self {
        let TcpReadiness { readable, writable, read_closed, write_closed, failed } = found;
        Self { readable, writable, read_closed, write_closed, failed }
    }
}

impl Readiness {
    pub(crate) fn of(stack: &Stack, id: SocketId) -> Self {
        match id {
            SocketId::Udp(id) => Self {
                readable: stack.udp_queue_len(id) > 0,
                writable: true,
                failed: stack.udp_has_error(id),
                ..Self::default()
            },
            SocketId::Listener(id) => {
                Self { readable: stack.tcp_acceptable(id) > 0, ..Self::default() }
            }
            SocketId::Stream(id) => stack.tcp_readiness(id).into(),
            SocketId::Poll(_) => Self::default(),
        }
    }

    /// True if `interest` is met, or an error or the end of both directions is to be reported.
    pub(crate) fn meets(self, interest: Interest) -> bool {
        interest.has(Interest::Readable) && self.readable
            || interest.has(Interest::Writable) && self.writable
            || self.failed
            || self.read_closed && self.write_closed
    }
}

/// Sleep of a thread that waits for sockets in [`Net::wait`]: for applications that wait for
/// other events at the same time, or handle signals.
pub trait Sleeper {
    /// Sleeps until one of the descriptors is readable, the timeout expires, or another event
    /// of the application occurs; returns true in the last case. Without descriptors and with
    /// a zero timeout this only polls.
    ///
    /// # Errors
    /// An error ends the wait, as [`io::ErrorKind::Interrupted`].
    fn sleep(&mut self, wake: &[BorrowedFd<'_>], timeout: Option<Duration>) -> io::Result<bool>;
}

/// Pauses between two polls of the sleeper while the thread busy-polls the sockets.
const PAUSES_PER_SLEEPER_CHECK: u32 = 8;

impl Net {
    /// Runs the stack until one of the sockets has the wanted readiness, or `sleeper` has found
    /// an event of its own. Returns `false` when `timeout` expires (`None`: no limit). The
    /// stack runs at least once, and the sleeper is called when no socket is ready.
    ///
    /// # Errors
    /// The error of `sleeper`; an error when the device has failed.
    pub fn wait(
        &self,
        sources: &[(&dyn Source, Interest)],
        timeout: Option<Duration>,
        sleeper: &mut dyn Sleeper,
    ) -> io::Result<bool> {
        let deadline = match timeout {
            Some(Duration::ZERO) => Deadline::Now,
            timeout => Deadline::after(timeout),
        };
        let ids: Vec<SocketId> = sources.iter().map(|(source, _)| source.id()).collect();
        let is_ready = |ops: &mut dyn SocketOps| {
            let interests = sources.iter().map(|(_, interest)| *interest);
            ids.iter().zip(interests).any(|(&id, interest)| ops.readiness(id).meets(interest))
        };
        if let Some(attached) = self.attached() {
            return attached.wait(&ids, deadline, sleeper, &mut |core| is_ready(core));
        }
        let Some(shared) = self.embedded() else { return Ok(false) };
        let mut pauses = 0;
        loop {
            let mut core = shared.lock();
            if !self.has_threads() {
                core.run()?;
            }
            if is_ready(&mut *core) {
                core.wake_for_timers();
                return Ok(true);
            }
            if let Some(failure) = core.failure() {
                return Err(failure);
            }
            let remaining = deadline.remaining();
            if remaining.is_some_and(|left| left.is_zero()) {
                drop(core);
                return sleeper.sleep(&[], Some(Duration::ZERO));
            }
            let step = if self.has_threads() { IdleStep::Sleep } else { core.engine.idle_step() };
            if step != IdleStep::Sleep {
                drop(core);
                if pauses % PAUSES_PER_SLEEPER_CHECK == 0
                    && sleeper.sleep(&[], Some(Duration::ZERO))?
                {
                    return Ok(true);
                }
                pauses += 1;
                if step == IdleStep::Pause {
                    shared.pause();
                }
                continue;
            }
            let bell = wait::thread_bell()?;
            bell.arm();
            core.waiters.enter(Arc::clone(&bell), &ids);
            let found = if self.has_threads() {
                drop(core);
                sleeper.sleep(&[bell.as_fd()], remaining)
            } else {
                shared.sleep_with(core, &bell, remaining, sleeper)
            };
            shared.lock().waiters.leave(&bell);
            bell.disarm();
            if found? {
                return Ok(true);
            }
        }
    }

    /// Defers transmission for the next `calls` calls: their frames leave together with those
    /// of the call after them, or when the stack runs. For applications that have several ready
    /// sockets and will reply on most of them before the next wait.
    pub fn defer_transmit(&self, calls: u32) {
        // A daemon batches transmission by itself.
        if let Some(mut core) = self.lock_embedded() {
            core.deferred_calls = calls;
        }
    }

    /// True if `address` is one of this stack's.
    pub fn has_address(&self, address: std::net::IpAddr) -> bool {
        self.with(|ops| ops.has_address(address.to_canonical()))
    }

    /// Source address of packets to `destination`; `None` without a route.
    pub fn source_for(&self, destination: std::net::IpAddr) -> Option<std::net::IpAddr> {
        self.with(|ops| ops.source_for(destination.to_canonical()))
    }
}
