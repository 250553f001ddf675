//! Experiment web-server: a web server with a flood in the middle third of the time, after Figures 7
//! and 8 of Jonack and Murta.
//!
//! A client asks for files of 1 to 5 KB in an open loop, each on a new connection, while packets
//! that nobody wants arrive at the server's interface at the paper's levels and at the maximum.

mod httperf;
mod report;
mod servers;
mod timeline;

use std::process::Command;

use crate::error::LabError;
use crate::experiments::jonack::load_levels::LEVELS_PPS;
use crate::report::experiment::Experiment;
use crate::report::progress::Progress;
use crate::testbed::apps::application::Application;
use crate::testbed::apps::check_installed;
use crate::testbed::cpu;
use crate::testbed::flood::FloodTestbed;
use crate::testbed::netns;
use crate::testbed::receive_work::ReceiveWork;
use report::Case;
use servers::{KERNEL_WAYS, WebServer};
use timeline::Timeline;

/// Requests of the client, each on a new connection.
const REQUESTS_PER_S: f64 = 150.0;

/// Configuration of the experiment.
#[derive(Clone, Debug)]
pub struct WebServerConfig {
    /// Rates of the flood in packets per second; `None` is the maximum.
    pub levels_pps: Vec<Option<f64>>,
    /// Ways of the kernel.
    pub kernel_ways: Vec<ReceiveWork>,
    /// Measure only the servers whose names contain this text.
    pub only: Option<String>,
    /// Length of a third of the time, in seconds.
    pub third_seconds: f64,
    /// Number of repeats; the median counts.
    pub repeats: usize,
    /// Core that runs the server.
    pub server_core: usize,
    /// Core that runs the client and the flood.
    pub load_core: usize,
}

impl Default for WebServerConfig {
    fn default() -> Self {
        let levels = LEVELS_PPS[1..].iter().copied().map(Some);
        Self {
            levels_pps: levels.chain([None]).collect(),
            kernel_ways: KERNEL_WAYS.to_vec(),
            only: None,
            third_seconds: 4.0,
            repeats: 1,
            server_core: 1,
            load_core: 0,
        }
    }
}

impl WebServerConfig {
    /// The highest level and the maximum, briefly, on two ways of the kernel.
    #[must_use]
    pub fn quick(self) -> Self {
        let highest = self.highest_level_of_paper();
        let kernel_ways = vec![ReceiveWork::Timer, ReceiveWork::Thread];
        Self { levels_pps: vec![highest, None], kernel_ways, third_seconds: 1.0, ..self }
    }

    /// The duration of the paper.
    #[must_use]
    pub fn long(self) -> Self {
        Self { third_seconds: 60.0, ..self }
    }

    /// The highest of the paper's levels in this configuration.
    fn highest_level_of_paper(&self) -> Option<f64> {
        self.levels_pps.iter().copied().flatten().reduce(f64::max)
    }

    fn check(&self) -> Result<(), LabError> {
        if cpu::available_cores() < 2 || self.server_core == self.load_core {
            return Err(LabError::Config("this experiment needs two cores".to_owned()));
        }
        let is_valid = self.third_seconds > 0.0 && self.third_seconds <= 60.0 && self.repeats > 0;
        if !is_valid {
            return Err(LabError::Config(
                "seconds (at most 60) and repeats must be above zero".into(),
            ));
        }
        Ok(())
    }

    fn servers(&self) -> Result<Vec<WebServer>, LabError> {
        let all = WebServer::all(&self.kernel_ways);
        let Some(text) = &self.only else { return Ok(all) };
        let is_selected = |server: &WebServer| server.name().contains(text.as_str());
        let selected: Vec<WebServer> = all.iter().copied().filter(is_selected).collect();
        if selected.is_empty() {
            let names: Vec<String> = all.iter().map(|server| server.name()).collect();
            let names = names.join(", ");
            return Err(LabError::Config(format!("no server contains {text:?}; known: {names}")));
        }
        Ok(selected)
    }
}

/// Measures each server at each level. Prints its progress on standard error.
///
/// # Errors
/// If there is only one core, namespaces cannot be created, Apache or nginx is not installed, or a
/// server does not start.
pub fn run(config: &WebServerConfig) -> Result<Experiment, LabError> {
    config.check()?;
    let servers = config.servers()?;
    let is_packaged = |program: &Application| {
        servers.iter().any(|server| matches!(server, WebServer::Packaged(one, _) if one == program))
    };
    let programs = [Application::Apache, Application::Nginx];
    check_installed(&programs.into_iter().filter(is_packaged).collect::<Vec<_>>())?;
    netns::remove_stale()?;
    let has_httperf = Command::new(httperf::PROGRAM)
        .arg("--version")
        .output()
        .is_ok_and(|output| output.status.success());
    let testbed = FloodTestbed::new(config.server_core, config.load_core)?;
    let mut cases: Vec<Case> =
        servers.into_iter().map(|server| Case { server, runs: Vec::new() }).collect();
    let progress = Progress::new(cases.len() * config.repeats);
    for repeat in 1..=config.repeats {
        for case in &mut cases {
            let run = Timeline::measure(case.server, config, &testbed, has_httperf)?;
            progress.step(format_args!("{repeat} {:<22} {}", case.server.name(), run.describe()));
            case.runs.push(run);
        }
    }
    let mut result = Experiment::new("web-server");
    report::describe(config, has_httperf, &mut result);
    report::conclude(config, &cases, &mut result);
    Ok(result)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_are_those_of_the_paper_and_the_maximum() {
        let config = WebServerConfig::default();
        assert_eq!(config.levels_pps.len(), 9);
        assert_eq!(config.levels_pps.last(), Some(&None));
        assert_eq!(config.highest_level_of_paper(), Some(875e3));
        assert_eq!(config.quick().levels_pps, [Some(875e3), None]);
    }

    #[test]
    fn rejects_invalid_configuration() {
        let config = WebServerConfig::default();
        let message = |config: WebServerConfig| config.check().unwrap_err().to_string();
        assert!(message(WebServerConfig { load_core: 1, ..config.clone() }).contains("two cores"));
        let endless = WebServerConfig { third_seconds: f64::INFINITY, ..config.clone() };
        assert!(message(endless).contains("at most 60"));
        let only = Some("apache2-kernel".to_owned());
        assert_eq!(WebServerConfig { only, ..config }.servers().unwrap().len(), 4);
    }
}
