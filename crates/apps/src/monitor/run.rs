//! The monitor's loop: ring, gate, table and exporter on one thread.

use std::error::Error;
use std::io;
use std::net::UdpSocket;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use tidegate_device::packet::{PacketError, PassiveConfig, PassiveCounters, PassiveRing};
use tidegate_engine::{Clock, IdleDetector};
use tidegate_gate::{Gate, GateAction, GateCounters, Mode, Ring, RingCounts, Settings};
use tidegate_wire::DropCounters;

use super::flow::{FlowKey, Observation, Traffic};
use super::ipfix::{ExportCounters, Exporter, ExporterConfig, MeteringCounters};
use super::table::{BATCH, FlowRecord, FlowTable, Order, Span, TableConfig, TableCounters};

/// Interval of the monitor's own work: timeouts of flows, export.
const TIMER_INTERVAL_NS: u64 = 100_000_000;

/// Maximum time for the frames in the ring after reception has ended.
const MAX_DRAIN_NS: u64 = 1_000_000_000;
/// Frames between two looks at the clock meanwhile.
const DRAIN_FRAMES: u32 = 4096;

/// Settings of a [`Monitor`].
pub struct MonitorConfig {
    /// The interface and its ring.
    pub ring: PassiveConfig,
    /// Settings of the gate, in a mode without an input queue.
    pub gate: Settings,
    /// Settings of the flow table.
    pub table: TableConfig,
    /// Socket that is connected to the collector, and the observation domain.
    pub export: Option<(UdpSocket, u32)>,
    /// Interval of the reports in nanoseconds.
    pub report_interval_ns: u64,
    /// Maximum number of flows in a report.
    pub top: usize,
    /// Order of the flows in a report.
    pub order: Order,
}

/// Report of a monitor. Counters are those since its start.
pub struct Report {
    /// True for the report at the end, whose flows are listed by all of their traffic.
    pub is_final: bool,
    /// Time since the last report in nanoseconds; in the final report since the start.
    pub span_ns: u64,
    /// Traffic of that time.
    pub traffic: Traffic,
    /// Largest flows of that time.
    pub top: Vec<(FlowKey, Traffic)>,
    /// Counters of the flow table.
    pub table: TableCounters,
    /// Maximum number of flows in the table.
    pub max_flows: usize,
    /// Frames with malformed headers, which are in no flow, by reason.
    pub malformed: DropCounters,
    /// Counters of the ring, the lost frames among them.
    pub ring: PassiveCounters,
    /// Counters of the export, if there is one.
    pub export: Option<ExportCounters>,
    /// Counters of the gate.
    pub gate: GateCounters,
}

/// Receiver of reports. An error ends the monitor.
pub type ReportHook<'a> = &'a mut dyn FnMut(&Report) -> Result<(), Box<dyn Error + Send + Sync>>;

/// Passive monitor of an interface.
pub struct Monitor {
    clock: Clock,
    ring: PassiveRing,
    gate: Gate,
    idle_detector: Option<IdleDetector>,
    table: FlowTable,
    malformed: DropCounters,
    /// Frames that are read and not counted yet; empty between two turns.
    observations: Vec<Observation>,
    export: Option<Export>,
    ring_counters: PassiveCounters,
    report_interval_ns: u64,
    top: usize,
    order: Order,
    started_ns: u64,
    next_timer_ns: u64,
    last_report_ns: u64,
    last_reported: Traffic,
}

/// Exporter with its socket.
struct Export {
    exporter: Exporter,
    socket: UdpSocket,
}

impl Monitor {
    /// Opens the ring. Frames are kept from then on.
    ///
    /// # Errors
    /// See [`PacketError`].
    pub fn open(config: MonitorConfig) -> Result<Self, PacketError> {
        let clock = Clock::new();
        let now_ns = clock.now_ns();
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let unix_epoch_ns = (since_epoch.as_nanos() as u64).saturating_sub(now_ns);
        let export = config.export.map(|(socket, domain)| {
            let exporter = Exporter::new(ExporterConfig { domain, unix_epoch_ns });
            Export { exporter, socket }
        });
        let rings = RingCounts { receive: 1, transmit: 0, application: 1 };
        Ok(Self {
            clock,
            ring: PassiveRing::open(&config.ring)?,
            gate: Gate::new(config.gate, rings, now_ns),
            idle_detector: None,
            table: FlowTable::new(&config.table, now_ns),
            malformed: DropCounters::new(),
            observations: Vec::with_capacity(BATCH),
            export,
            ring_counters: PassiveCounters::default(),
            report_interval_ns: config.report_interval_ns,
            top: config.top,
            order: config.order,
            started_ns: now_ns,
            next_timer_ns: now_ns,
            last_report_ns: now_ns,
            last_reported: Traffic::default(),
        })
    }

    /// Counts until `stop` is set, then drains the ring and makes the final report.
    ///
    /// # Errors
    /// The interface is gone, or `report` fails. After the first error there is a final report too.
    pub fn run(
        &mut self,
        stop: &AtomicBool,
        report: ReportHook<'_>,
    ) -> Result<(), Box<dyn Error + Send + Sync>> {
        let result = self.run_loop(stop, report);
        self.drain();
        self.finish_export();
        let last = self.report(true);
        let reported = report(&last);
        result.and(reported)
    }

    fn run_loop(
        &mut self,
        stop: &AtomicBool,
        report: ReportHook<'_>,
    ) -> Result<(), Box<dyn Error + Send + Sync>> {
        let config = self.gate.settings().config();
        let is_dedicated = config.mode == Mode::Dedicated;
        if config.cpu_share_percent < 100 {
            // Without the detector the share holds on an idle processor too.
            self.idle_detector = IdleDetector::start().ok();
        }
        while !stop.load(Ordering::Relaxed) {
            let now_ns = self.clock.now_ns();
            if now_ns >= self.next_timer_ns.min(self.next_report_ns()) {
                self.gate.on_ready(Ring::Application(0));
            }
            match self.gate.next(now_ns) {
                GateAction::Serve(turn) => {
                    let served = match turn.ring {
                        Ring::Application(_) => {
                            let served = self.serve_timers(now_ns, turn.quota);
                            if now_ns >= self.next_report_ns() {
                                report(&self.report(false))?;
                            }
                            served
                        }
                        _ => self.receive(now_ns, turn.quota),
                    };
                    let end_ns = match self.gate.needs_turn_end_time() {
                        true => self.clock.now_ns(),
                        false => now_ns,
                    };
                    self.gate.on_served(turn, served, end_ns);
                }
                GateAction::Yield => thread::yield_now(),
                GateAction::Wait { paused_until_ns } if paused_until_ns.is_some() => {
                    self.sleep(now_ns, paused_until_ns)?;
                }
                GateAction::Wait { .. } => {
                    if self.ring.prepare_sleep()? && !is_dedicated {
                        self.sleep(now_ns, None)?;
                    }
                    self.gate.on_ready(Ring::Receive(0));
                }
            }
        }
        Ok(())
    }

    fn next_report_ns(&self) -> u64 {
        self.last_report_ns.saturating_add(self.report_interval_ns)
    }

    fn receive(&mut self, now_ns: u64, quota: u32) -> u32 {
        let Self { ring, table, malformed, observations, export, .. } = self;
        let mut record = |record: &FlowRecord| Export::push(export, now_ns, record);
        let taken = ring.receive(quota, |frame| match Observation::parse(frame) {
            Ok(observation) => {
                observations.push(observation);
                if observations.len() == BATCH {
                    table.observe(now_ns, observations, &mut record);
                    observations.clear();
                }
            }
            Err(reason) => malformed.count(reason),
        });
        table.observe(now_ns, observations, &mut record);
        observations.clear();
        taken
    }

    /// Applies the timeouts of flows. When all that is due is done, also exports, and reads the
    /// counters of the ring, which would overflow otherwise. Returns the work done.
    fn serve_timers(&mut self, now_ns: u64, quota: u32) -> u32 {
        let Self { table, export, .. } = self;
        let examined =
            table.expire(now_ns, quota, &mut |record| Export::push(export, now_ns, record));
        if examined < quota {
            self.next_timer_ns = now_ns + TIMER_INTERVAL_NS;
            self.ring_counters = self.ring.counters();
            let metering = self.metering();
            if let Some(Export { exporter, socket }) = &mut self.export {
                exporter.poll(now_ns, &metering, &mut |message| socket.send(message).is_ok());
            }
        }
        examined
    }

    /// Sleeps until a frame arrives, or the monitor's own work is due. While receiving is paused,
    /// frames do not wake.
    fn sleep(&mut self, now_ns: u64, paused_until_ns: Option<u64>) -> io::Result<()> {
        let until_ns = self.next_timer_ns.min(self.next_report_ns());
        let until_ns = until_ns.min(paused_until_ns.unwrap_or(u64::MAX));
        let detector = self.idle_detector.as_ref().filter(|_| paused_until_ns.is_some());
        let waits_for = match (detector, paused_until_ns) {
            (Some(detector), _) => {
                detector.request();
                Some(detector.idle_fd())
            }
            (None, Some(_)) => None,
            (None, None) => Some(self.ring.as_fd()),
        };
        let mut fds: Vec<_> =
            waits_for.into_iter().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        wait_readable(&mut fds, until_ns.saturating_sub(now_ns))?;
        if detector.is_some_and(IdleDetector::finish) {
            self.gate.on_idle_processor(self.clock.now_ns());
        }
        Ok(())
    }

    /// Ends reception and counts what has arrived. An interface that is gone ends both.
    fn drain(&mut self) {
        let _ = self.ring.stop();
        let began_ns = self.clock.now_ns();
        loop {
            let now_ns = self.clock.now_ns();
            let taken = self.receive(now_ns, DRAIN_FRAMES);
            let is_drained = taken == 0 && self.ring.is_drained();
            if is_drained || now_ns - began_ns > MAX_DRAIN_NS {
                break;
            }
            if taken == 0 {
                // The kernel hands over the last block when it is a millisecond old.
                thread::yield_now();
            }
        }
        self.ring_counters = self.ring.counters();
    }

    fn finish_export(&mut self) {
        let (now_ns, metering) = (self.clock.now_ns(), self.metering());
        let Self { table, export: Some(Export { exporter, socket }), .. } = self else { return };
        let mut send = |message: &[u8]| socket.send(message).is_ok();
        // A collector that has missed the templates can read the last records.
        exporter.announce(now_ns, &metering, &mut send);
        table.record_all(now_ns, &mut |record| exporter.push(now_ns, record, &mut send));
        exporter.finish(now_ns, &metering, &mut send);
    }

    fn metering(&self) -> MeteringCounters {
        let untracked = self.table.counters().untracked;
        MeteringCounters {
            ignored_packets: untracked.packets + self.ring_counters.lost() + self.malformed.total(),
            ignored_bytes: untracked.bytes,
        }
    }

    fn report(&mut self, is_final: bool) -> Report {
        self.ring_counters = self.ring.counters();
        let now_ns = self.clock.now_ns();
        let observed = self.table.counters().observed;
        let (since_ns, before, span) = match is_final {
            true => (self.started_ns, Traffic::default(), Span::Whole),
            false => (self.last_report_ns, self.last_reported, Span::SinceLast),
        };
        (self.last_report_ns, self.last_reported) = (now_ns, observed);
        Report {
            is_final,
            span_ns: now_ns - since_ns,
            traffic: observed.since(before),
            top: self.table.top(self.top, self.order, span),
            table: *self.table.counters(),
            max_flows: self.table.max_flows(),
            malformed: self.malformed.clone(),
            ring: self.ring_counters,
            export: self.export.as_ref().map(|export| *export.exporter.counters()),
            gate: *self.gate.counters(),
        }
    }
}

impl Export {
    /// Exports a record, if there is an export.
    fn push(export: &mut Option<Self>, now_ns: u64, record: &FlowRecord) {
        if let Some(Self { exporter, socket }) = export {
            exporter.push(now_ns, record, &mut |message| socket.send(message).is_ok());
        }
    }
}

fn wait_readable(fds: &mut [PollFd<'_>], timeout_ns: u64) -> io::Result<()> {
    let timeout = Timespec {
        tv_sec: (timeout_ns / 1_000_000_000) as i64,
        tv_nsec: (timeout_ns % 1_000_000_000) as i64,
    };
    match poll(fds, Some(&timeout)) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}
