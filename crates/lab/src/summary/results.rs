//! Results of runs, as they are checked in.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use minijinja::value::{Serde, Value};
use serde::de::DeserializeOwned;
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

/// The report, of which only the results count here.
#[derive(Deserialize)]
struct StoredReport {
    results: BTreeMap<String, StoredResult>,
}

/// All results by their names.
pub(super) struct Results {
    all: BTreeMap<String, StoredResult>,
    /// Names of those that the report has.
    of_report: BTreeSet<String>,
}

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
    /// Reads the JSON files under `docs/benchmarks` and
    /// `docs/report/report.json`. What does not exist has no results.
    pub(super) fn read(docs: &Path) -> Result<Self, LabError> {
        let mut all = read_folder(&docs.join("benchmarks"))?;
        let path = docs.join("report/report.json");
        let reported =
            if path.exists() { read_json::<StoredReport>(&path)?.results } else { BTreeMap::new() };
        let of_report = reported.keys().cloned().collect();
        for (name, result) in reported {
            if all.insert(name.clone(), result).is_some() {
                return Err(LabError::Config(format!(
                    "docs/benchmarks/{name}.json: docs/report/report.json has this result; remove one"
                )));
            }
        }
        Ok(Self { all, of_report })
    }

    /// Variables of the template: each result by its name with `_` for `-`, and `run`, which is
    /// none without results.
    pub(super) fn context(&self) -> Value {
        let run = ("run".to_owned(), Value::from(Serde(self.run())));
        Value::from_pairs(self.all.iter().map(variable).chain([run]))
    }

    /// Variables for pages that show results of the report only.
    pub(super) fn context_of_report(&self) -> Value {
        let reported = self.all.iter().filter(|(name, _)| self.of_report.contains(*name));
        Value::from_pairs(reported.map(variable))
    }

    fn run(&self) -> Option<Run> {
        let commit = majority(self.all.values().map(|result| result.commit.clone()))?;
        let machine = majority(self.all.values().map(|result| result.machine.to_string()))?;
        let days = || self.all.values().map(|result| result.date.split('T').next().unwrap_or(""));
        let (first, last) = (days().min()?, days().max()?);
        let date = if first == last { first.to_owned() } else { format!("{first} to {last}") };
        let mut exceptions = Vec::new();
        for (name, result) in &self.all {
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

/// A result as a variable: its name with `_` for `-`, and its value.
fn variable((name, result): (&String, &StoredResult)) -> (String, Value) {
    (name.replace('-', "_"), Value::from(Serde(result)))
}

/// Results of the JSON files of a folder, by the names of the files without their ending.
fn read_folder(folder: &Path) -> Result<BTreeMap<String, StoredResult>, LabError> {
    let mut results = BTreeMap::new();
    if !folder.exists() {
        return Ok(results);
    }
    for entry in fs::read_dir(folder).map_err(LabError::file(folder))? {
        let path = entry.map_err(LabError::file(folder))?.path();
        let Some(name) = path.file_stem().and_then(|name| name.to_str()) else { continue };
        if path.extension().is_none_or(|extension| extension != "json") {
            continue;
        }
        let result: StoredResult = read_json(&path)?;
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
    Ok(results)
}

fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T, LabError> {
    let text = fs::read_to_string(path).map_err(LabError::file(path))?;
    serde_json::from_str(&text).map_err(|error| {
        let path = path.display();
        LabError::Config(format!(
            "{path} is no result of `tidegate lab`: {error}; write it by --json"
        ))
    })
}

/// The most frequent value; of equally frequent ones the last in order.
fn majority(values: impl Iterator<Item = String>) -> Option<String> {
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    values.for_each(|value| *counts.entry(value).or_default() += 1);
    counts.into_iter().max_by_key(|(_, count)| *count).map(|(value, _)| value)
}
