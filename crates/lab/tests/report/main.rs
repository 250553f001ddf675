//! The report of the papers: what it measures and keeps, and how the page looks in a browser.

#[path = "../support/mod.rs"]
mod support;

use std::path::Path;
use std::process::Command;

use serde_json::Value;
use support::{fails_with, has_programs, is_root};

/// Page that loads another page in a frame and writes down the parts of it that overlap.
const LAYOUT_CHECK: &str = include_str!("layout_check.html");
/// Widths of a phone and of a desk, in pixels.
const WIDTHS: [u32; 2] = [400, 1_400];

/// Runs `tidegate-lab report` and returns what it printed on standard error, and `report.json`.
fn report(page: &Path, arguments: &[&str]) -> (String, Value) {
    let page_text = page.display().to_string();
    let output = support::run(&[&["report", "--out", &page_text], arguments].concat());
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{error}");
    let json = std::fs::read_to_string(page.with_extension("json")).unwrap();
    (error, serde_json::from_str(&json).unwrap())
}

/// Charts of a page, and what overlaps or does not fit at this width.
fn check_layout(page: &Path, width: u32) -> (usize, Vec<String>) {
    let folder = tempfile::tempdir().unwrap();
    let check = folder.path().join("check.html");
    let text = LAYOUT_CHECK
        .replace("PAGE", &format!("file://{}", page.display()))
        .replace("WIDTH", &width.to_string());
    std::fs::write(&check, text).unwrap();
    let mut browser = Command::new("chromium");
    browser.args(["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]);
    browser.args(["--allow-file-access-from-files", "--virtual-time-budget=60000"]);
    browser.arg(format!("--user-data-dir={}", folder.path().display()));
    let output = browser.arg(format!("file://{}", check.display())).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let result =
        text.split("<pre id=\"found\">").nth(1).and_then(|rest| rest.split("</pre>").next());
    let error = String::from_utf8_lossy(&output.stderr);
    let mut lines = result.unwrap_or_else(|| panic!("no result in {text}: {error}")).lines();
    let charts = lines.next().and_then(|line| line.strip_suffix(" charts")?.parse().ok());
    (charts.unwrap_or_else(|| panic!("{text}: {error}")), lines.map(str::to_owned).collect())
}

fn assert_fits(page: &Path, charts: usize) {
    for width in WIDTHS {
        let (found, problems) = check_layout(page, width);
        assert!(problems.is_empty(), "{width} pixels: {problems:#?}");
        assert_eq!(found, charts, "charts at {width} pixels");
    }
}

#[test]
fn report_shows_each_entry_and_measures_only_what_is_missing() {
    if !is_root("report_shows_each_entry_and_measures_only_what_is_missing") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let page = folder.path().join("report.html");
    let (said, json) = report(&page, &["--quick", "--only", "receive-trace,papers-livelock"]);
    assert!(said.contains("2 experiments, about"), "{said}");
    assert!(said.contains("tidegate lab receive-trace --quick (1 of 2"), "{said}");
    let rows = json["rows"].as_array().unwrap();
    let trace = rows.iter().find(|row| row["id"] == "rivera-trace").unwrap();
    assert_eq!(trace["state"], "reproduced", "{trace}");
    for side in ["paper", "kernel", "tidegate"] {
        assert!(!trace[side].as_array().unwrap().is_empty(), "{side}: {trace}");
    }
    assert!(trace["holds"].is_boolean() && trace["ratio"].as_f64() > Some(0.0), "{trace}");
    assert_eq!(json["figures"]["reproduced"], 1.0, "{json}");
    assert_eq!(json["figures"]["missing"], rows.len() as f64 - 1.0);
    let missing = rows.iter().find(|row| row["id"] == "rivera-2.1").unwrap();
    assert_eq!(missing["reason"], "no result of concurrent-reads");

    let old = page.with_extension("json").display().to_string();
    let second = folder.path().join("second.html");
    let results = page.with_extension("results").display().to_string();
    let (said, json) = report(&second, &["--keep", "--results", &results, "--compare", &old]);
    assert!(!said.contains("=="), "nothing is measured: {said}");
    assert_eq!(json["figures"]["compared_entries"], 1.0, "{json}");
    assert_eq!(json["figures"]["slower_entries"], 0.0, "{json}");
    let text = std::fs::read_to_string(&second).unwrap();
    assert!(!text.contains("<script") && !text.contains("src=\"http"), "the page loads nothing");
    if has_programs("report in a browser", &["chromium"]) {
        // Of each entry what was published in numbers; of one what was measured.
        let published = |row: &&Value| {
            row["paper"].as_array().unwrap().iter().any(|point| point["y"].is_number())
        };
        assert_fits(&second, rows.iter().filter(published).count() + 1);
    }
}

#[test]
fn unknown_experiment_and_report_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let page = folder.path().join("report.html").display().to_string();
    fails_with(&["report", "--out", &page, "--only", "others"], &["others", "concurrent-reads"]);
    let file = folder.path().join("old.json");
    std::fs::write(&file, "{\"experiment\": \"dns\"}").unwrap();
    let file = file.display().to_string();
    fails_with(&["report", "--out", &page, "--keep", "--compare", &file], &["no report.json"]);
}
