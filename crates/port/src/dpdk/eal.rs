//! DPDK itself (the "environment abstraction layer"), once in a process.

use std::fs;
use std::path::Path;
use std::sync::OnceLock;

use super::{DpdkError, Said, sys};

/// How it was started, or why it was not.
static STARTED: OnceLock<Result<Vec<String>, (String, Said)>> = OnceLock::new();

/// Starts DPDK unless it runs.
pub fn start(arguments: &[String]) -> Result<(), DpdkError> {
    let started = STARTED.get_or_init(|| {
        let all = with_defaults(arguments, has_hugepages());
        if !is_given(arguments, "--log-level") {
            sys::keep_log();
        }
        match sys::start(&all) {
            Ok(()) => Ok(arguments.to_vec()),
            Err(_) => Err((all.join(" "), Said(sys::take_log()))),
        }
    });
    match started {
        Ok(first) if arguments.is_empty() || first == arguments => Ok(()),
        Ok(_) => Err(DpdkError::Started),
        Err((arguments, said)) => {
            Err(DpdkError::Start { arguments: arguments.clone(), said: said.clone() })
        }
    }
}

/// Memory where there are no hugepages, in MiB; it is used as it is needed.
const MEMORY_MIB: &str = "512";

/// The arguments, and behind them what suits a library, where it is not said.
fn with_defaults(arguments: &[String], has_hugepages: bool) -> Vec<String> {
    let mut all = arguments.to_vec();
    let given = |names: &[&str]| names.iter().any(|name| is_given(arguments, name));
    let mut add = |names: &[&str], words: &[&str]| {
        if !given(names) {
            all.extend(words.iter().map(|&word| word.to_owned()));
        }
    };
    add(&["--log-level"], &["--log-level=error"]);
    add(&["--no-telemetry", "--telemetry"], &["--no-telemetry"]);
    // The calling thread stays where it may run, and there is no other.
    let processors = processors();
    if let Some(processors) = processors {
        add(&["--lcores", "-l", "-c"], &[&format!("--lcores=0@({processors})")]);
    }
    // Only the devices that are asked for: this is no card's address.
    add(&["-a", "--allow", "-b", "--block", "--no-pci"], &["--allow=0000:00:00.0"]);
    let ordinary = given(&["--no-huge"]) || !has_hugepages;
    if ordinary {
        add(&["--no-huge"], &["--no-huge"]);
        add(&["-m", "--socket-mem"], &["-m", MEMORY_MIB]);
        // No files for other processes; in hugepages that is --in-memory.
        add(&["--no-shconf"], &["--no-shconf"]);
    } else {
        add(&["--in-memory", "--legacy-mem", "--huge-dir"], &["--in-memory"]);
    }
    all
}

/// `--name`, `--name=value` and `-nvalue`.
fn is_given(arguments: &[String], name: &str) -> bool {
    arguments.iter().any(|argument| match argument.strip_prefix(name) {
        Some(rest) => rest.is_empty() || rest.starts_with('=') || !name.starts_with("--"),
        None => false,
    })
}

/// The processors of this thread, as `0-3,8`.
fn processors() -> Option<String> {
    let status = fs::read_to_string("/proc/thread-self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
    Some(line.trim().to_owned())
}

/// Whether the system has hugepages that nobody uses.
pub fn has_hugepages() -> bool {
    let Ok(sizes) = fs::read_dir("/sys/kernel/mm/hugepages") else { return false };
    let free = |size: &Path| fs::read_to_string(size.join("free_hugepages")).ok();
    let mut counts = sizes.flatten().filter_map(|size| free(&size.path())?.trim().parse().ok());
    counts.any(|count: u64| count > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(given: &str, has_hugepages: bool) -> String {
        let given: Vec<_> = given.split_whitespace().map(str::to_owned).collect();
        with_defaults(&given, has_hugepages).join(" ")
    }

    #[test]
    fn what_is_given_wins() {
        assert!(all("-l 1", true).starts_with("-l 1 --log-level"));
        assert!(!all("-l1", true).contains("lcores"));
        assert!(!all("--lcores=0@1", true).contains("@("));
        assert!(!all("--log-level=pmd:debug", true).contains("error"));
        assert!(all("--legacy-mem", true).contains("--allow"));
        assert!(!all("--legacy-mem", true).contains("--in-memory"));
        assert_eq!(all("-m 64", false).matches("-m ").count(), 1);
    }

    #[test]
    fn memory_is_ordinary_where_there_are_no_hugepages() {
        assert!(all("", true).contains("--in-memory") && !all("", true).contains("--no-huge"));
        assert!(all("", false).contains("--no-huge -m 512"));
        assert!(!all("--no-huge", true).contains("--in-memory"));
    }
}
