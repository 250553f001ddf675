//! The maps of `bpf/admission.h`, and their layouts.

use std::io;

use aya::Ebpf;
use aya::maps::{Array, MapData, MapError, PerCpuArray};

use crate::admission::{CLASSES_MAX, ClassCounts, ClassLimit, Pace, Program, RULES_MAX};

/// `KNOWN_WORDS` of the program.
const KNOWN_WORDS: usize = 16_384;
/// Words of a `struct rule`, and of `struct rules` before the first.
const RULE_WORDS: usize = 7;
const RULES_HEAD_WORDS: usize = 5;

/// `struct rules`, `struct limits`, `struct known` and `struct counts`.
type RulesValue = [u64; RULES_HEAD_WORDS + RULE_WORDS * RULES_MAX];
type LimitsValue = [u64; 6 * CLASSES_MAX];
type KnownValue = [u64; KNOWN_WORDS];
type CountsValue = [u64; 4 * CLASSES_MAX];

/// The maps of admission in one program.
pub(super) struct AdmissionMaps {
    rules: Array<MapData, RulesValue>,
    limits: Array<MapData, LimitsValue>,
    known: Array<MapData, KnownValue>,
    counts: PerCpuArray<MapData, CountsValue>,
    program: Option<Program>,
    known_bits: u64,
}

/// A map of a loaded program, by its name.
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
            program: None,
            known_bits: 64,
        })
    }

    pub(super) fn set_program(&mut self, program: &Program) -> io::Result<()> {
        if program.rules.len() > RULES_MAX {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("{} rules are too many: at most {RULES_MAX}", program.rules.len()),
            ));
        }
        let value = rules_value(program, self.known_bits);
        self.rules.set(0, value, 0).map_err(io::Error::other)?;
        self.program = Some(program.clone());
        Ok(())
    }

    pub(super) fn set_known(&mut self, words: &[u64]) -> io::Result<()> {
        if words.len() > KNOWN_WORDS || !words.len().is_power_of_two() {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!(
                    "a filter of {} words: a power of two up to {KNOWN_WORDS} is possible",
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
            && let Some(program) = &self.program
        {
            self.rules.set(0, rules_value(program, bits), 0).map_err(io::Error::other)?;
        }
        Ok(())
    }

    pub(super) fn set_limits(&mut self, limits: &[ClassLimit]) -> io::Result<()> {
        self.limits.set(0, limits_value(limits), 0).map_err(io::Error::other)
    }

    pub(super) fn counts(&self) -> io::Result<[ClassCounts; CLASSES_MAX]> {
        let mut counts = [ClassCounts::default(); CLASSES_MAX];
        let values = self.counts.get(&0, 0).map_err(io::Error::other)?;
        for value in values.iter() {
            for (to, from) in counts.iter_mut().zip(value.chunks_exact(4)) {
                to.admitted += from[0];
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

fn rules_value(program: &Program, known_bits: u64) -> RulesValue {
    let asks_known = program.rules.iter().any(|rule| rule.known != 0);
    let mut value = [0; RULES_HEAD_WORDS + RULE_WORDS * RULES_MAX];
    let (head, rules) = value.split_at_mut(RULES_HEAD_WORDS);
    head.copy_from_slice(&[
        program.key_start,
        program.key_factor,
        known_bits - 1,
        pair(program.rules.len() as u32, asks_known.into()),
        program.rest_class.into(),
    ]);
    for (to, rule) in rules.chunks_exact_mut(RULE_WORDS).zip(&program.rules) {
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

fn limits_value(limits: &[ClassLimit]) -> LimitsValue {
    let mut value = [0; 6 * CLASSES_MAX];
    for (to, limit) in value.chunks_exact_mut(6).zip(limits) {
        to[..3].copy_from_slice(&pace_words(limit.class));
        to[3..].copy_from_slice(&pace_words(limit.source));
    }
    value
}

fn pace_words(pace: Pace) -> [u64; 3] {
    match pace {
        Pace::Open => [0, 0, 0],
        Pace::Limited { interval_ns, burst_ns } => [interval_ns, burst_ns, 1],
        Pace::Closed => [0, 0, 2],
    }
}
