//! The stack that a program's sockets share.

use std::io;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tidegate_engine::{Engine, EngineCounters, Step};
use tidegate_port::{Capabilities, PortCounters};
use tidegate_stack::{Counters, Event, UdpId};

use crate::open::{self, NetConfig, OpenError};
use crate::wait::{self, Patience, Waiters};

/// A network stack embedded in this program. Cheap to clone: all clones are
/// the same stack, which ends when the last clone and the last socket are gone.
#[derive(Clone)]
pub struct Net {
    shared: Arc<Shared>,
}

struct Shared {
    core: Mutex<Core>,
    wake_fds: Vec<OwnedFd>,
}

/// The engine, and who sleeps until it has something for them.
pub(crate) struct Core {
    pub(crate) engine: Engine,
    pub(crate) waiters: Waiters,
    /// The kernel's addresses, when the stack lives on them.
    pub(crate) shared_addresses: Vec<IpAddr>,
}

/// What a stack counted since it was opened.
#[derive(Clone, Debug)]
pub struct NetCounters {
    /// Rounds and sleeps of the engine.
    pub engine: EngineCounters,
    /// Frames at the port.
    pub port: PortCounters,
    /// Packets in the stack.
    pub stack: Counters,
}

impl NetCounters {
    /// Every drop, at the port and in the stack, by reason.
    pub fn drops(&self) -> tidegate_wire::DropCounters {
        let mut drops = self.port.drops.clone();
        drops.merge(&self.stack.drops);
        drops.merge(&self.stack.transmit_drops);
        drops
    }
}

impl Net {
    /// Opens the port and makes a stack on it.
    ///
    /// # Errors
    /// [`OpenError`] says what is wrong and what to do; nothing stays behind.
    pub fn open(config: NetConfig) -> Result<Self, OpenError> {
        let (engine, shared_addresses) = open::engine(config)?;
        let wake_fds = engine.wake_fds().map_err(OpenError::Io)?;
        let core = Core { engine, waiters: Waiters::default(), shared_addresses };
        Ok(Self { shared: Arc::new(Shared { core: Mutex::new(core), wake_fds }) })
    }

    /// What the port can do.
    pub fn capabilities(&self) -> Capabilities {
        self.lock().engine.capabilities().clone()
    }

    /// What was counted so far.
    pub fn counters(&self) -> NetCounters {
        let mut core = self.lock();
        let (engine, port, stack) = core.engine.counters();
        let stack = stack.clone();
        NetCounters { engine, port, stack }
    }

    /// Frames that are neither in use nor with the port.
    pub fn frames_available(&self) -> usize {
        self.lock().engine.frames_available()
    }

    /// Runs the stack once: receive, process, transmit. Returns how many
    /// frames were received. For programs with a loop of their own; blocking
    /// calls on sockets do it by themselves.
    ///
    /// # Errors
    /// When the port is of no further use.
    pub fn run_once(&self) -> io::Result<usize> {
        self.lock().run()
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Core> {
        // A thread that panicked while it held the lock left the engine
        // between two packets, where it is whole.
        self.shared.core.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs the stack until `ready` gives a value or patience ends.
    ///
    /// `ready` is asked first, so what has arrived already costs no system call.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] when patience ends; what the port says when it
    /// is of no further use; [`io::ErrorKind::Interrupted`] never.
    pub(crate) fn wait_for<R>(
        &self,
        sockets: &[UdpId],
        patience: Patience,
        mut ready: impl FnMut(&mut Core) -> Option<io::Result<R>>,
    ) -> io::Result<R> {
        loop {
            let mut core = self.lock();
            if let Some(result) = ready(&mut core) {
                return result;
            }
            core.run()?;
            if let Some(result) = ready(&mut core) {
                return result;
            }
            if patience.left().is_some_and(|left| left.is_zero()) {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            match core.engine.idle_step() {
                Step::Spin => {}
                Step::Pause => {
                    drop(core);
                    wait::pause();
                }
                Step::Sleep => self.sleep(core, sockets, patience)?,
            }
        }
    }

    /// Sleeps until there is work for the stack, somebody else who runs it has
    /// something for one of `sockets`, or patience ends.
    fn sleep(
        &self,
        mut core: MutexGuard<'_, Core>,
        sockets: &[UdpId],
        patience: Patience,
    ) -> io::Result<()> {
        let bell = wait::thread_bell()?;
        bell.arm();
        core.waiters.enter(Arc::clone(&bell), sockets);
        let sleep = core.engine.prepare_sleep();
        drop(core);
        let slept = sleep.and_then(|sleep| {
            let Some(sleep) = sleep else { return Ok(()) };
            let timer = sleep.timeout_ns.map(Duration::from_nanos);
            let timeout = timer.into_iter().chain(patience.left()).min();
            wait::sleep(&self.shared.wake_fds, &bell, timeout)
        });
        self.lock().waiters.leave(&bell);
        bell.disarm();
        slept
    }

    pub(crate) fn is_same(&self, other: &Net) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
    }
}

impl std::fmt::Debug for Net {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Net").field("port", &self.capabilities()).finish_non_exhaustive()
    }
}

impl Core {
    /// One round of the engine, then wakes those it has something for.
    pub(crate) fn run(&mut self) -> io::Result<usize> {
        let received = self.engine.poll()?;
        while let Some(event) = self.engine.poll_event() {
            match event {
                Event::Readable(id) | Event::Error(id) => self.waiters.wake(id),
                _ => {}
            }
        }
        Ok(received)
    }
}
