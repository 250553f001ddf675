//! Published numbers of the papers, from the tables in `data/papers`: one row a number.

use std::collections::BTreeMap;

use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::LabError;

macro_rules! tables {
    ($($name:literal),* $(,)?) => {
        &[$(($name, include_str!(concat!("../data/papers/", $name, ".csv")))),*]
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
    "mogul_router",
    "mogul_statements",
    "rivera_concurrent_reads",
    "rivera_lock_statistics",
    "rivera_receive_queues",
    "rivera_trace",
];

/// Reads the rows of the table `name`: each field has the name of a column.
///
/// # Errors
/// If there is no such table, or a change of the table made a row unreadable.
pub(crate) fn rows<T: DeserializeOwned>(name: &str) -> Result<Vec<T>, LabError> {
    let Some((_, text)) = TABLES.iter().find(|table| table.0 == name) else {
        return Err(LabError::Config(format!("the papers have no table {name}")));
    };
    let mut reader = csv::ReaderBuilder::new().comment(Some(b'#')).from_reader(text.as_bytes());
    let rows: Result<_, csv::Error> = reader.deserialize().collect();
    let changed = format!("crates/lab/data/papers/{name}.csv was changed: restore the table");
    rows.map_err(LabError::io_other(changed))
}

/// All tables as plain values. A cell that is a number is a number.
pub(crate) struct PublishedTables(BTreeMap<&'static str, Vec<Value>>);

impl PublishedTables {
    pub(crate) fn read() -> Result<Self, LabError> {
        let read = |&(name, _): &(&'static str, &str)| {
            let rows: Vec<BTreeMap<String, String>> = rows(name)?;
            Ok((name, rows.into_iter().map(values).collect()))
        };
        TABLES.iter().map(read).collect::<Result<_, LabError>>().map(Self)
    }

    /// Names of all tables.
    #[cfg(test)]
    pub(crate) fn names(&self) -> impl Iterator<Item = &'static str> {
        self.0.keys().copied()
    }

    /// Rows of the table `name`.
    pub(crate) fn rows(&self, name: &str) -> Option<&[Value]> {
        self.0.get(name).map(Vec::as_slice)
    }
}

/// Columns whose cells are names, such as 3.10, and no numbers.
const NAMES: [&str; 5] = ["table", "figure", "section", "scenario", "linux"];

fn values(row: BTreeMap<String, String>) -> Value {
    let value = |key: &str, cell: String| match cell.parse::<f64>() {
        Ok(number) if number.is_finite() && !NAMES.contains(&key) => Value::from(number),
        _ => Value::from(cell),
    };
    row.into_iter().map(|(key, cell)| (key.clone(), value(&key, cell))).collect()
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
            ("mogul_router", 7),
            ("mogul_statements", 2),
            ("rivera_concurrent_reads", 48),
            ("rivera_lock_statistics", 44),
            ("rivera_receive_queues", 170),
            ("rivera_trace", 6),
        ];
        assert_eq!(counts, expected);
        assert!(tables.rows("others").is_none());
        assert!(rows::<Value>("others").unwrap_err().to_string().contains("no table others"));
    }

    #[test]
    fn changed_table_is_named() {
        #[derive(Debug, serde::Deserialize)]
        #[expect(dead_code, reason = "the column is missing")]
        struct Row {
            missing: f64,
        }
        let error = rows::<Row>("diaz_rates").unwrap_err().to_string();
        assert!(error.contains("diaz_rates.csv was changed"), "{error}");
    }
}
