//! Programs that include `bpf/admission.h`: their maps, and the layouts of these.

use std::io;

use aya::maps::{Array, MapData, MapError, PerCpuArray};
use aya::programs::{ProgramError, Xdp};
use aya::{Ebpf, EbpfError};
use rustix::io::Errno;

use crate::admission::{
    ClassCounts, Classifier, Limits, MAX_CLASSES, MAX_RULES, PAYLOAD_WINDOW, RateLimit,
};
use crate::bpf;

/// `KNOWN_WORDS` of the BPF program, in 64-bit words.
const KNOWN_WORDS: usize = 16_384;
/// 64-bit words of a `struct rule`, and of `struct rules` before its first rule.
const RULE_WORDS: usize = 8 + 2 * PAYLOAD_WORDS;
const PAYLOAD_WORDS: usize = PAYLOAD_WINDOW / 8;
const RULES_HEADER_WORDS: usize = 5;
/// 64-bit words of a `struct pace`.
const RATE_WORDS: usize = 3;
/// `VERDICTS` of the BPF program.
const VERDICTS: usize = 5;

/// `ASKS_KNOWN` and `ASKS_PAYLOAD` of the BPF program.
const ASKS_KNOWN: u32 = 1;
const ASKS_PAYLOAD: u32 = 2;

/// `struct rules`, `struct limits`, `struct known` and `struct counts`.
type RulesValue = [u64; RULES_HEADER_WORDS + RULE_WORDS * MAX_RULES];
type LimitsValue = [u64; RATE_WORDS + 2 * RATE_WORDS * MAX_CLASSES];
type KnownValue = [u64; KNOWN_WORDS];
type CountsValue = [u64; VERDICTS * MAX_CLASSES];

/// Admission maps of one BPF program.
pub(super) struct AdmissionMaps {
    rules: Array<MapData, RulesValue>,
    limits: Array<MapData, LimitsValue>,
    known: Array<MapData, KnownValue>,
    counts: PerCpuArray<MapData, CountsValue>,
    reads_payloads: bool,
    classifier: Option<Classifier>,
    known_bits: u64,
}

/// Takes the map `name` out of a loaded BPF object.
pub(super) fn take_map<M>(ebpf: &mut Ebpf, name: &str) -> Result<M, MapError>
where
    M: TryFrom<aya::maps::Map, Error = MapError>,
{
    let map = ebpf.take_map(name).ok_or_else(|| MapError::InvalidName { name: name.into() })?;
    map.try_into()
}

/// Loads an XDP program that decides on admission, with its maps. It reads payloads where the kernel
/// lets it (Linux 5.18).
pub(super) fn load_program(
    object: &[u8],
    program: &str,
) -> Result<(Ebpf, AdmissionMaps), EbpfError> {
    // An older kernel does not know the helper.
    let unknown = Some(Errno::INVAL.raw_os_error());
    match load_reading(object, program, true) {
        Err(error) if bpf::system_error(&error) == unknown => load_reading(object, program, false),
        loaded => loaded,
    }
}

fn load_reading(
    object: &[u8],
    program: &str,
    reads_payloads: bool,
) -> Result<(Ebpf, AdmissionMaps), EbpfError> {
    let mut ebpf = bpf::load(object, &[("reads_payloads", reads_payloads.into())])?;
    let program: &mut Xdp =
        ebpf.program_mut(program).ok_or(ProgramError::UnexpectedProgramType)?.try_into()?;
    program.load()?;
    let maps = AdmissionMaps::take(&mut ebpf, reads_payloads)?;
    Ok((ebpf, maps))
}

impl AdmissionMaps {
    fn take(ebpf: &mut Ebpf, reads_payloads: bool) -> Result<Self, MapError> {
        Ok(Self {
            rules: take_map(ebpf, "class_rules")?,
            limits: take_map(ebpf, "class_limits")?,
            known: take_map(ebpf, "known_sources")?,
            counts: take_map(ebpf, "class_counts")?,
            reads_payloads,
            classifier: None,
            known_bits: 64,
        })
    }

    pub(super) fn set_classifier(&mut self, classifier: &Classifier) -> io::Result<()> {
        if classifier.rules.len() > MAX_RULES {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("{} rules are too many: at most {MAX_RULES}", classifier.rules.len()),
            ));
        }
        if !self.reads_payloads && classifier.rules.iter().any(|rule| rule.payload_end != 0) {
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                "rules with payload need Linux 5.18: leave them out on this kernel",
            ));
        }
        let value = rules_value(classifier, self.known_bits);
        self.rules.set(0, value, 0).map_err(io::Error::other)?;
        self.classifier = Some(classifier.clone());
        Ok(())
    }

    pub(super) fn set_known_sources(&mut self, words: &[u64]) -> io::Result<()> {
        if words.len() > KNOWN_WORDS || !words.len().is_power_of_two() {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!(
                    "a filter of {} words is invalid: use a power of two up to {KNOWN_WORDS}",
                    words.len()
                ),
            ));
        }
        let mut value = Box::new([0; KNOWN_WORDS]);
        value[..words.len()].copy_from_slice(words);
        let value: &KnownValue = &value;
        self.known.set(0, value, 0).map_err(io::Error::other)?;
        let bits = words.len() as u64 * 64;
        if std::mem::replace(&mut self.known_bits, bits) != bits
            && let Some(classifier) = &self.classifier
        {
            self.rules.set(0, rules_value(classifier, bits), 0).map_err(io::Error::other)?;
        }
        Ok(())
    }

    pub(super) fn set_limits(&mut self, limits: &Limits) -> io::Result<()> {
        self.limits.set(0, limits_value(limits), 0).map_err(io::Error::other)
    }

    pub(super) fn counts(&self) -> io::Result<[ClassCounts; MAX_CLASSES]> {
        let mut counts = [ClassCounts::default(); MAX_CLASSES];
        let values = self.counts.get(&0, 0).map_err(io::Error::other)?;
        for value in values.iter() {
            for (to, from) in counts.iter_mut().zip(value.chunks_exact(VERDICTS)) {
                to.admitted += from[0] + from[4];
                to.admitted_over_share += from[4];
                to.refused_closed += from[1];
                to.refused_rate += from[2];
                to.refused_source_share += from[3];
            }
        }
        Ok(counts)
    }
}

fn pair(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

fn rules_value(classifier: &Classifier, known_bits: u64) -> RulesValue {
    let asks = classifier.rules.iter().fold(0, |asks, rule| {
        let known = if rule.known == 0 { 0 } else { ASKS_KNOWN };
        let payload = if rule.payload_end == 0 { 0 } else { ASKS_PAYLOAD };
        asks | known | payload
    });
    let mut value = [0; RULES_HEADER_WORDS + RULE_WORDS * MAX_RULES];
    let (header, rules) = value.split_at_mut(RULES_HEADER_WORDS);
    header.copy_from_slice(&[
        classifier.hash_seed,
        classifier.hash_multiplier,
        known_bits - 1,
        pair(classifier.rules.len() as u32, asks),
        classifier.default_class.into(),
    ]);
    for (to, rule) in rules.chunks_exact_mut(RULE_WORDS).zip(&classifier.rules) {
        let kind =
            u32::from(rule.protocol) | u32::from(rule.class) << 16 | u32::from(rule.family) << 24;
        let (fixed, payload) = to.split_at_mut(RULE_WORDS - 1 - 2 * PAYLOAD_WORDS);
        fixed.copy_from_slice(&[
            (rule.source >> 64) as u64,
            rule.source as u64,
            (rule.source_mask >> 64) as u64,
            rule.source_mask as u64,
            pair(rule.port_low, rule.port_high),
            pair(rule.size_low, rule.size_high),
            pair(kind, rule.known.into()),
        ]);
        let bytes = rule.payload.as_chunks().0.iter().chain(rule.payload_mask.as_chunks().0);
        let words = bytes.map(|bytes| u64::from_ne_bytes(*bytes));
        for (to, word) in payload.iter_mut().zip(words.chain([rule.payload_end.into()])) {
            *to = word;
        }
    }
    value
}

fn limits_value(limits: &Limits) -> LimitsValue {
    let mut value = [0; RATE_WORDS + 2 * RATE_WORDS * MAX_CLASSES];
    let classes = limits.classes.iter().flat_map(|limit| [limit.class, limit.source]);
    let rates = std::iter::once(limits.total).chain(classes);
    for (to, rate) in value.chunks_exact_mut(RATE_WORDS).zip(rates) {
        to.copy_from_slice(&rate_limit_words(rate));
    }
    value
}

fn rate_limit_words(limit: RateLimit) -> [u64; RATE_WORDS] {
    match limit {
        RateLimit::Unlimited => [0, 0, 0],
        RateLimit::Limited { interval_ns, burst_ns } => [interval_ns, burst_ns, 1],
        RateLimit::Closed => [0, 0, 2],
        RateLimit::Shared { interval_ns, burst_ns } => [interval_ns, burst_ns, 3],
    }
}
