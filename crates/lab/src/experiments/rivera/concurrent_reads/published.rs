//! Rivera's published times.

use serde::Deserialize;

use super::ReadSource;
use crate::LabError;
use crate::published;

/// One published time.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub(super) struct PublishedTime {
    pub(super) source: ReadSource,
    /// Kernel version.
    pub(super) linux: String,
    pub(super) threads: usize,
    #[serde(rename = "units_per_thread")]
    pub(super) units: u64,
    pub(super) seconds: f64,
}

/// Reads the table.
pub(super) fn read_published() -> Result<Vec<PublishedTime>, LabError> {
    published::rows("rivera_concurrent_reads")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_whole_published_table() {
        let table = read_published().unwrap();
        let count = |source| table.iter().filter(|row| row.source == source).count();
        assert_eq!(ReadSource::ALL.map(count), [4, 20, 20, 4, 0, 0, 0]);
        assert!(table.iter().all(|row| row.seconds > 0.0 && row.units >= 500_000));
    }
}
