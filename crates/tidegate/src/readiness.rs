//! What a socket is ready for, and waiting for sockets together with whatever
//! else a program waits for.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use tidegate_engine::Step;
use tidegate_stack::{Stack, TcpReadiness};

use crate::calls::Calls;
use crate::net::Net;
use crate::poll::{Interest, Source};
use crate::wait::{self, Patience, SocketId};

/// What a socket is ready for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Readiness {
    /// Something can be read: data, the end of it, a connection to be
    /// accepted, an error.
    pub readable: bool,
    /// Something can be written, or writing gives an error.
    pub writable: bool,
    /// Nothing will come any more.
    pub read_closed: bool,
    /// Nothing can be written any more.
    pub write_closed: bool,
    /// An error waits for `take_error`.
    pub failed: bool,
}

impl Readiness {
    /// What one of two is ready for.
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
                readable: stack.udp_readable(id) > 0,
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

    /// Whether this is what a program waits for.
    pub(crate) fn meets(self, interest: Interest) -> bool {
        interest.has(Interest::Readable) && self.readable
            || interest.has(Interest::Writable) && self.writable
            || self.failed
            || self.read_closed && self.write_closed
    }
}

/// How a thread sleeps while it waits for sockets in [`Net::wait`]: for
/// programs that wait for something else at the same time, or want to hear of
/// signals.
pub trait Sleeper {
    /// Sleeps until one of these descriptors is readable, the time is over, or
    /// what else the program waits for has come; says whether it has. With no
    /// descriptor and no time it only looks.
    ///
    /// # Errors
    /// Whatever ends the wait, as [`io::ErrorKind::Interrupted`].
    fn sleep(&mut self, wake: &[BorrowedFd<'_>], timeout: Option<Duration>) -> io::Result<bool>;
}

/// Each so many looks at the sockets the sleeper looks too.
const LOOKS: u32 = 8;

impl Net {
    /// Runs the stack until one of these sockets is ready for what is waited
    /// for, `sleeper` has found something of its own, or the time is over
    /// (`None`: for ever), when this gives `false`. The stack runs once at
    /// least, and the sleeper is asked when no socket is ready.
    ///
    /// # Errors
    /// What `sleeper` gives; when the port is of no further use.
    pub fn wait(
        &self,
        sources: &[(&dyn Source, Interest)],
        timeout: Option<Duration>,
        sleeper: &mut dyn Sleeper,
    ) -> io::Result<bool> {
        let patience = match timeout {
            Some(Duration::ZERO) => Patience::None,
            timeout => Patience::timeout(timeout),
        };
        let ids: Vec<SocketId> = sources.iter().map(|(source, _)| source.id()).collect();
        let is_ready = |calls: &mut dyn Calls| {
            let interests = sources.iter().map(|(_, interest)| *interest);
            ids.iter().zip(interests).any(|(&id, interest)| calls.readiness(id).meets(interest))
        };
        if let Some(attached) = self.attached() {
            return attached.wait(&ids, patience, sleeper, &mut |core| is_ready(core));
        }
        let Some(shared) = self.here() else { return Ok(false) };
        let mut looks = 0;
        loop {
            let mut core = shared.lock();
            if !self.has_threads() {
                core.run()?;
            }
            if is_ready(&mut *core) {
                core.mind_timers();
                return Ok(true);
            }
            if let Some(failure) = core.failure() {
                return Err(failure);
            }
            let left = patience.left();
            if left.is_some_and(|left| left.is_zero()) {
                drop(core);
                return sleeper.sleep(&[], Some(Duration::ZERO));
            }
            let step = if self.has_threads() { Step::Sleep } else { core.engine.idle_step() };
            if step != Step::Sleep {
                drop(core);
                if looks % LOOKS == 0 && sleeper.sleep(&[], Some(Duration::ZERO))? {
                    return Ok(true);
                }
                looks += 1;
                if step == Step::Pause {
                    shared.pause();
                }
                continue;
            }
            let bell = wait::thread_bell()?;
            bell.arm();
            core.waiters.enter(Arc::clone(&bell), &ids);
            let found = if self.has_threads() {
                drop(core);
                sleeper.sleep(&[bell.as_fd()], left)
            } else {
                shared.sleep_by(core, &bell, left, sleeper)
            };
            shared.lock().waiters.leave(&bell);
            bell.disarm();
            if found? {
                return Ok(true);
            }
        }
    }

    /// Lets what the next `calls` calls send wait in the stack: it leaves
    /// together with what the call after them sends, or when the stack runs.
    /// For a program that has just been told of several sockets, and will
    /// answer on most of them before it waits again.
    pub fn defer_transmit(&self, calls: u32) {
        // A daemon sends in bursts by itself.
        if let Some(mut core) = self.core() {
            core.deferred_calls = calls;
        }
    }

    /// Whether an address is one of this stack's.
    pub fn has_address(&self, address: std::net::IpAddr) -> bool {
        self.with(|calls| calls.has_address(address.to_canonical()))
    }

    /// The address that packets to `destination` leave from; `None` when
    /// nothing leads there.
    pub fn source_for(&self, destination: std::net::IpAddr) -> Option<std::net::IpAddr> {
        self.with(|calls| calls.source_for(destination.to_canonical()))
    }
}
