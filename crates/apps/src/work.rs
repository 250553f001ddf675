//! Responder that spends a fixed amount of CPU work on each datagram.

use std::hint::black_box;
use std::net::SocketAddr;

use crate::Responder;
use crate::echo::Echo;

/// Iterations of the loop in one calibration run.
const CALIBRATION_ITERATIONS: u64 = 20_000;
/// Calibration runs; the shortest counts, since it was disturbed least.
const CALIBRATION_RUNS: usize = 50;

/// Runs a fixed number of loop iterations for each datagram, then echoes or drops it.
///
/// The work is a number of iterations and not a time: time in which another thread had the CPU is
/// no work.
#[derive(Clone, Copy, Debug)]
pub struct Work {
    iterations: u64,
    is_sink: bool,
    state: u64,
}

impl Work {
    /// Creates a responder with `iterations` iterations for each datagram; a sink never replies.
    pub fn new(iterations: u64, is_sink: bool) -> Self {
        Self { iterations, is_sink, state: 1 }
    }

    /// Number of iterations that take `work_ns` nanoseconds on this CPU, measured with the clock
    /// `now_ns`.
    pub fn iterations_for(work_ns: u64, mut now_ns: impl FnMut() -> u64) -> u64 {
        if work_ns == 0 {
            return 0;
        }
        let mut shortest_ns = u64::MAX;
        for _ in 0..CALIBRATION_RUNS {
            let began_ns = now_ns();
            black_box(xorshift(black_box(1), CALIBRATION_ITERATIONS));
            shortest_ns = shortest_ns.min(now_ns().saturating_sub(began_ns));
        }
        (work_ns.saturating_mul(CALIBRATION_ITERATIONS) / shortest_ns.max(1)).max(1)
    }
}

/// Runs a chain of dependent shifts (Marsaglia's xorshift), which neither compiler nor CPU can
/// shorten.
#[inline(never)]
fn xorshift(mut state: u64, iterations: u64) -> u64 {
    for _ in 0..iterations {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
    }
    state
}

/// Runs this many iterations of the work.
pub(crate) fn spend(iterations: u64) {
    black_box(xorshift(black_box(1), iterations));
}

impl Responder for Work {
    fn respond(&mut self, request: &[u8], from: SocketAddr, reply: &mut [u8]) -> Option<usize> {
        if self.iterations > 0 {
            self.state = black_box(xorshift(self.state, self.iterations));
        }
        if self.is_sink {
            return None;
        }
        Echo.respond(request, from, reply)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn works_before_replying() {
        let from = "192.0.2.1:40000".parse().unwrap();
        let mut work = Work::new(3, false);
        let mut reply = [0; 8];
        assert_eq!(work.respond(b"tide", from, &mut reply), Some(4));
        assert_eq!(&reply[..4], b"tide");
        assert_eq!(work.state, xorshift(1, 3));
        assert_ne!(work.state, 1);
        let mut sink = Work::new(0, true);
        assert_eq!(sink.respond(b"tide", from, &mut reply), None);
        assert_eq!(sink.state, 1, "no work asked for");
    }

    #[test]
    fn calibrates_by_the_shortest_run() {
        // Each clock reading is 10 us later, but once 40 us later.
        let (mut now, mut readings) = (0, 0);
        let clock = || {
            readings += 1;
            now += if readings == 5 { 40_000 } else { 10_000 };
            now
        };
        assert_eq!(Work::iterations_for(500, clock), 500 * CALIBRATION_ITERATIONS / 10_000);
        assert_eq!(Work::iterations_for(0, || unreachable!("zero work reads no clock")), 0);
        assert_eq!(Work::iterations_for(1, || 0), CALIBRATION_ITERATIONS, "a stopped clock");
    }
}
