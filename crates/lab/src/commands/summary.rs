//! `tidegate-lab summary`: the page of all results.

use std::path::PathBuf;

use clap::Args;
use tidegate_lab::summary::Summary;

use crate::Failure;
use crate::output::{log, print_line};

/// Flags of `summary`.
#[derive(Args)]
pub(crate) struct SummaryCommand {
    /// Write nothing: fail if docs/benchmarks.md is not up to date, or a number of README.md is
    /// not in the results
    #[arg(long)]
    check: bool,
    /// Fail also if results are of several commits or machines, or of short runs
    #[arg(long)]
    strict: bool,
    /// Root of the source tree
    #[arg(long, value_name = "FOLDER", default_value = ".")]
    root: PathBuf,
}

impl SummaryCommand {
    pub(crate) fn run(self) -> Result<(), Failure> {
        let summary = Summary::new(&self.root);
        let mut report = summary.check()?;
        let path = summary.page_path();
        if !self.check {
            std::fs::write(&path, &report.page)
                .map_err(|error| format!("{}: {error}", path.display()))?;
            report = summary.check()?;
            print_line!("wrote {}", path.display())?;
        }
        for warning in &report.warnings {
            log(format_args!("warning: {warning}"));
        }
        let mut problems = report.problems;
        if self.strict && !report.warnings.is_empty() {
            problems.push("there are warnings, and --strict allows none".to_owned());
        }
        if problems.is_empty() { Ok(()) } else { Err(problems.join("\n").into()) }
    }
}
