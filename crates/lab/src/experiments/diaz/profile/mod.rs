//! Experiment profile: where the time of a core goes, function by function, after Tables 2 and 3 of
//! Diaz and Zabaljauregui.
//!
//! Streams pass into a server and out again, at the paper's rate and at the most: on the kernel with
//! all its receive work on the server's core (the paper's test A), and on a network core (test B).

mod report;

use std::time::Duration;

use tidegate_load::{LinkKind, TcpLoadConfig};

use self::report::{Profile, Rate, TestName};
use crate::error::LabError;
use crate::experiments::kernel_best::{FIRST_PASS_SECONDS, FirstPass, Goal};
use crate::report::experiment::Experiment;
use crate::report::progress::Progress;
use crate::testbed::perf::{self, CoreRecording};
use crate::testbed::receive_work::ReceiveWork;
use crate::testbed::tcp::{
    KernelProgram, ServerKind, TcpLabConfig, TcpMeasurement, TcpTestbed, choose_cores,
};

/// Concurrent connections.
const CONNECTIONS: usize = 16;
/// Bytes that a connection sends at once and gets back.
const MESSAGE_BYTES: usize = 64 << 10;
/// Time before the samples, in seconds.
const WARM_UP_SECONDS: f64 = 0.5;
/// Time for which the load goes on, since perf takes some to start.
const PERF_START_SECONDS: f64 = 1.0;

/// Ways of the kernel in which the server's core receives, without busy polling.
const KERNEL_WAYS: [ReceiveWork; 2] = [ReceiveWork::Thread, ReceiveWork::Steered];

/// Samples the core of both servers at both rates.
///
/// # Errors
/// When perf is not installed, namespaces cannot be created or a server does not start.
pub fn run(config: &TcpLabConfig) -> Result<Experiment, LabError> {
    perf::check()?;
    let (server_core, load_core) = choose_cores()?;
    let testbed = TcpTestbed::new(server_core, load_core)?;
    let seconds = config.seconds.min(FIRST_PASS_SECONDS);
    let first_pass = FirstPass::measure(Goal::Highest, &KERNEL_WAYS, way_name, |work| {
        let server = testbed.start(kernel_server(work), &[])?;
        let load = load_config(testbed.load_config(&server, LinkKind::Kernel), Rate::Max, seconds);
        let run = testbed.measure(&load)?;
        server.process.stop();
        Ok(gbps(&run))
    })?;
    let kernel = kernel_server(first_pass.best());
    let mut profiles = Vec::new();
    for rate in Rate::ALL {
        for (test, server_kind) in
            [(TestName::Kernel, kernel), (TestName::NetworkCore, ServerKind::TidegateDedicated)]
        {
            profiles.push((Profile::new(test, server_kind.name(), rate), server_kind));
        }
    }
    let progress = Progress::new(profiles.len() * config.repeats);
    for repeat in 1..=config.repeats {
        for (profile, server_kind) in &mut profiles {
            sample(profile, *server_kind, &testbed, (server_core, load_core), config.seconds)?;
            progress.step(format_args!("{repeat} {}", profile.describe()));
        }
    }
    let profiles: Vec<Profile> = profiles.into_iter().map(|(profile, _)| profile).collect();
    let mut result = Experiment::new("profile");
    report::describe(config, (server_core, load_core), &mut result);
    report::conclude(&profiles, &mut result)?;
    Ok(result)
}

fn kernel_server(work: ReceiveWork) -> ServerKind {
    ServerKind::Kernel(KernelProgram::Epoll, work)
}

fn way_name(work: ReceiveWork) -> String {
    kernel_server(work).name()
}

fn load_config(defaults: TcpLoadConfig, rate: Rate, seconds: f64) -> TcpLoadConfig {
    TcpLoadConfig {
        connections: CONNECTIONS,
        message_bytes: MESSAGE_BYTES,
        rate_per_second: rate.messages_per_s(),
        warm_up_seconds: WARM_UP_SECONDS,
        seconds,
        ..defaults
    }
}

/// Gigabits per second in both directions together.
fn gbps(run: &TcpMeasurement) -> f64 {
    (run.load.sent_bytes_per_second + run.load.received_bytes_per_second) * 8.0 / 1e9
}

/// Adds the samples of one run to `profile`.
fn sample(
    profile: &mut Profile,
    server_kind: ServerKind,
    testbed: &TcpTestbed,
    (server_core, load_core): (usize, usize),
    seconds: f64,
) -> Result<(), LabError> {
    let server = testbed.start(server_kind, &[])?;
    let defaults = testbed.load_config(&server, LinkKind::Kernel);
    let load = load_config(defaults, profile.rate, seconds + PERF_START_SECONDS);
    let mut recording = None;
    let run = testbed.measure_with(&load, || {
        let delay = Duration::from_secs_f64(WARM_UP_SECONDS);
        let time = Duration::from_secs_f64(seconds);
        recording = Some(CoreRecording::start(server_core, load_core, delay, time)?);
        Ok(())
    })?;
    let recording = recording.ok_or_else(|| LabError::Config("the load did not start".into()))?;
    profile.add(recording.finish(server.process.pid())?, gbps(&run));
    server.process.stop();
    Ok(())
}
