//! Loads on an unmodified program, and one measurement.

use std::fmt;

use tidegate_load::{TcpLoadConfig, load_tcp};

use crate::error::LabError;
use crate::experiments::kernel_best::Goal;
use crate::testbed::apps::application::Application;
use crate::testbed::apps::packaged_pair::{RoundTrips, SockperfLoad, measure_round_trips};
use crate::testbed::apps::{
    CoreAssignment, RunningService, StackKind, packaged_load, start_service,
};
use crate::testbed::cpu::CoreTicks;
use crate::testbed::flood::FloodTestbed;

/// Concurrent connections of the closed loops.
const CONNECTIONS: [usize; 4] = [1, 16, 64, 1000];
/// The same for a first look.
const QUICK_CONNECTIONS: [usize; 2] = [1, 64];
/// Requests per second at which latency and processor time are compared.
pub(super) const FIXED_RPS: f64 = 20_000.0;
/// Connections of the open loop.
const FIXED_RPS_CONNECTIONS: usize = 16;
const MESSAGE_BYTES: usize = 64;

/// Load on a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Load {
    /// Benchmark program for the application, a request for each response.
    ClosedLoop { application: Application, connections: usize },
    /// [`FIXED_RPS`] in an open loop.
    FixedRate(Application),
    /// [`FIXED_RPS`] messages of sockperf on one connection.
    Messages,
    /// Ping-pong of sockperf on one connection with a server that never sleeps.
    BusyWaitingServer,
}

/// One measurement. What the load does not measure is not a number.
#[derive(Clone, Copy, Debug)]
pub(super) struct ProgramRun {
    pub(super) requests_per_second: f64,
    pub(super) p50_us: f64,
    pub(super) p99_us: f64,
    pub(super) cpu_us_per_request: f64,
}

impl Load {
    /// All loads, or those of a first look.
    pub(super) fn all(quick: bool) -> Vec<Self> {
        let connections: &[usize] = if quick { &QUICK_CONNECTIONS } else { &CONNECTIONS };
        let closed = Application::PACKAGES.into_iter().flat_map(|application| {
            let with = move |&connections| Self::ClosedLoop { application, connections };
            connections.iter().map(with)
        });
        let fixed = Application::PACKAGES.map(Self::FixedRate);
        closed.chain(fixed).chain([Self::Messages, Self::BusyWaitingServer]).collect()
    }

    pub(super) fn program(self) -> &'static str {
        match self {
            Self::ClosedLoop { application, .. } | Self::FixedRate(application) => {
                application.name()
            }
            Self::Messages | Self::BusyWaitingServer => "sockperf",
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::ClosedLoop { .. } => "closed loop",
            Self::FixedRate(_) => "fixed rate",
            Self::Messages => "fixed rate of messages",
            Self::BusyWaitingServer => "busy-waiting server",
        }
    }

    pub(super) fn connections(self) -> usize {
        match self {
            Self::ClosedLoop { connections, .. } => connections,
            Self::FixedRate(_) => FIXED_RPS_CONNECTIONS,
            Self::Messages | Self::BusyWaitingServer => 1,
        }
    }

    /// Figure by which the kernel's best way is chosen.
    pub(super) fn goal(self) -> (Goal, fn(&ProgramRun) -> f64) {
        match self {
            Self::ClosedLoop { .. } => (Goal::Highest, |run| run.requests_per_second),
            Self::FixedRate(_) => (Goal::Lowest, |run| run.cpu_us_per_request),
            Self::Messages | Self::BusyWaitingServer => (Goal::Lowest, |run| run.p50_us),
        }
    }

    /// True if the processor time of its requests is compared.
    pub(super) fn counts_cpu(self) -> bool {
        matches!(self, Self::ClosedLoop { .. } | Self::FixedRate(_))
    }

    /// Starts the program, and a daemon if the stack needs one, and measures once.
    pub(super) fn measure(
        self,
        testbed: &FloodTestbed,
        stack: StackKind,
        seconds: f64,
    ) -> Result<ProgramRun, LabError> {
        let service = |application| {
            let core = testbed.server_core;
            let same_core = CoreAssignment { application: core, daemon: core };
            start_service(testbed, application, stack, same_core, &[])
        };
        let sockperf = |load| ProgramRun::of_sockperf(testbed, stack, load, seconds);
        match self {
            Self::ClosedLoop { application, connections } => {
                let service = service(application)?;
                let run = ProgramRun::of_closed_loop(
                    testbed,
                    application,
                    &service,
                    connections,
                    seconds,
                )?;
                service.stop();
                Ok(run)
            }
            Self::FixedRate(application) => {
                let service = service(application)?;
                let run = ProgramRun::of_fixed_rate(testbed, &service, seconds)?;
                service.stop();
                Ok(run)
            }
            Self::Messages => sockperf(SockperfLoad::Rate(FIXED_RPS)),
            Self::BusyWaitingServer => sockperf(SockperfLoad::BusyWaitingServer),
        }
    }
}

impl fmt::Display for Load {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {} x {}", self.program(), self.name(), self.connections())
    }
}

impl ProgramRun {
    pub(super) const NOTHING: Self = Self {
        requests_per_second: f64::NAN,
        p50_us: f64::NAN,
        p99_us: f64::NAN,
        cpu_us_per_request: f64::NAN,
    };

    fn of_closed_loop(
        testbed: &FloodTestbed,
        application: Application,
        service: &RunningService,
        connections: usize,
        seconds: f64,
    ) -> Result<Self, LabError> {
        let target = service.target;
        let measure = || packaged_load::measure(testbed, application, target, connections, seconds);
        let (cores, rate) = measure_cores(testbed, measure)?;
        let name = application.name();
        let missing = || LabError::Config(format!("{name} has no benchmark program"));
        let requests_per_second = rate.ok_or_else(missing)??;
        let cpu_us_per_request = cores * 1e6 / requests_per_second;
        Ok(Self { requests_per_second, cpu_us_per_request, ..Self::NOTHING })
    }

    fn of_fixed_rate(
        testbed: &FloodTestbed,
        service: &RunningService,
        seconds: f64,
    ) -> Result<Self, LabError> {
        let load = TcpLoadConfig {
            warm_up_seconds: seconds / 4.0,
            rate_per_second: Some(FIXED_RPS),
            ..service.kernel_load_config(testbed, FIXED_RPS_CONNECTIONS, seconds)
        };
        let client = &testbed.pair.a.namespace;
        let (cores, report) = measure_cores(testbed, || client.enter(|| load_tcp(&load)))?;
        let report = report??;
        Ok(Self {
            requests_per_second: report.requests_per_second,
            p50_us: report.latency.p50_us,
            p99_us: report.latency.p99_us,
            cpu_us_per_request: cores * 1e6 / report.requests_per_second,
        })
    }

    fn of_sockperf(
        testbed: &FloodTestbed,
        stack: StackKind,
        load: SockperfLoad,
        seconds: f64,
    ) -> Result<Self, LabError> {
        let RoundTrips { p50_us, p99_us, .. } =
            measure_round_trips(testbed, stack, load, MESSAGE_BYTES, seconds)?;
        Ok(Self { p50_us, p99_us, ..Self::NOTHING })
    }
}

impl fmt::Display for ProgramRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { requests_per_second, p50_us, p99_us, cpu_us_per_request } = self;
        if !requests_per_second.is_nan() {
            write!(f, "{requests_per_second:>8.0} requests/s of {cpu_us_per_request:.1} us CPU")?;
        }
        if !p50_us.is_nan() {
            write!(f, " p50 {p50_us:.0} us, p99 {p99_us:.0} us")?;
        }
        Ok(())
    }
}

/// Processor time per second of the server's core and of softirqs on the core of the load while
/// `measure` runs, and its result.
fn measure_cores<R>(
    testbed: &FloodTestbed,
    measure: impl FnOnce() -> R,
) -> Result<(f64, R), LabError> {
    let cores = [testbed.server_core, testbed.load_core];
    let before = cores.map(CoreTicks::read);
    let result = measure();
    let [server_after, load_after] = cores.map(CoreTicks::read);
    let [server, load] = before;
    let server = server_after?.since(server?);
    let softirqs = load_after?.since(load?).softirq_percent;
    Ok(((server.busy_percent - server.stolen_percent + softirqs) / 100.0, result))
}
