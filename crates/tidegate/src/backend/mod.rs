//! Location of the stack: in this process ([`embedded`]), or in a daemon (`attached`).
//!
//! Both implement [`SocketOps`]. [`Backend`] picks one of the two once a call.

#[cfg(feature = "attach")]
pub(crate) mod attached;
pub(crate) mod embedded;
pub(crate) mod guard;

use std::io;
use std::sync::Arc;

use tidegate_stack::UdpId;

#[cfg(feature = "attach")]
use self::attached::stack::AttachedStack;
use self::embedded::stack::EmbeddedStack;
use self::embedded::threads::Threads;
use crate::types::deadline::Deadline;
use crate::types::exchange::Exchange;
use crate::types::sleeper::Sleeper;
use crate::types::socket_id::SocketId;
use crate::types::socket_ops::SocketOps;

/// Location of the stack.
#[derive(Clone)]
pub(crate) enum Backend {
    /// In this process.
    Embedded {
        shared: Arc<EmbeddedStack>,
        /// Threads that drive the engine; without them the waiting calls drive it.
        threads: Option<Arc<Threads>>,
    },
    /// In a daemon.
    #[cfg(feature = "attach")]
    Attached(Arc<AttachedStack>),
}

impl Backend {
    /// Runs `call` on the locked stack.
    #[inline]
    pub(crate) fn with<R>(&self, call: impl FnOnce(&mut dyn SocketOps) -> R) -> R {
        match self {
            Self::Embedded { shared, .. } => call(&mut *shared.lock()),
            #[cfg(feature = "attach")]
            Self::Attached(attached) => call(&mut *attached.lock()),
        }
    }

    /// Runs the stack until `ready` returns a value or the deadline passes.
    ///
    /// `ready` is called first, so data that has already arrived costs no system call.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] when the deadline passes; the device's error when the
    /// device has failed; never [`io::ErrorKind::Interrupted`].
    pub(crate) fn wait_until<R>(
        &self,
        sockets: &[SocketId],
        deadline: Deadline,
        mut ready: impl FnMut(&mut dyn SocketOps) -> Option<io::Result<R>>,
    ) -> io::Result<R> {
        match self {
            Self::Embedded { shared, threads: None } => {
                shared.run_until(sockets, deadline, |core| ready(core))
            }
            Self::Embedded { shared, .. } => {
                shared.wait_until(sockets, deadline, |core| ready(core))
            }
            #[cfg(feature = "attach")]
            Self::Attached(attached) => attached.wait_until(sockets, deadline, |core| ready(core)),
        }
    }

    /// Waits for datagrams of a socket, and answers a batch of them. Returns the number of
    /// datagrams taken.
    ///
    /// # Errors
    /// As [`Backend::wait_until`], and an ICMP error of the connected peer's host.
    pub(crate) fn udp_exchange(
        &self,
        id: UdpId,
        deadline: Deadline,
        exchange: &mut impl Exchange,
    ) -> io::Result<usize> {
        let sockets = [SocketId::Udp(id)];
        match self {
            Self::Embedded { shared, threads: None } => {
                shared.run_until(&sockets, deadline, |core| core.udp_exchange(id, exchange))
            }
            Self::Embedded { shared, .. } => {
                shared.wait_until(&sockets, deadline, |core| core.udp_exchange(id, exchange))
            }
            #[cfg(feature = "attach")]
            Self::Attached(attached) => {
                attached.wait_until(&sockets, deadline, |core| core.udp_exchange(id, exchange))
            }
        }
    }

    /// Runs the stack until `ready` returns true, or `sleeper` has found an event of its own.
    /// Returns `false` when the deadline passes.
    ///
    /// # Errors
    /// The error of `sleeper`; the device's error when the device has failed.
    pub(crate) fn wait(
        &self,
        sockets: &[SocketId],
        deadline: Deadline,
        sleeper: &mut dyn Sleeper,
        ready: impl FnMut(&mut dyn SocketOps) -> bool,
    ) -> io::Result<bool> {
        match self {
            Self::Embedded { shared, threads } => {
                shared.wait(threads.is_some(), sockets, deadline, sleeper, ready)
            }
            #[cfg(feature = "attach")]
            Self::Attached(attached) => {
                let mut ready = ready;
                attached.wait(sockets, deadline, sleeper, &mut |core| ready(core))
            }
        }
    }

    /// Defers transmission for the next `calls` calls.
    pub(crate) fn defer_transmit(&self, calls: u32) {
        match self {
            Self::Embedded { shared, .. } => shared.lock().defer_transmit(calls),
            #[cfg(feature = "attach")]
            Self::Attached(attached) => attached.defer_wake_ups(calls),
        }
    }

    /// True if both handles are of one stack.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Embedded { shared, .. }, Self::Embedded { shared: other, .. }) => {
                Arc::ptr_eq(shared, other)
            }
            #[cfg(feature = "attach")]
            (Self::Attached(attached), Self::Attached(other)) => Arc::ptr_eq(attached, other),
            #[cfg(feature = "attach")]
            _ => false,
        }
    }
}
