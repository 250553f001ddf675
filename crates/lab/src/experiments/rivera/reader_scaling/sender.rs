//! Load generator that takes little of a core: its thread sleeps, sends the frames that are due
//! and sleeps again.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use tidegate_device::packet::{PacketConfig, PacketDevice};
use tidegate_device::{Burst, Device};
use tidegate_load::Addressing;
use tidegate_memory::{Arena, ArenaConfig, FrameSize};

use crate::LabError;
use crate::testbed::cpu;
use crate::testbed::flood::{LOAD_ADDRESS, LOAD_MAC};
use crate::testbed::load::flood;
use crate::testbed::netns::VethEnd;

/// Sleep between two bursts; about a hundred frames at the loads of interest.
const TICK: Duration = Duration::from_micros(200);
/// Maximum number of frames sent at once.
const MAX_BURST_FRAMES: u64 = 1024;
const FLOW_COUNT: u16 = 64;

/// Returns one frame of each flow to `target`.
pub(super) fn frames(target: SocketAddr, target_mac: [u8; 6]) -> Vec<Vec<u8>> {
    let addressing = Addressing {
        source_mac: LOAD_MAC,
        target_mac,
        source: LOAD_ADDRESS.into(),
        source_count: 1,
        first_port: 20_000,
        port_count: FLOW_COUNT,
        target,
    };
    // 64 bytes with headers and trailer.
    let payload: &[u8] = &[0x7e; 18];
    flood::frames(&addressing, std::iter::repeat_n(payload, FLOW_COUNT.into()))
}

/// Load generator that sends from its own thread until it is dropped.
pub(super) struct Sender {
    control: Arc<Control>,
    thread: Option<JoinHandle<Result<(), LabError>>>,
}

#[derive(Default)]
struct Control {
    rate_pps: AtomicU64,
    stop: AtomicBool,
}

impl Sender {
    /// Sends `frames` in turn through a device, from core `core`; sends nothing before
    /// [`Sender::set_rate`].
    pub(super) fn over_device(
        mut device: impl Device + 'static,
        frames: Vec<Vec<u8>>,
        core: usize,
    ) -> Result<Self, LabError> {
        let mut arena = arena()?;
        let control = Arc::new(Control::default());
        let thread_control = Arc::clone(&control);
        let thread = thread::spawn(move || {
            cpu::pin_this_thread(core)?;
            thread_control.send(&mut device, &mut arena, &frames)
        });
        Ok(Self { control, thread: Some(thread) })
    }

    /// Like [`Sender::over_device`], through an AF_PACKET socket on the device of `end`.
    pub(super) fn over_packet_socket(
        end: &VethEnd,
        frames: Vec<Vec<u8>>,
        core: usize,
    ) -> Result<Self, LabError> {
        let mut arena = arena()?;
        let config = PacketConfig::new(&end.device).qdisc_bypass(true);
        let control = Arc::new(Control::default());
        let thread_control = Arc::clone(&control);
        let thread = end.namespace.spawn(move || {
            cpu::pin_this_thread(core)?;
            let mut device = PacketDevice::open(&config, &mut arena)
                .map_err(LabError::io_other("cannot open the sending socket"))?;
            thread_control.send(&mut device, &mut arena, &frames)
        })?;
        Ok(Self { control, thread: Some(thread) })
    }

    /// Sets the send rate in frames per second. Frames that exceed the capacity of the link are
    /// dropped.
    pub(super) fn set_rate(&self, rate_pps: f64) {
        self.control.rate_pps.store(rate_pps as u64, Ordering::Relaxed);
    }

    /// Stops the thread and returns its error, if any.
    pub(super) fn finish(mut self) -> Result<(), LabError> {
        self.stop()
    }

    fn stop(&mut self) -> Result<(), LabError> {
        self.control.stop.store(true, Ordering::Relaxed);
        let Some(thread) = self.thread.take() else { return Ok(()) };
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        // `finish` returned the error of the thread, or another error came first.
        let _ = self.stop();
    }
}

fn arena() -> Result<Arena, LabError> {
    let config = ArenaConfig { frames: 2048, frame_size: FrameSize::K2, hugepages: false };
    Arena::new(config).map_err(LabError::io_other("cannot allocate frames"))
}

impl Control {
    fn send(
        &self,
        device: &mut impl Device,
        arena: &mut Arena,
        frames: &[Vec<u8>],
    ) -> Result<(), LabError> {
        let (mut frames, mut burst) = (frames.iter().cycle(), Burst::new());
        let mut schedule = Schedule::new(0);
        while !self.stop.load(Ordering::Relaxed) {
            let rate_pps = self.rate_pps.load(Ordering::Relaxed);
            if rate_pps != schedule.rate_pps {
                schedule = Schedule::new(rate_pps);
            }
            for frame in frames.by_ref().take(schedule.due()) {
                burst.extend(arena.alloc_from(frame));
            }
            device.transmit(arena, &mut burst).map_err(LabError::io("the link failed"))?;
            // Frames that the link did not accept are dropped.
            burst.drain(..).for_each(|frame| arena.free(frame));
            thread::sleep(TICK);
        }
        Ok(())
    }
}

/// Clock-driven schedule of the frames to send.
struct Schedule {
    rate_pps: u64,
    start: Instant,
    sent: u64,
}

impl Schedule {
    fn new(rate_pps: u64) -> Self {
        Self { rate_pps, start: Instant::now(), sent: 0 }
    }

    /// Number of frames that became due since the last call, at most [`MAX_BURST_FRAMES`]; earlier
    /// frames are skipped.
    fn due(&mut self) -> usize {
        let due = (self.start.elapsed().as_secs_f64() * self.rate_pps as f64) as u64;
        let count = due.saturating_sub(self.sent).min(MAX_BURST_FRAMES);
        self.sent = due;
        count as usize
    }
}

/// Loads that are offered one after the other.
pub(super) struct OfferedLoads {
    pub(super) rates_pps: Vec<f64>,
    pub(super) warm_up: Duration,
    pub(super) time: Duration,
}

impl OfferedLoads {
    /// Offers each load and returns the highest growth of `served`, per second.
    pub(super) fn best_rps(
        &self,
        sender: &Sender,
        served: impl Fn() -> Result<u64, LabError>,
    ) -> Result<f64, LabError> {
        let mut best = 0.0f64;
        for &rate_pps in &self.rates_pps {
            sender.set_rate(rate_pps);
            thread::sleep(self.warm_up);
            let (from, before) = (Instant::now(), served()?);
            thread::sleep(self.time);
            let count = served()? - before;
            best = best.max(count as f64 / from.elapsed().as_secs_f64());
        }
        Ok(best)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn due_frames_follow_the_clock() {
        let mut schedule = Schedule::new(1_000);
        schedule.start -= Duration::from_millis(500);
        assert_eq!(schedule.due() / 10, 50);
        assert!(schedule.due() < 100, "no frame is due twice");
        schedule.start -= Duration::from_secs(60);
        assert_eq!(schedule.due(), MAX_BURST_FRAMES as usize, "earlier frames are skipped");
        assert_eq!(Schedule::new(0).due(), 0);
    }
}
