//! The loop: one thread that sends by the clock and reads what comes back.

use std::fmt;
use std::time::Instant;

use serde::Serialize;

use super::latency::{Latencies, LatencySummary};
use super::line::Line;
use super::pace::Pacer;
use super::workload::{Verdict, Workload, WorkloadSummary};
use crate::error::LabError;
use crate::experiment::number;

/// Requests in one burst.
const BURST: usize = 64;
/// Packets taken at once: more than a burst, so that answers never pile up
/// behind requests.
const QUOTA: usize = 256;

/// How long and how fast.
#[derive(Clone, Copy, Debug)]
pub struct Schedule {
    /// Requests per second; `None` is as fast as it goes.
    pub rate_pps: Option<f64>,
    /// Time at the start that does not count, in nanoseconds.
    pub warm_up_ns: u64,
    /// Time that counts, in nanoseconds.
    pub measure_ns: u64,
    /// How long to wait for late answers at the end, in nanoseconds.
    pub drain_ns: u64,
    /// How many requests to send at most.
    pub requests: Option<u64>,
}

/// What happened in the last second.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Progress {
    /// Since the start.
    pub seconds: f64,
    /// Requests sent per second.
    pub sent_pps: f64,
    /// Answers per second.
    pub answered_pps: f64,
    /// Median latency.
    pub p50_us: f64,
    /// 99th percentile of latency.
    pub p99_us: f64,
}

impl fmt::Display for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:>5.0} s  out {:>10}/s  in {:>10}/s  p50 {:>8.1} us  p99 {:>8.1} us",
            self.seconds,
            number(self.sent_pps.round()),
            number(self.answered_pps.round()),
            self.p50_us,
            self.p99_us
        )
    }
}

/// The result of a load.
#[derive(Clone, Debug, Default, Serialize)]
pub struct LoadResult {
    /// The rate that was asked for; absent for the maximum.
    pub asked_pps: Option<f64>,
    /// Seconds measured, without warm-up and drain.
    pub seconds: f64,
    /// Requests sent in that time.
    pub sent: u64,
    /// Answers to those requests, late ones included.
    pub answered: u64,
    /// Requests without an answer.
    pub lost: u64,
    /// Packets that no request waited for: late, twice, or not ours.
    pub unmatched: u64,
    /// Requests sent per second.
    pub sent_pps: f64,
    /// Answers that arrived per second of the time measured.
    pub answered_pps: f64,
    /// The generator could not send as fast as asked, so it was the limit.
    pub generator_behind: bool,
    /// Time from when a request was meant to be sent to its answer.
    pub latency: LatencySummary,
    /// What the answers were.
    #[serde(flatten)]
    pub answers: WorkloadSummary,
}

impl LoadResult {
    /// The share of requests without an answer, 0 to 1.
    pub fn loss(&self) -> f64 {
        self.lost as f64 / self.sent.max(1) as f64
    }
}

impl fmt::Display for LoadResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let l = &self.latency;
        writeln!(
            f,
            "sent      {:>12}  {:>12}/s{}",
            number(self.sent as f64),
            number(self.sent_pps.round()),
            if self.generator_behind { "  (the generator was the limit)" } else { "" }
        )?;
        writeln!(
            f,
            "answered  {:>12}  {:>12}/s",
            number(self.answered as f64),
            number(self.answered_pps.round())
        )?;
        writeln!(f, "lost      {:>12}  {:>11.3} %", number(self.lost as f64), 100.0 * self.loss())?;
        writeln!(
            f,
            "latency   p50 {:.1} us, p90 {:.1} us, p99 {:.1} us, p99.9 {:.1} us, max {:.1} us",
            l.p50_us, l.p90_us, l.p99_us, l.p999_us, l.max_us
        )?;
        for (code, count) in &self.answers.rcodes {
            writeln!(f, "{code:<9} {:>12}", number(*count as f64))?;
        }
        let rest = [
            ("unmatched", self.unmatched),
            ("truncated", self.answers.truncated),
            ("wrong", self.answers.wrong),
        ];
        for (name, count) in rest.into_iter().filter(|(_, count)| *count > 0) {
            writeln!(f, "{name:<9} {:>12}", number(count as f64))?;
        }
        Ok(())
    }
}

/// Counts of an interval.
#[derive(Default)]
struct Interval {
    sent: u64,
    answered: u64,
    latencies: Latencies,
}

struct Tally {
    measure_from_ns: u64,
    send_until_ns: u64,
    total: Interval,
    second: Interval,
    /// Answers that arrived while requests were still being sent.
    in_time: u64,
    unmatched: u64,
}

impl Tally {
    #[inline]
    fn count(&mut self, verdict: Verdict, now_ns: u64) {
        let Verdict::Answer { intended_ns } = verdict else {
            self.unmatched += 1;
            return;
        };
        if (self.measure_from_ns..self.send_until_ns).contains(&now_ns) {
            self.in_time += 1;
        }
        self.second.answered += 1;
        let latency_ns = now_ns.saturating_sub(intended_ns);
        if intended_ns >= self.measure_from_ns {
            self.total.answered += 1;
            self.total.latencies.record(latency_ns);
        }
        self.second.latencies.record(latency_ns);
    }

    fn next_second(&mut self, seconds: f64, span_s: f64) -> Progress {
        let second = &mut self.second;
        let progress = Progress {
            seconds,
            sent_pps: second.sent as f64 / span_s,
            answered_pps: second.answered as f64 / span_s,
            p50_us: second.latencies.percentile_us(50.0),
            p99_us: second.latencies.percentile_us(99.0),
        };
        (second.sent, second.answered) = (0, 0);
        second.latencies.clear();
        progress
    }
}

/// Sends the workload over the line by the schedule, on this thread, and
/// returns what came of it. Ends when the schedule does, whatever arrives.
/// `progress` is called once a second.
///
/// # Errors
/// When the line fails.
pub fn drive<L: Line, W: Workload>(
    line: &mut L,
    workload: &mut W,
    schedule: &Schedule,
    progress: &mut dyn FnMut(&Progress),
) -> Result<LoadResult, LabError> {
    const SECOND_NS: u64 = 1_000_000_000;
    let failed = || LabError::io("the port failed under load");
    let origin = Instant::now();
    let clock = || origin.elapsed().as_nanos() as u64;
    let send_until_ns = schedule.warm_up_ns + schedule.measure_ns;
    let mut pacer = Pacer::new(0, send_until_ns, schedule.rate_pps);
    let mut tally = Tally {
        measure_from_ns: schedule.warm_up_ns,
        send_until_ns,
        total: Interval::default(),
        second: Interval::default(),
        in_time: 0,
        unmatched: 0,
    };
    let most = schedule.requests.unwrap_or(u64::MAX);
    let (mut last_ns, mut ended_ns) = (0, None);
    loop {
        let now_ns = clock();
        let left = most - pacer.sent();
        let over = pacer.is_over(now_ns) || left == 0;
        if over {
            let ended_ns = *ended_ns.get_or_insert(now_ns);
            let complete = tally.total.answered >= tally.total.sent;
            if complete || now_ns >= ended_ns + schedule.drain_ns {
                break;
            }
        } else {
            let limit = BURST.min(line.room()).min(usize::try_from(left).unwrap_or(BURST));
            for _ in 0..pacer.due(now_ns, limit) {
                let intended_ns = pacer.send(now_ns);
                line.push(|flow, room| workload.write(flow, intended_ns, room));
                tally.total.sent += u64::from(intended_ns >= tally.measure_from_ns);
                tally.second.sent += 1;
            }
        }
        line.flush().map_err(failed())?;
        let mut arrived_ns = None;
        line.poll(QUOTA, |flow, payload| {
            let now_ns = *arrived_ns.get_or_insert_with(clock);
            tally.count(workload.read(flow, payload), now_ns);
        })
        .map_err(failed())?;
        if now_ns - last_ns >= SECOND_NS {
            let span_s = (now_ns - last_ns) as f64 / 1e9;
            progress(&tally.next_second(now_ns as f64 / 1e9, span_s));
            last_ns = now_ns;
        }
    }
    let ended_ns = ended_ns.unwrap_or(send_until_ns).min(send_until_ns);
    let seconds = ended_ns.saturating_sub(schedule.warm_up_ns) as f64 / 1e9;
    let seconds = seconds.max(1e-9);
    let total = &tally.total;
    let sent_pps = total.sent as f64 / seconds;
    Ok(LoadResult {
        asked_pps: schedule.rate_pps,
        seconds,
        sent: total.sent,
        answered: total.answered,
        lost: total.sent.saturating_sub(total.answered),
        unmatched: tally.unmatched,
        sent_pps,
        answered_pps: tally.in_time as f64 / seconds,
        generator_behind: schedule.rate_pps.is_some_and(|rate| sent_pps < 0.99 * rate)
            && schedule.requests.is_none(),
        latency: total.latencies.summary(),
        answers: workload.summary(),
    })
}
