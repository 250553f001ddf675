//! Log of the preload library, on standard error or in a file.

use std::collections::HashSet;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::sync::{Mutex, OnceLock, PoisonError};

static FILE: OnceLock<File> = OnceLock::new();
static LOGGED: Mutex<Option<HashSet<String>>> = Mutex::new(None);

/// Writes to this file from now on.
///
/// # Errors
/// The file cannot be opened.
pub(crate) fn use_file(path: &Path) -> std::io::Result<()> {
    let file = OpenOptions::new().create(true).append(true).open(path)?;
    let _ = FILE.set(file);
    Ok(())
}

/// Writes a line. A failed write is ignored: it must not stop the application.
pub(crate) fn write(text: &str) {
    let line = format!("tidegate: {text}\n");
    let _ = match FILE.get() {
        Some(mut file) => file.write_all(line.as_bytes()),
        None => std::io::stderr().write_all(line.as_bytes()),
    };
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
