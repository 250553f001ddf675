//! Loop that only receives: takes frames from AF_XDP and frees them. What it keeps under a flood is
//! the most that any receiver on the same device can keep.

use std::io::Write;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tidegate_apps::ServeCounters;
use tidegate_device::xdp::{BusyPoll, Steering, SteeringRule, XdpConfig, XdpDevice};
use tidegate_device::{Burst, Device};
use tidegate_memory::{Arena, ArenaConfig};

use crate::error::LabError;

/// Frames per call, as in Tidegate's rounds.
const QUOTA_FRAMES: usize = 64;
/// Calls between two looks at the clock.
const CALLS_PER_LOOK: usize = 64;

/// Configuration of the loop.
#[derive(Clone, Debug)]
pub struct RawReceiverConfig {
    /// Network interface.
    pub interface: String,
    /// Address whose frames are received.
    pub address: IpAddr,
    /// File for the counters of a service.
    pub counters: PathBuf,
    /// Time after which the loop ends.
    pub duration: Duration,
}

/// Receives until the time is over. Prints a line when the device is open.
///
/// # Errors
/// If the device cannot be opened, or fails.
pub fn run_raw_receiver(config: &RawReceiverConfig) -> Result<(), LabError> {
    let counters =
        ServeCounters::create_mapped(&config.counters).map_err(LabError::file(&config.counters))?;
    let mut arena = Arena::new(ArenaConfig::default())
        .map_err(LabError::io_other("cannot allocate packet buffers"))?;
    let xdp = XdpConfig::new(&config.interface)
        .busy_poll(BusyPoll::default())
        .steering(Steering::new([SteeringRule::Address(config.address)]));
    let mut device =
        XdpDevice::open(xdp, &mut arena).map_err(|error| LabError::Config(error.to_string()))?;
    println!("ready");
    std::io::stdout().flush().map_err(LabError::io("cannot write the ready line"))?;
    let (began, mut burst) = (Instant::now(), Burst::with_capacity(QUOTA_FRAMES));
    while began.elapsed() < config.duration {
        for _ in 0..CALLS_PER_LOOK {
            device
                .receive(&mut arena, &mut burst, QUOTA_FRAMES)
                .map_err(LabError::io("the device failed"))?;
            counters.requests.fetch_add(burst.len() as u64, Ordering::Relaxed);
            burst.drain(..).for_each(|frame| arena.free(frame));
        }
    }
    Ok(())
}
