//! Mogul and Ramakrishnan's router, with and without the screen.
//!
//! The costs are fitted on the unmodified kernel (Figure 6-1 and the idle
//! machine of section 7), and judged on the modified one (Figures 6-3 to 7-1).

use serde_json::json;
use tidegate_gate::{Config, Mode, Quota};
use tidegate_sim::{Beside, Costs, Link, Load, Machine, Report, Role, Screen, Setup, Shape, Tick};

use super::tables::Mogul;
use super::{Judged, least_that};
use crate::plot::{Axis, Panel, Series};
use crate::sweep::{hundredths, settings};
use crate::{Experiment, LabError};

const MS: u64 = 1_000_000;
/// Virtual time of each trial: as long as 10,000 packets take (section 6.1).
const WINDOW_MS: u64 = 2000;
const MACHINE: &str = "DECstation 3000/300";
/// Offered loads of the courses, in packets per second.
const LOADS_PPS: [u64; 10] = [1000, 2000, 3000, 4000, 5000, 6000, 8000, 10_000, 12_000, 14_000];
/// The load at which plateaus are read: that of Figure 6-3.
const OVERLOAD_PPS: u64 = 12_000;
/// Less than this of the peak is livelock.
const LIVELOCK: f64 = 0.01;

/// The router's costs, in nanoseconds a packet. No table tells the small ones
/// (interrupt, dispatch, turn, change of context): they are fixed parts of
/// the cost at the device.
#[derive(Clone, Copy, Debug)]
struct Router {
    receive_ns: f64,
    protocol_ns: f64,
    transmit_ns: f64,
    screen_ns: f64,
    tick_ns: u64,
}

impl Router {
    fn costs(self) -> Costs {
        let part = |share: f64| (self.receive_ns * share) as u64;
        Costs {
            interrupt_ns: part(0.1),
            receive_ns: part(1.0),
            software_ns: part(0.1),
            protocol_ns: self.protocol_ns as u64,
            poll_ns: part(0.05),
            poll_receive_ns: part(0.9),
            switch_ns: part(0.5),
            read_ns: (self.screen_ns / 3.0) as u64,
            work_ns: (self.screen_ns * 2.0 / 3.0) as u64,
            transmit_ns: self.transmit_ns as u64,
            transmit_done_ns: part(0.1),
        }
    }

    fn measure(self, kernel: Kernel, screen: bool, pps: u64) -> Result<Report, LabError> {
        let setup = Setup {
            gate: settings(kernel.config())?,
            costs: self.costs(),
            link: Link { bits_per_second: 10_000_000 },
            receive_ring: 32,
            transmit_ring: 32,
            // "The IP layer runs as a separately scheduled thread" (section 6.3).
            protocol_thread: true,
            role: Role::Router { output_queue: 50, screen: screen.then_some(Screen { queue: 32 }) },
            beside: if matches!(kernel, Kernel::Share(_)) { vec![Beside::Compute] } else { vec![] },
            tick: Some(Tick { period_ns: MS, cost_ns: self.tick_ns }),
            quantum_ns: 10 * MS,
            // The source did not pace its packets evenly (section 6.1).
            load: Load { pps, shape: Shape::Poisson, ..Load::default() },
            ..Setup::default()
        };
        let mut machine =
            Machine::new(&setup).map_err(|error| LabError::Config(error.to_string()))?;
        machine.run(200 * MS);
        Ok(machine.run(WINDOW_MS * MS))
    }

    fn delivered(self, kernel: Kernel, screen: bool, pps: u64) -> Result<f64, LabError> {
        Ok(self.measure(kernel, screen, pps)?.delivered_pps())
    }

    /// The most that is delivered at any load around `about_pps`.
    fn peak(self, kernel: Kernel, screen: bool, about_pps: f64) -> Result<f64, LabError> {
        let mut peak: f64 = 0.0;
        for tenths in [7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 14.0] {
            let pps = (about_pps * tenths / 10.0) as u64;
            peak = peak.max(self.delivered(kernel, screen, pps)?);
        }
        Ok(peak)
    }

    /// What is delivered at each load.
    fn course(self, kernel: Kernel, screen: bool) -> Result<Vec<(f64, f64)>, LabError> {
        let point = |&pps: &u64| Ok((pps as f64, self.delivered(kernel, screen, pps)?));
        LOADS_PPS.iter().map(point).collect()
    }
}

/// A configuration of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kernel {
    /// As it was: interrupts.
    Unmodified,
    /// Polled, with this quota, without feedback.
    Polled(Quota),
    /// Polled, with this quota and feedback.
    Feedback(Quota),
    /// Polled, with a cycle limit in percent, beside a program that computes.
    Share(u32),
}

impl Kernel {
    fn config(self) -> Config {
        let polled = |quota, feedback| Config {
            mode: Mode::Polled,
            receive_quota: quota,
            transmit_quota: quota,
            feedback,
            ..Config::default()
        };
        match self {
            Self::Unmodified => Config { mode: Mode::Interrupt, ..Config::default() },
            Self::Polled(quota) => polled(quota, false),
            Self::Feedback(quota) => polled(quota, true),
            Self::Share(percent) => {
                Config { cpu_share_percent: percent, ..polled(Quota::Packets(5), false) }
            }
        }
    }
}

const QUOTA: Quota = Quota::Packets(10);
const QUOTAS: [Quota; 5] = [
    Quota::Packets(5),
    Quota::Packets(10),
    Quota::Packets(20),
    Quota::Packets(100),
    Quota::Unlimited,
];

/// Fits the costs on the unmodified kernel.
fn fit(mogul: &Mogul) -> Result<Router, LabError> {
    let us = 1000.0;
    let mut router = Router {
        receive_ns: 70.0 * us,
        protocol_ns: 80.0 * us,
        transmit_ns: 40.0 * us,
        screen_ns: 250.0 * us,
        tick_ns: (MS as f64 * (100.0 - mogul.idle_user_percent) / 100.0) as u64,
    };
    let kernel = Kernel::Unmodified;
    // Without the screen it would livelock somewhat below the network's rate.
    router.receive_ns = least_that(20.0 * us, 120.0 * us, |receive_ns| {
        let router = Router { receive_ns, ..router };
        let delivered = router.delivered(kernel, false, mogul.ethernet_pps)?;
        Ok(delivered < LIVELOCK / 2.0 * mogul.peak_pps)
    })?;
    router.protocol_ns = least_that(10.0 * us, 200.0 * us, |protocol_ns| {
        let router = Router { protocol_ns, ..router };
        let delivered = router.delivered(kernel, true, mogul.screen_livelock_pps)?;
        Ok(delivered < LIVELOCK / 2.0 * mogul.screen_peak_pps)
    })?;
    router.transmit_ns = least_that(us, 200.0 * us, |transmit_ns| {
        let router = Router { transmit_ns, ..router };
        Ok(router.peak(kernel, false, mogul.peak_pps)? <= mogul.peak_pps)
    })?;
    router.screen_ns = least_that(20.0 * us, 600.0 * us, |screen_ns| {
        let router = Router { screen_ns, ..router };
        Ok(router.peak(kernel, true, mogul.screen_peak_pps)? <= mogul.screen_peak_pps)
    })?;
    Ok(router)
}

fn most(points: &[(f64, f64)]) -> f64 {
    points.iter().map(|point| point.1).fold(0.0, f64::max)
}

/// The worst above the load of the peak, over the peak.
fn floor(points: &[(f64, f64)]) -> f64 {
    let peak = most(points);
    let at = points.iter().position(|point| point.1 == peak).unwrap_or(0);
    points[at..].iter().map(|point| point.1).fold(peak, f64::min) / peak
}

/// Fits the router, runs it in every configuration, and judges.
pub(super) fn run(result: &mut Experiment) -> Result<(Vec<Judged>, Vec<Panel>), LabError> {
    let mogul = Mogul::read()?;
    let router = fit(&mogul)?;
    let mut judged = Vec::new();
    judge_unmodified(&mut judged, &mogul, router)?;
    let (plain, plain_panel) = courses(&mogul, router, false, result)?;
    let (screened, screened_panel) = courses(&mogul, router, true, result)?;
    judge_plain(&mut judged, &mogul, &plain);
    judge_screened(&mut judged, &mogul, router, &screened)?;
    judge_quotas(&mut judged, router)?;
    judge_share(&mut judged, router)?;
    let us = |ns: f64| hundredths(ns / 1000.0);
    result.note(format!(
        "Mogul and Ramakrishnan: fitted on the unmodified kernel (Figure 6-1): {} us at the \
         device, {} us in IP, {} us to send, {} us in the screen; judged on the modified kernel",
        us(router.receive_ns),
        us(router.protocol_ns),
        us(router.transmit_ns),
        us(router.screen_ns)
    ));
    result.note(
        "assumed parts of the cost at the device, since no table says: interrupt, dispatch and \
         taking back a descriptor a tenth each, a turn a twentieth, a change of context a half; \
         polling saves the tenth that the input queue costs",
    );
    result.note(
        "shapes are the paper's words, read as: flat is a floor of at least 0.95, livelock one \
         under 0.05, slightly above is up to 20 %, much higher is at least 10 %, slightly below is \
         0.1 to 10 %",
    );
    result.note(
        "known difference: a quota of 5 costs the paper's router with the screen about 5 %, and \
         the simulated one less than 1 %",
    );
    Ok((judged, vec![plain_panel, screened_panel]))
}

fn judge_unmodified(
    judged: &mut Vec<Judged>,
    mogul: &Mogul,
    router: Router,
) -> Result<(), LabError> {
    let kernel = Kernel::Unmodified;
    let peaks = [
        ("unmodified peak (MLFRR)", false, mogul.peak_pps),
        ("unmodified peak with screen (MLFRR)", true, mogul.screen_peak_pps),
    ];
    for (case, screen, published) in peaks {
        let got = router.peak(kernel, screen, published)?;
        judged.push(Judged::rate(MACHINE, case.to_owned(), "fitted", published, got));
    }
    let got = router.delivered(kernel, true, mogul.screen_livelock_pps)?;
    judged.push(Judged::statement(
        MACHINE,
        "unmodified with screen: livelock".to_owned(),
        "fitted",
        format!("0 at {}", mogul.screen_livelock_pps),
        format!("{got:.0}"),
        got < LIVELOCK * mogul.screen_peak_pps,
    ));
    Ok(())
}

/// What each kernel delivers at each load.
struct Courses {
    unmodified: Vec<(f64, f64)>,
    polled: Vec<(f64, f64)>,
    /// Without the screen: without quota. With it: with feedback.
    third: Vec<(f64, f64)>,
}

fn courses(
    mogul: &Mogul,
    router: Router,
    screen: bool,
    result: &mut Experiment,
) -> Result<(Courses, Panel), LabError> {
    let (third, name) = match screen {
        false => (Kernel::Polled(Quota::Unlimited), "polled, no quota"),
        true => (Kernel::Feedback(QUOTA), "polled, feedback"),
    };
    let courses = Courses {
        unmodified: router.course(Kernel::Unmodified, screen)?,
        polled: router.course(Kernel::Polled(QUOTA), screen)?,
        third: router.course(third, screen)?,
    };
    let named = [
        ("unmodified", &courses.unmodified),
        ("polled, quota 10", &courses.polled),
        (name, &courses.third),
    ];
    for (name, points) in named {
        let with = if screen { " with screen" } else { "" };
        result.rows.extend(points.iter().map(|(offered, delivered)| {
            json!({
                "machine": MACHINE,
                "case": format!("{name}{with}"),
                "offered_pps": offered,
                "received_pps": delivered.round(),
            })
        }));
    }
    let published_pps = if screen { mogul.screen_peak_pps } else { mogul.peak_pps };
    let published = [(0.0, published_pps), (LOADS_PPS[LOADS_PPS.len() - 1] as f64, published_pps)];
    let mut series = named.map(|(name, points)| Series::new(name, points.clone())).to_vec();
    series.push(Series::new("peak of the unmodified, published", published).dashed());
    let panel = Panel {
        title: format!("{MACHINE}{}", if screen { " with the screen" } else { "" }),
        x: Axis::new("offered", "packets/s"),
        y: Axis::new("forwarded", "packets/s"),
        series,
        ..Panel::default()
    };
    Ok((courses, panel))
}

/// A statement of the paper about the modified kernel.
fn shape(judged: &mut Vec<Judged>, case: &str, published: &str, simulated: String, holds: bool) {
    let case = format!("shape: {case}");
    let published = published.to_owned();
    judged.push(Judged::statement(MACHINE, case, "judged", published, simulated, holds));
}

/// Figure 6-3.
fn judge_plain(judged: &mut Vec<Judged>, mogul: &Mogul, plain: &Courses) {
    let (peak, flat) = (most(&plain.polled), floor(&plain.polled));
    let case = "polled MLFRR (section 7)".to_owned();
    judged.push(Judged::rate(MACHINE, case, "judged", mogul.polled_pps, peak));
    let over = peak / mogul.peak_pps;
    let words = "slightly above the unmodified";
    let holds = (1.0..1.2).contains(&over);
    shape(judged, "polled MLFRR", words, format!("{over:.2} of it"), holds);
    let words = "no collapse";
    shape(judged, "polled with a quota", words, format!("floor {flat:.2}"), flat >= 0.95);
    let floor = floor(&plain.third);
    let words = "almost zero above the MLFRR";
    shape(judged, "polled without quota", words, format!("floor {floor:.2}"), floor < 0.05);
    let at_5000 = plain.unmodified.iter().filter(|point| point.0 > mogul.peak_pps);
    let falls = at_5000.clone().zip(at_5000.skip(1)).all(|(a, b)| b.1 <= a.1);
    shape(judged, "unmodified above its peak", "falls", format!("falls: {falls}"), falls);
}

/// Figure 6-4.
fn judge_screened(
    judged: &mut Vec<Judged>,
    mogul: &Mogul,
    router: Router,
    screened: &Courses,
) -> Result<(), LabError> {
    let without = floor(&screened.polled);
    let words = "about as the unmodified: livelock";
    let got = format!("floor {without:.2}");
    shape(judged, "screen, polled without feedback", words, got, without < 0.05);
    let flat = floor(&screened.third);
    let got = format!("floor {flat:.2}");
    shape(judged, "screen, polled with feedback", "no livelock", got, flat >= 0.95);
    let peak = router.peak(Kernel::Feedback(QUOTA), true, mogul.screen_peak_pps * 1.3)?;
    let over = peak / mogul.screen_peak_pps;
    let words = "much higher peak";
    let got = format!("{over:.2} of the unmodified");
    shape(judged, "screen, feedback", words, got, over > 1.1);
    Ok(())
}

/// Figures 6-5 and 6-6.
fn judge_quotas(judged: &mut Vec<Judged>, router: Router) -> Result<(), LabError> {
    let plateaus = |kernel: fn(Quota) -> Kernel, screen| {
        QUOTAS
            .iter()
            .map(|&quota| router.delivered(kernel(quota), screen, OVERLOAD_PPS))
            .collect::<Result<Vec<f64>, LabError>>()
    };
    let list = |rates: &[f64]| {
        let words: Vec<String> = rates.iter().map(|rate| format!("{rate:.0}")).collect();
        words.join(", ")
    };
    let plain = plateaus(Kernel::Polled, false)?;
    let best = plain.iter().copied().fold(0.0, f64::max);
    let falls = plain.windows(2).all(|pair| pair[1] <= pair[0] * 1.02) && plain[4] < best * 0.05;
    let words = "falls as the quota grows";
    shape(judged, "quotas 5, 10, 20, 100, none", words, list(&plain), falls);
    let near = plain[1].min(plain[2]) >= 0.95 * best;
    shape(judged, "quotas 10 and 20", "near the best", list(&plain[1..3]), near);
    let fed = plateaus(Kernel::Feedback, true)?;
    let best = fed.iter().copied().fold(0.0, f64::max);
    let holds = fed.iter().all(|&rate| rate >= 0.9 * best);
    let words = "no livelock at any";
    shape(judged, "screen, feedback: quotas 5 to none", words, list(&fed), holds);
    let below = (1.0 - fed[0] / best) * 100.0;
    let got = format!("{below:.1} % below the best");
    let words = "slightly below the best, about 5 %";
    shape(judged, "screen, feedback: quota 5", words, got, (0.1..=10.0).contains(&below));
    Ok(())
}

/// Figure 7-1.
fn judge_share(judged: &mut Vec<Judged>, router: Router) -> Result<(), LabError> {
    for percent in [25, 50, 75, 100] {
        let mut users = Vec::new();
        for pps in [6000, 8000, 10_000, 12_000, 14_000] {
            let report = router.measure(Kernel::Share(percent), false, pps)?;
            users.push(report.percent(report.beside.iter().map(|beside| beside.spent_ns).sum()));
        }
        let least = users.iter().copied().fold(100.0, f64::min);
        let most = users.iter().copied().fold(0.0, f64::max);
        let free = f64::from(100 - percent);
        let holds = most - least <= 5.0 && most <= free && least >= free - 12.0;
        shape(
            judged,
            &format!("user CPU at a threshold of {percent} %"),
            "stable, somewhat under what it leaves",
            format!("{least:.1} to {most:.1} %"),
            holds,
        );
    }
    Ok(())
}
