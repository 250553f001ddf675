//! Receive queues of one network core: their sockets, the polls of the driver, and its interrupts.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use aya::maps::MapError;
#[cfg(feature = "packet")]
use rustix::event::epoll;
use tidegate_memory::Arena;

use super::BusyPoll;
use super::irq_deferral::{IrqDeferral, TimeoutChange};
use super::napi::NapiPoller;
use super::program::SocketMap;
use super::queue::{Polling, Queue};
use super::segment_sender::SegmentSender;
use super::softirq_mode::{CHECK_INTERVAL, SoftirqMode};
#[cfg(feature = "packet")]
use super::streams::TrafficTotals;
use super::traffic::TrafficMonitor;
use crate::rx_missed::RxMissedCounters;
use crate::{Burst, Capabilities, Device, DeviceCounters};

/// Maximum time that an application is assumed to need for one burst, in nanoseconds: the
/// flush timeout of a busy device. If the kernel's timer polled earlier, its softirq would
/// not end, since a flood always brings more frames, and would take the core from the
/// application.
const BUSY_FLUSH_TIMEOUT_NS: u64 = 10_000_000;
/// Minimum frames of a large burst.
const LARGE_BURST_FRAMES: usize = 16;
/// Consecutive large bursts after which the device is busy.
const BUSY_LARGE_BURSTS: u32 = 8;

/// Data of the packet socket's descriptor in the epoll instance of a device.
#[cfg(feature = "packet")]
const PACKET_EVENT: u64 = u64::MAX - 1;

/// Data path of open queues: attach mode, copy mode, busy polling.
#[derive(Clone, Copy)]
pub(super) struct DataPath {
    pub(super) native: bool,
    pub(super) zero_copy: bool,
    /// Frames that stand for several TCP segments are split.
    pub(super) splits: bool,
    /// Frames may come from senders on this machine.
    pub(super) local_peers: bool,
    pub(super) busy_poll: Option<BusyPoll>,
}

/// Receive queues of one network core: a device whose frames the steering program redirects, that
/// of an [`XdpDevice`](super::XdpDevice).
pub(super) struct CoreQueues {
    queues: Vec<Queue>,
    /// Polls the driver if the sockets cannot.
    poller: Option<NapiPoller>,
    /// Sends runs of segments; `None` where the NIC reads frames from the arena.
    segment_sender: Option<SegmentSender>,
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
    /// No program is attached: the driver has no NAPI instance to poll.
    is_detached: bool,
    rx_missed: RxMissedCounters,
    /// Number of times that the RX rings had fewer frames than the quota.
    times_emptied: u64,
    next_receive: usize,
    next_transmit: usize,
    /// Consecutive bursts of at least [`LARGE_BURST_FRAMES`] frames, or of the whole quota.
    large_bursts: u32,
    capabilities: Capabilities,
}

/// Parts of the queues of one network core that depend on the interface.
pub(super) struct OpenedQueues {
    pub(super) queues: Vec<Queue>,
    pub(super) segment_sender: Option<SegmentSender>,
    pub(super) poller: Option<NapiPoller>,
    pub(super) irq_deferral: Option<IrqDeferral>,
    pub(super) readiness: OwnedFd,
    pub(super) data_path: DataPath,
    pub(super) rx_missed: RxMissedCounters,
    pub(super) capabilities: Capabilities,
}

impl CoreQueues {
    pub(super) fn new(opened: OpenedQueues) -> Self {
        let OpenedQueues {
            queues,
            segment_sender,
            poller,
            irq_deferral,
            readiness,
            data_path,
            rx_missed,
            capabilities,
        } = opened;
        let mut queues = Self {
            queues,
            segment_sender,
            poller,
            irq_deferral,
            traffic: TrafficMonitor::new(),
            readiness,
            data_path,
            is_detached: false,
            has_total_limit: false,
            allows_idle_polls: true,
            rx_missed,
            times_emptied: 0,
            softirq_mode: SoftirqMode::new(0, (0, 0)),
            next_receive: 0,
            next_transmit: 0,
            large_bursts: 0,
            capabilities,
        };
        queues.capabilities.detail = queues.detail();
        queues
    }

    /// Makes the steering program redirect the frames of the queues with these numbers.
    pub(super) fn set_sockets(
        &self,
        numbers: &[u32],
        sockets: &mut SocketMap,
    ) -> Result<(), MapError> {
        let mut queues = self.queues.iter().zip(numbers);
        queues.try_for_each(|(queue, &number)| sockets.set(number, queue.socket().as_fd()))
    }

    /// True if admission limits the total.
    pub(super) fn has_total_limit(&self) -> bool {
        self.has_total_limit
    }

    /// Sets whether admission limits the total, with the frames admitted and refused so far.
    pub(super) fn set_total_limit(&mut self, limits: bool, counts: (u64, u64)) -> io::Result<()> {
        self.has_total_limit = limits;
        self.softirq_mode = SoftirqMode::new(self.rx_missed.read()?, counts);
        self.traffic.set_limiting(limits);
        self.apply_softirq_mode()
    }

    /// Records the frames admitted and refused so far.
    pub(super) fn on_admission_counts(&mut self, counts: (u64, u64)) -> io::Result<()> {
        if self.has_total_limit && self.softirq_mode.on_counts(counts) {
            self.apply_softirq_mode()?;
        }
        Ok(())
    }

    /// Number of times that the RX rings had fewer frames than the quota; `None` without counters
    /// of missed frames: only a full burst after a poll shows overload then.
    pub(super) fn times_emptied(&self) -> Option<u64> {
        self.rx_missed.is_available().then_some(self.times_emptied)
    }

    /// Frames lost so far because the RX ring was full.
    pub(super) fn rx_missed(&self) -> io::Result<u64> {
        self.rx_missed.read()
    }

    /// True if interrupts are deferred by settings that outlast a NAPI instance.
    #[cfg(feature = "packet")]
    pub(super) fn keeps_settings(&self) -> bool {
        self.irq_deferral.as_ref().is_none_or(IrqDeferral::is_of_interface)
    }

    /// Makes a descriptor wake the device, too.
    ///
    /// # Errors
    /// The kernel has no memory.
    #[cfg(feature = "packet")]
    pub(super) fn wake_for(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        let data = epoll::EventData::new_u64(PACKET_EVENT);
        Ok(epoll::add(&self.readiness, fd, data, epoll::EventFlags::IN)?)
    }

    /// Records that the program was detached, or attached again with these NAPI instances in the
    /// place of the former.
    ///
    /// # Errors
    /// The interface is gone.
    #[cfg(feature = "packet")]
    pub(super) fn on_attachment(&mut self, attached: bool, napis: Vec<u32>) -> io::Result<()> {
        self.is_detached = !attached;
        if !attached {
            return Ok(());
        }
        if let Some(poller) = &mut self.poller
            && poller.replace_napis(napis).is_err()
        {
            // Softirqs run the driver's receive path.
            self.poller = None;
        }
        self.traffic.prefer_polls();
        self.apply_traffic_mode()?;
        self.poll_driver()
    }

    /// Traffic so far.
    #[cfg(feature = "packet")]
    pub(super) fn traffic_totals(&self) -> TrafficTotals {
        let mut totals = TrafficTotals::default();
        self.queues.iter().for_each(|queue| queue.add_traffic(&mut totals));
        totals.sent_bytes += self.segment_sender.as_ref().map_or(0, SegmentSender::sent_bytes);
        totals
    }

    /// Runs the driver's receive path once.
    fn poll_driver(&mut self) -> io::Result<()> {
        if self.is_detached {
            return Ok(());
        }
        if let Some(poller) = &mut self.poller {
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
        !self.is_detached
            && !self.is_in_softirq_mode()
            && (self.traffic.prefers_polls() || !has_interrupts())
    }

    /// Lets the device's settings take effect that were changed since the last call.
    #[inline]
    fn update_deferral(&mut self) -> io::Result<()> {
        let Some(deferral) = &mut self.irq_deferral else { return Ok(()) };
        match deferral.update(self.readiness.as_fd()) {
            Ok(change) => self.put_into_effect(change),
            // Without interrupts, polling continues.
            Err(_) => {
                self.traffic.prefer_polls();
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
        if self.is_detached || self.is_in_softirq_mode() {
            return Ok(());
        }
        let Some(deferral) = &mut self.irq_deferral else { return Ok(()) };
        let polls = self.traffic.prefers_polls();
        match if polls { deferral.expect_polls() } else { deferral.interrupt_at_once() } {
            Ok(change) => self.put_into_effect(change),
            // If the kernel refuses, polling continues.
            Err(_) => {
                self.traffic.prefer_polls();
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
            (true, _) => device.poll_in_softirq(self.softirq_mode.interval_ns),
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

    /// Sends the runs of segments in a burst as one frame each, and the frames before them, in their
    /// order. Returns the number of frames removed from `burst`.
    fn transmit_runs(&mut self, arena: &mut Arena, burst: &mut Burst) -> io::Result<usize> {
        let mut taken = 0;
        while let Some(sender) = &self.segment_sender
            && let Some(run) = sender.find(arena, burst)
        {
            let before = self.transmit_frames(arena, burst, run.at)?;
            taken += before;
            // A run must not overtake frames that wait in the rings.
            if before < run.at || self.needs_retry() {
                break;
            }
            let sender = self.segment_sender.as_mut();
            let Some(count) = sender.and_then(|sender| sender.send(arena, burst, run)) else {
                break;
            };
            taken += count;
        }
        Ok(taken)
    }

    /// Sends up to `count` frames, round-robin over the queues. Returns the number of frames
    /// removed from `burst`.
    fn transmit_frames(
        &mut self,
        arena: &mut Arena,
        burst: &mut Burst,
        count: usize,
    ) -> io::Result<usize> {
        let queues = self.queues.len();
        let mut taken = 0;
        for offset in 0..queues {
            let queue = &mut self.queues[(self.next_transmit + offset) % queues];
            taken += queue.transmit(arena, burst, count - taken)?;
        }
        self.next_transmit = (self.next_transmit + 1) % queues;
        Ok(taken)
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
        if self.segment_sender.is_some() {
            parts.push("TCP segmented by the kernel on transmit".to_string());
        }
        parts.join(", ")
    }
}

impl Device for CoreQueues {
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
            poller.poll(|| self.queues.iter_mut().map(Queue::pending).sum())?;
            received += self.receive_round(arena, burst, quota - received)?;
        }
        self.next_receive = (self.next_receive + 1) % self.queues.len();
        if self.irq_deferral.as_ref().is_some_and(IrqDeferral::is_pending) {
            self.traffic.restart_window();
        } else if self.traffic.on_poll(received) {
            self.apply_traffic_mode()?;
        }
        self.note_burst(received, quota);
        Ok(received)
    }

    fn set_idle_polls(&mut self, allowed: bool) {
        self.allows_idle_polls = allowed;
    }

    fn transmit(&mut self, arena: &mut Arena, burst: &mut Burst) -> io::Result<usize> {
        let in_runs = self.transmit_runs(arena, burst)?;
        let left = burst.len();
        Ok(in_runs + self.transmit_frames(arena, burst, left)?)
    }

    fn pause_receive(&mut self, wait_ns: u64) -> io::Result<()> {
        if self.is_in_softirq_mode() {
            return Ok(());
        }
        // If the kernel refuses, softirqs poll the driver meanwhile.
        let Some(deferral) = &mut self.irq_deferral else { return Ok(()) };
        let Ok(change) = deferral.defer_for(wait_ns) else { return Ok(()) };
        if change != TimeoutChange::None {
            self.traffic.prefer_polls();
        }
        self.put_into_effect(change)
    }

    fn needs_retry(&mut self) -> bool {
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

    fn counters(&mut self) -> DeviceCounters {
        let mut counters = DeviceCounters::default();
        for queue in &self.queues {
            queue.add_counters(&mut counters);
        }
        if let Some(sender) = &self.segment_sender {
            sender.add_counters(&mut counters);
        }
        self.capabilities.detail = self.detail();
        counters
    }
}
