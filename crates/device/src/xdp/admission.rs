//! The maps of `bpf/admission.h`, and their layouts.

use std::io;

use aya::Ebpf;
use aya::maps::{Array, MapData, MapError, PerCpuArray};

use crate::admission::{ClassCounts, Classifier, Limits, MAX_CLASSES, MAX_RULES, RateLimit};

/// `KNOWN_WORDS` of the BPF program, in 64-bit words.
const KNOWN_WORDS: usize = 16_384;
/// 64-bit words of a `struct rule`, and of `struct rules` before its first rule.
const RULE_WORDS: usize = 7;
const RULES_HEADER_WORDS: usize = 5;
/// 64-bit words of a `struct pace`.
const RATE_WORDS: usize = 3;
/// `VERDICTS` of the BPF program.
const VERDICTS: usize = 5;

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

impl AdmissionMaps {
    pub(super) fn take(ebpf: &mut Ebpf) -> Result<Self, MapError> {
        Ok(Self {
            rules: take_map(ebpf, "class_rules")?,
            limits: take_map(ebpf, "class_limits")?,
            known: take_map(ebpf, "known_sources")?,
            counts: take_map(ebpf, "class_counts")?,
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
    let uses_known = classifier.rules.iter().any(|rule| rule.known != 0);
    let mut value = [0; RULES_HEADER_WORDS + RULE_WORDS * MAX_RULES];
    let (header, rules) = value.split_at_mut(RULES_HEADER_WORDS);
    header.copy_from_slice(&[
        classifier.hash_seed,
        classifier.hash_multiplier,
        known_bits - 1,
        pair(classifier.rules.len() as u32, uses_known.into()),
        classifier.default_class.into(),
    ]);
    for (to, rule) in rules.chunks_exact_mut(RULE_WORDS).zip(&classifier.rules) {
        let kind =
            u32::from(rule.protocol) | u32::from(rule.class) << 16 | u32::from(rule.family) << 24;
        to.copy_from_slice(&[
            (rule.source >> 64) as u64,
            rule.source as u64,
            (rule.source_mask >> 64) as u64,
            rule.source_mask as u64,
            pair(rule.port_low, rule.port_high),
            pair(rule.size_low, rule.size_high),
            pair(kind, rule.known.into()),
        ]);
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
