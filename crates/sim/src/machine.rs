//! The simulated machine: cores, and flows spread over them.

use crate::application::ReaderState;
use crate::error::SetupError;
use crate::load::{
    IpFamily, Link, OfferedLoad, Packet, PacketGenerator, ToeplitzHash, flow_endpoints,
};
use crate::report::SimReport;
use crate::setup::{HostRole, Setup};
use crate::sim_core::SimCore;

/// Simulated machine under load. See the [crate documentation](crate).
///
/// # Examples
///
/// ```
/// use tidegate_sim::{Machine, OfferedLoad, Setup};
///
/// let load = OfferedLoad { pps: 50_000, ..OfferedLoad::default() };
/// let mut machine = Machine::new(&Setup { load, ..Setup::default() })?;
/// let report = machine.run(10_000_000);
/// assert!(report.delivered > 400);
/// assert_eq!(report.unaccounted(), 0);
/// # Ok::<(), tidegate_sim::SetupError>(())
/// ```
pub struct Machine {
    cores: Vec<SimCore>,
    generator: PacketGenerator,
    /// Generator of the further source, if there is one.
    peer: Option<PacketGenerator>,
    /// Number of flows of the offered load; those of the further source follow.
    flows: u32,
    link: Link,
    /// Core of each flow.
    core_of: Vec<u32>,
    now_ns: u64,
    /// Totals at the start of the current [`Machine::run`].
    before: SimReport,
}

impl Machine {
    /// Builds an idle machine at time 0.
    ///
    /// # Errors
    /// Returns [`SetupError`], which names the wrong setting and the reason.
    pub fn new(setup: &Setup) -> Result<Self, SetupError> {
        setup.check()?;
        let cores =
            (0..setup.cores).map(|index| SimCore::new(setup, index)).collect::<Result<_, _>>()?;
        let family = match setup.role {
            HostRole::Udp { family, .. } | HostRole::Closed { family } => family,
            HostRole::Router { .. } => IpFamily::V4,
        };
        let core_of = (0..setup.flows())
            .map(|flow| {
                let (source, destination) = flow_endpoints(family, flow, setup.readers);
                ToeplitzHash.hash(source, destination) % setup.cores
            })
            .collect();
        let before = SimReport::new(setup.cores, setup.readers as usize, setup.background.len());
        let generator = PacketGenerator::new(setup.load, setup.link, setup.seed, 0);
        let flows = setup.load.flows;
        let peer_seed = setup.seed.wrapping_add(1);
        let peer =
            setup.peer_load.map(|load| PacketGenerator::new(load, setup.link, peer_seed, flows));
        Ok(Self { cores, generator, peer, flows, link: setup.link, core_of, now_ns: 0, before })
    }

    /// Changes the rate and the arrival pattern of the load. The number of flows stays the same.
    ///
    /// # Errors
    /// As [`Machine::new`].
    pub fn set_load(&mut self, load: OfferedLoad) -> Result<(), SetupError> {
        let load = OfferedLoad { flows: self.flows, ..load };
        load.check(self.link)?;
        self.generator.set_load(self.now_ns, load);
        Ok(())
    }

    /// Stops a reader of the service on every core, lets it run again, or ends it. An exited
    /// reader stays so.
    ///
    /// # Errors
    /// [`SetupError::NoSuchReader`] if no such reader runs as a process.
    pub fn set_reader(&mut self, reader: u32, state: ReaderState) -> Result<(), SetupError> {
        self.cores.iter_mut().try_for_each(|core| core.set_reader(reader, state))
    }

    /// Makes the clock given to the gate and the stack jump, on every core. The clock starts at 0
    /// and cannot be set below that.
    pub fn jump_clock(&mut self, by_ns: i64) {
        self.cores.iter_mut().for_each(|core| core.jump_clock(by_ns));
    }

    /// Current virtual time.
    pub fn now_ns(&self) -> u64 {
        self.now_ns
    }

    /// Runs the machine for a time and returns the report of that time.
    pub fn run(&mut self, duration_ns: u64) -> SimReport {
        self.cores.iter_mut().for_each(SimCore::reset_latency);
        let end_ns = self.now_ns.saturating_add(duration_ns);
        while let Some(packet) = self.next_before(end_ns) {
            let index = self.core_of.get(packet.flow as usize).map_or(0, |&core| core as usize);
            let core = &mut self.cores[index];
            core.run_until(packet.arrived_ns);
            core.arrive(packet);
        }
        self.cores.iter_mut().for_each(|core| core.run_until(end_ns));
        self.now_ns = end_ns;
        let total = self.total();
        let report = total.clone().since(&self.before);
        self.before = total;
        report
    }

    /// Returns the next packet of both loads that arrives before `end_ns`.
    fn next_before(&mut self, end_ns: u64) -> Option<Packet> {
        let Some(peer) = &mut self.peer else { return self.generator.next_before(end_ns) };
        let arrival_ns =
            |generator: &PacketGenerator| generator.next_arrival_ns().unwrap_or(u64::MAX);
        let peer_is_next = arrival_ns(peer) < arrival_ns(&self.generator);
        let next = if peer_is_next { peer } else { &mut self.generator };
        next.next_before(end_ns)
    }

    /// Returns the report since time 0; the latency is that of the last [`Machine::run`].
    pub fn total(&self) -> SimReport {
        let (readers, background) =
            (self.before.delivered_by_reader.len(), self.before.background.len());
        let mut report = SimReport::new(self.cores.len() as u32, readers, background);
        report.duration_ns = self.now_ns;
        self.cores.iter().for_each(|core| core.add_to(&mut report));
        report
    }
}
