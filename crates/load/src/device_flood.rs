//! Flood through a device: datagrams sent by the clock, without regard to their fate.
//!
//! Every frame that counts as offered was made and passed to the device. Frames that the device
//! does not accept are dropped, as by a program that finds the transmit ring of its NIC full.
//! Frames that a slow generator fails to make do not count, so the report shows the lower rate.

use std::io;
use std::time::{Duration, Instant};

use tidegate_device::Device;

use crate::device_link::DeviceLink;
use crate::error::LoadError;
use crate::link::Link;
use crate::template::sum;
use crate::udp_load::{LoadConfig, open_device_link};
use crate::workload::WrittenPayload;

/// Maximum number of frames between two reads of the clock.
const BURST_FRAMES: u64 = 64;
/// Packets received per poll.
const POLL_QUOTA_PACKETS: usize = 64;

/// Flood that the calling thread sends over a device.
pub struct DeviceFlood<P> {
    link: DeviceLink<P>,
    payload: Vec<u8>,
    payload_sum: u32,
    began: Instant,
}

impl DeviceFlood<Box<dyn Device>> {
    /// Opens the device that `config` names, for datagrams of `bytes` bytes. The rate and times of
    /// `config` are not used.
    ///
    /// # Errors
    /// As [`crate::load_udp`].
    pub fn open(config: &LoadConfig, bytes: usize) -> Result<Self, LoadError> {
        Ok(Self::new(open_device_link(config)?, bytes))
    }
}

impl<P: Device> DeviceFlood<P> {
    fn new(link: DeviceLink<P>, bytes: usize) -> Self {
        let payload = vec![0x7e; bytes];
        Self { link, payload_sum: sum(&payload), payload, began: Instant::now() }
    }

    /// Sends `rate_pps` datagrams per second for `duration`; returns the number offered.
    ///
    /// # Errors
    /// When the device fails.
    pub fn offer(&mut self, rate_pps: f64, duration: Duration) -> Result<u64, LoadError> {
        let began = self.began;
        let clock = || began.elapsed().as_nanos() as u64;
        self.offer_with_clock(rate_pps, duration.as_nanos() as u64, clock)
            .map_err(LoadError::io("the device failed under load"))
    }

    fn offer_with_clock(
        &mut self,
        rate_pps: f64,
        duration_ns: u64,
        clock: impl Fn() -> u64,
    ) -> io::Result<u64> {
        let began_ns = clock();
        let mut offered = 0;
        loop {
            let elapsed_ns = clock() - began_ns;
            let due = (elapsed_ns.min(duration_ns) as f64 * rate_pps / 1e9) as u64 - offered;
            let made = due.min(BURST_FRAMES).min(self.link.space() as u64);
            (0..made).for_each(|_| self.push());
            self.link.flush()?;
            self.link.drop_queued_frames();
            offered += made;
            // The target may request the generator's hardware address.
            self.link.poll(POLL_QUOTA_PACKETS, |_, _| {})?;
            if elapsed_ns >= duration_ns {
                return Ok(offered);
            }
        }
    }

    fn push(&mut self) {
        self.link.push(|_, buffer| {
            buffer[..self.payload.len()].copy_from_slice(&self.payload);
            WrittenPayload { len: self.payload.len(), sum: self.payload_sum }
        });
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use tidegate_device::mem::{MemConfig, MemDevice, wire};

    use super::*;
    use crate::device_link::tests::{addressing, arena};

    fn make_flood(v6: bool) -> (DeviceFlood<MemDevice>, MemDevice) {
        let (ours, theirs) = wire(&MemConfig::default()).unwrap();
        let link = DeviceLink::open(ours, arena(), addressing(v6)).unwrap();
        (DeviceFlood::new(link, 18), theirs)
    }

    /// Clock that advances by `step_ns` at each read.
    fn clock(step_ns: u64) -> impl Fn() -> u64 {
        let now = Cell::new(0);
        move || now.replace(now.get() + step_ns)
    }

    #[test]
    fn keeps_the_rate_by_the_clock() {
        for v6 in [false, true] {
            let (mut flood, mut theirs) = make_flood(v6);
            let offered = flood.offer_with_clock(1e6, 40_000, clock(1_000)).unwrap();
            assert_eq!(offered, 40);
            assert_eq!(theirs.receive_bytes(100, |_| {}), 40);
        }
    }

    #[test]
    fn counts_frames_lost_to_ring_overflow_as_offered() {
        for v6 in [false, true] {
            let (mut flood, mut theirs) = make_flood(v6);
            let offered = flood.offer_with_clock(1e9, 1_000_000, clock(1_000)).unwrap();
            assert_eq!(offered, 1_000 * BURST_FRAMES, "each turn makes a burst");
            assert!(theirs.receive_bytes(usize::MAX, |_| {}) < 5_000, "the ring is small");
        }
    }

    #[test]
    fn counts_only_sent_frames_when_the_generator_is_too_slow() {
        for v6 in [false, true] {
            let (mut flood, mut theirs) = make_flood(v6);
            // A hundred frames are due at each read of the clock, and the ring is never full.
            let offered = flood.offer_with_clock(1e8, 10_000, clock(1_000)).unwrap();
            let sent = theirs.receive_bytes(usize::MAX, |_| {}) as u64;
            assert_eq!(offered, sent);
            assert!(offered < 900, "{offered}");
        }
    }
}
