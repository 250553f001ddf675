//! Path of a file for a result. An experiment takes minutes, so that the file can be written is
//! checked before it.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use rustix::fs::{Access, access};

/// Path in `text`, if a file can be written there.
pub(super) fn parse(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    if text != "-" {
        check(&path)?;
    }
    Ok(path)
}

/// Checks that `path` can be written, and leaves it as it was.
fn check(path: &Path) -> Result<(), String> {
    if path.is_dir() {
        return Err(format!("{} is a folder: name a file in it", path.display()));
    }
    if path.exists() {
        return access(path, Access::WRITE_OK).map_err(|error| format!("not writable: {error}"));
    }
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let folder = folder.unwrap_or(Path::new("."));
    if !folder.is_dir() {
        return Err(format!("the folder {} does not exist: make it first", folder.display()));
    }
    // Of some file systems only the attempt shows that nobody may write.
    File::create_new(path)
        .and_then(|_| fs::remove_file(path))
        .map_err(|error| format!("{} is not writable: {error}", folder.display()))
}
