//! Tidegate's port alone: every frame of a device goes back as it came.

use std::time::{Duration, Instant};

use tidegate_memory::{Arena, ArenaConfig};
use tidegate_port::dpdk::{self, DpdkConfig};
use tidegate_port::{Burst, Port};

use crate::cpu;
use crate::error::LabError;

const BURST: usize = 128;
/// Bytes of each frame that is put into the device first.
const FRAME: [u8; 64] = [0; 64];
/// Bursts between two looks at the clock.
const LOOK_EVERY: usize = 1024;

/// What to send back, and for how long.
#[derive(Clone, Debug)]
pub struct ForwardConfig {
    /// The device.
    pub device: DpdkConfig,
    /// The core to run on.
    pub core: Option<usize>,
    /// For how long, in seconds; the first tenth does not count.
    pub seconds: f64,
    /// Frames to put into the device first, for one that returns what it is
    /// sent.
    pub frames: usize,
}

/// Sends back every frame of a device as it came, as `dpdk-testpmd` does in its
/// mode `io`, and returns how many in a second. `opened` is called when the
/// device is open.
///
/// # Errors
/// When the device cannot be opened or fails.
pub fn forward(config: &ForwardConfig, opened: impl FnOnce()) -> Result<f64, LabError> {
    if let Some(core) = config.core {
        cpu::pin_this_thread(core)?;
    }
    let whole = Duration::try_from_secs_f64(config.seconds)
        .map_err(|_| LabError::Config(format!("{} is no number of seconds", config.seconds)))?;
    let arena = ArenaConfig { frame_size: dpdk::FRAME_SIZE, ..ArenaConfig::default() };
    let mut arena = Arena::new(arena).map_err(LabError::io_other("no memory"))?;
    let mut port = dpdk::open(&config.device, &mut arena).map_err(super::refused)?;
    opened();
    let failed = |error| LabError::io(format!("the device {} failed", config.device))(error);
    let mut burst = Burst::new();
    burst.extend((0..config.frames).map_while(|_| arena.alloc_from(&FRAME)));
    let mut began = Instant::now();
    let mut before = port.counters().transmitted;
    let mut is_warm = false;
    loop {
        for _ in 0..LOOK_EVERY {
            port.transmit(&mut arena, &mut burst).map_err(failed)?;
            port.receive(&mut arena, &mut burst, BURST).map_err(failed)?;
        }
        let elapsed = began.elapsed();
        if !is_warm && elapsed > whole / 10 {
            is_warm = true;
            (began, before) = (Instant::now(), port.counters().transmitted);
        } else if is_warm && elapsed > whole.mul_f64(0.9) {
            break;
        }
    }
    let sent = port.counters().transmitted - before;
    burst.drain(..).for_each(|frame| arena.free(frame));
    Ok(sent as f64 / began.elapsed().as_secs_f64())
}
