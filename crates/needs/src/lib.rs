//! The one way to skip a test: [`skip`] says what is missing. In CI only what `needs.toml` lists may
//! be missing, so that no test stops running unnoticed.

use std::fmt::Display;

/// Environment variable that `.ci/run` sets.
const CI: &str = "TIDEGATE_CI";

/// Needs that may be missing in CI.
const NEEDS: &str = include_str!("../needs.toml");

/// Announces that a test does not run: `need` is missing, as the test's own probe has found.
///
/// # Panics
/// In CI, unless `needs.toml` lists `need`.
pub fn skip(need: &str, finding: impl Display) {
    check(need, finding, std::env::var_os(CI).is_some());
}

fn check(need: &str, finding: impl Display, in_ci: bool) {
    eprintln!("skipped, needs {need}: {finding}");
    assert!(
        !in_ci || is_listed(need),
        "this test may not be skipped in CI: {finding}. Install or allow what is missing, or list \
         \"{need}\" with a reason in crates/needs/needs.toml"
    );
}

fn is_listed(need: &str) -> bool {
    listed().any(|(name, _)| name == need)
}

/// Names and reasons of all tables.
fn listed() -> impl Iterator<Item = (String, String)> {
    let tables: toml::Table = NEEDS.parse().expect("needs.toml is valid");
    tables.into_iter().flat_map(|(table, needs)| {
        let toml::Value::Table(needs) = needs else { panic!("{table} is a table") };
        needs.into_iter().map(|(name, reason)| {
            let reason = reason.as_str().expect("a reason is a sentence").to_owned();
            (name, reason)
        })
    })
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;

    #[test]
    fn ci_allows_only_listed_needs() {
        check("io_uring", "not permitted", true);
        let unlisted = std::panic::catch_unwind(|| check("root", "user 1000", true));
        let message = *unlisted.unwrap_err().downcast::<String>().unwrap();
        assert!(message.contains("user 1000") && message.contains("list \"root\""), "{message}");
    }

    #[test]
    fn elsewhere_every_need_may_be_missing() {
        check("root", "user 1000", false);
    }

    /// Adds the text of the Rust files in `folder` to `text`.
    fn add_sources(folder: &Path, text: &mut String) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                add_sources(&path, text);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                text.push_str(&fs::read_to_string(&path).unwrap());
            }
        }
    }

    #[test]
    fn each_listed_need_has_a_reason_and_a_test() {
        let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let mut sources = String::new();
        for package in fs::read_dir(crates).unwrap().map(|entry| entry.unwrap().path()) {
            if package.is_dir() && !package.ends_with("needs") {
                add_sources(&package, &mut sources);
            }
        }
        for (name, reason) in listed() {
            assert!(reason.ends_with('.'), "the reason for {name} is a sentence: {reason}");
            assert!(sources.contains(&format!("\"{name}\"")), "no test needs {name}");
        }
    }
}
