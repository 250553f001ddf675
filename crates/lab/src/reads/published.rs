//! Rivera's published times, from the table in `data/papers`.

use super::Source;
use crate::LabError;

const TABLE: &str = include_str!("../../data/papers/rivera_concurrent_reads.csv");

/// A published time.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Published {
    pub(super) source: Source,
    /// The kernel's version.
    pub(super) linux: String,
    pub(super) threads: usize,
    pub(super) units: u64,
    pub(super) seconds: f64,
}

/// Reads the table.
pub(super) fn published() -> Result<Vec<Published>, LabError> {
    let lines = TABLE.lines().filter(|line| !line.starts_with('#')).skip(1);
    let wrong = || {
        let file = "crates/lab/data/papers/rivera_concurrent_reads.csv";
        LabError::Config(format!("{file} is not the table that it was"))
    };
    lines.map(|line| parse(line).ok_or_else(wrong)).collect()
}

fn parse(line: &str) -> Option<Published> {
    let mut cells = line.split(',').skip(1);
    let name = cells.next()?;
    Some(Published {
        source: Source::ALL.into_iter().find(|source| source.name() == name)?,
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
    fn the_table_is_whole() {
        let table = published().unwrap();
        let count = |source| table.iter().filter(|row| row.source == source).count();
        assert_eq!(Source::ALL.map(count), [4, 20, 20, 4]);
        assert!(table.iter().all(|row| row.seconds > 0.0 && row.units >= 500_000));
    }
}
