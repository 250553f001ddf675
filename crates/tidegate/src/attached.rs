//! Calls on a stack in a daemon, through shared memory.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tidegate_engine::{Claim, Idle, IdleConfig, Step, pause};
use tidegate_service::attachment::{Arrived, Attachment, Kind};
use tidegate_service::{Handle, Phase};
use tidegate_stack::{Shutdown, TcpId, TcpInfo, TcpListenerId, TcpOptions, UdpId, UdpOptions};

use crate::batch;
use crate::calls::{CallError, Called, Calls, Made};
use crate::net::Core;
use crate::poll::{Polls, Ready};
use crate::readiness::{Readiness, Sleeper};
use crate::tasks::{Guard, Tasks};
use crate::udp::Received;
use crate::wait::{self, JustSleep, Patience, SetNumber, SocketId, Waiters};

/// The largest piece that is written or read without the program's own buffer.
const PIECE_BYTES: usize = 2048;

/// While there is always something of the sockets', a sleeper's own things are
/// looked at each so many looks.
const LOOKS: u32 = 8;

/// When the daemon has ended so many waits end at once: programs hear of errors, and
/// clean up.
const PROMPT_WAITS: u32 = 256;

/// Later ones take so long where there is nothing but errors: whoever keeps a socket
/// that gives nothing else would be busy with it for ever.
const LATE_WAIT: Duration = Duration::from_millis(100);

/// An attachment that threads share.
pub(crate) struct Attached {
    core: Mutex<AttachedCore>,
    began: Instant,
}

/// An attachment, and who waits for its sockets.
pub(crate) struct AttachedCore {
    attachment: Attachment,
    /// The connection to the daemon, to sleep on while others hold the rest.
    connection: Arc<OwnedFd>,
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
        let connection = Arc::new(attachment.as_fd().try_clone_to_owned()?);
        let core = AttachedCore {
            attachment,
            connection,
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
        let heir = core.attachment.heir();
        Fork { core, heir }
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
            let sleeps = core.attachment.prepare_sleep();
            let connection = Arc::clone(&core.connection);
            drop(core);
            let found = match sleeps {
                Ok(true) => sleeper.sleep(&[connection.as_fd(), bell.as_fd()], left),
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
    pub(crate) fn connection(&self) -> io::Result<OwnedFd> {
        self.lock().connection.try_clone()
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
    heir: io::Result<Attachment>,
}

impl Fork<'_> {
    /// In the parent, also when there is no child: it goes on as before.
    pub fn in_parent(self) {}

    /// In the child: its sockets are the parent's, by an attachment of its own.
    ///
    /// # Errors
    /// When it got none: the daemon has ended, or this user may not attach. All
    /// calls fail then.
    pub fn in_child(self) -> io::Result<()> {
        let Self { mut core, heir } = self;
        // Those who slept and waited are threads and tasks of the parent's.
        wait::forget_thread_bell();
        core.waiters = Waiters::default();
        core.tasks = Tasks::default();
        core.idle = new_idle(0);
        let taken = heir.and_then(|heir| {
            core.connection = Arc::new(heir.as_fd().try_clone_to_owned()?);
            core.attachment = heir;
            Ok(())
        });
        if taken.is_err() {
            core.attachment.abandon();
            if let Ok(connection) = core.attachment.as_fd().try_clone_to_owned() {
                core.connection = Arc::new(connection);
            }
            core.fail();
        }
        taken
    }
}

impl std::fmt::Debug for Fork<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Fork").field("heir", &self.heir).finish_non_exhaustive()
    }
}

/// The names of the daemon's sockets are those of a stack's.
fn handle(bits: u64) -> Handle {
    Handle { place: bits as u32, generation: (bits >> 32) as u32 }
}

fn bits(handle: Handle) -> u64 {
    u64::from(handle.generation) << 32 | u64::from(handle.place)
}

pub(crate) fn udp(handle: Handle) -> UdpId {
    UdpId::from_bits(bits(handle))
}

pub(crate) fn stream(handle: Handle) -> TcpId {
    TcpId::from_bits(bits(handle))
}

/// The daemon gives no listener a name that is none.
pub(crate) fn listener(handle: Handle) -> io::Result<TcpListenerId> {
    TcpListenerId::from_bits(bits(handle)).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// What the daemon calls a socket; a set is nothing to it.
fn name(id: SocketId) -> Option<Handle> {
    Some(handle(match id {
        SocketId::Udp(id) => id.to_bits(),
        SocketId::Listener(id) => id.to_bits(),
        SocketId::Stream(id) => id.to_bits(),
        SocketId::Poll(_) => return None,
    }))
}

/// A daemon takes nothing from the kernel for this program, but for itself.
fn made<I>(id: I) -> Made<I> {
    (id, None)
}

impl AttachedCore {
    /// Takes what the daemon has told, and wakes those whom it concerns. Whether
    /// it was anything.
    pub(crate) fn hear(&mut self) -> io::Result<bool> {
        let heard = match self.attachment.poll() {
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
        while let Some((changed, kind)) = self.attachment.next_changed() {
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
        self.attachment.end_sleep().inspect_err(|_| self.fail())?;
        self.hear().map(|_| ())
    }

    /// Makes ready to sleep on the connection. `false` when there is something
    /// already.
    #[cfg(feature = "tokio")]
    pub(crate) fn prepare_sleep(&mut self) -> io::Result<bool> {
        self.attachment.prepare_sleep().inspect_err(|_| self.fail())
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
        match name(id) {
            Some(name) => self.attachment.readiness(name).into(),
            None => Readiness::default(),
        }
    }

    /// As [`Attachment::hold`].
    pub(crate) fn hold(&mut self, descriptor: BorrowedFd<'_>) -> io::Result<()> {
        self.attachment.hold(descriptor)
    }

    /// Everything that was asked of the daemon before has been done then.
    pub(crate) fn await_closed(&mut self) -> io::Result<()> {
        self.attachment.ping().map(|_| ())
    }

    /// As [`Attachment::offer`].
    pub(crate) fn offer(&mut self, id: SocketId, descriptor: BorrowedFd<'_>) -> io::Result<()> {
        let name = name(id).ok_or(io::ErrorKind::InvalidInput)?;
        self.attachment.offer(name, descriptor)
    }

    /// As [`Attachment::withdraw`].
    pub(crate) fn withdraw(&mut self, descriptor: BorrowedFd<'_>) -> io::Result<()> {
        self.attachment.withdraw(descriptor)
    }

    /// As [`Attachment::take`].
    pub(crate) fn take(&mut self, descriptor: BorrowedFd<'_>) -> io::Result<Arrived> {
        self.attachment.take(descriptor)
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

impl Calls for AttachedCore {
    fn core(&mut self) -> Option<&mut Core> {
        None
    }

    fn polls(&mut self) -> &mut Polls {
        &mut self.polls
    }

    fn waiters(&mut self) -> &mut Waiters {
        &mut self.waiters
    }

    fn tasks(&mut self) -> &mut Tasks {
        &mut self.tasks
    }

    fn failure(&self) -> Option<io::Error> {
        self.has_failed.then(ended)
    }

    fn readiness(&mut self, id: SocketId) -> Readiness {
        // What has come since counts, for programs that only ask. A daemon that has
        // ended makes every socket ready, for its error.
        let _ = self.hear();
        match id {
            SocketId::Poll(set) => Readiness {
                readable: self.with_polls(|polls, of| polls.has_ready(set, of)),
                ..Readiness::default()
            },
            _ => self.look(id),
        }
    }

    fn collect(&mut self, set: SetNumber, limit: usize, tell: &mut dyn FnMut(Ready)) {
        // A daemon that has ended makes every socket ready, for its error.
        let _ = self.hear();
        self.with_polls(|polls, of| polls.collect(set, of, limit, tell));
    }

    fn has_address(&mut self, address: IpAddr) -> bool {
        self.attachment.find(address).is_ok_and(|found| found.is_own)
    }

    fn source_for(&mut self, destination: IpAddr) -> Option<IpAddr> {
        self.attachment.find(destination).ok()?.source
    }

    fn read_clock(&mut self) {}

    /// The daemon sees what was written at once.
    fn commit(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn commit_later(&mut self) -> io::Result<()> {
        Ok(())
    }

    /// What a call has heard while it waited for an answer may be for others.
    fn on_release(&mut self) {
        if self.attachment.has_changed() {
            // A daemon that tells nonsense is found out by the next call.
            let _ = self.dispatch();
        }
    }

    fn tcp_listen(
        &mut self,
        local: SocketAddr,
        backlog: usize,
        options: TcpOptions,
    ) -> io::Result<Made<TcpListenerId>> {
        Ok(made(listener(self.attachment.listen(local, backlog, options)?)?))
    }

    fn tcp_listener_addr(&mut self, id: TcpListenerId) -> Option<SocketAddr> {
        self.attachment.local_addr(handle(id.to_bits())).ok()
    }

    fn tcp_accept(&mut self, id: TcpListenerId) -> Called<(TcpId, SocketAddr)> {
        let (accepted, peer) = self.attachment.accept(handle(id.to_bits()))?;
        // Others may wait for the next.
        let listener = SocketId::Listener(id);
        if self.look(listener).readable {
            self.waiters.wake(listener);
            self.tasks.wake_accepting(listener);
        }
        Ok((stream(accepted), peer))
    }

    fn tcp_close_listener(&mut self, id: TcpListenerId, _: Option<Arc<Claim>>) {
        self.attachment.close(handle(id.to_bits()), false);
    }

    fn tcp_connect(
        &mut self,
        local: Option<SocketAddr>,
        remote: SocketAddr,
        options: TcpOptions,
    ) -> io::Result<Made<TcpId>> {
        Ok(made(stream(self.attachment.connect_tcp(local, remote, options)?)))
    }

    fn tcp_finish_connect(&mut self, id: TcpId) -> Called<()> {
        let id = handle(id.to_bits());
        match self.attachment.phase(id)? {
            Phase::Connecting => Err(CallError::WouldBlock),
            _ => match self.attachment.take_error(id)? {
                Some(kind) => Err(CallError::Failed(kind.into())),
                None => Ok(()),
            },
        }
    }

    fn tcp_recv(&mut self, id: TcpId, buf: &mut [u8]) -> Called<usize> {
        Ok(self.attachment.recv(handle(id.to_bits()), buf, false)?)
    }

    fn tcp_peek(&mut self, id: TcpId, buf: &mut [u8]) -> Called<usize> {
        Ok(self.attachment.recv(handle(id.to_bits()), buf, true)?)
    }

    fn tcp_recv_with(&mut self, id: TcpId, read: &mut dyn FnMut(&[u8]) -> usize) -> Called<usize> {
        // The other side may write there: what is shown is a copy.
        let mut piece = [0; PIECE_BYTES];
        let id = handle(id.to_bits());
        let len = self.attachment.recv(id, &mut piece, true)?;
        let used = read(&piece[..len]).min(len);
        if used > 0 {
            self.attachment.recv(id, &mut piece[..used], false)?;
        }
        Ok(used)
    }

    fn tcp_readable(&mut self, id: TcpId) -> usize {
        self.attachment.readable(handle(id.to_bits())).unwrap_or(0)
    }

    fn tcp_writable(&mut self, id: TcpId) -> usize {
        self.attachment.room(handle(id.to_bits())).unwrap_or(0)
    }

    fn tcp_send(&mut self, id: TcpId, data: &[u8]) -> Called<usize> {
        Ok(self.attachment.send(handle(id.to_bits()), data)?)
    }

    fn tcp_send_with(
        &mut self,
        id: TcpId,
        limit: usize,
        write: &mut dyn FnMut(&mut [u8]) -> usize,
    ) -> Called<usize> {
        let id = handle(id.to_bits());
        let room = self.attachment.room(id)?.min(limit).min(PIECE_BYTES);
        if room == 0 && limit > 0 {
            return Err(CallError::WouldBlock);
        }
        let mut piece = [0; PIECE_BYTES];
        let len = write(&mut piece[..room]).min(room);
        Ok(self.attachment.send(id, &piece[..len])?)
    }

    fn tcp_shutdown(&mut self, id: TcpId, how: Shutdown) -> io::Result<()> {
        self.attachment.shutdown(handle(id.to_bits()), how)
    }

    fn tcp_local_addr(&mut self, id: TcpId) -> Option<SocketAddr> {
        self.attachment.local_addr(handle(id.to_bits())).ok()
    }

    fn tcp_peer_addr(&mut self, id: TcpId) -> Option<SocketAddr> {
        self.attachment.peer_addr(handle(id.to_bits())).ok()
    }

    fn tcp_info(&mut self, id: TcpId) -> Option<TcpInfo> {
        let id = handle(id.to_bits());
        let mut info = self.attachment.info(id).ok()?;
        info.unread_bytes += self.attachment.readable(id).unwrap_or(0) as u32;
        Some(info)
    }

    fn tcp_options(&mut self, id: TcpId) -> Option<TcpOptions> {
        self.attachment.options(handle(id.to_bits())).ok()
    }

    fn tcp_set_options(&mut self, id: TcpId, options: TcpOptions) -> io::Result<()> {
        self.attachment.set_options(handle(id.to_bits()), options)
    }

    fn tcp_take_error(&mut self, id: TcpId) -> Option<io::Error> {
        match self.attachment.take_error(handle(id.to_bits())) {
            Ok(kind) => kind.map(io::Error::from),
            Err(error) => Some(error),
        }
    }

    fn tcp_end(&mut self, id: TcpId, abrupt: bool, _: Option<Arc<Claim>>) {
        self.polls.forget(SocketId::Stream(id));
        self.tasks.forget(SocketId::Stream(id));
        self.attachment.close(handle(id.to_bits()), abrupt);
    }

    fn udp_bind(&mut self, local: SocketAddr, options: UdpOptions) -> io::Result<Made<UdpId>> {
        Ok(made(udp(self.attachment.bind_udp(local, options)?)))
    }

    fn udp_close(&mut self, id: UdpId, _: Option<Arc<Claim>>) {
        self.polls.forget(SocketId::Udp(id));
        self.attachment.close(handle(id.to_bits()), false);
    }

    fn udp_connect(&mut self, id: UdpId, peer: Option<SocketAddr>) -> io::Result<()> {
        self.attachment.connect_udp(handle(id.to_bits()), peer)
    }

    fn udp_local_addr(&mut self, id: UdpId) -> Option<SocketAddr> {
        self.attachment.local_addr(handle(id.to_bits())).ok()
    }

    fn udp_peer_addr(&mut self, id: UdpId) -> Option<SocketAddr> {
        self.attachment.peer_addr(handle(id.to_bits())).ok()
    }

    fn udp_recv(&mut self, id: UdpId, buf: &mut [u8], peek: bool) -> Called<Received> {
        let received = self.attachment.recv_datagram(handle(id.to_bits()), buf, peek)?;
        Ok(Received {
            len: received.len,
            truncated: received.len < received.whole,
            datagram_len: received.whole,
            from: received.from,
            to: received.to,
        })
    }

    fn udp_send(
        &mut self,
        id: UdpId,
        payload: &[u8],
        to: Option<SocketAddr>,
        from: Option<IpAddr>,
    ) -> Called<()> {
        Ok(self.attachment.send_datagram(handle(id.to_bits()), payload, to, from)?)
    }

    fn udp_flush(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn udp_take_error(&mut self, id: UdpId) -> Option<io::Error> {
        match self.attachment.take_error(handle(id.to_bits())) {
            Ok(kind) => kind.map(io::Error::from),
            Err(error) => Some(error),
        }
    }
}
