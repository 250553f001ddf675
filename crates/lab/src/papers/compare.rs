//! Comparison with a former report: what became slower.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde_json::Value;

use super::entry::{Entry, MACHINE_CHANGE};
use crate::LabError;
use crate::report::Experiment;
use crate::stats::round_to_thousandths;

/// A `report.json` of another commit.
#[derive(Debug)]
pub(super) struct FormerReport {
    /// Ratio of an entry with its lowest and highest, by id.
    ratios: BTreeMap<String, [f64; 3]>,
    pub(super) commit: String,
}

impl FormerReport {
    pub(super) fn read(path: &Path) -> Result<Self, LabError> {
        let text = fs::read_to_string(path).map_err(LabError::file(path))?;
        let failed = LabError::io_other(format!("{} is no report.json", path.display()));
        let report: Value = serde_json::from_str(&text).map_err(failed)?;
        if report["experiment"] != "report" {
            return Err(LabError::Config(format!("{} is no report.json", path.display())));
        }
        let rows = report["rows"].as_array().into_iter().flatten();
        let ratio = |row: &Value| {
            let number = |key: &str| row[key].as_f64();
            let id = row["id"].as_str()?.to_owned();
            Some((id, [number("ratio")?, number("ratio_lowest")?, number("ratio_highest")?]))
        };
        Ok(Self {
            ratios: rows.filter_map(ratio).collect(),
            commit: report["commit"].as_str().unwrap_or("unknown").to_owned(),
        })
    }

    /// Ratio of an entry over that of this report.
    pub(super) fn change(&self, entry: &Entry<'_>) -> Option<f64> {
        let [former, ..] = self.ratios.get(&entry.plan.id)?;
        Some(entry.ratio?.median / former)
    }

    /// True if the entry became slower: its ratio lies below the range that the former report has
    /// expected, and has changed by more than the machine itself does.
    pub(super) fn is_slower(&self, entry: &Entry<'_>) -> bool {
        let lowest = self.ratios.get(&entry.plan.id).map(|ratios| ratios[1]);
        let is_outside = entry.ratio.zip(lowest).is_some_and(|(now, low)| now.median < low);
        is_outside && self.change(entry).is_some_and(|change| change < 1.0 / MACHINE_CHANGE)
    }

    /// True if the ratio of an entry lies within the range that the former report has expected. `None`
    /// without both ratios.
    fn is_within_spread(&self, entry: &Entry<'_>) -> Option<bool> {
        let [_, lowest, highest] = self.ratios.get(&entry.plan.id)?;
        let now = entry.ratio?.median;
        Some((*lowest..=*highest).contains(&now))
    }

    /// Adds figures and notes on what became slower, and on what changed beyond the spread.
    pub(super) fn compare(&self, entries: &[Entry<'_>], result: &mut Experiment) {
        let changes: Vec<f64> = entries.iter().filter_map(|entry| self.change(entry)).collect();
        let ids = |is_chosen: &dyn Fn(&Entry<'_>) -> bool| -> Vec<&str> {
            let chosen = entries.iter().filter(|entry| is_chosen(entry));
            chosen.map(|entry| entry.plan.id.as_str()).collect()
        };
        let slower = ids(&|entry| self.is_slower(entry));
        let outside = ids(&|entry| self.is_within_spread(entry) == Some(false));
        result.figure("compared_entries", changes.len() as f64);
        result.figure("slower_entries", slower.len() as f64);
        let within = changes.len().saturating_sub(outside.len()) as f64;
        let fraction = within / changes.len().max(1) as f64;
        result.figure("entries_within_spread", round_to_thousandths(fraction));
        if let Some(worst) = changes.into_iter().reduce(f64::min) {
            result.figure("worst_change", round_to_thousandths(worst));
        }
        let names = |ids: Vec<&str>| match ids.is_empty() {
            true => "none".to_owned(),
            false => ids.join(", "),
        };
        result.note(format!(
            "outside of the former spread: {}; entries_within_spread is the fraction of all others",
            names(outside)
        ));
        result.note(format!(
            "slower than the report of commit {}, and below its spread: {}",
            self.commit,
            names(slower)
        ));
    }
}
