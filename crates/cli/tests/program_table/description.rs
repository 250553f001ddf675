//! Descriptions of programs, read from the TOML files of this folder.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::case::Placement;
use crate::scripts;
use crate::support::has_programs;

/// Description of a program. All scripts are bash, see [`scripts::ProgramFolder`] for their environment;
/// the same variables are replaced in `files`, `start` and `daemon`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Program {
    pub name: String,
    /// Name of the client and what it transfers.
    pub client: String,
    /// Commands without which the program cannot run.
    #[serde(default)]
    pub needs: Vec<String>,
    /// Script that fetches what no package has into `$CACHE`; runs once.
    pub fetch: Option<String>,
    /// Script that prints the version.
    pub version: String,
    /// Further variables.
    #[serde(default)]
    pub variables: BTreeMap<String, String>,
    /// Configuration files in `$ROOT`.
    #[serde(default)]
    pub files: BTreeMap<String, String>,
    /// Script that runs before the program.
    pub prepare: Option<String>,
    /// Command line of the program.
    pub start: String,
    /// Command line of another server, which runs on the client's kernel.
    pub backend: Option<String>,
    /// Further flags of the daemon.
    #[serde(default)]
    pub daemon: Vec<String>,
    /// True for a program that listens only on addresses that it finds on an interface.
    #[serde(default)]
    pub finds_addresses: bool,
    /// TCP port on which the program listens.
    pub port: u16,
    /// Script of the client that succeeds when the program serves.
    pub ready: Option<String>,
    /// Script of the client that prints `$ROOT/data`, moved through the program, or what the
    /// file `$ROOT/expected` has if `prepare` made one.
    pub transfer: String,
    /// Script that makes the program reload and returns when it has.
    #[serde(default)]
    pub reload: String,
    /// Number of reloads by each family.
    #[serde(default = "three_reloads")]
    pub reloads: usize,
    /// Name of the reload for the table.
    #[serde(default)]
    pub reload_by: String,
    /// Script of the client that makes some requests and prints how many were lost and made.
    #[serde(default)]
    pub load: String,
    /// Script of the client whose connection is open before the first reload and ends well. The
    /// file `$ROOT/reloaded` exists after the last reload.
    #[serde(default)]
    pub in_flight: String,
    /// Script that ends the program.
    #[serde(default = "stop_by_signal")]
    pub stop: String,
    /// Reasons for which the program does not work: by placement.
    #[serde(default)]
    pub fails: BTreeMap<Placement, String>,
}

fn three_reloads() -> usize {
    3
}

fn stop_by_signal() -> String {
    "kill -TERM $PID".to_owned()
}

const FILES: [&str; 4] = [
    include_str!("web.toml"),
    include_str!("runtimes.toml"),
    include_str!("stores.toml"),
    include_str!("names.toml"),
];

/// All descriptions, in the order of the table. A description with `like` has everything else
/// from the description of that name.
pub fn all() -> Vec<Program> {
    let mut all: Vec<toml::Table> = Vec::new();
    for text in FILES {
        let mut file: toml::Table = text.parse().unwrap();
        let Some(toml::Value::Array(programs)) = file.remove("program") else { panic!() };
        for program in programs {
            let toml::Value::Table(mut program) = program else { panic!() };
            if let Some(name) = program.remove("like") {
                let mut whole = all.iter().find(|other| other["name"] == name).unwrap().clone();
                whole.extend(program);
                program = whole;
            }
            all.push(program);
        }
    }
    all.into_iter().map(|program| program.try_into().unwrap()).collect()
}

/// Folder of what `fetch` has fetched.
pub fn cache() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join("programs")
}

impl Program {
    /// Reason for which the program cannot run on this machine, if there is one.
    pub fn obstacle(&self) -> Option<String> {
        let needs = self.needs.iter().map(String::as_str);
        for program in needs.chain(["bash", "curl", "sha256sum"]) {
            if !has_programs(&self.name, &[program]) {
                return Some(format!("{program} is not installed"));
            }
        }
        std::fs::create_dir_all(cache()).unwrap();
        let fetched = self.fetch.as_ref().map(|script| scripts::run_plain(script, &cache()));
        fetched?.err().map(|error| format!("cannot be fetched: {error}"))
    }

    pub fn version(&self) -> String {
        let printed = scripts::run_plain(&self.version, &cache());
        printed.unwrap_or_else(|error| panic!("{}: {error}", self.name)).trim().to_owned()
    }

    pub fn expected_failure(&self, placement: Placement) -> Option<&str> {
        self.fails.get(&placement).map(String::as_str)
    }
}
