//! Provenance of a result: command, commit, date, machine and duration.

use std::path::Path;
use std::process::Command;
use std::time::Duration;
use std::{env, fmt, fs};

use serde::{Deserialize, Serialize};
use tidegate_program::BUILD_ID;

use crate::report::Experiment;
use crate::stats::round_to_hundredths;
use crate::testbed::cpu;

/// Parts of the tree that the programs are built from, as git names them from any folder.
const SOURCES: [&str; 3] = [":/crates", ":/Cargo.toml", ":/Cargo.lock"];
/// Commit of a program outside a git tree.
const UNKNOWN_COMMIT: &str = "unknown";

/// Command, commit, date, machine and duration of a run.
#[derive(Clone, Debug, Serialize)]
pub struct Provenance {
    /// Command line that repeats the run, without the files of its results.
    pub command: String,
    /// Last commit that changed the sources, shortened; `, changed` follows if the tree has
    /// changes to them. `unknown` outside a git tree.
    pub commit: String,
    /// Build id of the programs.
    pub build: &'static str,
    /// Time of the end of the run: UTC, RFC 3339.
    pub date: String,
    /// Machine of the run.
    pub machine: MachineDescription,
    /// Duration of the run in seconds.
    pub wall_seconds: f64,
}

/// Description of the machine of a run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct MachineDescription {
    /// Number of cores that this process may use.
    pub cores: usize,
    /// Model of the processor.
    pub cpu: String,
    /// Memory in bytes.
    pub memory_bytes: u64,
    /// Release of the kernel.
    pub kernel: String,
}

/// A result with its provenance, as it is written to a file.
#[derive(Debug, Serialize)]
pub struct RecordedExperiment<'a> {
    #[serde(flatten)]
    provenance: &'a Provenance,
    #[serde(flatten)]
    result: &'a Experiment,
}

impl Provenance {
    /// Provenance of a run of this process that took `duration`.
    pub fn of_this_run(duration: Duration) -> Self {
        let arguments = env::args_os().skip(1);
        let arguments: Vec<String> =
            arguments.map(|argument| argument.to_string_lossy().into_owned()).collect();
        Self {
            command: command_line(&arguments),
            commit: source_commit().unwrap_or_else(|| UNKNOWN_COMMIT.to_owned()),
            build: BUILD_ID,
            date: jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string(),
            machine: MachineDescription::read(),
            wall_seconds: round_to_hundredths(duration.as_secs_f64()),
        }
    }

    /// The result with this provenance.
    pub fn record<'a>(&'a self, result: &'a Experiment) -> RecordedExperiment<'a> {
        RecordedExperiment { provenance: self, result }
    }
}

/// Command line of a user for these arguments of the laboratory.
fn command_line(arguments: &[String]) -> String {
    // `tidegate` starts the laboratory for both of its commands.
    let is_demo = arguments.first().is_some_and(|argument| argument == "demo");
    let mut line = if is_demo { "tidegate" } else { "tidegate lab" }.to_owned();
    let mut arguments = arguments.iter();
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--json" | "--svg" => {
                arguments.next();
            }
            file if file.starts_with("--json=") || file.starts_with("--svg=") => {}
            argument => {
                line.push(' ');
                line.push_str(&quote(argument));
            }
        }
    }
    line
}

/// An argument as a shell reads it.
fn quote(argument: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_=+,.:/@%".contains(c);
    if !argument.is_empty() && argument.chars().all(is_plain) {
        return argument.to_owned();
    }
    format!("'{}'", argument.replace('\'', r"'\''"))
}

/// Last commit that changed the sources of this program, by the git tree that its file is in.
fn source_commit() -> Option<String> {
    let program = env::current_exe().ok()?;
    let folder = program.parent()?;
    let commit = git(folder, &["log", "-1", "--format=%h"])?;
    let changes = git(folder, &["status", "--porcelain"])?;
    let suffix = if changes.is_empty() { "" } else { ", changed" };
    (!commit.is_empty()).then(|| format!("{commit}{suffix}"))
}

/// Output of a git command on the sources, if it succeeds.
fn git(folder: &Path, arguments: &[&str]) -> Option<String> {
    let mut command = Command::new("git");
    let command = command.arg("-C").arg(folder).args(arguments).arg("--").args(SOURCES);
    let output = command.output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

impl MachineDescription {
    fn read() -> Self {
        let cpu_info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let memory_info = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let memory = value_of(&memory_info, "MemTotal").unwrap_or_default();
        let memory_kib = memory.trim_end_matches("kB").trim().parse::<u64>().unwrap_or(0);
        Self {
            cores: cpu::available_cores(),
            cpu: value_of(&cpu_info, "model name").unwrap_or("unknown").to_owned(),
            memory_bytes: memory_kib * 1024,
            kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
        }
    }
}

impl fmt::Display for MachineDescription {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { cores, cpu, memory_bytes, kernel } = self;
        let memory_gib = (*memory_bytes as f64 / f64::from(1 << 30)).round();
        write!(f, "{cores} cores of {cpu}, {memory_gib} GiB of memory, Linux {kernel}")
    }
}

/// Value of the first line `key: value` of a file of /proc.
fn value_of<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    let mut pairs = text.lines().filter_map(|line| line.split_once(':'));
    pairs.find(|(name, _)| name.trim() == key).map(|(_, value)| value.trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_repeats_the_run_without_its_files() {
        let line = |arguments: &[&str]| {
            let arguments: Vec<String> = arguments.iter().map(|&one| one.to_owned()).collect();
            command_line(&arguments)
        };
        assert_eq!(
            line(&["livelock", "--json", "a b.json", "--quick", "--svg=x.svg"]),
            "tidegate lab livelock --quick"
        );
        assert_eq!(line(&["demo", "--json=-"]), "tidegate demo");
        assert_eq!(line(&["router", "--only", "it's"]), r"tidegate lab router --only 'it'\''s'");
        assert_eq!(line(&["mlfrr", "--target", ""]), "tidegate lab mlfrr --target ''");
    }

    #[test]
    fn reads_values_of_proc() {
        let text = "processor\t: 0\nmodel name\t: Some CPU: fast\nmodel name\t: other\n";
        assert_eq!(value_of(text, "model name"), Some("Some CPU: fast"));
        assert_eq!(value_of("MemTotal:   16 kB\n", "MemTotal"), Some("16 kB"));
        assert_eq!(value_of("", "MemTotal"), None);
    }

    #[test]
    fn recorded_result_keeps_its_keys() {
        let mut result = Experiment::new("echo-cost");
        result.figure("ns_per_packet", 40.0);
        let provenance = Provenance::of_this_run(Duration::from_millis(1_500));
        let json = serde_json::to_value(provenance.record(&result)).unwrap();
        assert_eq!(json["experiment"], "echo-cost");
        assert_eq!(json["figures"]["ns_per_packet"], 40.0);
        assert!(json["rows"].is_array() && json["notes"].is_array());
        assert_eq!(json["wall_seconds"], 1.5);
        assert!(json["command"].as_str().unwrap().starts_with("tidegate lab"));
        assert!(json["date"].as_str().unwrap().ends_with('Z'));
        assert!(json["machine"]["cores"].as_u64().unwrap() > 0);
        assert!(json["machine"]["memory_bytes"].as_u64().unwrap() > 0);
        assert!(!json["machine"]["kernel"].as_str().unwrap().is_empty());
        assert!(!json["commit"].as_str().unwrap().is_empty());
    }
}
