//! Tidegate's device layer alone: returns every frame of a device unchanged.

use std::time::{Duration, Instant};

use tidegate_device::dpdk::{self, DpdkConfig};
use tidegate_device::{Burst, Device};
use tidegate_memory::{Arena, ArenaConfig};

use crate::error::LabError;
use crate::testbed::cpu;

const BURST_FRAMES: usize = 128;
/// Content of each frame that is put into the device first.
const INITIAL_FRAME: [u8; 64] = [0; 64];
/// Bursts between two readings of the clock.
const BURSTS_PER_CLOCK_READ: usize = 1024;

/// Configuration of forwarding.
#[derive(Clone, Debug)]
pub struct ForwardConfig {
    /// The device.
    pub device: DpdkConfig,
    /// Core to run on; `None` leaves the thread unpinned.
    pub core: Option<usize>,
    /// Duration in seconds; the first tenth is not measured.
    pub seconds: f64,
    /// Frames to transmit first, for a device that returns the frames it is sent.
    pub frames: usize,
}

/// Returns every frame of a device unchanged, like `dpdk-testpmd` in mode `io`; reports the
/// rate in frames per second. Calls `on_open` once the device is open.
///
/// # Errors
/// When the device cannot be opened or fails.
pub fn forward(config: &ForwardConfig, on_open: impl FnOnce()) -> Result<f64, LabError> {
    if let Some(core) = config.core {
        cpu::pin_this_thread(core)?;
    }
    let total_time = Duration::try_from_secs_f64(config.seconds).map_err(|_| {
        LabError::Config(format!("{} is no valid duration in seconds", config.seconds))
    })?;
    let arena = ArenaConfig { frame_size: dpdk::RECOMMENDED_FRAME_SIZE, ..ArenaConfig::default() };
    let mut arena =
        Arena::new(arena).map_err(LabError::io_other("cannot allocate packet memory"))?;
    let mut device = dpdk::open(&config.device, &mut arena).map_err(super::device_error)?;
    on_open();
    let failed = |error| LabError::io(format!("the device {} failed", config.device))(error);
    let mut burst = Burst::new();
    burst.extend((0..config.frames).map_while(|_| arena.alloc_from(&INITIAL_FRAME)));
    let mut began = Instant::now();
    let mut before = device.counters().transmitted;
    let mut is_warm = false;
    loop {
        for _ in 0..BURSTS_PER_CLOCK_READ {
            device.transmit(&mut arena, &mut burst).map_err(failed)?;
            device.receive(&mut arena, &mut burst, BURST_FRAMES).map_err(failed)?;
        }
        let elapsed = began.elapsed();
        if !is_warm && elapsed > total_time / 10 {
            is_warm = true;
            (began, before) = (Instant::now(), device.counters().transmitted);
        } else if is_warm && elapsed > total_time.mul_f64(0.9) {
            break;
        }
    }
    let sent = device.counters().transmitted - before;
    burst.drain(..).for_each(|frame| arena.free(frame));
    Ok(sent as f64 / began.elapsed().as_secs_f64())
}
