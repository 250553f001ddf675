//! The machine as a whole: cores, and packets spread over them.

use crate::application::ReaderState;
use crate::core::Core;
use crate::error::SetupError;
use crate::load::{Family, FlowHash, Generator, Link, Load, ends};
use crate::report::Report;
use crate::setup::{Role, Setup};

/// A machine under load. See the [crate documentation](crate).
pub struct Machine {
    cores: Vec<Core>,
    generator: Generator,
    link: Link,
    /// Which core a flow belongs to.
    core_of: Vec<u32>,
    now_ns: u64,
    /// What had come of everything when [`Machine::run`] began.
    before: Report,
}

impl Machine {
    /// Builds a machine, at time 0 and at rest.
    ///
    /// # Errors
    /// [`SetupError`] says which setting is wrong and why.
    pub fn new(setup: &Setup) -> Result<Self, SetupError> {
        setup.check()?;
        let cores =
            (0..setup.cores).map(|index| Core::new(setup, index)).collect::<Result<_, _>>()?;
        let family = match setup.role {
            Role::Udp { family, .. } | Role::Closed { family } => family,
            Role::Router { .. } => Family::V4,
        };
        let core_of = (0..setup.load.flows)
            .map(|flow| {
                let (source, destination) = ends(family, flow, setup.readers);
                FlowHash.hash(source, destination) % setup.cores
            })
            .collect();
        let before = Report::new(setup.cores, setup.readers as usize, setup.beside.len());
        let generator = Generator::new(setup.load, setup.link, setup.seed);
        Ok(Self { cores, generator, link: setup.link, core_of, now_ns: 0, before })
    }

    /// Changes the rate and shape of the load from now on. The flows stay.
    ///
    /// # Errors
    /// As [`Machine::new`].
    pub fn set_load(&mut self, load: Load) -> Result<(), SetupError> {
        let load = Load { flows: self.core_of.len() as u32, ..load };
        load.check(self.link)?;
        self.generator.set(self.now_ns, load);
        Ok(())
    }

    /// Stops a reader of the service on every core, lets it read again, or ends
    /// it. Whoever is dead stays so.
    ///
    /// # Errors
    /// [`SetupError::Reader`] when there is no such program.
    pub fn set_reader(&mut self, reader: u32, state: ReaderState) -> Result<(), SetupError> {
        self.cores.iter_mut().try_for_each(|core| core.set_reader(reader, state))
    }

    /// Lets the clock jump that the gate and the stack are told, on every core.
    /// It begins at 0 and cannot be before that.
    pub fn jump_clock(&mut self, by_ns: i64) {
        self.cores.iter_mut().for_each(|core| core.jump_clock(by_ns));
    }

    /// The time.
    pub fn now_ns(&self) -> u64 {
        self.now_ns
    }

    /// Lets so much time pass, and says what came of it.
    pub fn run(&mut self, duration_ns: u64) -> Report {
        self.cores.iter_mut().for_each(Core::forget_latency);
        let end_ns = self.now_ns.saturating_add(duration_ns);
        while let Some(packet) = self.generator.next_before(end_ns) {
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

    /// What came of everything since the beginning; the latency is that of the
    /// last [`Machine::run`].
    pub fn total(&self) -> Report {
        let (readers, beside) = (self.before.delivered_by_reader.len(), self.before.beside.len());
        let mut report = Report::new(self.cores.len() as u32, readers, beside);
        report.duration_ns = self.now_ns;
        self.cores.iter().for_each(|core| core.add_to(&mut report));
        report
    }
}
