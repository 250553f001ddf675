//! `tidegate lab trace`: where a packet's time goes on receive, in the kernel
//! and in Tidegate.
//!
//! Rivera (2013), section 3.3.4, has one trace of `udp_recvmsg`: dequeue, copy,
//! and a free that takes the socket's lock for memory accounting. The kernel is
//! followed here by its own trace events instead of every function: they are
//! few, so what is measured is hardly disturbed, and kernels that are locked
//! down still have them.

mod kernel;
mod stages;

use serde_json::json;

use crate::plot::{Axis, Panel, Picture, Series};
use crate::tracefs::Cycles;
use crate::{Experiment, LabError};

/// How to run the experiment.
#[derive(Clone, Debug)]
pub struct TraceConfig {
    /// Packets to follow, in the kernel and in Tidegate, for each family.
    pub packets: usize,
    /// Bytes of payload.
    pub payload_bytes: usize,
}

impl Default for TraceConfig {
    fn default() -> Self {
        Self { packets: 20_000, payload_bytes: 64 }
    }
}

/// Packets in a burst: so many wait when the reader begins.
const BURST: usize = 32;
const PACKETS_MAX: usize = 1_000_000;
const PAYLOAD_MAX: usize = 1400;

/// The times that packets spent in one part of their way, in nanoseconds.
#[derive(Clone, Debug)]
struct Stage {
    name: &'static str,
    /// What of the kernel's or our code it is.
    what: &'static str,
    /// Work, or waiting.
    works: bool,
    times_ns: Vec<f64>,
}

impl Stage {
    fn new(name: &'static str, what: &'static str) -> Self {
        Self { name, what, works: true, times_ns: Vec::new() }
    }

    fn waiting(self) -> Self {
        Self { works: false, ..self }
    }

    fn sort(&mut self) {
        self.times_ns.sort_by(f64::total_cmp);
    }

    /// Of sorted times.
    fn quantile(&self, quantile: f64) -> f64 {
        let last = self.times_ns.len().saturating_sub(1);
        self.times_ns.get((last as f64 * quantile) as usize).copied().unwrap_or(0.0)
    }
}

/// Runs the experiment. It needs root, for a network namespace and for tracing.
///
/// # Errors
/// When the configuration makes no sense, or tracing or sockets fail.
pub fn run(config: &TraceConfig) -> Result<Experiment, LabError> {
    if !(1..=PACKETS_MAX).contains(&config.packets) {
        let packets = config.packets;
        return Err(LabError::Config(format!("{packets} packets: give 1 to {PACKETS_MAX}")));
    }
    if !(1..=PAYLOAD_MAX).contains(&config.payload_bytes) {
        let bytes = config.payload_bytes;
        return Err(LabError::Config(format!("{bytes} bytes of payload: give 1 to {PAYLOAD_MAX}")));
    }
    let mut result = Experiment::new("trace");
    let cycles = Cycles::measure();
    let mut panels = Vec::new();
    for (family, ipv6) in [("IPv4", false), ("IPv6", true)] {
        let kernel = kernel::follow(config, ipv6, cycles)?;
        let suffix = if ipv6 { "_v6" } else { "" };
        result.figure(&format!("kernel_event_ns{suffix}"), tenths(kernel.event_ns));
        panels.push(add(&mut result, "kernel", family, kernel.stages, kernel.event_ns));
        let stages = stages::follow(config, ipv6, cycles)?;
        panels.push(add(&mut result, "tidegate", family, stages, 0.0));
    }
    result.columns =
        vec!["path", "family", "stage", "median_ns", "p90_ns", "share_percent", "what"];
    result.note(format!(
        "bursts of {BURST} packets of {} bytes of payload: sent, then read one by one, all on one \
         core; the kernel over the loopback, Tidegate over a wire in memory; {} packets each",
        config.payload_bytes, config.packets
    ));
    result.note(
        "kernel: by trace events; what recording one costs (kernel_event_ns: a traced round less an \
         untraced one, medians, by its events) is taken off each stage. Tidegate: by the \
         processor's time stamp around each stage of a burst, divided by its packets",
    );
    result.note(
        "a share is the median of a stage over the sum of the medians of those that work; \
         the wire, the card and the program's own work are in neither path",
    );
    result.picture =
        Some(Picture { title: "Where a packet's time goes on receive".to_owned(), panels });
    Ok(result)
}

fn tenths(value: f64) -> f64 {
    (value * 10.0).round() / 10.0
}

/// Adds the rows and figures of a path, and makes its panel.
fn add(
    result: &mut Experiment,
    path: &str,
    family: &str,
    mut stages: Vec<Stage>,
    less_ns: f64,
) -> Panel {
    stages.iter_mut().for_each(Stage::sort);
    let median = |stage: &Stage| (stage.quantile(0.5) - less_ns).max(0.0);
    let whole: f64 = stages.iter().filter(|stage| stage.works).map(median).sum();
    for stage in &stages {
        let share = 100.0 * median(stage) / whole.max(f64::MIN_POSITIVE);
        result.rows.push(json!({
            "path": path,
            "family": family,
            "stage": stage.name,
            "what": stage.what,
            "median_ns": tenths(median(stage)),
            "p90_ns": tenths((stage.quantile(0.9) - less_ns).max(0.0)),
            "share_percent": if stage.works { json!(tenths(share)) } else { json!(null) },
        }));
    }
    let suffix = if family == "IPv6" { "_v6" } else { "" };
    result.figure(&format!("{path}_receive_ns{suffix}"), tenths(whole));
    panel(path, family, &stages, less_ns)
}

/// The stages that work one after the other, each as long as its median.
fn panel(path: &str, family: &str, stages: &[Stage], less_ns: f64) -> Panel {
    let mut series = Vec::new();
    let mut from_ns = 0.0;
    for (at, stage) in stages.iter().filter(|stage| stage.works).enumerate() {
        let to_ns = from_ns + (stage.quantile(0.5) - less_ns).max(0.0);
        let name = format!("{path}: {}", stage.name);
        series.push(Series::bar(name, (from_ns, to_ns), at as f64 + 1.0));
        from_ns = to_ns;
    }
    Panel {
        title: format!("{path}, {family}: {from_ns:.0} ns"),
        x: Axis::new("time on the way, waiting left out", "ns"),
        y: Axis::new("stage", "").up_to(series.len() as f64 + 1.0),
        series,
        ..Panel::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_recording_costs_is_taken_off() {
        let mut result = Experiment::new("trace");
        let stage =
            |name, times: &[f64]| Stage { times_ns: times.to_vec(), ..Stage::new(name, "code") };
        let stages = vec![
            stage("a", &[130.0, 120.0, 400.0]),
            stage("b", &[190.0, 10.0, 190.0]),
            stage("c", &[5000.0]).waiting(),
        ];
        add(&mut result, "kernel", "IPv4", stages, 100.0);
        assert_eq!(result.figures["kernel_receive_ns"], 30.0 + 90.0);
        assert_eq!(result.rows[0]["share_percent"], 25.0);
        assert_eq!(result.rows[2]["share_percent"], serde_json::Value::Null);
    }

    #[test]
    fn nonsense_is_refused() {
        for (packets, payload_bytes) in [(0, 64), (usize::MAX, 64), (1, 0), (1, 9000)] {
            let error = run(&TraceConfig { packets, payload_bytes }).unwrap_err();
            assert!(error.to_string().contains("give 1 to"), "{error}");
        }
    }
}
