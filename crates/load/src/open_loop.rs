//! Open loop: one thread sends by the clock and receives the responses.

use std::fmt;
use std::time::Instant;

use serde::Serialize;

use crate::error::LoadError;
use crate::latency::{LatencyHistogram, LatencySummary};
use crate::link::Link;
use crate::number::format_number;
use crate::pacer::Pacer;
use crate::workload::{MatchResult, Workload, WorkloadSummary};

/// Maximum number of requests per burst.
const BURST_REQUESTS: usize = 64;
/// Packets received per poll: more than a burst, so that responses never queue behind requests.
const POLL_QUOTA_PACKETS: usize = 256;

/// Rate and duration of an open-loop load.
#[derive(Clone, Copy, Debug)]
pub struct Schedule {
    /// Requests per second; `None` is the maximum rate.
    pub rate_pps: Option<f64>,
    /// Warm-up, which does not count, in nanoseconds.
    pub warm_up_ns: u64,
    /// Duration of the measurement, in nanoseconds.
    pub measure_ns: u64,
    /// Maximum wait for late responses at the end, in nanoseconds.
    pub drain_ns: u64,
    /// Maximum number of requests; `None` is no limit.
    pub max_requests: Option<u64>,
}

/// Rates and latencies of the last second.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct LoadProgress {
    /// Time since the start, in seconds.
    pub seconds: f64,
    /// Requests sent per second.
    pub sent_pps: f64,
    /// Responses received per second.
    pub answered_pps: f64,
    /// Median latency, in microseconds.
    pub p50_us: f64,
    /// 99th percentile of latency, in microseconds.
    pub p99_us: f64,
}

impl fmt::Display for LoadProgress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:>5.0} s  out {:>10}/s  in {:>10}/s  p50 {:>8.1} us  p99 {:>8.1} us",
            self.seconds,
            format_number(self.sent_pps.round()),
            format_number(self.answered_pps.round()),
            self.p50_us,
            self.p99_us
        )
    }
}

/// Result of an open-loop load.
#[derive(Clone, Debug, Default, Serialize)]
pub struct LoadResult {
    /// Requested rate, in requests per second; absent for the maximum rate.
    pub asked_pps: Option<f64>,
    /// Duration of the measurement without warm-up and drain, in seconds.
    pub seconds: f64,
    /// Requests sent during the measurement.
    pub sent: u64,
    /// Responses to these requests, late responses included.
    pub answered: u64,
    /// Requests without a response.
    pub lost: u64,
    /// Packets that match no outstanding request: late, duplicate, or foreign.
    pub unmatched: u64,
    /// Requests sent per second.
    pub sent_pps: f64,
    /// Responses that arrived per second of the measurement.
    pub answered_pps: f64,
    /// True if the generator sent less than 99 % of the requested rate, so it was the limit.
    pub generator_behind: bool,
    /// Time from the intended send time of a request to its response.
    pub latency: LatencySummary,
    /// Properties of the responses.
    #[serde(flatten)]
    pub answers: WorkloadSummary,
}

impl LoadResult {
    /// Share of requests without a response, 0 to 1.
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
            format_number(self.sent as f64),
            format_number(self.sent_pps.round()),
            if self.generator_behind { "  (limited by the generator)" } else { "" }
        )?;
        writeln!(
            f,
            "answered  {:>12}  {:>12}/s",
            format_number(self.answered as f64),
            format_number(self.answered_pps.round())
        )?;
        writeln!(
            f,
            "lost      {:>12}  {:>11.3} %",
            format_number(self.lost as f64),
            100.0 * self.loss()
        )?;
        writeln!(
            f,
            "latency   p50 {:.1} us, p90 {:.1} us, p99 {:.1} us, p99.9 {:.1} us, max {:.1} us",
            l.p50_us, l.p90_us, l.p99_us, l.p999_us, l.max_us
        )?;
        for (code, count) in &self.answers.rcodes {
            writeln!(f, "{code:<9} {:>12}", format_number(*count as f64))?;
        }
        let rest = [
            ("unmatched", self.unmatched),
            ("truncated", self.answers.truncated),
            ("wrong", self.answers.wrong),
        ];
        for (name, count) in rest.into_iter().filter(|(_, count)| *count > 0) {
            writeln!(f, "{name:<9} {:>12}", format_number(count as f64))?;
        }
        Ok(())
    }
}

/// Counts of an interval.
#[derive(Default)]
struct IntervalCounts {
    sent: u64,
    answered: u64,
    latencies: LatencyHistogram,
}

struct LoadCounts {
    measure_from_ns: u64,
    send_until_ns: u64,
    total: IntervalCounts,
    current_second: IntervalCounts,
    /// Responses that arrived while requests were still being sent.
    answered_in_interval: u64,
    unmatched: u64,
}

impl LoadCounts {
    #[inline]
    fn count(&mut self, match_result: MatchResult, now_ns: u64) {
        let MatchResult::Response { intended_ns } = match_result else {
            self.unmatched += 1;
            return;
        };
        if (self.measure_from_ns..self.send_until_ns).contains(&now_ns) {
            self.answered_in_interval += 1;
        }
        self.current_second.answered += 1;
        let latency_ns = now_ns.saturating_sub(intended_ns);
        if intended_ns >= self.measure_from_ns {
            self.total.answered += 1;
            self.total.latencies.record(latency_ns);
        }
        self.current_second.latencies.record(latency_ns);
    }

    fn finish_second(&mut self, seconds: f64, span_s: f64) -> LoadProgress {
        let second = &mut self.current_second;
        let progress = LoadProgress {
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

/// Sends the workload over the link by the schedule, on this thread, and returns the result.
///
/// The loop ends by the schedule, whether or not all responses have arrived. It calls
/// `on_progress` once a second.
///
/// # Errors
/// When the link fails.
pub fn run_open_loop<L: Link, W: Workload>(
    link: &mut L,
    workload: &mut W,
    schedule: &Schedule,
    on_progress: &mut dyn FnMut(&LoadProgress),
) -> Result<LoadResult, LoadError> {
    const SECOND_NS: u64 = 1_000_000_000;
    let failed = || LoadError::io("the link failed under load");
    let origin = Instant::now();
    let clock = || origin.elapsed().as_nanos() as u64;
    let send_until_ns = schedule.warm_up_ns + schedule.measure_ns;
    let mut pacer = Pacer::new(0, send_until_ns, schedule.rate_pps);
    let mut counts = LoadCounts {
        measure_from_ns: schedule.warm_up_ns,
        send_until_ns,
        total: IntervalCounts::default(),
        current_second: IntervalCounts::default(),
        answered_in_interval: 0,
        unmatched: 0,
    };
    let max_requests = schedule.max_requests.unwrap_or(u64::MAX);
    let (mut last_progress_ns, mut ended_ns) = (0, None);
    loop {
        let now_ns = clock();
        let remaining = max_requests - pacer.sent();
        let sending_done = pacer.is_finished(now_ns) || remaining == 0;
        if sending_done {
            let ended_ns = *ended_ns.get_or_insert(now_ns);
            let complete = counts.total.answered >= counts.total.sent;
            if complete || now_ns >= ended_ns + schedule.drain_ns {
                break;
            }
        } else {
            let limit = BURST_REQUESTS
                .min(link.space())
                .min(usize::try_from(remaining).unwrap_or(BURST_REQUESTS));
            for _ in 0..pacer.due(now_ns, limit) {
                let intended_ns = pacer.record_sent(now_ns);
                link.push(|flow, buffer| workload.write_request(flow, intended_ns, buffer));
                counts.total.sent += u64::from(intended_ns >= counts.measure_from_ns);
                counts.current_second.sent += 1;
            }
        }
        link.flush().map_err(failed())?;
        let mut arrived_ns = None;
        link.poll(POLL_QUOTA_PACKETS, |flow, payload| {
            let now_ns = *arrived_ns.get_or_insert_with(clock);
            counts.count(workload.match_response(flow, payload), now_ns);
        })
        .map_err(failed())?;
        if now_ns - last_progress_ns >= SECOND_NS {
            let span_s = (now_ns - last_progress_ns) as f64 / 1e9;
            on_progress(&counts.finish_second(now_ns as f64 / 1e9, span_s));
            last_progress_ns = now_ns;
        }
    }
    let ended_ns = ended_ns.unwrap_or(send_until_ns).min(send_until_ns);
    let seconds = ended_ns.saturating_sub(schedule.warm_up_ns) as f64 / 1e9;
    let seconds = seconds.max(1e-9);
    let total = &counts.total;
    let sent_pps = total.sent as f64 / seconds;
    Ok(LoadResult {
        asked_pps: schedule.rate_pps,
        seconds,
        sent: total.sent,
        answered: total.answered,
        lost: total.sent.saturating_sub(total.answered),
        unmatched: counts.unmatched,
        sent_pps,
        answered_pps: counts.answered_in_interval as f64 / seconds,
        generator_behind: schedule.rate_pps.is_some_and(|rate| sent_pps < 0.99 * rate)
            && schedule.max_requests.is_none(),
        latency: total.latencies.summary(),
        answers: workload.summary(),
    })
}
