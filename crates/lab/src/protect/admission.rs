//! A known client among strangers: who is answered when not everybody can be.

use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

use super::ProtectConfig;
use crate::client::{Client, Questions, answered_of, answered_share, median_latency_s};
use crate::dns::sweep::median;
use crate::error::LabError;
use crate::livelock::bench::{Bench, GIGABIT_LINE_PPS, LOAD_ADDRESS, Source};
use crate::livelock::subject::{Carrier, Service, this_program};
use crate::netns::run_to_end;

/// Questions per second of the known client.
const CLIENT_PPS: f64 = 5_000.0;
/// Work for each question: about that of a DNS server.
const WORK_NS: u64 = 2_000;
/// A source is known when it was seen in two periods of a second in a row, and
/// the first one is not whole.
const LEARNING: Duration = Duration::from_millis(3_500);

/// What became of the known client's questions during the flood.
#[derive(Clone, Copy, Debug)]
struct Run {
    answered: f64,
    median_ms: f64,
    offered_pps: f64,
    /// The share of its questions that nobody looked at: the device had no room.
    unseen: f64,
}

/// How fast the strangers send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rate {
    /// As fast as a line of 1 Gb/s is.
    Line,
    /// As fast as they can. More comes then than anybody can look at, and the
    /// device loses frames whoever sent them.
    Unlimited,
}

impl Rate {
    fn pps(self) -> Option<f64> {
        (self == Self::Line).then_some(GIGABIT_LINE_PPS)
    }
}

/// The runs with one policy.
pub(super) struct Policy {
    name: &'static str,
    figure: &'static str,
    flags: &'static [&'static str],
    flood: Rate,
    runs: Vec<Run>,
}

/// Measures both policies, in turn.
pub(super) fn run(config: &ProtectConfig, bench: &Bench) -> Result<Vec<Policy>, LabError> {
    let policy =
        |name, figure, flags, flood| Policy { name, figure, flags, flood, runs: Vec::new() };
    let admission: &[&str] = &["--admission"];
    let mut all = vec![
        policy("admission", "known_peer_answered", admission, Rate::Line),
        policy("drop-tail", "known_peer_answered_droptail", &[], Rate::Line),
        policy("admission, overrun", "known_peer_answered_overrun", admission, Rate::Unlimited),
        policy("drop-tail, overrun", "known_peer_answered_droptail_overrun", &[], Rate::Unlimited),
    ];
    for repeat in 1..=config.repeats {
        for one in &mut all {
            let run = known_among_strangers(config, bench, one.flags, one.flood.pps())?;
            eprintln!(
                "{repeat} {:<20} {:.1} % of the known client's questions answered, {:.1} % lost \
                 unseen, {:.0} k/s offered",
                one.name,
                100.0 * run.answered,
                100.0 * run.unseen,
                run.offered_pps / 1e3
            );
            one.runs.push(run);
        }
    }
    Ok(all)
}

fn known_among_strangers(
    config: &ProtectConfig,
    bench: &Bench,
    policy: &[&str],
    flood_pps: Option<f64>,
) -> Result<Run, LabError> {
    let carrier = Carrier::tidegate();
    let folder = tempfile::tempdir().map_err(LabError::io("cannot make a folder for a socket"))?;
    let control = folder.path().join("control");
    let control_flag = control.display().to_string();
    // So that answers to strangers find a way out.
    let route = format!("0.0.0.0/0={LOAD_ADDRESS}");
    let mut flags = vec!["--route", &route, "--control", &control_flag];
    flags.extend(policy);
    let service = Service {
        carrier,
        work_ns: WORK_NS,
        sink: false,
        flags: &flags,
        flooded_by: Source::Strangers,
    };
    let flooded = Duration::from_secs_f64(config.third_seconds);
    let mut running = service.start(bench, LEARNING + flooded + Duration::from_secs(30))?;
    let namespace = &bench.pair.a.namespace;
    let client = Client::start(
        namespace,
        running.target,
        Questions::Numbered,
        CLIENT_PPS,
        config.load_core,
    )?;
    thread::sleep(LEARNING);
    let from_s = client.now_s();
    let flood = &mut running.flood;
    let load = bench.measure(flood, &running.meter, flood_pps, Duration::ZERO, flooded)?;
    let to_s = client.now_s();
    running.flood.set_rate(Some(0.0))?;
    let known = judged_known(&control)?;
    let asked = client.stop()?;
    let (questions, _) = answered_of(&asked, from_s, to_s);
    Ok(Run {
        answered: answered_share(&asked, from_s, to_s),
        median_ms: 1e3 * median_latency_s(&asked, from_s, to_s),
        offered_pps: load.offered_pps,
        unseen: known.map_or(0.0, |known| 1.0 - (known as f64 / questions.max(1) as f64).min(1.0)),
    })
}

/// Asks the server how many frames of known clients its program on the interface
/// has judged, which it does from the beginning of the flood on; nothing without
/// admission.
fn judged_known(control: &Path) -> Result<Option<u64>, LabError> {
    let mut command = Command::new(this_program()?);
    let output = run_to_end(command.arg("ctl").arg(control).arg("--json"), "tidegate")?;
    let answer: Value = serde_json::from_str(&output)
        .map_err(|error| LabError::Config(format!("`tidegate ctl` said {output:?}: {error}")))?;
    let classes = &answer["gate"]["classes"];
    let sum = |class: &Value| -> u64 {
        let counters = class.as_object().into_iter().flatten();
        counters.filter_map(|(_, packets)| packets.as_u64()).sum()
    };
    let all: u64 = classes.as_object().into_iter().flatten().map(|(_, class)| sum(class)).sum();
    Ok((all > 0).then(|| sum(&classes["known"])))
}

impl Policy {
    fn median(&self, figure: impl Fn(&Run) -> f64) -> f64 {
        median(&self.runs.iter().map(figure).collect::<Vec<_>>())
    }

    /// The figures' names and values: the share of questions answered, and of
    /// those that nobody could look at.
    pub(super) fn figures(&self) -> Vec<(String, f64)> {
        let answered = (self.figure.to_owned(), self.median(|run| run.answered));
        let unseen = (format!("{}_unseen", self.figure), self.median(|run| run.unseen));
        if self.flags.is_empty() { vec![answered] } else { vec![answered, unseen] }
    }

    pub(super) fn row(&self) -> Value {
        let latency_ms = self.median(|run| run.median_ms);
        json!({
            "test": "known client among strangers",
            "carrier": self.name,
            "offered_per_s": self.median(|run| run.offered_pps).round(),
            "answered_during": (self.median(|run| run.answered) * 1e4).round() / 1e4,
            "unseen": (self.median(|run| run.unseen) * 1e4).round() / 1e4,
            "latency_during_ms": latency_ms.is_finite().then_some(latency_ms),
        })
    }
}
