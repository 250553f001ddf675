//! Published lock statistics.

use serde::Deserialize;

use crate::LabError;
use crate::published;

/// Tables 3.1 to 3.10.
pub(super) struct LockTables(Vec<PublishedRow>);

/// A row of a table.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub(super) struct PublishedRow {
    pub(super) table: String,
    /// `socket` or `queue`.
    pub(super) lock: String,
    pub(super) ip: String,
    /// 1 with memory accounting, 0 without.
    memory_accounting: u8,
    /// 1 with paced reads, 0 without.
    paced_reads: u8,
    threads: usize,
    run: usize,
    pub(super) acquisitions: f64,
    pub(super) held_mean_us: f64,
    pub(super) contentions: f64,
    pub(super) waited_mean_us: f64,
}

impl LockTables {
    /// Reads the tables.
    ///
    /// # Errors
    /// If a change of the file made a number unreadable.
    pub(super) fn read() -> Result<Self, LabError> {
        published::rows("rivera_lock_statistics").map(Self)
    }

    /// Published rows for a lock in one case: one row per IP version, the first run where there
    /// are several.
    pub(super) fn find(
        &self,
        lock: &str,
        accounting: bool,
        paced: bool,
        threads: usize,
    ) -> impl Iterator<Item = &PublishedRow> {
        self.0.iter().filter(move |row| {
            row.lock == lock
                && (row.memory_accounting, row.paced_reads) == (accounting.into(), paced.into())
                && (row.threads, row.run) == (threads, 1)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_all_published_rows() {
        let tables = LockTables::read().unwrap();
        assert_eq!(tables.0.len(), 44);
        let socket: Vec<_> = tables.find("socket", true, false, 8).collect();
        assert_eq!(socket.len(), 2, "IPv4 and IPv6");
        assert_eq!((socket[0].table.as_str(), socket[0].contentions), ("3.1", 4281.0));
        assert_eq!((socket[1].ip.as_str(), socket[1].acquisitions), ("ipv6", 8_000_063.0));
        let paced: Vec<_> = tables.find("queue", true, true, 1).collect();
        assert_eq!((paced[0].table.as_str(), paced[1].table.as_str()), ("3.8", "3.10"));
        assert!(tables.find("socket", false, false, 1).next().is_none());
    }
}
