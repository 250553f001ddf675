//! A load that takes little of a core: a thread that sleeps, sends the frames
//! that are due and sleeps again.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use tidegate_memory::{Arena, ArenaConfig, FrameSize};
use tidegate_port::packet::{PacketConfig, PacketPort};
use tidegate_port::{Burst, Port};

use crate::livelock::bench::{LOAD_ADDRESS, LOAD_MAC};
use crate::load::{Addressing, flood};
use crate::netns::End;
use crate::{LabError, cpu};

/// How long it sleeps: for a hundred frames at the loads of interest.
const TICK: Duration = Duration::from_micros(200);
/// Frames that it sends at once at most.
const BURST_MAX: u64 = 1024;
const FLOWS: u16 = 64;

/// One frame of each flow to `target`.
pub(super) fn frames(target: SocketAddr, target_mac: [u8; 6]) -> Vec<Vec<u8>> {
    let addressing = Addressing {
        source_mac: LOAD_MAC,
        target_mac,
        source: LOAD_ADDRESS.into(),
        sources: 1,
        first_port: 20_000,
        ports: FLOWS,
        target,
    };
    // With its headers and trailer, 64 bytes.
    let payload: &[u8] = &[0x7e; 18];
    flood::frames(&addressing, std::iter::repeat_n(payload, FLOWS.into()))
}

/// Sends from a thread of its own until it is dropped.
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
    /// Sends `frames` in turn through `port`, from core `core`; nothing before
    /// [`Sender::set_rate`].
    pub(super) fn through_port(
        mut port: impl Port + 'static,
        frames: Vec<Vec<u8>>,
        core: usize,
    ) -> Result<Self, LabError> {
        let mut arena = arena()?;
        let control = Arc::new(Control::default());
        let told = Arc::clone(&control);
        let thread = thread::spawn(move || {
            cpu::pin_this_thread(core)?;
            told.send(&mut port, &mut arena, &frames)
        });
        Ok(Self { control, thread: Some(thread) })
    }

    /// As [`Sender::through_port`], by AF_PACKET through the device of `end`.
    pub(super) fn through_device(
        end: &End,
        frames: Vec<Vec<u8>>,
        core: usize,
    ) -> Result<Self, LabError> {
        let mut arena = arena()?;
        let config = PacketConfig { qdisc_bypass: true, ..PacketConfig::new(&end.device) };
        let control = Arc::new(Control::default());
        let told = Arc::clone(&control);
        let thread = end.namespace.spawn(move || {
            cpu::pin_this_thread(core)?;
            let mut port = PacketPort::open(&config, &mut arena)
                .map_err(LabError::io_other("cannot open a socket to send by"))?;
            told.send(&mut port, &mut arena, &frames)
        })?;
        Ok(Self { control, thread: Some(thread) })
    }

    /// Sends so many frames per second from now on. What the link has no room
    /// for is lost.
    pub(super) fn set_rate(&self, rate_pps: f64) {
        self.control.rate_pps.store(rate_pps as u64, Ordering::Relaxed);
    }

    /// Stops, and says what went wrong meanwhile.
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
        // What went wrong was told by `finish`, or another error was first.
        let _ = self.stop();
    }
}

fn arena() -> Result<Arena, LabError> {
    let config = ArenaConfig { frames: 2048, frame_size: FrameSize::K2, hugepages: false };
    Arena::new(config).map_err(LabError::io_other("no memory for frames"))
}

impl Control {
    fn send(
        &self,
        port: &mut impl Port,
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
            port.transmit(arena, &mut burst).map_err(LabError::io("the link failed"))?;
            // What it had no room for is lost.
            burst.drain(..).for_each(|frame| arena.free(frame));
            thread::sleep(TICK);
        }
        Ok(())
    }
}

/// How many frames are due, by the clock.
struct Schedule {
    rate_pps: u64,
    began: Instant,
    sent: u64,
}

impl Schedule {
    fn new(rate_pps: u64) -> Self {
        Self { rate_pps, began: Instant::now(), sent: 0 }
    }

    /// Frames that have become due since the last call; of very many only the
    /// last.
    fn due(&mut self) -> usize {
        let due = (self.began.elapsed().as_secs_f64() * self.rate_pps as f64) as u64;
        let count = due.saturating_sub(self.sent).min(BURST_MAX);
        self.sent = due;
        count as usize
    }
}

/// Loads to offer one after the other.
pub(super) struct Loads {
    pub(super) rates_pps: Vec<f64>,
    pub(super) warm_up: Duration,
    pub(super) time: Duration,
}

impl Loads {
    /// Offers each, and gives the highest rate at which `served` grew, per
    /// second.
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
    fn what_is_due_follows_the_clock() {
        let mut schedule = Schedule::new(1_000);
        schedule.began -= Duration::from_millis(500);
        assert_eq!(schedule.due() / 10, 50);
        assert!(schedule.due() < 100, "nothing twice");
        schedule.began -= Duration::from_secs(60);
        assert_eq!(schedule.due(), BURST_MAX as usize, "the rest is forgotten");
        assert_eq!(Schedule::new(0).due(), 0);
    }
}
