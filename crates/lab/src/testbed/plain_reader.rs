//! Reader of a passive ring that only counts frames: what any monitor on the same ring can count.

use std::io::Write;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use serde_json::json;
use tidegate_device::packet::{PassiveConfig, PassiveRing};

use crate::error::LabError;

/// Interval at which the reader checks whether to stop.
const STOP_CHECK: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// Counts the frames that pass an interface until `stop` is set. Prints a line when the ring is
/// open, and its counters as JSON at the end.
///
/// # Errors
/// If the ring cannot be opened, or the interface is gone.
pub fn run_plain_reader(
    interface: &str,
    ring_bytes: usize,
    stop: &AtomicBool,
) -> Result<(), LabError> {
    let config = PassiveConfig::new(interface).ring_bytes(ring_bytes);
    let mut ring =
        PassiveRing::open(&config).map_err(|error| LabError::Config(error.to_string()))?;
    println!("ready");
    std::io::stdout().flush().map_err(LabError::io("cannot write the ready line"))?;
    let mut frames = 0_u64;
    while !stop.load(Ordering::Relaxed) {
        let taken = ring.receive(u32::MAX >> 16, |_| frames += 1);
        if taken == 0 && ring.prepare_sleep().map_err(LabError::io("the ring failed"))? {
            match poll(&mut [PollFd::new(&ring.as_fd(), PollFlags::IN)], Some(&STOP_CHECK)) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => {
                    return Err(LabError::io("cannot wait for frames")(std::io::Error::from(
                        error,
                    )));
                }
            }
        }
    }
    ring.stop().map_err(LabError::io("the ring failed"))?;
    while !ring.is_drained() {
        ring.receive(u32::MAX, |_| frames += 1);
    }
    let counters = ring.counters();
    let lost = json!({ "ring_full": counters.ring_full, "rx_missed": counters.rx_missed });
    println!("{}", json!({ "total": { "packets": frames, "malformed": {}, "lost": lost } }));
    Ok(())
}
