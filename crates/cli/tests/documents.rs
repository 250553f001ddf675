//! Checks that the commands, the configuration files and the links in the documents work.

use std::path::{Path, PathBuf};
use std::process::Command;

use tidegate_apps::filter::FilterRules;
use tidegate_wire::DropReason;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn read(page: &str) -> String {
    std::fs::read_to_string(root().join(page)).unwrap()
}

/// Paths of all documents, from the root of the tree.
fn pages() -> Vec<String> {
    let docs = std::fs::read_dir(root().join("docs")).unwrap();
    let docs = docs.map(|entry| format!("docs/{}", entry.unwrap().file_name().to_str().unwrap()));
    let top = ["README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md"];
    let crates = std::fs::read_dir(root().join("crates")).unwrap();
    let crates = crates
        .map(|entry| format!("crates/{}/README.md", entry.unwrap().file_name().to_str().unwrap()));
    let pages = docs.filter(|page| page.ends_with(".md")).chain(top.map(str::to_owned));
    pages.chain(crates).collect()
}

/// Each page is in the book.
#[test]
fn book_has_every_page() {
    let summary = read("docs/SUMMARY.md");
    let docs = std::fs::read_dir(root().join("docs")).unwrap();
    let names = docs.map(|entry| entry.unwrap().file_name().to_str().unwrap().to_owned());
    for name in names.filter(|name| name.ends_with(".md")) {
        let is_source = matches!(name.as_str(), "SUMMARY.md" | "benchmarks.template.md");
        assert!(is_source || summary.contains(&format!("]({name})")), "{name} is not in the book");
    }
}

/// The page of drop reasons has the table of the code; `TIDEGATE_GOLDEN=write` writes the page.
#[test]
fn page_of_drop_reasons_is_that_of_the_code() {
    const PAGE: &str = "docs/drop-reasons.md";
    let page = read(PAGE);
    let (head, _) = page.split_once("|---|---|---|\n").unwrap();
    let rows = DropReason::ALL
        .iter()
        .map(|reason| format!("| `{reason}` | {} | {} |\n", reason.severity(), reason.sentence()));
    let made = format!("{head}|---|---|---|\n{}", rows.collect::<String>());
    if std::env::var("TIDEGATE_GOLDEN").is_ok_and(|value| value == "write") {
        std::fs::write(root().join(PAGE), &made).unwrap();
    } else {
        assert!(page == made, "{PAGE} is old: run this test with TIDEGATE_GOLDEN=write");
    }
}

/// Lines of all code blocks in one language.
fn blocks<'a>(text: &'a str, language: &'a str) -> impl Iterator<Item = &'a str> {
    let fence = format!("```{language}");
    let mut inside = false;
    text.lines().filter(move |line| {
        if line.starts_with("```") {
            inside = *line == fence;
            return false;
        }
        inside
    })
}

/// Make targets must exist; CI runs them. Commands of `tidegate` are run.
#[test]
fn shell_commands_work() {
    let makefile = read("Makefile");
    let mut seen = 0;
    for page in pages() {
        let text = read(&page);
        for line in blocks(&text, "sh") {
            let command = line.split('#').next().unwrap_or_default().trim();
            if let Some(target) = command.strip_prefix("make ") {
                assert!(makefile.contains(&format!("\n{target}:")), "{page}: no target: {line}");
            } else if let Some(arguments) = command.strip_prefix("target/release/tidegate ") {
                let output = Command::new(env!("CARGO_BIN_EXE_tidegate"))
                    .args(arguments.split_whitespace())
                    .output()
                    .unwrap();
                let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
                assert!(output.status.success(), "{page}: {line}: {stderr}");
            } else if !command.is_empty() {
                panic!("{page}: command without a test: {line}");
            }
            seen += 1;
        }
    }
    assert!(seen >= 12, "only {seen} commands found");
}

/// The configuration file is valid: the only error is the missing zone file.
#[test]
fn configuration_file_is_valid() {
    let pages = ["getting-started", "admission", "priorities"];
    let pages = pages.map(|page| read(&format!("docs/{page}.md")));
    let toml: Vec<_> = pages.iter().flat_map(|page| blocks(page, "toml")).collect();
    assert!(toml.contains(&"[host]") && toml.contains(&"[[admission.class]]"), "{toml:?}");
    assert!(toml.contains(&"[[transmit.class]]"), "{toml:?}");
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), toml.join("\n")).unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_tidegate"))
        .args(["serve", "dns", "--config"])
        .arg(file.path())
        .output()
        .unwrap();
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(error.contains("/etc/zones/example.org.zone"), "{error}");
}

#[test]
fn filter_rules_are_valid() {
    let text = read("docs/router-and-filter.md");
    let rules: Vec<_> = blocks(&text, "toml").collect();
    let rules: FilterRules = rules.join("\n").parse().unwrap();
    assert_eq!(rules.len(), 2);
}

/// Links to files of the tree lead somewhere, links to sections too.
#[test]
fn links_lead_to_files_and_sections() {
    for page in pages() {
        let text = read(&page);
        let links = text.split("](").skip(1).filter_map(|rest| rest.split(')').next());
        for link in links.filter(|link| !link.contains("://")) {
            let (path, section) = link.split_once('#').unwrap_or((link, ""));
            let folder = Path::new(&page).parent().unwrap();
            let target = if path.is_empty() { PathBuf::from(&page) } else { folder.join(path) };
            let found = root().join(&target);
            assert!(found.exists(), "{page}: {link} leads nowhere");
            if !section.is_empty() {
                let text = std::fs::read_to_string(&found).unwrap();
                let sections: Vec<_> = text.lines().filter_map(slug).collect();
                assert!(
                    sections.iter().any(|slug| slug == section),
                    "{page}: {link}: {sections:?}"
                );
            }
        }
    }
}

/// Paths of the tree in the text are those of files. The change log names files of its time.
#[test]
fn paths_are_those_of_files() {
    let folders = ["crates/", "docs/", "fuzz/", "packaging/", "scripts/", "suites/"];
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "/._-".contains(c);
    let mut count = 0;
    for page in pages().iter().filter(|page| *page != "CHANGELOG.md") {
        let text = read(page);
        let spans = text.split('`').skip(1).step_by(2);
        for path in spans.filter(|span| folders.iter().any(|folder| span.starts_with(folder))) {
            if path.chars().all(is_plain) {
                count += 1;
                assert!(root().join(path).exists(), "{page}: no {path}");
            }
        }
    }
    assert!(count > 100, "{count}");
}

/// Anchor of a heading, as in GitHub's pages; `None` for other lines.
fn slug(line: &str) -> Option<String> {
    let heading = line.strip_prefix('#')?.trim_start_matches('#').trim().to_lowercase();
    let kept = heading.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    Some(kept.map(|c| if c == ' ' { '-' } else { c }).collect())
}
