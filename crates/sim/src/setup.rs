//! Setup of a simulated machine.

use tidegate_gate::{Mode, Settings, admission};

use crate::error::SetupError;
use crate::limits::{MAX_CORES, MAX_COST_NS, MAX_QUEUE_ENTRIES, MAX_READERS};
use crate::load::{IpFamily, Link, OfferedLoad};

/// CPU cost of each step, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Costs {
    /// Entry and exit of the device interrupt handler.
    pub interrupt_ns: u64,
    /// A packet in the handler: descriptor, buffer, link header, input queue.
    pub receive_ns: u64,
    /// Start of a software interrupt.
    pub software_ns: u64,
    /// A packet through IP and transport, or through IP forwarding.
    pub protocol_ns: u64,
    /// One turn of a ring when polling: the call, and the check of the ring.
    pub poll_ns: u64,
    /// A packet at the device when polling: like `receive_ns`, without the input queue.
    pub poll_receive_ns: u64,
    /// Context switch to another kernel thread or process.
    pub switch_ns: u64,
    /// An application's call for the next packet.
    pub read_ns: u64,
    /// An application's own work on a packet.
    pub work_ns: u64,
    /// Passing a packet to the NIC, or to the output queue.
    pub transmit_ns: u64,
    /// Reclaiming the descriptor of a sent packet.
    pub transmit_done_ns: u64,
    /// Refusing a packet by admission control when polling. 0: packets are examined in front of
    /// the NIC, at no cost. Otherwise they wait in the receive ring until the polling loop examines
    /// them, as those that a program on the interface refuses.
    pub refuse_ns: u64,
    /// Passing a packet to the core of its socket, on both cores together.
    pub crossing_ns: u64,
    /// Additional time of a received packet whose memory is on another NUMA node than the core; 0 on
    /// the core's own node.
    pub remote_ns: u64,
}

impl Default for Costs {
    /// A present-day server core, in round numbers.
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
            refuse_ns: 0,
            crossing_ns: 0,
            remote_ns: 0,
        }
    }
}

impl Costs {
    /// Packets per second that one processor serves if every packet is taken by an interrupt that
    /// is already running, without any other work.
    pub fn capacity_pps(&self) -> u64 {
        let packet_ns = self.receive_ns + self.protocol_ns + self.read_ns + self.work_ns;
        1_000_000_000 / packet_ns.max(1)
    }
}

/// Placement of the application that serves packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// A process of its own on the same processor, at a priority below the network.
    Process,
    /// Inside the polling loop, as the gate's application ring.
    Inline,
}

/// Packet filter: a process that accepts or refuses each packet of a router, like Mogul's
/// `screend`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FilterProcess {
    /// Capacity of the queue to the filter, in packets.
    pub queue: u32,
}

/// Role of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostRole {
    /// A UDP service on the real stack.
    Udp {
        /// IP version of the load.
        family: IpFamily,
        /// Capacity of the socket queue, in datagrams.
        socket_queue: u32,
        /// Replies to each datagram.
        answers: bool,
        /// Placement of the service.
        placement: Placement,
    },
    /// The real stack without a bound socket: every packet is refused.
    Closed {
        /// IP version of the load.
        family: IpFamily,
    },
    /// IP forwarding to a second link.
    Router {
        /// Capacity of the output queue, in packets.
        output_queue: u32,
        /// Packet filter, if there is one.
        filter: Option<FilterProcess>,
    },
}

/// Background task: a process beside the network service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BackgroundTask {
    /// Computes endlessly.
    Compute,
    /// Sends a packet through another NIC in every period, and catches up if late.
    Send {
        /// Period, in nanoseconds.
        period_ns: u64,
        /// CPU cost of a packet, in nanoseconds.
        cost_ns: u64,
    },
}

/// Periodic system work, such as the clock interrupt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tick {
    /// Period, in nanoseconds.
    pub period_ns: u64,
    /// CPU cost in each period, in nanoseconds.
    pub cost_ns: u64,
}

/// Simulated machine and its load.
#[derive(Clone, Debug)]
pub struct Setup {
    /// Settings of the gate.
    pub gate: Settings,
    /// CPU cost of each step.
    pub costs: Costs,
    /// Number of cores, each with its own NIC queue pair and gate.
    pub cores: u32,
    /// Share of the flows that arrive at another core than that of their socket. Cores give and take
    /// alike then, so each one spends `crossing_ns` on every such packet that arrives at it. A single
    /// core has none.
    pub crossing_share: f64,
    /// Link on which the load arrives; each core transmits on a link of the same rate.
    pub link: Link,
    /// Receive descriptors of each NIC queue.
    pub receive_ring: u32,
    /// Transmit descriptors of each NIC queue.
    pub transmit_ring: u32,
    /// Minimum time between two interrupts that the NIC itself enforces, in addition to the gate; 0
    /// is none.
    pub interrupt_gap_ns: u64,
    /// Modes with an input queue: protocol work runs in a kernel thread instead of a software
    /// interrupt, as in Digital UNIX.
    pub protocol_thread: bool,
    /// Role of the host.
    pub role: HostRole,
    /// Number of reader processes of a UDP service, each with its own socket. Flows are assigned to
    /// the readers in turn.
    pub readers: u32,
    /// Admission control in front of the NIC; `None` disables it.
    pub admission: Option<admission::Config>,
    /// Background tasks on every core.
    pub background: Vec<BackgroundTask>,
    /// Periodic system work.
    pub tick: Option<Tick>,
    /// Scheduling quantum of applications.
    pub quantum_ns: u64,
    /// Offered load.
    pub load: OfferedLoad,
    /// Load of a further source, counted apart; `None` is no such source.
    pub peer_load: Option<OfferedLoad>,
    /// Seed of all random numbers.
    pub seed: u64,
}

impl Default for Setup {
    /// One core that serves UDP over IPv4 in mode `polled`, on a link of 400 Gb/s.
    fn default() -> Self {
        Self {
            gate: Settings::default(),
            costs: Costs::default(),
            cores: 1,
            crossing_share: 0.0,
            link: Link { bits_per_second: 400_000_000_000 },
            receive_ring: 512,
            transmit_ring: 512,
            interrupt_gap_ns: 0,
            protocol_thread: false,
            role: HostRole::Udp {
                family: IpFamily::V4,
                socket_queue: 256,
                answers: false,
                placement: Placement::Process,
            },
            readers: 1,
            admission: None,
            background: Vec::new(),
            tick: None,
            quantum_ns: 4_000_000,
            load: OfferedLoad::default(),
            peer_load: None,
            seed: 1,
        }
    }
}

impl Setup {
    /// Checks that the machine can be built and that its virtual time advances.
    pub(crate) fn check(&self) -> Result<(), SetupError> {
        if !(1..=MAX_CORES).contains(&self.cores) {
            return Err(SetupError::CoreCount(self.cores));
        }
        let allows_many_readers =
            matches!(self.role, HostRole::Udp { placement: Placement::Process, .. });
        if !(1..=if allows_many_readers { MAX_READERS } else { 1 }).contains(&self.readers) {
            return Err(SetupError::ReaderCount(self.readers));
        }
        if !(0.0..=1.0).contains(&self.crossing_share) {
            return Err(SetupError::CrossingShare(self.crossing_share));
        }
        self.check_sizes()?;
        self.check_costs()?;
        let is_inline = matches!(self.role, HostRole::Udp { placement: Placement::Inline, .. });
        let mode = self.gate.config().mode;
        if is_inline && mode.has_input_queue() {
            return Err(SetupError::InlineNeedsPolling(mode));
        }
        let has_process = matches!(
            self.role,
            HostRole::Udp { placement: Placement::Process, .. }
                | HostRole::Router { filter: Some(_), .. }
        );
        if mode == Mode::Dedicated && (has_process || !self.background.is_empty()) {
            return Err(SetupError::DedicatedHasNoPrograms);
        }
        if let Some(peer_load) = self.peer_load {
            peer_load.check(self.link)?;
            OfferedLoad { flows: self.flows(), ..self.load }.check(self.link)?;
        }
        self.load.check(self.link)
    }

    /// Number of flows of both loads.
    pub(crate) fn flows(&self) -> u32 {
        self.load.flows.saturating_add(self.peer_load.map_or(0, |load| load.flows))
    }

    fn check_sizes(&self) -> Result<(), SetupError> {
        let (queue, filter) = match self.role {
            HostRole::Udp { socket_queue, .. } => (("socket-queue", socket_queue), None),
            HostRole::Closed { .. } => (("socket-queue", 1), None),
            HostRole::Router { output_queue, filter } => (
                ("output-queue", output_queue),
                filter.map(|filter| ("filter-queue", filter.queue)),
            ),
        };
        let rings =
            [("receive-ring", self.receive_ring), ("transmit-ring", self.transmit_ring), queue];
        let out_of_range = |entries: u32| !(1..=MAX_QUEUE_ENTRIES).contains(&entries);
        match rings.into_iter().chain(filter).find(|&(_, entries)| out_of_range(entries)) {
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
            ("refuse-ns", costs.refuse_ns),
            ("crossing-ns", costs.crossing_ns),
            ("remote-ns", costs.remote_ns),
            ("interrupt-gap-ns", self.interrupt_gap_ns),
        ];
        let timers = self.background.iter().filter_map(|task| match *task {
            BackgroundTask::Compute => None,
            BackgroundTask::Send { period_ns, cost_ns } => Some((period_ns, cost_ns)),
        });
        let timers = timers.chain(self.tick.map(|tick| (tick.period_ns, tick.cost_ns)));
        let periods = timers.flat_map(|(period, cost)| [("period-ns", period), ("cost-ns", cost)]);
        let min = |min: u64| move |(name, ns): (&'static str, u64)| (name, ns, min);
        let all = needed.into_iter().chain(periods).map(min(1));
        let out_of_range = all
            .chain(free.into_iter().map(min(0)))
            .find(|&(_, ns, min)| !(min..=MAX_COST_NS).contains(&ns));
        match out_of_range {
            Some((name, ns, min)) => Err(SetupError::Cost { name, ns, min }),
            None => Ok(()),
        }
    }
}
