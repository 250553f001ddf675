//! The experiment `dpdk`: Tidegate on devices of DPDK's, beside DPDK's own
//! program.
//!
//! Everything that makes load on DPDK runs on the calling thread, which is the
//! one that DPDK knows: only that one has caches of its buffers.

mod bench;
mod flood;
mod forward;
mod raw;
mod scenarios;
mod services;
mod testpmd;

use tidegate_port::dpdk::{BUILT, DpdkError};

pub use forward::{ForwardConfig, forward};

use crate::cpu::{self, Pinned};
use crate::dns::servers::installed;
use crate::error::LabError;
use crate::experiment::Experiment;
use crate::netns;
use bench::Bench;

/// How to run the experiment.
#[derive(Clone, Debug)]
pub struct DpdkLabConfig {
    /// How long each measurement lasts, in seconds.
    pub seconds: f64,
    /// How often to measure everything; the median counts.
    pub repeats: usize,
    /// Work of the flooded service for each packet, in nanoseconds.
    pub work_ns: Vec<u64>,
    /// Only some points of the echo scenarios, and nothing beside them.
    pub is_quick: bool,
    /// The core that has what is measured.
    pub server_core: usize,
    /// The core that makes load.
    pub load_core: usize,
}

impl Default for DpdkLabConfig {
    fn default() -> Self {
        Self {
            seconds: 1.0,
            repeats: 5,
            work_ns: vec![500, 2_000],
            is_quick: false,
            server_core: 1,
            load_core: 0,
        }
    }
}

impl DpdkLabConfig {
    /// Everything once and shortly, for a first look.
    #[must_use]
    pub fn quick(self) -> Self {
        Self { seconds: 0.3, repeats: 1, work_ns: vec![2_000], is_quick: true, ..self }
    }

    fn check(&self) -> Result<(), LabError> {
        if !BUILT {
            return Err(refused(DpdkError::NotBuilt));
        }
        installed(testpmd::PROGRAM, testpmd::PACKAGE)?;
        let cores = cpu::cores();
        if cores < 2 || self.server_core == self.load_core {
            return Err(LabError::Config(format!(
                "one core must be measured and another make load; there are {cores} to choose from"
            )));
        }
        if !(self.seconds > 0.0 && self.seconds < 60.0) || self.repeats == 0 {
            return Err(LabError::Config(
                "seconds (below 60) and repeats must be above zero".into(),
            ));
        }
        Ok(())
    }
}

/// Runs the experiment. Says on standard error what it is at.
///
/// # Errors
/// When this program was built without DPDK, `dpdk-testpmd` is not installed,
/// there is only one core, or something does not start.
pub fn run(config: &DpdkLabConfig) -> Result<Experiment, LabError> {
    config.check()?;
    for name in netns::remove_stale()? {
        eprintln!("removed namespace {name}, left behind by a process that is gone");
    }
    let pinned = Pinned::to(config.load_core)?;
    let bench = Bench::new(config.server_core, config.load_core)?;
    let mut result = Experiment::new("dpdk");
    result.columns = COLUMNS.to_vec();
    describe(config, &mut result);
    raw::run(config, &bench, &mut result)?;
    flood::run(config, &bench, &mut result)?;
    services::run(config, &bench, &mut result)?;
    scenarios::run(config, &bench, &mut result)?;
    drop(pinned);
    scenarios::run_beside(config, &mut result)?;
    Ok(result)
}

/// What people see; the JSON has more.
const COLUMNS: [&str; 8] =
    ["part", "wire", "subject", "load", "per_second", "p50_us", "p99_us", "remark"];

fn describe(config: &DpdkLabConfig, result: &mut Experiment) {
    let (server, load) = (config.server_core, config.load_core);
    let version = tidegate_port::dpdk::version().unwrap_or_default();
    result.note(format!(
        "core {server} has what is measured, core {load} makes the load; {version} in ordinary \
         memory ({}) on either side; {} measurements of {} s, taking turns, medians",
        bench::MEMORY,
        config.repeats,
        config.seconds
    ));
}

/// What a port says is told as it is: it names the next step.
fn refused(error: DpdkError) -> LabError {
    LabError::Config(error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_measured_is_refused() {
        let refused = |config: DpdkLabConfig| config.check().unwrap_err().to_string();
        if !BUILT {
            let error = refused(DpdkLabConfig::default());
            assert!(error.contains("libdpdk-dev") && error.contains("--features dpdk"), "{error}");
        } else if installed(testpmd::PROGRAM, testpmd::PACKAGE).is_ok() {
            let same = DpdkLabConfig { load_core: 1, ..DpdkLabConfig::default() };
            assert!(refused(same).contains("another"));
            let never = DpdkLabConfig { repeats: 0, ..DpdkLabConfig::default() };
            assert!(refused(never).contains("repeats"));
        }
    }
}
