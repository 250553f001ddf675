//! Rows, figures and picture of the experiment.

use serde_json::{Value, json};

use super::servers::{FILE_BYTES, FILE_COUNT, KERNEL_WAYS, WebServer};
use super::timeline::{LevelRun, Service, Timeline};
use super::{REQUESTS_PER_S, WebServerConfig};
use crate::experiments::jonack::load_levels::{LEVELS_PPS, level_name};
use crate::experiments::kernel_best::Goal;
use crate::report::experiment::Experiment;
use crate::report::plot::{Axis, Panel, Picture, Series, Span};
use crate::stats::{median, round_to_thousandths};
use crate::testbed::load::flood::FLOOD_NOTE;
use crate::testbed::receive_work::ReceiveWork;
use crate::testbed::web_client::REQUEST_TIMEOUT;

/// Service of one phase at a level.
type ServiceOf = fn(&Timeline, &LevelRun) -> Service;

/// Lowest level whose time line is reported: N7, as in the paper.
const MIN_TIMELINE_PPS: f64 = LEVELS_PPS[7];

/// Server and its measurements.
pub(super) struct Case {
    pub(super) server: WebServer,
    pub(super) runs: Vec<Timeline>,
}

impl Timeline {
    /// Line of the progress: answers during each flood.
    pub(super) fn describe(&self) -> String {
        let level = |level: &LevelRun| {
            let Service { answered_per_s, mean_s, .. } = self.during(level);
            let (kpps, mean_ms) = (level.offered_pps / 1e3, mean_s * 1e3);
            format!("{kpps:.0} k/s: {answered_per_s:.0}/s, {mean_ms:.2} ms")
        };
        self.levels.iter().map(level).collect::<Vec<_>>().join("  ")
    }
}

fn name_of(level_pps: Option<f64>) -> String {
    let Some(pps) = level_pps else { return "maximum".to_owned() };
    let found = LEVELS_PPS.iter().position(|&level| level == pps);
    found.map_or_else(|| format!("{pps} packets/s"), level_name)
}

impl Case {
    fn level_count(&self) -> usize {
        self.runs.first().map_or(0, |run| run.levels.len())
    }

    fn level_pps(&self, level: usize) -> Option<f64> {
        self.runs[0].levels[level].level_pps
    }

    fn median_at(&self, level: usize, of: impl Fn(&Timeline, &LevelRun) -> f64) -> f64 {
        median(self.runs.iter().map(|run| of(run, &run.levels[level])))
    }

    /// Requests answered during the flood over those before.
    fn throughput_kept(&self, level: usize) -> f64 {
        self.median_at(level, |run, level| {
            run.during(level).answered_per_s / run.before().answered_per_s.max(1e-9)
        })
    }

    /// Mean response time during the flood over that before; infinite without a response.
    fn response_ratio(&self, level: usize) -> f64 {
        self.median_at(level, |run, level| run.during(level).mean_s / run.before().mean_s)
    }

    /// Time until responses are as before. A run without recovery counts with the time observed.
    fn recovery_s(&self, level: usize) -> f64 {
        self.median_at(level, |run, level| {
            run.recovery_s(level).unwrap_or(level.end_s - level.flood_s.1)
        })
    }

    /// Smallest share of a level that the generator made, in any run.
    fn offered_share_min(&self) -> Option<f64> {
        let levels = self.runs.iter().flat_map(|run| &run.levels);
        levels.filter_map(|level| Some(level.offered_pps / level.level_pps?)).reduce(f64::min)
    }

    fn rows(&self, config: &WebServerConfig) -> Vec<Value> {
        let levels = (0..self.level_count()).map(|level| self.row(config, level));
        let httperf = self.runs.iter().filter_map(|run| {
            let report = run.httperf?;
            Some(json!({
                "server": self.server.name(),
                "client": "httperf",
                "level": name_of(config.highest_level_of_paper()),
                "answered_during": round_to_thousandths(report.replies_per_s),
                "mean_ms_during": report.connection_ms,
                "errors_during": report.errors,
            }))
        });
        levels.chain(httperf).collect()
    }

    fn row(&self, config: &WebServerConfig, level: usize) -> Value {
        let of = |figure: &dyn Fn(&Timeline, &LevelRun) -> f64| {
            let value = self.median_at(level, figure);
            value.is_finite().then(|| round_to_thousandths(value))
        };
        let level_pps = self.level_pps(level);
        let mut row = json!({
            "server": self.server.name(),
            "client": "open loop",
            "level": name_of(level_pps),
            "level_per_s": level_pps,
            "offered_per_s": of(&|_, level| level.offered_pps.round()),
            "throughput_kept": round_to_thousandths(self.throughput_kept(level)),
            "recovery_s": of(&|run, level| run.recovery_s(level).unwrap_or(f64::INFINITY)),
        });
        let phases: [(&str, ServiceOf); 3] = [
            ("before", |run, _| run.before()),
            ("during", Timeline::during),
            ("after", Timeline::after),
        ];
        for (phase, service) in phases {
            row[format!("answered_{phase}")] =
                json!(of(&|run, level| service(run, level).answered_per_s));
            row[format!("mean_ms_{phase}")] =
                json!(of(&|run, level| 1e3 * service(run, level).mean_s));
            row[format!("p99_ms_{phase}")] =
                json!(of(&|run, level| 1e3 * service(run, level).p99_s));
            row[format!("errors_{phase}")] =
                json!(of(&|run, level| service(run, level).errors as f64));
        }
        row["mean_ms_during_lowest"] = json!(of(&|run, level| 1e3 * run.mean_s_range(level).0));
        row["mean_ms_during_highest"] = json!(of(&|run, level| 1e3 * run.mean_s_range(level).1));
        if has_timeline(level_pps) {
            let bins = self.runs[0].bins(&self.runs[0].levels[level], config.third_seconds);
            let finite = |ms: f64| ms.is_finite().then(|| round_to_thousandths(ms));
            let answered = bins.iter().map(|(_, one)| one.answered_per_s);
            row["answered_each_second"] = answered.collect();
            row["mean_ms_each_second"] =
                bins.iter().map(|(_, one)| finite(1e3 * one.mean_s)).collect();
        }
        row
    }
}

/// True at the levels whose time lines are reported.
fn has_timeline(level_pps: Option<f64>) -> bool {
    level_pps.is_none_or(|pps| pps >= MIN_TIMELINE_PPS)
}

pub(super) fn describe(config: &WebServerConfig, has_httperf: bool, result: &mut Experiment) {
    let (server, load) = (config.server_core, config.load_core);
    let (smallest, largest) = FILE_BYTES;
    result.note(format!(
        "core {server} runs the server and its receive work; core {load} runs a client on kernel \
         sockets that asks {REQUESTS_PER_S} times a second, each time on a new connection, for one of \
         {FILE_COUNT} files of {smallest} to {largest} bytes, and in the time that the client leaves a \
         flood of 64-byte UDP frames from one host to a port without a socket"
    ));
    result.note(format!(
        "N1 to N8 are the paper's rates, 127 to 875 thousand packets/s, for all servers alike; \
         offered_per_s is what the generator made; each server has a quiet third of {} s before any \
         flood, then at each level as long with the flood and as long without it",
        config.third_seconds
    ));
    result.note(format!(
        "answered: responses for each second in which they came; mean_ms and p99_ms: time from when \
         a request was due to the end of its response, of the requests due in that third, lowest and \
         highest of its quarters; errors: \
         requests without a complete response within {} s; recovery: time until 95 % of 100 requests are \
         answered within twice the 99th percentile of before",
        REQUEST_TIMEOUT.as_secs()
    ));
    result.note(
        "Apache is attached to a daemon on its core, since it serves from children; nginx is one \
         process with the stack embedded; all servers on Tidegate have admission control; \
         kernel_best is the best way of the kernel in which the server's core receives: with \
         kernel-softirq Linux receives on the sender's core, which slows down the flood",
    );
    result.note(
        "the paper's Apache on a Pentium 4 of 3 GHz: with interrupt moderation 64 % less throughput and \
         1,000 times the response time at N7, and no response at N8; with NAPI all throughput, 0.3 ms \
         instead of 0.2 ms from N3 on and 0.7 ms at N8",
    );
    result.note(FLOOD_NOTE);
    if !has_httperf {
        result.note("httperf is not installed: apt-get install httperf");
    }
}

/// Columns of the printed table; the JSON has more.
const COLUMNS: [&str; 10] = [
    "server",
    "client",
    "level",
    "offered_per_s",
    "answered_before",
    "answered_during",
    "mean_ms_before",
    "mean_ms_during",
    "p99_ms_during",
    "recovery_s",
];

/// Levels that a figure counts.
#[derive(Clone, Copy)]
struct Levels {
    suffix: &'static str,
    has_maximum: bool,
}

const ALL_LEVELS: [Levels; 2] =
    [Levels { suffix: "", has_maximum: true }, Levels { suffix: "_n8", has_maximum: false }];

/// Figure of a server at a level.
struct Figure {
    name: &'static str,
    goal: Goal,
    of: fn(&Case, usize) -> f64,
}

const FIGURES: [Figure; 3] = [
    Figure { name: "web_throughput_kept", goal: Goal::Highest, of: Case::throughput_kept },
    Figure { name: "web_response_ratio", goal: Goal::Lowest, of: Case::response_ratio },
    Figure { name: "web_recovery_s", goal: Goal::Lowest, of: Case::recovery_s },
];

impl Figure {
    /// Worst value over servers and levels. `None` without measurements.
    fn worst(
        &self,
        cases: &[Case],
        levels: Levels,
        is_counted: impl Fn(WebServer) -> bool,
    ) -> Option<f64> {
        let counted = cases.iter().filter(|case| is_counted(case.server));
        let values = counted.flat_map(|case| {
            let is_wanted =
                move |&level: &usize| levels.has_maximum || case.level_pps(level).is_some();
            (0..case.level_count()).filter(is_wanted).map(move |level| (self.of)(case, level))
        });
        values.reduce(|worst, value| match self.goal {
            Goal::Highest => worst.min(value),
            Goal::Lowest => worst.max(value),
        })
    }

    /// Sets the figure for Tidegate, for each way of the kernel, and for the best of those in which
    /// the server's core receives.
    fn report(&self, cases: &[Case], levels: Levels, result: &mut Experiment) {
        let mut set = |way: &str, value: Option<f64>| {
            let name = format!("{}{}{way}", self.name, levels.suffix);
            match value {
                // JSON has no infinity.
                Some(value) if !value.is_finite() => {
                    result.note(format!("{name}: no response during a flood"));
                }
                Some(value) => result.figure(&name, round_to_thousandths(value)),
                None => {}
            }
        };
        set("", self.worst(cases, levels, |server| server.kernel_way().is_none()));
        let mut compared = Vec::new();
        for work in KERNEL_WAYS {
            let value = self.worst(cases, levels, |server| server.kernel_way() == Some(work));
            set(&format!("_{}", work.kernel_name().replace('-', "_")), value);
            if work != ReceiveWork::Softirq {
                compared.extend(value);
            }
        }
        let best = compared.into_iter().reduce(|best, value| match self.goal {
            Goal::Highest => best.max(value),
            Goal::Lowest => best.min(value),
        });
        set("_kernel_best", best);
    }
}

pub(super) fn conclude(config: &WebServerConfig, cases: &[Case], result: &mut Experiment) {
    for figure in FIGURES {
        for levels in ALL_LEVELS {
            figure.report(cases, levels, result);
        }
    }
    if let Some(made) = cases.iter().filter_map(Case::offered_share_min).reduce(f64::min) {
        result.figure("web_level_offered_share_min", round_to_thousandths(made));
    }
    result.rows = cases.iter().flat_map(|case| case.rows(config)).collect();
    result.columns = COLUMNS.to_vec();
    result.picture = Some(picture(config, cases));
}

/// Response time over time around the highest levels, throughput and response time by level.
fn picture(config: &WebServerConfig, cases: &[Case]) -> Picture {
    let mut panels = Vec::new();
    for (number, &level_pps) in config.levels_pps.iter().enumerate() {
        if has_timeline(level_pps) {
            panels.push(timeline_panel(config, cases, number));
        }
    }
    let by_level = |title: &str, y: Axis, of: fn(&Timeline, &LevelRun) -> f64| {
        let series = |case: &Case| {
            let point = |level| {
                (case.median_at(level, |_, level| level.offered_pps), case.median_at(level, of))
            };
            Series::new(case.server.name(), (0..case.level_count()).map(point))
        };
        let x = Axis::new("flood", "packets/s");
        Panel {
            title: title.into(),
            x,
            y,
            series: cases.iter().map(series).collect(),
            spans: Vec::new(),
        }
    };
    panels.push(by_level("during the flood", Axis::new("answered", "requests/s"), |run, level| {
        run.during(level).answered_per_s
    }));
    let mean = Axis::new("mean response time", "ms").log();
    panels.push(by_level("during the flood", mean, |run, level| 1e3 * run.during(level).mean_s));
    Picture { title: "Web servers with a flood in the middle third of the time".into(), panels }
}

fn timeline_panel(config: &WebServerConfig, cases: &[Case], level: usize) -> Panel {
    let third_s = config.third_seconds;
    let series = |case: &Case| {
        let run = case.runs.first()?;
        let bins = run.bins(&run.levels[level], third_s);
        let points = bins.into_iter().map(|(second, one)| (second, 1e3 * one.mean_s));
        Some(Series::new(case.server.name(), points))
    };
    Panel {
        title: format!("flood at {}", name_of(config.levels_pps[level])),
        x: Axis::new("time", "s"),
        y: Axis::new("mean response time", "ms").log(),
        series: cases.iter().filter_map(series).collect(),
        spans: vec![Span { range: (third_s, 2.0 * third_s), label: "flood".into() }],
    }
}

#[cfg(test)]
mod tests {
    use super::super::timeline::tests::timeline;
    use super::*;
    use crate::testbed::apps::StackKind;
    use crate::testbed::apps::application::Application;

    #[test]
    fn figures_are_those_of_the_worst_server_and_the_best_way() {
        let on = |work| WebServer::Packaged(Application::Apache, StackKind::Kernel(work));
        let case = |server, during| Case { server, runs: vec![timeline(during)] };
        let cases = [
            case(WebServer::Tidegate, Some(0.001)),
            case(WebServer::Packaged(Application::Nginx, StackKind::Embedded), Some(0.002)),
            case(on(ReceiveWork::Softirq), Some(0.001)),
            case(on(ReceiveWork::Timer), None),
            case(on(ReceiveWork::Thread), Some(0.004)),
        ];
        let mut result = Experiment::new("web-server");
        let config = WebServerConfig { third_seconds: 1.0, ..WebServerConfig::default() };
        let config = WebServerConfig { levels_pps: vec![Some(875e3)], ..config };
        conclude(&config, &cases, &mut result);
        let figure = |name: &str| result.figures.get(name).copied();
        assert_eq!(figure("web_response_ratio"), Some(2.0));
        assert_eq!(figure("web_level_offered_share_min"), Some(0.914));
        assert_eq!(figure("web_response_ratio_n8"), Some(2.0));
        assert_eq!(figure("web_response_ratio_kernel_best"), Some(4.0));
        assert_eq!(figure("web_response_ratio_kernel_timer"), None, "no response");
        assert_eq!(figure("web_throughput_kept_kernel_timer"), Some(0.0));
        assert!(figure("web_throughput_kept").unwrap() > 0.98);
        assert_eq!(figure("web_throughput_kept_kernel_rps"), None, "not measured");
        assert!(result.notes.iter().any(|note| note.contains("web_response_ratio_kernel_timer")));
        assert_eq!(result.rows[3]["errors_during"], 100.0);
        assert_eq!(result.rows[0]["answered_each_second"].as_array().unwrap().len(), 3);
        assert_eq!(result.rows[0]["level"], "N8");
        assert!(result.picture.unwrap().to_svg().unwrap().contains("flood at N8"));
    }
}
