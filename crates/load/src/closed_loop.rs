//! UDP echoes in a closed loop: a fixed number of requests is in flight, and each response
//! becomes the next request in place.
//!
//! This is the minimum work per packet for a generator, so it saturates a server on another core
//! that does more. It cannot measure latency percentiles, only the mean.

use std::fmt;
use std::io;
use std::time::Instant;

use serde::Serialize;
use tidegate_device::Device;

use crate::core;
use crate::device_link::DeviceLink;
use crate::error::LoadError;
use crate::link::Link;
use crate::number::format_number;
use crate::template::{MAX_PAYLOAD_BYTES, sum};
use crate::udp_load::{LoadConfig, nonzero_drops, open_device_link};
use crate::workload::WrittenPayload;

/// Packets received per poll.
const POLL_QUOTA_PACKETS: usize = 64;
/// Polls of the device between two reads of the clock.
const POLLS_PER_CLOCK_READ: u64 = 64;
/// After this time without a response all requests count as lost. It exceeds the time that a
/// server may wait for a processor.
const LOSS_TIMEOUT_NS: u64 = 200_000_000;
/// Longest time without any response at all, on a machine so busy that the server does not run.
const SILENCE_TIMEOUT_NS: u64 = 10_000_000_000;
/// Maximum number of requests in flight: half of the arena's frames.
const MAX_IN_FLIGHT: usize = 4096;

/// Result of a closed-loop load.
#[derive(Clone, Debug, Default, Serialize)]
pub struct ClosedLoopReport {
    /// Device that sent the requests.
    pub line: String,
    /// Number of requests in flight.
    pub in_flight: usize,
    /// Duration of the measurement, in seconds.
    pub seconds: f64,
    /// Responses received.
    pub answered: u64,
    /// Responses per second.
    pub answered_pps: f64,
    /// Mean round trip time in microseconds: requests in flight divided by the response rate
    /// (Little's law).
    pub mean_us: f64,
    /// Polls of the device that found no response, in percent. Near 0 the generator may have been
    /// the limit.
    pub empty_looks_percent: f64,
    /// Responses whose payload differs from the request.
    pub wrong: u64,
    /// Requests sent again because all requests in flight were lost.
    pub resent: u64,
    /// Frames that the generator's own device dropped, by reason.
    pub port_drops: Vec<(String, u64)>,
}

impl fmt::Display for ClosedLoopReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "over {}, {} requests in flight", self.line, self.in_flight)?;
        writeln!(
            f,
            "answered  {:>12}  {:>12}/s",
            format_number(self.answered as f64),
            format_number(self.answered_pps.round())
        )?;
        writeln!(f, "latency   {:.1} us, mean", self.mean_us)?;
        let empty = self.empty_looks_percent;
        writeln!(f, "waited    {empty:.0} % of the polls of the device found nothing")?;
        for (name, count) in [("wrong", self.wrong), ("resent", self.resent)] {
            if count > 0 {
                writeln!(f, "{name:<9} {:>12}", format_number(count as f64))?;
            }
        }
        for (reason, count) in &self.port_drops {
            writeln!(f, "generator dropped {count}: {reason}")?;
        }
        Ok(())
    }
}

/// Keeps `in_flight` UDP packets in flight to an echo server, over a device.
///
/// Each payload has `bytes` bytes (1 to 1452). The rate of `config` is not used.
///
/// # Errors
/// As [`crate::load_udp`], and when no response arrives.
pub fn load_udp_closed_loop(
    config: &LoadConfig,
    bytes: usize,
    in_flight: usize,
) -> Result<ClosedLoopReport, LoadError> {
    if !(1..=MAX_PAYLOAD_BYTES).contains(&bytes) {
        return Err(LoadError::Config(format!("a payload is 1 to 1452 bytes, not {bytes}")));
    }
    if !(1..=MAX_IN_FLIGHT).contains(&in_flight) {
        return Err(LoadError::Config(format!(
            "{in_flight} requests in flight are out of range: 1 to {MAX_IN_FLIGHT} are possible"
        )));
    }
    let schedule = config.schedule()?;
    if let Some(core) = config.core {
        core::pin_thread(None, core)?;
    }
    let mut link = open_device_link(config)?;
    let began = Instant::now();
    let clock = || began.elapsed().as_nanos() as u64;
    let mut closed_loop = ClosedLoop::new(bytes, in_flight);
    let failed = || LoadError::io("the device failed under load");
    closed_loop.run(&mut link, schedule.warm_up_ns, clock).map_err(failed())?;
    let until_ns = clock() + schedule.measure_ns;
    let counts = closed_loop.run(&mut link, until_ns, clock).map_err(failed())?;
    if counts.responses == 0 {
        return Err(LoadError::Config(format!("no response from {}", config.target)));
    }
    let seconds = counts.elapsed_ns as f64 / 1e9;
    let answered_pps = counts.responses as f64 / seconds;
    Ok(ClosedLoopReport {
        line: link.describe(),
        in_flight,
        seconds,
        answered: counts.responses,
        answered_pps,
        mean_us: in_flight as f64 / answered_pps * 1e6,
        empty_looks_percent: 100.0 * counts.empty_polls as f64 / counts.polls as f64,
        wrong: counts.wrong_responses,
        resent: counts.resent,
        port_drops: nonzero_drops(&link.counters()),
    })
}

/// Closed loop of equal requests.
struct ClosedLoop {
    payload: Vec<u8>,
    payload_sum: u32,
    in_flight: usize,
    /// No request is in flight.
    all_lost: bool,
}

/// Counts of one run of the loop.
#[derive(Clone, Copy, Debug, Default)]
struct LoopCounts {
    elapsed_ns: u64,
    polls: u64,
    empty_polls: u64,
    responses: u64,
    wrong_responses: u64,
    resent: u64,
}

impl ClosedLoop {
    fn new(bytes: usize, in_flight: usize) -> Self {
        let payload: Vec<u8> = (0..bytes).map(|index| (index as u8).wrapping_mul(37)).collect();
        Self { payload_sum: sum(&payload), payload, in_flight, all_lost: true }
    }

    /// Runs the loop until `until_ns` by `clock`, and until there is a response.
    fn run<P: Device>(
        &mut self,
        link: &mut DeviceLink<P>,
        until_ns: u64,
        clock: impl Fn() -> u64,
    ) -> io::Result<LoopCounts> {
        let began_ns = clock();
        let (mut now_ns, mut last_response_ns) = (began_ns, began_ns);
        let mut counts = LoopCounts::default();
        let silent_until_ns = until_ns + SILENCE_TIMEOUT_NS;
        while now_ns < until_ns || (counts.responses == 0 && now_ns < silent_until_ns) {
            if self.all_lost {
                self.send_all(link)?;
                last_response_ns = now_ns;
            }
            let responses_before = counts.responses;
            for _ in 0..POLLS_PER_CLOCK_READ {
                let reflected =
                    link.reflect_responses(POLL_QUOTA_PACKETS, &self.payload, self.payload_sum)?;
                link.flush()?;
                counts.polls += 1;
                counts.empty_polls += u64::from(reflected.responses == 0);
                counts.responses += reflected.responses;
                counts.wrong_responses += reflected.wrong_responses;
            }
            now_ns = clock();
            if counts.responses > responses_before {
                last_response_ns = now_ns;
            } else if now_ns - last_response_ns > LOSS_TIMEOUT_NS {
                self.all_lost = true;
                counts.resent += self.in_flight as u64;
            }
        }
        counts.elapsed_ns = (now_ns - began_ns).max(1);
        Ok(counts)
    }

    fn send_all<P: Device>(&mut self, link: &mut DeviceLink<P>) -> io::Result<()> {
        let mut remaining = self.in_flight;
        // A full device is not waited for: the remaining requests count as lost, too.
        while remaining > 0 && link.space() > 0 {
            for _ in 0..remaining.min(link.space()) {
                link.push(|_, buffer| {
                    buffer[..self.payload.len()].copy_from_slice(&self.payload);
                    WrittenPayload { len: self.payload.len(), sum: self.payload_sum }
                });
                remaining -= 1;
            }
            link.flush()?;
        }
        self.all_lost = false;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use tidegate_device::mem::{MemConfig, wire};

    use super::*;
    use crate::device_link::tests::{addressing, arena, make_echo};

    /// Runs the loop for `clock_reads` reads of the clock, one millisecond apart. Before each read
    /// the peer echoes the frames whose number `is_answered` accepts.
    fn run_loop(v6: bool, clock_reads: u64, is_answered: impl Fn(u64) -> bool) -> LoopCounts {
        let (ours, theirs) = wire(&MemConfig::default()).unwrap();
        let mut link = DeviceLink::open(ours, arena(), addressing(v6)).unwrap();
        let state = RefCell::new((theirs, 0, 0));
        let clock = || {
            let (theirs, now_ns, seen) = &mut *state.borrow_mut();
            *now_ns += 1_000_000;
            let mut echoes = Vec::new();
            theirs.receive_bytes(64, |frame| {
                *seen += 1;
                echoes.extend(is_answered(*seen).then(|| make_echo(frame, v6)));
            });
            for (staged, frame) in echoes.iter().enumerate() {
                assert!(theirs.stage(staged, frame));
            }
            theirs.flush(echoes.len());
            *now_ns
        };
        ClosedLoop::new(22, 8).run(&mut link, clock_reads * 1_000_000, clock).unwrap()
    }

    #[test]
    fn turns_every_response_into_the_next_request() {
        for v6 in [false, true] {
            let counted = run_loop(v6, 100, |_| true);
            // Echoes sent at the first read of the clock are received after it.
            assert_eq!(counted.responses, 8 * 98);
            assert_eq!((counted.wrong_responses, counted.resent), (0, 0));
            assert_eq!(counted.empty_polls, counted.polls - 98);
            assert_eq!(counted.elapsed_ns, 99_000_000);
        }
    }

    #[test]
    fn resends_only_after_all_requests_are_lost() {
        for v6 in [false, true] {
            let counted = run_loop(v6, 500, |number| number != 3 && !(20..=26).contains(&number));
            assert_eq!(counted.resent, 8, "only after all are lost");
            assert!(counted.responses > 8 * 200, "{counted:?}");
        }
    }

    #[test]
    fn waits_for_the_first_response() {
        // Every 200 ms eight requests are lost.
        let counted = run_loop(false, 500, |number| number > 8 * 20);
        assert_eq!((counted.resent, counted.responses), (8 * 20, 8));
        assert!((4_000_000_000..4_100_000_000).contains(&counted.elapsed_ns), "{counted:?}");
        let silent = run_loop(false, 500, |_| false);
        assert_eq!((silent.responses, silent.elapsed_ns), (0, 10_499_000_000));
    }

    #[test]
    fn rejects_invalid_settings() {
        let config = LoadConfig::new(crate::LinkKind::Kernel, "10.0.0.1:7".parse().unwrap());
        let refused = |bytes, in_flight| {
            load_udp_closed_loop(&config, bytes, in_flight).unwrap_err().to_string()
        };
        assert!(refused(0, 1).contains("1452"));
        assert!(refused(64, 0).contains("1 to 4096"));
        assert!(refused(64, 1).contains("not kernel sockets"));
    }
}
