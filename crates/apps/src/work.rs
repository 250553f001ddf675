//! A service with as much work for each datagram as one wants to see.

use std::hint::black_box;
use std::net::SocketAddr;

use crate::Responder;
use crate::echo::Echo;

/// Turns of the loop in one measurement of its speed.
const CALIBRATION_TURNS: u64 = 20_000;
/// Measurements of the speed; the shortest counts, since it was disturbed least.
const CALIBRATIONS: usize = 50;

/// Works a fixed number of turns of a loop on each datagram, then echoes it or
/// is silent.
///
/// The work is a number of turns and not a time: time in which somebody else
/// had the processor is no work.
#[derive(Clone, Copy, Debug)]
pub struct Work {
    turns: u64,
    is_sink: bool,
    state: u64,
}

impl Work {
    /// Works `turns` turns on each datagram; a sink answers none.
    pub fn new(turns: u64, is_sink: bool) -> Self {
        Self { turns, is_sink, state: 1 }
    }

    /// How many turns take `work_ns` nanoseconds on this processor, by the
    /// clock `now_ns`.
    pub fn turns_for(work_ns: u64, mut now_ns: impl FnMut() -> u64) -> u64 {
        if work_ns == 0 {
            return 0;
        }
        let mut shortest_ns = u64::MAX;
        for _ in 0..CALIBRATIONS {
            let began_ns = now_ns();
            black_box(turn(black_box(1), CALIBRATION_TURNS));
            shortest_ns = shortest_ns.min(now_ns().saturating_sub(began_ns));
        }
        (work_ns.saturating_mul(CALIBRATION_TURNS) / shortest_ns.max(1)).max(1)
    }
}

/// A chain of shifts, each of which has to wait for the one before (xorshift
/// by Marsaglia), so that no compiler and no processor shortens it.
#[inline(never)]
fn turn(mut state: u64, turns: u64) -> u64 {
    for _ in 0..turns {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
    }
    state
}

impl Responder for Work {
    fn respond(&mut self, request: &[u8], from: SocketAddr, reply: &mut [u8]) -> Option<usize> {
        if self.turns > 0 {
            self.state = black_box(turn(self.state, self.turns));
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
    fn work_is_done_before_the_answer() {
        let from = "192.0.2.1:40000".parse().unwrap();
        let mut work = Work::new(3, false);
        let mut reply = [0; 8];
        assert_eq!(work.respond(b"tide", from, &mut reply), Some(4));
        assert_eq!(&reply[..4], b"tide");
        assert_eq!(work.state, turn(1, 3));
        assert_ne!(work.state, 1);
        let mut sink = Work::new(0, true);
        assert_eq!(sink.respond(b"tide", from, &mut reply), None);
        assert_eq!(sink.state, 1, "no work asked for");
    }

    #[test]
    fn turns_follow_the_shortest_time() {
        // Each look at the clock is 10 us later, but 40 us once.
        let (mut now, mut looks) = (0, 0);
        let clock = || {
            looks += 1;
            now += if looks == 5 { 40_000 } else { 10_000 };
            now
        };
        assert_eq!(Work::turns_for(500, clock), 500 * CALIBRATION_TURNS / 10_000);
        assert_eq!(Work::turns_for(0, || unreachable!("no work needs no clock")), 0);
        assert_eq!(Work::turns_for(1, || 0), CALIBRATION_TURNS, "a clock that stands still");
    }
}
