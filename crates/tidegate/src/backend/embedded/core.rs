//! Engine of an embedded stack, with the threads and tasks that wait for its sockets.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tidegate_engine::{Engine, PortClaims};
use tidegate_memory::Doorbell;
use tidegate_memory::lock_meter::LockMeter;
use tidegate_stack::{Event, OwnAddresses, UdpId};

use super::reader_groups::ReaderGroups;
use super::recent_wait::RecentWait;
use crate::types::added_readiness::AddedReadiness;
use crate::types::followers::Followers;
use crate::types::poll_sets::PollSets;
use crate::types::readiness::Change;
use crate::types::socket_id::SocketId;
use crate::types::tasks::Tasks;
use crate::types::waiters::Waiters;

/// Transmit batch limit while transmission is deferred: a peer already processes the first
/// replies while the last ones are written.
const MAX_DEFERRED_FRAMES: usize = 8;

/// Time limit for finishing connections with unsent data when the last handle of a stack is
/// dropped.
const FINISH_TIMEOUT: Duration = Duration::from_secs(2);

/// Engine of an embedded stack, and the threads and tasks that wait for its sockets.
pub(crate) struct EmbeddedCore {
    /// Lock statistics, if they were requested.
    pub(crate) meter: Option<Box<LockMeter>>,
    pub(crate) engine: Engine,
    pub(crate) waiters: Waiters,
    /// Sleeping threads that will run the engine next, each with its latest wake-up time.
    sleepers: Vec<(Arc<Doorbell>, u64)>,
    /// Threads that leave the device to those sleepers.
    pub(super) followers: Followers,
    /// Error that ended the threads that drive the engine.
    pub(crate) failure: Option<io::Error>,
    /// True if [`EmbeddedCore::report_queue_levels`] is called before each round.
    pub(crate) reports_queue_levels: bool,
    /// Sockets whose queue level the gate still has to learn: something arrived for them, or
    /// the gate waits for their readers.
    changed_queues: Vec<UdpId>,
    /// Doorbell of the thread that runs the engine, while a full queue pauses receiving.
    pub(crate) paused_sleeper: Option<Arc<Doorbell>>,
    /// Poll sets of the application.
    pub(crate) poll_sets: PollSets,
    /// Tasks of an executor that wait for sockets.
    pub(crate) tasks: Tasks,
    /// Sockets that the application has closed while it still has them.
    pub(crate) added_readiness: AddedReadiness,
    /// Sockets with several readers.
    pub(crate) reader_groups: ReaderGroups,
    /// Ports claimed from the kernel, when the stack shares the kernel's addresses.
    pub(crate) claims: PortClaims,
    /// Number of further calls that leave their frames to a later call.
    deferred_calls: u32,
    /// Frames that those calls have left so far.
    deferred_frames: usize,
    recent_wait: RecentWait,
}

impl EmbeddedCore {
    pub(super) fn new(engine: Engine, claims: PortClaims, meter: Option<Box<LockMeter>>) -> Self {
        Self {
            meter,
            engine,
            waiters: Waiters::default(),
            sleepers: Vec::new(),
            followers: Followers::default(),
            failure: None,
            reports_queue_levels: false,
            changed_queues: Vec::new(),
            paused_sleeper: None,
            poll_sets: PollSets::default(),
            tasks: Tasks::default(),
            added_readiness: AddedReadiness::default(),
            reader_groups: ReaderGroups::new(None),
            claims,
            deferred_calls: 0,
            deferred_frames: 0,
            recent_wait: RecentWait::default(),
        }
    }

    /// Transmits queued frames, dispatches events, and wakes a sleeper for the timers that a
    /// call has set.
    pub(crate) fn flush_and_dispatch(&mut self) -> io::Result<()> {
        self.flush()?;
        self.dispatch_events()?;
        self.wake_for_timers();
        Ok(())
    }

    /// Defers transmission for the next `calls` calls that send.
    pub(crate) fn defer_transmit(&mut self, calls: u32) {
        self.deferred_calls = calls;
    }

    /// Transmits queued frames, unless transmission was deferred to a later call.
    pub(crate) fn flush(&mut self) -> io::Result<()> {
        if self.deferred_calls > 0 {
            let waiting = self.engine.stack().frames_to_send();
            let left_before = std::mem::replace(&mut self.deferred_frames, waiting);
            // A call that sent nothing does not count.
            if waiting > left_before {
                self.deferred_calls -= 1;
            }
            if waiting < MAX_DEFERRED_FRAMES {
                return Ok(());
            }
        }
        self.deferred_frames = 0;
        self.engine.flush()
    }

    /// Registers a sleeping thread that will run the engine after at most `timeout_ns`.
    pub(crate) fn enter_sleep(&mut self, bell: &Arc<Doorbell>, timeout_ns: Option<u64>) {
        let (_, _, now_ns) = self.engine.parts();
        let until_ns = timeout_ns.map_or(u64::MAX, |timeout_ns| now_ns.saturating_add(timeout_ns));
        self.sleepers.push((Arc::clone(bell), until_ns));
        self.followers.set_leaders(self.sleepers.len());
    }

    pub(crate) fn leave_sleep(&mut self, bell: &Arc<Doorbell>) {
        self.sleepers.retain(|(other, _)| !Arc::ptr_eq(other, bell));
        self.followers.set_leaders(self.sleepers.len());
    }

    /// True if the calling thread, whose round has found nothing for it, is to leave the device to
    /// another thread.
    pub(super) fn is_led(&mut self) -> bool {
        let (_, _, now_ns) = self.engine.parts();
        self.followers.on_wait(|| now_ns);
        self.followers.are_led(self.waiters.has_rung()) && !self.reader_groups.has_work()
    }

    /// Called when a thread ends its wait for events.
    pub(super) fn end_wait(&mut self) {
        self.wake_for_timers();
        let (_, _, now_ns) = self.engine.parts();
        self.followers.on_wait_end(|| now_ns);
    }

    /// Wakes one sleeper if all sleepers would wake up too late for the next timer, or if
    /// loopback frames wait.
    pub(crate) fn wake_for_timers(&self) {
        let first = self.sleepers.first().map(|(first, _)| first);
        if self.engine.has_loopback() {
            return first.map_or_else(|| self.followers.wake_one(), |first| first.ring());
        }
        let Some(first) = first else { return };
        let is_before_all = |due_ns| self.sleepers.iter().all(|other| other.1 > due_ns);
        let stack = self.engine.stack();
        // No deadline is before the next timeout, which costs less.
        if stack.next_timeout().is_some_and(is_before_all)
            && stack.next_deadline().is_some_and(is_before_all)
        {
            first.ring();
        }
    }

    /// Runs one round of the engine, then dispatches its events.
    pub(crate) fn run(&mut self) -> io::Result<usize> {
        self.waiters.forget_rung();
        let received = self.engine.poll()?;
        self.dispatch_events()?;
        Ok(received)
    }

    /// Runs one round of the engine like [`EmbeddedCore::run`], for a program that has other work.
    pub(crate) fn run_briefly(&mut self) -> io::Result<usize> {
        let received = self.engine.poll_briefly()?;
        self.dispatch_events()?;
        Ok(received)
    }

    /// Returns whether the own addresses are unique.
    pub(crate) fn own_addresses(&self) -> OwnAddresses {
        self.engine.stack().own_addresses()
    }

    /// Runs one round of the engine for a thread that waits for events.
    pub(super) fn run_for_wait(&mut self) -> io::Result<()> {
        self.run()?;
        let (_, _, now_ns) = self.engine.parts();
        self.recent_wait.on_wait_end(now_ns);
        Ok(())
    }

    /// Returns true if a call that does not wait, and has found nothing, is to run the engine.
    pub(crate) fn needs_round(&mut self) -> bool {
        // A program that never waits does not pay for a look at the clock.
        !self.recent_wait.is_counting() || {
            let now_ns = self.engine.read_clock();
            self.recent_wait.needs_round(now_ns)
        }
    }

    /// Delivers datagrams to readers, collects their replies, and wakes the other threads and
    /// tasks that the engine has events for.
    pub(crate) fn dispatch_events(&mut self) -> io::Result<()> {
        while let Some(event) = self.engine.poll_event() {
            if let Event::UdpReadable(id) = event {
                if self.reports_queue_levels {
                    self.changed_queues.push(id);
                }
                if self.reader_groups.on_readable(id) {
                    continue;
                }
            }
            if let Some(id) = SocketId::of_event(event) {
                self.waiters.wake(id);
                self.poll_sets.on_event(id, Change::of_event(event), &self.waiters);
                self.tasks.on_event(event);
            }
        }
        self.claims.release_closed(&mut self.engine);
        self.reader_groups.serve(&mut self.engine)
    }

    /// Finishes closed connections, for at most [`FINISH_TIMEOUT`]. Between rounds, `forward` runs
    /// what this core sends and receives through, and returns true if that received frames.
    pub(super) fn finish_connections(&mut self, forward: impl Fn() -> bool) {
        let began = Instant::now();
        while self.engine.stack().tcp_unfinished() && began.elapsed() < FINISH_TIMEOUT {
            let is_busy = self.run().is_ok_and(|received| received > 0);
            if !(forward() || is_busy) {
                std::thread::sleep(Duration::from_micros(100));
            }
        }
        forward();
    }

    /// Records that the engine has failed, and wakes all waiters.
    pub(crate) fn fail(&mut self, failure: io::Error) {
        self.failure = Some(failure);
        self.waiters.wake_all();
        self.tasks.wake_all();
        self.reader_groups.fail();
    }

    /// Reports the fill levels of socket queues to the gate.
    pub(crate) fn report_queue_levels(&mut self) {
        let Self { engine, reader_groups, changed_queues, .. } = self;
        if !engine.needs_queue_levels() {
            changed_queues.clear();
            return;
        }
        changed_queues.sort_unstable_by_key(|id| id.to_bits());
        changed_queues.dedup();
        changed_queues.retain(|&id| {
            match reader_groups.fill_level(id) {
                Some(fill) => engine.report_fill(id, fill),
                None => engine.report_level(id),
            }
            engine.gate().watches_queue(id.to_bits())
        });
        let (_, _, now_ns) = self.engine.parts();
        let held = self.engine.gate().paused_until(now_ns).is_some();
        self.reader_groups.set_receive_paused(held);
    }

    /// Called after a read from these sockets: receiving may resume if their queues had
    /// paused it.
    pub(super) fn on_read(&mut self, sockets: &[SocketId]) {
        if !self.engine.gate().watches_queues() {
            return;
        }
        let now_ns = self.engine.read_clock();
        for &id in sockets {
            // TCP queues need no report: the receive window limits the peer.
            if let SocketId::Udp(id) = id {
                self.engine.report_level(id);
            }
        }
        if self.paused_sleeper.is_some()
            && self.engine.gate().paused_until(now_ns).is_none()
            && let Some(bell) = self.paused_sleeper.take()
        {
            bell.ring();
        }
    }
}
