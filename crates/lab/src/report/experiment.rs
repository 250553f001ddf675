//! Result of an experiment: figures, table rows, notes and a picture.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;
use serde_json::Value;
use tidegate_load::format_number;

use crate::report::plot::Picture;

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
    /// Columns of the printed table; empty prints every key of the rows.
    #[serde(skip)]
    pub columns: Vec<&'static str>,
    /// Charts of the result, if any.
    #[serde(skip)]
    pub picture: Option<Picture>,
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

    /// Adds a note.
    pub fn note(&mut self, note: impl Into<String>) {
        self.notes.push(note.into());
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
        let cells = self.rows.iter().filter_map(Value::as_object).map(|row| {
            columns.iter().map(|key| row.get(*key).map_or_else(String::new, format_cell)).collect()
        });
        let mut table = Table::new(columns.iter().copied());
        cells.for_each(|row| table.row(row));
        write!(f, "{table}")?;
        for (name, value) in &self.figures {
            writeln!(f, "{name} = {}", format_number(*value))?;
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

/// A text table: a heading, rows, columns as wide as their widest cell.
pub(crate) struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with these column headings.
    pub(crate) fn new<'a>(headings: impl IntoIterator<Item = &'a str>) -> Self {
        Self { rows: vec![headings.into_iter().map(|h| h.replace('_', " ")).collect()] }
    }

    /// Adds a row.
    pub(crate) fn row(&mut self, cells: Vec<String>) {
        self.rows.push(cells);
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let columns = self.rows[0].len();
        let width = |column: usize| {
            self.rows.iter().filter_map(|row| row.get(column)).map(|c| c.chars().count()).max()
        };
        let widths: Vec<usize> = (0..columns).map(|c| width(c).unwrap_or(0)).collect();
        for row in &self.rows {
            let mut line = String::new();
            for (cell, width) in row.iter().zip(&widths) {
                // Names are aligned left, figures right.
                let numeric = cell.starts_with(|c: char| c.is_ascii_digit() || c == '-');
                if numeric {
                    line.push_str(&format!("{cell:>width$}  "));
                } else {
                    line.push_str(&format!("{cell:<width$}  "));
                }
            }
            writeln!(f, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

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
