//! The report: the tables and figures of the five papers with the numbers of today beside the
//! published ones, on one page.
//!
//! The plan (`data/papers/report.template.toml`) names the experiments to run, and for each table and
//! figure the published rows and the rows of results to show. Everything here is generic: it runs the
//! plan's experiments, selects, draws and writes.

mod compare;
mod entry;
mod page;
mod plan;
mod runs;
mod select;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

pub use runs::Form;
use serde_json::Value;

use crate::LabError;
use crate::published::PublishedTables;
use crate::report::Experiment;
use entry::{Entry, State};
use plan::Plan;
use runs::RunResults;

/// Sources of the report.
#[derive(Clone, Debug)]
pub struct ReportConfig {
    /// Length of the experiments.
    pub form: Form,
    /// Folder with the results of the experiments. Those of this commit and form are not measured
    /// again.
    pub results: PathBuf,
    /// Names of the experiments to run; all when empty. Entries of others have the state of their
    /// results.
    pub only: Vec<String>,
    /// Measure nothing: make the page of the results that are there.
    pub keep: bool,
    /// Former `report.json` to compare with.
    pub former: Option<PathBuf>,
}

/// The page and what it was made of.
#[derive(Debug)]
pub struct Report {
    /// The page: one file of HTML that loads nothing.
    pub page: String,
    /// Figures, and a row for each table and figure of the papers.
    pub result: Experiment,
    /// Results of the experiments, each as its own JSON file has it, by name.
    pub results: BTreeMap<String, Value>,
    /// Failures of experiments, with their errors.
    pub failures: Vec<String>,
}

/// Runs the experiments that lack a result, and makes the report.
///
/// # Errors
/// If the folder of results cannot be written, or the plan does not fit the results.
pub fn make(config: &ReportConfig) -> Result<Report, LabError> {
    let plan = Plan::read()?;
    plan.check_names(&config.only)?;
    let tables = PublishedTables::read()?;
    let former = config.former.as_deref().map(compare::FormerReport::read).transpose()?;
    let failures = if config.keep { Vec::new() } else { runs::measure(&plan, config)? };
    let results = RunResults::read(&plan, &config.results)?;
    let entries = entry::all(&plan, &tables, &results)?;
    let mut result = summarize(&entries, &results);
    if let Some(former) = &former {
        former.compare(&entries, &mut result);
    }
    let page = page::render(&entries, &result, &results, former.as_ref())?;
    Ok(Report { page, result, results: results.into_all(), failures })
}

/// Names of the experiments that the report runs.
///
/// # Errors
/// If the plan cannot be read.
pub fn run_names() -> Result<Vec<String>, LabError> {
    Ok(Plan::read()?.runs.into_iter().map(|run| run.name).collect())
}

/// Path of the JSON file beside a page.
#[must_use]
pub fn json_path(page: &Path) -> PathBuf {
    page.with_extension("json")
}

fn summarize(entries: &[Entry], results: &RunResults) -> Experiment {
    let mut result = Experiment::new("report");
    for state in State::ALL {
        let count = entries.iter().filter(|entry| entry.state == state).count();
        result.figure(state.name(), count as f64);
    }
    result.figure("entries", entries.len() as f64);
    result.figure("kernel_best_named", f64::from(u8::from(results.name_kernel_best())));
    result.rows = entries.iter().map(Entry::to_json).collect();
    result.columns = vec!["publication", "source", "title", "state", "holds", "ratio", "ours"];
    result.note(
        "a ratio is Tidegate over the kernel at its best at the points that both have, or the inverse \
         where less is better: the median of the points, and the spread in which nine of ten further \
         runs are expected: that of the points, twice as wide on a logarithmic scale since they have \
         few repetitions, and a tenth at least since machines change by themselves",
    );
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tables of the papers' set-ups, which no table or figure shows, and the numbers that the
    /// simulator is fitted to, which the other tables have too.
    const SETUPS: [&str; 5] = [
        "farias_scenarios",
        "jonack_load_levels",
        "jonack_machines",
        "mogul_cycle_limit",
        "mogul_router",
    ];

    #[test]
    fn every_published_number_is_shown() {
        let plan = Plan::read().unwrap();
        let tables = PublishedTables::read().unwrap();
        for name in tables.names().filter(|name| !SETUPS.contains(name)) {
            let queries = plan.entries.iter().flat_map(|entry| &entry.published);
            let queries: Vec<_> =
                queries.filter(|query| query.table.as_deref() == Some(name)).collect();
            for row in tables.rows(name).unwrap() {
                let is_shown = queries.iter().any(|query| select::takes(query, row).unwrap());
                assert!(is_shown, "{name}: {row}");
            }
        }
    }

    #[test]
    fn every_table_and_figure_has_an_entry_with_its_own_name() {
        let plan = Plan::read().unwrap();
        let numbered = |prefix: &str, numbers: std::ops::RangeInclusive<u32>| -> Vec<String> {
            numbers.map(|number| format!("{prefix}{number}")).collect()
        };
        let mut expected = [
            numbered("rivera-2.", 1..=4),
            numbered("rivera-3.", 1..=10),
            numbered("rivera-4.", 1..=13),
            numbered("jonack-f", 3..=8),
            numbered("mogul-f6-", 3..=6),
            numbered("diaz-t", 1..=3),
        ]
        .concat();
        let others = ["rivera-trace", "jonack-t4", "jonack-mlfrr", "mogul-f6-1", "mogul-f7-1"];
        let statements = ["mogul-monitoring", "mogul-file-service"];
        let farias = ["farias-f12", "farias-f13a", "farias-f13b", "farias-f14"];
        expected.extend(others.iter().chain(&statements).chain(&farias).map(|&id| id.to_owned()));
        let mut ids: Vec<String> = plan.entries.iter().map(|entry| entry.id.clone()).collect();
        expected.sort();
        ids.sort();
        assert_eq!(ids, expected);
        let environment = minijinja::Environment::new();
        for entry in &plan.entries {
            for expression in [&entry.holds, &entry.ours] {
                assert!(environment.compile_expression(expression).is_ok(), "{expression}");
            }
            let runs = entry.runs();
            assert!(!runs.is_empty(), "{}", entry.id);
            plan.check_names(&runs.iter().map(|&run| run.to_owned()).collect::<Vec<_>>()).unwrap();
        }
    }

    #[test]
    fn forms_take_as_long_as_they_say() {
        let plan = Plan::read().unwrap();
        let minutes = |seconds: fn(&plan::PlannedRun) -> u64| {
            plan.runs.iter().map(seconds).sum::<u64>().div_ceil(60)
        };
        assert!(minutes(|run| run.seconds) <= 100);
        assert!(minutes(|run| run.quick_seconds.unwrap_or(0)) <= 10);
        let left_out: Vec<&str> = plan
            .runs
            .iter()
            .filter(|run| run.quick_seconds.is_none())
            .map(|run| run.name.as_str())
            .collect();
        let shown = plan.entries.iter().flat_map(plan::PlannedEntry::runs);
        let missing: Vec<&str> = shown.filter(|run| left_out.contains(run)).collect();
        assert!(missing.is_empty(), "entries show {missing:?}");
    }
}
