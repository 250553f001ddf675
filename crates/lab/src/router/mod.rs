//! The experiment `router`: packets forwarded against packets offered, with and
//! without a packet screen.
//!
//! Figures 6-1, 6-3, 6-4, 6-5 and 6-6 of Mogul and Ramakrishnan, "Eliminating
//! receive livelock in an interrupt-driven kernel" (1996), on this machine. The
//! unmodified kernel is mode `interrupt`: receiving in a thread at the highest
//! priority, protocol work below it, the screen as an ordinary process. The
//! modified one is mode `polled`, above the screen too.

mod bench;
pub mod share;
mod site;

use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use self::bench::{Bench, Running, Shape};
pub use self::site::{LEFT_V4, LEFT_V6, RIGHT_V4, RIGHT_V6, ROUTER_LEFT, ROUTER_RIGHT, RouterSite};
use crate::error::LabError;
use crate::experiment::Experiment;
use crate::livelock::curve::Curve;
use crate::load::flood;
use crate::netns;
use crate::plot::{Axis, Panel, Picture, Series};

/// How to run the experiment.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RouterLabConfig {
    /// Loads to offer, in packets per second, besides the maximum.
    pub loads_pps: Vec<f64>,
    /// Measure only the lines whose names contain this.
    pub only: Option<String>,
    /// How long to measure at each load, in seconds.
    pub seconds: f64,
    /// How often to measure everything; the median counts.
    pub repeats: usize,
    /// The core that routes.
    pub server_core: usize,
    /// The core that sends.
    pub load_core: usize,
}

impl Default for RouterLabConfig {
    fn default() -> Self {
        let kpps = [25, 50, 75, 100, 150, 200, 300, 400, 600, 800, 1200];
        Self {
            loads_pps: kpps.map(|kpps| f64::from(kpps) * 1e3).to_vec(),
            only: None,
            seconds: 0.5,
            repeats: 5,
            server_core: 1,
            load_core: 0,
        }
    }
}

impl RouterLabConfig {
    /// Everything once and shortly, for a first look.
    #[must_use]
    pub fn quick(self) -> Self {
        let kpps = [50, 100, 200, 400, 800];
        let loads_pps = kpps.map(|kpps| f64::from(kpps) * 1e3).to_vec();
        Self { loads_pps, seconds: 0.3, repeats: 1, ..self }
    }

    fn check(&self) -> Result<(), LabError> {
        let sane = self.seconds > 0.0 && self.seconds < 60.0 && self.repeats > 0;
        if !sane || self.loads_pps.iter().any(|load| !(load.is_finite() && *load > 0.0)) {
            return Err(LabError::Config(
                "seconds (below 60), repeats and loads must all be above zero".into(),
            ));
        }
        if self.lines().is_empty() {
            let names: Vec<String> = Line::all().into_iter().map(Line::name).collect();
            return Err(LabError::Config(format!(
                "no line contains {:?}; there are: {}",
                self.only.as_deref().unwrap_or_default(),
                names.join("; ")
            )));
        }
        bench::check_cores(self.server_core, self.load_core)
    }

    fn lines(&self) -> Vec<Line> {
        let wanted =
            |line: &Line| self.only.as_ref().is_none_or(|text| line.name().contains(text.as_str()));
        Line::all().into_iter().filter(wanted).collect()
    }
}

/// One line of the paper's figures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Line {
    /// How packets are looked for.
    mode: Mode,
    /// The quota of a callback; `None` has no limit.
    quota: Option<u32>,
    /// Whether each packet is shown to the screen.
    screen: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Interrupt,
    Polled,
    Feedback,
}

impl Mode {
    fn name(self) -> &'static str {
        match self {
            Self::Interrupt => "interrupt",
            Self::Polled => "polled",
            Self::Feedback => "polled+feedback",
        }
    }
}

const QUOTAS: [Option<u32>; 5] = [Some(5), Some(10), Some(20), Some(100), None];

impl Line {
    /// Every line, in the order of the figures.
    fn all() -> Vec<Self> {
        let interrupt = |screen| Self { mode: Mode::Interrupt, quota: None, screen };
        let polled = QUOTAS.map(|quota| Self { mode: Mode::Polled, quota, screen: false });
        let blind = Self { mode: Mode::Polled, quota: Some(10), screen: true };
        let feedback = |quota, screen| Self { mode: Mode::Feedback, quota, screen };
        let mut all = vec![interrupt(false), interrupt(true)];
        all.extend(polled);
        all.push(feedback(Some(10), false));
        all.push(blind);
        all.extend(QUOTAS.map(|quota| feedback(quota, true)));
        all
    }

    fn name(self) -> String {
        let screen = if self.screen { ", screen" } else { "" };
        match self.mode {
            Mode::Interrupt => format!("interrupt{screen}"),
            mode => format!("{}, quota {}{screen}", mode.name(), self.quota_name()),
        }
    }

    fn quota_name(self) -> String {
        self.quota.map_or("unlimited".into(), |quota| quota.to_string())
    }

    fn shape(self) -> Shape {
        let mut flags = vec!["--mode".to_owned()];
        flags.push(if self.mode == Mode::Interrupt { "interrupt" } else { "polled" }.into());
        if self.mode != Mode::Interrupt {
            flags.extend(["--quota".into(), self.quota_name()]);
        }
        if self.mode == Mode::Polled {
            flags.push("--no-feedback".into());
        }
        Shape { flags, interrupts: self.mode == Mode::Interrupt, screen: self.screen }
    }

    /// The figures of the paper that it is in.
    fn figures(self) -> &'static str {
        match (self.mode, self.screen) {
            (Mode::Interrupt, false) => "6-1, 6-3",
            (Mode::Interrupt, true) => "6-1, 6-4",
            (Mode::Polled, false) if matches!(self.quota, Some(5 | 20) | None) => "6-3, 6-5",
            (Mode::Polled, false) => "6-5",
            (Mode::Polled, true) => "6-4",
            (Mode::Feedback, true) if self.quota == Some(10) => "6-4, 6-6",
            (Mode::Feedback, true) => "6-6",
            (Mode::Feedback, false) => "none",
        }
    }

    /// Whether it is drawn with this figure of the paper.
    fn is_drawn_in(self, figure: &str) -> bool {
        let beside = self.mode == Mode::Feedback && !self.screen && figure == "6-3";
        beside || self.figures().split(", ").any(|part| part == figure)
    }

    /// What the paper says of it (`mogul_router.csv`).
    fn paper(self) -> &'static str {
        match (self.mode, self.screen, self.quota) {
            (Mode::Interrupt, false, _) => "peak 4,700/s, falls above it",
            (Mode::Interrupt, true, _) => "peak 2,000/s, 0 at 6,000/s offered: livelock",
            (Mode::Polled, false, None) => "near 0 above the MLFRR: livelock at the output queue",
            (Mode::Polled, false, Some(100)) => "falls as the quota grows",
            (Mode::Polled, false, Some(10 | 20)) => "stable, near the best",
            (Mode::Polled, false, _) => "at the MLFRR's plateau up to 12,000/s offered",
            (Mode::Polled, true, _) => "like the unmodified kernel: the screen's queue overflows",
            (Mode::Feedback, false, _) => "not in it: feedback from the output queue",
            (Mode::Feedback, _, Some(10)) => "flat plateau, no livelock, much higher peak",
            (Mode::Feedback, _, Some(5)) => "no livelock, about 5 % below the best",
            (Mode::Feedback, _, _) => "no livelock",
        }
    }
}

/// A line and what was measured of it.
struct Found {
    line: Line,
    curve: Curve,
}

/// Runs the experiment. Says on standard error what it is at.
///
/// # Errors
/// When there is only one core, namespaces cannot be made, a router does not
/// start, or the flood cannot be sent.
pub fn run(config: &RouterLabConfig) -> Result<Experiment, LabError> {
    config.check()?;
    for name in netns::remove_stale()? {
        eprintln!("removed namespace {name}, left behind by a process that is gone");
    }
    let bench = Bench::new(config.server_core, config.load_core)?;
    let loads = || config.loads_pps.iter().copied().map(Some).chain([None]);
    let mut found: Vec<Found> =
        config.lines().into_iter().map(|line| Found { line, curve: Curve::at(loads()) }).collect();
    for repeat in 1..=config.repeats {
        for one in &mut found {
            sweep(config, &bench, one)?;
            tell(repeat, one);
        }
    }
    let mut result = Experiment::new("router");
    describe(config, &mut result);
    conclude(&found, &mut result);
    Ok(result)
}

/// Starts one router and offers it every load once.
fn sweep(config: &RouterLabConfig, bench: &Bench, one: &mut Found) -> Result<(), LabError> {
    let time = Duration::from_secs_f64(config.seconds);
    let warm_up = Duration::from_secs_f64((config.seconds / 2.0).min(0.2));
    let limit = (time + warm_up) * one.curve.steps.len() as u32 + Duration::from_secs(20);
    let mut running = Running::start(&one.line.shape(), bench, limit)?;
    for step in &mut one.curve.steps {
        step.runs.push(running.measure(step.asked_pps, warm_up, time, || Ok(()))?);
    }
    Ok(())
}

fn tell(repeat: usize, one: &Found) {
    eprintln!("{repeat} {:<38} {} k/s", one.line.name(), one.curve.last_runs());
}

fn describe(config: &RouterLabConfig, result: &mut Experiment) {
    let (server, load) = (config.server_core, config.load_core);
    result.note(format!(
        "core {load} sends UDP packets of 4 bytes, by an XDP program that the kernel runs; core \
         {server} does all the rest: receive work, router, screen, and dropping what was forwarded \
         at the far end; forwarded packets are counted at the far device"
    ));
    result.note(flood::CARD);
    result.note(
        "the router has real-time priority, as a kernel's network code comes before programs; the \
         screen is an ordinary process. Linux keeps 5 % of a core for such processes, so a \
         livelock is a few percent of the peak and not 0",
    );
    result.note(
        "a floor is the least that is forwarded at any load above that of the peak, over the peak; \
         feedback_worst_floor is the worst of all lines with feedback, whatever their quota",
    );
    result.note(
        "the screen's queue is 32 packets, input stops at 75 % and starts again at 25 % or after 1 \
         ms; the screen makes a system call for each packet, and one for every 8 verdicts",
    );
    result.note(format!(
        "{} measurements of {} s at each load, lines taking turns; medians count",
        config.repeats, config.seconds
    ));
}

/// What people see; the JSON has more.
const COLUMNS: [&str; 7] =
    ["line", "paper_figures", "peak_per_s", "peak_at_per_s", "at_maximum_per_s", "floor", "paper"];

fn conclude(found: &[Found], result: &mut Experiment) {
    let curve = |mode, quota, screen| {
        let wanted = Line { mode, quota, screen };
        found.iter().find(|one| one.line == wanted).map(|one| &one.curve)
    };
    let mut figure = |name: &str, value: Option<f64>| {
        if let Some(value) = value {
            result.figure(name, rounded(value));
        }
    };
    let ten = Some(10);
    let (plain, screened) =
        (curve(Mode::Interrupt, None, false), curve(Mode::Interrupt, None, true));
    let fed = curve(Mode::Feedback, ten, true);
    figure("unmodified_floor", plain.map(Curve::floor));
    figure("unmodified_screen_floor", screened.map(Curve::floor));
    figure("polled_floor", curve(Mode::Polled, ten, false).map(Curve::floor));
    figure("polled_unlimited_floor", curve(Mode::Polled, None, false).map(Curve::floor));
    figure("polled_screen_floor", curve(Mode::Polled, ten, true).map(Curve::floor));
    figure("feedback_floor", curve(Mode::Feedback, ten, false).map(Curve::floor));
    figure("feedback_screen_floor", fed.map(Curve::floor));
    let every = found.iter().filter(|one| one.line.mode == Mode::Feedback);
    figure("feedback_worst_floor", every.map(|one| one.curve.floor()).reduce(f64::min));
    let over = |above: Option<&Curve>, below: Option<&Curve>| {
        let below = below.map(Curve::peak_pps).filter(|peak| *peak > 0.0)?;
        Some(above?.peak_pps() / below)
    };
    figure("feedback_screen_peak_over_unmodified", over(fed, screened));
    figure("polled_peak_over_unmodified", over(curve(Mode::Polled, ten, false), plain));
    result.rows = found.iter().map(row).collect();
    result.columns = COLUMNS.to_vec();
    result.picture = Some(picture(found));
}

fn rounded(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

fn row(one: &Found) -> Value {
    let points = one.curve.points();
    let peak = points.iter().copied().max_by(|a, b| a.1.total_cmp(&b.1)).unwrap_or_default();
    let steps: Vec<Value> = points
        .iter()
        .map(|&(offered, forwarded)| {
            json!({"offered_per_s": offered.round(), "forwarded_per_s": forwarded.round()})
        })
        .collect();
    json!({
        "line": one.line.name(),
        "mode": one.line.mode.name(),
        "quota": one.line.quota,
        "screen": one.line.screen,
        "paper_figures": one.line.figures(),
        "paper": one.line.paper(),
        "peak_per_s": peak.1.round(),
        "peak_at_per_s": peak.0.round(),
        "at_maximum_per_s": one.curve.at_maximum_pps().round(),
        "floor": rounded(one.curve.floor()),
        "steps": steps,
    })
}

/// One panel for each of the paper's figures.
fn picture(found: &[Found]) -> Picture {
    let panel = |(figure, title): &(&str, &str)| Panel {
        title: format!("{figure}: {title}"),
        x: Axis::new("offered", "packets/s"),
        y: Axis::new("forwarded", "packets/s"),
        series: found
            .iter()
            .filter(|one| one.line.is_drawn_in(figure))
            .map(|one| Series::new(one.line.name(), one.curve.points()))
            .collect(),
        spans: Vec::new(),
    };
    let panels = [
        ("6-1", "unmodified"),
        ("6-3", "polled, without screen"),
        ("6-4", "with screen"),
        ("6-5", "quotas, without screen"),
        ("6-6", "quotas, screen and feedback"),
    ];
    Picture {
        title: "Forwarded against offered, after Mogul and Ramakrishnan".into(),
        panels: panels.iter().map(panel).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::livelock::Measured;
    use crate::livelock::curve::Step;

    #[test]
    fn every_line_is_in_a_figure_and_its_flags_differ() {
        let all = Line::all();
        assert_eq!(all.len(), 14);
        for (at, line) in all.iter().enumerate() {
            assert!(all[at + 1..].iter().all(|other| other.shape() != line.shape()), "{line:?}");
        }
        let found: Vec<Found> =
            all.into_iter().map(|line| Found { line, curve: Curve::default() }).collect();
        let counts: Vec<usize> = picture(&found).panels.iter().map(|p| p.series.len()).collect();
        assert_eq!(counts, [2, 5, 3, 5, 5]);
    }

    #[test]
    fn figures_are_of_the_lines_that_they_name() {
        let found = |mode, quota, screen, points: [(f64, f64); 2]| {
            let step = |(offered_pps, goodput_pps)| Step {
                asked_pps: Some(offered_pps),
                runs: vec![Measured { offered_pps, goodput_pps, ..Measured::default() }],
            };
            Found {
                line: Line { mode, quota, screen },
                curve: Curve { steps: points.map(step).into() },
            }
        };
        let all = [
            found(Mode::Interrupt, None, true, [(50.0, 50.0), (500.0, 0.0)]),
            found(Mode::Feedback, Some(10), true, [(100.0, 100.0), (500.0, 99.0)]),
            found(Mode::Feedback, None, true, [(100.0, 100.0), (500.0, 90.0)]),
        ];
        let mut result = Experiment::new("router");
        conclude(&all, &mut result);
        assert_eq!(result.figures["unmodified_screen_floor"], 0.0);
        assert_eq!(result.figures["feedback_screen_floor"], 0.99);
        assert_eq!(result.figures["feedback_worst_floor"], 0.9);
        assert_eq!(result.figures["feedback_screen_peak_over_unmodified"], 2.0);
        assert!(!result.figures.contains_key("polled_floor"));
    }
}
