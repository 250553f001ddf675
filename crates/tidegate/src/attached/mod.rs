//! Sockets of a stack in a daemon, through shared memory.

mod attachments;
mod kernel_sockets;
mod ops;
mod shards;

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tidegate_engine::{IdleConfig, IdleGovernor, IdleStep, pause};
use tidegate_service::Shard;
use tidegate_service::attachment::{Attachment, SocketType};
use tidegate_stack::{TcpId, TcpListenerId, UdpId};

use self::attachments::Attachments;
use self::kernel_sockets::KernelSockets;
use self::shards::Shards;
use crate::batch;
use crate::poll::PollSets;
use crate::readiness::{Readiness, Sleeper};
use crate::socket_ops::SocketOps;
use crate::tasks::{StackGuard, Tasks};
use crate::wait::{self, Deadline, PollSleeper, SocketId, Waiters};

/// Pauses between two polls of the sleeper while the thread busy-polls the sockets.
const PAUSES_PER_SLEEPER_CHECK: u32 = 8;

/// Waits that end at once after the daemon has exited, so that applications see their errors
/// and clean up.
const IMMEDIATE_WAITS: u32 = 256;

/// Duration of later waits that find nothing but errors: an application that keeps such a
/// socket would spin forever.
const DELAYED_WAIT: Duration = Duration::from_millis(100);

/// Attached stack, shared by the threads of the application.
pub(crate) struct AttachedStack {
    core: Mutex<AttachedCore>,
    began: Instant,
}

/// Attachments of the application, and the threads and tasks that wait for its sockets.
pub(crate) struct AttachedCore {
    attachments: Attachments,
    /// Sockets that are open on several attachments.
    shards: Shards,
    kernel_sockets: KernelSockets,
    waiters: Waiters,
    poll_sets: PollSets,
    tasks: Tasks,
    idle: IdleGovernor,
    has_daemon_exited: bool,
    /// Waits since the daemon exited.
    waits_since_exit: u32,
}

impl AttachedStack {
    pub(crate) fn new(attachment: Attachment) -> io::Result<Self> {
        let core = AttachedCore {
            attachments: Attachments::new(attachment)?,
            shards: Shards::default(),
            kernel_sockets: KernelSockets::default(),
            waiters: Waiters::default(),
            poll_sets: PollSets::default(),
            tasks: Tasks::default(),
            idle: new_idle(0),
            has_daemon_exited: false,
            waits_since_exit: 0,
        };
        Ok(Self { core: Mutex::new(core), began: Instant::now() })
    }

    pub(crate) fn lock(&self) -> StackGuard<'_, AttachedCore> {
        assert!(!batch::is_active(), "a socket was used inside a batch, but not through the batch");
        // A thread that panicked while it held the lock was between two operations.
        StackGuard::new(self.core.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Prepares a fork: creates an attachment for the child, and blocks the other threads
    /// until the fork is done.
    pub(crate) fn prepare_fork(&self) -> Fork<'_> {
        let mut core = self.lock();
        let children = core.attachments.fork_children();
        Fork { core, children }
    }

    /// Waits until `ready` returns a value or the deadline passes.
    pub(crate) fn wait_until<R>(
        &self,
        sockets: &[SocketId],
        deadline: Deadline,
        mut ready: impl FnMut(&mut dyn SocketOps) -> Option<io::Result<R>>,
    ) -> io::Result<R> {
        let mut result = None;
        let found = self.wait_for_daemon(sockets, deadline, &mut PollSleeper, &mut |core| {
            result = ready(core);
            result.is_some()
        })?;
        match found {
            Some(_) => result.unwrap_or_else(|| Err(io::ErrorKind::WouldBlock.into())),
            None => ready(&mut *self.lock()).unwrap_or_else(|| Err(daemon_exited())),
        }
    }

    /// Waits until `ready` returns true, or `sleeper` has found an event of its own. Returns
    /// `false` when the deadline passes. After the daemon exits every socket is ready, for its
    /// error, and the sleeper still finds its events.
    pub(crate) fn wait(
        &self,
        sockets: &[SocketId],
        deadline: Deadline,
        sleeper: &mut dyn Sleeper,
        ready: &mut dyn FnMut(&mut AttachedCore) -> bool,
    ) -> io::Result<bool> {
        if let Some(found) = self.wait_for_daemon(sockets, deadline, sleeper, ready)? {
            return Ok(found);
        }
        let mut core = self.lock();
        let is_ready = ready(&mut core);
        core.waits_since_exit = core.waits_since_exit.saturating_add(1);
        let limit = match core.waits_since_exit {
            _ if !is_ready => None,
            ..=IMMEDIATE_WAITS => Some(Duration::ZERO),
            _ => Some(DELAYED_WAIT),
        };
        drop(core);
        let limit = limit.into_iter().chain(deadline.remaining()).min();
        Ok(sleeper.sleep(&[], limit)? || is_ready)
    }

    /// Like [`AttachedStack::wait`]; returns `None` when the daemon has exited.
    fn wait_for_daemon(
        &self,
        sockets: &[SocketId],
        deadline: Deadline,
        sleeper: &mut dyn Sleeper,
        ready: &mut dyn FnMut(&mut AttachedCore) -> bool,
    ) -> io::Result<Option<bool>> {
        let mut pauses = 0;
        loop {
            let mut core = self.lock();
            if core.has_daemon_exited {
                return Ok(None);
            }
            if ready(&mut core) {
                return Ok(Some(true));
            }
            match core.poll_daemon() {
                Ok(false) => {}
                Ok(true) => {
                    let now_ns = self.now_ns();
                    core.idle.on_work(now_ns);
                    if ready(&mut core) {
                        return Ok(Some(true));
                    }
                }
                Err(_) => return Ok(None),
            }
            let remaining = deadline.remaining();
            if remaining.is_some_and(|left| left.is_zero()) {
                drop(core);
                return sleeper.sleep(&[], Some(Duration::ZERO)).map(Some);
            }
            let step = core.idle.step(self.now_ns());
            if step != IdleStep::Sleep {
                drop(core);
                if pauses % PAUSES_PER_SLEEPER_CHECK == 0
                    && sleeper.sleep(&[], Some(Duration::ZERO))?
                {
                    return Ok(Some(true));
                }
                pauses += 1;
                if pause() {
                    self.lock().idle.on_cpu_contention();
                }
                continue;
            }
            let bell = wait::thread_bell()?;
            bell.arm();
            core.waiters.enter(Arc::clone(&bell), sockets);
            let prepared = core.attachments.prepare_sleep();
            let wake_fd = Arc::clone(core.attachments.wake_fd());
            drop(core);
            let found = match prepared {
                Ok(true) => sleeper.sleep(&[wake_fd.as_fd(), bell.as_fd()], remaining),
                // An exited daemon is detected after the sleep.
                Ok(false) | Err(_) => Ok(false),
            };
            let mut core = self.lock();
            core.waiters.leave(&bell);
            bell.disarm();
            let woken = core.finish_sleep();
            if found? {
                return Ok(Some(true));
            }
            if woken.is_err() {
                return Ok(None);
            }
        }
    }

    /// Copy of the descriptor that is readable when the daemon has sent a notification.
    #[cfg(feature = "tokio")]
    pub(crate) fn wake_fd(&self) -> io::Result<std::os::fd::OwnedFd> {
        self.lock().attachments.wake_fd().try_clone()
    }

    fn now_ns(&self) -> u64 {
        self.began.elapsed().as_nanos() as u64
    }
}

/// Error of all operations after the daemon has exited.
fn daemon_exited() -> io::Error {
    io::ErrorKind::ConnectionAborted.into()
}

/// Idle policy without spinning: the daemon may need this processor, and a pause yields it.
fn new_idle(now_ns: u64) -> IdleGovernor {
    IdleGovernor::new(IdleConfig { spin_ns: 0, ..IdleConfig::default() }, now_ns)
}

/// Fork in progress of an attached process.
///
/// The attachments are locked while this value exists. Call [`Fork::in_parent`] in the parent
/// and [`Fork::in_child`] in the child.
pub struct Fork<'a> {
    core: StackGuard<'a, AttachedCore>,
    children: io::Result<Attachments>,
}

impl Fork<'_> {
    /// Continues in the parent, also when the fork failed.
    pub fn in_parent(self) {}

    /// Continues in the child: it holds the parent's sockets through attachments of its own.
    ///
    /// # Errors
    /// When the child got no attachment, because the daemon has exited or this user may not
    /// attach. All later calls fail.
    pub fn in_child(self) -> io::Result<()> {
        let Self { mut core, children } = self;
        // The registered sleepers and tasks are threads and tasks of the parent.
        wait::forget_thread_bell();
        core.waiters = Waiters::default();
        core.tasks = Tasks::default();
        core.idle = new_idle(0);
        let result = children.map(|heirs| core.attachments = heirs);
        if result.is_err() {
            core.attachments.abandon();
            core.fail();
        }
        result
    }
}

impl std::fmt::Debug for Fork<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Fork").field("is_prepared", &self.children.is_ok()).finish_non_exhaustive()
    }
}

/// UDP handle made of a socket number.
pub(crate) fn udp_id(number: u64) -> UdpId {
    UdpId::from_bits(number)
}

pub(crate) fn stream_id(number: u64) -> TcpId {
    TcpId::from_bits(number)
}

/// Listener handle made of a socket number; fails with `InvalidData` for an invalid number.
pub(crate) fn listener_id(number: u64) -> io::Result<TcpListenerId> {
    TcpListenerId::from_bits(number).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// Socket number of a handle; a poll set has none.
fn socket_number(id: SocketId) -> Option<u64> {
    match id {
        SocketId::Udp(id) => Some(id.to_bits()),
        SocketId::Listener(id) => Some(id.to_bits()),
        SocketId::Stream(id) => Some(id.to_bits()),
        SocketId::Poll(_) => None,
    }
}

/// Socket received from another process, by its socket number.
pub(crate) struct TransferredSocket {
    pub(crate) socket: u64,
    pub(crate) kind: SocketType,
    /// False if this process had the socket before.
    pub(crate) is_new: bool,
}

impl AttachedCore {
    /// Takes the daemon's notifications, and wakes the threads and tasks that wait for them.
    /// Returns true if there was any.
    pub(crate) fn poll_daemon(&mut self) -> io::Result<bool> {
        let received = match self.attachments.poll() {
            Ok(result) => result,
            Err(error) => {
                self.fail();
                return Err(error);
            }
        };
        self.dispatch_events()?;
        Ok(received)
    }

    /// Wakes the threads and tasks that wait for the changed sockets.
    fn dispatch_events(&mut self) -> io::Result<()> {
        while let Some((changed, kind)) = self.attachments.next_changed() {
            let changed = self.shards.socket_of(changed);
            let id = match kind {
                SocketType::Udp => SocketId::Udp(udp_id(changed)),
                SocketType::Stream => SocketId::Stream(stream_id(changed)),
                SocketType::Listener => SocketId::Listener(listener_id(changed)?),
            };
            self.waiters.wake(id);
            self.poll_sets.on_event(id, &self.waiters);
            self.tasks.wake_both(id);
        }
        Ok(())
    }

    /// Finishes a sleep on the wake descriptor.
    pub(crate) fn finish_sleep(&mut self) -> io::Result<()> {
        self.attachments.end_sleep().inspect_err(|_| self.fail())?;
        self.poll_daemon().map(|_| ())
    }

    /// Prepares a sleep on the wake descriptor. Returns `false` when a notification waits.
    #[cfg(feature = "tokio")]
    pub(crate) fn prepare_sleep(&mut self) -> io::Result<bool> {
        self.attachments.prepare_sleep().inspect_err(|_| self.fail())
    }

    /// Records that the daemon has exited, and wakes all waiters.
    fn fail(&mut self) {
        if !std::mem::replace(&mut self.has_daemon_exited, true) {
            self.poll_sets.on_event_for_all(&self.waiters);
            self.waiters.wake_all();
            self.tasks.wake_all();
        }
    }

    fn readiness_of(&mut self, id: SocketId) -> Readiness {
        let Some(number) = socket_number(id) else { return Readiness::default() };
        let first = self.attachments.readiness(self.shards.first(number));
        let others = self.shards.others(number);
        others.iter().fold(first, |found, &other| found.union(self.attachments.readiness(other)))
    }

    /// Like [`Attachment::reserve_port`]. With several attachments the socket is kept until the
    /// attachments that get its port are known.
    pub(crate) fn reserve_port(&mut self, fd: BorrowedFd<'_>) -> io::Result<()> {
        if self.attachments.max() == 1 {
            return self.attachments.first().reserve_port(Shard::ONLY, fd);
        }
        self.kernel_sockets.insert(fd)
    }

    /// Waits until the daemon has executed all previous commands.
    pub(crate) fn await_closed(&mut self) -> io::Result<()> {
        self.attachments.ping()
    }

    /// Like [`Attachment::send_socket`], with all shards.
    pub(crate) fn send_socket(&mut self, id: SocketId, fd: BorrowedFd<'_>) -> io::Result<()> {
        let all = self.shards.shards_of(socket_number(id).ok_or(io::ErrorKind::InvalidInput)?);
        let count = all.len() as u8;
        let mut sent = Ok(());
        let mut sent_count = 0;
        for &shard in &all {
            let (attachment, socket) = self.attachments.attachment_of(shard)?;
            sent = attachment.send_socket(socket, Shard { index: sent_count, count }, fd);
            if sent.is_err() {
                break;
            }
            sent_count += 1;
        }
        if sent.is_err() {
            self.withdraw_shards(&all[..sent_count.into()], fd)?;
        }
        sent
    }

    /// Like [`Attachment::withdraw_socket`], with all shards.
    pub(crate) fn withdraw_socket(&mut self, id: SocketId, fd: BorrowedFd<'_>) -> io::Result<()> {
        let all = self.shards.shards_of(socket_number(id).ok_or(io::ErrorKind::InvalidInput)?);
        self.withdraw_shards(&all, fd)
    }

    fn withdraw_shards(&mut self, shards: &[u64], fd: BorrowedFd<'_>) -> io::Result<()> {
        (0..).zip(shards).try_for_each(|(number, &part)| {
            let (attachment, _) = self.attachments.attachment_of(part)?;
            attachment.withdraw_socket(number, fd)
        })
    }

    /// Like [`Attachment::receive_socket`], with all shards, each on an attachment of its own as far as
    /// there are enough.
    pub(crate) fn receive_socket(&mut self, fd: BorrowedFd<'_>) -> io::Result<TransferredSocket> {
        let first = self.attachments.first().receive_socket(0, fd)?;
        let socket = self.attachments.pack(0, first.socket);
        let received = TransferredSocket { socket, kind: first.socket_type, is_new: first.is_new };
        if !first.is_new || first.shards == 1 {
            return Ok(received);
        }
        self.attachments.attach_to_all_cores();
        let mut all = vec![socket];
        for shard in 1..first.shards {
            let index = usize::from(shard) % self.attachments.count();
            match self.attachments.get(index)?.receive_socket(shard, fd) {
                Ok(other) => all.push(self.attachments.pack(index, other.socket)),
                // The daemon has no shard of this number.
                Err(error) if error.kind() == io::ErrorKind::NotConnected => {}
                Err(error) => {
                    all.into_iter().for_each(|shard| self.attachments.close(shard, false));
                    return Err(error);
                }
            }
        }
        self.shards.insert(all);
        Ok(received)
    }

    /// Runs `call` on the poll sets, with a function that returns a socket's readiness.
    fn with_polls<R>(
        &mut self,
        call: impl FnOnce(&mut PollSets, &mut dyn FnMut(SocketId) -> Readiness) -> R,
    ) -> R {
        let mut polls = std::mem::take(&mut self.poll_sets);
        let result = call(&mut polls, &mut |id| self.readiness_of(id));
        self.poll_sets = polls;
        result
    }
}
