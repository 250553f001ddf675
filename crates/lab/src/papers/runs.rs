//! Experiments of the report: running those that lack a result, and their results.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use minijinja::value::Serde;
use serde_json::Value;
use tidegate_program::output::log;

use super::ReportConfig;
use super::plan::{Plan, PlannedRun};
use crate::LabError;
use crate::report::Provenance;
use crate::testbed::programs;

/// Length of the experiments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Form {
    /// Every measurement, 100 minutes in all.
    #[default]
    Whole,
    /// Short measurements, for a first look.
    Quick,
    /// As long as in the papers, where these say how long.
    Long,
}

impl Form {
    fn flags(self, run: &PlannedRun) -> &str {
        match self {
            Self::Whole => &run.whole,
            Self::Quick => &run.quick,
            Self::Long => run.long.as_deref().unwrap_or(&run.whole),
        }
    }

    fn expected(self, run: &PlannedRun) -> Duration {
        Duration::from_secs(match self {
            Self::Quick => run.quick_seconds.unwrap_or(run.seconds),
            _ => run.seconds,
        })
    }

    fn has(self, run: &PlannedRun) -> bool {
        self != Self::Quick || run.quick_seconds.is_some()
    }
}

impl PlannedRun {
    /// Command line of a user.
    fn command_line(&self, form: Form) -> String {
        format!("tidegate lab {} {}", self.command, form.flags(self)).trim_end().to_owned()
    }

    fn arguments(&self, form: Form) -> Vec<&str> {
        self.command.split_whitespace().chain(form.flags(self).split_whitespace()).collect()
    }
}

fn path_of(folder: &Path, run: &PlannedRun) -> PathBuf {
    folder.join(format!("{}.json", run.name))
}

/// Runs the experiments that lack a result of this commit and form. Returns the failures.
pub(super) fn measure(plan: &Plan, config: &ReportConfig) -> Result<Vec<String>, LabError> {
    let folder = &config.results;
    fs::create_dir_all(folder).map_err(LabError::file(folder))?;
    let commit = Provenance::of_this_run(Duration::ZERO).commit;
    let is_wanted = |run: &&PlannedRun| match config.only.is_empty() {
        true => config.form.has(run),
        false => config.only.contains(&run.name),
    };
    let is_missing = |run: &&PlannedRun| !is_measured(run, config, &commit);
    let missing: Vec<&PlannedRun> = plan.runs.iter().filter(is_wanted).filter(is_missing).collect();
    let expected: Duration = missing.iter().map(|run| config.form.expected(run)).sum();
    log(format_args!("{} experiments, about {}", missing.len(), minutes(expected)));
    let (mut left, mut failures) = (expected, Vec::new());
    let began = Instant::now();
    for (index, run) in missing.iter().enumerate() {
        let line = run.command_line(config.form);
        let (at, count) = (index + 1, missing.len());
        log(format_args!("== {line} ({at} of {count}, about {} left)", minutes(left)));
        if let Err(error) = run_one(run, config) {
            log(format_args!("== {line}: {error}"));
            failures.push(format!("{}: {error}", run.name));
        }
        // The experiments to come take as much longer than expected as those before.
        let remaining: Duration = missing[at..].iter().map(|run| config.form.expected(run)).sum();
        let done = expected.saturating_sub(remaining).as_secs_f64().max(1.0);
        left = remaining.mul_f64(began.elapsed().as_secs_f64() / done);
    }
    Ok(failures)
}

fn minutes(duration: Duration) -> String {
    match duration.as_secs() {
        seconds @ ..90 => format!("{seconds} s"),
        seconds => format!("{} min", seconds.div_ceil(60)),
    }
}

fn run_one(run: &PlannedRun, config: &ReportConfig) -> Result<(), LabError> {
    let path = path_of(&config.results, run);
    // A result that was interrupted is not taken for a whole one.
    let part = path.with_extension("part");
    let mut command = Command::new(programs::laboratory()?);
    command.args(run.arguments(config.form)).arg("--json").arg(&part);
    let output = command.stdout(std::process::Stdio::null());
    let status = output.status().map_err(LabError::io("cannot start this executable"))?;
    if !status.success() {
        return Err(LabError::Config(format!("the experiment failed ({status})")));
    }
    fs::rename(&part, &path).map_err(LabError::file(&path))
}

/// True if there is a result of this commit with the command line of the form.
fn is_measured(run: &PlannedRun, config: &ReportConfig, commit: &str) -> bool {
    let read = fs::read_to_string(path_of(&config.results, run)).ok();
    let result: Option<Value> = read.and_then(|text| serde_json::from_str(&text).ok());
    result.is_some_and(|result| {
        // Changed sources have no name.
        result["commit"] == commit
            && !commit.ends_with("changed")
            && result["command"] == run.command_line(config.form)
    })
}

/// Results by the name of their run.
#[derive(Debug)]
pub(super) struct RunResults(BTreeMap<String, Value>);

impl RunResults {
    /// Reads the results that are there.
    pub(super) fn read(plan: &Plan, folder: &Path) -> Result<Self, LabError> {
        let mut results = BTreeMap::new();
        for run in &plan.runs {
            let path = path_of(folder, run);
            let Ok(text) = fs::read_to_string(&path) else { continue };
            let failed = LabError::io_other(format!("{} is no result", path.display()));
            results.insert(run.name.clone(), serde_json::from_str(&text).map_err(failed)?);
        }
        Ok(Self(results))
    }

    /// Result of a run.
    pub(super) fn get(&self, run: &str) -> Option<&Value> {
        self.0.get(run)
    }

    pub(super) fn rows(&self, run: &str) -> Option<Vec<Value>> {
        self.get(run)?["rows"].as_array().cloned()
    }

    /// Variables of expressions: each result by the name of its run, with `_` for `-`.
    pub(super) fn context(&self) -> minijinja::Value {
        let variable = |(name, result): (&String, &Value)| {
            (name.replace('-', "_"), minijinja::Value::from(Serde(result)))
        };
        minijinja::Value::from_pairs(self.0.iter().map(variable))
    }

    /// All results, in the order of their names.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.0.iter().map(|(name, result)| (name.as_str(), result))
    }

    pub(super) fn into_all(self) -> BTreeMap<String, Value> {
        self.0
    }

    /// True if every comparison with the kernel names the kernel's best way.
    pub(super) fn name_kernel_best(&self) -> bool {
        let comparisons = self.0.values().filter_map(|result| result["comparisons"].as_array());
        let names: Vec<bool> = comparisons
            .flatten()
            .map(|one| one["kernel_best"].as_str().is_some_and(|name| !name.is_empty()))
            .collect();
        !names.is_empty() && names.into_iter().all(|is_named| is_named)
    }

    #[cfg(test)]
    pub(super) fn of(results: impl IntoIterator<Item = (&'static str, Value)>) -> Self {
        Self(results.into_iter().map(|(name, result)| (name.to_owned(), result)).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn result_counts_with_the_same_commit_and_command() {
        let folder = tempfile::tempdir().unwrap();
        let run = PlannedRun {
            name: "monitor".to_owned(),
            command: "monitor --only tcpdump".to_owned(),
            whole: String::new(),
            quick: "--quick".to_owned(),
            long: None,
            seconds: 120,
            quick_seconds: Some(20),
        };
        let config = |form| ReportConfig {
            form,
            results: folder.path().to_owned(),
            only: Vec::new(),
            keep: false,
            former: None,
        };
        assert_eq!(run.arguments(Form::Quick), ["monitor", "--only", "tcpdump", "--quick"]);
        assert!(!is_measured(&run, &config(Form::Quick), "abc"));
        let text = r#"{"commit": "abc", "command": "tidegate lab monitor --only tcpdump --quick"}"#;
        fs::write(folder.path().join("monitor.json"), text).unwrap();
        assert!(is_measured(&run, &config(Form::Quick), "abc"));
        assert!(!is_measured(&run, &config(Form::Whole), "abc"));
        assert!(!is_measured(&run, &config(Form::Quick), "abd"));
        assert!(!is_measured(&run, &config(Form::Quick), "abc, changed"));
    }
}
