//! Results of a run.

use hdrhistogram::Histogram;

use crate::processor::PriorityLevel;

/// Point at which a packet was dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DropPoint {
    /// Refused by admission control, before any work was spent on the packet.
    Admission,
    /// No receive descriptor of the NIC was free; the drop cost the host nothing.
    NicRing,
    /// Input queue between the interrupt handler and the protocol work.
    InputQueue,
    /// Dropped by the stack, for any other reason.
    Stack,
    /// Socket queue.
    SocketQueue,
    /// Queue to the filter process.
    FilterQueue,
    /// Output queue to the transmitting NIC.
    OutputQueue,
}

impl DropPoint {
    /// All drop points, in the order in which a packet passes them.
    pub const ALL: [Self; 7] = [
        Self::Admission,
        Self::NicRing,
        Self::InputQueue,
        Self::Stack,
        Self::SocketQueue,
        Self::FilterQueue,
        Self::OutputQueue,
    ];

    /// Returns the name used in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Admission => "admission",
            Self::NicRing => "card",
            Self::InputQueue => "input_queue",
            Self::Stack => "stack",
            Self::SocketQueue => "socket_queue",
            Self::FilterQueue => "screen_queue",
            Self::OutputQueue => "output_queue",
        }
    }
}

/// Results of a background task.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BackgroundReport {
    /// CPU time, summed over all cores.
    pub spent_ns: u64,
    /// Packets sent.
    pub sent: u64,
}

/// Results of a time span, summed over all cores.
#[derive(Clone, Debug, PartialEq)]
pub struct SimReport {
    /// Duration of the time span.
    pub duration_ns: u64,
    /// Number of cores of the machine.
    pub cores: u32,
    /// Packets that arrived at the NIC.
    pub offered: u64,
    /// Packets that were served: processed by the service, or sent on the link of the router.
    pub delivered: u64,
    /// Packets of the further source ([`crate::Setup::peer_load`]) that arrived.
    pub peer_offered: u64,
    /// Packets of the further source that a UDP service processed.
    pub peer_delivered: u64,
    /// Packets served by each reader of a UDP service.
    pub delivered_by_reader: Vec<u64>,
    /// Packets that the service replied to.
    pub answered: u64,
    /// Packets dropped, by drop point.
    pub drops: [u64; DropPoint::ALL.len()],
    /// Packets queued or in processing at the end.
    pub in_flight: u64,
    /// CPU time by priority level, context switches included.
    pub level_ns: [u64; 4],
    /// CPU time in which no task was runnable.
    pub idle_ns: u64,
    /// Interrupts handled.
    pub interrupts: u64,
    /// Context switches.
    pub context_switches: u64,
    /// Background tasks, in the order of the setup.
    pub background: Vec<BackgroundReport>,
    /// Latency from the NIC to the end of the service.
    pub latency_ns: Histogram<u64>,
}

impl SimReport {
    pub(crate) fn new(cores: u32, readers: usize, background: usize) -> Self {
        Self {
            duration_ns: 0,
            cores,
            offered: 0,
            delivered: 0,
            peer_offered: 0,
            peer_delivered: 0,
            delivered_by_reader: vec![0; readers],
            answered: 0,
            drops: [0; DropPoint::ALL.len()],
            in_flight: 0,
            level_ns: [0; 4],
            idle_ns: 0,
            interrupts: 0,
            context_switches: 0,
            background: vec![BackgroundReport::default(); background],
            latency_ns: latency_histogram(),
        }
    }

    /// Packets dropped at a drop point.
    pub fn dropped(&self, point: DropPoint) -> u64 {
        self.drops[point as usize]
    }

    /// Packets served per second.
    pub fn delivered_pps(&self) -> f64 {
        self.per_second(self.delivered)
    }

    /// Packets offered per second.
    pub fn offered_pps(&self) -> f64 {
        self.per_second(self.offered)
    }

    /// Converts a count to a rate per second.
    pub fn per_second(&self, count: u64) -> f64 {
        count as f64 * 1e9 / self.duration_ns.max(1) as f64
    }

    /// Share of CPU time spent at a level, in percent.
    pub fn level_percent(&self, level: PriorityLevel) -> f64 {
        self.percent(self.level_ns[level as usize])
    }

    /// Share of CPU time in which no task was runnable, in percent.
    pub fn idle_percent(&self) -> f64 {
        self.percent(self.idle_ns)
    }

    /// Converts a time to a share of the CPU time of all cores, in percent.
    pub fn percent(&self, ns: u64) -> f64 {
        ns as f64 * 100.0 / (self.duration_ns.max(1) as f64 * f64::from(self.cores))
    }

    /// Packets that are neither served, dropped nor in flight. Always zero for a run from time 0.
    pub fn unaccounted(&self) -> i64 {
        let known = self.delivered + self.in_flight + self.drops.iter().sum::<u64>();
        self.offered.wrapping_sub(known) as i64
    }

    /// Subtracts the counts of `earlier`. `in_flight` stays that of the end. The latency stays that
    /// of this report, which [`crate::Machine::run`] resets.
    pub(crate) fn since(mut self, earlier: &Self) -> Self {
        self.duration_ns -= earlier.duration_ns;
        self.offered -= earlier.offered;
        self.delivered -= earlier.delivered;
        self.peer_offered -= earlier.peer_offered;
        self.peer_delivered -= earlier.peer_delivered;
        for (delivered, before) in
            self.delivered_by_reader.iter_mut().zip(&earlier.delivered_by_reader)
        {
            *delivered -= before;
        }
        self.answered -= earlier.answered;
        for (drops, before) in self.drops.iter_mut().zip(earlier.drops) {
            *drops -= before;
        }
        for (spent, before) in self.level_ns.iter_mut().zip(earlier.level_ns) {
            *spent -= before;
        }
        self.idle_ns -= earlier.idle_ns;
        self.interrupts -= earlier.interrupts;
        self.context_switches -= earlier.context_switches;
        for (background, before) in self.background.iter_mut().zip(&earlier.background) {
            background.spent_ns -= before.spent_ns;
            background.sent -= before.sent;
        }
        self
    }
}

/// Creates a latency histogram. Two digits suffice to compare latencies and keep 64 cores small.
pub(crate) fn latency_histogram() -> Histogram<u64> {
    let histogram = Histogram::new_with_bounds(1, 100_000_000_000, 2);
    histogram.expect("the constant bounds are valid")
}
