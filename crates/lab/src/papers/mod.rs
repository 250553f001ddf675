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
mod published;
mod runs;
mod select;

use std::path::{Path, PathBuf};

pub use runs::Form;

use crate::LabError;
use crate::report::Experiment;
use entry::{Entry, State};
use plan::Plan;
use published::PublishedTables;
use runs::RunResults;

/// What the report is made of.
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
    Ok(Report { page, result, failures })
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
    result.columns = vec!["paper", "source", "title", "state", "holds", "ratio", "ours"];
    result.note(
        "a ratio is Tidegate over the kernel at its best at the points that both have, or the inverse \
         where less is better: the median of the points, and the lowest and highest",
    );
    result
}
