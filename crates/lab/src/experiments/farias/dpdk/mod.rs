//! The experiment `dpdk`: Tidegate on DPDK devices, compared with `dpdk-testpmd`.
//!
//! All DPDK load generators run on the calling thread, the only thread that DPDK knows: only
//! that thread has a cache of DPDK's buffers.

mod flood;
mod forward_device;
mod forwarding;
mod scenarios;
mod services;
mod testbed;
mod testpmd;

use tidegate_device::dpdk::{DpdkError, IS_BUILT};

pub use forward_device::{ForwardConfig, forward};

use crate::error::LabError;
use crate::report::experiment::Experiment;
use crate::testbed::cpu::{self, PinGuard};
use crate::testbed::dns::servers::check_installed;
use crate::testbed::netns;
use testbed::DpdkTestbed;

/// Configuration of the experiment.
#[derive(Clone, Debug)]
pub struct DpdkLabConfig {
    /// Duration of each measurement in seconds.
    pub seconds: f64,
    /// Number of measurements of each point; the median counts.
    pub repeats: usize,
    /// Work times of the flooded service per packet, in nanoseconds.
    pub work_ns: Vec<u64>,
    /// Measure only some points of the echo scenarios, without the comparison over veth.
    pub is_quick: bool,
    /// Core of the server or forwarder under test.
    pub server_core: usize,
    /// Core of the load generator.
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
    /// One short measurement of each point, for a quick run.
    #[must_use]
    pub fn quick(self) -> Self {
        Self { seconds: 0.3, repeats: 1, work_ns: vec![2_000], is_quick: true, ..self }
    }

    fn check(&self) -> Result<(), LabError> {
        if !IS_BUILT {
            return Err(device_error(DpdkError::NotBuilt));
        }
        check_installed(testpmd::PROGRAM, testpmd::PACKAGE)?;
        let cores = cpu::available_cores();
        if cores < 2 || self.server_core == self.load_core {
            return Err(LabError::Config(format!(
                "one core must run the server, another the generator; {cores} available"
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

/// Runs the experiment. Reports progress on standard error.
///
/// # Errors
/// When Tidegate was built without DPDK, `dpdk-testpmd` is not installed, there is only one
/// core, or a process does not start.
pub fn run(config: &DpdkLabConfig) -> Result<Experiment, LabError> {
    config.check()?;
    for name in netns::remove_stale()? {
        eprintln!("removed namespace {name} of a process that no longer exists");
    }
    let pinned = PinGuard::to(config.load_core)?;
    let testbed = DpdkTestbed::new(config.server_core, config.load_core)?;
    let mut result = Experiment::new("dpdk");
    result.columns = COLUMNS.to_vec();
    describe(config, &mut result);
    forwarding::run(config, &testbed, &mut result)?;
    flood::run(config, &testbed, &mut result)?;
    services::run(config, &testbed, &mut result)?;
    scenarios::run(config, &testbed, &mut result)?;
    drop(pinned);
    scenarios::run_without_dpdk(config, &mut result)?;
    Ok(result)
}

/// Columns of the printed table; the JSON has more.
const COLUMNS: [&str; 8] =
    ["part", "wire", "subject", "load", "per_second", "p50_us", "p99_us", "remark"];

fn describe(config: &DpdkLabConfig, result: &mut Experiment) {
    let (server, load) = (config.server_core, config.load_core);
    let version = tidegate_device::dpdk::version().unwrap_or_default();
    result.note(format!(
        "core {server} runs the server, core {load} the load generator; {version} in ordinary \
         memory ({}) on either side; medians of {} measurements of {} s, taking turns",
        testbed::EAL_MEMORY_FLAG,
        config.repeats,
        config.seconds
    ));
}

/// Passes on a device's error message unchanged: it says what to do next.
fn device_error(error: DpdkError) -> LabError {
    LabError::Config(error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rejects_invalid_configuration() {
        let check_error = |config: DpdkLabConfig| config.check().unwrap_err().to_string();
        if !IS_BUILT {
            let error = check_error(DpdkLabConfig::default());
            assert!(error.contains("libdpdk-dev") && error.contains("--features dpdk"), "{error}");
        } else if check_installed(testpmd::PROGRAM, testpmd::PACKAGE).is_ok() {
            let same = DpdkLabConfig { load_core: 1, ..DpdkLabConfig::default() };
            assert!(check_error(same).contains("another"));
            let never = DpdkLabConfig { repeats: 0, ..DpdkLabConfig::default() };
            assert!(check_error(never).contains("repeats"));
        }
    }
}
