//! Results of runs, as they are checked in.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use minijinja::value::{Serde, Value};
use serde::{Deserialize, Serialize};

use crate::LabError;
use crate::report::provenance::MachineDescription;

/// Result of one run with its provenance.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct StoredResult {
    experiment: String,
    command: String,
    commit: String,
    date: String,
    machine: MachineDescription,
    wall_seconds: f64,
    figures: BTreeMap<String, f64>,
    rows: Vec<serde_json::Value>,
    notes: Vec<String>,
    #[serde(default)]
    comparisons: Vec<serde_json::Value>,
}

impl StoredResult {
    fn is_quick(&self) -> bool {
        self.command.split(' ').any(|word| word == "--quick")
    }
}

/// All results, by the name of their file without its ending.
pub(super) struct Results(BTreeMap<String, StoredResult>);

/// Provenance that the results share, and those that differ.
#[derive(Serialize)]
struct Run {
    /// Commit of most results.
    commit: String,
    /// Day of the run, or first and last day.
    date: String,
    machine: String,
    /// Names of results of other commits, of other machines, and of short runs, with the
    /// difference.
    exceptions: Vec<String>,
}

impl Results {
    /// Reads all JSON files of a folder. A folder that does not exist has none.
    pub(super) fn read(folder: &Path) -> Result<Self, LabError> {
        let mut results = BTreeMap::new();
        if !folder.exists() {
            return Ok(Self(results));
        }
        for entry in fs::read_dir(folder).map_err(LabError::file(folder))? {
            let path = entry.map_err(LabError::file(folder))?.path();
            let Some(name) = path.file_stem().and_then(|name| name.to_str()) else { continue };
            if path.extension().is_none_or(|extension| extension != "json") {
                continue;
            }
            let text = fs::read_to_string(&path).map_err(LabError::file(&path))?;
            let result: StoredResult = serde_json::from_str(&text).map_err(|error| {
                let path = path.display();
                LabError::Config(format!(
                    "{path} is no result of `tidegate lab`: {error}; write it by --json"
                ))
            })?;
            let suffix = name.strip_prefix(&result.experiment);
            if !suffix.is_some_and(|suffix| suffix.is_empty() || suffix.starts_with('-')) {
                return Err(LabError::Config(format!(
                    "{} has a result of experiment {}: name it {1}.json or {1}-SUFFIX.json",
                    path.display(),
                    result.experiment
                )));
            }
            results.insert(name.to_owned(), result);
        }
        Ok(Self(results))
    }

    /// Variables of the template: each result by its name with `_` for `-`, and `run`, which is
    /// none without results.
    pub(super) fn context(&self) -> Value {
        let results = self
            .0
            .iter()
            .map(|(name, result)| (name.replace('-', "_"), Value::from(Serde(result))));
        Value::from_pairs(results.chain([("run".to_owned(), Value::from(Serde(self.run())))]))
    }

    fn run(&self) -> Option<Run> {
        let commit = majority(self.0.values().map(|result| result.commit.clone()))?;
        let machine = majority(self.0.values().map(|result| result.machine.to_string()))?;
        let days = || self.0.values().map(|result| result.date.split('T').next().unwrap_or(""));
        let (first, last) = (days().min()?, days().max()?);
        let date = if first == last { first.to_owned() } else { format!("{first} to {last}") };
        let mut exceptions = Vec::new();
        for (name, result) in &self.0 {
            let mut differences = Vec::new();
            if result.commit != commit {
                differences.push(format!("commit {}", result.commit));
            }
            if result.machine.to_string() != machine {
                differences.push(result.machine.to_string());
            }
            if result.is_quick() {
                differences.push("a short run, `--quick`".to_owned());
            }
            if !differences.is_empty() {
                exceptions.push(format!("`{name}`: {}", differences.join(", ")));
            }
        }
        Some(Run { commit, date, machine, exceptions })
    }

    /// Differences in provenance.
    pub(super) fn warnings(&self) -> Vec<String> {
        self.run().map_or_else(Vec::new, |run| run.exceptions)
    }
}

/// The most frequent value; of equally frequent ones the last in order.
fn majority(values: impl Iterator<Item = String>) -> Option<String> {
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    values.for_each(|value| *counts.entry(value).or_default() += 1);
    counts.into_iter().max_by_key(|(_, count)| *count).map(|(value, _)| value)
}
