//! Admission controller: classes, rates, source shares and known sources.

use super::class::{ClassPolicy, Classes, Limits, MAX_CLASSES, PacketRate, PerClass, RateLimit};
use super::config::{Config, ConfigError};
use super::contention::Contention;
use super::controller::{MIN_TOTAL_PPS, TotalRate, allocate_rates, preferred_demand, rate_pps};
use super::hash::{SourceId, SourceKey};
use super::known_sources::KnownSources;
use super::limited_ranks::LimitedRanks;
use super::limiter::{LimitDecision, Limiter, RefusalReason};
use super::packet_meta::PacketMeta;
use super::pressure::Pressure;
use super::source_share::SOURCE_BUCKETS_PER_ROW;

/// Admission decision for a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdmissionVerdict {
    /// Admit the packet.
    Admit {
        /// Class index of the packet.
        class: usize,
    },
    /// Drop the packet.
    Refuse {
        /// Class index of the packet.
        class: usize,
        /// Reason of the refusal.
        reason: RefusalReason,
    },
}

/// Packet counters of a class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClassCounters {
    /// Packets admitted.
    pub admitted: u64,
    /// Admitted packets of sources that had used their share: nobody else wanted the rest.
    pub admitted_over_share: u64,
    /// Packets refused because the rate of the class was zero.
    pub refused_closed: u64,
    /// Packets refused because the class had reached its rate.
    pub refused_rate: u64,
    /// Packets refused because the source had reached its share.
    pub refused_source_share: u64,
}

impl ClassCounters {
    /// Packets refused for any reason.
    pub fn refused(&self) -> u64 {
        self.refused_closed + self.refused_rate + self.refused_source_share
    }

    /// Packets that arrived: admitted or refused.
    pub fn arrived(&self) -> u64 {
        self.admitted + self.refused()
    }

    fn since(&self, before: &Self) -> Self {
        Self {
            admitted: self.admitted.wrapping_sub(before.admitted),
            admitted_over_share: self.admitted_over_share.wrapping_sub(before.admitted_over_share),
            refused_closed: self.refused_closed.wrapping_sub(before.refused_closed),
            refused_rate: self.refused_rate.wrapping_sub(before.refused_rate),
            refused_source_share: self
                .refused_source_share
                .wrapping_sub(before.refused_source_share),
        }
    }

    fn add(&mut self, more: &Self) {
        self.admitted += more.admitted;
        self.admitted_over_share += more.admitted_over_share;
        self.refused_closed += more.refused_closed;
        self.refused_rate += more.refused_rate;
        self.refused_source_share += more.refused_source_share;
    }
}

/// Minimum measurement period; a shorter one is merged into the next.
const MIN_PERIOD_NS: u64 = 1_000_000;
/// Maximum measurement period. A longer one means that the thread was busy elsewhere or the
/// clock jumped; nothing is measured over it.
const MAX_PERIOD_NS: u64 = 1_000_000_000;
/// Packets at the class's rate after which the source limit of the class is updated. With
/// fewer packets the update waits for [`MAX_SHARE_PERIOD_NS`].
const MIN_SHARE_PACKETS: u64 = 200;
const MAX_SHARE_PERIOD_NS: u64 = 100_000_000;

/// Admission controller: decides which packets are admitted.
///
/// The owner calls [`Admission::on_period`] about every [`Config::PERIOD_NS`]. While
/// [`Admission::is_learning`] returns true, a sample of the packets is passed to
/// [`Admission::learn`]. While [`Admission::is_limiting`] returns false, all packets are admitted;
/// while it returns true, every packet is passed to [`Admission::decide`]. Alternatively the device enforces [`Admission::limits`] itself, and
/// its counters are passed to [`Admission::on_device_counters`].
///
/// # Examples
///
/// ```
/// use tidegate_gate::admission::{Admission, AdmissionVerdict, Config, PacketMeta, Pressure};
/// use tidegate_wire::Medium;
///
/// let mut admission = Admission::new(&Config::default(), [7; 16])?;
/// let meta = PacketMeta::parse(Medium::Ethernet, &[0; 60]);
/// assert!(matches!(admission.decide(0, &meta), AdmissionVerdict::Admit { .. }));
/// // A late drop means overload: limits are in force from now on.
/// admission.on_period(0, &Pressure::default());
/// admission.on_period(Config::PERIOD_NS, &Pressure { late_drops: 1, ..Pressure::default() });
/// assert!(admission.is_limiting());
/// # Ok::<(), tidegate_gate::admission::ConfigError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Admission {
    classes: Classes,
    source_key: SourceKey,
    known_sources: KnownSources,
    limiter: Limiter,
    limits: Limits,
    /// Classes that want a part of the capacity, and late losses.
    contention: Contention,
    /// Rate of each source, for classes that get less than their demand.
    source_pps: PerClass<Option<u64>>,
    counters: PerClass<ClassCounters>,
    device_counters: PerClass<ClassCounters>,
    total_rate: TotalRate,
    limited_ranks: LimitedRanks,
    limiting: bool,
    /// A source became known, and [`Self::take_newly_known`] has not reported that yet.
    has_newly_known: bool,
    /// The owner samples packets while limits are in force.
    samples_under_limits: bool,
    calm_after_ns: u64,
    /// Counters at the start of the period, and of the source share period.
    period_start_counters: PerClass<ClassCounters>,
    share_start_counters: PerClass<ClassCounters>,
    /// Time since the start of the share period, and packets that the class's rate allowed in it.
    share_elapsed_ns: PerClass<u64>,
    share_target_packets: PerClass<u64>,
    demand_pps: PerClass<u64>,
    /// True once [`Self::demand_pps`] was measured after limits came into force.
    demand_is_known: bool,
    period_start_ns: Option<u64>,
    served: u64,
    late_drops: u64,
    quiet_ns: u64,
}

impl Admission {
    /// Validates the settings. Every packet is admitted at first. The seed should be secret:
    /// with it a sender can choose sources whose hashes collide.
    ///
    /// # Errors
    /// Returns [`ConfigError`], which names the setting and the correction.
    pub fn new(config: &Config, seed: [u8; 16]) -> Result<Self, ConfigError> {
        let classes = config.compile()?;
        let source_key = SourceKey::new(seed);
        let ranks =
            classes.policies().iter().filter(|policy| !policy.exempt).map(|policy| policy.rank);
        let last_rank = ranks.max().unwrap_or(0);
        let ms = |ms: u64| ms.saturating_mul(1_000_000);
        let lifetime_ns = ms(config.known_lifetime_s.saturating_mul(1000));
        let period_ns = ms(config.learning_period_ms);
        Ok(Self {
            classes,
            source_key,
            known_sources: KnownSources::new(
                source_key,
                config.known_sources,
                period_ns,
                lifetime_ns,
            ),
            limiter: Limiter::new(source_key),
            limits: Limits::UNLIMITED,
            contention: Contention::new(),
            source_pps: [None; MAX_CLASSES],
            counters: [ClassCounters::default(); MAX_CLASSES],
            device_counters: [ClassCounters::default(); MAX_CLASSES],
            total_rate: TotalRate::new(config.low_mark_percent, config.high_mark_percent),
            limited_ranks: LimitedRanks::new(last_rank),
            limiting: false,
            has_newly_known: false,
            samples_under_limits: false,
            calm_after_ns: ms(config.calm_after_ms),
            period_start_counters: [ClassCounters::default(); MAX_CLASSES],
            share_start_counters: [ClassCounters::default(); MAX_CLASSES],
            share_elapsed_ns: [0; MAX_CLASSES],
            share_target_packets: [0; MAX_CLASSES],
            demand_pps: [0; MAX_CLASSES],
            demand_is_known: false,
            period_start_ns: None,
            served: 0,
            late_drops: 0,
            quiet_ns: 0,
        })
    }

    /// Returns the classes.
    pub fn classes(&self) -> &Classes {
        &self.classes
    }

    /// Returns the key of the source hashes.
    pub fn source_key(&self) -> SourceKey {
        self.source_key
    }

    /// Returns the set of known sources.
    pub fn known_sources(&self) -> &KnownSources {
        &self.known_sources
    }

    /// True while limits are in force, so that packets may be refused.
    #[inline]
    pub fn is_limiting(&self) -> bool {
        self.limiting
    }

    /// Returns the limits in force.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Total admitted rate of all classes in packets per second; `None` while no limits are in
    /// force.
    pub fn total_pps(&self) -> Option<u64> {
        self.limiting.then_some(self.total_rate.pps)
    }

    /// Returns the packet counters of each class.
    pub fn counters(&self) -> &[ClassCounters] {
        &self.counters[..self.classes.len()]
    }

    /// Says that the owner passes samples to [`Admission::learn`] under limits too. Otherwise time
    /// under limits neither adds nor expires sources.
    pub fn with_samples_under_limits(self) -> Self {
        Self { samples_under_limits: true, ..self }
    }

    /// True while the sources that send are the usual ones: without limits, and, with samples under
    /// limits, if the last period had no pressure and no refusal. Limits stay for a time, and a
    /// server beside a program that computes now and then comes under pressure again and again.
    #[inline]
    pub fn is_learning(&self) -> bool {
        !self.limiting || self.samples_under_limits && self.quiet_ns > 0
    }

    /// Records the source of a packet as a usual one, while [`Admission::is_learning`] returns true.
    #[inline]
    pub fn learn(&mut self, meta: &PacketMeta<'_>) {
        self.learn_source(meta.source_id());
    }

    /// Records a source, like [`Admission::learn`].
    #[inline]
    pub fn learn_source(&mut self, source: SourceId) {
        if self.is_learning() && source != SourceId::NONE {
            self.has_newly_known |= self.known_sources.learn(source);
        }
    }

    /// Keeps a source known if it is, while [`Admission::is_learning`] returns true.
    #[inline]
    pub fn refresh_source(&mut self, source: SourceId) {
        if self.is_learning() && source != SourceId::NONE {
            self.known_sources.refresh(source);
        }
    }

    /// Adds a source that has proven to own its address, for example by completing a handshake,
    /// to the known sources.
    pub fn confirm(&mut self, source: SourceId) {
        self.has_newly_known |= self.known_sources.confirm(source);
    }

    /// Returns true if a source became known since the last call. A device that drops packets itself
    /// then needs the new set of known sources.
    pub fn take_newly_known(&mut self) -> bool {
        std::mem::take(&mut self.has_newly_known)
    }

    /// Returns the class index of a packet.
    #[inline]
    pub fn classify(&self, meta: &PacketMeta<'_>) -> usize {
        self.classes.classify(meta, || self.known_sources.contains(meta.source_id()))
    }

    /// Decides about a packet and counts it.
    #[inline]
    pub fn decide(&mut self, now_ns: u64, meta: &PacketMeta<'_>) -> AdmissionVerdict {
        let class = self.classify(meta);
        let counters = &mut self.counters[class];
        let reason = match self.limiter.decide(now_ns, &self.limits, class, meta.source_id()) {
            LimitDecision::Admit { over_share } => {
                counters.admitted += 1;
                counters.admitted_over_share += u64::from(over_share);
                return AdmissionVerdict::Admit { class };
            }
            LimitDecision::Refuse(reason) => reason,
        };
        match reason {
            RefusalReason::ClassClosed => counters.refused_closed += 1,
            RefusalReason::ClassRate => counters.refused_rate += 1,
            RefusalReason::SourceShare => counters.refused_source_share += 1,
        }
        AdmissionVerdict::Refuse { class, reason }
    }

    /// Begins to count what a device drops itself: `totals` belong to earlier classes.
    pub fn begin_device_counters(&mut self, totals: &[ClassCounters]) {
        for (counters, total) in self.device_counters.iter_mut().zip(totals) {
            *counters = *total;
        }
    }

    /// Adds the counters of a device that drops packets itself. `totals` holds the counts of each
    /// class since the device was opened.
    pub fn on_device_counters(&mut self, totals: &[ClassCounters]) {
        for (class, now) in totals.iter().enumerate().take(self.classes.len()) {
            self.counters[class].add(&now.since(&self.device_counters[class]));
            self.device_counters[class] = *now;
        }
    }

    /// Updates the limits from the measurements since the last call. Returns true if the limits
    /// changed.
    ///
    /// The clock may jump: nothing is measured over an implausible period.
    pub fn on_period(&mut self, now_ns: u64, pressure: &Pressure) -> bool {
        self.served += pressure.served;
        self.late_drops += pressure.late_drops;
        let elapsed_ns = match self.period_start_ns {
            Some(start_ns) if now_ns >= start_ns => now_ns - start_ns,
            _ => u64::MAX,
        };
        if elapsed_ns < MIN_PERIOD_NS {
            return false;
        }
        self.period_start_ns = Some(now_ns);
        let pressure = Pressure {
            served: std::mem::take(&mut self.served),
            late_drops: std::mem::take(&mut self.late_drops),
            ..*pressure
        };
        let before = std::mem::replace(&mut self.period_start_counters, self.counters);
        let was_limiting = self.limiting;
        if elapsed_ns > MAX_PERIOD_NS {
            self.restart_shares();
            return false;
        }
        let old_limits = self.limits;
        if self.limiting {
            self.update_limits(&pressure, elapsed_ns, &before);
        } else if self.total_rate.is_overloaded(&pressure) || pressure.is_missing_packets() {
            self.begin_limiting(&pressure, elapsed_ns);
        } else {
            self.total_rate.on_calm(&pressure, elapsed_ns);
            self.known_sources.on_calm(elapsed_ns);
        }
        self.limits != old_limits || self.limiting != was_limiting
    }

    /// Begins to examine every packet. Limits bind at once only if packets were lost late.
    fn begin_limiting(&mut self, pressure: &Pressure, elapsed_ns: u64) {
        self.limiting = true;
        self.quiet_ns = 0;
        self.limited_ranks.restart();
        self.total_rate.start(pressure, elapsed_ns);
        self.contention = Contention::new();
        self.contention.on_late_losses(pressure.has_late_losses(), elapsed_ns);
        // Nothing is counted yet: every class may demand its guaranteed rate.
        for (demand_pps, policy) in self.demand_pps.iter_mut().zip(self.classes.policies()) {
            *demand_pps = policy.guaranteed_pps;
        }
        self.demand_is_known = false;
        self.restart_shares();
        self.set_limits();
    }

    fn update_limits(
        &mut self,
        pressure: &Pressure,
        elapsed_ns: u64,
        before: &PerClass<ClassCounters>,
    ) {
        let period = self.count_period(pressure, elapsed_ns, before);
        let quiet = period.refused == 0
            && !self.total_rate.is_overloaded(pressure)
            && !pressure.is_missing_packets();
        self.quiet_ns = if quiet { self.quiet_ns.saturating_add(elapsed_ns) } else { 0 };
        if quiet && self.samples_under_limits {
            self.known_sources.on_calm(elapsed_ns);
        }
        if self.quiet_ns >= self.calm_after_ns {
            self.limiting = false;
            self.limits = Limits::UNLIMITED;
            return;
        }
        self.contention.on_late_losses(pressure.has_late_losses(), elapsed_ns);
        if self.limits.total.is_none() {
            self.total_rate.follow(pressure, elapsed_ns);
        } else {
            self.adjust_total(pressure, elapsed_ns, &period);
        }
        self.set_limits();
    }

    /// Counts the packets of a period, and updates the demand of each class.
    fn count_period(
        &mut self,
        pressure: &Pressure,
        elapsed_ns: u64,
        before: &PerClass<ClassCounters>,
    ) -> PeriodCounts {
        let mut counts = PeriodCounts::default();
        // Packets lost unexamined are spread evenly over all classes.
        let received_permille = 1000 - u64::from(pressure.rx_missed_permille.min(950));
        for (class, policy) in self.classes.policies().iter().enumerate() {
            let period = self.counters[class].since(&before[class]);
            counts.refused += period.refused();
            if !policy.exempt {
                counts.admitted += period.admitted;
                if self.limited_ranks.contains(policy.rank) {
                    counts.admitted_limited += period.admitted;
                }
                if policy.ceiling_pps == u64::MAX {
                    counts.refused_by_total += period.refused();
                }
                let arrived = period.arrived();
                self.contention.on_arrivals(class, arrived, received_permille, elapsed_ns);
            }
            // Rising demand has more weight than falling demand. Packets arrive in bursts, so a
            // single period says little.
            let received_pps = rate_pps(period.arrived(), elapsed_ns);
            let now_pps = scale(received_pps, 1000, received_permille);
            let demand_pps = &mut self.demand_pps[class];
            let old_weight = match now_pps > *demand_pps {
                true if !self.demand_is_known => 0,
                true => 3,
                false => 15,
            };
            *demand_pps = (*demand_pps * old_weight + now_pps) / (old_weight + 1);
        }
        self.demand_is_known = true;
        counts
    }

    /// Adjusts the total, the range of limited ranks and the shares of sources.
    fn adjust_total(&mut self, pressure: &Pressure, elapsed_ns: u64, period: &PeriodCounts) {
        let preferred_pps = preferred_demand(self.classes.policies(), &self.demand_pps);
        let limited = period.refused_by_total > 0;
        self.total_rate.adjust(pressure, elapsed_ns, limited, preferred_pps);
        let exhausted = period.admitted_limited <= period.admitted / 8;
        let ranks = self.classes.policies().iter().filter(|policy| !policy.exempt);
        let ranks = ranks.map(|policy| policy.rank);
        if self.limited_ranks.on_period(pressure.has_losses(), exhausted, elapsed_ns, ranks) {
            self.total_rate.reset_to_capacity(pressure, elapsed_ns);
        }
        for class in 0..self.classes.len() {
            self.update_source_limit(class, elapsed_ns);
        }
    }

    fn restart_shares(&mut self) {
        self.share_start_counters = self.counters;
        self.share_elapsed_ns = [0; MAX_CLASSES];
        self.share_target_packets = [0; MAX_CLASSES];
    }

    /// Sets the limits of the next period. While nobody gains from a refusal, only ceilings hold.
    fn set_limits(&mut self) {
        if !self.contention.calls_for_limits() {
            self.limits = Limits::UNLIMITED;
            for (limit, policy) in self.limits.classes.iter_mut().zip(self.classes.policies()) {
                limit.class = ceiling_limit(policy);
            }
            return;
        }
        // Guarantees leave a minimum rate to the other classes, however little can be served.
        // Without it a recovery could not be detected.
        let used = self.classes.policies().iter().zip(&self.demand_pps);
        let guaranteed_pps: u64 = used
            .filter(|(policy, _)| !policy.exempt)
            .map(|(policy, &demand_pps)| demand_pps.min(policy.guaranteed_pps))
            .fold(0, u64::saturating_add);
        let total_pps = self.total_rate.pps.max(guaranteed_pps.saturating_add(MIN_TOTAL_PPS));
        let rates = allocate_rates(total_pps, self.classes.policies(), &self.demand_pps);
        // What the classes outside of the total take is no part of it.
        let mut shared_pps = total_pps;
        for (class, policy) in self.classes.policies().iter().enumerate() {
            let rate_pps = rates[class];
            let satisfied = self.demand_pps[class] <= rate_pps / 8 * 7;
            let limit = &mut self.limits.classes[class];
            let shares_total =
                self.limited_ranks.contains(policy.rank) && policy.ceiling_pps == u64::MAX;
            limit.class = match rate_pps {
                _ if policy.exempt => RateLimit::Unlimited,
                _ if !self.limited_ranks.contains(policy.rank) => ceiling_limit(policy),
                0 => RateLimit::Closed,
                _ if !shares_total && satisfied => {
                    RateLimit::Limited(PacketRate::with_long_burst(rate_pps))
                }
                _ if !shares_total => RateLimit::Limited(PacketRate::from_pps(rate_pps)),
                _ if satisfied => RateLimit::Shared(PacketRate::with_long_burst(rate_pps)),
                _ => RateLimit::Shared(PacketRate::from_pps(rate_pps)),
            };
            limit.source = match self.source_pps[class] {
                Some(source_pps) if !satisfied => {
                    RateLimit::Limited(PacketRate::from_pps(source_pps))
                }
                _ => RateLimit::Unlimited,
            };
            if !shares_total && !policy.exempt {
                let taken_pps = self.demand_pps[class].min(policy.ceiling_pps);
                shared_pps = shared_pps.saturating_sub(taken_pps);
            }
        }
        self.limits.total = Some(PacketRate::from_pps(shared_pps.max(MIN_TOTAL_PPS)));
    }

    /// Updates the source limit of a class once enough packets were measured.
    fn update_source_limit(&mut self, class: usize, elapsed_ns: u64) {
        let (RateLimit::Limited(rate) | RateLimit::Shared(rate)) = self.limits.classes[class].class
        else {
            return;
        };
        let class_pps = rate.rate_pps();
        self.share_elapsed_ns[class] += elapsed_ns;
        self.share_target_packets[class] += packets_in(class_pps, elapsed_ns);
        let target = self.share_target_packets[class];
        if target < MIN_SHARE_PACKETS && self.share_elapsed_ns[class] < MAX_SHARE_PERIOD_NS {
            return;
        }
        let period = self.counters[class].since(&self.share_start_counters[class]);
        self.share_start_counters[class] = self.counters[class];
        (self.share_elapsed_ns[class], self.share_target_packets[class]) = (0, 0);
        let now_pps = self.source_pps[class].unwrap_or(class_pps);
        self.source_pps[class] = next_source_rate(class_pps, now_pps, target.max(1), &period);
    }
}

/// Packets of all classes in a period.
#[derive(Clone, Copy, Debug, Default)]
struct PeriodCounts {
    refused: u64,
    /// Packets refused because the total was used up; not those refused by a ceiling.
    refused_by_total: u64,
    /// Packets admitted, exempt classes left out.
    admitted: u64,
    /// Packets admitted in the limited ranks.
    admitted_limited: u64,
}

/// Limit of a class that is bounded by its ceiling alone.
fn ceiling_limit(policy: &ClassPolicy) -> RateLimit {
    match policy.ceiling_pps {
        _ if policy.exempt => RateLimit::Unlimited,
        u64::MAX => RateLimit::Unlimited,
        ceiling_pps => RateLimit::Limited(PacketRate::with_long_burst(ceiling_pps)),
    }
}

/// Returns the share of a source at which the packets within the shares reach the rate of the
/// class, which allowed `target` packets in the period. `None` is no share.
///
/// If all sources send more than their share, the packets within the shares are proportional to it,
/// so one step reaches the target. What the shares leave unused goes to sources above their share.
/// The share has a minimum: below it all buckets together would admit less than the rate of the
/// class. With more sources than buckets, the class's rate is the only limit.
fn next_source_rate(
    class_pps: u64,
    now_pps: u64,
    target: u64,
    period: &ClassCounters,
) -> Option<u64> {
    let in_share = period.admitted.saturating_sub(period.admitted_over_share);
    let scaled_pps = if period.refused() == 0 {
        return None;
    } else if period.refused_rate > target / 32 {
        scale(now_pps, target, in_share + period.refused_rate)
    } else if in_share < target - target / 32 {
        let max_pps = now_pps.saturating_mul(2);
        (scale(now_pps, target, in_share) + 1).min(max_pps)
    } else {
        now_pps
    };
    let min_pps = class_pps.div_ceil(SOURCE_BUCKETS_PER_ROW as u64 / 2);
    Some(scaled_pps.clamp(min_pps, class_pps.max(min_pps)))
}

fn scale(pps: u64, to: u64, from: u64) -> u64 {
    let scaled = u128::from(pps) * u128::from(to) / u128::from(from.max(1));
    u64::try_from(scaled).unwrap_or(u64::MAX / 2)
}

fn packets_in(pps: u64, elapsed_ns: u64) -> u64 {
    let packets = u128::from(pps) * u128::from(elapsed_ns) / 1_000_000_000;
    u64::try_from(packets).unwrap_or(u64::MAX / 2)
}

#[cfg(test)]
mod tests {
    use super::super::PacketKind;
    use super::*;
    use std::net::IpAddr;
    use tidegate_wire::Protocol;

    /// True if a client is known that has asked for 3 s a server that is overloaded in
    /// `periods_under_pressure` of 20 periods.
    fn is_known_after_3_s(client: IpAddr, periods_under_pressure: u64) -> bool {
        let admission = Admission::new(&Config::default(), [5; 16]).unwrap();
        let mut admission = admission.with_samples_under_limits();
        let meta = PacketMeta {
            kind: PacketKind::Ip(Protocol::UDP),
            source: Some(client),
            destination_port: Some(53),
            packet_bytes: 60,
            payload: &[],
        };
        for period in 1..=600 {
            for _ in 0..10 {
                admission.learn(&meta);
                admission.decide(period * Config::PERIOD_NS, &meta);
            }
            let is_under_pressure = period % 20 < periods_under_pressure;
            let backlog_percent = if is_under_pressure { 100 } else { 0 };
            let pressure = Pressure { served: 10, backlog_percent, ..Pressure::default() };
            admission.on_period(period * Config::PERIOD_NS, &pressure);
        }
        assert_eq!(admission.is_limiting(), periods_under_pressure > 0);
        assert_eq!(
            admission.take_newly_known(),
            admission.known_sources.contains(meta.source_id())
        );
        admission.known_sources.contains(meta.source_id())
    }

    #[test]
    fn clients_become_known_between_the_pauses_of_a_server() {
        for client in ["192.0.2.1", "2001:db8::1"] {
            let client = client.parse().unwrap();
            assert!(is_known_after_3_s(client, 0));
            assert!(is_known_after_3_s(client, 4), "a program computes a fifth of the time");
            assert!(!is_known_after_3_s(client, 20), "a flood");
        }
    }

    /// A guard in front of the kernel sees no samples while it limits.
    #[test]
    fn time_under_limits_without_samples_expires_nobody() {
        let config = Config { known_lifetime_s: 1, ..Config::default() };
        let mut admission = Admission::new(&config, [5; 16]).unwrap();
        let source = SourceId::from_address("192.0.2.1".parse().unwrap());
        admission.confirm(source);
        for period in 1..=1_000 {
            let backlog_percent = if period % 20 < 4 { 100 } else { 0 };
            let pressure = Pressure { served: 10, backlog_percent, ..Pressure::default() };
            admission.on_period(period * Config::PERIOD_NS, &pressure);
        }
        assert!(admission.is_limiting() && admission.known_sources.contains(source));
    }
}
