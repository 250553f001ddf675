//! Flow steering state that the cores of one device share.

use std::io;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tidegate_memory::Doorbell;

use super::LocalPort;
use super::claimed_port::{Arrival, PortSharing};
use super::flow::Flow;
use super::queue_requests::{QueueRequest, QueueRequests};
use super::steering_table::{SteeringTable, SteeringView};
use crate::OpenDevice;
use crate::steering::SharedRules;

/// Maximum duration of one receive of another core, which may have to wait for its processor.
const ROUND_TIMEOUT: Duration = Duration::from_secs(1);

/// Flow steering of the cores of one device: the core of each local port, and the migration of
/// ports between cores.
///
/// Core 0 is the primary core. A core that gives ports away calls [`FlowSteering::park`], receives
/// the frames that are already queued for it, calls [`FlowSteering::wait_until_sent`] and hands
/// over its sockets. The new core then calls [`FlowSteering::hand_over`]. Frames that arrive
/// meanwhile wait in order.
///
/// A port may be shared when all its claims allow sharing ([`PortSharing::ReusePort`]). New flows
/// are distributed over the cores with sockets on the port ([`FlowSteering::join`]). Each flow
/// stays with the core that has a socket for the flow ([`FlowSteering::begin_flow`]).
pub struct FlowSteering {
    table: SteeringTable,
    rounds: Box<[RoundCounter]>,
    /// Number of completed handovers of ports.
    handovers: AtomicU64,
    /// Doorbell of each core, for all but passed-on frames.
    bells: Box<[Arc<Doorbell>]>,
    /// Active cores, one bit each.
    active_cores: AtomicU64,
    /// Cores that receive from a queue of their own, one bit each.
    queue_cores: AtomicU64,
    queue_requests: QueueRequests,
    /// Counters of each secondary core.
    tx_rings: Box<[TxRingCounters]>,
    /// Steering rules of the device, for every core.
    rules: Mutex<Option<Arc<dyn SharedRules>>>,
}

/// Number of times that a core has begun or ended to dispatch frames: odd while it does. On a cache
/// line of its own.
#[derive(Default)]
#[repr(align(64))]
struct RoundCounter(AtomicU64);

/// Counters of frames from a secondary core to the primary core.
#[derive(Default)]
struct TxRingCounters {
    sent: AtomicU64,
    /// Frames that the device has taken.
    forwarded: AtomicU64,
}

impl FlowSteering {
    /// Flow steering of as many cores as there are doorbells.
    pub(super) fn new(bells: Vec<Arc<Doorbell>>) -> Self {
        let cores = bells.len();
        Self {
            table: SteeringTable::new(),
            rounds: (0..cores).map(|_| RoundCounter::default()).collect(),
            handovers: AtomicU64::new(0),
            bells: bells.into(),
            active_cores: AtomicU64::new(1),
            queue_cores: AtomicU64::new(0),
            queue_requests: QueueRequests::new(cores),
            tx_rings: (1..cores).map(|_| TxRingCounters::default()).collect(),
            rules: Mutex::new(None),
        }
    }

    /// Sets the steering rules of the device.
    pub(super) fn set_rules(&self, rules: Option<Arc<dyn SharedRules>>) {
        *self.rules.lock().unwrap_or_else(PoisonError::into_inner) = rules;
    }

    /// Steering rules of the device.
    pub(super) fn rules(&self) -> Option<Arc<dyn SharedRules>> {
        self.rules.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Number of cores.
    pub fn cores(&self) -> usize {
        self.bells.len()
    }

    /// Adds a claim of a core on a local port.
    ///
    /// # Errors
    /// [`io::ErrorKind::AddrInUse`] when another core has claimed the port without sharing, or when
    /// a socket that this core has joined with is at an address of another owner.
    pub fn claim(&self, core: usize, port: LocalPort, sharing: PortSharing) -> io::Result<()> {
        let is_claimed = self.table.claim(port, core, sharing);
        if is_claimed { Ok(()) } else { Err(io::ErrorKind::AddrInUse.into()) }
    }

    /// Removes one claim with this sharing mode.
    pub fn release(&self, core: usize, port: LocalPort, sharing: PortSharing) {
        self.table.release(port, core, sharing);
    }

    /// Returns true when a core may claim a port with this sharing mode.
    pub fn can_claim(&self, core: usize, port: LocalPort, sharing: PortSharing) -> bool {
        self.table.can_claim(port, core, sharing)
    }

    /// Returns true when a core other than `core` has claimed the port, or will have: the claims are
    /// migrating.
    pub fn is_claimed_elsewhere(&self, core: usize, port: LocalPort) -> bool {
        self.table.is_claimed_elsewhere(port, core)
    }

    /// Cores that have claimed the port, one bit each; `None` while claims are migrating.
    pub fn holders(&self, port: LocalPort) -> Option<u64> {
        self.table.holders(port)
    }

    /// Returns true when this core or no core has claimed the port, and the port is not migrating.
    pub fn is_held_by(&self, core: usize, port: LocalPort) -> bool {
        self.table.is_held_by(port, core)
    }

    /// Returns true when several cores may claim the port: all its claims allow sharing.
    pub fn can_be_shared(&self, port: LocalPort) -> bool {
        self.table.can_be_shared(port)
    }

    /// Adds a socket of `owner` on a core to the group of this address and port: a socket that
    /// receives from any peer. The socket may share address and port with sockets of other cores,
    /// once its core has claimed the port.
    pub fn join(&self, core: usize, port: LocalPort, address: IpAddr, owner: u64) {
        self.table.join(port, address, owner, core);
    }

    /// Removes such a socket from its group.
    pub fn leave(&self, core: usize, port: LocalPort, address: IpAddr, owner: u64) {
        self.table.leave(port, address, owner, core);
    }

    /// Registers a flow for which a core is about to have a socket; its frames go to the core from
    /// now on. Returns false when the flow is already registered.
    pub fn begin_flow(&self, core: usize, flow: Flow) -> bool {
        self.table.begin_flow(flow, core)
    }

    /// Moves a flow to this core, after the socket of the flow has migrated.
    pub fn take_over_flow(&self, core: usize, flow: Flow) {
        self.table.take_over_flow(flow, core);
    }

    /// Removes a flow of a core that no longer has a socket for the flow.
    pub fn end_flow(&self, core: usize, flow: Flow) {
        self.table.end_flow(flow, core);
    }

    /// Marks a core as active: it receives copies of frames for all cores.
    pub fn set_active(&self, core: usize) {
        self.active_cores.fetch_or(1 << core, Ordering::Relaxed);
    }

    /// Marks a core without sockets as inactive. The primary core stays active.
    pub fn set_inactive(&self, core: usize) {
        self.active_cores.fetch_and(!(1 << core) | 1, Ordering::Relaxed);
    }

    /// Active cores, one bit each.
    pub fn active_cores(&self) -> u64 {
        self.active_cores.load(Ordering::Relaxed)
    }

    /// Parks these ports, or the core's share of them: their frames wait from now on. All earlier
    /// frames are there when the core receives next.
    ///
    /// # Errors
    /// [`io::ErrorKind::TimedOut`] when another core does not end its receive: the ports stay where
    /// they were.
    pub fn park(&self, core: usize, ports: &[LocalPort]) -> io::Result<()> {
        ports.iter().for_each(|&port| self.table.park(port, core));
        let unchanged = || ports.iter().map(|&port| (port, 0));
        let mut others = (0..self.cores()).filter(|&other| other != core);
        others
            .try_for_each(|other| self.wait_for_round(other))
            .inspect_err(|_| self.hand_over(core, core, unchanged()))
    }

    /// Waits until a core has passed on the frames that it may have dispatched before the last
    /// change of the table.
    fn wait_for_round(&self, core: usize) -> io::Result<()> {
        let RoundCounter(counter) = &self.rounds[core];
        let round = counter.load(Ordering::SeqCst);
        // A round that begins later sees the change.
        let has_ended = || round % 2 == 0 || counter.load(Ordering::Acquire) != round;
        wait_until(has_ended, || ())
    }

    /// Waits until the device has taken all frames that a core has sent.
    ///
    /// # Errors
    /// [`io::ErrorKind::TimedOut`] when the primary core does not run.
    pub fn wait_until_sent(&self, core: usize) -> io::Result<()> {
        let Some(ring) = core.checked_sub(1).and_then(|at| self.tx_rings.get(at)) else {
            return Ok(());
        };
        let sent = ring.sent.load(Ordering::Relaxed);
        wait_until(|| ring.forwarded.load(Ordering::Acquire) >= sent, || self.bells[0].ring())
    }

    /// Completes a migration: the ports and their parked frames belong to core `to` from now on.
    /// Each port comes with the number of claims that moved, which counts for shared ports only.
    pub fn hand_over(
        &self,
        from: usize,
        to: usize,
        ports: impl IntoIterator<Item = (LocalPort, u32)>,
    ) {
        for (port, claims) in ports {
            self.table.hand_over(port, from, to, claims);
        }
        self.handovers.fetch_add(1, Ordering::SeqCst);
        self.bells.iter().for_each(|bell| bell.ring());
    }

    /// Steering table for frames that arrive at this core.
    pub(super) fn view(&self, core: usize) -> SteeringView<'_> {
        let queue_cores = self.queue_cores.load(Ordering::Relaxed);
        self.table.view(self.active_cores(), Arrival { core, queue_cores })
    }

    pub(super) fn handovers(&self) -> u64 {
        self.handovers.load(Ordering::SeqCst)
    }

    pub(super) fn on_sent(&self, core: usize, packets: u64) {
        if let Some(ring) = self.tx_rings.get(core - 1) {
            ring.sent.fetch_add(packets, Ordering::Relaxed);
        }
    }

    pub(super) fn on_forwarded(&self, core: usize, frames: usize) {
        if let Some(ring) = self.tx_rings.get(core - 1) {
            ring.forwarded.fetch_add(frames as u64, Ordering::Release);
        }
    }

    /// Marks that a core begins to dispatch frames by the table.
    #[inline]
    pub(super) fn begin_round(&self, core: usize) {
        self.rounds[core].0.fetch_add(1, Ordering::SeqCst);
    }

    /// Marks that a core has passed on the frames that it dispatched.
    #[inline]
    pub(super) fn end_round(&self, core: usize) {
        self.rounds[core].0.fetch_add(1, Ordering::Release);
    }

    pub(super) fn queue_requests(&self) -> &QueueRequests {
        &self.queue_requests
    }

    pub(super) fn set_has_queue(&self, core: usize, has_queue: bool) {
        let bit = 1 << core;
        match has_queue {
            true => self.queue_cores.fetch_or(bit, Ordering::SeqCst),
            false => self.queue_cores.fetch_and(!bit, Ordering::SeqCst),
        };
    }

    /// Makes the other cores close their queues, and waits until they have.
    ///
    /// # Errors
    /// If a core cannot, or does not run.
    pub(super) fn close_queues(&self) -> io::Result<()> {
        let queue_cores = self.queue_cores.load(Ordering::SeqCst);
        let with_queue = (1..self.cores()).filter(|core| queue_cores & 1 << core != 0);
        self.request_all(with_queue.map(|core| (core, QueueRequest::Close)))
    }

    /// Makes the cores 1, 2, … open these queues, and waits until they have.
    ///
    /// # Errors
    /// If a queue cannot be opened, there are more queues than cores, or a core does not run.
    pub(super) fn open_queues(&self, queues: Vec<OpenDevice>) -> io::Result<()> {
        if queues.len() >= self.cores() {
            return Err(io::Error::other("the device has more queues than there are cores"));
        }
        let requests = queues.into_iter().map(QueueRequest::Open);
        self.request_all((1..).zip(requests))
    }

    fn request_all(&self, requests: impl Iterator<Item = (usize, QueueRequest)>) -> io::Result<()> {
        let mut asked = Vec::new();
        for (core, request) in requests {
            self.queue_requests.post(core, request);
            asked.push(core);
        }
        for core in asked {
            let mut answer = None;
            let mut has_answer = || {
                answer = answer.take().or_else(|| self.queue_requests.answer_of(core));
                answer.is_some()
            };
            wait_until(&mut has_answer, || self.bells[core].ring())?;
            answer.unwrap_or(Ok(()))?;
        }
        Ok(())
    }
}

/// Waits until `done`, calling `wake` again and again.
fn wait_until(mut done: impl FnMut() -> bool, wake: impl Fn()) -> io::Result<()> {
    let began = Instant::now();
    while !done() {
        if began.elapsed() > ROUND_TIMEOUT {
            return Err(io::ErrorKind::TimedOut.into());
        }
        wake();
        std::thread::yield_now();
    }
    Ok(())
}
