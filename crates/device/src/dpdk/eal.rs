//! DPDK's environment abstraction layer (EAL), started once per process.

use std::fs;
use std::path::Path;
use std::sync::OnceLock;

use super::{DpdkError, DpdkLog, sys};

/// Result of the start: the arguments given, or all arguments and DPDK's log.
static START_RESULT: OnceLock<Result<Vec<String>, (String, DpdkLog)>> = OnceLock::new();

/// Starts DPDK unless it is already running in this process.
pub fn start(arguments: &[String]) -> Result<(), DpdkError> {
    let started = START_RESULT.get_or_init(|| {
        let all = with_defaults(arguments, has_hugepages());
        if !is_given(arguments, "--log-level") {
            sys::capture_log();
        }
        match sys::start(&all) {
            Ok(()) => Ok(arguments.to_vec()),
            Err(_) => Err((all.join(" "), DpdkLog(sys::take_log()))),
        }
    });
    match started {
        Ok(first) if arguments.is_empty() || first == arguments => Ok(()),
        Ok(_) => Err(DpdkError::AlreadyStarted),
        Err((arguments, said)) => {
            Err(DpdkError::Start { arguments: arguments.clone(), log: said.clone() })
        }
    }
}

/// Memory without hugepages, in MiB; pages are allocated on first use.
const DEFAULT_MEMORY_MIB: &str = "512";

/// Appends defaults that suit a library to `arguments`, for options not given.
fn with_defaults(arguments: &[String], has_hugepages: bool) -> Vec<String> {
    let mut all = arguments.to_vec();
    let given = |names: &[&str]| names.iter().any(|name| is_given(arguments, name));
    let mut add_default = |names: &[&str], words: &[&str]| {
        if !given(names) {
            all.extend(words.iter().map(|&word| word.to_owned()));
        }
    };
    add_default(&["--log-level"], &["--log-level=error"]);
    add_default(&["--no-telemetry", "--telemetry"], &["--no-telemetry"]);
    // The calling thread keeps its CPU affinity, and DPDK starts no other worker thread.
    let allowed_cpus = allowed_cpus();
    if let Some(processors) = allowed_cpus {
        add_default(&["--lcores", "-l", "-c"], &[&format!("--lcores=0@({processors})")]);
    }
    // Probe only requested devices: no NIC has this PCI address.
    add_default(&["-a", "--allow", "-b", "--block", "--no-pci"], &["--allow=0000:00:00.0"]);
    let no_huge = given(&["--no-huge"]) || !has_hugepages;
    if no_huge {
        add_default(&["--no-huge"], &["--no-huge"]);
        add_default(&["-m", "--socket-mem"], &["-m", DEFAULT_MEMORY_MIB]);
        // No files for secondary processes; with hugepages, --in-memory does that.
        add_default(&["--no-shconf"], &["--no-shconf"]);
    } else {
        add_default(&["--in-memory", "--legacy-mem", "--huge-dir"], &["--in-memory"]);
    }
    all
}

/// True if `name` is given, as `--name`, `--name=value` or `-nvalue`.
fn is_given(arguments: &[String], name: &str) -> bool {
    arguments.iter().any(|argument| match argument.strip_prefix(name) {
        Some(rest) => rest.is_empty() || rest.starts_with('=') || !name.starts_with("--"),
        None => false,
    })
}

/// CPUs allowed to this thread, as `0-3,8`.
fn allowed_cpus() -> Option<String> {
    let status = fs::read_to_string("/proc/thread-self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
    Some(line.trim().to_owned())
}

/// True if the system has free hugepages.
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
    fn given_arguments_take_precedence() {
        assert!(all("-l 1", true).starts_with("-l 1 --log-level"));
        assert!(!all("-l1", true).contains("lcores"));
        assert!(!all("--lcores=0@1", true).contains("@("));
        assert!(!all("--log-level=pmd:debug", true).contains("error"));
        assert!(all("--legacy-mem", true).contains("--allow"));
        assert!(!all("--legacy-mem", true).contains("--in-memory"));
        assert_eq!(all("-m 64", false).matches("-m ").count(), 1);
    }

    #[test]
    fn uses_ordinary_memory_without_hugepages() {
        assert!(all("", true).contains("--in-memory") && !all("", true).contains("--no-huge"));
        assert!(all("", false).contains("--no-huge -m 512"));
        assert!(!all("--no-huge", true).contains("--in-memory"));
    }
}
