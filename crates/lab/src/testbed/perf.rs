//! Samples of a core by `perf record`: which function ran when.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use tempfile::TempDir;

use crate::error::LabError;
use crate::testbed::folder;
use crate::testbed::netns::run_to_end;
use crate::testbed::process::command_on_core;

const PACKAGE: &str = "linux-perf";
/// Samples per second: no divisor of the system's tick.
pub(crate) const SAMPLES_PER_S: u32 = 2_999;
/// Name of a function that has none in any symbol table.
const UNKNOWN: &str = "[unknown]";

/// Running recording of a core.
pub(crate) struct CoreRecording {
    file: PathBuf,
    thread: JoinHandle<Result<String, LabError>>,
    _folder: TempDir,
}

/// Samples of a core by function.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct CoreSamples {
    /// Samples of the process, of kernel threads and of the idle core, by function.
    pub(crate) by_symbol: HashMap<String, u64>,
    /// Those whose function has no name.
    pub(crate) unknown: u64,
    /// Samples of other processes.
    pub(crate) others: u64,
}

impl CoreRecording {
    /// Samples `core` for `time` after `delay`; perf itself runs on `own_core`. The processor's
    /// counters are no events of virtual machines, so a timer gives the samples.
    pub(crate) fn start(
        core: usize,
        own_core: usize,
        delay: Duration,
        time: Duration,
    ) -> Result<Self, LabError> {
        let folder = folder::private()?;
        let file = folder.path().join("samples");
        let mut command = command_on_core(own_core, "perf");
        command.args(["record", "--quiet", "--event", "cpu-clock"]);
        command.args(["--cpu", &core.to_string(), "--freq", &SAMPLES_PER_S.to_string()]);
        command.args(["--delay", &delay.as_millis().to_string(), "--output"]).arg(&file);
        command.args(["--", "sleep", &(delay + time).as_secs_f64().to_string()]);
        let thread = thread::spawn(move || run_to_end(&mut command, PACKAGE));
        Ok(Self { file, thread, _folder: folder })
    }

    /// Waits for the end of the recording, and counts the samples. `process`, which must be running,
    /// is the process of interest.
    pub(crate) fn finish(self, process: u32) -> Result<CoreSamples, LabError> {
        self.thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        let mut script = Command::new("perf");
        script.args(["script", "--no-inline", "--fields", "pid,ip,sym,dso", "--input"]);
        let text = run_to_end(script.arg(&self.file), PACKAGE)?;
        let pids: HashSet<u32> = text.lines().filter_map(|line| Some(parse(line)?.pid)).collect();
        let wanted = |pid: &u32| *pid == process || is_kernel_thread(*pid);
        Ok(count(&text, &pids.into_iter().filter(wanted).collect()))
    }
}

impl CoreSamples {
    /// Adds the samples of another recording.
    pub(crate) fn add(&mut self, other: Self) {
        for (symbol, samples) in other.by_symbol {
            *self.by_symbol.entry(symbol).or_default() += samples;
        }
        self.unknown += other.unknown;
        self.others += other.others;
    }

    /// Number of samples, without those of other processes.
    pub(crate) fn total(&self) -> u64 {
        self.by_symbol.values().sum::<u64>() + self.unknown
    }
}

/// Checks that perf is installed and may sample.
///
/// # Errors
/// If it is not or may not.
pub(crate) fn check() -> Result<(), LabError> {
    let mut command = Command::new("perf");
    command.args(["stat", "--all-cpus", "--event", "cpu-clock", "--", "true"]);
    run_to_end(&mut command, PACKAGE).map(drop)
}

/// True for threads of the kernel, which have no command line, and for the idle core.
fn is_kernel_thread(pid: u32) -> bool {
    let command_line = Path::new("/proc").join(pid.to_string()).join("cmdline");
    pid == 0 || fs::read(command_line).is_ok_and(|line| line.is_empty())
}

/// One sample.
struct Sample<'t> {
    pid: u32,
    symbol: &'t str,
}

/// Parses a line of `perf script`: process, address, function, and the object in parentheses.
fn parse(line: &str) -> Option<Sample<'_>> {
    let (pid, rest) = line.trim_start().split_once(' ')?;
    let (_address, rest) = rest.trim_start().split_once(' ')?;
    let (symbol, _object) = rest.rsplit_once(" (")?;
    Some(Sample { pid: pid.parse().ok()?, symbol: symbol.trim() })
}

fn count(text: &str, wanted: &HashSet<u32>) -> CoreSamples {
    let mut samples = CoreSamples::default();
    for Sample { pid, symbol } in text.lines().filter_map(parse) {
        if !wanted.contains(&pid) {
            samples.others += 1;
        } else if symbol == UNKNOWN {
            samples.unknown += 1;
        } else {
            *samples.by_symbol.entry(symbol.to_owned()).or_default() += 1;
        }
    }
    samples
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_functions_of_the_process_and_of_the_kernel() {
        let text = "    0  ffffffff821eb0e7 pv_native_safe_halt ([kernel.kallsyms])\n\
            22853      563ffc919adf <a::B as c::D<e (f)>>::g (/usr/bin/tidegate)\n\
            22853      563ffc919ad0 <a::B as c::D<e (f)>>::g (/usr/bin/tidegate)\n\
            22853      7f21deed9e1f [unknown] (/usr/lib/libc.so.6)\n\
               17      7f21deed9e1f main (/usr/bin/other)\n";
        let samples = count(text, &HashSet::from([0, 22_853]));
        assert_eq!(samples.by_symbol["<a::B as c::D<e (f)>>::g"], 2);
        assert_eq!(samples.by_symbol["pv_native_safe_halt"], 1);
        assert_eq!((samples.unknown, samples.others, samples.total()), (1, 1, 4));
        let mut both = samples.clone();
        both.add(samples);
        assert_eq!((both.total(), both.by_symbol["pv_native_safe_halt"]), (8, 2));
    }

    #[test]
    fn processes_have_a_command_line_and_threads_of_the_kernel_none() {
        assert!(!is_kernel_thread(std::process::id()));
        assert!(is_kernel_thread(0));
        assert!(!is_kernel_thread(u32::MAX), "there is no such process");
    }
}
