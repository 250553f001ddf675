//! `tidegate-lab report`: the papers repeated, on one page.

use std::path::PathBuf;
use std::time::Instant;

use clap::Args;
use tidegate_lab::papers::{self, Form, ReportConfig};
use tidegate_lab::report::Provenance;

use super::clean_up_on_signal;
use crate::Failure;
use crate::output::{log, print};

/// Flags of `report`.
#[derive(Args)]
pub(crate) struct ReportCommand {
    /// Write the page to this file, and its numbers beside it, ending in .json
    #[arg(long, value_name = "FILE", default_value = "report.html")]
    out: PathBuf,
    /// Short measurements, for a first look: 10 minutes in all
    #[arg(long)]
    quick: bool,
    /// Levels as long as in the papers, such as 60 s
    #[arg(long, conflicts_with = "quick")]
    long: bool,
    /// Folder with the results of the experiments. A result of this commit and length is not measured
    /// again, so that an interrupted report goes on [default: FILE without its ending, with .results]
    #[arg(long, value_name = "FOLDER")]
    results: Option<PathBuf>,
    /// Run only these experiments; the page shows the others as far as they have results
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    only: Vec<String>,
    /// Run nothing: make the page of the results that are there
    #[arg(long, conflicts_with = "only")]
    keep: bool,
    /// Show what became slower since this report
    #[arg(long, value_name = "REPORT.json")]
    compare: Option<PathBuf>,
    /// List the experiments and end
    #[arg(long)]
    list: bool,
}

impl ReportCommand {
    pub(crate) fn run(self) -> Result<(), Failure> {
        if self.list {
            let names = papers::run_names()?;
            return print(format_args!("{}\n", names.join("\n")));
        }
        clean_up_on_signal(|| self.make())
    }

    fn make(self) -> Result<(), Failure> {
        let began = Instant::now();
        let form = match (self.quick, self.long) {
            (true, _) => Form::Quick,
            (_, true) => Form::Long,
            _ => Form::Whole,
        };
        let config = ReportConfig {
            form,
            results: self.results.unwrap_or_else(|| self.out.with_extension("results")),
            only: self.only,
            keep: self.keep,
            former: self.compare,
        };
        let report = papers::make(&config)?;
        let provenance = Provenance::of_this_run(began.elapsed());
        let mut record = serde_json::to_value(provenance.record(&report.result))?;
        record["results"] = serde_json::to_value(&report.results)?;
        let json = serde_json::to_string_pretty(&record)? + "\n";
        let json_path = papers::json_path(&self.out);
        for (path, text) in [(&self.out, &report.page), (&json_path, &json)] {
            std::fs::write(path, text).map_err(|error| format!("{}: {error}", path.display()))?;
        }
        print(format_args!("{}", report.result))?;
        log(format_args!("wrote {} and {}", self.out.display(), json_path.display()));
        if report.failures.is_empty() {
            return Ok(());
        }
        Err(format!(
            "experiments failed; call this again for those alone:\n{}",
            report.failures.join("\n")
        )
        .into())
    }
}
