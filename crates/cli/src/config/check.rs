//! `tidegate check`: checks a configuration file without starting anything.

use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::json;
use tidegate_apps::filter::FilterRules;

use super::schema::schema;
use super::{admission, merge_file, read_table, requests, transmit_classes};
use crate::Failure;
use crate::gate::GateOptions;
use crate::host::{HostOptions, IoKind};
use crate::output::print_line;
use crate::{router, serve};

/// Flags of `check`.
#[derive(Args)]
#[command(after_help = "\
Checks what the file alone can say: the keys, their values, zone files and folders that the file \
names. Flags may add what is missing, so that a missing interface or address is no error.")]
pub(crate) struct CheckCommand {
    /// Configuration file of a server, a daemon, a guard or a router, or the rules of a filter
    #[arg(value_name = "FILE", required_unless_present = "schema")]
    file: Option<PathBuf>,
    /// Print the JSON schema of configuration files, for an editor that checks TOML, instead
    #[arg(long, conflicts_with_all = ["file", "json"])]
    schema: bool,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

/// Check of a section, or of a file.
type Check = fn(&Path) -> Result<(), Failure>;

/// Checks of the sections of a server's file.
const SECTIONS: [(&str, Check); 9] = [
    ("host", check_host),
    ("gate", check_gate),
    ("admission", check_admission),
    ("requests", |path| requests(Some(path)).map(drop)),
    ("transmit", |path| transmit_classes(Some(path)).map(drop)),
    ("dns", serve::check_dns),
    ("http", serve::check_http),
    ("nfs", serve::check_nfs),
    ("echo", serve::check_echo),
];

impl CheckCommand {
    pub(crate) fn run(self) -> Result<(), Failure> {
        let Some(file) = self.file else {
            print_line!("{:#}", schema()?)?;
            return Ok(());
        };
        let (kind, problems) = match check(&file) {
            Ok((kind, problems)) => (Some(kind), problems),
            Err(error) => (None, vec![error.to_string()]),
        };
        if self.json {
            let file = file.display().to_string();
            print_line!("{}", json!({ "file": file, "kind": kind, "problems": problems }))?;
        } else if let (Some(kind), true) = (kind, problems.is_empty()) {
            print_line!("{}: {kind}, no error", file.display())?;
        }
        if problems.is_empty() { Ok(()) } else { Err(problems.join("\n").into()) }
    }
}

/// Kind of the file, and its errors.
fn check(path: &Path) -> Result<(&'static str, Vec<String>), Failure> {
    let table = read_table(path)?;
    let whole = |kind, check: Check| {
        (kind, check(path).err().map(|error| error.to_string()).into_iter().collect())
    };
    if table.contains_key("router") {
        return Ok(whole("configuration of a router", router::check_file));
    }
    if table.contains_key("rule") || table.contains_key("default") {
        return Ok(whole("rules of a filter", check_rules));
    }
    // Keys of unknown sections are the error of every section.
    super::read(path)?;
    let given = SECTIONS.iter().filter(|(name, _)| table.contains_key(*name));
    let problems = given.filter_map(|(_, check)| check(path).err());
    Ok(("configuration of a server", problems.map(|error| error.to_string()).collect()))
}

fn check_host(path: &Path) -> Result<(), Failure> {
    let host = merge_file(HostOptions::default(), Some(path))?;
    if host.io_kind() == IoKind::Kernel {
        return Ok(());
    }
    host.host_config().map(drop)
}

fn check_gate(path: &Path) -> Result<(), Failure> {
    let gate = merge_file(GateOptions::default(), Some(path))?;
    let settings = gate.settings();
    settings
        .map(drop)
        .map_err(|error| format!("{}: section [gate]: {error}", path.display()).into())
}

fn check_admission(path: &Path) -> Result<(), Failure> {
    let Some(classes) = admission(false, Some(path))? else { return Ok(()) };
    tidegate_gate::admission::Admission::new(&classes, [0; 16])
        .map(drop)
        .map_err(|error| format!("{}: section [admission]: {error}", path.display()).into())
}

fn check_rules(path: &Path) -> Result<(), Failure> {
    let text = std::fs::read_to_string(path)?;
    let rules = text.parse::<FilterRules>();
    rules.map(drop).map_err(|error| format!("{}: {error}", path.display()).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(text: &str) -> Result<(&'static str, Vec<String>), String> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        check(file.path()).map_err(|error| error.to_string())
    }

    #[test]
    fn every_error_of_a_servers_file_is_reported() {
        let (kind, problems) =
            checked("[gate]\nlow-mark-percent = 99\n[host]\nvlan = 'x'\n").unwrap();
        assert_eq!(kind, "configuration of a server");
        assert_eq!(problems.len(), 2, "{problems:?}");
        assert!(problems[0].contains("[host]") && problems[1].contains("[gate]"), "{problems:?}");
        assert_eq!(checked("[gate]\nreceive-quota = 32\n").unwrap().1, [""; 0]);
        assert_eq!(checked("").unwrap().1, [""; 0]);
    }

    #[test]
    fn unknown_section_and_bad_toml_are_errors() {
        assert!(checked("[gaet]\n").unwrap_err().contains("gaet"));
        assert!(checked("[gate\n").is_err());
        assert!(check(Path::new("no-such.toml")).unwrap_err().to_string().contains("no-such.toml"));
    }

    #[test]
    fn files_of_router_and_filter_are_recognized() {
        let (kind, problems) = checked("[router]\nio = ['xdp:a']\n").unwrap();
        assert_eq!((kind, problems.len()), ("configuration of a router", 1));
        let interfaces = "[router]\nio = ['xdp:a,10.0.0.1/24', 'xdp:b,10.0.1.1/24']\n";
        assert_eq!(checked(interfaces).unwrap().1, [""; 0]);
        let (kind, problems) = checked("default = 'allow'\n").unwrap();
        assert_eq!((kind, problems.len()), ("rules of a filter", 0), "{problems:?}");
    }
}
