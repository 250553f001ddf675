//! What is simulated.

use tidegate_gate::{Mode, Settings, admission};

use crate::error::SetupError;
use crate::limits::{CORES_MAX, COST_MAX_NS, QUEUE_MAX, READERS_MAX};
use crate::load::{Family, Link, Load};

/// What each step takes of a processor, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Costs {
    /// Entering and leaving the handler of a device interrupt.
    pub interrupt_ns: u64,
    /// A packet in the handler: descriptor, buffer, link header, input queue.
    pub receive_ns: u64,
    /// Starting a software interrupt.
    pub software_ns: u64,
    /// A packet through IP and its transport, or through IP forwarding.
    pub protocol_ns: u64,
    /// One turn of a ring when polling: the call, and the look at the ring.
    pub poll_ns: u64,
    /// A packet at the device when polling: as `receive_ns`, without the input
    /// queue.
    pub poll_receive_ns: u64,
    /// Changing to another kernel thread or program.
    pub switch_ns: u64,
    /// A program's call for the next packet.
    pub read_ns: u64,
    /// A program's own work on a packet.
    pub work_ns: u64,
    /// Handing a packet to the card, or to the queue before it.
    pub transmit_ns: u64,
    /// Taking back the descriptor of a packet that was sent.
    pub transmit_done_ns: u64,
}

impl Default for Costs {
    /// A server's core of today, in round numbers.
    fn default() -> Self {
        Self {
            interrupt_ns: 1500,
            receive_ns: 200,
            software_ns: 300,
            protocol_ns: 400,
            poll_ns: 100,
            poll_receive_ns: 150,
            switch_ns: 1500,
            read_ns: 300,
            work_ns: 500,
            transmit_ns: 200,
            transmit_done_ns: 50,
        }
    }
}

impl Costs {
    /// The packets per second that one processor serves when every packet is
    /// taken by an interrupt that is already running, and nothing is wasted.
    pub fn capacity_pps(&self) -> u64 {
        let packet_ns = self.receive_ns + self.protocol_ns + self.read_ns + self.work_ns;
        1_000_000_000 / packet_ns.max(1)
    }
}

/// Where the program that serves packets runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// As a program of its own on the same processor, below the network.
    Program,
    /// In the polling loop itself, as the application's ring of the gate.
    Inline,
}

/// The program that accepts or refuses each packet of a router: Mogul's
/// `screend`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Screen {
    /// The packets that wait for it at most.
    pub queue: u32,
}

/// What the host does with packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// A UDP service on the real stack.
    Udp {
        /// The family of the load.
        family: Family,
        /// Datagrams that wait in the socket at most.
        socket_queue: u32,
        /// Whether each datagram is answered.
        answers: bool,
        /// Where the service runs.
        placement: Placement,
    },
    /// The real stack with no socket bound: every packet is refused.
    Closed {
        /// The family of the load.
        family: Family,
    },
    /// IP forwarding to a second link.
    Router {
        /// The packets that wait for the card at most.
        output_queue: u32,
        /// The screen, if there is one.
        screen: Option<Screen>,
    },
}

/// A program beside the network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Beside {
    /// It computes without end.
    Compute,
    /// It sends a packet by another card at every period; what is late is made
    /// up for.
    Send {
        /// The period.
        period_ns: u64,
        /// What a packet takes of the processor.
        cost_ns: u64,
    },
}

/// The clock interrupt and other work of the system that is always there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tick {
    /// The period.
    pub period_ns: u64,
    /// What it takes of the processor at every period.
    pub cost_ns: u64,
}

/// A machine and its load.
#[derive(Clone, Debug)]
pub struct Setup {
    /// How packets are looked for.
    pub gate: Settings,
    /// What each step costs.
    pub costs: Costs,
    /// Processors, each with a queue of the card and a gate of its own.
    pub cores: u32,
    /// The link that the load comes in by, and, for each core, a link of the
    /// same rate that packets leave by.
    pub link: Link,
    /// Receive descriptors of each queue of the card.
    pub receive_ring: u32,
    /// Transmit descriptors of each queue of the card.
    pub transmit_ring: u32,
    /// The least time between two interrupts that the card keeps by itself,
    /// whatever the gate says; 0 is none.
    pub interrupt_gap_ns: u64,
    /// Modes with an input queue: the protocols run in a thread of the kernel
    /// instead of a software interrupt, as in Digital UNIX.
    pub protocol_thread: bool,
    /// What the host does.
    pub role: Role,
    /// The programs of a UDP service, each with a socket of its own; flows are
    /// dealt out to them in turn.
    pub readers: u32,
    /// What the card refuses when not everything can be taken; `None`: nothing.
    pub admission: Option<admission::Config>,
    /// Programs beside it, on every core.
    pub beside: Vec<Beside>,
    /// Work of the system that is always there.
    pub tick: Option<Tick>,
    /// How long a program runs before the next has its turn.
    pub quantum_ns: u64,
    /// What comes in.
    pub load: Load,
    /// What all chance comes from.
    pub seed: u64,
}

impl Default for Setup {
    /// One core that serves UDP over IPv4, polled, on a link of 400 Gb/s.
    fn default() -> Self {
        Self {
            gate: Settings::default(),
            costs: Costs::default(),
            cores: 1,
            link: Link { bits_per_second: 400_000_000_000 },
            receive_ring: 512,
            transmit_ring: 512,
            interrupt_gap_ns: 0,
            protocol_thread: false,
            role: Role::Udp {
                family: Family::V4,
                socket_queue: 256,
                answers: false,
                placement: Placement::Program,
            },
            readers: 1,
            admission: None,
            beside: Vec::new(),
            tick: None,
            quantum_ns: 4_000_000,
            load: Load::default(),
            seed: 1,
        }
    }
}

impl Setup {
    /// Checks that the machine can be built and that time passes in it.
    pub(crate) fn check(&self) -> Result<(), SetupError> {
        if !(1..=CORES_MAX).contains(&self.cores) {
            return Err(SetupError::Cores(self.cores));
        }
        let many = matches!(self.role, Role::Udp { placement: Placement::Program, .. });
        if !(1..=if many { READERS_MAX } else { 1 }).contains(&self.readers) {
            return Err(SetupError::Readers(self.readers));
        }
        self.check_sizes()?;
        self.check_costs()?;
        let placed = matches!(self.role, Role::Udp { placement: Placement::Inline, .. });
        let mode = self.gate.config().mode;
        if placed && mode.has_input_queue() {
            return Err(SetupError::InlineNeedsPolling(mode));
        }
        let program = matches!(
            self.role,
            Role::Udp { placement: Placement::Program, .. } | Role::Router { screen: Some(_), .. }
        );
        if mode == Mode::Dedicated && (program || !self.beside.is_empty()) {
            return Err(SetupError::DedicatedHasNoPrograms);
        }
        self.load.check(self.link)
    }

    fn check_sizes(&self) -> Result<(), SetupError> {
        let (queue, screen) = match self.role {
            Role::Udp { socket_queue, .. } => (("socket-queue", socket_queue), None),
            Role::Closed { .. } => (("socket-queue", 1), None),
            Role::Router { output_queue, screen } => (
                ("output-queue", output_queue),
                screen.map(|screen| ("screen-queue", screen.queue)),
            ),
        };
        let rings =
            [("receive-ring", self.receive_ring), ("transmit-ring", self.transmit_ring), queue];
        let wrong = |entries: u32| !(1..=QUEUE_MAX).contains(&entries);
        match rings.into_iter().chain(screen).find(|&(_, entries)| wrong(entries)) {
            Some((name, entries)) => Err(SetupError::Entries { name, entries }),
            None => Ok(()),
        }
    }

    fn check_costs(&self) -> Result<(), SetupError> {
        let costs = &self.costs;
        let needed = [
            ("interrupt-ns", costs.interrupt_ns),
            ("receive-ns", costs.receive_ns),
            ("protocol-ns", costs.protocol_ns),
            ("poll-ns", costs.poll_ns),
            ("poll-receive-ns", costs.poll_receive_ns),
            ("work-ns", costs.work_ns),
            ("quantum-ns", self.quantum_ns),
        ];
        let free = [
            ("software-ns", costs.software_ns),
            ("switch-ns", costs.switch_ns),
            ("read-ns", costs.read_ns),
            ("transmit-ns", costs.transmit_ns),
            ("transmit-done-ns", costs.transmit_done_ns),
            ("interrupt-gap-ns", self.interrupt_gap_ns),
        ];
        let timers = self.beside.iter().filter_map(|beside| match *beside {
            Beside::Compute => None,
            Beside::Send { period_ns, cost_ns } => Some((period_ns, cost_ns)),
        });
        let timers = timers.chain(self.tick.map(|tick| (tick.period_ns, tick.cost_ns)));
        let periods = timers.flat_map(|(period, cost)| [("period-ns", period), ("cost-ns", cost)]);
        let least = |least: u64| move |(name, ns): (&'static str, u64)| (name, ns, least);
        let all = needed.into_iter().chain(periods).map(least(1));
        let wrong = all
            .chain(free.into_iter().map(least(0)))
            .find(|&(_, ns, least)| !(least..=COST_MAX_NS).contains(&ns));
        match wrong {
            Some((name, ns, least)) => Err(SetupError::Cost { name, ns, least }),
            None => Ok(()),
        }
    }
}
