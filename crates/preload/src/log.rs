//! Log of the preload library, on standard error or in a file.

use std::collections::HashSet;
use std::fs::OpenOptions;
use std::io::Write;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::{Mutex, OnceLock, PoisonError};

use tidegate_memory::OwnFd;

use crate::real;

static FILE: OnceLock<OwnFd> = OnceLock::new();
static LOGGED: Mutex<Option<HashSet<String>>> = Mutex::new(None);

/// Writes to this file from now on.
///
/// # Errors
/// The file cannot be opened.
pub(crate) fn use_file(path: &Path) -> std::io::Result<()> {
    let file = OpenOptions::new().create(true).append(true).open(path)?;
    let _ = FILE.set(OwnedFd::from(file).into());
    Ok(())
}

/// Writes a line. A failed write is ignored: it must not stop the application.
pub(crate) fn write(text: &str) {
    let line = format!("tidegate: {text}\n");
    let _ = match FILE.get() {
        Some(file) => write_to(file, &line),
        None => std::io::stderr().write_all(line.as_bytes()),
    };
}

fn write_to(file: &OwnFd, line: &str) -> std::io::Result<()> {
    // SAFETY: writes the bytes of the line.
    match unsafe { real::write(file.as_fd().as_raw_fd(), line.as_ptr().cast(), line.len()) } {
        0.. => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

/// Writes a line unless the same text was logged before.
pub(crate) fn write_once(text: &str) {
    let mut logged = LOGGED.lock().unwrap_or_else(PoisonError::into_inner);
    let is_new = logged.get_or_insert_default().insert(text.to_owned());
    drop(logged);
    if is_new {
        write(text);
    }
}
