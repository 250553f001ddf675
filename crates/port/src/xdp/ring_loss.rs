//! What the device lost because its ring was full.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::busy_poll::shows;
use super::config::Target;

/// The device's counters of frames for which it had no room, by the names of
/// `/sys/class/net/DEVICE/statistics`.
///
/// What is dropped by the program on the interface is not among them.
pub(super) struct RingLoss(Vec<File>);

impl RingLoss {
    /// Opens the counters. There are none where `/sys` shows another network
    /// namespace.
    pub(super) fn of(target: &Target) -> Self {
        let folder = Path::new("/sys/class/net").join(&target.name);
        if !shows(&folder, target) {
            return Self(Vec::new());
        }
        // The kernel counts more under `rx_dropped`, but on veth it is the ring.
        let names: &[&str] = match target.is_veth {
            true => &["rx_dropped"],
            false => &["rx_missed_errors", "rx_fifo_errors", "rx_over_errors"],
        };
        let open = |name| File::open(folder.join("statistics").join(name)).ok();
        Self(names.iter().filter_map(open).collect())
    }

    /// Frames lost so far.
    pub(super) fn read(&self) -> io::Result<u64> {
        let number = |file: &File| -> io::Result<u64> {
            let mut text = [0; 24];
            let len = file.read_at(&mut text, 0)?;
            let text = std::str::from_utf8(&text[..len]).unwrap_or_default();
            Ok(text.trim().parse().unwrap_or(0))
        };
        self.0.iter().map(number).sum()
    }
}
