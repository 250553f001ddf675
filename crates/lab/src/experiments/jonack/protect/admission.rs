//! A known client among unknown sources: its share of answered requests under overload.

use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

use super::ProtectConfig;
use crate::error::LabError;
use crate::report::progress::Progress;
use crate::stats::median;
use crate::testbed::client::{
    Client, RequestKind, answered_share, count_answered, median_latency_s,
};
use crate::testbed::flood::{FloodSource, FloodTestbed, GIGABIT_LINE_PPS, LOAD_ADDRESS};
use crate::testbed::folder;
use crate::testbed::netns::run_to_end;
use crate::testbed::programs;
use crate::testbed::test_case::{EchoService, Transport};

/// Requests per second of the known client.
const CLIENT_REQUESTS_PER_S: f64 = 5_000.0;
/// Work per request in nanoseconds: about that of a DNS server.
const WORK_PER_REQUEST_NS: u64 = 2_000;
/// Time to learn a source. A source is known after two consecutive periods of one second in which
/// it was seen, and the first period is partial.
const LEARNING_TIME: Duration = Duration::from_millis(3_500);

/// Results of the known client's requests during the flood.
#[derive(Clone, Copy, Debug)]
struct AdmissionRun {
    answered_share: f64,
    median_latency_ms: f64,
    offered_pps: f64,
    /// Share of the client's requests lost on a full RX ring of the device.
    rx_missed_share: f64,
}

/// Rate of the unknown sources.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FloodRate {
    /// The rate of a line of 1 Gb/s.
    GigabitLine,
    /// The maximum rate, more than one core can examine: the device loses frames of known and
    /// unknown sources alike.
    Unlimited,
}

impl FloodRate {
    fn pps(self) -> Option<f64> {
        (self == Self::GigabitLine).then_some(GIGABIT_LINE_PPS)
    }
}

/// The runs with one policy at one flood rate.
pub(super) struct PolicyResults {
    name: &'static str,
    figure: &'static str,
    flags: &'static [&'static str],
    flood_rate: FloodRate,
    runs: Vec<AdmissionRun>,
}

/// Measures all policies in turn.
pub(super) fn run(
    config: &ProtectConfig,
    testbed: &FloodTestbed,
) -> Result<Vec<PolicyResults>, LabError> {
    let policy = |name, figure, flags, flood_rate| PolicyResults {
        name,
        figure,
        flags,
        flood_rate,
        runs: Vec::new(),
    };
    let admission: &[&str] = &["--admission"];
    let mut policies = vec![
        policy("admission", "known_peer_answered", admission, FloodRate::GigabitLine),
        policy("drop-tail", "known_peer_answered_droptail", &[], FloodRate::GigabitLine),
        policy(
            "admission, overrun",
            "known_peer_answered_overrun",
            admission,
            FloodRate::Unlimited,
        ),
        policy(
            "drop-tail, overrun",
            "known_peer_answered_droptail_overrun",
            &[],
            FloodRate::Unlimited,
        ),
    ];
    let progress = Progress::of_part("admission", policies.len() * config.repeats);
    for repeat in 1..=config.repeats {
        for policy_results in &mut policies {
            let run = measure_known_client(
                config,
                testbed,
                policy_results.flags,
                policy_results.flood_rate.pps(),
            )?;
            progress.step(format_args!(
                "{repeat} {:<20} {:.1} % of the known client's requests answered, {:.1} % lost \
                 on the RX ring, {:.0} k/s offered",
                policy_results.name,
                100.0 * run.answered_share,
                100.0 * run.rx_missed_share,
                run.offered_pps / 1e3
            ));
            policy_results.runs.push(run);
        }
    }
    Ok(policies)
}

fn measure_known_client(
    config: &ProtectConfig,
    testbed: &FloodTestbed,
    policy_flags: &[&str],
    flood_pps: Option<f64>,
) -> Result<AdmissionRun, LabError> {
    let transport = Transport::tidegate();
    let folder = folder::private()?;
    let control = folder.path().join("control");
    let control_flag = control.display().to_string();
    // The route for replies to the unknown sources.
    let route = format!("0.0.0.0/0={LOAD_ADDRESS}");
    let mut flags = vec!["--route", &route, "--control", &control_flag];
    flags.extend(policy_flags);
    let service = EchoService {
        transport,
        work_ns: WORK_PER_REQUEST_NS,
        sink: false,
        flags: &flags,
        flood_source: FloodSource::UnknownSources,
    };
    let flood_time = Duration::from_secs_f64(config.third_seconds);
    let mut server =
        service.start(testbed, LEARNING_TIME + flood_time + Duration::from_secs(30))?;
    let namespace = &testbed.pair.a.namespace;
    let client = Client::start(
        namespace,
        server.target,
        RequestKind::Numbered,
        CLIENT_REQUESTS_PER_S,
        config.load_core,
    )?;
    thread::sleep(LEARNING_TIME);
    let from_s = client.now_s();
    let flood = &mut server.flood;
    let load = testbed.measure(flood, &server.meter, flood_pps, Duration::ZERO, flood_time)?;
    let to_s = client.now_s();
    server.flood.set_rate(Some(0.0))?;
    let evaluated_known = count_evaluated_known(&control)?;
    let records = client.stop()?;
    let (request_count, _) = count_answered(&records, from_s, to_s);
    Ok(AdmissionRun {
        answered_share: answered_share(&records, from_s, to_s),
        median_latency_ms: 1e3 * median_latency_s(&records, from_s, to_s),
        offered_pps: load.offered_pps,
        rx_missed_share: evaluated_known
            .map_or(0.0, |known| 1.0 - (known as f64 / request_count.max(1) as f64).min(1.0)),
    })
}

/// Queries the server for the number of frames from known clients that the XDP program on its
/// interface has evaluated. The program counts from the beginning of the flood on. `None`
/// without admission control.
fn count_evaluated_known(control: &Path) -> Result<Option<u64>, LabError> {
    let mut command = Command::new(programs::tidegate()?);
    let output = run_to_end(command.arg("ctl").arg(control).arg("--json"), "tidegate")?;
    let answer: Value = serde_json::from_str(&output)
        .map_err(|error| LabError::Config(format!("`tidegate ctl` printed {output:?}: {error}")))?;
    let classes = &answer["gate"]["classes"];
    let sum = |class: &Value| -> u64 {
        let counters = class.as_object().into_iter().flatten();
        counters.filter_map(|(_, packets)| packets.as_u64()).sum()
    };
    let total: u64 = classes.as_object().into_iter().flatten().map(|(_, class)| sum(class)).sum();
    Ok((total > 0).then(|| sum(&classes["known"])))
}

impl PolicyResults {
    fn median(&self, figure: impl Fn(&AdmissionRun) -> f64) -> f64 {
        median(self.runs.iter().map(figure))
    }

    /// Names and values of the figures: the share of requests answered and, with admission control,
    /// the share lost on a full RX ring.
    pub(super) fn figures(&self) -> Vec<(String, f64)> {
        let answered = (self.figure.to_owned(), self.median(|run| run.answered_share));
        let rx_missed = (format!("{}_unseen", self.figure), self.median(|run| run.rx_missed_share));
        if self.flags.is_empty() { vec![answered] } else { vec![answered, rx_missed] }
    }

    pub(super) fn row(&self) -> Value {
        let latency_ms = self.median(|run| run.median_latency_ms);
        json!({
            "test": "known client among strangers",
            "carrier": self.name,
            "offered_per_s": self.median(|run| run.offered_pps).round(),
            "answered_during": (self.median(|run| run.answered_share) * 1e4).round() / 1e4,
            "unseen": (self.median(|run| run.rx_missed_share) * 1e4).round() / 1e4,
            "latency_during_ms": latency_ms.is_finite().then_some(latency_ms),
        })
    }
}
