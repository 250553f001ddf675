//! `tidegate metrics`: the list of all metrics.

use clap::Args;
use serde_json::{Value, json};

use super::table::{ALL, Metric};
use crate::Failure;
use crate::output::print_line;

/// Flags of `metrics`.
#[derive(Args)]
pub(crate) struct MetricsCommand {
    /// Print the metrics as JSON
    #[arg(long)]
    json: bool,
}

impl MetricsCommand {
    pub(crate) fn run(self) -> Result<(), Failure> {
        if self.json {
            let metrics: Vec<Value> = ALL.iter().map(|metric| to_json(metric)).collect();
            print_line!("{}", serde_json::to_string_pretty(&metrics)?)?;
            return Ok(());
        }
        for metric in ALL {
            let labels = metric.labels.join(", ");
            print_line!(
                "{:<42} {:<8} {:<20} {}",
                metric.name(),
                metric.kind,
                format!("{{{labels}}}"),
                metric.help
            )?;
        }
        Ok(())
    }
}

fn to_json(metric: &Metric) -> Value {
    json!({
        "name": metric.name(),
        "type": metric.kind,
        "labels": metric.labels,
        "commands": metric.commands,
        "help": metric.help,
    })
}
