//! Changes of a configuration file, for the log of a reload.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use toml::Value;

use crate::Failure;

/// Maximum number of changes that a line of the log names.
const MAX_NAMED: usize = 20;

/// Names the keys of a configuration file that have changed.
pub(crate) struct ConfigChanges {
    path: PathBuf,
    /// Values that were applied last.
    in_force: Arc<Mutex<Keys>>,
}

impl ConfigChanges {
    /// The values of the file now are those in force.
    ///
    /// # Errors
    /// The file cannot be read.
    pub(crate) fn since_now(path: &Path) -> Result<Self, Failure> {
        let in_force = Arc::new(Mutex::new(keys_of(&super::read_table(path)?)));
        Ok(Self { path: path.to_owned(), in_force })
    }

    /// Reads the file. The returned function takes its values as those in force, and names the
    /// changes.
    ///
    /// # Errors
    /// The file cannot be read.
    pub(crate) fn read(&self) -> Result<impl FnOnce() -> String + use<>, Failure> {
        let now = keys_of(&super::read_table(&self.path)?);
        let in_force = Arc::clone(&self.in_force);
        Ok(move || {
            let mut in_force = in_force.lock().unwrap_or_else(PoisonError::into_inner);
            let named = describe(&in_force, &now);
            *in_force = now;
            named
        })
    }
}

/// Values by their keys, such as `admission.class[0].rank`.
type Keys = BTreeMap<String, String>;

fn keys_of(table: &toml::Table) -> Keys {
    let mut keys = Keys::new();
    for (key, value) in table {
        add(&mut keys, key.clone(), value);
    }
    keys
}

fn add(keys: &mut Keys, name: String, value: &Value) {
    match value {
        Value::Table(table) => {
            table.iter().for_each(|(key, value)| add(keys, format!("{name}.{key}"), value));
        }
        Value::Array(values) if values.iter().all(Value::is_table) => {
            let numbered = values.iter().enumerate();
            numbered.for_each(|(at, value)| add(keys, format!("{name}[{at}]"), value));
        }
        value => {
            keys.insert(name, value.to_string());
        }
    }
}

fn describe(old: &Keys, new: &Keys) -> String {
    let mut changes: Vec<String> = Vec::new();
    for (key, value) in new {
        match old.get(key) {
            None => changes.push(format!("added {key} = {value}")),
            Some(was) if was != value => changes.push(format!("{key} = {value}, was {was}")),
            Some(_) => {}
        }
    }
    let removed = old.iter().filter(|(key, _)| !new.contains_key(*key));
    changes.extend(removed.map(|(key, was)| format!("removed {key}, was {was}")));
    let more = changes.len().saturating_sub(MAX_NAMED);
    changes.truncate(MAX_NAMED);
    if more > 0 {
        changes.push(format!("and {more} more"));
    }
    changes.join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(text: &str) -> Keys {
        keys_of(&text.parse().unwrap())
    }

    #[test]
    fn changes_are_named_by_key() {
        let old = keys("[gate]\nreceive-quota = 64\nfeedback = true\n[dns]\nzone = ['a', 'b']\n");
        let new = keys(
            "[gate]\nreceive-quota = 32\n[dns]\nzone = ['a', 'b']\n\
             [[admission.class]]\nname = 'x'\n",
        );
        let said = describe(&old, &new);
        assert_eq!(
            said,
            "added admission.class[0].name = \"x\"; gate.receive-quota = 32, was 64; \
             removed gate.feedback, was true"
        );
        assert_eq!(describe(&new, &new), "");
    }

    #[test]
    fn long_lists_of_changes_are_cut() {
        let many: String = (0..50).map(|at| format!("key{at} = {at}\n")).collect();
        let said = describe(&Keys::new(), &keys(&many));
        assert!(said.ends_with("; and 30 more"), "{said}");
    }
}
