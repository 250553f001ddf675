//! A server under a flood in the middle third of the time: time line and recovery time.

use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

use super::ProtectConfig;
use super::queue_length::KernelQueue;
use crate::error::LabError;
use crate::report::plot::{Axis, Panel, Series, Span};
use crate::report::progress::Progress;
use crate::stats::{median, round_to_thousandths};
use crate::testbed::client::{
    Client, RequestKind, RequestRecord, answered_share, median_latency_s, recovery_s,
};
use crate::testbed::flood::{FloodSource, FloodTestbed};
use crate::testbed::test_case::{EchoService, Transport};

/// Requests per second: recovery is measured with a resolution of one millisecond.
const CLIENT_REQUESTS_PER_S: f64 = 1000.0;
/// Work per request, in nanoseconds.
const WORK_PER_REQUEST_NS: u64 = 2_000;
/// Width of a bin in the picture, in seconds.
const BIN_S: f64 = 0.1;
/// Lower bound of the latency limit, in seconds. A reply is in time within ten times the latency
/// before the flood, and at least within this time.
const MIN_LATENCY_LIMIT_S: f64 = 0.005;

/// One run: the record of each request, and the start and end of the flood.
struct TimelineRun {
    records: Vec<RequestRecord>,
    flood_s: (f64, f64),
}

/// The runs of one transport.
pub(super) struct TimelineResults {
    pub(super) transport: Transport,
    /// Receive buffer of the server, on kernel sockets.
    pub(super) kernel_queue: Option<KernelQueue>,
    runs: Vec<TimelineRun>,
    third_s: f64,
}

pub(super) fn run(
    config: &ProtectConfig,
    testbed: &FloodTestbed,
) -> Result<Vec<TimelineResults>, LabError> {
    let third_s = config.third_seconds;
    let transports = config.transports()?;
    let is_kernel = |transport: &Transport| matches!(transport, Transport::Kernel(_));
    // The backlog of a flood is the longest queue: both sides get the same.
    let kernel_queue = transports
        .iter()
        .any(is_kernel)
        .then(|| KernelQueue::as_long_as_tidegates(testbed))
        .transpose()?;
    let mut results: Vec<TimelineResults> = transports
        .into_iter()
        .map(|transport| TimelineResults {
            transport,
            kernel_queue: kernel_queue.filter(|_| is_kernel(&transport)),
            runs: Vec::new(),
            third_s,
        })
        .collect();
    let progress = Progress::of_part("time line", results.len() * config.repeats);
    for repeat in 1..=config.repeats {
        for timeline in &mut results {
            let run = measure_run(config, testbed, timeline)?;
            timeline.runs.push(run);
            let recovery = timeline.runs.last().and_then(TimelineRun::recovery_ms);
            let recovery = recovery.map_or("never".into(), |ms| format!("{ms:.1} ms"));
            progress.step(format_args!(
                "{repeat} {:<16} recovered after {recovery}",
                timeline.transport.name()
            ));
        }
    }
    Ok(results)
}

fn measure_run(
    config: &ProtectConfig,
    testbed: &FloodTestbed,
    timeline: &TimelineResults,
) -> Result<TimelineRun, LabError> {
    let third = Duration::from_secs_f64(config.third_seconds);
    let limit = 3 * third + Duration::from_secs(30);
    let buffer_bytes = timeline.kernel_queue.map(|queue| queue.buffer_bytes.to_string());
    let flags: Vec<&str> =
        buffer_bytes.iter().flat_map(|bytes| ["--kernel-receive-buffer", bytes]).collect();
    let service = EchoService {
        transport: timeline.transport,
        work_ns: WORK_PER_REQUEST_NS,
        sink: false,
        flags: &flags,
        flood_source: FloodSource::OneHost,
    };
    let mut server = service.start(testbed, limit)?;
    let namespace = &testbed.pair.a.namespace;
    let client = Client::start(
        namespace,
        server.target,
        RequestKind::Numbered,
        CLIENT_REQUESTS_PER_S,
        config.load_core,
    )?;
    thread::sleep(third);
    let from_s = client.now_s();
    server.flood.set_rate(None)?;
    thread::sleep(third);
    server.flood.set_rate(Some(0.0))?;
    let to_s = client.now_s();
    thread::sleep(third);
    Ok(TimelineRun { records: client.stop()?, flood_s: (from_s, to_s) })
}

impl TimelineRun {
    /// Milliseconds from the end of the flood until the server has recovered.
    fn recovery_ms(&self) -> Option<f64> {
        let baseline_s = median_latency_s(&self.records, 0.0, self.flood_s.0);
        let limit_s = (10.0 * baseline_s).max(MIN_LATENCY_LIMIT_S);
        recovery_s(&self.records, self.flood_s.1, limit_s).map(|seconds| seconds * 1e3)
    }
}

impl TimelineResults {
    /// Median recovery time, in milliseconds. A run without recovery counts with the time that it
    /// was observed.
    pub(super) fn recovery_ms(&self) -> f64 {
        let of = |run: &TimelineRun| run.recovery_ms().unwrap_or(self.third_s * 1e3);
        median(self.runs.iter().map(of))
    }

    pub(super) fn row(&self) -> Value {
        let each = |figure: &dyn Fn(&TimelineRun) -> f64| {
            let value = median(self.runs.iter().map(figure));
            value.is_finite().then(|| round_to_thousandths(value))
        };
        let during = |run: &TimelineRun, figure: fn(&[RequestRecord], f64, f64) -> f64| {
            figure(&run.records, run.flood_s.0, run.flood_s.1)
        };
        json!({
            "test": "time line",
            "carrier": self.transport.name(),
            "answered_before": each(&|line| answered_share(&line.records, 0.0, line.flood_s.0)),
            "answered_during": each(&|line| during(line, answered_share)),
            "latency_before_ms":
                each(&|line| 1e3 * median_latency_s(&line.records, 0.0, line.flood_s.0)),
            "latency_during_ms": each(&|line| 1e3 * during(line, median_latency_s)),
            "recovery_ms": each(&|line| line.recovery_ms().unwrap_or(f64::INFINITY)),
        })
    }
}

/// Share of requests answered over time, in percent; the first run of each transport.
pub(super) fn panel(results: &[TimelineResults]) -> Panel {
    let series = |one: &TimelineResults| {
        let run = one.runs.first()?;
        let bins = (3.0 * one.third_s / BIN_S).floor() as u32;
        let point = |bin: u32| {
            let from_s = f64::from(bin) * BIN_S;
            let share = answered_share(&run.records, from_s, from_s + BIN_S);
            (from_s, 100.0 * share)
        };
        Some(Series::new(one.transport.name(), (0..bins).map(point)))
    };
    let flood = results.first().and_then(|one| one.runs.first()).map(|line| line.flood_s);
    Panel {
        title: "a client of the flooded service".into(),
        x: Axis::new("time", "s"),
        y: Axis::new("answered", "%").up_to(100.0),
        series: results.iter().filter_map(series).collect(),
        spans: flood.into_iter().map(|range| Span { range, label: "flood".into() }).collect(),
    }
}
