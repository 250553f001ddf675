//! Temporary folders of experiments. Their names have the id of this process.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;

use tempfile::{Builder, TempDir};

use crate::error::LabError;
use crate::testbed::ending;

/// Creates a folder that only the user of this process may read; removed on drop.
///
/// # Errors
/// When the system has no space for it.
pub(crate) fn private() -> Result<TempDir, LabError> {
    with_mode(0o700)
}

/// As [`private`], for servers and programs of other users, too.
///
/// # Errors
/// As [`private`].
pub(crate) fn readable() -> Result<TempDir, LabError> {
    with_mode(0o755)
}

fn with_mode(mode: u32) -> Result<TempDir, LabError> {
    let _creating = ending::creating();
    let permissions = Permissions::from_mode(mode);
    let folder = Builder::new().prefix(&prefix()).permissions(permissions).tempdir();
    folder.map_err(LabError::io("cannot create a temporary folder"))
}

fn prefix() -> String {
    format!("tidegate-lab-{}-", std::process::id())
}

/// Removes all folders of this process.
pub(super) fn remove_own() {
    let prefix = prefix();
    for entry in fs::read_dir(std::env::temp_dir()).into_iter().flatten().flatten() {
        if entry.file_name().to_str().is_some_and(|name| name.starts_with(&prefix)) {
            // The process ends and cannot report a failure.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}
