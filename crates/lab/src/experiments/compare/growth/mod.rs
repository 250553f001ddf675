//! `lab growth`: costs that are not to grow with what a server holds: connections, attached programs,
//! sockets.

mod active;
mod programs;

use std::fmt;
use std::str::FromStr;

use serde_json::{Value, json};

use self::programs::{IN_FLIGHT, ProgramsTestbed};
use super::echo_cost::{self, EchoCostConfig, Traffic};
use crate::error::LabError;
use crate::report::experiment::Experiment;
use crate::report::progress::Progress;
use crate::stats::{median, round_to_thousandths, spread_percent};
use crate::testbed::cpu::PinGuard;
use crate::testbed::tcp::{TcpTestbed, choose_cores};

/// Connections that send requests.
const ACTIVE_CONNECTIONS: usize = 10_000;
const MILLION: usize = 1_000_000;
/// Attached programs that share a load.
const MANY_PROGRAMS: usize = 64;

/// Part of the experiment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GrowthPart {
    /// Active connections among many.
    Connections,
    /// Attached programs.
    Programs,
    /// Lookups among many sockets.
    Lookup,
}

impl GrowthPart {
    /// All parts.
    pub const ALL: [Self; 3] = [Self::Connections, Self::Programs, Self::Lookup];

    /// Name on the command line and in rows.
    pub fn name(self) -> &'static str {
        match self {
            Self::Connections => "connections",
            Self::Programs => "programs",
            Self::Lookup => "lookup",
        }
    }

    /// Numbers of which the last is compared with the first.
    fn counts(self, config: &GrowthConfig) -> [usize; 2] {
        match self {
            Self::Connections => [config.active_connections, config.connections],
            Self::Programs => [1, MANY_PROGRAMS],
            Self::Lookup => [1, config.sockets],
        }
    }

    /// Measurements, and families of addresses that are measured apart.
    fn steps(self, config: &GrowthConfig) -> usize {
        // Callgrind counts the same every time.
        if self == Self::Lookup { 2 * 2 } else { 2 * config.repeats }
    }
}

impl FromStr for GrowthPart {
    type Err = LabError;

    fn from_str(text: &str) -> Result<Self, LabError> {
        Self::ALL.into_iter().find(|part| part.name() == text).ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            LabError::Config(format!("unknown part {text:?}; available: {names}"))
        })
    }
}

/// Configuration of the experiment.
#[derive(Clone, Debug)]
pub struct GrowthConfig {
    /// Duration of a measurement of connections, in seconds.
    pub seconds: f64,
    /// Number of repetitions of measurements by the clock; the median counts.
    pub repeats: usize,
    /// Connections that send requests.
    pub active_connections: usize,
    /// Connections among which they are.
    pub connections: usize,
    /// Messages to attached programs.
    pub messages: u64,
    /// UDP sockets among which one is looked up.
    pub sockets: usize,
    /// Packets whose instructions are counted.
    pub packets: u64,
    /// Parts to measure; all if empty.
    pub parts: Vec<GrowthPart>,
}

impl Default for GrowthConfig {
    fn default() -> Self {
        Self {
            seconds: 2.0,
            repeats: 5,
            active_connections: ACTIVE_CONNECTIONS,
            connections: MILLION,
            messages: 2_000_000,
            sockets: 100_000,
            packets: 20_000,
            parts: Vec::new(),
        }
    }
}

impl GrowthConfig {
    /// Reduces numbers and repetitions for a quick run.
    #[must_use]
    pub fn quick(self) -> Self {
        Self { seconds: 0.5, repeats: 1, connections: 100_000, messages: 200_000, ..self }
    }
}

/// Unit of a row.
#[derive(Clone, Copy)]
enum Unit {
    RequestsPerSecond,
    /// Processor time of the network core for a message.
    Nanoseconds,
    /// Of the echo of a packet.
    Instructions,
}

impl fmt::Display for Unit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::RequestsPerSecond => "requests/s",
            Self::Nanoseconds => "ns of the network core for a message",
            Self::Instructions => "instructions for a packet",
        })
    }
}

/// Values at one count.
struct Row {
    part: GrowthPart,
    /// Family of addresses, where both are measured.
    family: &'static str,
    count: usize,
    unit: Unit,
    values: Vec<f64>,
}

impl Row {
    fn value(&self) -> f64 {
        median(&self.values)
    }

    /// Median of the ratios of the values to those of `few`, measured in turn.
    fn over(&self, few: &Self) -> f64 {
        median(self.values.iter().zip(&few.values).map(|(many, few)| many / few))
    }

    fn to_json(&self) -> Value {
        json!({
            "part": self.part.name(),
            "family": self.family,
            "count": self.count,
            "value": round_to_thousandths(self.value()),
            "unit": self.unit.to_string(),
            "spread_percent": spread_percent(self.values.iter().copied()),
        })
    }
}

/// Runs the parts of the experiment.
///
/// # Errors
/// If namespaces cannot be created, a server does not start, or valgrind is not installed.
pub fn run(config: &GrowthConfig) -> Result<Experiment, LabError> {
    let is_wanted = |part: &GrowthPart| config.parts.is_empty() || config.parts.contains(part);
    let parts: Vec<GrowthPart> = GrowthPart::ALL.into_iter().filter(is_wanted).collect();
    let progress = Progress::new(parts.iter().map(|part| part.steps(config)).sum());
    let mut result = Experiment::new("growth");
    let mut rows = Vec::new();
    for part in parts {
        let of_part = match part {
            GrowthPart::Connections => measure_connections(config, &progress)?,
            GrowthPart::Programs => measure_programs(config, &progress)?,
            GrowthPart::Lookup => measure_lookup(config, &progress)?,
        };
        conclude(part, config, &of_part, &mut result);
        rows.extend(of_part);
    }
    result.rows = rows.iter().map(Row::to_json).collect();
    result.columns = vec!["part", "family", "count", "value", "unit", "spread_percent"];
    result.note(format!(
        "connections: {} of them send requests, all from one client on Tidegate on core 0, which holds as \
         many, so that its growth counts too; the server on core 1",
        config.active_connections
    ));
    result.note(format!(
        "programs: processor time of the network core on core 1 for a UDP message of 64 bytes that a \
         program attached to the daemon echoes, {IN_FLIGHT} in flight for all programs together; an \
         in-memory link; core 0 is the other host and all programs; the network core sleeps as soon as \
         it has no work"
    ));
    result.note("a ratio is the median of the ratios of values that were measured in turn");
    result.note(
        "lookup: instructions to receive and answer one packet, one at a time, by callgrind, as echo-cost \
         counts them, with a stack that has one UDP socket and with one that has many, on several \
         addresses, so that a port has several sockets; lookup_growth is their ratio and \
         lookup_extra_instructions their difference, the worse of IPv4 and IPv6",
    );
    Ok(result)
}

fn new_rows(part: GrowthPart, family: &'static str, unit: Unit, config: &GrowthConfig) -> Vec<Row> {
    let row = |count| Row { part, family, count, unit, values: Vec::new() };
    part.counts(config).map(row).into()
}

fn step(progress: &Progress, row: &Row, value: f64) {
    let Row { part, family, count, unit, .. } = row;
    progress.step(format_args!("{:<12} {family:<5} {count:>9}: {value:.1} {unit}", part.name()));
}

/// Measures all rows in turn, several times.
fn repeat(
    rows: &mut [Row],
    repeats: usize,
    progress: &Progress,
    mut measure: impl FnMut(usize) -> Result<f64, LabError>,
) -> Result<(), LabError> {
    for _ in 0..repeats {
        for row in rows.iter_mut() {
            let value = measure(row.count)?;
            step(progress, row, value);
            row.values.push(value);
        }
    }
    Ok(())
}

fn measure_connections(config: &GrowthConfig, progress: &Progress) -> Result<Vec<Row>, LabError> {
    let (server_core, load_core) = choose_cores()?;
    let testbed = TcpTestbed::new(server_core, load_core)?;
    let mut rows = new_rows(GrowthPart::Connections, "IPv4", Unit::RequestsPerSecond, config);
    let active = config.active_connections;
    repeat(&mut rows, config.repeats, progress, |connections| {
        active::measure(&testbed, active, connections, config.seconds)
    })?;
    Ok(rows)
}

fn measure_programs(config: &GrowthConfig, progress: &Progress) -> Result<Vec<Row>, LabError> {
    let (server_core, load_core) = choose_cores()?;
    let _pinned = PinGuard::to(load_core)?;
    let mut rows = new_rows(GrowthPart::Programs, "IPv4", Unit::Nanoseconds, config);
    repeat(&mut rows, config.repeats, progress, |programs| {
        ProgramsTestbed::new(programs, server_core)?.measure(config.messages)
    })?;
    Ok(rows)
}

fn measure_lookup(config: &GrowthConfig, progress: &Progress) -> Result<Vec<Row>, LabError> {
    let mut rows = Vec::new();
    for (family, ipv6) in [("IPv4", false), ("IPv6", true)] {
        let mut of_family = new_rows(GrowthPart::Lookup, family, Unit::Instructions, config);
        repeat(&mut of_family, 1, progress, |sockets| {
            // One packet at a time: a burst of one flow takes one lookup.
            let packets = config.packets;
            let config =
                EchoCostConfig { packets, ipv6, sockets, burst: 1, ..EchoCostConfig::default() };
            echo_cost::instructions_per_packet(Traffic::OneFlow, &config)
        })?;
        rows.extend(of_family);
    }
    Ok(rows)
}

fn conclude(part: GrowthPart, config: &GrowthConfig, rows: &[Row], result: &mut Experiment) {
    let ratios = rows.chunks_exact(2).map(|pair| pair[1].over(&pair[0]));
    let (name, ratio) = match part {
        GrowthPart::Connections if config.connections == MILLION => {
            ("active_among_million".to_owned(), ratios.reduce(f64::min))
        }
        GrowthPart::Connections => {
            (format!("active_among_{}", config.connections), ratios.reduce(f64::min))
        }
        GrowthPart::Programs => {
            (format!("programs_{MANY_PROGRAMS}_cpu_ratio"), ratios.reduce(f64::max))
        }
        GrowthPart::Lookup => ("lookup_growth".to_owned(), ratios.reduce(f64::max)),
    };
    if let Some(ratio) = ratio {
        result.figure(&name, round_to_thousandths(ratio));
    }
    if part == GrowthPart::Lookup {
        let extra = rows.chunks_exact(2).map(|pair| pair[1].value() - pair[0].value());
        result.figure("lookup_extra_instructions", extra.fold(0.0, f64::max).round());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(part: GrowthPart, values: &[f64]) -> Vec<Row> {
        let row = |&value| Row {
            part,
            family: "IPv4",
            count: 1,
            unit: Unit::Instructions,
            values: vec![value],
        };
        values.iter().map(row).collect()
    }

    #[test]
    fn figures_are_the_worse_ratio_of_many_to_few() {
        let config = GrowthConfig::default();
        let mut result = Experiment::new("growth");
        let connections = rows(GrowthPart::Connections, &[100.0, 95.0]);
        conclude(GrowthPart::Connections, &config, &connections, &mut result);
        conclude(GrowthPart::Connections, &config.clone().quick(), &connections, &mut result);
        let lookup = rows(GrowthPart::Lookup, &[100.0, 110.0, 100.0, 120.0]);
        conclude(GrowthPart::Lookup, &config, &lookup, &mut result);
        let programs = rows(GrowthPart::Programs, &[100.0, 105.0]);
        conclude(GrowthPart::Programs, &config, &programs, &mut result);
        assert_eq!(result.figures["active_among_million"], 0.95);
        assert_eq!(result.figures["active_among_100000"], 0.95);
        assert_eq!(result.figures["lookup_growth"], 1.2);
        assert_eq!(result.figures["lookup_extra_instructions"], 20.0);
        assert_eq!(result.figures["programs_64_cpu_ratio"], 1.05);
    }

    #[test]
    fn parts_have_names() {
        for part in GrowthPart::ALL {
            assert_eq!(part.name().parse::<GrowthPart>().unwrap(), part);
        }
        assert!("part".parse::<GrowthPart>().unwrap_err().to_string().contains("programs"));
    }

    #[test]
    fn attached_programs_echo_in_turn() {
        let mut testbed = ProgramsTestbed::new(3, 0).unwrap();
        assert!(testbed.measure(1_000).unwrap() > 0.0);
    }
}
