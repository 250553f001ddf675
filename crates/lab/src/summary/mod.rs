//! The page of all results, docs/benchmarks.md: made of a template and of the results that are
//! checked in, those of the report in docs/report/report.json and others under docs/benchmarks.
//! Numbers of the other pages are compared with the same results; those of README.md come from the
//! report.

mod marked_numbers;
mod results;

use std::fs;
use std::path::{Path, PathBuf};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Value;
use minijinja::{Environment, UndefinedBehavior};

use crate::LabError;
use crate::report::expressions;
use results::Results;

/// Name of the template in errors.
const TEMPLATE_NAME: &str = "docs/benchmarks.template.md";

const README: &str = "README.md";

/// Files of the page, from the root of the tree.
#[derive(Clone, Debug)]
pub struct Summary {
    root: PathBuf,
}

/// State of the page and of the numbers of the other pages.
#[derive(Clone, Debug, PartialEq)]
pub struct SummaryReport {
    /// The page, as the template and the results give it.
    pub page: String,
    /// Errors: a page that is out of date, a wrong number in another page.
    pub problems: Vec<String>,
    /// Facts that the page itself states, such as results of several commits, and numbers of other
    /// pages without a result.
    pub warnings: Vec<String>,
}

impl Summary {
    /// The page of the tree at `root`.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// Path of the page.
    pub fn page_path(&self) -> PathBuf {
        self.root.join("docs/benchmarks.md")
    }

    fn read(path: &Path) -> Result<String, LabError> {
        fs::read_to_string(path).map_err(LabError::file(path))
    }

    /// Renders the page, and compares it and the numbers of other pages with what is checked in.
    ///
    /// # Errors
    /// If a file cannot be read, a result is not one of an experiment, or the template names a
    /// figure or a row that a result lacks.
    pub fn check(&self) -> Result<SummaryReport, LabError> {
        let results = Results::read(&self.root.join("docs"))?;
        let environment = environment();
        let context = results.context();
        let template = Self::read(&self.root.join(TEMPLATE_NAME))?;
        let page = environment
            .render_named_str(TEMPLATE_NAME, &template, &context)
            .map_err(|error| template_error(&error))?;
        let mut problems = Vec::new();
        // A page that is missing is out of date too.
        if fs::read_to_string(self.page_path()).ok().as_ref() != Some(&page) {
            problems.push(
                "docs/benchmarks.md is not what its template and the results give: run \
                 `tidegate-lab summary`"
                    .to_owned(),
            );
        }
        let mut warnings = results.warnings();
        let of_report = results.context_of_report();
        for name in self.other_pages()? {
            let text = Self::read(&self.root.join(&name))?;
            let context = if name == README { &of_report } else { &context };
            let found = (&mut problems, &mut warnings);
            marked_numbers::compare(&name, &text, &environment, context, found);
        }
        Ok(SummaryReport { page, problems, warnings })
    }

    /// README.md and the pages under docs but that of the results, from the root, in order.
    fn other_pages(&self) -> Result<Vec<String>, LabError> {
        let folder = self.root.join("docs");
        let mut pages = vec![README.to_owned()];
        for entry in fs::read_dir(&folder).map_err(LabError::file(&folder))? {
            let name = entry.map_err(LabError::file(&folder))?.file_name();
            let Some(name) = name.to_str() else { continue };
            if name.ends_with(".md") && !name.starts_with("benchmarks.") {
                pages.push(format!("docs/{name}"));
            }
        }
        pages.sort();
        Ok(pages)
    }
}

/// Template engine with the filters and functions of the page.
fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    // An unknown figure is an error, not an empty cell.
    environment.set_undefined_behavior(UndefinedBehavior::Strict);
    let mut syntax = SyntaxConfig::builder();
    syntax.trim_blocks(true).lstrip_blocks(true).keep_trailing_newline(true);
    // Only delimiters can be invalid, and these are the default ones.
    environment.set_syntax(syntax.build().unwrap_or_default());
    expressions::add(&mut environment);
    environment
}

/// An error of the template with its line and causes.
fn template_error(error: &minijinja::Error) -> LabError {
    let mut message = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        message.push_str(&format!(": {cause}"));
        source = cause.source();
    }
    LabError::Config(message)
}

/// Text of a value as the page shows it.
fn text_of(value: &Value) -> String {
    value.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    const RESULT: &str = r#"{
        "experiment": "dns", "command": "tidegate lab dns", "commit": "abc1234",
        "date": "2026-11-25T21:00:00Z", "wall_seconds": 60.5,
        "machine": {"cores": 2, "cpu": "Some CPU", "memory_bytes": 8589934592, "kernel": "6.18"},
        "figures": {"qps_ratio": 1.671, "tidegate_qps": 388123.0},
        "rows": [{"server": "tidegate-xdp", "qps": 388123}, {"server": "nsd", "qps": 174000}],
        "notes": [],
        "comparisons": [{"figure": "qps_ratio", "kernel_best": "kernel-rps",
            "kernel_rows": {"kernel-rps": 232000.0, "kernel-thread": 100.0}}]
    }"#;

    struct Tree(tempfile::TempDir);

    impl Tree {
        fn new(template: &str, readme: &str, results: &[(&str, &str)]) -> Self {
            let tree = Self(tempfile::tempdir().unwrap());
            fs::create_dir_all(tree.0.path().join("docs/benchmarks")).unwrap();
            tree.write("docs/benchmarks.template.md", template);
            tree.write("README.md", readme);
            for (name, text) in results {
                tree.write(&format!("docs/benchmarks/{name}.json"), text);
            }
            tree
        }

        /// Writes a report with one result.
        fn report(&self, name: &str, result: &str) {
            fs::create_dir_all(self.0.path().join("docs/report")).unwrap();
            let text = format!(r#"{{"experiment": "report", "results": {{"{name}": {result}}}}}"#);
            self.write("docs/report/report.json", &text);
        }

        fn write(&self, path: &str, text: &str) {
            fs::write(self.0.path().join(path), text).unwrap();
        }

        fn check(&self) -> Result<SummaryReport, LabError> {
            Summary::new(self.0.path()).check()
        }
    }

    #[test]
    fn page_has_the_figures_and_rows_of_the_results() {
        let template = "\
{% if dns is defined %}
`{{ dns.command }}`: {{ dns.figures.qps_ratio | fixed }} times.
{% for row in dns.rows %}
| {{ row.server }} | {{ row.qps | thousands }} |
{% endfor %}
{{ row(dns, server='nsd').qps | k }}, {{ best(dns, 'qps', server=['nsd', 'tidegate-xdp']) | k }}
{{ kernel_best(dns, 'qps_ratio') | k }}
{% endif %}
{% if livelock is defined %}{{ livelock.figures.any }}{% else %}not measured{% endif %}

Commit {{ run.commit }}, {{ run.date }}, {{ run.machine }}.
";
        let tree = Tree::new(template, "", &[("dns", RESULT)]);
        let report = tree.check().unwrap();
        assert_eq!(
            report.page,
            "`tidegate lab dns`: 1.67 times.\n\
             | tidegate-xdp | 388,123 |\n| nsd | 174,000 |\n174, 388\n232\n\
             not measured\n\
             Commit abc1234, 2026-11-25, 2 cores of Some CPU, 8 GiB of memory, Linux 6.18.\n"
        );
        assert!(report.problems[0].contains("tidegate-lab summary"), "{report:?}");
        tree.write("docs/benchmarks.md", &report.page);
        assert_eq!(tree.check().unwrap().problems, Vec::<String>::new());
    }

    #[test]
    fn template_may_name_only_what_results_have() {
        let error = |template: &str| {
            Tree::new(template, "", &[("dns", RESULT)]).check().unwrap_err().to_string()
        };
        let unknown = error("\n{{ dns.figures.gone }}");
        assert!(unknown.contains("undefined") && unknown.contains(":2"), "{unknown}");
        assert!(error("{{ dns.figures.gone | fixed }}").contains("undefined"));
        assert!(
            error("{{ row(dns, server='bind').qps }}").contains("no row of dns has server=bind")
        );
        assert!(error("{{ row(dns).qps }}").contains("2 rows of dns"));
        assert!(error("{{ kernel_best(dns, 'rate') }}").contains("rate"));
        assert!(error("{{ best(dns, 'rate') }}").contains("rate"));
    }

    #[test]
    fn results_of_several_commits_are_named() {
        let other = RESULT.replace("abc1234", "def5678").replace("\"dns\"", "\"bulk\"");
        let template = "{{ run.exceptions | join('; ') }}\n";
        let quick = RESULT.replace("lab dns", "lab dns --quick");
        let results = [("dns", RESULT), ("dns-quick", quick.as_str()), ("bulk", other.as_str())];
        let report = Tree::new(template, "", &results).check().unwrap();
        assert_eq!(report.page, "`bulk`: commit def5678; `dns-quick`: a short run, `--quick`\n");
        assert_eq!(report.warnings.len(), 2);
        // The page without any result.
        let report = Tree::new("{% if run %}x{% endif %}\n", "", &[]).check().unwrap();
        assert_eq!(report.page, "");
    }

    #[test]
    fn results_must_be_of_their_experiment() {
        let error = |name: &str, text: &str| {
            Tree::new("", "", &[(name, text)]).check().unwrap_err().to_string()
        };
        assert!(error("nsd", RESULT).contains("nsd.json"));
        assert!(error("nsd", RESULT).contains("experiment dns"));
        assert!(error("dns", "{}").contains("dns.json"));
        assert!(error("dns", "[").contains("dns.json"));
    }

    #[test]
    fn readme_has_the_numbers_of_the_results() {
        let readme = "\
# Title
| DNS | 388,123 | 1.67 | <!-- figures: thousands(dns.figures.tidegate_qps); fixed(dns.figures.qps_ratio) -->
| flood | 12 | <!-- figures: k(livelock.figures.any) -->
";
        let check = |readme: &str| {
            let tree = Tree::new("", readme, &[]);
            tree.report("dns", RESULT);
            tree.check().unwrap()
        };
        let report = check(readme);
        assert_eq!(report.problems.len(), 1, "only the page: {report:?}");
        assert_eq!(report.warnings, ["README.md:3: no result for k(livelock.figures.any)"]);
        let report = check(&readme.replace("1.67", "11.671"));
        assert!(report.problems[1].starts_with("README.md:2: 1.67 is missing"), "{report:?}");
        let report = check(&readme.replace("qps_ratio", "gone"));
        assert!(report.problems[1].contains("README.md:2"), "{report:?}");
    }

    #[test]
    fn readme_has_numbers_of_the_report_alone_and_pages_of_any_result() {
        let line = "| DNS | 388,123 | <!-- figures: thousands(dns.figures.tidegate_qps) -->\n";
        let tree = Tree::new("", line, &[("dns", RESULT)]);
        tree.write("docs/dns.md", &line.replace("388,123", "388,124"));
        let report = tree.check().unwrap();
        assert_eq!(
            report.warnings,
            ["README.md:1: no result for thousands(dns.figures.tidegate_qps)"]
        );
        assert!(report.problems[1].starts_with("docs/dns.md:1: 388,123 is missing"), "{report:?}");
    }

    #[test]
    fn result_is_in_the_report_or_beside_it() {
        let tree = Tree::new("{{ dns.figures.qps_ratio | fixed }}\n", "", &[]);
        tree.report("dns", RESULT);
        assert_eq!(tree.check().unwrap().page, "1.67\n");
        tree.write("docs/benchmarks/dns.json", RESULT);
        let error = tree.check().unwrap_err().to_string();
        assert!(error.contains("docs/benchmarks/dns.json"), "{error}");
    }
}
