//! docs/benchmarks.md and the numbers of README.md are those of the results in docs/benchmarks.

use std::path::Path;

use tidegate_lab::summary::Summary;

#[test]
fn page_and_readme_have_the_figures_of_the_results() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let report = Summary::new(root).check().unwrap();
    assert!(report.problems.is_empty(), "{}", report.problems.join("\n"));
}
