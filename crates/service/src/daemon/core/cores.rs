//! State shared by the network cores of a daemon.

use std::collections::HashMap;
use std::io;
use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use tidegate_device::sharded::FlowSteering;
use tidegate_memory::Doorbell;

use super::inbox::InboxSender;
use super::load::CoreLoad;
use super::message::CoreMessage;
use crate::daemon::application::Application;
use crate::daemon::report::DaemonReport;
use crate::daemon::workers::{UserWorkers, WakeCores};
use crate::ipc::layout::SharedMemory;

/// Attempts to get reports of all cores in which every application occurs exactly once.
const MAX_REPORT_ATTEMPTS: usize = 1000;

/// Time limit for the measurement of the applications' memory, for a report.
const MEASUREMENT_TIMEOUT: Duration = Duration::from_millis(100);

/// Times a search goes around all cores: its target may be migrating from one core to the next.
const SEARCH_LAPS: usize = 64;

/// Network cores of a daemon. Core 0 is the primary core, which has the device.
pub(in crate::daemon) struct Cores {
    inboxes: Vec<InboxSender>,
    loads: Vec<CoreLoad>,
    /// Number of cores that get new applications: the first ones.
    used: AtomicUsize,
    /// All applications and sockets are moving to the primary core.
    is_gathering: AtomicBool,
    /// Flow steering between the cores; `None` with a single core.
    flow_steering: Option<Arc<FlowSteering>>,
    /// Rung when an application was detached; the attach listener waits on it.
    detach_bell: Doorbell,
    workers: UserWorkers,
    /// Wakes all cores that sleep.
    wake: WakeCores,
}

impl Cores {
    pub(in crate::daemon) fn new(
        inboxes: Vec<InboxSender>,
        limits: &RangeInclusive<usize>,
        flow_steering: Option<Arc<FlowSteering>>,
        workers: UserWorkers,
    ) -> io::Result<Self> {
        let bells: Vec<_> = inboxes.iter().map(|inbox| Arc::clone(&inbox.bell)).collect();
        let cores = Self {
            loads: inboxes.iter().map(|_| CoreLoad::default()).collect(),
            inboxes,
            used: AtomicUsize::new(0),
            is_gathering: AtomicBool::new(false),
            flow_steering,
            detach_bell: Doorbell::new()?,
            workers,
            wake: Arc::new(move || bells.iter().for_each(|bell| bell.ring())),
        };
        cores.set_used(*limits.start());
        Ok(cores)
    }

    /// Doorbell that is rung when an application was detached.
    pub(in crate::daemon) fn detach_bell(&self) -> &Doorbell {
        &self.detach_bell
    }

    /// Workers for what an application can delay.
    pub(in crate::daemon) fn workers(&self) -> &UserWorkers {
        &self.workers
    }

    /// Wakes all cores that sleep.
    pub(in crate::daemon) fn wake(&self) -> &WakeCores {
        &self.wake
    }

    /// Number of cores.
    pub(in crate::daemon) fn count(&self) -> usize {
        self.inboxes.len()
    }

    /// Maximum number of hops of a search from core to core.
    pub(in crate::daemon) fn max_hops(&self) -> usize {
        SEARCH_LAPS * self.count()
    }

    /// Sender to a core's inbox.
    pub(in crate::daemon) fn inbox(&self, core: usize) -> &InboxSender {
        &self.inboxes[core]
    }

    /// Load of a core.
    pub(in crate::daemon) fn load(&self, core: usize) -> &CoreLoad {
        &self.loads[core]
    }

    /// Starts or stops gathering: while it lasts, every migration goes to the primary core.
    pub(in crate::daemon) fn set_gathering(&self, gathers: bool) {
        self.is_gathering.store(gathers, Ordering::SeqCst);
    }

    /// Core to which a migration towards `core` goes: the primary core while gathering.
    pub(in crate::daemon) fn migration_target(&self, core: usize) -> usize {
        if self.is_gathering() { 0 } else { core }
    }

    /// True while everything moves to the primary core.
    pub(in crate::daemon) fn is_gathering(&self) -> bool {
        self.is_gathering.load(Ordering::SeqCst)
    }

    pub(in crate::daemon) fn flow_steering(&self) -> Option<&FlowSteering> {
        self.flow_steering.as_deref()
    }

    /// Sets the number of cores that get new applications.
    pub(in crate::daemon) fn set_used(&self, used: usize) {
        self.used.store(used.min(self.count()), Ordering::Relaxed);
    }

    /// Number of cores that get new applications.
    pub(in crate::daemon) fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    /// Core for a new application: the core with the fewest applications, then the least busy.
    pub(in crate::daemon) fn least_loaded(&self) -> usize {
        let occupancy = |&core: &usize| {
            let report = self.loads[core].last_report();
            (report.applications, report.busy_permille)
        };
        (0..self.used()).min_by_key(occupancy).unwrap_or(0)
    }

    /// Sends an application to a core.
    ///
    /// # Errors
    /// When the core has ended.
    pub(in crate::daemon) fn admit(&self, core: usize, app: Application) -> io::Result<()> {
        self.loads[core].add_applications(1);
        self.inboxes[core].send(CoreMessage::Attach(Box::new(app), 0))
    }

    /// Moves the count of one application from one core to another.
    pub(in crate::daemon) fn recount_application(&self, from: usize, to: usize) {
        self.loads[to].add_applications(1);
        self.loads[from].remove_applications(1);
    }

    fn application_count(&self) -> usize {
        self.loads.iter().map(|load| load.last_report().applications as usize).sum()
    }

    /// Report of all cores together.
    ///
    /// # Errors
    /// When a core has ended.
    pub(in crate::daemon) fn report(&self) -> io::Result<DaemonReport> {
        let mut attempts_left = MAX_REPORT_ATTEMPTS;
        loop {
            let answers =
                self.inboxes.iter().map(InboxSender::report).collect::<io::Result<Vec<_>>>()?;
            let mut memories = Vec::new();
            let reports = answers.into_iter().map(|answer| {
                memories.extend(answer.memories);
                answer.report
            });
            let mut report = DaemonReport::merge(reports.collect(), self.used());
            attempts_left -= 1;
            // An application that is migrating may be missing, or reported twice.
            if report.applications.len() == self.application_count() || attempts_left == 0 {
                self.measure_memory(&mut report, memories);
                return Ok(report);
            }
            std::thread::yield_now();
        }
    }

    /// Measures the memory of the applications in a report. The memory of an application that
    /// holds up the measurement is reported as it was measured last.
    fn measure_memory(&self, report: &mut DaemonReport, memories: Vec<SharedMemory>) {
        let mut by_user: HashMap<u32, Vec<_>> = HashMap::new();
        for (index, (app, memory)) in report.applications.iter().zip(memories).enumerate() {
            by_user.entry(app.identity.uid).or_default().push((index, memory));
        }
        let (sender, measured) = mpsc::channel();
        for (uid, memories) in by_user {
            let sender = sender.clone();
            self.workers.run(uid, move || {
                for (index, memory) in memories {
                    // The report may be sent already.
                    let _ = sender.send((index, memory.allocated_bytes().unwrap_or(0)));
                }
            });
        }
        drop(sender);
        let until = Instant::now() + MEASUREMENT_TIMEOUT;
        while let Ok((index, bytes)) =
            measured.recv_timeout(until.saturating_duration_since(Instant::now()))
        {
            report.applications[index].memory_bytes = bytes;
        }
    }
}
