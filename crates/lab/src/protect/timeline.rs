//! A server under a flood that comes and goes: the time line, and how soon it
//! is over.

use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

use super::ProtectConfig;
use crate::client::{Asked, Client, Questions, answered_share, median_latency_s, recovery_s};
use crate::dns::sweep::median;
use crate::error::LabError;
use crate::livelock::bench::{Bench, Source};
use crate::livelock::subject::{Carrier, Service};
use crate::plot::{Axis, Panel, Series, Span};

/// Questions per second; a millisecond is as finely as recovery is seen.
const CLIENT_PPS: f64 = 1000.0;
/// Work for each question: a server that does something.
const WORK_NS: u64 = 2_000;
/// A bar of the picture.
const BIN_S: f64 = 0.1;
/// An answer is in time when it takes no longer than this, or ten times what
/// it takes without a flood.
const IN_TIME_S: f64 = 0.005;

/// One run: what became of each question, and when the flood was.
struct Line {
    asked: Vec<Asked>,
    flood_s: (f64, f64),
}

/// The runs of one carrier.
pub(super) struct TimeLine {
    pub(super) carrier: Carrier,
    lines: Vec<Line>,
    third_s: f64,
}

pub(super) fn run(config: &ProtectConfig, bench: &Bench) -> Result<Vec<TimeLine>, LabError> {
    let third_s = config.third_seconds;
    let mut all: Vec<TimeLine> = config
        .carriers()?
        .into_iter()
        .map(|carrier| TimeLine { carrier, lines: Vec::new(), third_s })
        .collect();
    for repeat in 1..=config.repeats {
        for one in &mut all {
            one.lines.push(line(config, bench, one.carrier)?);
            let recovery = one.lines.last().and_then(Line::recovery_ms);
            let recovery = recovery.map_or("never".into(), |ms| format!("{ms:.1} ms"));
            eprintln!("{repeat} {:<16} recovered after {recovery}", one.carrier.name());
        }
    }
    Ok(all)
}

fn line(config: &ProtectConfig, bench: &Bench, carrier: Carrier) -> Result<Line, LabError> {
    let third = Duration::from_secs_f64(config.third_seconds);
    let limit = 3 * third + Duration::from_secs(30);
    let service =
        Service { carrier, work_ns: WORK_NS, sink: false, flags: &[], flooded_by: Source::OneHost };
    let mut running = service.start(bench, limit)?;
    let namespace = &bench.pair.a.namespace;
    let client = Client::start(
        namespace,
        running.target,
        Questions::Numbered,
        CLIENT_PPS,
        config.load_core,
    )?;
    thread::sleep(third);
    let from_s = client.now_s();
    running.flood.set_rate(None)?;
    thread::sleep(third);
    running.flood.set_rate(Some(0.0))?;
    let to_s = client.now_s();
    thread::sleep(third);
    Ok(Line { asked: client.stop()?, flood_s: (from_s, to_s) })
}

impl Line {
    /// Milliseconds from the flood's end until the server was as before.
    fn recovery_ms(&self) -> Option<f64> {
        let calm_s = median_latency_s(&self.asked, 0.0, self.flood_s.0);
        let limit_s = (10.0 * calm_s).max(IN_TIME_S);
        recovery_s(&self.asked, self.flood_s.1, limit_s).map(|seconds| seconds * 1e3)
    }
}

impl TimeLine {
    /// The median time to recover, in milliseconds. A run that never did counts
    /// as long as it was watched.
    pub(super) fn recovery_ms(&self) -> f64 {
        let of = |line: &Line| line.recovery_ms().unwrap_or(self.third_s * 1e3);
        median(&self.lines.iter().map(of).collect::<Vec<_>>())
    }

    pub(super) fn row(&self) -> Value {
        let each = |figure: &dyn Fn(&Line) -> f64| {
            let value = median(&self.lines.iter().map(figure).collect::<Vec<_>>());
            value.is_finite().then(|| (value * 1000.0).round() / 1000.0)
        };
        let during = |line: &Line, figure: fn(&[Asked], f64, f64) -> f64| {
            figure(&line.asked, line.flood_s.0, line.flood_s.1)
        };
        json!({
            "test": "time line",
            "carrier": self.carrier.name(),
            "answered_before": each(&|line| answered_share(&line.asked, 0.0, line.flood_s.0)),
            "answered_during": each(&|line| during(line, answered_share)),
            "latency_before_ms":
                each(&|line| 1e3 * median_latency_s(&line.asked, 0.0, line.flood_s.0)),
            "latency_during_ms": each(&|line| 1e3 * during(line, median_latency_s)),
            "recovery_ms": each(&|line| line.recovery_ms().unwrap_or(f64::INFINITY)),
        })
    }
}

/// Answers per second over time; the first run of each.
pub(super) fn panel(all: &[TimeLine]) -> Panel {
    let series = |one: &TimeLine| {
        let line = one.lines.first()?;
        let bins = (3.0 * one.third_s / BIN_S).floor() as u32;
        let point = |bin: u32| {
            let from_s = f64::from(bin) * BIN_S;
            let share = answered_share(&line.asked, from_s, from_s + BIN_S);
            (from_s, 100.0 * share)
        };
        Some(Series::new(one.carrier.name(), (0..bins).map(point)))
    };
    let flood = all.first().and_then(|one| one.lines.first()).map(|line| line.flood_s);
    Panel {
        title: "a client of the flooded service".into(),
        x: Axis::new("time", "s"),
        y: Axis::new("answered", "%").up_to(100.0),
        series: all.iter().filter_map(series).collect(),
        spans: flood.into_iter().map(|range| Span { range, label: "flood".into() }).collect(),
    }
}
