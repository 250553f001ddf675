//! Counters of frames lost because the RX ring was full.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::interface_settings::{InterfaceId, is_sysfs_of};

/// Counters of frames missed by the RX ring, by the names in
/// `/sys/class/net/DEVICE/statistics`.
///
/// Frames dropped by the program on the interface are not included.
pub(crate) struct RxMissedCounters(Vec<File>);

impl RxMissedCounters {
    /// Opens the counters. The set is empty if `/sys` shows another network namespace.
    pub(crate) fn open(name: &str, interface: InterfaceId, is_veth: bool) -> Self {
        let directory = Path::new("/sys/class/net").join(name);
        if !is_sysfs_of(&directory, &interface) {
            return Self(Vec::new());
        }
        // `rx_dropped` counts other causes as well. On veth these are frames of VLANs that the
        // kernel has no interface for.
        let names: &[&str] = match is_veth {
            true => &["rx_dropped"],
            false => &["rx_missed_errors", "rx_fifo_errors", "rx_over_errors"],
        };
        let open = |name| File::open(directory.join("statistics").join(name)).ok();
        Self(names.iter().filter_map(open).collect())
    }

    /// True if the device has such counters.
    #[cfg(feature = "xdp")]
    pub(crate) fn is_available(&self) -> bool {
        !self.0.is_empty()
    }

    /// Frames missed so far.
    pub(crate) fn read(&self) -> io::Result<u64> {
        let number = |file: &File| -> io::Result<u64> {
            let mut text = [0; 24];
            let len = file.read_at(&mut text, 0)?;
            let text = std::str::from_utf8(&text[..len]).unwrap_or_default();
            Ok(text.trim().parse().unwrap_or(0))
        };
        self.0.iter().map(number).sum()
    }
}
