//! Result of an experiment: figures, table rows, notes and a picture.

use std::collections::BTreeMap;
use std::fmt;

use comfy_table::presets::NOTHING;
use comfy_table::{Cell, CellAlignment, Table};
use serde::Serialize;
use serde_json::Value;
use tidegate_load::format_number;

use crate::report::plot::Picture;
use crate::stats::round_to_thousandths;

/// The result of one experiment: figures to compare with a target, rows of a table, notes on
/// the method of measurement.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Experiment {
    /// Name of the experiment, as on the command line: `dns`, `echo-cost`.
    pub experiment: String,
    /// The figures by name.
    pub figures: BTreeMap<String, f64>,
    /// Rows of the table: one JSON object each, keys in any order.
    pub rows: Vec<Value>,
    /// Notes on the method: the task of each core, known omissions.
    pub notes: Vec<String>,
    /// Comparisons with the kernel at its best.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub comparisons: Vec<KernelComparison>,
    /// Columns of the printed table; empty prints every key of the rows.
    #[serde(skip)]
    pub columns: Vec<&'static str>,
    /// Charts of the result, if any.
    #[serde(skip)]
    pub picture: Option<Picture>,
}

/// Ratio of Tidegate to the best of several ways of the kernel.
#[derive(Clone, Debug, Serialize)]
pub struct KernelComparison {
    /// Name of the figure that is the ratio.
    pub figure: String,
    /// Rates of the kernel's ways, by name.
    pub kernel_rows: BTreeMap<String, f64>,
    /// Name of the best of them, which the ratio refers to.
    pub kernel_best: String,
}

/// Figures of the kernel's ways by name, and the name of the best.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct KernelRows {
    pub(crate) rows: BTreeMap<String, f64>,
    pub(crate) best: String,
    /// Figure of the way that was measured in turn with Tidegate, over that of the best.
    pub(crate) chosen_over_best: f64,
}

impl KernelRows {
    /// The same rows for a comparison of another figure than that of the rows.
    pub(crate) fn for_other_figure(self) -> Self {
        Self { chosen_over_best: 1.0, ..self }
    }
}

impl Experiment {
    /// An empty result for the experiment `name`.
    pub fn new(name: &str) -> Self {
        Self { experiment: name.to_owned(), ..Self::default() }
    }

    /// Sets a figure.
    pub fn figure(&mut self, name: &str, value: f64) {
        self.figures.insert(name.to_owned(), value);
    }

    /// Sets a figure to the ratio of a rate to the best of the kernel's rates, which are named. A
    /// kernel that delivers nothing counts as one a second. Without rates of the kernel there is no
    /// figure.
    pub fn compare_with_kernel(
        &mut self,
        figure: &str,
        rate: f64,
        kernel_rates: impl IntoIterator<Item = (String, f64)>,
    ) {
        let kernel_rows: BTreeMap<String, f64> = kernel_rates.into_iter().collect();
        let best = kernel_rows.iter().max_by(|one, other| one.1.total_cmp(other.1));
        let Some((best, best_rate)) = best.map(|(name, rate)| (name.clone(), *rate)) else {
            return;
        };
        let ratio = rate / best_rate.max(1.0);
        self.compare_with_best(
            figure,
            ratio,
            KernelRows { rows: kernel_rows, best, chosen_over_best: 1.0 },
        );
    }

    /// Sets a figure to the ratio of Tidegate's figure to that of the best of `kernel`, which are
    /// named. `ratio` is that to the way that was measured in turn with Tidegate.
    pub(crate) fn compare_with_best(&mut self, figure: &str, ratio: f64, kernel: KernelRows) {
        let KernelRows { rows: kernel_rows, best: kernel_best, chosen_over_best } = kernel;
        self.figure(figure, round_to_thousandths(ratio * chosen_over_best));
        let figure = figure.to_owned();
        self.comparisons.push(KernelComparison { figure, kernel_rows, kernel_best });
    }

    /// Adds a note.
    pub fn note(&mut self, note: impl Into<String>) {
        self.notes.push(note.into());
    }

    /// The rows as a table with a heading. Figures are aligned right.
    fn table(&self, columns: &[&str]) -> Table {
        let mut table = Table::new();
        table.load_preset(NOTHING).set_header(columns.iter().map(|name| name.replace('_', " ")));
        for row in self.rows.iter().filter_map(Value::as_object) {
            table.add_row(columns.iter().map(|key| {
                let text = row.get(*key).map_or_else(String::new, format_cell);
                let is_figure = text.starts_with(|c: char| c.is_ascii_digit() || c == '-');
                let alignment = if is_figure { CellAlignment::Right } else { CellAlignment::Left };
                Cell::new(text).set_alignment(alignment)
            }));
        }
        for column in table.column_iter_mut() {
            column.set_padding((0, 2));
        }
        table
    }
}

impl fmt::Display for Experiment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut columns: Vec<&str> = self.columns.clone();
        let keys = self.rows.iter().filter_map(Value::as_object).flat_map(|row| row.keys());
        for key in keys.filter(|_| self.columns.is_empty()) {
            if !columns.contains(&key.as_str()) {
                columns.push(key);
            }
        }
        // A column's padding would end each line with spaces.
        for line in self.table(&columns).lines() {
            writeln!(f, "{}", line.trim_end())?;
        }
        for (name, value) in &self.figures {
            writeln!(f, "{name} = {}", format_number(*value))?;
        }
        for KernelComparison { figure, kernel_best, .. } in &self.comparisons {
            writeln!(f, "{figure}: the kernel at its best is {kernel_best}")?;
        }
        for note in &self.notes {
            writeln!(f, "note: {note}")?;
        }
        Ok(())
    }
}

fn format_cell(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Number(n) => n.as_f64().map_or_else(|| n.to_string(), format_number),
        Value::Null => "-".to_owned(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn compares_with_the_kernel_at_its_best_and_names_it() {
        let mut result = Experiment::new("livelock");
        result.compare_with_kernel("none", 9.0, []);
        assert!(result.figures.is_empty() && result.comparisons.is_empty());
        let rates = [("kernel", 0.0), ("kernel-rps", 200.0), ("kernel-thread", 300.0)];
        let rates = rates.map(|(name, rate)| (name.to_owned(), rate));
        result.compare_with_kernel("over_kernel", 900.0, rates.clone());
        result.compare_with_kernel("over_nothing", 900.0, rates[..1].to_vec());
        assert_eq!(result.figures["over_kernel"], 3.0);
        assert_eq!(result.figures["over_nothing"], 900.0);
        let json = serde_json::to_value(&result).unwrap();
        let comparison = &json["comparisons"][0];
        assert_eq!(comparison["kernel_best"], "kernel-thread");
        assert_eq!(comparison["kernel_rows"]["kernel-rps"], 200.0);
        assert!(
            result.to_string().contains("over_kernel: the kernel at its best is kernel-thread")
        );
    }

    #[test]
    fn prints_every_column_and_figure() {
        let mut result = Experiment::new("dns");
        result.rows.push(json!({"server": "nsd", "qps": 1000}));
        result.rows.push(json!({"server": "knot", "cpu": null}));
        result.figure("qps_ratio", 1.75);
        result.note("core 1 serves");
        result.columns = vec!["server", "qps"];
        assert!(!result.to_string().contains("cpu"), "only the columns asked for");
        result.columns.clear();
        let text = result.to_string();
        for part in ["server", "qps", "1,000", "cpu", "qps_ratio = 1.75", "note: core 1 serves"] {
            assert!(text.contains(part), "{part:?} in {text}");
        }
        let json = serde_json::to_value(&result).unwrap();
        assert_eq!(json["experiment"], "dns");
        assert_eq!(json["figures"]["qps_ratio"], 1.75);
    }
}
