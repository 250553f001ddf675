//! The table: `docs/programs.json`, and `docs/programs.md` made from it.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use serde::{Deserialize, Serialize};

use crate::case::{self, Placement, Row};
use crate::description::Program;

/// Result of a program: its rows, or the reason why it did not run.
#[derive(Serialize, Deserialize)]
pub struct Entry {
    commit: String,
    date: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    not_run: Option<String>,
    rows: Vec<Row>,
}

impl Entry {
    pub fn new(result: Result<Vec<Row>, String>) -> Self {
        let (rows, not_run) = match result {
            Ok(rows) => (rows, None),
            Err(obstacle) => (Vec::new(), Some(obstacle)),
        };
        let commit = output_of(&["git", "rev-parse", "--short", "HEAD"]);
        Self { commit, date: output_of(&["date", "-u", "+%Y-%m-%d"]), not_run, rows }
    }
}

fn output_of(command: &[&str]) -> String {
    let output = Command::new(command[0]).args(&command[1..]).output().unwrap();
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

fn document(name: &str) -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "../../docs", name].iter().collect()
}

/// The entries of the last runs.
pub fn read() -> BTreeMap<String, Entry> {
    let text = fs::read_to_string(document("programs.json"));
    text.map(|text| serde_json::from_str(&text).unwrap()).unwrap_or_default()
}

/// Writes both files. Entries of programs without a description are dropped.
pub fn write(programs: &[Program], mut table: BTreeMap<String, Entry>) {
    table.retain(|name, _| programs.iter().any(|program| program.name == *name));
    let text = serde_json::to_string_pretty(&table).unwrap() + "\n";
    fs::write(document("programs.json"), text).unwrap();
    fs::write(document("programs.md"), page(programs, &table)).unwrap();
}

const INTRODUCTION: &str = include_str!("introduction.md");

fn page(programs: &[Program], table: &BTreeMap<String, Entry>) -> String {
    let mut page = INTRODUCTION.to_owned();
    page += "\n| program | version | client | attached | embedded | lost at reload: attached, embedded, kernel | run |\n";
    page += "|---|---|---|---|---|---|---|\n";
    for program in programs {
        let Some(entry) = table.get(&program.name) else { continue };
        let name = &program.name;
        if let Some(reason) = &entry.not_run {
            writeln!(page, "| {name} | | {} | not run: {reason} | | | |", program.client).unwrap();
            continue;
        }
        let result = |placement| result_of(program, entry, placement);
        let mut cells = vec![name.clone(), entry.rows[0].version.clone(), program.client.clone()];
        cells.extend([
            result(Placement::Attached),
            result(Placement::Embedded),
            reloads(program, entry),
        ]);
        cells.push(format!("{} ({})", entry.date, entry.commit));
        writeln!(page, "| {} |", cells.join(" | ")).unwrap();
    }
    page
}

/// Text of a placement: "works", or for each family what did not.
fn result_of(program: &Program, entry: &Entry, placement: Placement) -> String {
    let rows: Vec<&Row> = entry.rows.iter().filter(|row| row.placement == placement).collect();
    if rows.iter().all(|row| row.is_good()) {
        return "IPv4, IPv6".to_owned();
    }
    let text = |row: &Row| {
        let seen = row.failure.iter().cloned();
        let left = row.left_behind.iter().map(|what| format!("left behind: {what}"));
        seen.chain(left).collect::<Vec<_>>().join("; ").replace('|', "\\|")
    };
    let mut parts = Vec::new();
    if let Some(reason) = program.expected_failure(placement) {
        parts.push(format!("no: {reason}"));
    } else if rows.iter().all(|row| text(row) == text(rows[0])) {
        parts.push(format!("no: {}", text(rows[0])));
    } else {
        for row in rows {
            let result = if row.is_good() { "works".to_owned() } else { text(row) };
            parts.push(format!("{}: {result}", row.family));
        }
    }
    parts.join("; ")
}

/// Losses of both families at reload by placement.
fn reloads(program: &Program, entry: &Entry) -> String {
    if program.reload.is_empty() {
        return String::new();
    }
    let sum = |placement| {
        let sum = case::losses(&entry.rows, placement);
        sum.map_or_else(|| "–".to_owned(), |sum| format!("{} of {}", sum.lost, sum.of))
    };
    let all = [Placement::Attached, Placement::Embedded, Placement::Kernel].map(sum);
    format!("{}: {}", program.reload_by, all.join(", "))
}
