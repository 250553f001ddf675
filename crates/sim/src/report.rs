//! What came of a run.

use hdrhistogram::Histogram;

use crate::processor::Level;

/// Where a packet was dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// The gate's admission refused it, before any work was spent on it.
    Admission,
    /// The card had no descriptor for it: it cost nothing.
    Card,
    /// The queue between the interrupt handler and the protocols.
    InputQueue,
    /// The stack, for a reason of its own.
    Stack,
    /// The socket's queue.
    SocketQueue,
    /// The queue to the screen.
    ScreenQueue,
    /// The queue to the card that sends.
    OutputQueue,
}

impl Place {
    /// Every place, in the order of a packet's way.
    pub const ALL: [Self; 7] = [
        Self::Admission,
        Self::Card,
        Self::InputQueue,
        Self::Stack,
        Self::SocketQueue,
        Self::ScreenQueue,
        Self::OutputQueue,
    ];

    /// Its name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Admission => "admission",
            Self::Card => "card",
            Self::InputQueue => "input_queue",
            Self::Stack => "stack",
            Self::SocketQueue => "socket_queue",
            Self::ScreenQueue => "screen_queue",
            Self::OutputQueue => "output_queue",
        }
    }
}

/// A program beside the network.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BesideReport {
    /// The processor time that it had, on all cores together.
    pub spent_ns: u64,
    /// The packets that it sent.
    pub sent: u64,
}

/// What came of a time: of all cores together.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// How long it was.
    pub duration_ns: u64,
    /// The cores of the machine.
    pub cores: u32,
    /// Packets that came to the card.
    pub offered: u64,
    /// Packets that were served: worked on by the service, or out on the link
    /// of the router.
    pub delivered: u64,
    /// The same by reader, of a UDP service.
    pub delivered_by_reader: Vec<u64>,
    /// Packets that the service answered.
    pub answered: u64,
    /// Packets dropped, by place.
    pub drops: [u64; Place::ALL.len()],
    /// Packets somewhere on their way, at the end.
    pub in_flight: u64,
    /// Processor time by level of priority, changes of context included.
    pub level_ns: [u64; 4],
    /// Processor time in which nothing could run.
    pub idle_ns: u64,
    /// Interrupts handled.
    pub interrupts: u64,
    /// Changes of context.
    pub switches: u64,
    /// The programs beside, in the order of the setup.
    pub beside: Vec<BesideReport>,
    /// The time from the card to the end of the service.
    pub latency_ns: Histogram<u64>,
}

impl Report {
    pub(crate) fn new(cores: u32, readers: usize, beside: usize) -> Self {
        Self {
            duration_ns: 0,
            cores,
            offered: 0,
            delivered: 0,
            delivered_by_reader: vec![0; readers],
            answered: 0,
            drops: [0; Place::ALL.len()],
            in_flight: 0,
            level_ns: [0; 4],
            idle_ns: 0,
            interrupts: 0,
            switches: 0,
            beside: vec![BesideReport::default(); beside],
            latency_ns: latency_histogram(),
        }
    }

    /// The packets dropped at a place.
    pub fn dropped(&self, place: Place) -> u64 {
        self.drops[place as usize]
    }

    /// Packets served per second.
    pub fn delivered_pps(&self) -> f64 {
        self.per_second(self.delivered)
    }

    /// Packets offered per second.
    pub fn offered_pps(&self) -> f64 {
        self.per_second(self.offered)
    }

    /// A count as a rate.
    pub fn per_second(&self, count: u64) -> f64 {
        count as f64 * 1e9 / self.duration_ns.max(1) as f64
    }

    /// The share of the processors' time that was spent at a level, in percent.
    pub fn level_percent(&self, level: Level) -> f64 {
        self.percent(self.level_ns[level as usize])
    }

    /// The share of the processors' time in which nothing could run, in percent.
    pub fn idle_percent(&self) -> f64 {
        self.percent(self.idle_ns)
    }

    /// A time as a share of that of all processors, in percent.
    pub fn percent(&self, ns: u64) -> f64 {
        ns as f64 * 100.0 / (self.duration_ns.max(1) as f64 * f64::from(self.cores))
    }

    /// Packets that are neither served, dropped nor on their way. Zero for a
    /// run from its beginning, always.
    pub fn unaccounted(&self) -> i64 {
        let known = self.delivered + self.in_flight + self.drops.iter().sum::<u64>();
        self.offered.wrapping_sub(known) as i64
    }

    /// What came after `earlier`. `in_flight` is that of the end; the latency
    /// is that of this report, which [`crate::Machine::run`] begins anew.
    pub(crate) fn since(mut self, earlier: &Self) -> Self {
        self.duration_ns -= earlier.duration_ns;
        self.offered -= earlier.offered;
        self.delivered -= earlier.delivered;
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
        self.switches -= earlier.switches;
        for (beside, before) in self.beside.iter_mut().zip(&earlier.beside) {
            beside.spent_ns -= before.spent_ns;
            beside.sent -= before.sent;
        }
        self
    }
}

/// Two digits are enough to compare latencies, and keep 64 cores small.
pub(crate) fn latency_histogram() -> Histogram<u64> {
    let histogram = Histogram::new_with_bounds(1, 100_000_000_000, 2);
    histogram.expect("the bounds are constants that a histogram takes")
}
