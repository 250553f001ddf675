//! What the user of a program should know, on standard error or in a file.

use std::collections::HashSet;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::sync::{Mutex, OnceLock, PoisonError};

static FILE: OnceLock<File> = OnceLock::new();
static SAID: Mutex<Option<HashSet<String>>> = Mutex::new(None);

/// Writes to this file from now on.
///
/// # Errors
/// When it cannot be opened.
pub(crate) fn to(path: &Path) -> std::io::Result<()> {
    let file = OpenOptions::new().create(true).append(true).open(path)?;
    let _ = FILE.set(file);
    Ok(())
}

/// Says this. A log that cannot be written is no reason to stop a program.
pub(crate) fn say(text: &str) {
    let line = format!("tidegate: {text}\n");
    let _ = match FILE.get() {
        Some(mut file) => file.write_all(line.as_bytes()),
        None => std::io::stderr().write_all(line.as_bytes()),
    };
}

/// Says this the first time.
pub(crate) fn say_once(text: &str) {
    let mut said = SAID.lock().unwrap_or_else(PoisonError::into_inner);
    let is_new = said.get_or_insert_default().insert(text.to_owned());
    drop(said);
    if is_new {
        say(text);
    }
}
