//! Programs that an experiment starts: the `tidegate` under test, and the laboratory itself.

use std::path::PathBuf;
use std::sync::OnceLock;

use tidegate_program::same_build_beside;

use crate::error::LabError;

/// Returns the path of the program under test: `tidegate` in the folder of this program, of the
/// same build. The build is checked once in a process.
///
/// # Errors
/// [`LabError::Program`] if the program is missing or of another build.
pub(crate) fn tidegate() -> Result<PathBuf, LabError> {
    static CHECKED: OnceLock<PathBuf> = OnceLock::new();
    if let Some(path) = CHECKED.get() {
        return Ok(path.clone());
    }
    let path = same_build_beside("tidegate")?;
    Ok(CHECKED.get_or_init(|| path).clone())
}

/// Returns the path of this program, for processes of an experiment that are no part of the
/// product.
///
/// # Errors
/// When the system does not tell it.
pub(crate) fn laboratory() -> Result<PathBuf, LabError> {
    std::env::current_exe().map_err(LabError::io("cannot find this executable"))
}
