//! Published times of Rivera's model.

use serde::Deserialize;

use super::Scheme;
use crate::LabError;
use crate::published;

/// Tables 4.1 to 4.9 of Rivera's thesis.
pub(super) struct PublishedTimes(Vec<PublishedCase>);

/// Published time of one queue in one case.
pub(super) struct PublishedCase {
    /// Numbers of the tables with this case, including the summaries 4.10 to 4.13, which repeat
    /// the times of the spinlocks.
    pub(super) tables: Vec<String>,
    /// Time in the first of the tables.
    pub(super) elapsed_us: f64,
    row: PublishedRow,
}

/// A row of a table.
#[derive(Deserialize)]
struct PublishedRow {
    table: String,
    scheme: String,
    lock: String,
    producers: usize,
    readers: usize,
    packets_per_reader: f64,
    elapsed_us: f64,
}

impl PublishedRow {
    fn case(&self) -> (&str, &str, usize, usize) {
        (&self.scheme, &self.lock, self.producers, self.readers)
    }

    fn tables(&self) -> Vec<String> {
        let mut tables = vec![self.table.clone()];
        if self.lock == "spinlock" && self.table != "4.9" {
            tables.push(format!("4.{}", self.producers + 9));
        }
        tables
    }
}

impl PublishedCase {
    /// Packets read per microsecond.
    pub(super) fn mpps(&self) -> f64 {
        self.row.readers as f64 * self.row.packets_per_reader / self.elapsed_us
    }
}

impl PublishedTimes {
    /// Reads the tables.
    ///
    /// # Errors
    /// When the file was changed so that a number is missing.
    pub(super) fn read() -> Result<Self, LabError> {
        let mut cases: Vec<PublishedCase> = Vec::new();
        for row in published::rows::<PublishedRow>("rivera_receive_queues")? {
            let tables = row.tables();
            match cases.iter_mut().find(|known| known.row.case() == row.case()) {
                Some(known) => known.tables.extend(tables),
                None => cases.push(PublishedCase { tables, elapsed_us: row.elapsed_us, row }),
            }
        }
        Ok(Self(cases))
    }

    /// Published time of this queue in this case; `None` when there is none.
    pub(super) fn find(
        &self,
        scheme: &Scheme,
        producers: usize,
        readers: usize,
    ) -> Option<&PublishedCase> {
        let is_published = super::PAPER.contains(scheme);
        let wanted = (scheme.structure, scheme.lock, producers, readers);
        self.0.iter().filter(|_| is_published).find(|case| case.row.case() == wanted)
    }
}

#[cfg(test)]
mod tests {
    use super::super::{CANDIDATES, PAPER};
    use super::*;

    #[test]
    fn reads_all_published_tables() {
        let published = PublishedTimes::read().unwrap();
        let multi = published.find(&PAPER[2], 4, 4).unwrap();
        assert_eq!(multi.tables, ["4.8", "4.13", "4.9"]);
        assert_eq!(multi.elapsed_us, 1_118_317.80);
        assert!((multi.mpps() - 3.58).abs() < 0.01, "as the summary says");
        let single = published.find(&PAPER[0], 10, 10).unwrap();
        assert_eq!(
            (single.tables.as_slice(), single.elapsed_us),
            (&["4.9".to_owned()][..], 15_331_499.40)
        );
        assert!(published.find(&PAPER[1], 1, 7).is_none(), "cut off in the paper");
        assert!(published.find(&CANDIDATES[0], 1, 1).is_none());
    }
}
