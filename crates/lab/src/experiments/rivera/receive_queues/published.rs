//! Published times, from `data/papers/rivera_receive_queues.csv`.

use super::Scheme;
use crate::LabError;

const TABLES: &str = include_str!("../../../../data/papers/rivera_receive_queues.csv");

/// Tables 4.1 to 4.9 of Rivera's thesis.
pub(super) struct PublishedTimes(Vec<PublishedCase>);

/// Published time of one queue in one case.
pub(super) struct PublishedCase {
    /// Numbers of the tables with this case, including the summaries 4.10 to 4.13, which repeat
    /// the times of the spinlocks.
    pub(super) tables: Vec<String>,
    structure: String,
    lock: String,
    producers: usize,
    readers: usize,
    packets_per_reader: f64,
    /// Time in the first of the tables.
    pub(super) elapsed_us: f64,
}

impl PublishedCase {
    /// Packets read per microsecond.
    pub(super) fn mpps(&self) -> f64 {
        self.readers as f64 * self.packets_per_reader / self.elapsed_us
    }
}

impl PublishedTimes {
    /// Reads the tables.
    ///
    /// # Errors
    /// When the file was changed so that a number is missing.
    pub(super) fn read() -> Result<Self, LabError> {
        let changed_table = || {
            let table = "crates/lab/data/papers/rivera_receive_queues.csv";
            LabError::Config(format!("{table} was changed: restore the published table"))
        };
        let mut cases: Vec<PublishedCase> = Vec::new();
        for line in TABLES.lines().skip(1) {
            let case = parse(line).ok_or_else(changed_table)?;
            let is_same_case = |known: &&mut PublishedCase| {
                (&known.structure, &known.lock, known.producers, known.readers)
                    == (&case.structure, &case.lock, case.producers, case.readers)
            };
            match cases.iter_mut().find(is_same_case) {
                Some(known) => known.tables.extend(case.tables),
                None => cases.push(case),
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
        self.0.iter().filter(|_| is_published).find(|case| {
            (case.structure.as_str(), case.lock.as_str()) == (scheme.structure, scheme.lock)
                && (case.producers, case.readers) == (producers, readers)
        })
    }
}

fn parse(line: &str) -> Option<PublishedCase> {
    let cells: Vec<&str> = line.split(',').collect();
    let [table, structure, lock, producers, readers, _queues, packets, elapsed] = cells[..] else {
        return None;
    };
    let mut tables = vec![table.to_owned()];
    let producers = producers.parse().ok()?;
    if lock == "spinlock" && table != "4.9" {
        tables.push(format!("4.{}", producers + 9));
    }
    Some(PublishedCase {
        tables,
        structure: structure.to_owned(),
        lock: lock.to_owned(),
        producers,
        readers: readers.parse().ok()?,
        packets_per_reader: packets.parse().ok()?,
        elapsed_us: elapsed.parse().ok()?,
    })
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
