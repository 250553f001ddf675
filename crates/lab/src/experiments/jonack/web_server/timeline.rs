//! One server over time: a quiet third, then a flood and a quiet third for each level.

use std::thread;
use std::time::Duration;

use super::httperf::{self, HttperfReport};
use super::servers::WebServer;
use super::{REQUESTS_PER_S, WebServerConfig};
use crate::error::LabError;
use crate::testbed::client::{RequestRecord, recovery_s};
use crate::testbed::flood::{FloodSource, FloodTestbed};
use crate::testbed::load::flood::Flood;
use crate::testbed::web_client;

/// Port that the flood is sent to, on which no socket listens.
const FLOODED_PORT: u16 = 9;
/// Payload of the flood: a frame has 64 bytes on a wire.
const PAYLOAD: &[u8] = &[0x7e; 18];
/// Warm-up of the kernel's servers, in seconds.
const WARM_UP_SECONDS: f64 = 1.0;
/// The same with admission control. A source becomes known once it was seen in two consecutive
/// periods of one second, and the first period is not a full one.
const LEARNING_SECONDS: f64 = 4.0;
/// Responses are as before once their times are within this many times the 99th percentile of
/// before.
const RECOVERED_FACTOR: f64 = 2.0;
/// Equal parts of a flood whose means are its spread.
const PARTS: u32 = 4;
/// Width of a bin of the time line, in seconds.
pub(super) const BIN_S: f64 = 1.0;

/// Interval in seconds since the start of the client.
pub(super) type Interval = (f64, f64);

/// Flood at one level.
pub(super) struct LevelRun {
    /// Rate of the level, the same for all servers; `None` is the maximum.
    pub(super) level_pps: Option<f64>,
    pub(super) offered_pps: f64,
    pub(super) flood_s: Interval,
    /// End of the quiet third after the flood.
    pub(super) end_s: f64,
}

/// One server over time.
pub(super) struct Timeline {
    pub(super) records: Vec<RequestRecord>,
    /// Quiet third at the start, before any flood.
    pub(super) before_s: Interval,
    pub(super) levels: Vec<LevelRun>,
    /// The outside tool under the highest of the paper's levels, if it is installed.
    pub(super) httperf: Option<HttperfReport>,
}

/// Service in an interval.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Service {
    /// Requests answered in the interval, whenever sent, for each second.
    pub(super) answered_per_s: f64,
    /// Mean and 99th percentile of the response times of the requests sent in the interval, in
    /// seconds; infinite if none was answered.
    pub(super) mean_s: f64,
    pub(super) p99_s: f64,
    /// Requests sent in the interval that were not answered.
    pub(super) errors: u64,
}

impl Timeline {
    /// Measures a new server. The highest of `config`'s levels that the paper has comes once more
    /// for httperf.
    pub(super) fn measure(
        server: WebServer,
        config: &WebServerConfig,
        testbed: &FloodTestbed,
        with_httperf: bool,
    ) -> Result<Self, LabError> {
        let third = Duration::from_secs_f64(config.third_seconds);
        let running = server.start(testbed)?;
        let target = (running.target.ip(), FLOODED_PORT).into();
        let source = FloodSource::OneHost;
        let payloads = std::iter::repeat_n(PAYLOAD, source.flow_count());
        let mut flood = testbed.flood(source, target, payloads, server.receive_work())?;
        let client = web_client::start(
            &testbed.pair.a.namespace,
            running.target,
            running.files.clone(),
            REQUESTS_PER_S,
            testbed.load_core,
        )?;
        let warm_up_s =
            if server.kernel_way().is_some() { WARM_UP_SECONDS } else { LEARNING_SECONDS };
        thread::sleep(Duration::from_secs_f64(warm_up_s));
        let quiet_from_s = client.now_s();
        thread::sleep(third);
        let before_s = (quiet_from_s, client.now_s());
        let mut levels = Vec::new();
        for &level_pps in &config.levels_pps {
            let (from_s, offered) = (client.now_s(), flood.offered()?);
            flood.set_rate(level_pps)?;
            thread::sleep(third);
            flood.set_rate(Some(0.0))?;
            let to_s = client.now_s();
            let offered_pps = (flood.offered()? - offered) as f64 / (to_s - from_s);
            thread::sleep(third);
            let (flood_s, end_s) = ((from_s, to_s), client.now_s());
            levels.push(LevelRun { level_pps, offered_pps, flood_s, end_s });
        }
        let records = client.stop()?;
        let httperf = with_httperf.then(|| {
            let level_pps = config.highest_level_of_paper();
            under_flood(&mut flood, level_pps, || {
                httperf::measure(testbed, &running, REQUESTS_PER_S, config.third_seconds)
            })
        });
        let httperf = httperf.transpose()?;
        drop(flood);
        running.stop();
        Ok(Self { records, before_s, levels, httperf })
    }

    /// Service before any flood.
    pub(super) fn before(&self) -> Service {
        service(&self.records, self.before_s)
    }

    pub(super) fn during(&self, level: &LevelRun) -> Service {
        service(&self.records, level.flood_s)
    }

    /// Lowest and highest mean response time of the parts of a flood, in seconds.
    pub(super) fn mean_s_range(&self, level: &LevelRun) -> (f64, f64) {
        let (from_s, to_s) = level.flood_s;
        let part_s = (to_s - from_s) / f64::from(PARTS);
        let start_s = |part: u32| from_s + f64::from(part) * part_s;
        let means = (0..PARTS)
            .map(|part| service(&self.records, (start_s(part), start_s(part + 1))).mean_s);
        means.fold((f64::INFINITY, 0.0), |(low, high), mean| (mean.min(low), mean.max(high)))
    }

    pub(super) fn after(&self, level: &LevelRun) -> Service {
        service(&self.records, (level.flood_s.1, level.end_s))
    }

    /// Seconds from the end of the flood until response times are as before; `None` if the quiet
    /// third after the flood ends first.
    pub(super) fn recovery_s(&self, level: &LevelRun) -> Option<f64> {
        let end = self.records.partition_point(|one| one.scheduled_s < level.end_s);
        recovery_s(&self.records[..end], level.flood_s.1, RECOVERED_FACTOR * self.before().p99_s)
    }

    /// Service in each second of the three thirds around a flood. Times are since the start of the
    /// third before the flood.
    pub(super) fn bins(&self, level: &LevelRun, third_s: f64) -> Vec<(f64, Service)> {
        let start_s = level.flood_s.0 - third_s;
        let count = ((level.end_s - start_s) / BIN_S) as u32;
        let bin = |number: u32| {
            let from_s = f64::from(number) * BIN_S;
            let interval = (start_s + from_s, start_s + from_s + BIN_S);
            (from_s, service(&self.records, interval))
        };
        (0..count).map(bin).collect()
    }
}

fn under_flood<T>(
    flood: &mut Flood,
    rate_pps: Option<f64>,
    work: impl FnOnce() -> Result<T, LabError>,
) -> Result<T, LabError> {
    flood.set_rate(rate_pps)?;
    let result = work();
    flood.set_rate(Some(0.0))?;
    result
}

fn service(records: &[RequestRecord], (from_s, to_s): Interval) -> Service {
    let is_inside = |time_s: f64| (from_s..to_s).contains(&time_s);
    let answered_at = |one: &RequestRecord| Some(one.scheduled_s + one.latency_s?);
    let answered = records.iter().filter_map(answered_at).filter(|&time_s| is_inside(time_s));
    let sent = || records.iter().filter(|one| is_inside(one.scheduled_s));
    let mut times: Vec<f64> = sent().filter_map(|one| one.latency_s).collect();
    times.sort_by(f64::total_cmp);
    let (mean_s, p99_s) = match times.len() {
        0 => (f64::INFINITY, f64::INFINITY),
        count => (times.iter().sum::<f64>() / count as f64, times[(count * 99).div_ceil(100) - 1]),
    };
    Service {
        answered_per_s: answered.count() as f64 / (to_s - from_s),
        mean_s,
        p99_s,
        errors: (sent().count() - times.len()) as u64,
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A server that answers after 1 ms, and `during` the flood after that many seconds: 1 s before,
    /// 1 s of the flood, 1 s after, 100 requests/s.
    pub(in super::super) fn timeline(during: Option<f64>) -> Timeline {
        let record = |number: u32| {
            let is_flooded = (100..200).contains(&number);
            let latency_s = if is_flooded { during } else { Some(0.001) };
            RequestRecord { scheduled_s: f64::from(number) / 100.0, latency_s }
        };
        let level = LevelRun {
            level_pps: Some(875e3),
            offered_pps: 800e3,
            flood_s: (1.0, 2.0),
            end_s: 3.0,
        };
        Timeline {
            records: (0..301).map(record).collect(),
            before_s: (0.0, 1.0),
            levels: vec![level],
            httperf: None,
        }
    }

    #[test]
    fn throughput_counts_responses_when_they_come_and_times_when_requests_are_sent() {
        let late = timeline(Some(1.5));
        let level = &late.levels[0];
        let during = late.during(level);
        assert_eq!((during.answered_per_s, during.errors), (0.0, 0));
        assert!((during.mean_s - 1.5).abs() < 1e-9 && (during.p99_s - 1.5).abs() < 1e-9);
        let after = late.after(level);
        assert!((after.answered_per_s - 150.0).abs() <= 2.0, "late responses too: {after:?}");
        assert!((after.mean_s - 0.001).abs() < 1e-9, "{after:?}");
    }

    #[test]
    fn spread_of_a_flood_is_that_of_its_parts() {
        let mut uneven = timeline(Some(0.002));
        uneven.records[175..].iter_mut().for_each(|one| one.latency_s = Some(0.004));
        let (lowest, highest) = uneven.mean_s_range(&uneven.levels[0]);
        assert!((lowest - 0.002).abs() < 1e-9 && (highest - 0.004).abs() < 1e-9);
    }

    #[test]
    fn server_without_responses_has_errors_and_no_response_time() {
        let dead = timeline(None);
        let during = dead.during(&dead.levels[0]);
        assert_eq!(during.errors, 100);
        assert!(during.mean_s.is_infinite());
        let recovery_s = dead.recovery_s(&dead.levels[0]).unwrap();
        assert!(recovery_s < 0.02, "{recovery_s}");
    }

    #[test]
    fn bins_cover_the_thirds_around_the_flood() {
        let bins = timeline(Some(0.002)).bins(&timeline(None).levels[0], 1.0);
        let answered: Vec<f64> = bins.iter().map(|(_, one)| one.answered_per_s).collect();
        assert_eq!(bins.iter().map(|(second, _)| *second).collect::<Vec<_>>(), [0.0, 1.0, 2.0]);
        assert!(answered.iter().all(|rate| (99.0..=101.0).contains(rate)), "{answered:?}");
        assert!((bins[1].1.mean_s - 0.002).abs() < 1e-9);
    }
}
