//! The engine of a router.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use tidegate::{Arena, DropCounters, DropReason};
use tidegate_device::{Burst, Device, DeviceCounters};
use tidegate_engine::{AddressReservations, Clock};
use tidegate_gate::{Gate, GateAction, Ring, RingCounts, Settings};
use tidegate_memory::Frame;
use tidegate_stack::{Counters, OwnAddresses, Router, Stack};

use crate::filter::{FilterCounters, FilterLink, QUEUE_PACKETS, Verdict};

/// Most frames requested from a device at a time.
const MAX_BURST_FRAMES: usize = 64;
/// Longest receive turn without a quota, so that the process can be told to stop.
const MAX_TURN_NS: u64 = 100_000_000;
/// Delay before retrying a transmit queue whose device accepts no frames.
const RETRY_TRANSMIT_NS: u64 = 200_000;
/// Receive turns with frames since the last sleep, from which on the router counts as loaded: too
/// busy to sleep.
const LOADED_TURNS: u32 = 32;
/// Longest gap between two polls of a device under load, in nanoseconds.
const MAX_LOADED_POLL_GAP_NS: u64 = 10_000_000;
/// Interval at which packets with overdue verdicts are looked for.
const FILTER_EXPIRY_INTERVAL_NS: u64 = 100_000_000;
/// The gate's identifier of the queue to the packet filter.
const FILTER_QUEUE: u64 = 0;
/// The gate's identifier of the first device's transmit queue; the other devices follow.
const FIRST_TX_QUEUE: u64 = 1;
/// Transmit queue length, in packets, at which feedback treats the queue as full. The queue itself
/// accepts more.
const TX_QUEUE_PACKETS: u32 = 512;

/// Counters of a router since it was created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ForwarderCounters {
    /// Turns served.
    pub turns: u64,
    /// Receive turns in which frames arrived.
    pub busy_turns: u64,
    /// Times the router prepared to sleep.
    pub sleeps: u64,
}

/// Result of one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ForwarderStep {
    /// A ring was served; this many packets moved.
    Served(usize),
    /// Work is left, but applications run first.
    Yield,
    /// Nothing may be done now. Receiving is paused until this time, in nanoseconds; `None` when
    /// receiving is not paused.
    Wait(Option<u64>),
}

/// Result of a receive turn.
#[derive(Clone, Copy, Debug, Default)]
struct ReceiveTurn {
    frames: usize,
    /// Feedback ended the turn, not the quota or an empty ring.
    paused: bool,
}

/// Counters of one interface and its device.
#[derive(Clone, Debug)]
pub struct InterfaceReport {
    /// Kind of device and its mode of operation.
    pub kind: String,
    /// Counters of the device.
    pub device: DeviceCounters,
    /// Counters of the interface's stack.
    pub stack: Counters,
}

/// Function that is called once a router's own addresses are known to be unique.
pub type ReadyCallback = Box<dyn FnOnce() -> io::Result<()> + Send>;

/// Function that is called at intervals, with the router's counters at hand.
pub type IntervalCallback = Box<dyn FnMut(&mut Forwarder) + Send>;

/// Function to call at intervals, and when it is due.
struct IntervalCall {
    callback: IntervalCallback,
    interval_ns: u64,
}

/// Router engine: devices, an arena, interfaces, a gate, and optionally a packet filter.
pub struct Forwarder {
    // Devices come first: they are closed before the arena, to which the kernel may still be
    // writing, is unmapped.
    devices: Vec<Box<dyn Device>>,
    arena: Arena,
    router: Router,
    gate: Gate,
    filter: Option<FilterLink>,
    clock: Clock,
    now_ns: u64,
    rx_burst: Burst,
    /// The part of each device's transmit queue that is being sent.
    tx_bursts: Vec<Burst>,
    /// Frames between receive work and protocol work, in modes with an input queue.
    input_queue: VecDeque<(usize, Frame)>,
    input_drops: DropCounters,
    /// True while another host may claim an own address, which is then given up.
    is_probing: bool,
    on_ready: Option<ReadyCallback>,
    /// Own addresses among the programs on each interface.
    reservations: Vec<AddressReservations>,
    filter_expiry_at_ns: u64,
    /// Receive turns with frames since the last sleep.
    turns_since_sleep: u32,
    counters: ForwarderCounters,
    interval_call: Option<IntervalCall>,
    interval_call_at_ns: u64,
}

impl Forwarder {
    /// Joins devices, the one arena that they were opened with, and a router with one interface
    /// for each device.
    pub fn new(
        devices: Vec<Box<dyn Device>>,
        arena: Arena,
        router: Router,
        filter: Option<FilterLink>,
        settings: Settings,
        clock: Clock,
    ) -> Self {
        let now_ns = clock.now_ns();
        let rings = RingCounts {
            receive: devices.len(),
            transmit: devices.len(),
            application: usize::from(filter.is_some()),
        };
        let tx_bursts = devices.iter().map(|_| Burst::with_capacity(MAX_BURST_FRAMES)).collect();
        Self {
            gate: Gate::new(settings, rings, now_ns),
            devices,
            arena,
            router,
            filter,
            clock,
            now_ns,
            rx_burst: Burst::with_capacity(MAX_BURST_FRAMES),
            tx_bursts,
            input_queue: VecDeque::new(),
            input_drops: DropCounters::new(),
            is_probing: true,
            on_ready: None,
            reservations: Vec::new(),
            filter_expiry_at_ns: 0,
            turns_since_sleep: 0,
            counters: ForwarderCounters::default(),
            interval_call: None,
            interval_call_at_ns: u64::MAX,
        }
    }

    /// Keeps the reservations of the own addresses for as long as this value exists.
    pub fn keep_reservations(&mut self, reservations: Vec<AddressReservations>) {
        self.reservations = reservations;
    }

    /// The gate, which decides when to poll and how many packets to take.
    pub fn gate(&mut self) -> &mut Gate {
        &mut self.gate
    }

    /// Reads the clock, in nanoseconds, and stores the time for the following work.
    pub fn read_clock(&mut self) -> u64 {
        self.now_ns = self.clock.now_ns();
        self.now_ns
    }

    /// Calls `on_ready` once the own addresses are known to be unique; at once if they are not
    /// probed.
    pub fn on_ready(&mut self, on_ready: ReadyCallback) {
        self.on_ready = Some(on_ready);
    }

    /// Calls `callback` soon, and then at this interval.
    pub fn call_each(&mut self, interval: Duration, callback: IntervalCallback) {
        let interval_ns = interval.as_nanos() as u64;
        self.interval_call = Some(IntervalCall { callback, interval_ns });
        self.interval_call_at_ns = 0;
    }

    /// Checks the own addresses while they are probed.
    fn check_addresses(&mut self) -> io::Result<()> {
        for addresses in self.router.stacks().iter().map(Stack::own_addresses) {
            match addresses {
                OwnAddresses::Taken(conflict) => return Err(conflict.into()),
                OwnAddresses::Probing => return Ok(()),
                OwnAddresses::Unique => {}
            }
        }
        self.is_probing = false;
        self.on_ready.take().map_or(Ok(()), |on_ready| on_ready())
    }

    /// Performs the gate's next action.
    ///
    /// # Errors
    /// When a device fails for good, or another host has claimed an own address.
    pub fn step(&mut self) -> io::Result<ForwarderStep> {
        self.read_clock();
        if self.is_probing {
            self.check_addresses()?;
        }
        let turn = match self.gate.next(self.now_ns) {
            GateAction::Serve(turn) => turn,
            GateAction::Yield => return Ok(ForwarderStep::Yield),
            GateAction::Wait { paused_until_ns } => {
                return Ok(ForwarderStep::Wait(paused_until_ns));
            }
        };
        self.counters.turns += 1;
        let mut paused = false;
        let taken = match turn.ring {
            Ring::Receive(device) => {
                let received = self.receive(device, turn.quota as usize)?;
                paused = received.paused;
                received.frames
            }
            Ring::Transmit(device) => self.transmit(device, turn.quota as usize)?,
            Ring::Application(_) => self.collect_verdicts(turn.quota as usize),
        };
        if self.gate.needs_turn_end_time() {
            self.read_clock();
        }
        self.gate.on_served(turn, taken as u32, self.now_ns);
        if paused {
            // Feedback ended the turn, so the ring may hold more frames.
            self.gate.on_ready(turn.ring);
        }
        Ok(ForwarderStep::Served(taken))
    }

    /// Marks every device and the filter as possibly ready.
    pub fn mark_all_ready(&mut self) {
        self.gate.on_all_ready();
    }

    /// Serves the timers and drops packets whose verdicts are overdue.
    pub fn serve_timers(&mut self) {
        let now_ns = self.now_ns;
        if self.router.next_timeout().is_some_and(|due_ns| due_ns <= now_ns) {
            self.router.handle_timeout(now_ns, &mut self.arena);
            self.mark_transmits_ready();
        }
        if now_ns >= self.filter_expiry_at_ns
            && let Some(filter) = &mut self.filter
        {
            self.filter_expiry_at_ns = now_ns + FILTER_EXPIRY_INTERVAL_NS;
            let (router, arena) = (&mut self.router, &mut self.arena);
            filter.expire(now_ns, &mut |transit, reason| router.discard(transit, reason, arena));
            self.report_filter_level();
        }
        if now_ns >= self.interval_call_at_ns
            && let Some(mut call) = self.interval_call.take()
        {
            self.interval_call_at_ns = now_ns + call.interval_ns;
            (call.callback)(self);
            self.interval_call = Some(call);
        }
    }

    /// Receives up to `quota` frames from a device and processes them. Without a quota and without
    /// feedback the turn lasts until the ring is empty. Under a flood that never happens: Mogul
    /// and Ramakrishnan, section 6.6.2, show the resulting livelock.
    fn receive(&mut self, device: usize, quota: usize) -> io::Result<ReceiveTurn> {
        let began_ns = self.now_ns;
        let mut received = ReceiveTurn::default();
        while received.frames < quota {
            let max_frames = MAX_BURST_FRAMES.min(quota - received.frames).min(self.filter_space());
            let frames =
                self.devices[device].receive(&mut self.arena, &mut self.rx_burst, max_frames)?;
            if frames == 0 {
                break;
            }
            while let Some(frame) = self.rx_burst.pop_front() {
                self.router.handle_frame(self.now_ns, device, frame, &mut self.arena);
                self.process_transit();
            }
            received.frames += frames;
            self.finish_burst();
            if received.frames < quota {
                let now_ns = self.read_clock();
                // The remaining frames better stay on the NIC, before any work is spent on them.
                received.paused = self.gate.paused_until(now_ns).is_some();
                if received.paused || now_ns - began_ns > MAX_TURN_NS {
                    break;
                }
            }
        }
        if received.frames > 0 {
            self.counters.busy_turns += 1;
            self.defer_device_interrupts()?;
        }
        Ok(received)
    }

    /// Most frames to receive so that feedback can still pause receiving: all of them may be for
    /// the filter. Unlimited while the filter's queue is full, so that a stuck filter cannot stop
    /// receiving.
    fn filter_space(&self) -> usize {
        let feedback = self.gate.settings().config().feedback;
        let filter = self.filter.as_ref().filter(|_| feedback);
        let space = filter.map(|screen| QUEUE_PACKETS - screen.waiting());
        space.filter(|room| *room > 0).unwrap_or(usize::MAX)
    }

    /// Defers the devices' interrupts under load, however long the router's protocol work takes.
    /// A NIC whose deferral expires receives on its own, before all other work of this core. A
    /// device defers its own NIC's interrupts when bursts are large. It does not do so for the NIC
    /// that frames leave by, nor when bursts are small. With the device's own deferral alone, a
    /// router with a quota of 10 forwarded about a fifth less at 700,000 packets a second and more.
    fn defer_device_interrupts(&mut self) -> io::Result<()> {
        self.turns_since_sleep = self.turns_since_sleep.saturating_add(1);
        if self.turns_since_sleep == LOADED_TURNS {
            self.devices
                .iter_mut()
                .try_for_each(|device| device.pause_receive(MAX_LOADED_POLL_GAP_NS))?;
        }
        Ok(())
    }

    /// Forwards transit packets, or requests the filter's verdicts on them.
    #[inline]
    fn process_transit(&mut self) {
        while let Some(transit) = self.router.poll_transit() {
            let Some(filter) = &mut self.filter else {
                self.router.forward(self.now_ns, transit, &mut self.arena);
                continue;
            };
            match filter.request_verdict(self.now_ns, transit, &self.arena) {
                Ok(()) if !filter.is_batch_full() => {}
                Ok(()) => self.flush_filter(),
                Err((transit, reason)) => self.router.discard(transit, reason, &mut self.arena),
            }
        }
    }

    /// Sends pending requests to the filter and tells the gate which rings have work.
    fn finish_burst(&mut self) {
        self.flush_filter();
        self.report_filter_level();
        self.mark_transmits_ready();
    }

    fn flush_filter(&mut self) {
        if let Some(filter) = &mut self.filter {
            let (router, arena) = (&mut self.router, &mut self.arena);
            filter.flush(&mut |transit, reason| router.discard(transit, reason, arena));
        }
    }

    fn report_filter_level(&mut self) {
        let Some(filter) = &self.filter else { return };
        let waiting = filter.waiting() as u32;
        self.gate.on_queue_level(self.now_ns, FILTER_QUEUE, waiting, QUEUE_PACKETS as u32);
    }

    fn mark_transmits_ready(&mut self) {
        for device in 0..self.devices.len() {
            if self.has_tx_work(device) {
                self.gate.on_ready(Ring::Transmit(device));
                self.report_tx_queue_level(device);
            }
        }
    }

    fn report_tx_queue_level(&mut self, device: usize) {
        let waiting = self.tx_bursts[device].len() + self.router.transmit_queue(device).len();
        let queue = FIRST_TX_QUEUE + device as u64;
        self.gate.on_queue_level(self.now_ns, queue, waiting as u32, TX_QUEUE_PACKETS);
    }

    /// Collects and applies up to `quota` verdicts; returns how many there were.
    fn collect_verdicts(&mut self, quota: usize) -> usize {
        let Some(filter) = &mut self.filter else { return 0 };
        let (now_ns, mut dropped) = (self.now_ns, Vec::new());
        let (router, arena) = (&mut self.router, &mut self.arena);
        let verdicts = filter.collect(
            quota,
            &mut |transit, verdict| match verdict {
                Verdict::Pass => router.forward(now_ns, transit, arena),
                Verdict::Refuse => router.discard(transit, DropReason::FilterRefused, arena),
            },
            &mut |transit, reason| dropped.push((transit, reason)),
        );
        for (transit, reason) in dropped {
            self.router.discard(transit, reason, &mut self.arena);
        }
        self.report_filter_level();
        self.mark_transmits_ready();
        verdicts
    }

    /// Passes up to `quota` frames to a device; returns how many the device accepted.
    fn transmit(&mut self, device: usize, quota: usize) -> io::Result<usize> {
        let (queue, tx_burst) = (self.router.transmit_queue(device), &mut self.tx_bursts[device]);
        let taken = if tx_burst.is_empty() && queue.len() <= quota {
            self.devices[device].transmit(&mut self.arena, queue)?
        } else {
            while tx_burst.len() < quota
                && let Some(frame) = queue.pop_front()
            {
                tx_burst.push_back(frame);
            }
            self.devices[device].transmit(&mut self.arena, tx_burst)?
        };
        if self.gate.watches_queues() {
            self.report_tx_queue_level(device);
        }
        Ok(taken)
    }

    fn has_tx_work(&mut self, device: usize) -> bool {
        !self.tx_bursts[device].is_empty() || !self.router.transmit_queue(device).is_empty()
    }

    /// Receive work of the modes `interrupt` and `moderated`: moves up to `limit` frames of each
    /// device to the input queue. Frames that do not fit are dropped after work was spent on
    /// them. Returns the number of frames received.
    ///
    /// # Errors
    /// When a device fails for good.
    pub fn receive_to_input_queue(&mut self, limit: u32) -> io::Result<usize> {
        let capacity = self.gate.settings().config().input_queue as usize;
        let mut taken = 0;
        for device in 0..self.devices.len() {
            let max_frames = MAX_BURST_FRAMES.min(limit as usize);
            taken +=
                self.devices[device].receive(&mut self.arena, &mut self.rx_burst, max_frames)?;
            while let Some(frame) = self.rx_burst.pop_front() {
                if self.input_queue.len() < capacity {
                    self.input_queue.push_back((device, frame));
                } else {
                    self.arena.free(frame);
                    self.input_drops.count(DropReason::InputQueueFull);
                }
            }
        }
        Ok(taken)
    }

    /// Protocol work of the modes `interrupt` and `moderated`: up to `limit` packets of the input
    /// queue, the filter's verdicts, the timers, and sending. Returns the number of packets and
    /// verdicts processed.
    ///
    /// # Errors
    /// As [`Forwarder::step`].
    pub fn process_input_queue(&mut self, limit: usize) -> io::Result<usize> {
        self.read_clock();
        if self.is_probing {
            self.check_addresses()?;
        }
        let mut done = 0;
        while done < limit
            && let Some((device, frame)) = self.input_queue.pop_front()
        {
            self.router.handle_frame(self.now_ns, device, frame, &mut self.arena);
            self.process_transit();
            done += 1;
        }
        self.flush_filter();
        done += self.collect_verdicts(limit);
        self.serve_timers();
        for device in 0..self.devices.len() {
            self.transmit(device, usize::MAX)?;
        }
        Ok(done)
    }

    /// True when frames wait in the input queue.
    pub fn has_input(&self) -> bool {
        !self.input_queue.is_empty()
    }

    /// Prepares to sleep; returns `None` when there is work already. Otherwise returns the longest
    /// sleep in nanoseconds; `u64::MAX` means until something arrives. While receiving is paused,
    /// arriving frames stay on the NIC.
    ///
    /// # Errors
    /// When a device fails for good.
    pub fn prepare_sleep(&mut self, paused_until_ns: Option<u64>) -> io::Result<Option<u64>> {
        for device in &mut self.devices {
            match paused_until_ns {
                Some(until_ns) => device.pause_receive(until_ns.saturating_sub(self.now_ns))?,
                None if device.prepare_sleep()? => {}
                None => return Ok(None),
            }
        }
        if paused_until_ns.is_none() {
            self.turns_since_sleep = 0;
        }
        self.counters.sleeps += 1;
        let now_ns = self.read_clock();
        let unsent = (0..self.devices.len()).any(|device| self.has_tx_work(device));
        let awaiting_verdicts = self.filter.as_ref().is_some_and(|screen| screen.waiting() > 0);
        let due = [
            self.router.next_timeout(),
            paused_until_ns,
            unsent.then_some(now_ns + RETRY_TRANSMIT_NS),
            awaiting_verdicts.then_some(now_ns + FILTER_EXPIRY_INTERVAL_NS),
        ];
        let due_ns = due.into_iter().flatten().min();
        Ok(Some(due_ns.map_or(u64::MAX, |due_ns| due_ns.saturating_sub(now_ns))))
    }

    /// Duplicates of the file descriptors that become readable when frames arrive.
    ///
    /// # Errors
    /// When the process is out of file descriptors.
    pub fn device_fds(&self) -> io::Result<Vec<OwnedFd>> {
        let fds = self.devices.iter().filter_map(Device::wake_fd);
        fds.map(|fd| fd.try_clone_to_owned()).collect()
    }

    /// Duplicate of the filter's file descriptor, and the number of the connection. Each
    /// connection to the filter has a new descriptor and a new number.
    ///
    /// # Errors
    /// When the process is out of file descriptors.
    pub fn filter_fd(&self) -> io::Result<Option<(u64, OwnedFd)>> {
        let Some(filter) = &self.filter else { return Ok(None) };
        let Some(fd) = filter.wake_fd() else { return Ok(None) };
        Ok(Some((filter.counters().connections, fd.as_fd().try_clone_to_owned()?)))
    }

    /// Number of the current connection to the filter; 0 while there is none.
    pub fn filter_connection(&self) -> u64 {
        let connected = self.filter.as_ref().filter(|screen| screen.is_connected());
        connected.map_or(0, |filter| filter.counters().connections)
    }

    /// Counters so far.
    pub fn counters(&self) -> ForwarderCounters {
        self.counters
    }

    /// Counters of the packet filter link; `None` without a filter.
    pub fn filter_counters(&self) -> Option<FilterCounters> {
        self.filter.as_ref().map(FilterLink::counters)
    }

    /// Counters of each interface and its device.
    pub fn reports(&mut self) -> Vec<InterfaceReport> {
        let stacks: Vec<Counters> =
            self.router.stacks().iter().map(|stack| stack.counters().clone()).collect();
        let report = |(device, stack): (&mut Box<dyn Device>, Counters)| {
            let counters = device.counters();
            let capabilities = device.capabilities();
            let kind = format!("{} ({})", capabilities.kind, capabilities.detail);
            InterfaceReport { kind, device: counters, stack }
        };
        self.devices.iter_mut().zip(stacks).map(report).collect()
    }

    /// All drops at devices, at interfaces and between them, by reason.
    pub fn drops(&mut self) -> DropCounters {
        let mut drops = self.input_drops.clone();
        for report in self.reports() {
            drops.merge(&report.device.drops);
            drops.merge(&report.stack.drops);
            drops.merge(&report.stack.transmit_drops);
        }
        drops
    }
}

impl Drop for Forwarder {
    fn drop(&mut self) {
        // The frames are freed with the arena. Packets that wait for verdicts are returned only so
        // that no drop goes uncounted.
        if let Some(filter) = &mut self.filter {
            let (router, arena) = (&mut self.router, &mut self.arena);
            filter.release(&mut |transit, reason| router.discard(transit, reason, arena));
        }
    }
}

#[cfg(test)]
mod tests;
