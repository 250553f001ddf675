//! Rivera's published times, from the table in `data/papers`.

use super::ReadSource;
use crate::LabError;

const TABLE: &str = include_str!("../../../../data/papers/rivera_concurrent_reads.csv");

/// One published time.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct PublishedTime {
    pub(super) source: ReadSource,
    /// Kernel version.
    pub(super) linux: String,
    pub(super) threads: usize,
    pub(super) units: u64,
    pub(super) seconds: f64,
}

/// Reads the table.
pub(super) fn read_published() -> Result<Vec<PublishedTime>, LabError> {
    let lines = TABLE.lines().filter(|line| !line.starts_with('#')).skip(1);
    let changed_table = || {
        let file = "crates/lab/data/papers/rivera_concurrent_reads.csv";
        LabError::Config(format!("{file} was changed: restore the published table"))
    };
    lines.map(|line| parse(line).ok_or_else(changed_table)).collect()
}

fn parse(line: &str) -> Option<PublishedTime> {
    let mut cells = line.split(',').skip(1);
    let name = cells.next()?;
    Some(PublishedTime {
        source: ReadSource::ALL.into_iter().find(|source| source.name() == name)?,
        linux: cells.next()?.to_owned(),
        threads: cells.next()?.parse().ok()?,
        units: cells.next()?.parse().ok()?,
        seconds: cells.next()?.parse().ok()?,
    })
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
