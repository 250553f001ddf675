//! Checks that the commands and the configuration in the README work.

use std::path::Path;
use std::process::Command;

fn readme() -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    std::fs::read_to_string(root.join("README.md")).unwrap()
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
    let makefile =
        std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../Makefile"));
    let makefile = makefile.unwrap();
    let text = readme();
    let mut seen = 0;
    for line in blocks(&text, "sh") {
        let command = line.split('#').next().unwrap_or_default().trim();
        if let Some(target) = command.strip_prefix("make ") {
            assert!(makefile.contains(&format!("\n{target}:")), "no target for: {line}");
        } else if let Some(arguments) = command.strip_prefix("target/release/tidegate ") {
            let output = Command::new(env!("CARGO_BIN_EXE_tidegate"))
                .args(arguments.split_whitespace())
                .output()
                .unwrap();
            let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(output.status.success(), "{line}: {stderr}");
        } else {
            panic!("README command without a test: {line}");
        }
        seen += 1;
    }
    assert!(seen >= 5, "only {seen} commands found in the README");
}

/// The configuration file in the README is valid: the only error is the missing zone file or
/// interface.
#[test]
fn the_configuration_file_is_valid() {
    let text = readme();
    let toml: Vec<_> = blocks(&text, "toml").collect();
    assert!(!toml.is_empty());
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
