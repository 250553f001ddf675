//! A flood through a port: datagrams by the clock, whatever becomes of them.
//!
//! As at a card, a frame that the ring has no room for costs nobody anything:
//! for a while none are made, and those that were due count as offered. A
//! generator that is too slow does not: what it offers less is seen.

use std::io;
use std::time::{Duration, Instant};

use tidegate_port::Port;

use super::line::Line;
use super::open::{LoadConfig, open_line};
use super::raw::RawLine;
use super::template::sum;
use super::workload::Payload;
use crate::error::LabError;

/// The most frames between two looks at the clock.
const BURST: u64 = 64;
/// For how long no frames are made when the ring is full, in nanoseconds: less
/// than a server takes for what is in it.
const FULL_NS: u64 = 40_000;
/// Packets taken at once.
const QUOTA: usize = 64;

/// A flood that the calling thread sends.
pub struct PortFlood<P> {
    line: RawLine<P>,
    payload: Vec<u8>,
    payload_sum: u32,
    began: Instant,
}

impl PortFlood<Box<dyn Port>> {
    /// Opens the port that `config` names, for datagrams of `bytes` bytes. Its
    /// rate and times are not used.
    ///
    /// # Errors
    /// As [`super::load_udp`].
    pub fn open(config: &LoadConfig, bytes: usize) -> Result<Self, LabError> {
        Ok(Self::new(open_line(config)?, bytes))
    }
}

impl<P: Port> PortFlood<P> {
    fn new(line: RawLine<P>, bytes: usize) -> Self {
        let payload = vec![0x7e; bytes];
        Self { line, payload_sum: sum(&payload), payload, began: Instant::now() }
    }

    /// Sends at a rate for so long, and returns how many datagrams were offered.
    ///
    /// # Errors
    /// When the port fails.
    pub fn offer(&mut self, rate_pps: f64, time: Duration) -> Result<u64, LabError> {
        let began = self.began;
        let clock = || began.elapsed().as_nanos() as u64;
        self.offer_by(rate_pps, time.as_nanos() as u64, clock)
            .map_err(LabError::io("the port failed under load"))
    }

    fn offer_by(
        &mut self,
        rate_pps: f64,
        time_ns: u64,
        clock: impl Fn() -> u64,
    ) -> io::Result<u64> {
        let began_ns = clock();
        let (mut offered, mut full_until_ns) = (0, 0);
        loop {
            let now_ns = clock();
            let elapsed_ns = now_ns - began_ns;
            let due = (elapsed_ns.min(time_ns) as f64 * rate_pps / 1e9) as u64 - offered;
            if now_ns < full_until_ns {
                offered += due;
            } else {
                let made = due.min(BURST).min(self.line.room() as u64);
                (0..made).for_each(|_| self.push());
                self.line.flush()?;
                offered += made;
                if self.line.waiting() > 0 {
                    full_until_ns = now_ns + FULL_NS;
                }
                // Who is flooded may ask for our address.
                self.line.poll(QUOTA, |_, _| {})?;
            }
            if elapsed_ns >= time_ns {
                return Ok(offered);
            }
        }
    }

    fn push(&mut self) {
        self.line.push(|_, room| {
            room[..self.payload.len()].copy_from_slice(&self.payload);
            Payload { len: self.payload.len(), sum: self.payload_sum }
        });
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use tidegate_port::mem::{MemConfig, MemPort, wire};

    use super::super::raw::tests::{addressing, arena};
    use super::*;

    fn flood(v6: bool) -> (PortFlood<MemPort>, MemPort) {
        let (ours, theirs) = wire(&MemConfig::default()).unwrap();
        let line = RawLine::open(ours, arena(), addressing(v6)).unwrap();
        (PortFlood::new(line, 18), theirs)
    }

    /// Each look at the clock is so much later.
    fn clock(step_ns: u64) -> impl Fn() -> u64 {
        let now = Cell::new(0);
        move || now.replace(now.get() + step_ns)
    }

    #[test]
    fn the_rate_is_kept_by_the_clock() {
        for v6 in [false, true] {
            let (mut flood, mut theirs) = flood(v6);
            let offered = flood.offer_by(1e6, 40_000, clock(1_000)).unwrap();
            assert_eq!(offered, 40);
            assert_eq!(theirs.receive_bytes(100, |_| {}), 40);
        }
    }

    #[test]
    fn what_a_full_ring_has_no_room_for_was_offered() {
        for v6 in [false, true] {
            let (mut flood, mut theirs) = flood(v6);
            let offered = flood.offer_by(1e9, 10_000_000, clock(1_000)).unwrap();
            assert!(theirs.receive_bytes(usize::MAX, |_| {}) < 5_000, "the ring is small");
            assert!(offered > 9_000_000, "{offered}");
        }
    }

    #[test]
    fn what_the_generator_is_too_slow_for_was_not() {
        for v6 in [false, true] {
            let (mut flood, mut theirs) = flood(v6);
            // A hundred are due at each look, and the ring is never full.
            let offered = flood.offer_by(1e8, 10_000, clock(1_000)).unwrap();
            let sent = theirs.receive_bytes(usize::MAX, |_| {}) as u64;
            assert_eq!(offered, sent);
            assert!(offered < 900, "{offered}");
        }
    }
}
