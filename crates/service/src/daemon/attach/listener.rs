//! Thread of the attach listener: accepts connections, and waits for their first message.

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsFd;
use std::sync::{Arc, PoisonError, RwLock, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Resource, getrlimit};
use tidegate_memory::Doorbell;

use super::bound_socket::BoundSocket;
use super::heap_trim::HeapTrim;
use super::hello::{HANDSHAKE_TIMEOUT, HelloHandler};
use crate::daemon::attachment_counts::AttachmentLimits;
use crate::daemon::core::cores::Cores;
use crate::daemon::log::Log;
use crate::daemon::peer::Peer;
use crate::daemon::upgrade::offer::{UpgradeRequest, offer_upgrade};
use crate::daemon::workers::{AppFd, NOBODY};
use crate::ipc::handshake::send_refusal;

/// Maximum number of connections without a first message; further ones wait in the backlog.
const MAX_PENDING_HANDSHAKES: usize = 256;
/// Maximum number of such connections of one user.
const MAX_PENDING_PER_USER: usize = MAX_PENDING_HANDSHAKES / 4 * 3;
/// Maximum number of connections accepted in each [`ACCEPT_INTERVAL`]: a user that connects as fast
/// as possible costs the processor little, where network cores may run.
const MAX_ACCEPTS: u32 = 16;
const ACCEPT_INTERVAL: Duration = Duration::from_millis(5);
/// Minimum time between two lines about connections that the listener rejects.
const REJECTION_LOG_INTERVAL: Duration = Duration::from_secs(1);
/// Interval between checks for finished jobs while no connection is accepted.
const BUSY_RETRY_INTERVAL: Duration = Duration::from_millis(100);
/// Time limit for the workers' jobs before an upgrade.
const WORKERS_TIMEOUT: Duration = Duration::from_millis(50);

/// Thread that accepts applications.
pub(in crate::daemon) struct AttachListener {
    stop: Arc<Doorbell>,
    thread: Option<JoinHandle<()>>,
}

impl AttachListener {
    /// Starts the thread, which accepts from the first message on `may_begin`. If the sender is
    /// dropped instead, the socket is left to its owner.
    pub(in crate::daemon) fn open(
        mut socket: BoundSocket,
        cores: Arc<Cores>,
        log: Log,
        may_begin: mpsc::Receiver<()>,
    ) -> io::Result<Self> {
        let stop = Arc::new(Doorbell::new()?);
        stop.arm();
        let stopped = Arc::clone(&stop);
        let thread = std::thread::Builder::new().name("tidegate-door".into()).spawn(move || {
            if may_begin.recv().is_ok() {
                socket.removes_on_drop = true;
                match Listener::new(&mut socket, cores, Arc::clone(&log)) {
                    Ok(mut listener) => listener.run(&stopped),
                    Err(error) => log(&format!("no application can attach: {error}")),
                }
            }
        })?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for AttachListener {
    fn drop(&mut self) {
        self.stop.ring();
        if let Some(thread) = self.thread.take() {
            // A panic was reported by the thread itself.
            let _ = thread.join();
        }
    }
}

/// Connection without a first message.
struct PendingConnection {
    connection: AppFd,
    peer: Peer,
    since: Instant,
}

/// Accepts connections, and passes them to workers when their first message arrives. After
/// detached applications the heap is trimmed here, as no packets wait for this thread.
struct Listener<'l> {
    socket: &'l mut BoundSocket,
    handler: Arc<HelloHandler>,
    upgrades: mpsc::Receiver<UpgradeRequest>,
    pending: VecDeque<PendingConnection>,
    heap_trim: HeapTrim,
    /// Maximum number of unfinished jobs of the workers with which connections are accepted.
    max_jobs: usize,
    accept_pause: AcceptPause,
    rejections: RejectionLog,
}

/// Pauses in accepting: after many connections, and after a failure. Without a free descriptor the
/// connection stays in the backlog, and would be found again at once.
#[derive(Default)]
struct AcceptPause {
    end: Option<Instant>,
    has_failed: bool,
    /// Begin of the interval in which accepted connections are counted, and their number.
    interval_began: Option<Instant>,
    accepted: u32,
}

impl AcceptPause {
    fn is_over(&self, now: Instant) -> bool {
        self.time_left(now).is_none()
    }

    /// Rest of the pause; `None` if there is no pause.
    fn time_left(&self, now: Instant) -> Option<Duration> {
        Some(self.end?.saturating_duration_since(now)).filter(|left| !left.is_zero())
    }

    /// Begins a pause unless nothing is wrong. Returns true for the first failure in a row.
    fn on_error(&mut self, now: Instant, error: &io::Error) -> bool {
        use io::ErrorKind::{ConnectionAborted, Interrupted, WouldBlock};
        if matches!(error.kind(), WouldBlock | Interrupted | ConnectionAborted) {
            return false;
        }
        self.end = Some(now + BUSY_RETRY_INTERVAL);
        !std::mem::replace(&mut self.has_failed, true)
    }

    /// Counts a connection; begins a pause when the interval has had its share.
    fn on_accepted(&mut self, now: Instant) {
        (self.end, self.has_failed) = (None, false);
        let began = match self.interval_began {
            Some(began) if now < began + ACCEPT_INTERVAL => began,
            _ => {
                self.accepted = 0;
                *self.interval_began.insert(now)
            }
        };
        self.accepted += 1;
        if self.accepted >= MAX_ACCEPTS {
            self.end = Some(began + ACCEPT_INTERVAL);
        }
    }
}

/// Log of connections that the listener rejects: a line at most in each
/// [`REJECTION_LOG_INTERVAL`], so that nobody floods the log.
#[derive(Default)]
struct RejectionLog {
    next: Option<Instant>,
    suppressed: u64,
}

impl RejectionLog {
    /// Line about a rejected connection; `None` if it has to wait.
    fn line(&mut self, now: Instant, error: &io::Error) -> Option<String> {
        if self.next.is_some_and(|next| now < next) {
            self.suppressed += 1;
            return None;
        }
        self.next = Some(now + REJECTION_LOG_INTERVAL);
        Some(match std::mem::take(&mut self.suppressed) {
            0 => format!("a connection was rejected: {error}"),
            more => format!("a connection was rejected, and {more} before it: {error}"),
        })
    }
}

impl<'l> Listener<'l> {
    fn new(socket: &'l mut BoundSocket, cores: Arc<Cores>, log: Log) -> io::Result<Self> {
        let (sender, upgrades) = mpsc::channel();
        let max_fds = getrlimit(Resource::Nofile).current;
        let quota = &socket.config.quota;
        let limits = AttachmentLimits::new(
            quota.max_attachments,
            quota.max_user_attachments,
            max_fds.unwrap_or(u64::MAX),
        );
        let handler = HelloHandler {
            config: socket.config.clone(),
            limits,
            attachments: socket.attachments.clone(),
            cores,
            log,
            admission: RwLock::new(()),
            upgrades: sender,
            upgrade_bell: Doorbell::new()?,
        };
        let max_jobs = max_fds.map_or(usize::MAX, |max| (max / 2) as usize);
        Ok(Self {
            socket,
            handler: Arc::new(handler),
            upgrades,
            pending: VecDeque::new(),
            heap_trim: HeapTrim::new(Instant::now()),
            max_jobs,
            accept_pause: AcceptPause::default(),
            rejections: RejectionLog::default(),
        })
    }

    /// Runs until `stop` is rung or another daemon has taken over.
    fn run(&mut self, stop: &Doorbell) {
        let handler = Arc::clone(&self.handler);
        let (detach_bell, upgrade_bell) = (handler.cores.detach_bell(), &handler.upgrade_bell);
        detach_bell.arm();
        loop {
            upgrade_bell.arm();
            while let Ok(request) = self.upgrades.try_recv() {
                if self.offer_upgrade(request) {
                    self.socket.removes_on_drop = false;
                    return;
                }
            }
            let now = Instant::now();
            self.heap_trim.trim_if_due(now);
            let timeout = self.expire_pending(now);
            let bells = [stop, detach_bell, upgrade_bell];
            let mut fds: Vec<_> =
                bells.iter().map(|bell| PollFd::new(bell, PollFlags::IN)).collect();
            let connections = self.pending.iter().map(|pending| &pending.connection);
            fds.extend(connections.map(|connection| PollFd::new(connection, PollFlags::IN)));
            if self.may_accept(now) {
                fds.push(PollFd::new(&self.socket.listener, PollFlags::IN));
            }
            let polled = poll(&mut fds, timeout.as_ref());
            let is_ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
            if !matches!(polled, Ok(_) | Err(rustix::io::Errno::INTR)) || is_ready[0] {
                return;
            }
            if is_ready[1] {
                self.heap_trim.on_detach(Instant::now());
                detach_bell.disarm();
                detach_bell.arm();
            }
            if is_ready[2] {
                upgrade_bell.disarm();
            }
            self.start_handshakes(&is_ready[bells.len()..]);
            self.accept(Instant::now());
        }
    }

    /// Closes connections that have sent nothing in time. Returns the time until the next check.
    fn expire_pending(&mut self, now: Instant) -> Option<Timespec> {
        while let Some(first) = self.pending.front()
            && now.duration_since(first.since) >= HANDSHAKE_TIMEOUT
        {
            self.pending.pop_front();
            (self.handler.log)("a connection was closed: no first message within 1 s");
        }
        let pending =
            self.pending.front().map(|first| HANDSHAKE_TIMEOUT - now.duration_since(first.since));
        let pause = self.accept_pause.time_left(now).unwrap_or(BUSY_RETRY_INTERVAL);
        let busy = (!self.may_accept(now)).then_some(pause);
        let timeout = pending.into_iter().chain(self.heap_trim.time_left(now)).chain(busy).min();
        timeout.map(|left| Timespec {
            tv_sec: left.as_secs() as i64,
            tv_nsec: i64::from(left.subsec_nanos()),
        })
    }

    /// True if another connection can be accepted. Descriptors whose close hangs must not take the
    /// whole table of the process.
    fn may_accept(&self, now: Instant) -> bool {
        self.accept_pause.is_over(now)
            && self.pending.len() < MAX_PENDING_HANDSHAKES
            && self.handler.cores.workers().unfinished() < self.max_jobs
    }

    /// Passes connections with a first message to workers.
    fn start_handshakes(&mut self, is_readable: &[bool]) {
        let mut readable = is_readable.iter();
        let (ready, rest) = std::mem::take(&mut self.pending)
            .into_iter()
            .partition::<VecDeque<_>, _>(|_| readable.next() == Some(&true));
        self.pending = rest;
        for PendingConnection { connection, peer, .. } in ready {
            let handler = Arc::clone(&self.handler);
            connection.run(move |connection| {
                if let Err(error) = handler.handle(connection, peer) {
                    (handler.log)(&format!("a connection was rejected: {error}"));
                }
            });
        }
    }

    /// Accepts connections that wait. Those that keep coming have their turn after the handshakes.
    fn accept(&mut self, now: Instant) {
        while self.may_accept(now) {
            let connection = match self.socket.listener.accept() {
                Ok((connection, _)) => connection,
                Err(error) => {
                    if self.accept_pause.on_error(now, &error) {
                        (self.handler.log)(&format!("no application can attach for now: {error}"));
                    }
                    return;
                }
            };
            self.accept_pause.on_accepted(now);
            let peer = Peer::of(&connection);
            // The process has sent descriptors already, perhaps.
            let uid = peer.as_ref().map_or(NOBODY, |peer| peer.uid);
            let connection = AppFd::new(connection.into(), uid, self.handler.cores.workers());
            match peer.and_then(|peer| self.check_pending(peer)) {
                Ok(peer) => {
                    self.pending.push_back(PendingConnection { connection, peer, since: now });
                }
                Err(error) => {
                    let line = self.rejections.line(now, &error);
                    line.into_iter().for_each(|line| (self.handler.log)(&line));
                    connection.run(move |connection| {
                        // The peer may be gone.
                        let _ = send_refusal(connection.as_fd(), &error.to_string());
                    });
                }
            }
        }
    }

    /// Checks that a user does not have too many connections without a first message.
    fn check_pending(&self, peer: Peer) -> io::Result<Peer> {
        let own = self.pending.iter().filter(|pending| pending.peer.uid == peer.uid).count();
        if own < MAX_PENDING_PER_USER {
            return Ok(peer);
        }
        let message = format!("user {} has {own} connections without a first message", peer.uid);
        Err(io::Error::new(io::ErrorKind::QuotaExceeded, message))
    }

    /// Hands over to another daemon. Returns true if it has taken over.
    fn offer_upgrade(&self, request: UpgradeRequest) -> bool {
        let HelloHandler { cores, log, admission, .. } = &*self.handler;
        // Applications that have connected before attach to this daemon.
        cores.workers().wait_until_idle(WORKERS_TIMEOUT);
        let _admission = admission.write().unwrap_or_else(PoisonError::into_inner);
        offer_upgrade(request, &self.socket.listener, cores, log).unwrap_or_else(|error| {
            log(&format!("a connection was rejected: {error}"));
            false
        })
    }
}

#[cfg(test)]
mod tests {
    use rustix::io::Errno;

    use super::*;

    #[test]
    fn failure_to_accept_pauses_the_listener() {
        let (mut pause, now) = (AcceptPause::default(), Instant::now());
        for harmless in [Errno::AGAIN, Errno::INTR, Errno::CONNABORTED] {
            assert!(!pause.on_error(now, &harmless.into()) && pause.is_over(now));
        }
        for full in [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM] {
            assert!(pause.on_error(now, &full.into()), "the first failure is logged");
            assert!(!pause.is_over(now));
            let later = now + BUSY_RETRY_INTERVAL;
            assert!(pause.is_over(later) && !pause.on_error(later, &full.into()));
            assert!(!pause.is_over(later));
            pause.on_accepted(now);
            assert!(pause.is_over(now));
        }
    }

    #[test]
    fn connections_are_accepted_at_a_limited_rate() {
        let (mut pause, began) = (AcceptPause::default(), Instant::now());
        let mut accepted = 0;
        for step in 0..100 {
            let now = began + step * ACCEPT_INTERVAL / 10;
            while pause.is_over(now) {
                pause.on_accepted(now);
                accepted += 1;
            }
            assert!(pause.time_left(now).is_some_and(|left| left <= ACCEPT_INTERVAL));
        }
        assert_eq!(accepted, 10 * MAX_ACCEPTS);
        // Few connections are accepted at once.
        let now = began + 20 * ACCEPT_INTERVAL;
        assert_eq!(pause.time_left(now), None);
        pause.on_accepted(now);
        assert!(pause.is_over(now));
    }

    #[test]
    fn rejected_connections_do_not_flood_the_log() {
        let (mut log, now) = (RejectionLog::default(), Instant::now());
        let error = io::Error::other("too many");
        assert!(log.line(now, &error).unwrap().ends_with("rejected: too many"));
        assert!((0..7).all(|_| log.line(now, &error).is_none()));
        let line = log.line(now + REJECTION_LOG_INTERVAL, &error).unwrap();
        assert!(line.contains("and 7 before it: too many"), "{line}");
        assert!(
            log.line(now + 2 * REJECTION_LOG_INTERVAL, &error).unwrap().contains("rejected: t")
        );
    }
}
