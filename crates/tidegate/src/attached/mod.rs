//! Calls on a stack in a daemon, through shared memory.

mod calls;
mod held;
mod lines;
mod parts;

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tidegate_engine::{Idle, IdleConfig, Step, pause};
use tidegate_service::Part;
use tidegate_service::attachment::{Attachment, Kind};
use tidegate_stack::{TcpId, TcpListenerId, UdpId};

use self::held::Held;
use self::lines::Lines;
use self::parts::Parts;
use crate::batch;
use crate::calls::Calls;
use crate::poll::Polls;
use crate::readiness::{Readiness, Sleeper};
use crate::tasks::{Guard, Tasks};
use crate::wait::{self, JustSleep, Patience, SocketId, Waiters};

/// While there is always something of the sockets', a sleeper's own things are
/// looked at each so many looks.
const LOOKS: u32 = 8;

/// When the daemon has ended so many waits end at once: programs hear of errors, and
/// clean up.
const PROMPT_WAITS: u32 = 256;

/// Later ones take so long where there is nothing but errors: whoever keeps a socket
/// that gives nothing else would be busy with it for ever.
const LATE_WAIT: Duration = Duration::from_millis(100);

/// The attachments of a program, which its threads share.
pub(crate) struct Attached {
    core: Mutex<AttachedCore>,
    began: Instant,
}

/// The attachments of a program, and who waits for its sockets.
pub(crate) struct AttachedCore {
    lines: Lines,
    /// Sockets that are on several lines.
    parts: Parts,
    held: Held,
    waiters: Waiters,
    polls: Polls,
    tasks: Tasks,
    idle: Idle,
    has_failed: bool,
    /// How many have waited since.
    waits_after: u32,
}

impl Attached {
    pub(crate) fn new(attachment: Attachment) -> io::Result<Self> {
        let core = AttachedCore {
            lines: Lines::new(attachment)?,
            parts: Parts::default(),
            held: Held::default(),
            waiters: Waiters::default(),
            polls: Polls::default(),
            tasks: Tasks::default(),
            idle: new_idle(0),
            has_failed: false,
            waits_after: 0,
        };
        Ok(Self { core: Mutex::new(core), began: Instant::now() })
    }

    pub(crate) fn lock(&self) -> Guard<'_, AttachedCore> {
        assert!(!batch::is_held(), "a socket was used inside a batch by other ways than the batch");
        // A thread that panicked while it held the lock was between two calls.
        Guard::new(self.core.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Before this process is forked: gets an attachment for the child, and holds
    /// other threads back until the fork is over.
    pub(crate) fn prepare_fork(&self) -> Fork<'_> {
        let mut core = self.lock();
        let heirs = core.lines.heirs();
        Fork { core, heirs }
    }

    /// Waits until `ready` gives a value or patience ends.
    pub(crate) fn wait_for<R>(
        &self,
        sockets: &[SocketId],
        patience: Patience,
        mut ready: impl FnMut(&mut dyn Calls) -> Option<io::Result<R>>,
    ) -> io::Result<R> {
        let mut result = None;
        let found = self.wait_for_daemon(sockets, patience, &mut JustSleep, &mut |core| {
            result = ready(core);
            result.is_some()
        })?;
        match found {
            Some(_) => result.unwrap_or_else(|| Err(io::ErrorKind::WouldBlock.into())),
            None => ready(&mut *self.lock()).unwrap_or_else(|| Err(ended())),
        }
    }

    /// Waits until `ready` says so, `sleeper` has found something of its own, or
    /// patience ends, when this gives `false`. When the daemon has ended every socket
    /// is ready, for its error, and the sleeper finds what it has found before.
    pub(crate) fn wait(
        &self,
        sockets: &[SocketId],
        patience: Patience,
        sleeper: &mut dyn Sleeper,
        ready: &mut dyn FnMut(&mut AttachedCore) -> bool,
    ) -> io::Result<bool> {
        if let Some(found) = self.wait_for_daemon(sockets, patience, sleeper, ready)? {
            return Ok(found);
        }
        let mut core = self.lock();
        let is_ready = ready(&mut core);
        core.waits_after = core.waits_after.saturating_add(1);
        let limit = match core.waits_after {
            _ if !is_ready => None,
            ..=PROMPT_WAITS => Some(Duration::ZERO),
            _ => Some(LATE_WAIT),
        };
        drop(core);
        let limit = limit.into_iter().chain(patience.left()).min();
        Ok(sleeper.sleep(&[], limit)? || is_ready)
    }

    /// As [`Attached::wait`]; `None` when the daemon has ended.
    fn wait_for_daemon(
        &self,
        sockets: &[SocketId],
        patience: Patience,
        sleeper: &mut dyn Sleeper,
        ready: &mut dyn FnMut(&mut AttachedCore) -> bool,
    ) -> io::Result<Option<bool>> {
        let mut looks = 0;
        loop {
            let mut core = self.lock();
            if core.has_failed {
                return Ok(None);
            }
            if ready(&mut core) {
                return Ok(Some(true));
            }
            match core.hear() {
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
            let left = patience.left();
            if left.is_some_and(|left| left.is_zero()) {
                drop(core);
                return sleeper.sleep(&[], Some(Duration::ZERO)).map(Some);
            }
            let step = core.idle.step(self.now_ns());
            if step != Step::Sleep {
                drop(core);
                if looks % LOOKS == 0 && sleeper.sleep(&[], Some(Duration::ZERO))? {
                    return Ok(Some(true));
                }
                looks += 1;
                if pause() {
                    self.lock().idle.on_crowded();
                }
                continue;
            }
            let bell = wait::thread_bell()?;
            bell.arm();
            core.waiters.enter(Arc::clone(&bell), sockets);
            let sleeps = core.lines.prepare_sleep();
            let signal = Arc::clone(core.lines.signal());
            drop(core);
            let found = match sleeps {
                Ok(true) => sleeper.sleep(&[signal.as_fd(), bell.as_fd()], left),
                // One that has ended is found out when we wake up.
                Ok(false) | Err(_) => Ok(false),
            };
            let mut core = self.lock();
            core.waiters.leave(&bell);
            bell.disarm();
            let woken = core.wake_up();
            if found? {
                return Ok(Some(true));
            }
            if woken.is_err() {
                return Ok(None);
            }
        }
    }

    /// What becomes readable when the daemon tells something.
    #[cfg(feature = "tokio")]
    pub(crate) fn signal(&self) -> io::Result<std::os::fd::OwnedFd> {
        self.lock().lines.signal().try_clone()
    }

    fn now_ns(&self) -> u64 {
        self.began.elapsed().as_nanos() as u64
    }
}

/// What is said of a daemon that has ended.
fn ended() -> io::Error {
    io::ErrorKind::ConnectionAborted.into()
}

/// The daemon may need this processor: a pause lets it have it.
fn new_idle(now_ns: u64) -> Idle {
    Idle::new(IdleConfig { spin_ns: 0, ..IdleConfig::default() }, now_ns)
}

/// An attached process that is about to be forked, or just was.
///
/// Nothing of the attachment changes while this is there. One of its functions is
/// to be called in the parent and one in the child.
pub struct Fork<'a> {
    core: Guard<'a, AttachedCore>,
    heirs: io::Result<Lines>,
}

impl Fork<'_> {
    /// In the parent, also when there is no child: it goes on as before.
    pub fn in_parent(self) {}

    /// In the child: its sockets are the parent's, by attachments of its own.
    ///
    /// # Errors
    /// When it got none: the daemon has ended, or this user may not attach. All
    /// calls fail then.
    pub fn in_child(self) -> io::Result<()> {
        let Self { mut core, heirs } = self;
        // Those who slept and waited are threads and tasks of the parent's.
        wait::forget_thread_bell();
        core.waiters = Waiters::default();
        core.tasks = Tasks::default();
        core.idle = new_idle(0);
        let taken = heirs.map(|heirs| core.lines = heirs);
        if taken.is_err() {
            core.lines.abandon();
            core.fail();
        }
        taken
    }
}

impl std::fmt::Debug for Fork<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Fork").field("is_prepared", &self.heirs.is_ok()).finish_non_exhaustive()
    }
}

/// The number of a socket is that of one of a stack's.
pub(crate) fn udp(number: u64) -> UdpId {
    UdpId::from_bits(number)
}

pub(crate) fn stream(number: u64) -> TcpId {
    TcpId::from_bits(number)
}

/// The daemon gives no listener a name that is none.
pub(crate) fn listener(number: u64) -> io::Result<TcpListenerId> {
    TcpListenerId::from_bits(number).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// The number of a socket; a set has none.
fn number(id: SocketId) -> Option<u64> {
    match id {
        SocketId::Udp(id) => Some(id.to_bits()),
        SocketId::Listener(id) => Some(id.to_bits()),
        SocketId::Stream(id) => Some(id.to_bits()),
        SocketId::Poll(_) => None,
    }
}

/// A socket that came from another process, by its number.
pub(crate) struct Arrived {
    pub(crate) socket: u64,
    pub(crate) kind: Kind,
    /// This process did not have it before.
    pub(crate) is_new: bool,
}

impl AttachedCore {
    /// Takes what the daemon has told, and wakes those whom it concerns. Whether
    /// it was anything.
    pub(crate) fn hear(&mut self) -> io::Result<bool> {
        let heard = match self.lines.poll() {
            Ok(heard) => heard,
            Err(error) => {
                self.fail();
                return Err(error);
            }
        };
        self.dispatch()?;
        Ok(heard)
    }

    /// Wakes those who wait for what has changed.
    fn dispatch(&mut self) -> io::Result<()> {
        while let Some((changed, kind)) = self.lines.next_changed() {
            let changed = self.parts.whole(changed);
            let id = match kind {
                Kind::Datagrams => SocketId::Udp(udp(changed)),
                Kind::Stream => SocketId::Stream(stream(changed)),
                Kind::Listener => SocketId::Listener(listener(changed)?),
            };
            self.waiters.wake(id);
            self.polls.on_event(id, &self.waiters);
            self.tasks.wake_both(id);
        }
        Ok(())
    }

    /// After a sleep on the connection.
    pub(crate) fn wake_up(&mut self) -> io::Result<()> {
        self.lines.end_sleep().inspect_err(|_| self.fail())?;
        self.hear().map(|_| ())
    }

    /// Makes ready to sleep on the connection. `false` when there is something
    /// already.
    #[cfg(feature = "tokio")]
    pub(crate) fn prepare_sleep(&mut self) -> io::Result<bool> {
        self.lines.prepare_sleep().inspect_err(|_| self.fail())
    }

    /// The daemon has ended: nobody shall wait for it.
    fn fail(&mut self) {
        if !std::mem::replace(&mut self.has_failed, true) {
            self.polls.on_event_for_all(&self.waiters);
            self.waiters.wake_all();
            self.tasks.wake_all();
        }
    }

    fn look(&mut self, id: SocketId) -> Readiness {
        let Some(number) = number(id) else { return Readiness::default() };
        let first = self.lines.look(self.parts.first(number));
        let others = self.parts.others(number);
        others.iter().fold(first, |found, &other| found.union(self.lines.look(other)))
    }

    /// As [`Attachment::hold`]. With several lines it is not known yet which of them get
    /// the port.
    pub(crate) fn hold(&mut self, descriptor: BorrowedFd<'_>) -> io::Result<()> {
        if self.lines.most() == 1 {
            return self.lines.first().hold(Part::ONLY, descriptor);
        }
        self.held.insert(descriptor)
    }

    /// Everything that was asked of the daemon before has been done then.
    pub(crate) fn await_closed(&mut self) -> io::Result<()> {
        self.lines.ping()
    }

    /// As [`Attachment::offer`], with all parts.
    pub(crate) fn offer(&mut self, id: SocketId, descriptor: BorrowedFd<'_>) -> io::Result<()> {
        let all = self.parts.of(number(id).ok_or(io::ErrorKind::InvalidInput)?);
        let of = all.len() as u8;
        let mut offered = Ok(());
        let mut done = 0;
        for &part in &all {
            let (line, socket) = self.lines.of(part)?;
            offered = line.offer(socket, Part { number: done, of }, descriptor);
            if offered.is_err() {
                break;
            }
            done += 1;
        }
        if offered.is_err() {
            self.withdraw_parts(&all[..done.into()], descriptor)?;
        }
        offered
    }

    /// As [`Attachment::withdraw`], with all parts.
    pub(crate) fn withdraw(&mut self, id: SocketId, descriptor: BorrowedFd<'_>) -> io::Result<()> {
        let all = self.parts.of(number(id).ok_or(io::ErrorKind::InvalidInput)?);
        self.withdraw_parts(&all, descriptor)
    }

    fn withdraw_parts(&mut self, parts: &[u64], descriptor: BorrowedFd<'_>) -> io::Result<()> {
        (0..).zip(parts).try_for_each(|(number, &part)| {
            let (line, _) = self.lines.of(part)?;
            line.withdraw(number, descriptor)
        })
    }

    /// As [`Attachment::take`], with all parts, each on a line of its own as far as there
    /// are so many.
    pub(crate) fn take(&mut self, descriptor: BorrowedFd<'_>) -> io::Result<Arrived> {
        let first = self.lines.first().take(0, descriptor)?;
        let socket = self.lines.number(0, first.socket);
        let arrived = Arrived { socket, kind: first.kind, is_new: first.is_new };
        if !first.is_new || first.parts == 1 {
            return Ok(arrived);
        }
        self.lines.complete();
        let mut all = vec![socket];
        for part in 1..first.parts {
            let at = usize::from(part) % self.lines.count();
            match self.lines.line(at)?.take(part, descriptor) {
                Ok(other) => all.push(self.lines.number(at, other.socket)),
                // A line did not get its part.
                Err(error) if error.kind() == io::ErrorKind::NotConnected => {}
                Err(error) => {
                    all.into_iter().for_each(|part| self.lines.close(part, false));
                    return Err(error);
                }
            }
        }
        self.parts.insert(all);
        Ok(arrived)
    }

    /// Does something to the sets, which want to know what sockets are ready for.
    fn with_polls<R>(
        &mut self,
        call: impl FnOnce(&mut Polls, &mut dyn FnMut(SocketId) -> Readiness) -> R,
    ) -> R {
        let mut polls = std::mem::take(&mut self.polls);
        let result = call(&mut polls, &mut |id| self.look(id));
        self.polls = polls;
        result
    }
}
