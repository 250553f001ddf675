//! AF_XDP: frames straight from the driver, without the kernel's stack.
//!
//! A BPF program on the interface redirects the frames that match its rules ([`Steering`])
//! and passes the rest to the kernel. Redirected frames are written to the [`Arena`], whose
//! memory is registered with the kernel as a *umem*, and are announced on the RX ring of an
//! AF_XDP socket. There is one socket per receive queue.
//!
//! A BPF link that the process owns attaches the program. The kernel detaches the program as
//! soon as the process exits, for whatever reason.
//!
//! Each kernel object has its own file: [`umem`](self) memory, rings, sockets, the program,
//! its rules, busy polling. All raw system calls are in `sys`.

mod admission;
mod config;
mod error;
mod guard;
mod holder;
mod irq_deferral;
mod link;
mod napi;
mod open;
mod program;
mod queue;
mod ring;
pub(crate) mod rules;
mod rx_missed;
mod socket;
mod softirq_mode;
mod steering;
mod sys;
mod traffic;
mod umem;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use tidegate_memory::Arena;
use tidegate_wire::DropReason;

pub use self::config::{AttachMode, BusyPoll, CopyMode, RingSizes, UnknownAttachMode, XdpConfig};
pub use self::error::XdpError;
pub use self::guard::XdpGuard;
use self::irq_deferral::{IrqDeferral, TimeoutChange};
pub use self::link::XdpLink;
pub use self::napi::NapiPoller;
#[cfg(feature = "packet")]
pub(crate) use self::open::system_error;
use self::program::SteeringProgram;
use self::queue::{Polling, Queue};
use self::rx_missed::RxMissedCounters;
use self::softirq_mode::{CHECK_INTERVAL, SoftirqMode};
pub use self::steering::Steering;
pub use self::sys::URING_MARK;
use self::traffic::TrafficMonitor;
use crate::admission::{ClassCounts, EarlyDrop, Limits, MAX_CLASSES};
pub use crate::steering::{SteeringRule, TransportProtocol};
use crate::{Burst, Capabilities, Device, DeviceCounters, HandoverState};

/// Frames of the interface by the decision of the steering program.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SteeringCounters {
    /// Redirected to the device.
    pub redirected: u64,
    /// Passed to the kernel: no rule matches.
    pub passed_not_steered: u64,
    /// Passed to the kernel: neither IP with UDP or TCP, nor ARP.
    pub passed_other_protocol: u64,
    /// Passed to the kernel: tagged for another VLAN, or with two tags.
    pub passed_other_vlan: u64,
    /// Passed to the kernel: a fragment to an address that is not Tidegate's own.
    pub passed_fragment: u64,
    /// Passed to the kernel: more IPv6 extension headers than the program parses.
    pub passed_extension: u64,
    /// Passed to the kernel: truncated or malformed.
    pub passed_malformed: u64,
    /// Passed to the kernel: a rule matches, but on a queue without a socket of the device.
    pub passed_no_socket: u64,
}

/// Data path of an open device: attach mode, copy mode, busy polling.
struct DataPath {
    native: bool,
    zero_copy: bool,
    /// Frames that stand for several TCP segments are split.
    splits: bool,
    /// Frames may come from senders on this machine.
    local_peers: bool,
    busy_poll: Option<BusyPoll>,
}

/// Device on AF_XDP sockets.
///
/// The arena that opened the device must be passed to every call, and serves no other
/// device. When the device is dropped, frames held by the kernel stay lent; use
/// [`XdpDevice::close`] to return those frames to the arena.
pub struct XdpDevice {
    // Dropped in this order: without sockets the program passes every frame to the kernel, so
    // no frame is lost between the two.
    queues: Vec<Queue>,
    program: SteeringProgram,
    /// Polls the driver if the sockets cannot.
    poller: Option<NapiPoller>,
    /// Admission limits the total, so that most frames may be dropped on the interface.
    has_total_limit: bool,
    /// Polls of the driver that find nothing are allowed.
    allows_idle_polls: bool,
    /// Choice between softirqs and polls while that is so.
    softirq_mode: SoftirqMode,
    irq_deferral: Option<IrqDeferral>,
    traffic: TrafficMonitor,
    readiness: OwnedFd,
    data_path: DataPath,
    rx_missed: RxMissedCounters,
    /// Number of times that the RX rings had fewer frames than the quota.
    times_emptied: u64,
    next_receive: usize,
    next_transmit: usize,
    /// Consecutive bursts of at least [`LARGE_BURST_FRAMES`] frames, or of the whole quota.
    large_bursts: u32,
    capabilities: Capabilities,
}

/// Maximum time that an application is assumed to need for one burst, in nanoseconds: the
/// flush timeout of a busy device. If the kernel's timer polled earlier, its softirq would
/// not end, since a flood always brings more frames, and would take the core from the
/// application.
const BUSY_FLUSH_TIMEOUT_NS: u64 = 10_000_000;
/// Minimum frames of a large burst.
const LARGE_BURST_FRAMES: usize = 16;
/// Consecutive large bursts after which the device is busy.
const BUSY_LARGE_BURSTS: u32 = 8;

/// Steering program loaded into the kernel, without a device.
pub struct LoadedProgram(Option<SteeringProgram>);

impl LoadedProgram {
    /// Link that keeps the program on the interface after [`Device::close_for_handover`] with `keep`.
    pub fn link(&self) -> Option<&XdpLink> {
        self.0.as_ref()?.link()
    }

    /// Prepares the program to replace the program that another process has on the interface.
    /// [`Device::take_over`] performs the replacement.
    pub fn inherit(&mut self, link: XdpLink) {
        if let Some(program) = &mut self.0 {
            program.inherit(link);
        }
    }
}

impl XdpDevice {
    /// Opens a device: registers the arena's memory, attaches the program, binds a socket to each
    /// queue and starts to redirect the frames that match the rules.
    ///
    /// The sockets belong to the network namespace of the calling thread.
    ///
    /// # Errors
    /// [`XdpError`] names the cause and the remedy. Nothing is left attached or changed.
    pub fn open(config: XdpConfig, arena: &mut Arena) -> Result<Self, XdpError> {
        open::open(config, &mut None, arena)
    }

    /// Performs the slowest part of [`XdpDevice::open`], which needs no interface: loading the
    /// program takes some tenths of a second, since the kernel verifies the program.
    ///
    /// # Errors
    /// [`XdpError`] if the kernel refuses the program.
    pub fn load() -> Result<LoadedProgram, XdpError> {
        Ok(LoadedProgram(Some(open::load()?)))
    }

    /// Opens a device like [`XdpDevice::open`], with a program loaded before. On failure `loaded`
    /// is unchanged and the call may be repeated. On success `loaded` is empty, and a later call
    /// loads a new program.
    ///
    /// # Errors
    /// As [`XdpDevice::open`].
    pub fn open_loaded(
        config: XdpConfig,
        loaded: &mut LoadedProgram,
        arena: &mut Arena,
    ) -> Result<Self, XdpError> {
        open::open(config, &mut loaded.0, arena)
    }

    /// Closes the device and returns the frames held by the kernel to the arena.
    pub fn close(self, arena: &mut Arena) {
        drop(self);
        arena.reclaim_all();
    }

    /// Adds a user of a steering rule, effective immediately. Other rules stay.
    ///
    /// # Errors
    /// [`XdpError::Steering`] if a map has no space for another rule.
    pub fn steer(&mut self, rule: SteeringRule) -> Result<(), XdpError> {
        Ok(self.program.steer(&rule)?)
    }

    /// Removes a user of a steering rule. With its last user the rule ends, effective immediately:
    /// its frames pass to the kernel again. Does nothing if the rule was not set.
    ///
    /// # Errors
    /// [`XdpError::Steering`] if the kernel refuses.
    pub fn unsteer(&mut self, rule: &SteeringRule) -> Result<(), XdpError> {
        Ok(self.program.unsteer(rule)?)
    }

    /// Current steering rules.
    pub fn steering(&self) -> &Steering {
        self.program.steering()
    }

    /// Counters of the steering program since it was loaded.
    ///
    /// # Errors
    /// [`XdpError::Steering`] if the kernel refuses to read the map.
    pub fn steering_counters(&self) -> Result<SteeringCounters, XdpError> {
        Ok(self.program.counters()?)
    }
}

impl Device for XdpDevice {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn receive(&mut self, arena: &mut Arena, burst: &mut Burst, quota: usize) -> io::Result<usize> {
        self.update_deferral()?;
        let mut received = self.receive_round(arena, burst, quota)?;
        self.times_emptied += u64::from(received < quota);
        if self.has_total_limit {
            self.check_softirq_mode()?;
        }
        let polls = self.is_polling();
        if let Some(poller) = &mut self.poller
            && polls
            && quota > 0
            && poller.is_due(received, quota)
            && (self.allows_idle_polls || received > 0)
        {
            let pending = |queues: &mut [Queue]| queues.iter_mut().map(Queue::pending).sum();
            let before = pending(&mut self.queues);
            poller.poll()?;
            poller.on_poll(before, pending(&mut self.queues));
            received += self.receive_round(arena, burst, quota - received)?;
        }
        self.next_receive = (self.next_receive + 1) % self.queues.len();
        if self.traffic.on_poll(received) {
            self.apply_traffic_mode()?;
        }
        self.note_burst(received, quota);
        Ok(received)
    }

    fn set_idle_polls(&mut self, allowed: bool) {
        self.allows_idle_polls = allowed;
    }

    fn transmit(&mut self, arena: &mut Arena, burst: &mut Burst) -> io::Result<usize> {
        let count = self.queues.len();
        let mut taken = 0;
        for offset in 0..count {
            let queue = &mut self.queues[(self.next_transmit + offset) % count];
            taken += queue.transmit(arena, burst)?;
        }
        self.next_transmit = (self.next_transmit + 1) % count;
        Ok(taken)
    }

    fn pause_receive(&mut self, wait_ns: u64) -> io::Result<()> {
        if self.is_in_softirq_mode() {
            return Ok(());
        }
        // If the kernel refuses, softirqs poll the driver meanwhile.
        let Some(deferral) = &mut self.irq_deferral else { return Ok(()) };
        let Ok(change) = deferral.defer_for(wait_ns) else { return Ok(()) };
        if change != TimeoutChange::None {
            self.traffic.set_heavy();
        }
        self.put_into_effect(change)
    }

    fn has_unsent_frames(&mut self) -> bool {
        self.queues.iter_mut().any(Queue::has_unsent_frames)
    }

    fn prepare_sleep(&mut self) -> io::Result<bool> {
        self.large_bursts = 0;
        self.traffic.on_sleep();
        self.apply_traffic_mode()?;
        if let Some(deferral) = &mut self.irq_deferral {
            deferral.prepare_sleep(self.readiness.as_fd())?;
        }
        let mut idle = true;
        for queue in &mut self.queues {
            idle &= queue.prepare_sleep()?;
        }
        Ok(idle)
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.readiness.as_fd())
    }

    fn set_steering(&mut self, rule: &SteeringRule, take: bool) -> io::Result<()> {
        if take { self.steer(*rule) } else { self.unsteer(rule) }.map_err(io::Error::other)
    }

    fn early_drop(&mut self) -> Option<&mut dyn EarlyDrop> {
        Some(self)
    }

    fn counters(&mut self) -> DeviceCounters {
        let mut counters = DeviceCounters::default();
        for queue in &self.queues {
            queue.add_counters(&mut counters);
        }
        // An error of the kernel cannot be handled here; the drops stay uncounted.
        for class in self.counts().unwrap_or_default() {
            let drops = &mut counters.drops;
            drops.add(DropReason::AdmissionClassClosed, class.refused_closed);
            drops.add(DropReason::AdmissionRate, class.refused_rate);
            drops.add(DropReason::AdmissionSourceShare, class.refused_source_share);
        }
        self.capabilities.detail = self.detail();
        counters
    }

    fn close_for_handover(self: Box<Self>, arena: &mut Arena, keep: bool) -> Option<HandoverState> {
        let Self { queues, mut program, .. } = *self;
        if !(keep && program.start_dropping().is_ok()) {
            program.detach();
        }
        drop(queues);
        arena.reclaim_all();
        Some(HandoverState::Xdp(Box::new(LoadedProgram(Some(program)))))
    }

    fn take_over(&mut self) -> io::Result<()> {
        self.program.take_over()
    }
}

/// Sums of admitted and of refused frames over all classes.
fn admitted_and_refused(counts: &[ClassCounts]) -> (u64, u64) {
    let sum = |field: fn(&ClassCounts) -> u64| counts.iter().map(field).sum();
    (sum(|class| class.admitted), sum(ClassCounts::refused))
}

/// The BPF program on the interface drops frames that are not admitted, before they are
/// copied. Admission applies only to frames that match a steering rule.
impl EarlyDrop for XdpDevice {
    fn set_classifier(&mut self, program: &crate::admission::Classifier) -> io::Result<()> {
        self.program.admission().set_classifier(program)
    }

    fn set_known_sources(&mut self, words: &[u64]) -> io::Result<()> {
        self.program.admission().set_known_sources(words)
    }

    fn set_limits(&mut self, limits: Option<&Limits>) -> io::Result<()> {
        self.program.set_limits(limits)?;
        // Frames that are only counted are polled for as without limits.
        let has_total = limits.is_some_and(Limits::has_total);
        if std::mem::replace(&mut self.has_total_limit, has_total) != has_total {
            let counts = self.program.admission().counts()?;
            self.softirq_mode =
                SoftirqMode::new(self.rx_missed.read()?, admitted_and_refused(&counts));
            self.traffic.set_limiting(has_total);
            self.apply_softirq_mode()?;
        }
        Ok(())
    }

    fn counts(&mut self) -> io::Result<[ClassCounts; MAX_CLASSES]> {
        let counts = self.program.admission().counts()?;
        if self.has_total_limit && self.softirq_mode.on_counts(admitted_and_refused(&counts)) {
            self.apply_softirq_mode()?;
        }
        Ok(counts)
    }

    fn times_emptied(&self) -> Option<u64> {
        // Without the counters of missed frames only a full burst after a poll shows overload.
        self.rx_missed.is_available().then_some(self.times_emptied)
    }

    fn rx_missed(&mut self) -> io::Result<u64> {
        self.rx_missed.read()
    }
}

impl XdpDevice {
    /// Runs the driver's receive path once.
    fn poll_driver(&mut self) -> io::Result<()> {
        if let Some(poller) = &self.poller {
            return poller.poll_short();
        }
        self.queues.iter().try_for_each(|queue| queue.socket().poll_driver())
    }

    /// True while softirqs run the driver's receive path without polls by this device.
    fn is_in_softirq_mode(&self) -> bool {
        self.has_total_limit && self.softirq_mode.is_active()
    }

    /// True while this device polls the driver itself: also until interrupts are requested, but not
    /// yet granted.
    fn is_polling(&self) -> bool {
        let deferral = self.irq_deferral.as_ref();
        let has_interrupts = || deferral.is_some_and(|deferral| !deferral.is_pending());
        !self.is_in_softirq_mode() && (self.traffic.is_heavy() || !has_interrupts())
    }

    /// Lets the device's settings take effect that were changed since the last call.
    #[inline]
    fn update_deferral(&mut self) -> io::Result<()> {
        let Some(deferral) = &mut self.irq_deferral else { return Ok(()) };
        match deferral.update(self.readiness.as_fd()) {
            Ok(change) => self.put_into_effect(change),
            // Without interrupts, polling continues.
            Err(_) => {
                self.traffic.set_heavy();
                Ok(())
            }
        }
    }

    /// Polls the driver, which then uses its new flush timeout.
    #[inline]
    fn put_into_effect(&mut self, change: TimeoutChange) -> io::Result<()> {
        if change == TimeoutChange::Made { self.poll_driver() } else { Ok(()) }
    }

    /// Switches the driver between polls and interrupts, according to the traffic.
    fn apply_traffic_mode(&mut self) -> io::Result<()> {
        if self.is_in_softirq_mode() {
            return Ok(());
        }
        let heavy = self.traffic.is_heavy();
        let Some(deferral) = &mut self.irq_deferral else { return Ok(()) };
        match if heavy { deferral.expect_polls() } else { deferral.interrupt_at_once() } {
            Ok(change) => self.put_into_effect(change),
            // If the kernel refuses, polling continues.
            Err(_) => {
                self.traffic.set_heavy();
                Ok(())
            }
        }
    }

    /// Checks every [`CHECK_INTERVAL`] the RX-missed counters, while admission limits are in force.
    fn check_softirq_mode(&mut self) -> io::Result<()> {
        if self.softirq_mode.last_check.elapsed() < CHECK_INTERVAL {
            return Ok(());
        }
        let lost = self.rx_missed.read()?;
        if self.softirq_mode.on_check(lost) {
            self.apply_softirq_mode()
        } else if self.is_in_softirq_mode() {
            self.poll_driver()
        } else {
            Ok(())
        }
    }

    /// Sets the driver's flush timeout for the current mode, effective immediately.
    fn apply_softirq_mode(&mut self) -> io::Result<()> {
        let (in_softirq, overrun) = (self.is_in_softirq_mode(), self.softirq_mode.overrun);
        let overrun = overrun && self.has_total_limit;
        // If the kernel refuses, softirqs poll at other times.
        let _ = self.irq_deferral.as_mut().map(|device| match (in_softirq, overrun) {
            (true, _) => device.poll_in_softirq(),
            (_, true) => device.defer_for(BUSY_FLUSH_TIMEOUT_NS),
            _ => device.expect_polls(),
        });
        self.poll_driver()
    }

    /// Counts consecutive large bursts. A busy device will poll again, however late: interrupts
    /// are deferred until the device goes to sleep.
    fn note_burst(&mut self, frames: usize, quota: usize) {
        if frames < LARGE_BURST_FRAMES.min(quota) {
            self.large_bursts = 0;
            return;
        }
        self.large_bursts = self.large_bursts.saturating_add(1);
        if self.large_bursts >= BUSY_LARGE_BURSTS
            && self.is_polling()
            && let Some(deferral) = &mut self.irq_deferral
        {
            // If the kernel refuses, softirqs poll between the polls of this device.
            let _ = deferral.defer_for(BUSY_FLUSH_TIMEOUT_NS);
        }
    }

    /// Receives pending frames from the RX rings, round-robin over the queues.
    fn receive_round(
        &mut self,
        arena: &mut Arena,
        burst: &mut Burst,
        quota: usize,
    ) -> io::Result<usize> {
        let (count, polls) = (self.queues.len(), self.is_polling());
        let mut received = 0;
        for offset in 0..count {
            let queue = &mut self.queues[(self.next_receive + offset) % count];
            received += queue.receive(arena, burst, quota - received, polls)?;
        }
        Ok(received)
    }

    fn detail(&self) -> String {
        let mut parts = vec![if self.data_path.native { "native" } else { "generic" }.to_string()];
        parts.push(if self.data_path.zero_copy { "zero-copy" } else { "copy" }.to_string());
        if let Some(settings) = &self.data_path.busy_poll {
            parts.push(if self.poller.is_some() {
                "busy polling by io_uring".to_string()
            } else if self.queues.iter().all(|queue| queue.polling() != Polling::Off) {
                format!("busy polling budget {}", settings.budget)
            } else {
                "busy polling not supported by the driver".to_string()
            });
            parts.push(if self.irq_deferral.is_some() {
                format!("interrupts deferred {} us", settings.flush_timeout_ns / 1000)
            } else {
                "interrupts not deferred".to_string()
            });
        }
        if self.data_path.local_peers {
            parts.push("unfilled checksums of local senders accepted".to_string());
        }
        if self.data_path.splits {
            parts.push("TCP segmented on receive, UDP not".to_string());
        }
        parts.join(", ")
    }
}
