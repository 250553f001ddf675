//! UDP echoes in a closed loop: so many requests are on their way, and each
//! answer is made the next request where it lies.
//!
//! That is the least that a generator can do for a packet, so it keeps a server
//! on another core busy that does more. What it cannot tell are percentiles of
//! latency.

use std::fmt;
use std::io;
use std::time::Instant;

use serde::Serialize;
use tidegate_port::Port;

use super::line::Line;
use super::open::{LoadConfig, named_drops, open_line};
use super::raw::RawLine;
use super::template::{MAX_PAYLOAD_BYTES, sum};
use super::workload::Payload;
use crate::cpu;
use crate::error::LabError;
use crate::experiment::number;

/// Packets taken at once.
const QUOTA: usize = 64;
/// Looks at the port between two looks at the clock.
const LOOKS: u64 = 64;
/// After so long without an answer all requests are lost: longer than a server
/// has to wait for a processor.
const LOST_NS: u64 = 200_000_000;
/// The most requests on their way: half of the buffers that there are.
const MOST_IN_FLIGHT: usize = 4096;

/// The result of a load in a closed loop.
#[derive(Clone, Debug, Default, Serialize)]
pub struct ClosedReport {
    /// What it was sent through.
    pub line: String,
    /// Requests that were on their way at any time.
    pub in_flight: usize,
    /// Seconds measured.
    pub seconds: f64,
    /// Answers.
    pub answered: u64,
    /// Answers per second.
    pub answered_pps: f64,
    /// The mean time from a request to its answer: how many are on their way
    /// over how many come back in that time (Little's law).
    pub mean_us: f64,
    /// Looks at the port that found nothing, in percent. With none of them the
    /// generator may have been the limit.
    pub empty_looks_percent: f64,
    /// Answers that were not what was sent.
    pub wrong: u64,
    /// Requests that were sent anew because none was answered any more.
    pub resent: u64,
    /// Frames that the generator's own port dropped, by reason.
    pub port_drops: Vec<(String, u64)>,
}

impl fmt::Display for ClosedReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "over {}, {} requests on their way", self.line, self.in_flight)?;
        writeln!(
            f,
            "answered  {:>12}  {:>12}/s",
            number(self.answered as f64),
            number(self.answered_pps.round())
        )?;
        writeln!(f, "latency   {:.1} us, mean", self.mean_us)?;
        let empty = self.empty_looks_percent;
        writeln!(f, "waited    {empty:.0} % of the looks at the port found nothing")?;
        for (name, count) in [("wrong", self.wrong), ("resent", self.resent)] {
            if count > 0 {
                writeln!(f, "{name:<9} {:>12}", number(count as f64))?;
            }
        }
        for (reason, count) in &self.port_drops {
            writeln!(f, "generator dropped {count}: {reason}")?;
        }
        Ok(())
    }
}

/// Keeps `in_flight` UDP packets of `bytes` bytes (1 to 1452) on their way to a
/// server that echoes them, over a port. The rate of `config` is not used.
///
/// # Errors
/// As [`super::load_udp`], and when nothing comes back.
pub fn load_udp_closed(
    config: &LoadConfig,
    bytes: usize,
    in_flight: usize,
) -> Result<ClosedReport, LabError> {
    if !(1..=MAX_PAYLOAD_BYTES).contains(&bytes) {
        return Err(LabError::Config(format!("a payload is 1 to 1452 bytes, not {bytes}")));
    }
    if !(1..=MOST_IN_FLIGHT).contains(&in_flight) {
        return Err(LabError::Config(format!(
            "{in_flight} requests cannot be on their way: 1 to {MOST_IN_FLIGHT} can"
        )));
    }
    let schedule = config.schedule()?;
    if let Some(core) = config.core {
        cpu::pin_this_thread(core)?;
    }
    let mut line = open_line(config)?;
    let began = Instant::now();
    let clock = || began.elapsed().as_nanos() as u64;
    let mut requests = Requests::new(bytes, in_flight);
    let failed = || LabError::io("the port failed under load");
    requests.run(&mut line, schedule.warm_up_ns, clock).map_err(failed())?;
    let until_ns = clock() + schedule.measure_ns;
    let counted = requests.run(&mut line, until_ns, clock).map_err(failed())?;
    if counted.answers == 0 {
        return Err(LabError::Config(format!("nothing comes back from {}", config.target)));
    }
    let seconds = counted.elapsed_ns as f64 / 1e9;
    let answered_pps = counted.answers as f64 / seconds;
    Ok(ClosedReport {
        line: line.detail(),
        in_flight,
        seconds,
        answered: counted.answers,
        answered_pps,
        mean_us: in_flight as f64 / answered_pps * 1e6,
        empty_looks_percent: 100.0 * counted.empty as f64 / counted.looks as f64,
        wrong: counted.wrong,
        resent: counted.resent,
        port_drops: named_drops(&line.counters()),
    })
}

/// What is sent again and again.
struct Requests {
    payload: Vec<u8>,
    payload_sum: u32,
    in_flight: usize,
    /// None is on its way.
    are_lost: bool,
}

/// What happened while requests went round.
#[derive(Clone, Copy, Debug, Default)]
struct Counted {
    elapsed_ns: u64,
    looks: u64,
    empty: u64,
    answers: u64,
    wrong: u64,
    resent: u64,
}

impl Requests {
    fn new(bytes: usize, in_flight: usize) -> Self {
        let payload: Vec<u8> = (0..bytes).map(|at| (at as u8).wrapping_mul(37)).collect();
        Self { payload_sum: sum(&payload), payload, in_flight, are_lost: true }
    }

    /// Goes on until `until_ns` by the clock.
    fn run<P: Port>(
        &mut self,
        line: &mut RawLine<P>,
        until_ns: u64,
        clock: impl Fn() -> u64,
    ) -> io::Result<Counted> {
        let began_ns = clock();
        let (mut now_ns, mut answered_ns) = (began_ns, began_ns);
        let mut counted = Counted::default();
        while now_ns < until_ns {
            if self.are_lost {
                self.send_all(line)?;
                answered_ns = now_ns;
            }
            let before = counted.answers;
            for _ in 0..LOOKS {
                let turned = line.turn_around(QUOTA, &self.payload, self.payload_sum)?;
                line.flush()?;
                counted.looks += 1;
                counted.empty += u64::from(turned.answers == 0);
                counted.answers += turned.answers;
                counted.wrong += turned.wrong;
            }
            now_ns = clock();
            if counted.answers > before {
                answered_ns = now_ns;
            } else if now_ns - answered_ns > LOST_NS {
                self.are_lost = true;
                counted.resent += self.in_flight as u64;
            }
        }
        counted.elapsed_ns = (now_ns - began_ns).max(1);
        Ok(counted)
    }

    fn send_all<P: Port>(&mut self, line: &mut RawLine<P>) -> io::Result<()> {
        let mut left = self.in_flight;
        // A port that takes nothing is not waited for: the rest is lost, too.
        while left > 0 && line.room() > 0 {
            for _ in 0..left.min(line.room()) {
                line.push(|_, room| {
                    room[..self.payload.len()].copy_from_slice(&self.payload);
                    Payload { len: self.payload.len(), sum: self.payload_sum }
                });
                left -= 1;
            }
            line.flush()?;
        }
        self.are_lost = false;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use tidegate_port::mem::{MemConfig, wire};

    use super::super::raw::tests::{addressing, arena, turn_around};
    use super::*;

    /// Goes on for so many looks at the clock, each a millisecond later; before
    /// each, the other side sends back the frames that `is_answered` says, by
    /// their number.
    fn run(v6: bool, looks: u64, is_answered: impl Fn(u64) -> bool) -> Counted {
        let (ours, theirs) = wire(&MemConfig::default()).unwrap();
        let mut line = RawLine::open(ours, arena(), addressing(v6)).unwrap();
        let state = RefCell::new((theirs, 0, 0));
        let clock = || {
            let (theirs, now_ns, seen) = &mut *state.borrow_mut();
            *now_ns += 1_000_000;
            let mut back = Vec::new();
            theirs.receive_bytes(64, |frame| {
                *seen += 1;
                back.extend(is_answered(*seen).then(|| turn_around(frame, v6)));
            });
            for (staged, frame) in back.iter().enumerate() {
                assert!(theirs.stage(staged, frame));
            }
            theirs.flush(back.len());
            *now_ns
        };
        Requests::new(22, 8).run(&mut line, looks * 1_000_000, clock).unwrap()
    }

    #[test]
    fn every_answer_is_a_request_again() {
        for v6 in [false, true] {
            let counted = run(v6, 100, |_| true);
            // What the first look at the clock answers is taken behind it.
            assert_eq!(counted.answers, 8 * 98);
            assert_eq!((counted.wrong, counted.resent), (0, 0));
            assert_eq!(counted.empty, counted.looks - 98);
            assert_eq!(counted.elapsed_ns, 99_000_000);
        }
    }

    #[test]
    fn what_is_lost_is_sent_anew() {
        for v6 in [false, true] {
            let counted = run(v6, 500, |number| number != 3 && !(20..=26).contains(&number));
            assert_eq!(counted.resent, 8, "only when none is left");
            assert!(counted.answers > 8 * 200, "{counted:?}");
        }
    }

    #[test]
    fn what_cannot_be_sent_is_refused() {
        let config = LoadConfig::new(super::super::LinkKind::Kernel, "10.0.0.1:7".parse().unwrap());
        let refused =
            |bytes, in_flight| load_udp_closed(&config, bytes, in_flight).unwrap_err().to_string();
        assert!(refused(0, 1).contains("1452"));
        assert!(refused(64, 0).contains("1 to 4096"));
        assert!(refused(64, 1).contains("kernel sockets are no port"));
    }
}
