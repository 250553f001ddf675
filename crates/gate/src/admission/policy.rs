//! Admission as a whole: classes, rates, shares, and who is known.

use tidegate_wire::DropReason;

use super::bucket::Bucket;
use super::class::{CLASSES_MAX, ClassLimit, Classes, Pace, PerClass, Rate};
use super::config::{Config, ConfigError};
use super::controller::{Pressure, TOTAL_MIN_PPS, Total, preferred, rate_pps, share_out};
use super::facts::Facts;
use super::hash::{Source, SourceKey};
use super::known::Known;
use super::reach::Reach;
use super::source_share::{SOURCE_CELLS, SourceShare};

/// Why a packet was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Refusal {
    /// Nothing of its class is let in.
    Closed,
    /// Its class is at its rate.
    Rate,
    /// Its source has had its share of the class.
    SourceShare,
}

impl Refusal {
    /// The reason in the table of drops.
    pub const fn drop_reason(self) -> DropReason {
        match self {
            Refusal::Closed => DropReason::AdmissionClassClosed,
            Refusal::Rate => DropReason::AdmissionRate,
            Refusal::SourceShare => DropReason::AdmissionSourceShare,
        }
    }
}

/// What to do with a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Let it in.
    Admit {
        /// Its class.
        class: usize,
    },
    /// Drop it.
    Refuse {
        /// Its class.
        class: usize,
        /// Why.
        reason: Refusal,
    },
}

/// What was done with the packets of a class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClassCounters {
    /// Let in.
    pub admitted: u64,
    /// Refused: nothing of the class was let in.
    pub refused_closed: u64,
    /// Refused: the class was at its rate.
    pub refused_rate: u64,
    /// Refused: the source had had its share.
    pub refused_source_share: u64,
}

impl ClassCounters {
    /// Packets refused for any reason.
    pub fn refused(&self) -> u64 {
        self.refused_closed + self.refused_rate + self.refused_source_share
    }

    /// Packets that came.
    pub fn arrived(&self) -> u64 {
        self.admitted + self.refused()
    }

    fn since(&self, before: &Self) -> Self {
        Self {
            admitted: self.admitted.wrapping_sub(before.admitted),
            refused_closed: self.refused_closed.wrapping_sub(before.refused_closed),
            refused_rate: self.refused_rate.wrapping_sub(before.refused_rate),
            refused_source_share: self
                .refused_source_share
                .wrapping_sub(before.refused_source_share),
        }
    }

    fn add(&mut self, more: &Self) {
        self.admitted += more.admitted;
        self.refused_closed += more.refused_closed;
        self.refused_rate += more.refused_rate;
        self.refused_source_share += more.refused_source_share;
    }
}

/// Measurements over less than this are put off to the next call.
const PERIOD_MIN_NS: u64 = 1_000_000;
/// A longer time than this was spent doing something else, or the clock jumped:
/// nothing is measured over it.
const PERIOD_MAX_NS: u64 = 1_000_000_000;
/// The limit of a class's sources is set when so many packets could pass, or
/// so much time has passed: fewer say little.
const SHARE_PACKETS: u64 = 200;
const SHARE_PERIOD_NS: u64 = 100_000_000;

/// Decides which packets are let in.
///
/// Whoever owns it calls [`Admission::on_period`] about every
/// [`Config::PERIOD_NS`]. While [`Admission::is_limiting`] says no, packets
/// need not be shown, but for a sample to [`Admission::learn`] from. While it
/// says yes, every packet goes through [`Admission::decide`]; or the port does
/// the same by [`Admission::limits`], and what it counted goes to
/// [`Admission::on_port_counters`].
#[derive(Clone, Debug)]
pub struct Admission {
    classes: Classes,
    key: SourceKey,
    known: Known,
    shares: SourceShare,
    buckets: PerClass<Bucket>,
    limits: PerClass<ClassLimit>,
    /// What a source may have, of classes that get less than they ask for.
    source_pps: PerClass<Option<u64>>,
    counters: PerClass<ClassCounters>,
    port_counters: PerClass<ClassCounters>,
    total: Total,
    reach: Reach,
    limiting: bool,
    /// Somebody has become known by a proof that was not told yet.
    confirmed: bool,
    calm_after_ns: u64,
    /// What was counted when the period, and the period of shares, began.
    period_start: PerClass<ClassCounters>,
    share_start: PerClass<ClassCounters>,
    /// How long that is ago, and how many packets the rate let in since.
    share_elapsed_ns: PerClass<u64>,
    share_target: PerClass<u64>,
    demand_pps: PerClass<u64>,
    /// Whether [`Self::demand_pps`] was measured since limits began.
    demand_is_known: bool,
    period_start_ns: Option<u64>,
    served: u64,
    lost_late: u64,
    quiet_ns: u64,
}

impl Admission {
    /// Checks the settings. Everything is admitted at first. The seed should be
    /// secret: who knows it can choose sources that are counted as one.
    ///
    /// # Errors
    /// [`ConfigError`] names the setting and what to do.
    pub fn new(config: &Config, seed: [u8; 16]) -> Result<Self, ConfigError> {
        let classes = config.check()?;
        let key = SourceKey::new(seed);
        let ranks = classes.terms().iter().filter(|terms| !terms.exempt).map(|terms| terms.rank);
        let last_rank = ranks.max().unwrap_or(0);
        let ms = |ms: u64| ms.saturating_mul(1_000_000);
        let lifetime_ns = ms(config.known_lifetime_s.saturating_mul(1000));
        let period_ns = ms(config.learning_period_ms);
        Ok(Self {
            classes,
            key,
            known: Known::new(key, config.known_sources, period_ns, lifetime_ns),
            shares: SourceShare::new(key),
            buckets: [Bucket::default(); CLASSES_MAX],
            limits: [ClassLimit::OPEN; CLASSES_MAX],
            source_pps: [None; CLASSES_MAX],
            counters: [ClassCounters::default(); CLASSES_MAX],
            port_counters: [ClassCounters::default(); CLASSES_MAX],
            total: Total::new(config.low_mark_percent, config.high_mark_percent),
            reach: Reach::new(last_rank),
            limiting: false,
            confirmed: false,
            calm_after_ns: ms(config.calm_after_ms),
            period_start: [ClassCounters::default(); CLASSES_MAX],
            share_start: [ClassCounters::default(); CLASSES_MAX],
            share_elapsed_ns: [0; CLASSES_MAX],
            share_target: [0; CLASSES_MAX],
            demand_pps: [0; CLASSES_MAX],
            demand_is_known: false,
            period_start_ns: None,
            served: 0,
            lost_late: 0,
            quiet_ns: 0,
        })
    }

    /// The classes.
    pub fn classes(&self) -> &Classes {
        &self.classes
    }

    /// The key of the hashes of sources.
    pub fn key(&self) -> SourceKey {
        self.key
    }

    /// Who is known.
    pub fn known(&self) -> &Known {
        &self.known
    }

    /// Whether anything may be refused right now.
    #[inline]
    pub fn is_limiting(&self) -> bool {
        self.limiting
    }

    /// What holds for each class right now.
    pub fn limits(&self) -> &[ClassLimit] {
        &self.limits[..self.classes.len()]
    }

    /// The rate that is let in, of all classes together; `None` while there is
    /// no limit.
    pub fn total_pps(&self) -> Option<u64> {
        self.limiting.then_some(self.total.pps)
    }

    /// What was done with the packets of each class.
    pub fn counters(&self) -> &[ClassCounters] {
        &self.counters[..self.classes.len()]
    }

    /// Learns from a packet who talks to us. Does nothing while packets are
    /// refused: those who come then are not who usually comes.
    #[inline]
    pub fn learn(&mut self, facts: &Facts) {
        self.learn_source(facts.source_id());
    }

    /// Learns that a source talks to us, as [`Admission::learn`] does.
    #[inline]
    pub fn learn_source(&mut self, source: Source) {
        if !self.limiting && source != Source::NONE {
            self.known.learn(source);
        }
    }

    /// A source has proven that it gets what is sent to its address, for
    /// example by completing a handshake: it is known from now on.
    pub fn confirm(&mut self, source: Source) {
        self.confirmed |= self.known.confirm(source);
    }

    /// Whether somebody became known by [`Admission::confirm`] since the last
    /// call: whoever else decides has to be told.
    pub fn take_confirmed(&mut self) -> bool {
        std::mem::take(&mut self.confirmed)
    }

    /// The class of a packet.
    #[inline]
    pub fn classify(&self, facts: &Facts) -> usize {
        self.classes.classify(facts, || self.known.contains(facts.source_id()))
    }

    /// Says whether a packet is let in, and counts it.
    #[inline]
    pub fn decide(&mut self, now_ns: u64, facts: &Facts) -> Verdict {
        let class = self.classify(facts);
        let refusal = self.refusal(now_ns, class, facts.source_id());
        let counters = &mut self.counters[class];
        let Some(reason) = refusal else {
            counters.admitted += 1;
            return Verdict::Admit { class };
        };
        match reason {
            Refusal::Closed => counters.refused_closed += 1,
            Refusal::Rate => counters.refused_rate += 1,
            Refusal::SourceShare => counters.refused_source_share += 1,
        }
        Verdict::Refuse { class, reason }
    }

    #[inline]
    fn refusal(&mut self, now_ns: u64, class: usize, source: Source) -> Option<Refusal> {
        let limit = self.limits[class];
        let class_pace = match limit.class {
            Rate::Open => return None,
            Rate::Closed => return Some(Refusal::Closed),
            Rate::Limited(pace) => pace,
        };
        if let Rate::Limited(Pace { interval_ns, burst_ns }) = limit.source
            && !self.shares.take(now_ns, source, class, interval_ns, burst_ns)
        {
            return Some(Refusal::SourceShare);
        }
        let Pace { interval_ns, burst_ns } = class_pace;
        let taken = self.buckets[class].take(now_ns, interval_ns, burst_ns);
        (!taken).then_some(Refusal::Rate)
    }

    /// Takes over what a port that decides by itself has counted since it was
    /// opened, class by class.
    pub fn on_port_counters(&mut self, totals: &[ClassCounters]) {
        for (class, now) in totals.iter().enumerate().take(self.classes.len()) {
            self.counters[class].add(&now.since(&self.port_counters[class]));
            self.port_counters[class] = *now;
        }
    }

    /// Sets the limits by how things went since the last call. Returns whether
    /// they changed.
    ///
    /// The time may jump: over a time that cannot be, nothing is measured.
    pub fn on_period(&mut self, now_ns: u64, pressure: &Pressure) -> bool {
        self.served += pressure.served;
        self.lost_late += pressure.lost_late;
        let elapsed_ns = match self.period_start_ns {
            Some(start_ns) if now_ns >= start_ns => now_ns - start_ns,
            _ => u64::MAX,
        };
        if elapsed_ns < PERIOD_MIN_NS {
            return false;
        }
        self.period_start_ns = Some(now_ns);
        let pressure = Pressure {
            served: std::mem::take(&mut self.served),
            lost_late: std::mem::take(&mut self.lost_late),
            ..*pressure
        };
        let before = std::mem::replace(&mut self.period_start, self.counters);
        if elapsed_ns > PERIOD_MAX_NS {
            self.restart_shares();
            return false;
        }
        let old_limits = self.limits;
        if self.limiting {
            self.go_on(&pressure, elapsed_ns, &before);
        } else if self.total.is_pressed(&pressure) {
            self.start(&pressure, elapsed_ns);
        } else {
            self.total.on_calm(&pressure, elapsed_ns);
            self.known.on_calm(elapsed_ns);
        }
        self.limits != old_limits
    }

    /// From calm to limits.
    fn start(&mut self, pressure: &Pressure, elapsed_ns: u64) {
        self.limiting = true;
        self.quiet_ns = 0;
        self.reach.restart();
        self.total.start(pressure, elapsed_ns);
        // Nothing was counted yet: every class may come for what it was promised.
        for (demand_pps, terms) in self.demand_pps.iter_mut().zip(self.classes.terms()) {
            *demand_pps = terms.guaranteed_pps;
        }
        self.demand_is_known = false;
        self.restart_shares();
        self.set_class_limits();
    }

    fn go_on(&mut self, pressure: &Pressure, elapsed_ns: u64, before: &PerClass<ClassCounters>) {
        let (mut refused, mut admitted, mut admitted_in_reach) = (0, 0, 0);
        // Those that nobody saw are of every class alike.
        let seen_permille = 1000 - u64::from(pressure.unseen_permille.min(950));
        for (class, before) in before.iter().enumerate() {
            let period = self.counters[class].since(before);
            refused += period.refused();
            if let Some(terms) = self.classes.terms().get(class).filter(|terms| !terms.exempt) {
                admitted += period.admitted;
                if self.reach.contains(terms.rank) {
                    admitted_in_reach += period.admitted;
                }
            }
            // More demand is believed sooner than less. Packets come in clumps,
            // so a single period says little.
            let seen_pps = rate_pps(period.arrived(), elapsed_ns);
            let now_pps = scale(seen_pps, 1000, seen_permille);
            let demand_pps = &mut self.demand_pps[class];
            let parts = match now_pps > *demand_pps {
                true if !self.demand_is_known => 0,
                true => 3,
                false => 15,
            };
            *demand_pps = (*demand_pps * parts + now_pps) / (parts + 1);
        }
        self.demand_is_known = true;
        let quiet = refused == 0 && !self.total.is_pressed(pressure);
        self.quiet_ns = if quiet { self.quiet_ns.saturating_add(elapsed_ns) } else { 0 };
        if self.quiet_ns >= self.calm_after_ns {
            self.limiting = false;
            self.limits = [ClassLimit::OPEN; CLASSES_MAX];
            return;
        }
        let admitted_pps = rate_pps(admitted, elapsed_ns);
        let preferred_pps = preferred(self.classes.terms(), &self.demand_pps);
        let beyond_pps = (refused > 0).then_some(admitted_pps);
        self.total.adjust(pressure, elapsed_ns, beyond_pps, preferred_pps);
        let exhausted = admitted_in_reach <= admitted / 8;
        let ranks = self.classes.terms().iter().filter(|terms| !terms.exempt);
        let ranks = ranks.map(|terms| terms.rank);
        if self.reach.on_period(pressure.has_lost(), exhausted, elapsed_ns, ranks) {
            self.total.share_anew(pressure, elapsed_ns);
        }
        for class in 0..self.classes.len() {
            self.update_source_limit(class, elapsed_ns);
        }
        self.set_class_limits();
    }

    fn restart_shares(&mut self) {
        self.share_start = self.counters;
        self.share_elapsed_ns = [0; CLASSES_MAX];
        self.share_target = [0; CLASSES_MAX];
    }

    fn set_class_limits(&mut self) {
        // However little can be served: guarantees do not take what others need
        // to be seen again.
        let used = self.classes.terms().iter().zip(&self.demand_pps);
        let guaranteed_pps: u64 = used
            .filter(|(terms, _)| !terms.exempt)
            .map(|(terms, &demand_pps)| demand_pps.min(terms.guaranteed_pps))
            .fold(0, u64::saturating_add);
        let total_pps = self.total.pps.max(guaranteed_pps.saturating_add(TOTAL_MIN_PPS));
        let rates = share_out(total_pps, self.classes.terms(), &self.demand_pps);
        for (class, terms) in self.classes.terms().iter().enumerate() {
            let rate_pps = rates[class];
            let satisfied = self.demand_pps[class] <= rate_pps / 8 * 7;
            let limit = &mut self.limits[class];
            limit.class = match rate_pps {
                _ if terms.exempt => Rate::Open,
                _ if !self.reach.contains(terms.rank) => match terms.ceiling_pps {
                    u64::MAX => Rate::Open,
                    ceiling_pps => Rate::Limited(Pace::patient(ceiling_pps)),
                },
                0 => Rate::Closed,
                rate_pps if satisfied => Rate::Limited(Pace::patient(rate_pps)),
                rate_pps => Rate::Limited(Pace::of(rate_pps)),
            };
            limit.source = match self.source_pps[class] {
                Some(source_pps) if !satisfied => Rate::Limited(Pace::of(source_pps)),
                _ => Rate::Open,
            };
        }
    }

    /// Moves the limit of sources when enough was seen to tell how.
    fn update_source_limit(&mut self, class: usize, elapsed_ns: u64) {
        let Rate::Limited(pace) = self.limits[class].class else { return };
        let class_pps = pace.rate_pps();
        self.share_elapsed_ns[class] += elapsed_ns;
        self.share_target[class] += packets_in(class_pps, elapsed_ns);
        let target = self.share_target[class];
        if target < SHARE_PACKETS && self.share_elapsed_ns[class] < SHARE_PERIOD_NS {
            return;
        }
        let period = self.counters[class].since(&self.share_start[class]);
        self.share_start[class] = self.counters[class];
        (self.share_elapsed_ns[class], self.share_target[class]) = (0, 0);
        let now_pps = self.source_pps[class].unwrap_or(class_pps);
        self.source_pps[class] = next_source_rate(class_pps, now_pps, target.max(1), &period);
    }
}

/// The limit of sources with which what passes it comes to about what the class
/// may have, which was `target` packets in the period.
///
/// When all who are limited send more than they may, what passes is in
/// proportion to the limit, so one step hits it. There is no use in a limit at
/// which all buckets together let through less than the class may have: then
/// there are more sources than buckets, and the class's rate has to do.
fn next_source_rate(
    class_pps: u64,
    now_pps: u64,
    target: u64,
    period: &ClassCounters,
) -> Option<u64> {
    let passed = period.admitted + period.refused_rate;
    let short = period.admitted < target - target / 32;
    let scaled_pps = if period.refused() == 0 {
        return None;
    } else if period.refused_source_share > 0 && short {
        let most_pps = now_pps.saturating_mul(2);
        (scale(now_pps, target, period.admitted) + 1).min(most_pps)
    } else if period.refused_rate > target / 32 {
        scale(now_pps, target, passed)
    } else {
        now_pps
    };
    let least_pps = class_pps.div_ceil(SOURCE_CELLS as u64 / 2);
    Some(scaled_pps.clamp(least_pps, class_pps.max(least_pps)))
}

fn scale(pps: u64, to: u64, from: u64) -> u64 {
    let scaled = u128::from(pps) * u128::from(to) / u128::from(from.max(1));
    u64::try_from(scaled).unwrap_or(u64::MAX / 2)
}

fn packets_in(pps: u64, elapsed_ns: u64) -> u64 {
    let packets = u128::from(pps) * u128::from(elapsed_ns) / 1_000_000_000;
    u64::try_from(packets).unwrap_or(u64::MAX / 2)
}
