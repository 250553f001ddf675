//! Admission control in front of a stack: the gate decides, and the device drops early if it
//! can.

use std::io;
use std::net::IpAddr;
use std::sync::Arc;

use tidegate_device::admission::{self as early, ClassCounts, EarlyDrop};
use tidegate_device::{Burst, Device, Medium};
use tidegate_gate::admission::{
    Admission, AdmissionVerdict, ClassCounters, ClassLimit, CompiledRule, Config, ConfigError,
    Limits, PacketMeta, PacketRate, Pressure, RateLimit, SourceId,
};
use tidegate_memory::{Arena, Frame};
use tidegate_wire::{DropCounters, DropReason};

use crate::pressure::{EarlyDropWork, SecondaryCores};
use crate::source_sample::{SampledSource, sample_sources};

/// Error of setting up admission control.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AdmissionError {
    /// The configuration is invalid.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The device rejects the class rules.
    #[error("the device rejects the admission classes: {0}")]
    Device(#[from] io::Error),
}

/// Admission control in front of a stack.
///
/// The engine receives through [`Admitter::receive`] and calls [`Admitter::on_period`] about
/// every [`Config::PERIOD_NS`].
#[derive(Debug)]
pub struct Admitter {
    admission: Admission,
    medium: Medium,
    /// True if the device itself drops refused frames.
    device_drops_early: bool,
    next_period_ns: u64,
    drops: DropCounters,
    /// Refused frames are kept in `refused` for a capture.
    keeps_refused: bool,
    refused: Vec<(Frame, DropReason)>,
    /// Secondary cores behind the same device.
    secondary_cores: Option<Arc<SecondaryCores>>,
}

/// Role of an engine in admission control.
#[derive(Debug)]
pub(crate) enum Role {
    /// Admission control is off.
    None,
    /// The engine decides which frames are admitted, also for its followers.
    Leader(Box<Admitter>),
    /// The engine reports its load, its confirmed peers and its sources to the leader.
    Follower { leader: Arc<SecondaryCores>, medium: Medium, next_report_ns: u64 },
}

impl Role {
    /// Admission control of the leader.
    pub(crate) fn admitter(&self) -> Option<&Admitter> {
        match self {
            Self::Leader(admitter) => Some(admitter),
            _ => None,
        }
    }
}

impl Admitter {
    /// Checks the configuration and installs the classes in the device. `seed` keys the hash
    /// functions and should be secret.
    ///
    /// # Errors
    /// See [`AdmissionError`].
    pub fn new(
        config: &Config,
        seed: [u8; 16],
        device: &mut dyn Device,
    ) -> Result<Self, AdmissionError> {
        let mut admission = Admission::new(config, seed)?.with_samples_under_limits();
        let medium = device.capabilities().medium;
        let device_drops_early = match device.early_drop() {
            Some(device) => {
                install_classes(&mut admission, device)?;
                true
            }
            None => false,
        };
        Ok(Self {
            admission,
            medium,
            device_drops_early,
            next_period_ns: 0,
            drops: DropCounters::new(),
            keeps_refused: false,
            refused: Vec::new(),
            secondary_cores: None,
        })
    }

    /// Keeps refused frames for [`Admitter::take_refused`], to be called after each
    /// [`Admitter::receive`], or frees them at once.
    pub(crate) fn keep_refused(&mut self, keep: bool) {
        self.keeps_refused = keep;
    }

    /// Refused frames that were kept. The caller frees them.
    pub(crate) fn take_refused(&mut self) -> std::vec::Drain<'_, (Frame, DropReason)> {
        self.refused.drain(..)
    }

    /// Attaches secondary cores: their reports count from now on, and their frames pass admission
    /// before they are forwarded.
    pub(crate) fn attach_secondary_cores(&mut self, secondary_cores: Arc<SecondaryCores>) {
        self.secondary_cores = Some(secondary_cores);
    }

    /// Secondary cores whose reports count, if any.
    pub(crate) fn secondary_cores(&self) -> Option<&Arc<SecondaryCores>> {
        self.secondary_cores.as_ref()
    }

    /// Receives as [`Device::receive`] and drops frames that are not admitted, unless the device has
    /// already done so. Without pressure, samples frames to learn sources of datagrams to ports for
    /// which `serves_udp_port` returns true.
    ///
    /// Returns the number of received frames; dropped frames count as received.
    ///
    /// # Errors
    /// As [`Device::receive`].
    // Not inlined: an engine without admission must not pay for this code.
    #[inline(never)]
    pub fn receive(
        &mut self,
        now_ns: u64,
        device: &mut dyn Device,
        arena: &mut Arena,
        burst: &mut Burst,
        quota: usize,
        serves_udp_port: &dyn Fn(u16) -> bool,
    ) -> io::Result<usize> {
        if self.secondary_cores.is_some()
            && let Some(sharded) = device.as_sharded()
        {
            let mut filter = |arena: &mut Arena, arrived: &mut Burst| {
                self.on_burst(now_ns, arena, arrived, serves_udp_port);
            };
            return sharded.receive_filtered(arena, burst, quota, &mut filter);
        }
        let received = device.receive(arena, burst, quota)?;
        self.on_burst(now_ns, arena, burst, serves_udp_port);
        Ok(received)
    }

    fn on_burst(
        &mut self,
        now_ns: u64,
        arena: &mut Arena,
        burst: &mut Burst,
        serves_udp_port: &dyn Fn(u16) -> bool,
    ) {
        if self.admission.is_learning() {
            let sampled = sample_sources(self.medium, arena, burst, serves_udp_port);
            sampled.for_each(|source| learn(&mut self.admission, source));
        }
        if self.device_drops_early || !self.admission.is_limiting() {
            return;
        }
        // One rotation of the queue keeps the order of the admitted frames.
        for _ in 0..burst.len() {
            let Some(frame) = burst.pop_front() else { break };
            let meta = PacketMeta::parse(self.medium, arena.bytes(&frame));
            match self.admission.decide(now_ns, &meta) {
                AdmissionVerdict::Admit { .. } => burst.push_back(frame),
                AdmissionVerdict::Refuse { reason, .. } => {
                    self.drops.count(reason.drop_reason());
                    if self.keeps_refused {
                        self.refused.push((frame, reason.drop_reason()));
                    } else {
                        arena.free(frame);
                    }
                }
            }
        }
    }

    /// True when [`Admitter::on_period`] should be called.
    #[inline]
    pub fn is_due(&self, now_ns: u64) -> bool {
        is_due(now_ns, self.next_period_ns)
    }

    /// Adjusts the admitted rates to the pressure since the last call.
    ///
    /// # Errors
    /// If the device rejects the new limits.
    pub fn on_period(
        &mut self,
        now_ns: u64,
        pressure: &Pressure,
        device: &mut dyn Device,
    ) -> io::Result<()> {
        self.next_period_ns = now_ns.saturating_add(Config::PERIOD_NS);
        let mut pressure = *pressure;
        if let Some(secondary_cores) = &self.secondary_cores {
            secondary_cores.add_to(&mut pressure);
            for peer in secondary_cores.take_confirmed() {
                self.admission.confirm(SourceId::from_address(peer));
            }
            for source in secondary_cores.take_sampled() {
                learn(&mut self.admission, source);
            }
        }
        match device.early_drop().filter(|_| self.device_drops_early) {
            Some(device) => update_limits(&mut self.admission, now_ns, &pressure, device)?,
            None => _ = self.admission.on_period(now_ns, &pressure),
        }
        if let Some(secondary_cores) = &self.secondary_cores {
            secondary_cores.set_learning(self.admission.is_learning());
        }
        Ok(())
    }

    /// Early-drop work of the device since it was opened; `None` if the device does not drop early.
    ///
    /// # Errors
    /// If the device cannot read its counters.
    pub(crate) fn early_drop_work(
        &self,
        device: &mut dyn Device,
    ) -> io::Result<Option<EarlyDropWork>> {
        let Some(device) = device.early_drop().filter(|_| self.device_drops_early) else {
            return Ok(None);
        };
        let examined = device.counts()?.iter().map(ClassCounts::arrived).sum();
        let times_emptied = device.times_emptied();
        Ok(Some(EarlyDropWork { examined, rx_missed: device.rx_missed()?, times_emptied }))
    }

    /// The admission controller.
    pub fn admission(&self) -> &Admission {
        &self.admission
    }

    /// Marks `peer` as a known source: it has proven that it receives packets sent to its address.
    pub(crate) fn confirm(&mut self, peer: IpAddr) {
        self.admission.confirm(SourceId::from_address(peer));
    }

    /// Frames dropped here. Frames dropped by the device are in the counters of the device.
    pub fn drops(&self) -> &DropCounters {
        &self.drops
    }
}

/// Makes the source of a served datagram known, and keeps any other known one known.
fn learn(admission: &mut Admission, sampled: SampledSource) {
    if sampled.is_served {
        admission.learn_source(sampled.source);
    } else {
        admission.refresh_source(sampled.source);
    }
}

/// True once per [`Config::PERIOD_NS`], and when the clock jumped back by more than that.
#[inline]
pub(crate) fn is_due(now_ns: u64, due_ns: u64) -> bool {
    now_ns >= due_ns || due_ns - now_ns > Config::PERIOD_NS
}

/// Installs the classes of `admission` in a device that drops early, instead of earlier ones.
///
/// # Errors
/// If the device rejects the classes.
pub fn install_classes(admission: &mut Admission, device: &mut dyn EarlyDrop) -> io::Result<()> {
    device.set_limits(None)?;
    admission.begin_device_counters(&class_counters(device)?);
    let classes = admission.classes();
    let rules: Vec<_> = classes.rules().iter().map(device_rule).collect();
    let key = admission.source_key();
    device.set_classifier(&early::Classifier {
        default_class: classes.default_class() as u8,
        rules,
        hash_seed: key.hash_seed,
        hash_multiplier: key.hash_multiplier,
    })
}

/// Counters of the device since it was opened, by class.
fn class_counters(device: &mut dyn EarlyDrop) -> io::Result<[ClassCounters; early::MAX_CLASSES]> {
    Ok(device.counts()?.map(|counts| ClassCounters {
        admitted: counts.admitted,
        admitted_over_share: counts.admitted_over_share,
        refused_closed: counts.refused_closed,
        refused_rate: counts.refused_rate,
        refused_source_share: counts.refused_source_share,
    }))
}

/// Reads the counters of the device, adjusts the limits to the pressure, and installs changed
/// limits in the device.
///
/// # Errors
/// If the device rejects the limits or cannot read its counters.
pub fn update_limits(
    admission: &mut Admission,
    now_ns: u64,
    pressure: &Pressure,
    device: &mut dyn EarlyDrop,
) -> io::Result<()> {
    let was_limiting = admission.is_limiting();
    if was_limiting {
        admission.on_device_counters(&class_counters(device)?);
    }
    let changed = admission.on_period(now_ns, pressure);
    let starts_limiting = admission.is_limiting() && !was_limiting;
    // Without limits the device does not need the set of known sources.
    if admission.is_limiting() && (admission.take_newly_known() || starts_limiting) {
        let words: Vec<_> = admission.known_sources().words().collect();
        device.set_known_sources(&words)?;
    }
    if !changed {
        return Ok(());
    }
    if !admission.is_limiting() {
        return device.set_limits(None);
    }
    device.set_limits(Some(&device_limits(admission.limits())))
}

fn device_rule(rule: &CompiledRule) -> early::ClassRule {
    early::ClassRule {
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
        payload: rule.payload.bytes,
        payload_mask: rule.payload.mask,
        payload_end: rule.payload.end,
    }
}

/// Converts limits to those of a device that drops early.
pub fn device_limits(limits: &Limits) -> early::Limits {
    let total = limits.total.map_or(RateLimit::Unlimited, RateLimit::Limited);
    early::Limits { total: device_rate(total), classes: limits.classes.map(device_limit) }
}

fn device_limit(limit: ClassLimit) -> early::ClassLimit {
    early::ClassLimit { class: device_rate(limit.class), source: device_rate(limit.source) }
}

fn device_rate(rate: RateLimit) -> early::RateLimit {
    match rate {
        RateLimit::Unlimited => early::RateLimit::Unlimited,
        RateLimit::Closed => early::RateLimit::Closed,
        RateLimit::Limited(PacketRate { interval_ns, burst_ns }) => {
            early::RateLimit::Limited { interval_ns, burst_ns }
        }
        RateLimit::Shared(PacketRate { interval_ns, burst_ns }) => {
            early::RateLimit::Shared { interval_ns, burst_ns }
        }
    }
}

#[cfg(test)]
mod tests {
    use tidegate_memory::ArenaConfig;

    use super::*;

    /// Device that records the configuration it receives.
    #[derive(Default)]
    struct RecordingDevice {
        known: Vec<Vec<u64>>,
        limiting: bool,
    }

    impl EarlyDrop for RecordingDevice {
        fn set_classifier(&mut self, _: &early::Classifier) -> io::Result<()> {
            Ok(())
        }

        fn set_known_sources(&mut self, words: &[u64]) -> io::Result<()> {
            self.known.push(words.to_vec());
            Ok(())
        }

        fn set_limits(&mut self, limits: Option<&early::Limits>) -> io::Result<()> {
            self.limiting = limits.is_some();
            Ok(())
        }

        fn counts(&mut self) -> io::Result<[ClassCounts; early::MAX_CLASSES]> {
            Ok(Default::default())
        }
    }

    /// Packet of IPv4 from 192.0.2.`source` to a port.
    fn packet(protocol: u8, source: u8, port: u16) -> Vec<u8> {
        let mut packet = vec![0; 40];
        packet[0] = 0x45;
        packet[3] = 40;
        packet[8] = 64;
        packet[9] = protocol;
        packet[12..16].copy_from_slice(&[192, 0, 2, source]);
        packet[22..24].copy_from_slice(&port.to_be_bytes());
        packet
    }

    /// A flood that is too small for limits must not be among the known sources later.
    #[test]
    fn only_served_datagrams_make_a_source_known() {
        const TCP: u8 = 6;
        const UDP: u8 = 17;
        let mut admitter = Admitter {
            admission: Admission::new(&Config::default(), [7; 16]).unwrap(),
            medium: Medium::Ip,
            device_drops_early: true,
            next_period_ns: 0,
            drops: DropCounters::new(),
            secondary_cores: None,
            keeps_refused: false,
            refused: Vec::new(),
        };
        let config = ArenaConfig { frames: 1, hugepages: false, ..ArenaConfig::default() };
        let (mut arena, mut burst) = (Arena::new(config).unwrap(), Burst::new());
        let source = |n| SourceId::from_address([192, 0, 2, n].into());
        let mut now_ns = 0;
        for _ in 0..3 {
            for (protocol, source, port) in [(UDP, 1, 53), (UDP, 2, 54), (TCP, 3, 53)] {
                let frame = arena.alloc_from(&packet(protocol, source, port)).unwrap();
                burst.push_back(frame);
                admitter.on_burst(now_ns, &mut arena, &mut burst, &|port| port == 53);
                arena.free(burst.pop_front().unwrap());
            }
            for _ in 0..201 {
                now_ns += Config::PERIOD_NS;
                admitter.admission.on_period(now_ns, &Pressure::default());
            }
        }
        let known = [1, 2, 3].map(|n| admitter.admission.known_sources().contains(source(n)));
        assert_eq!(known, [true, false, false]);
        admitter.confirm([192, 0, 2, 3].into());
        assert!(admitter.admission.known_sources().contains(source(3)), "by its handshake");
    }

    #[test]
    fn sets_known_sources_when_limiting_starts_and_on_each_confirmation() {
        let mut admission = Admission::new(&Config::default(), [7; 16]).unwrap();
        let (mut device, mut now_ns) = (RecordingDevice::default(), 0);
        let stuck = Pressure { late_drops: 1, level_percent: 100, ..Pressure::default() };
        let mut period = |admission: &mut Admission, device: &mut RecordingDevice| {
            now_ns += Config::PERIOD_NS;
            update_limits(admission, now_ns, &stuck, device).unwrap();
        };
        admission.confirm(SourceId::from_address([192, 0, 2, 1].into()));
        while !device.limiting {
            assert_eq!(device.known.len(), 0, "without limits the device needs no known sources");
            period(&mut admission, &mut device);
        }
        assert_eq!(device.known.len(), 1);
        period(&mut admission, &mut device);
        assert_eq!(device.known.len(), 1, "no new known source");
        admission.confirm(SourceId::from_address([192, 0, 2, 2].into()));
        admission.confirm(SourceId::from_address([192, 0, 2, 1].into()));
        period(&mut admission, &mut device);
        assert_eq!(device.known.len(), 2);
        assert_eq!(device.known[1], admission.known_sources().words().collect::<Vec<_>>());
        admission.confirm(SourceId::from_address([192, 0, 2, 2].into()));
        period(&mut admission, &mut device);
        assert_eq!(device.known.len(), 2, "the source is already known");
    }
}
