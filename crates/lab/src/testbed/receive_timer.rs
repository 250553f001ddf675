//! Placement of the timer that polls a device in softirqs, like a NIC with interrupt coalescing.

use std::thread;
use std::time::{Duration, Instant};

use crate::error::LabError;
use crate::testbed::cpu;
use crate::testbed::load::flood::Flood;
use crate::testbed::receive_work::{MAX_IDLE_POLLS, POLL_INTERVAL_NS};

/// Sampling time to find the core on which the timer runs.
const SAMPLE_TIME: Duration = Duration::from_millis(20);
/// Attempts to place the timer.
const MAX_TRIES: usize = 20;

/// Makes a timer on `server_core` poll a device. The timer stays on the core of the first poll,
/// which is the core that sent the first packet: that of the flood that `new_flood` returns, which
/// must be `server_core`, unless another core sent a packet before. `set_deferral` sets the idle
/// polls of the device and the interval of its timer in nanoseconds.
///
/// # Errors
/// If other cores send too.
pub(crate) fn place(
    (server_core, load_core): (usize, usize),
    set_deferral: impl Fn(u32, u64) -> Result<(), LabError>,
    new_flood: impl Fn() -> Result<Flood, LabError>,
) -> Result<(), LabError> {
    for _ in 0..MAX_TRIES {
        set_deferral(MAX_IDLE_POLLS, POLL_INTERVAL_NS)?;
        let mut flood = new_flood()?;
        flood.set_rate(Some(10.0))?;
        let began = Instant::now();
        while flood.offered()? == 0 && began.elapsed() < Duration::from_secs(5) {
            thread::sleep(Duration::from_millis(1));
        }
        drop(flood);
        if server_core_receives(server_core, load_core)? {
            return Ok(());
        }
        // Stops the timer; the next packet starts a new one.
        set_deferral(0, 0)?;
        thread::sleep(SAMPLE_TIME);
    }
    Err(LabError::Config(format!(
        "the receive work cannot be placed on core {server_core}: other cores send too; stop other \
         users of the network namespaces of this experiment"
    )))
}

/// True if the timer runs on the server's core and not on a separate load core.
fn server_core_receives(server_core: usize, load_core: usize) -> Result<bool, LabError> {
    let read = || -> Result<(u64, u64), LabError> {
        Ok((cpu::receive_softirqs(server_core)?, cpu::receive_softirqs(load_core)?))
    };
    let before = read()?;
    thread::sleep(SAMPLE_TIME);
    let after = read()?;
    // The threshold is a tenth of the timer's polls: high enough to exclude other softirqs,
    // low enough for late timers, since an idle core has to wake up for each.
    let min_softirqs = (SAMPLE_TIME.as_nanos() as u64 / POLL_INTERVAL_NS) / 10;
    let elsewhere = load_core != server_core && after.1 - before.1 >= min_softirqs;
    Ok(after.0 - before.0 > min_softirqs && !elsewhere)
}
