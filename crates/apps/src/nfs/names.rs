//! Names of files by their numbers: where files were seen last.

use std::collections::HashMap;

/// Names in one of the two halves: at most some 20 MiB in all.
const HALF_CAPACITY: usize = 32_768;

/// Directory and name of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Location {
    pub(super) directory_id: u64,
    pub(super) name: Box<[u8]>,
}

/// Bounded table of the places of files. What is forgotten can be searched for again.
#[derive(Debug, Default)]
pub(super) struct Names {
    /// Entries that were used since the halves changed last.
    recent: HashMap<u64, Location>,
    /// Entries that are forgotten at the next change if they are not used before.
    older: HashMap<u64, Location>,
}

impl Names {
    pub(super) fn insert(&mut self, file_id: u64, location: Location) {
        if self.recent.len() >= HALF_CAPACITY {
            self.older = std::mem::take(&mut self.recent);
        }
        self.recent.insert(file_id, location);
    }

    pub(super) fn get(&mut self, file_id: u64) -> Option<&Location> {
        if !self.recent.contains_key(&file_id) {
            let location = self.older.remove(&file_id)?;
            self.insert(file_id, location);
        }
        self.recent.get(&file_id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn used_names_are_kept_and_the_table_is_bounded() {
        let location = |name: u64| Location { directory_id: 1, name: name.to_be_bytes().into() };
        let mut names = Names::default();
        for file_id in 0..10 * HALF_CAPACITY as u64 {
            names.insert(file_id, location(file_id));
            assert_eq!(names.get(0), Some(&location(0)), "after {file_id}");
        }
        assert!(names.recent.len() + names.older.len() <= 2 * HALF_CAPACITY);
        assert_eq!(names.get(1), None);
    }
}
