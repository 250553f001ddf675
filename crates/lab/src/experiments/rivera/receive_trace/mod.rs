//! Experiment receive-trace: time of a packet in each stage of the receive path, in the kernel and
//! in Tidegate.
//!
//! Rivera (2013), section 3.3.4, has one trace of `udp_recvmsg`: dequeue, copy, and a free that
//! takes the socket's lock for memory accounting. This experiment uses the kernel's trace events
//! instead of tracing every function. The events are few and disturb the measurement little, and
//! they are available on locked-down kernels.

mod kernel_path;
mod over_veth;
mod tidegate_path;

use serde_json::json;

use self::over_veth::PathTimes;
use crate::report::plot::{Axis, Panel, Picture, Series};
use crate::report::progress::Progress;
use crate::testbed::tracefs::TscRate;
use crate::{Experiment, LabError};

/// Configuration of the experiment.
#[derive(Clone, Debug)]
pub struct ReceiveTraceConfig {
    /// Packets to trace, in the kernel and in Tidegate, for each IP version.
    pub packets: usize,
    /// Payload size in bytes.
    pub payload_bytes: usize,
}

impl Default for ReceiveTraceConfig {
    fn default() -> Self {
        Self { packets: 20_000, payload_bytes: 64 }
    }
}

impl ReceiveTraceConfig {
    /// Reduces numbers and repetitions for a quick run.
    #[must_use]
    pub fn quick(self) -> Self {
        Self { packets: 2_000, ..self }
    }
}

/// Packets in a burst: the number that waits when the reader starts.
const BURST_PACKETS: usize = 32;
const MAX_PACKETS: usize = 1_000_000;
const MAX_PAYLOAD_BYTES: usize = 1400;

/// Times that packets spent in one stage of the receive path, in nanoseconds.
#[derive(Clone, Debug)]
struct Stage {
    name: &'static str,
    /// Description of the code of this stage.
    description: &'static str,
    /// True for a stage of work, false for a stage of waiting.
    is_work: bool,
    times_ns: Vec<f64>,
}

impl Stage {
    fn new(name: &'static str, description: &'static str) -> Self {
        Self { name, description, is_work: true, times_ns: Vec::new() }
    }

    fn waiting(self) -> Self {
        Self { is_work: false, ..self }
    }

    fn sort(&mut self) {
        self.times_ns.sort_by(f64::total_cmp);
    }

    /// Quantile of the times, which must be sorted.
    fn quantile(&self, quantile: f64) -> f64 {
        let last = self.times_ns.len().saturating_sub(1);
        self.times_ns.get((last as f64 * quantile) as usize).copied().unwrap_or(0.0)
    }
}

/// Runs the experiment; needs root, for a network namespace and for tracing.
///
/// # Errors
/// When the configuration is invalid, or tracing or sockets fail.
pub fn run(config: &ReceiveTraceConfig) -> Result<Experiment, LabError> {
    if !(1..=MAX_PACKETS).contains(&config.packets) {
        let packets = config.packets;
        return Err(LabError::Config(format!("{packets} packets: give 1 to {MAX_PACKETS}")));
    }
    if !(1..=MAX_PAYLOAD_BYTES).contains(&config.payload_bytes) {
        let bytes = config.payload_bytes;
        return Err(LabError::Config(format!(
            "{bytes} bytes of payload: give 1 to {MAX_PAYLOAD_BYTES}"
        )));
    }
    let mut result = Experiment::new("receive-trace");
    let cycles = TscRate::measure();
    let mut panels = Vec::new();
    let progress = Progress::new(4);
    for (family, ipv6) in [("IPv4", false), ("IPv6", true)] {
        let kernel = kernel_path::trace_packets(config, ipv6, cycles)?;
        let suffix = if ipv6 { "_v6" } else { "" };
        result.figure(&format!("kernel_event_ns{suffix}"), round_to_tenths(kernel.event_ns));
        panels.push(add_path(&mut result, "kernel", family, kernel.stages, kernel.event_ns));
        progress.step(format_args!("kernel, {family}"));
        let stages = tidegate_path::trace_packets(config, ipv6, cycles)?;
        panels.push(add_path(&mut result, "tidegate", family, stages, 0.0));
        add_whole_path(&mut result, family, over_veth::measure(config, ipv6)?);
        progress.step(format_args!("tidegate, {family}"));
    }
    result.columns =
        vec!["path", "family", "stage", "median_ns", "p90_ns", "share_percent", "what"];
    result.note(format!(
        "bursts of {BURST_PACKETS} packets of {} bytes of payload: sent, then read one by one, all on one \
         core; the kernel over the loopback, Tidegate over an in-memory link; {} packets each",
        config.payload_bytes, config.packets
    ));
    result.note(
        "kernel: by trace events; the cost of recording an event (kernel_event_ns: a traced round less an \
         untraced round, medians, divided by its events) is subtracted from each stage. Tidegate: by the \
         processor's time stamp around each stage of a burst, divided by its packets",
    );
    result.note(
        "a share is the median of a stage over the sum of the medians of all stages of work; \
         the link, the NIC and the application's own work are in neither path",
    );
    result.note(
        "whole path: one thread sends bursts over a veth, from a kernel socket, and makes a receive call \
         for each packet until all have arrived, on a kernel socket or on a socket of Tidegate on \
         AF_XDP; the receiver's part is the round less one whose packets the far end drops at its first \
         check (sent, not received)",
    );
    result.picture =
        Some(Picture { title: "Receive time of a packet by stage".to_owned(), panels });
    Ok(result)
}

fn round_to_tenths(value: f64) -> f64 {
    (value * 10.0).round() / 10.0
}

/// Adds the rows and figures of a path and returns its panel.
fn add_path(
    result: &mut Experiment,
    path: &str,
    family: &str,
    mut stages: Vec<Stage>,
    overhead_ns: f64,
) -> Panel {
    stages.iter_mut().for_each(Stage::sort);
    let median = |stage: &Stage| (stage.quantile(0.5) - overhead_ns).max(0.0);
    let total_ns: f64 = stages.iter().filter(|stage| stage.is_work).map(median).sum();
    for stage in &stages {
        let share = 100.0 * median(stage) / total_ns.max(f64::MIN_POSITIVE);
        result.rows.push(json!({
            "path": path,
            "family": family,
            "stage": stage.name,
            "what": stage.description,
            "median_ns": round_to_tenths(median(stage)),
            "p90_ns": round_to_tenths((stage.quantile(0.9) - overhead_ns).max(0.0)),
            "share_percent": if stage.is_work { json!(round_to_tenths(share)) } else { json!(null) },
        }));
    }
    let suffix = if family == "IPv6" { "_v6" } else { "" };
    result.figure(&format!("{path}_receive_ns{suffix}"), round_to_tenths(total_ns));
    panel(path, family, &stages, overhead_ns)
}

/// Adds the whole receive path over one device, and the ratio of packets per second.
fn add_whole_path(result: &mut Experiment, family: &str, times: PathTimes) {
    let suffix = if family == "IPv6" { "_v6" } else { "" };
    let (kernel_ns, tidegate_ns) = (times.kernel_receive_ns(), times.tidegate_receive_ns());
    for (path, receive_ns, round_ns) in
        [("kernel", kernel_ns, times.kernel_ns), ("tidegate", tidegate_ns, times.tidegate_ns)]
    {
        result.figure(&format!("{path}_veth_receive_ns{suffix}"), round_to_tenths(receive_ns));
        result.rows.push(json!({
            "path": format!("{path}, veth"),
            "family": family,
            "stage": "whole path",
            "what": "through the socket's receive call, less what the sender takes",
            "median_ns": round_to_tenths(receive_ns),
            "sent_not_received_ns": round_to_tenths(times.sent_ns),
            "sent_and_received_ns": round_to_tenths(round_ns),
        }));
    }
    let kernel = [("kernel socket".to_owned(), 1e9 / kernel_ns)];
    let figure = format!("receives_over_kernel_veth{suffix}");
    result.compare_with_kernel(&figure, 1e9 / tidegate_ns, kernel);
}

/// Draws the stages of work in sequence, each as long as its median.
fn panel(path: &str, family: &str, stages: &[Stage], overhead_ns: f64) -> Panel {
    let mut series = Vec::new();
    let mut from_ns = 0.0;
    for (index, stage) in stages.iter().filter(|stage| stage.is_work).enumerate() {
        let to_ns = from_ns + (stage.quantile(0.5) - overhead_ns).max(0.0);
        let name = format!("{path}: {}", stage.name);
        series.push(Series::bar(name, (from_ns, to_ns), index as f64 + 1.0));
        from_ns = to_ns;
    }
    Panel {
        title: format!("{path}, {family}: {from_ns:.0} ns"),
        x: Axis::new("time in the receive path, without waiting", "ns"),
        y: Axis::new("stage", "").up_to(series.len() as f64 + 1.0),
        series,
        ..Panel::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subtracts_the_cost_of_recording() {
        let mut result = Experiment::new("receive-trace");
        let stage =
            |name, times: &[f64]| Stage { times_ns: times.to_vec(), ..Stage::new(name, "code") };
        let stages = vec![
            stage("a", &[130.0, 120.0, 400.0]),
            stage("b", &[190.0, 10.0, 190.0]),
            stage("c", &[5000.0]).waiting(),
        ];
        add_path(&mut result, "kernel", "IPv4", stages, 100.0);
        assert_eq!(result.figures["kernel_receive_ns"], 30.0 + 90.0);
        assert_eq!(result.rows[0]["share_percent"], 25.0);
        assert_eq!(result.rows[2]["share_percent"], serde_json::Value::Null);
    }

    #[test]
    fn compares_the_whole_path_over_one_device() {
        let mut result = Experiment::new("receive-trace");
        let times = PathTimes { sent_ns: 900.0, kernel_ns: 1_500.0, tidegate_ns: 1_200.0 };
        add_whole_path(&mut result, "IPv6", times);
        assert_eq!(result.figures["kernel_veth_receive_ns_v6"], 600.0);
        assert_eq!(result.figures["tidegate_veth_receive_ns_v6"], 300.0);
        assert_eq!(result.figures["receives_over_kernel_veth_v6"], 2.0);
        assert_eq!(result.rows[1]["path"], "tidegate, veth");
    }

    #[test]
    fn rejects_invalid_configuration() {
        for (packets, payload_bytes) in [(0, 64), (usize::MAX, 64), (1, 0), (1, 9000)] {
            let error = run(&ReceiveTraceConfig { packets, payload_bytes }).unwrap_err();
            assert!(error.to_string().contains("give 1 to"), "{error}");
        }
    }
}
