//! Restoration of settings that killed processes left changed.

use std::fs;

use super::access::SettingsAccess;
use super::change::SettingsChange;
use super::record::{self, RecordFolder};
use super::sys;
use crate::netlink::Interface;

/// Settings of an interface that a killed process had left changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeftBehind {
    /// Interface name.
    pub interface: String,
    /// True if the settings are as before the change again.
    pub is_restored: bool,
}

/// Restores the settings of this network namespace's interfaces that killed processes left
/// changed, from their records. Returns the interfaces whose settings had been left changed.
pub fn restore_left_behind() -> Vec<LeftBehind> {
    let (Some(folder), Ok(namespace)) = (RecordFolder::open(), sys::namespace_cookie()) else {
        return Vec::new();
    };
    let Ok(_lock) = folder.lock() else { return Vec::new() };
    let records = folder.records_in(namespace);
    records
        .into_iter()
        .filter_map(|path| {
            let text = record::left_behind(&path).ok().flatten()?;
            let found = restore(&text);
            if found.as_ref().is_none_or(|found| found.is_restored) {
                // Fails if another process has removed the record.
                let _ = fs::remove_file(&path);
            }
            found
        })
        .collect()
}

/// Restores from the text of a record; `None` if nothing was left changed.
pub(super) fn restore(text: &str) -> Option<LeftBehind> {
    let change: SettingsChange = text.parse().ok()?;
    let interface = Interface::by_index(change.interface.index).ok()?;
    if interface.mac.0 != change.interface.mac {
        return None;
    }
    let restored = SettingsAccess::to(&change.original, &change.interface)
        .and_then(|mut access| change.restore_if_in_force(&mut access));
    match restored {
        Ok(false) => None,
        restored => Some(LeftBehind { interface: interface.name, is_restored: restored.is_ok() }),
    }
}
