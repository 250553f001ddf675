//! The device's part of preferred busy polling: how long it waits for a poll
//! before it falls back to interrupts.

use std::fs;
use std::io;
use std::path::PathBuf;

use super::BusyPoll;

/// Settings of the interface that were changed; put back when dropped.
pub(super) struct DeviceSettings {
    before: Vec<(PathBuf, String)>,
}

impl DeviceSettings {
    /// Changes the settings of an interface.
    ///
    /// # Errors
    /// `/sys` does not show this interface or cannot be written. Nothing is
    /// changed then.
    pub(super) fn set(interface: &str, settings: &BusyPoll) -> io::Result<Self> {
        let mut changed = Self { before: Vec::new() };
        changed.write(interface, "napi_defer_hard_irqs", u64::from(settings.defer_irqs))?;
        changed.write(interface, "gro_flush_timeout", settings.flush_timeout_ns)?;
        Ok(changed)
    }

    fn write(&mut self, interface: &str, name: &str, value: u64) -> io::Result<()> {
        let path = PathBuf::from("/sys/class/net").join(interface).join(name);
        let before = fs::read_to_string(&path)?;
        fs::write(&path, value.to_string())?;
        self.before.push((path, before));
        Ok(())
    }
}

impl Drop for DeviceSettings {
    fn drop(&mut self) {
        for (path, value) in self.before.drain(..).rev() {
            // The interface may be gone, and its settings with it.
            let _ = fs::write(path, value.trim());
        }
    }
}
