//! The plan of the report: experiments to run, and entries with what they show.

use minijinja::Environment;
use serde::Deserialize;

use crate::LabError;

const PLAN: &str = include_str!("../../data/papers/report.template.toml");
/// Name of the plan in errors.
const PLAN_NAME: &str = "data/papers/report.template.toml";

/// Experiments and entries.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Plan {
    #[serde(rename = "run")]
    pub(super) runs: Vec<PlannedRun>,
    #[serde(rename = "entry")]
    pub(super) entries: Vec<PlannedEntry>,
}

/// An experiment to run.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PlannedRun {
    /// Name of the result, unique.
    pub(super) name: String,
    /// Words of the command line, with the flags that every form has.
    pub(super) command: String,
    /// Further flags of the forms.
    #[serde(default)]
    pub(super) whole: String,
    #[serde(default = "quick_flag")]
    pub(super) quick: String,
    /// As in `whole` without it.
    pub(super) long: Option<String>,
    /// Expected durations of the forms, in seconds. Without the second the quick form leaves the
    /// experiment out: no entry shows it.
    pub(super) seconds: u64,
    pub(super) quick_seconds: Option<u64>,
}

fn quick_flag() -> String {
    "--quick".to_owned()
}

/// A table or figure of a paper.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PlannedEntry {
    /// Unique name.
    pub(super) id: String,
    /// First author of the paper and year.
    pub(super) paper: String,
    /// Name in the paper, such as `Table 2.1`.
    pub(super) source: String,
    pub(super) title: String,
    /// Claim of the paper.
    pub(super) claim: String,
    /// Differences from the set-up of the paper.
    pub(super) differs: String,
    /// Axes of the charts.
    pub(super) x: String,
    pub(super) y: String,
    /// Logarithmic scales.
    #[serde(default)]
    pub(super) log_x: bool,
    #[serde(default)]
    pub(super) log_y: bool,
    /// Less is better.
    #[serde(default)]
    pub(super) less_is_better: bool,
    /// False where a ratio says nothing: values nearly zero on both sides, shares of a whole.
    #[serde(default = "yes")]
    pub(super) has_ratio: bool,
    /// The points of a place are repetitions of one measurement.
    #[serde(default)]
    pub(super) repeats: bool,
    /// Reason for which the entry cannot be repeated.
    pub(super) not_possible: Option<String>,
    /// Expression over the results: true if the paper's claim holds here.
    pub(super) holds: String,
    /// Expression over the results: what was found, in a few words.
    pub(super) ours: String,
    pub(super) published: Vec<Query>,
    pub(super) kernel: Vec<Query>,
    pub(super) tidegate: Vec<Query>,
    /// The paper's own machine in the simulator, with Tidegate's gate and stack.
    #[serde(default)]
    pub(super) simulated: Vec<Query>,
}

/// Points of rows: of a table of a paper, or of the result of a run.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Query {
    /// Published table.
    pub(super) table: Option<String>,
    /// Result of a run.
    pub(super) run: Option<String>,
    /// Key of a list in each row, whose elements are rows of their own.
    pub(super) each: Option<String>,
    /// Expression over a row: true if the row is taken.
    #[serde(rename = "where", default = "every_row")]
    pub(super) filter: String,
    /// Expressions over a row: name of the series, place, and value or a text without a number.
    pub(super) series: String,
    pub(super) x: String,
    pub(super) y: String,
    /// Expressions over a row: ends of the spread.
    pub(super) low: Option<String>,
    pub(super) high: Option<String>,
}

fn yes() -> bool {
    true
}

fn every_row() -> String {
    "true".to_owned()
}

impl Plan {
    /// Reads the plan of this program.
    pub(super) fn read() -> Result<Self, LabError> {
        let failed = |error: String| LabError::Config(format!("{PLAN_NAME}: {error}"));
        let text = Environment::new()
            .render_named_str(PLAN_NAME, PLAN, ())
            .map_err(|error| failed(error.to_string()))?;
        toml::from_str(&text).map_err(|error| failed(error.to_string()))
    }

    /// Fails when a name is not that of a run.
    pub(super) fn check_names(&self, names: &[String]) -> Result<(), LabError> {
        match names.iter().find(|name| self.runs.iter().all(|run| run.name != **name)) {
            None => Ok(()),
            Some(unknown) => {
                let known: Vec<&str> = self.runs.iter().map(|run| run.name.as_str()).collect();
                let known = known.join(", ");
                Err(LabError::Config(format!(
                    "{unknown} is no run of the report; there are {known}"
                )))
            }
        }
    }
}

impl PlannedEntry {
    /// Names of the runs that the entry shows.
    pub(super) fn runs(&self) -> Vec<&str> {
        let queries = self.kernel.iter().chain(&self.tidegate).chain(&self.simulated);
        let mut names: Vec<&str> = queries.filter_map(|query| query.run.as_deref()).collect();
        names.sort_unstable();
        names.dedup();
        names
    }
}
