//! Rows, figures and picture of the experiment.

use serde::Deserialize;
use serde_json::{Value, json};

use super::{CONNECTIONS, MESSAGE_BYTES};
use crate::LabError;
use crate::published;
use crate::report::experiment::Experiment;
use crate::report::plot::{Axis, Panel, Picture, Series};
use crate::stats::{median, round_to_hundredths};
use crate::testbed::perf::{CoreSamples, SAMPLES_PER_S};
use crate::testbed::tcp::TcpLabConfig;

/// Functions in the rows of a test.
const TOP_COUNT: usize = 25;
/// The paper's rate, in gigabits per second.
const PAPER_GBPS: f64 = 1.5;

/// Test of the paper.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TestName {
    /// A: the kernel, tuned by affinity.
    Kernel,
    /// B: a network core.
    NetworkCore,
}

impl TestName {
    fn letter(self) -> &'static str {
        match self {
            Self::Kernel => "A",
            Self::NetworkCore => "B",
        }
    }

    /// End of the names of its figures.
    fn suffix(self) -> &'static str {
        match self {
            Self::Kernel => "_kernel",
            Self::NetworkCore => "",
        }
    }
}

/// Rate of the streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rate {
    Paper,
    Max,
}

impl Rate {
    pub(super) const ALL: [Self; 2] = [Self::Paper, Self::Max];

    fn name(self) -> String {
        match self {
            Self::Paper => format!("{PAPER_GBPS} Gb/s"),
            Self::Max => "maximum".to_owned(),
        }
    }

    fn suffix(self) -> &'static str {
        match self {
            Self::Paper => "",
            Self::Max => "_max",
        }
    }

    /// Messages to send per second, each of which comes back; `None` is a closed loop.
    pub(super) fn messages_per_s(self) -> Option<f64> {
        match self {
            Self::Paper => Some(PAPER_GBPS * 1e9 / 8.0 / 2.0 / MESSAGE_BYTES as f64),
            Self::Max => None,
        }
    }
}

/// True for the functions of a group, by their names.
type IsMember = fn(&str) -> bool;

/// Groups of functions that the figures count.
const GROUPS: [(&str, IsMember); 5] = [
    ("lock", is_spin_lock),
    ("copy", is_copy),
    ("interrupt", is_interrupt),
    ("late", switches_interrupts_on),
    ("idle", is_idle),
];

fn is_spin_lock(symbol: &str) -> bool {
    symbol.contains("spin_lock")
}

fn is_copy(symbol: &str) -> bool {
    ["copy", "memmove", "rep_movs"].iter().any(|part| symbol.contains(part))
}

/// The kernel's interrupt subsystem: entry, handlers, and the dispatch of softirqs.
fn is_interrupt(symbol: &str) -> bool {
    let parts = ["irq", "sysvec", "interrupt"];
    !symbol.starts_with("_raw_") && parts.iter().any(|part| symbol.contains(part))
}

/// Functions that end a time without interrupts. The timer's interrupt comes then, so that samples
/// of that time fall on them.
fn switches_interrupts_on(symbol: &str) -> bool {
    let parts = ["spin_unlock_irq", "finish_task_switch", "handle_softirqs", "__do_softirq"];
    let others = ["net_rx_action", "process_backlog", "do_syscall_64", "napi_threaded_poll"];
    parts.iter().chain(&others).any(|part| symbol.contains(part))
}

/// The halted core, which the paper counts too.
fn is_idle(symbol: &str) -> bool {
    ["default_idle", "intel_idle", "safe_halt"].iter().any(|part| symbol.contains(part))
}

/// Samples of one test at one rate.
pub(super) struct Profile {
    test: TestName,
    server: String,
    pub(super) rate: Rate,
    samples: CoreSamples,
    gbps: Vec<f64>,
}

impl Profile {
    pub(super) fn new(test: TestName, server: String, rate: Rate) -> Self {
        Self { test, server, rate, samples: CoreSamples::default(), gbps: Vec::new() }
    }

    pub(super) fn add(&mut self, samples: CoreSamples, gbps: f64) {
        self.samples.add(samples);
        self.gbps.push(gbps);
    }

    pub(super) fn describe(&self) -> String {
        let top = self.top().into_iter().next();
        let top = top.map_or_else(String::new, |(symbol, samples)| {
            format!(", most in {symbol}: {:.1} %", self.percent(samples))
        });
        let gbps = self.gbps.last().copied().unwrap_or(f64::NAN);
        let (server, rate) = (&self.server, self.rate.name());
        format!("{server:<24} {rate:<8} {gbps:.2} Gb/s, {} samples{top}", self.samples.total())
    }

    fn percent(&self, samples: u64) -> f64 {
        100.0 * samples as f64 / self.samples.total().max(1) as f64
    }

    /// Functions with their samples, the most first.
    fn top(&self) -> Vec<(&str, u64)> {
        let all = self.samples.by_symbol.iter();
        let mut all: Vec<(&str, u64)> =
            all.map(|(symbol, &count)| (symbol.as_str(), count)).collect();
        all.sort_by_key(|&(symbol, count)| (std::cmp::Reverse(count), symbol));
        all
    }

    fn group_percent(&self, is_member: IsMember) -> f64 {
        let all = self.samples.by_symbol.iter();
        let members = all.filter(|(symbol, _)| is_member(symbol)).map(|(_, &count)| count);
        self.percent(members.sum())
    }

    fn rows(&self) -> Vec<Value> {
        let row = |(symbol, samples): (&str, u64)| {
            json!({
                "test": self.test.letter(),
                "server": self.server,
                "rate": self.rate.name(),
                "samples": samples,
                "percent": round_to_hundredths(self.percent(samples)),
                "symbol": symbol,
            })
        };
        self.top().into_iter().take(TOP_COUNT).map(row).collect()
    }
}

pub(super) fn describe(
    config: &TcpLabConfig,
    (server, load): (usize, usize),
    result: &mut Experiment,
) {
    result.note(format!(
        "core {load} sends {CONNECTIONS} streams of {} KiB messages, which the server on core {server} \
         returns: bytes of both directions count; frames as on a wire; at {PAPER_GBPS} Gb/s messages \
         are due at that rate, at the maximum each follows the one before",
        MESSAGE_BYTES >> 10
    ));
    result.note(
        "A: epoll on kernel sockets, with all receive work on the server's core, in a NAPI thread or \
         by RPS, as a first pass finds best at the maximum; B: the same server on a network core that busy-polls \
         AF_XDP and never sleeps (mode dedicated)",
    );
    result.note(format!(
        "perf takes {SAMPLES_PER_S} samples of core {server} a second by a timer, for {} s, {} times; \
         percent of the samples of the server, of the kernel's threads and of the idle core; {TOP_COUNT} \
         functions of each test are rows",
        config.seconds, config.repeats
    ));
    result.note(
        "figures count functions by their names, at the paper's rate and, with _max, at the maximum: \
         spin locks (lock), copies (copy), interrupts and the dispatch of softirqs (interrupt); while \
         the kernel has interrupts off no sample is taken, and the late sample falls on the function \
         that switches them on (late); a core that does not busy-poll is idle for a part (idle), which \
         makes all its other shares smaller",
    );
}

/// Columns of the printed table; the JSON has more.
const COLUMNS: [&str; 6] = ["test", "server", "rate", "samples", "percent", "symbol"];

pub(super) fn conclude(profiles: &[Profile], result: &mut Experiment) -> Result<(), LabError> {
    for profile in profiles {
        let end = format!("{}{}", profile.rate.suffix(), profile.test.suffix());
        for (group, is_member) in GROUPS {
            let percent = profile.group_percent(is_member);
            result.figure(&format!("profile_{group}_percent{end}"), round_to_hundredths(percent));
        }
        let named = 100.0 - profile.percent(profile.samples.unknown);
        result.figure(&format!("profile_named_percent{end}"), round_to_hundredths(named));
        let gbps = median(&profile.gbps);
        result.figure(&format!("profile_gbps{end}"), round_to_hundredths(gbps));
        let CoreSamples { others, .. } = profile.samples;
        if others > 0 {
            let (server, rate) = (&profile.server, profile.rate.name());
            result.note(format!(
                "{server}, {rate}: {others} samples of other processes are left out"
            ));
        }
    }
    result.rows = profiles.iter().flat_map(Profile::rows).chain(published_rows()?).collect();
    result.columns = COLUMNS.to_vec();
    result.picture = Some(picture(profiles));
    Ok(())
}

/// Row of the paper's tables.
#[derive(Deserialize)]
struct PublishedRow {
    test: String,
    samples: u64,
    percent: f64,
    symbol: String,
}

/// Rows of the paper, whose server is the kernel of both tests.
fn published_rows() -> Result<Vec<Value>, LabError> {
    let row = |row: PublishedRow| {
        json!({
            "test": row.test,
            "server": "paper, Linux 2.6.17",
            "rate": Rate::Paper.name(),
            "samples": row.samples,
            "percent": round_to_hundredths(row.percent),
            "symbol": row.symbol,
        })
    };
    Ok(published::rows("diaz_profile")?.into_iter().map(row).collect())
}

/// Share of the samples that the functions with most have together.
fn picture(profiles: &[Profile]) -> Picture {
    let panel = |rate: Rate| {
        let of_rate = profiles.iter().filter(|profile| profile.rate == rate);
        let series = of_rate.map(|profile| {
            let mut together = 0;
            let point = |(rank, (_, samples)): (usize, (&str, u64))| {
                together += samples;
                ((rank + 1) as f64, profile.percent(together))
            };
            let points: Vec<(f64, f64)> =
                profile.top().into_iter().take(TOP_COUNT).enumerate().map(point).collect();
            Series::new(profile.server.clone(), points)
        });
        Panel {
            title: rate.name(),
            x: Axis::new("functions with most samples", ""),
            y: Axis::new("samples together", "%").up_to(100.0),
            series: series.collect(),
            spans: Vec::new(),
        }
    };
    let panels = Rate::ALL.into_iter().map(panel).collect();
    Picture { title: "Functions in which a core spends its time".into(), panels }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn profile(test: TestName, by_symbol: &[(&str, u64)], unknown: u64) -> Profile {
        let by_symbol = by_symbol.iter().map(|&(symbol, count)| (symbol.to_owned(), count));
        let samples = CoreSamples { by_symbol: by_symbol.collect(), unknown, others: 3 };
        let mut profile = Profile::new(test, "server".to_owned(), Rate::Paper);
        profile.add(samples, 1.5);
        profile
    }

    #[test]
    fn figures_are_shares_of_all_samples_of_the_test() {
        let kernel = [
            ("native_queued_spin_lock_slowpath", 20),
            ("_raw_spin_unlock_irqrestore", 10),
            ("_copy_to_iter", 30),
            ("sysvec_apic_timer_interrupt", 10),
            ("tcp_v4_rcv", 5),
            ("pv_native_safe_halt", 20),
        ];
        let own = [("tidegate_stack::tcp::poll", 99), ("__memmove_avx_unaligned_erms", 1)];
        let profiles =
            [profile(TestName::Kernel, &kernel, 5), profile(TestName::NetworkCore, &own, 0)];
        let mut result = Experiment::new("profile");
        conclude(&profiles, &mut result).unwrap();
        let expected = [
            ("profile_lock_percent_kernel", 20.0),
            ("profile_copy_percent_kernel", 30.0),
            ("profile_interrupt_percent_kernel", 10.0),
            ("profile_late_percent_kernel", 10.0),
            ("profile_idle_percent_kernel", 20.0),
            ("profile_named_percent_kernel", 95.0),
            ("profile_lock_percent", 0.0),
            ("profile_copy_percent", 1.0),
            ("profile_named_percent", 100.0),
            ("profile_gbps", 1.5),
        ];
        for (name, value) in expected {
            assert_eq!(result.figures[name], value, "{name}");
        }
        assert_eq!(result.rows[0]["symbol"], "_copy_to_iter", "the most first");
        assert_eq!(result.rows[0]["percent"], 30.0);
        assert!(result.notes.iter().any(|note| note.contains("3 samples of other processes")));
        assert!(result.picture.unwrap().to_svg().unwrap().contains("1.5 Gb/s"));
    }

    #[test]
    fn every_line_of_the_paper_is_a_row() {
        let rows = published_rows().unwrap();
        assert_eq!(rows.len(), 21);
        let of = |test: &str| rows.iter().filter(|row| row["test"] == test).count();
        assert_eq!((of("A"), of("B")), (9, 12));
        assert_eq!(rows[1]["symbol"], "_spin_lock");
        assert_eq!(rows[1]["percent"], 13.12);
    }

    #[test]
    fn messages_of_both_directions_make_the_rate_of_the_paper() {
        let messages_per_s = Rate::Paper.messages_per_s().unwrap();
        let gbps = 2.0 * messages_per_s * MESSAGE_BYTES as f64 * 8.0 / 1e9;
        assert!((gbps - 1.5).abs() < 1e-9, "{gbps}");
        assert_eq!(Rate::Max.messages_per_s(), None);
    }
}
