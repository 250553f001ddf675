//! Admission at work: the gate decides, the port drops early if it can.

use std::io;
use std::net::IpAddr;
use std::sync::Arc;

use tidegate_gate::admission::{
    Admission, ClassCounters, ClassLimit, Config, ConfigError, Facts, Pace, Pressure, Rate, Rule,
    Source, Verdict,
};
use tidegate_memory::Arena;
use tidegate_port::admission::{self as early, ClassCounts, Early};
use tidegate_port::{Burst, Medium, Port};
use tidegate_wire::DropCounters;

use crate::pressure::{EarlyWork, OtherCores};

/// Why admission cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum AdmissionError {
    /// The settings are wrong.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The port refuses the classes.
    #[error("the port does not take the classes: {0}")]
    Port(#[from] io::Error),
}

/// One frame of so many is looked at in calm time, beside the first of each
/// burst.
const SAMPLE: usize = 16;

/// Admission in front of a stack.
///
/// The engine receives through [`Admitter::receive`], and calls
/// [`Admitter::on_period`] about every [`Config::PERIOD_NS`].
#[derive(Debug)]
pub struct Admitter {
    admission: Admission,
    medium: Medium,
    /// The port drops what is refused.
    early: bool,
    due_ns: u64,
    drops: DropCounters,
    /// Cores behind the same port.
    others: Option<Arc<OtherCores>>,
}

/// What an engine has to do with admission.
#[derive(Debug)]
pub(crate) enum Role {
    /// Nothing.
    None,
    /// It decides.
    Decides(Box<Admitter>),
    /// It tells the one that does how things go.
    Tells { to: Arc<OtherCores>, due_ns: u64 },
}

impl Admitter {
    /// Checks the settings and tells the port which classes there are. The seed
    /// should be secret.
    ///
    /// # Errors
    /// See [`AdmissionError`].
    pub fn new(
        config: &Config,
        seed: [u8; 16],
        port: &mut dyn Port,
    ) -> Result<Self, AdmissionError> {
        let admission = Admission::new(config, seed)?;
        let medium = port.capabilities().medium;
        let early = match port.admission() {
            Some(port) => {
                install(&admission, port)?;
                true
            }
            None => false,
        };
        Ok(Self { admission, medium, early, due_ns: 0, drops: DropCounters::new(), others: None })
    }

    /// From now on what other cores tell counts too, and what is for them is
    /// looked at before they get it.
    pub(crate) fn listen_to(&mut self, others: Arc<OtherCores>) {
        self.others = Some(others);
    }

    /// Who is listened to, if anybody.
    pub(crate) fn others(&self) -> Option<&Arc<OtherCores>> {
        self.others.as_ref()
    }

    /// As [`Port::receive`], but drops what is not admitted, unless the port has
    /// done so, and learns from some frames in calm time. What is dropped counts
    /// as received.
    ///
    /// # Errors
    /// As [`Port::receive`].
    // Who has no admission is not to pay for it.
    #[inline(never)]
    pub fn receive(
        &mut self,
        now_ns: u64,
        port: &mut dyn Port,
        arena: &mut Arena,
        burst: &mut Burst,
        quota: usize,
    ) -> io::Result<usize> {
        if self.others.is_some()
            && let Some(front) = port.front()
        {
            let mut sieve = |arena: &mut Arena, arrived: &mut Burst| {
                self.on_burst(now_ns, arena, arrived);
            };
            return front.receive_sieved(arena, burst, quota, &mut sieve);
        }
        let received = port.receive(arena, burst, quota)?;
        self.on_burst(now_ns, arena, burst);
        Ok(received)
    }

    fn on_burst(&mut self, now_ns: u64, arena: &mut Arena, burst: &mut Burst) {
        if !self.admission.is_limiting() {
            for frame in burst.iter().step_by(SAMPLE) {
                self.admission.learn(&Facts::of_frame(self.medium, arena.bytes(frame)));
            }
            return;
        }
        if self.early {
            return;
        }
        // Once round the queue keeps the order.
        for _ in 0..burst.len() {
            let Some(frame) = burst.pop_front() else { break };
            let facts = Facts::of_frame(self.medium, arena.bytes(&frame));
            match self.admission.decide(now_ns, &facts) {
                Verdict::Admit { .. } => burst.push_back(frame),
                Verdict::Refuse { reason, .. } => {
                    self.drops.count(reason.drop_reason());
                    arena.free(frame);
                }
            }
        }
    }

    /// Whether [`Admitter::on_period`] should be called.
    #[inline]
    pub fn is_due(&self, now_ns: u64) -> bool {
        is_due(now_ns, self.due_ns)
    }

    /// Sets what is admitted by how things went since the last call.
    ///
    /// # Errors
    /// When the port refuses.
    pub fn on_period(
        &mut self,
        now_ns: u64,
        pressure: &Pressure,
        port: &mut dyn Port,
    ) -> io::Result<()> {
        self.due_ns = now_ns.saturating_add(Config::PERIOD_NS);
        let mut pressure = *pressure;
        if let Some(others) = &self.others {
            others.add_to(&mut pressure);
            for peer in others.take_confirmed() {
                self.admission.confirm(Source::of(peer));
            }
        }
        match port.admission().filter(|_| self.early) {
            Some(port) => update(&mut self.admission, now_ns, &pressure, port)?,
            None => _ = self.admission.on_period(now_ns, &pressure),
        }
        Ok(())
    }

    /// What the port tells of its work, if it drops early.
    ///
    /// # Errors
    /// When the port refuses.
    pub(crate) fn early_work(&self, port: &mut dyn Port) -> io::Result<Option<EarlyWork>> {
        let Some(port) = port.admission().filter(|_| self.early) else { return Ok(None) };
        let seen = port.counts()?.iter().map(ClassCounts::arrived).sum();
        Ok(Some(EarlyWork { seen, unseen: port.unseen()? }))
    }

    /// What decides.
    pub fn admission(&self) -> &Admission {
        &self.admission
    }

    /// A peer has proven that it gets what is sent to its address.
    pub(crate) fn confirm(&mut self, peer: IpAddr) {
        self.admission.confirm(Source::of(peer));
    }

    /// What was dropped here. What the port dropped is among its own counters.
    pub fn drops(&self) -> &DropCounters {
        &self.drops
    }
}

/// Whether it is time, which should be every [`Config::PERIOD_NS`]. A clock that
/// jumped back makes it so too.
#[inline]
pub(crate) fn is_due(now_ns: u64, due_ns: u64) -> bool {
    now_ns >= due_ns || due_ns - now_ns > Config::PERIOD_NS
}

/// Tells a port which classes there are.
///
/// # Errors
/// When the port refuses.
pub fn install(admission: &Admission, port: &mut dyn Early) -> io::Result<()> {
    let classes = admission.classes();
    let rules: Vec<_> = classes.rules().iter().map(port_rule).collect();
    let key = admission.key();
    port.set_program(&early::Program {
        rest_class: classes.rest() as u8,
        rules,
        key_start: key.start,
        key_factor: key.factor,
    })
}

/// Takes over what the port counted, sets the limits by how things went, and
/// tells the port.
///
/// # Errors
/// When the port refuses.
pub fn update(
    admission: &mut Admission,
    now_ns: u64,
    pressure: &Pressure,
    port: &mut dyn Early,
) -> io::Result<()> {
    let was_limiting = admission.is_limiting();
    if was_limiting {
        admission.on_port_counters(&port.counts()?.map(|counts| ClassCounters {
            admitted: counts.admitted,
            refused_closed: counts.refused_closed,
            refused_rate: counts.refused_rate,
            refused_source_share: counts.refused_source_share,
        }));
    }
    let changed = admission.on_period(now_ns, pressure);
    let begins = admission.is_limiting() && !was_limiting;
    // In calm time the port need not know.
    if admission.is_limiting() && (admission.take_confirmed() || begins) {
        let words: Vec<_> = admission.known().words().collect();
        port.set_known(&words)?;
    }
    if !changed {
        return Ok(());
    }
    if !admission.is_limiting() {
        return port.set_limits(None);
    }
    let mut limits = [early::ClassLimit::default(); early::CLASSES_MAX];
    for (to, from) in limits.iter_mut().zip(admission.limits()) {
        *to = port_limit(from);
    }
    port.set_limits(Some(&limits[..admission.limits().len()]))
}

fn port_rule(rule: &Rule) -> early::Rule {
    early::Rule {
        class: rule.class,
        family: rule.family,
        known: rule.known,
        protocol: rule.protocol,
        port_low: rule.port_low,
        port_high: rule.port_high,
        size_low: rule.size_low,
        size_high: rule.size_high,
        source: rule.source,
        source_mask: rule.source_mask,
    }
}

fn port_limit(limit: &ClassLimit) -> early::ClassLimit {
    early::ClassLimit { class: port_pace(limit.class), source: port_pace(limit.source) }
}

fn port_pace(rate: Rate) -> early::Pace {
    match rate {
        Rate::Open => early::Pace::Open,
        Rate::Closed => early::Pace::Closed,
        Rate::Limited(Pace { interval_ns, burst_ns }) => {
            early::Pace::Limited { interval_ns, burst_ns }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Remembers what it was told.
    #[derive(Default)]
    struct Told {
        known: Vec<Vec<u64>>,
        limiting: bool,
    }

    impl Early for Told {
        fn set_program(&mut self, _: &early::Program) -> io::Result<()> {
            Ok(())
        }

        fn set_known(&mut self, words: &[u64]) -> io::Result<()> {
            self.known.push(words.to_vec());
            Ok(())
        }

        fn set_limits(&mut self, limits: Option<&[early::ClassLimit]>) -> io::Result<()> {
            self.limiting = limits.is_some();
            Ok(())
        }

        fn counts(&mut self) -> io::Result<[ClassCounts; early::CLASSES_MAX]> {
            Ok(Default::default())
        }
    }

    #[test]
    fn a_port_that_limits_learns_at_once_who_was_confirmed() {
        let mut admission = Admission::new(&Config::default(), [7; 16]).unwrap();
        let (mut port, mut now_ns) = (Told::default(), 0);
        let stuck = Pressure { lost_late: 1, level_percent: 100, ..Pressure::default() };
        let mut period = |admission: &mut Admission, port: &mut Told| {
            now_ns += Config::PERIOD_NS;
            update(admission, now_ns, &stuck, port).unwrap();
        };
        admission.confirm(Source::of([192, 0, 2, 1].into()));
        while !port.limiting {
            assert_eq!(port.known.len(), 0, "in calm time it need not know");
            period(&mut admission, &mut port);
        }
        assert_eq!(port.known.len(), 1);
        period(&mut admission, &mut port);
        assert_eq!(port.known.len(), 1, "nobody is new");
        admission.confirm(Source::of([192, 0, 2, 2].into()));
        admission.confirm(Source::of([192, 0, 2, 1].into()));
        period(&mut admission, &mut port);
        assert_eq!(port.known.len(), 2);
        assert_eq!(port.known[1], admission.known().words().collect::<Vec<_>>());
        admission.confirm(Source::of([192, 0, 2, 2].into()));
        period(&mut admission, &mut port);
        assert_eq!(port.known.len(), 2, "it is known");
    }
}
