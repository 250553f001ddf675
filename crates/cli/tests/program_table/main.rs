//! Table of unmodified programs: each program of `*.toml` in this folder moves 10 MB by its own
//! protocol over both families: on the kernel, attached to a daemon, and with an embedded stack.
//!
//! `make programs` runs them all and writes `docs/programs.json` and `docs/programs.md`.

mod case;
mod description;
mod page;
mod scripts;
#[path = "../support/mod.rs"]
mod support;

use case::{Placement, Row};
use description::Program;
use support::is_root;

/// Programs that each run of the tests tries, so that the descriptions stay valid.
const QUICK: [&str; 1] = ["redis"];

/// Runs a program in every placement. Returns the rows, or the reason why it cannot run here.
fn run(program: &Program) -> Result<Vec<Row>, String> {
    if let Some(obstacle) = program.obstacle() {
        return Err(obstacle);
    }
    let version = program.version();
    Ok(Placement::ALL
        .iter()
        .flat_map(|&placement| case::run(program, &version, placement))
        .collect())
}

/// Results that are not as the description expects, and reloads that lose more than the kernel's.
fn unexpected(program: &Program, rows: &[Row]) -> Vec<String> {
    let expects_failure = |row: &&Row| program.expected_failure(row.placement).is_some();
    let is_unexpected = |row: &&Row| row.is_good() == expects_failure(row);
    let mut found: Vec<_> = rows.iter().filter(is_unexpected).map(Row::to_string).collect();
    let [kernel, attached, embedded] =
        Placement::ALL.map(|placement| case::losses(rows, placement).unwrap_or_default());
    // A server that loses some on the kernel closes its port: chance decides how many.
    let limit = if kernel.lost == 0 { 0 } else { 2 * kernel.lost + kernel.of / 20 };
    if attached.lost.max(embedded.lost) > limit {
        found.push(format!(
            "{}: reloads lost {} attached, {} embedded, {} on the kernel",
            program.name, attached.lost, embedded.lost, kernel.lost
        ));
    }
    found
}

/// Network namespaces of this process, which end with their testbeds.
fn own_namespaces() -> Vec<String> {
    let own = format!("tg-{}-", std::process::id());
    let all = std::fs::read_dir("/var/run/netns").into_iter().flatten().flatten();
    let names = all.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.filter(|name| name.starts_with(&own)).collect()
}

#[test]
fn quick_programs_run() {
    if !is_root("program_table") {
        return;
    }
    for program in description::all().iter().filter(|program| QUICK.contains(&&*program.name)) {
        match run(program) {
            Ok(rows) => assert_eq!(unexpected(program, &rows), [""; 0]),
            Err(obstacle) => tidegate_needs::skip(&program.name, obstacle),
        }
    }
    assert_eq!(own_namespaces(), [""; 0]);
}

/// Every program, or with `TIDEGATE_PROGRAMS` the ones whose names contain one of its words,
/// separated by commas. The rows of other programs stay in the table.
#[test]
#[ignore = "takes a quarter of an hour: make programs"]
fn every_program_runs() {
    assert!(is_root("program_table"), "network namespaces need root");
    let wanted = std::env::var("TIDEGATE_PROGRAMS").unwrap_or_default();
    let is_wanted = |program: &&Program| wanted.split(',').any(|word| program.name.contains(word));
    let all = description::all();
    let mut failures = Vec::new();
    for program in all.iter().filter(is_wanted) {
        eprintln!("== {}", program.name);
        let result = run(program);
        if let Ok(rows) = &result {
            rows.iter().for_each(|row| eprintln!("{row}"));
            failures.extend(unexpected(program, rows));
        }
        let mut table = page::read();
        table.insert(program.name.clone(), page::Entry::new(result));
        // After each program, so that an interrupted run keeps what it found.
        page::write(&all, table);
    }
    failures.extend(own_namespaces());
    assert!(failures.is_empty(), "not as expected:\n{}", failures.join("\n"));
}
