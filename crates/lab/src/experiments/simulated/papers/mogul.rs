//! Mogul and Ramakrishnan's router, with and without the packet filter `screend`.
//!
//! The costs are fitted to the unmodified kernel (Figure 6-1, and the idle machine of section 7),
//! and judged by the modified kernel (Figures 6-3 to 7-1).

use serde_json::json;
use tidegate_gate::{Config, Mode, Quota};
use tidegate_sim::{
    ArrivalPattern, BackgroundTask, Costs, FilterProcess, HostRole, Link, Machine, OfferedLoad,
    Setup, SimReport, Tick,
};

use super::tables::MogulTable;
use super::{Comparison, min_where};
use crate::experiments::simulated::sweep::gate_settings;
use crate::report::plot::{Axis, Panel, Series};
use crate::stats::round_to_hundredths;
use crate::{Experiment, LabError};

const NS_PER_MS: u64 = 1_000_000;
/// Virtual time of each trial, in milliseconds: the time of 10,000 packets (section 6.1).
const WINDOW_MS: u64 = 2000;
const MACHINE: &str = "DECstation 3000/300";
/// Offered loads of the curves, in packets per second.
const LOADS_PPS: [u64; 10] = [1000, 2000, 3000, 4000, 5000, 6000, 8000, 10_000, 12_000, 14_000];
/// Load at which plateaus are read, in packets per second: that of Figure 6-3.
const OVERLOAD_PPS: u64 = 12_000;
/// Share of the peak below which the router is in livelock.
const LIVELOCK_SHARE: f64 = 0.01;

/// The router's costs, in nanoseconds per packet. No table gives the small costs (interrupt,
/// dispatch, poll, context switch): they are fixed shares of the cost at the device.
#[derive(Clone, Copy, Debug)]
struct RouterCosts {
    receive_ns: f64,
    protocol_ns: f64,
    transmit_ns: f64,
    filter_ns: f64,
    tick_ns: u64,
}

impl RouterCosts {
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
            read_ns: (self.filter_ns / 3.0) as u64,
            work_ns: (self.filter_ns * 2.0 / 3.0) as u64,
            transmit_ns: self.transmit_ns as u64,
            transmit_done_ns: part(0.1),
            refuse_ns: 0,
            crossing_ns: 0,
            remote_ns: 0,
        }
    }

    fn measure(self, kernel: Kernel, with_filter: bool, pps: u64) -> Result<SimReport, LabError> {
        let setup = Setup {
            gate: gate_settings(kernel.config())?,
            costs: self.costs(),
            link: Link { bits_per_second: 10_000_000 },
            receive_ring: 32,
            transmit_ring: 32,
            // "The IP layer runs as a separately scheduled thread" (section 6.3).
            protocol_thread: true,
            role: HostRole::Router {
                output_queue: 50,
                filter: with_filter.then_some(FilterProcess { queue: 32 }),
            },
            background: if matches!(kernel, Kernel::Share(_)) {
                vec![BackgroundTask::Compute]
            } else {
                vec![]
            },
            tick: Some(Tick { period_ns: NS_PER_MS, cost_ns: self.tick_ns }),
            quantum_ns: 10 * NS_PER_MS,
            // The source did not pace its packets evenly (section 6.1).
            load: OfferedLoad { pps, shape: ArrivalPattern::Poisson, ..OfferedLoad::default() },
            ..Setup::default()
        };
        let mut machine =
            Machine::new(&setup).map_err(|error| LabError::Config(error.to_string()))?;
        machine.run(200 * NS_PER_MS);
        Ok(machine.run(WINDOW_MS * NS_PER_MS))
    }

    fn delivered(self, kernel: Kernel, with_filter: bool, pps: u64) -> Result<f64, LabError> {
        Ok(self.measure(kernel, with_filter, pps)?.delivered_pps())
    }

    /// Highest delivered rate at any load around `about_pps`.
    fn peak(self, kernel: Kernel, with_filter: bool, about_pps: f64) -> Result<f64, LabError> {
        let mut peak: f64 = 0.0;
        for tenths in [7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 14.0] {
            let pps = (about_pps * tenths / 10.0) as u64;
            peak = peak.max(self.delivered(kernel, with_filter, pps)?);
        }
        Ok(peak)
    }

    /// Delivered rate at each load.
    fn delivered_by_load(
        self,
        kernel: Kernel,
        with_filter: bool,
    ) -> Result<Vec<(f64, f64)>, LabError> {
        let point = |&pps: &u64| Ok((pps as f64, self.delivered(kernel, with_filter, pps)?));
        LOADS_PPS.iter().map(point).collect()
    }
}

/// A configuration of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kernel {
    /// The original kernel, driven by interrupts.
    Unmodified,
    /// Polled, with this quota, without feedback.
    Polled(Quota),
    /// Polled, with this quota and feedback.
    Feedback(Quota),
    /// Polled, with a CPU limit for packet processing in percent, beside a computing
    /// application.
    Share(u32),
}

impl Kernel {
    fn config(self) -> Config {
        let polled = |quota, feedback| {
            Config::default()
                .mode(Mode::Polled)
                .receive_quota(quota)
                .transmit_quota(quota)
                .feedback(feedback)
        };
        match self {
            Self::Unmodified => Config::default().mode(Mode::Interrupt),
            Self::Polled(quota) => polled(quota, false),
            Self::Feedback(quota) => polled(quota, true),
            Self::Share(percent) => polled(Quota::Packets(5), false).cpu_share_percent(percent),
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

/// Fits the costs to the unmodified kernel.
fn fit(mogul: &MogulTable) -> Result<RouterCosts, LabError> {
    let us = 1000.0;
    let mut router = RouterCosts {
        receive_ns: 70.0 * us,
        protocol_ns: 80.0 * us,
        transmit_ns: 40.0 * us,
        filter_ns: 250.0 * us,
        tick_ns: (NS_PER_MS as f64 * (100.0 - mogul.idle_user_percent) / 100.0) as u64,
    };
    let kernel = Kernel::Unmodified;
    // Without the filter, livelock would occur somewhat below the maximum rate of the network.
    router.receive_ns = min_where(20.0 * us, 120.0 * us, |receive_ns| {
        let router = RouterCosts { receive_ns, ..router };
        let delivered = router.delivered(kernel, false, mogul.ethernet_pps)?;
        Ok(delivered < LIVELOCK_SHARE / 2.0 * mogul.peak_pps)
    })?;
    router.protocol_ns = min_where(10.0 * us, 200.0 * us, |protocol_ns| {
        let router = RouterCosts { protocol_ns, ..router };
        let delivered = router.delivered(kernel, true, mogul.filter_livelock_pps)?;
        Ok(delivered < LIVELOCK_SHARE / 2.0 * mogul.filter_peak_pps)
    })?;
    router.transmit_ns = min_where(us, 200.0 * us, |transmit_ns| {
        let router = RouterCosts { transmit_ns, ..router };
        Ok(router.peak(kernel, false, mogul.peak_pps)? <= mogul.peak_pps)
    })?;
    router.filter_ns = min_where(20.0 * us, 600.0 * us, |filter_ns| {
        let router = RouterCosts { filter_ns, ..router };
        Ok(router.peak(kernel, true, mogul.filter_peak_pps)? <= mogul.filter_peak_pps)
    })?;
    Ok(router)
}

fn max_delivered(points: &[(f64, f64)]) -> f64 {
    points.iter().map(|point| point.1).fold(0.0, f64::max)
}

/// The floor: lowest delivered rate above the load of the peak, relative to the peak.
fn floor(points: &[(f64, f64)]) -> f64 {
    let peak = max_delivered(points);
    let at = points.iter().position(|point| point.1 == peak).unwrap_or(0);
    points[at..].iter().map(|point| point.1).fold(peak, f64::min) / peak
}

/// Fits the router, simulates every configuration, and compares the results.
pub(super) fn run(result: &mut Experiment) -> Result<(Vec<Comparison>, Vec<Panel>), LabError> {
    let mogul = MogulTable::read()?;
    let router = fit(&mogul)?;
    let mut comparisons = Vec::new();
    compare_unmodified(&mut comparisons, &mogul, router)?;
    let (unfiltered, unfiltered_panel) = measure_kernels(&mogul, router, false, result)?;
    let (filtered, filtered_panel) = measure_kernels(&mogul, router, true, result)?;
    compare_unfiltered(&mut comparisons, &mogul, &unfiltered);
    compare_filtered(&mut comparisons, &mogul, router, &filtered)?;
    compare_quotas(&mut comparisons, router)?;
    compare_cpu_share(&mut comparisons, router)?;
    let us = |ns: f64| round_to_hundredths(ns / 1000.0);
    result.note(format!(
        "Mogul and Ramakrishnan: fitted on the unmodified kernel (Figure 6-1): {} us at the \
         device, {} us in IP, {} us to send, {} us in screend; judged on the modified kernel",
        us(router.receive_ns),
        us(router.protocol_ns),
        us(router.transmit_ns),
        us(router.filter_ns)
    ));
    result.note(
        "assumed parts of the cost at the device, since no table gives them: interrupt, dispatch and \
         transmit completion a tenth each, a poll a twentieth, a context switch a half; \
         polling saves the tenth that the input queue costs",
    );
    result.note(
        "shapes are the paper's words, interpreted as: flat is a floor of at least 0.95, livelock one \
         under 0.05, slightly above is up to 20 %, much higher is at least 10 %, slightly below is \
         0.1 to 10 %",
    );
    result.note(
        "known difference: a quota of 5 costs the paper's router with screend about 5 %, and \
         the simulated one less than 1 %",
    );
    Ok((comparisons, vec![unfiltered_panel, filtered_panel]))
}

fn compare_unmodified(
    comparisons: &mut Vec<Comparison>,
    mogul: &MogulTable,
    router: RouterCosts,
) -> Result<(), LabError> {
    let kernel = Kernel::Unmodified;
    let peaks = [
        ("unmodified peak (MLFRR)", false, mogul.peak_pps),
        ("unmodified peak with screen (MLFRR)", true, mogul.filter_peak_pps),
    ];
    for (case, with_filter, published) in peaks {
        let simulated = router.peak(kernel, with_filter, published)?;
        comparisons.push(Comparison::rate(
            MACHINE,
            case.to_owned(),
            "fitted",
            published,
            simulated,
        ));
    }
    let simulated = router.delivered(kernel, true, mogul.filter_livelock_pps)?;
    comparisons.push(Comparison::statement(
        MACHINE,
        "unmodified with screen: livelock".to_owned(),
        "fitted",
        format!("0 at {}", mogul.filter_livelock_pps),
        format!("{simulated:.0}"),
        simulated < LIVELOCK_SHARE * mogul.filter_peak_pps,
    ));
    Ok(())
}

/// Delivered rate of each kernel at each load.
struct KernelCurves {
    unmodified: Vec<(f64, f64)>,
    polled: Vec<(f64, f64)>,
    /// Without the filter: no quota. With the filter: feedback.
    variant: Vec<(f64, f64)>,
}

fn measure_kernels(
    mogul: &MogulTable,
    router: RouterCosts,
    with_filter: bool,
    result: &mut Experiment,
) -> Result<(KernelCurves, Panel), LabError> {
    let (variant, name) = match with_filter {
        false => (Kernel::Polled(Quota::Unlimited), "polled, no quota"),
        true => (Kernel::Feedback(QUOTA), "polled, feedback"),
    };
    let curves = KernelCurves {
        unmodified: router.delivered_by_load(Kernel::Unmodified, with_filter)?,
        polled: router.delivered_by_load(Kernel::Polled(QUOTA), with_filter)?,
        variant: router.delivered_by_load(variant, with_filter)?,
    };
    let named = [
        ("unmodified", &curves.unmodified),
        ("polled, quota 10", &curves.polled),
        (name, &curves.variant),
    ];
    for (name, points) in named {
        let suffix = if with_filter { " with screen" } else { "" };
        result.rows.extend(points.iter().map(|(offered, delivered)| {
            json!({
                "machine": MACHINE,
                "case": format!("{name}{suffix}"),
                "offered_pps": offered,
                "received_pps": delivered.round(),
            })
        }));
    }
    let published_pps = if with_filter { mogul.filter_peak_pps } else { mogul.peak_pps };
    let published = [(0.0, published_pps), (LOADS_PPS[LOADS_PPS.len() - 1] as f64, published_pps)];
    let mut series = named.map(|(name, points)| Series::new(name, points.clone())).to_vec();
    series.push(Series::new("peak of the unmodified, published", published).dashed());
    let panel = Panel {
        title: format!("{MACHINE}{}", if with_filter { " with screend" } else { "" }),
        x: Axis::new("offered", "packets/s"),
        y: Axis::new("forwarded", "packets/s"),
        series,
        ..Panel::default()
    };
    Ok((curves, panel))
}

/// Adds a comparison with a statement of the paper about the modified kernel.
fn compare_shape(
    comparisons: &mut Vec<Comparison>,
    case: &str,
    published: &str,
    simulated: String,
    holds: bool,
) {
    let case = format!("shape: {case}");
    let published = published.to_owned();
    comparisons.push(Comparison::statement(MACHINE, case, "judged", published, simulated, holds));
}

/// Compares with Figure 6-3.
fn compare_unfiltered(
    comparisons: &mut Vec<Comparison>,
    mogul: &MogulTable,
    unfiltered: &KernelCurves,
) {
    let (peak, flat) = (max_delivered(&unfiltered.polled), floor(&unfiltered.polled));
    let case = "polled MLFRR (section 7)".to_owned();
    comparisons.push(Comparison::rate(MACHINE, case, "judged", mogul.polled_pps, peak));
    let over = peak / mogul.peak_pps;
    let words = "slightly above the unmodified";
    let holds = (1.0..1.2).contains(&over);
    compare_shape(comparisons, "polled MLFRR", words, format!("{over:.2} of it"), holds);
    let words = "no collapse";
    compare_shape(
        comparisons,
        "polled with a quota",
        words,
        format!("floor {flat:.2}"),
        flat >= 0.95,
    );
    let floor = floor(&unfiltered.variant);
    let words = "almost zero above the MLFRR";
    compare_shape(
        comparisons,
        "polled without quota",
        words,
        format!("floor {floor:.2}"),
        floor < 0.05,
    );
    let above_peak = unfiltered.unmodified.iter().filter(|point| point.0 > mogul.peak_pps);
    let falls = above_peak.clone().zip(above_peak.skip(1)).all(|(a, b)| b.1 <= a.1);
    compare_shape(
        comparisons,
        "unmodified above its peak",
        "falls",
        format!("falls: {falls}"),
        falls,
    );
}

/// Compares with Figure 6-4.
fn compare_filtered(
    comparisons: &mut Vec<Comparison>,
    mogul: &MogulTable,
    router: RouterCosts,
    filtered: &KernelCurves,
) -> Result<(), LabError> {
    let without = floor(&filtered.polled);
    let words = "about as the unmodified: livelock";
    let got = format!("floor {without:.2}");
    compare_shape(comparisons, "filter, polled without feedback", words, got, without < 0.05);
    let flat = floor(&filtered.variant);
    let got = format!("floor {flat:.2}");
    compare_shape(comparisons, "filter, polled with feedback", "no livelock", got, flat >= 0.95);
    let peak = router.peak(Kernel::Feedback(QUOTA), true, mogul.filter_peak_pps * 1.3)?;
    let over = peak / mogul.filter_peak_pps;
    let words = "much higher peak";
    let got = format!("{over:.2} of the unmodified");
    compare_shape(comparisons, "filter, feedback", words, got, over > 1.1);
    Ok(())
}

/// Compares with Figures 6-5 and 6-6.
fn compare_quotas(comparisons: &mut Vec<Comparison>, router: RouterCosts) -> Result<(), LabError> {
    let plateaus = |kernel: fn(Quota) -> Kernel, with_filter| {
        QUOTAS
            .iter()
            .map(|&quota| router.delivered(kernel(quota), with_filter, OVERLOAD_PPS))
            .collect::<Result<Vec<f64>, LabError>>()
    };
    let list = |rates: &[f64]| {
        let words: Vec<String> = rates.iter().map(|rate| format!("{rate:.0}")).collect();
        words.join(", ")
    };
    let unfiltered = plateaus(Kernel::Polled, false)?;
    let best = unfiltered.iter().copied().fold(0.0, f64::max);
    let falls =
        unfiltered.windows(2).all(|pair| pair[1] <= pair[0] * 1.02) && unfiltered[4] < best * 0.05;
    let words = "falls as the quota grows";
    compare_shape(comparisons, "quotas 5, 10, 20, 100, none", words, list(&unfiltered), falls);
    let near = unfiltered[1].min(unfiltered[2]) >= 0.95 * best;
    compare_shape(comparisons, "quotas 10 and 20", "near the best", list(&unfiltered[1..3]), near);
    let with_feedback = plateaus(Kernel::Feedback, true)?;
    let best = with_feedback.iter().copied().fold(0.0, f64::max);
    let holds = with_feedback.iter().all(|&rate| rate >= 0.9 * best);
    let words = "no livelock at any";
    compare_shape(
        comparisons,
        "filter, feedback: quotas 5 to none",
        words,
        list(&with_feedback),
        holds,
    );
    let below = (1.0 - with_feedback[0] / best) * 100.0;
    let got = format!("{below:.1} % below the best");
    let words = "slightly below the best, about 5 %";
    compare_shape(
        comparisons,
        "filter, feedback: quota 5",
        words,
        got,
        (0.1..=10.0).contains(&below),
    );
    Ok(())
}

/// Compares with Figure 7-1.
fn compare_cpu_share(
    comparisons: &mut Vec<Comparison>,
    router: RouterCosts,
) -> Result<(), LabError> {
    for percent in [25, 50, 75, 100] {
        let mut user_percents = Vec::new();
        for pps in [6000, 8000, 10_000, 12_000, 14_000] {
            let report = router.measure(Kernel::Share(percent), false, pps)?;
            user_percents
                .push(report.percent(report.background.iter().map(|beside| beside.spent_ns).sum()));
        }
        let min_percent = user_percents.iter().copied().fold(100.0, f64::min);
        let max_percent = user_percents.iter().copied().fold(0.0, f64::max);
        let free = f64::from(100 - percent);
        let holds =
            max_percent - min_percent <= 5.0 && max_percent <= free && min_percent >= free - 12.0;
        compare_shape(
            comparisons,
            &format!("user CPU at a threshold of {percent} %"),
            "stable, somewhat under what it leaves",
            format!("{min_percent:.1} to {max_percent:.1} %"),
            holds,
        );
    }
    Ok(())
}
