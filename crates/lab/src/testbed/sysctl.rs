//! Settings of the whole machine for the time of a measurement.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use crate::error::LabError;

/// Settings in force: path and the value before.
static IN_FORCE: Mutex<Vec<(PathBuf, String)>> = Mutex::new(Vec::new());

/// Setting below `/proc/sys` that has another value until it is dropped, or until a signal ends the
/// process.
pub(crate) struct SysctlOverride {
    path: PathBuf,
}

impl SysctlOverride {
    /// Sets `name`, as in `net/core/busy_poll`.
    ///
    /// # Errors
    /// If there is no such setting, or the process may not write it.
    pub(crate) fn set(name: &str, value: &str) -> Result<Self, LabError> {
        let path = Path::new("/proc/sys").join(name);
        let before = fs::read_to_string(&path).map_err(LabError::file(&path))?;
        in_force().push((path.clone(), before));
        let setting = Self { path };
        fs::write(&setting.path, value).map_err(LabError::file(&setting.path))?;
        Ok(setting)
    }
}

impl Drop for SysctlOverride {
    fn drop(&mut self) {
        let mut in_force = in_force();
        if let Some(at) = in_force.iter().rposition(|(path, _)| *path == self.path) {
            let (path, before) = in_force.remove(at);
            // A failure cannot be reported here.
            let _ = fs::write(path, before);
        }
    }
}

/// Restores all settings of this process.
pub(super) fn restore() {
    while let Some((path, before)) = in_force().pop() {
        // The process ends and cannot report a failure.
        let _ = fs::write(path, before);
    }
}

fn in_force() -> std::sync::MutexGuard<'static, Vec<(PathBuf, String)>> {
    IN_FORCE.lock().unwrap_or_else(PoisonError::into_inner)
}
