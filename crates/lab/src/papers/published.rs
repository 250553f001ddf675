//! Published numbers of the papers, one row a number.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use crate::LabError;

macro_rules! tables {
    ($($name:literal),* $(,)?) => {
        &[$(($name, include_str!(concat!("../../data/papers/", $name, ".csv")))),*]
    };
}

/// Tables by name.
const TABLES: &[(&str, &str)] = tables![
    "diaz_profile",
    "diaz_rates",
    "farias_figures",
    "farias_scenarios",
    "jonack_flow",
    "jonack_load_levels",
    "jonack_losses",
    "jonack_machines",
    "jonack_mlfrr",
    "jonack_response_time",
    "jonack_time_line",
    "jonack_web_server",
    "mogul_cycle_limit",
    "mogul_forwarding",
    "mogul_statements",
    "rivera_concurrent_reads",
    "rivera_lock_statistics",
    "rivera_receive_queues",
    "rivera_trace",
];

/// Rows of all published tables. A cell that is a number is a number.
pub(super) struct PublishedTables(BTreeMap<&'static str, Vec<Value>>);

impl PublishedTables {
    pub(super) fn read() -> Result<Self, LabError> {
        let read = |&(name, text): &(&'static str, &str)| Ok((name, parse(name, text)?));
        TABLES.iter().map(read).collect::<Result<_, LabError>>().map(Self)
    }

    /// Names of all tables.
    #[cfg(test)]
    pub(super) fn names(&self) -> impl Iterator<Item = &'static str> {
        self.0.keys().copied()
    }

    /// Rows of the table `name`.
    pub(super) fn rows(&self, name: &str) -> Option<&[Value]> {
        self.0.get(name).map(Vec::as_slice)
    }
}

fn parse(name: &str, text: &str) -> Result<Vec<Value>, LabError> {
    let failed = || LabError::io_other(format!("data/papers/{name}.csv is no table"));
    let mut reader = csv::ReaderBuilder::new().comment(Some(b'#')).from_reader(text.as_bytes());
    let keys = reader.headers().map_err(failed())?.clone();
    let mut rows = Vec::new();
    for record in reader.records() {
        let record = record.map_err(failed())?;
        let cells = keys.iter().zip(&record);
        let row: Map<String, Value> =
            cells.map(|(key, cell)| (key.to_owned(), value(key, cell))).collect();
        rows.push(Value::Object(row));
    }
    Ok(rows)
}

/// Columns whose cells are names, such as 3.10, and no numbers.
const NAMES: [&str; 5] = ["table", "figure", "section", "scenario", "linux"];

fn value(key: &str, cell: &str) -> Value {
    match cell.parse::<f64>() {
        Ok(number) if number.is_finite() && !NAMES.contains(&key) => Value::from(number),
        _ => Value::from(cell),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_table_has_as_many_numbers_as_the_papers() {
        let tables = PublishedTables::read().unwrap();
        let count = |name| tables.rows(name).unwrap().len();
        let counts: Vec<(&str, usize)> =
            TABLES.iter().map(|table| (table.0, count(table.0))).collect();
        let expected = [
            ("diaz_profile", 21),
            ("diaz_rates", 2),
            ("farias_figures", 7),
            ("farias_scenarios", 4),
            ("jonack_flow", 33),
            ("jonack_load_levels", 8),
            ("jonack_losses", 6),
            ("jonack_machines", 6),
            ("jonack_mlfrr", 3),
            ("jonack_response_time", 5),
            ("jonack_time_line", 4),
            ("jonack_web_server", 5),
            ("mogul_cycle_limit", 10),
            ("mogul_forwarding", 9),
            ("mogul_statements", 2),
            ("rivera_concurrent_reads", 48),
            ("rivera_lock_statistics", 44),
            ("rivera_receive_queues", 170),
            ("rivera_trace", 6),
        ];
        assert_eq!(counts, expected);
        assert!(tables.rows("others").is_none());
    }
}
