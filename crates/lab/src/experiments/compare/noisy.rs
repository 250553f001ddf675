//! `lab noisy`: servers beside CPU-bound programs on their core.
//!
//! Core 1 runs the server, the daemon if there is one, and the CPU-bound programs. Core 0 generates
//! the load.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use serde_json::json;
use tidegate_load::{TcpLoadConfig, load_tcp};

use crate::error::LabError;
use crate::experiments::kernel_best::{FIRST_PASS_SECONDS, FirstPass, Goal, distinct_best};
use crate::report::Progress;
use crate::report::experiment::{Experiment, KernelRows};
use crate::stats::{median, round_to_thousandths};
use crate::testbed::apps::application::Application;
use crate::testbed::apps::packaged_load;
use crate::testbed::apps::{
    CoreAssignment, RunningService, StackKind, check_installed, start_service,
};
use crate::testbed::cpu;
use crate::testbed::flood::FloodTestbed;
use crate::testbed::process::ServerProcess;
use crate::testbed::sys;
use crate::testbed::tcp::{TcpLabConfig, choose_cores};

const APPLICATIONS: [Application; 3] = [Application::Echo, Application::Redis, Application::Nginx];
/// Numbers of CPU-bound programs beside the server.
const NEIGHBOURS: [usize; 3] = [1, 2, 4];
/// Numbers of connections of the closed loop.
const CONNECTIONS: [usize; 3] = [1, 16, 64];
/// Requests per second of the open loop: few enough that each stack answers them beside one
/// CPU-bound program.
const FIXED_RPS: f64 = 4_000.0;
/// Connections of the open loop.
const FIXED_RPS_CONNECTIONS: usize = 16;
/// Pause between two messages whose acknowledgement is timed.
const ACK_PAUSE: Duration = Duration::from_micros(500);
const ACK_TIMEOUT: Duration = Duration::from_secs(10);
const MESSAGE: [u8; 64] = [b'x'; 64];

/// CPU-bound programs on one core; stopped on drop.
struct Neighbours(Vec<ServerProcess>);

/// Measurements of one application on one stack beside a number of CPU-bound programs.
struct Row {
    application: Application,
    stack: StackKind,
    neighbours: usize,
    /// Requests per second in the closed loop, for each of [`CONNECTIONS`].
    requests_per_second: [Vec<f64>; CONNECTIONS.len()],
    /// Answered part of the open loop.
    answered: Vec<f64>,
    /// CPU seconds per second of the CPU-bound programs during the open loop.
    neighbour_cpu: Vec<f64>,
    /// The same with the interrupts during their time, among them the receive work of the kernel.
    neighbour_cpu_with_interrupts: Vec<f64>,
    /// Time to the acknowledgement of a message in milliseconds, 99th percentile.
    ack_p99_ms: Vec<f64>,
}

/// Runs an echo server, redis and nginx on the kernel's stack, on an embedded stack, and attached
/// to the daemon, beside CPU-bound programs.
///
/// # Errors
/// If an application is not installed or does not start.
pub fn run(config: &TcpLabConfig, quick: bool) -> Result<Experiment, LabError> {
    check_installed(&APPLICATIONS)?;
    let (server_core, load_core) = choose_cores()?;
    let testbed = FloodTestbed::new(server_core, load_core)?;
    let neighbours: &[usize] = if quick { &NEIGHBOURS[..1] } else { &NEIGHBOURS };
    let mut cases = Vec::new();
    let stacks = if quick { &StackKind::kernel()[2..] } else { &StackKind::kernel()[..] };
    let ways = APPLICATIONS.len() * neighbours.len() * stacks.len();
    let first_pass = Progress::of_part("first pass", ways);
    for application in APPLICATIONS {
        for &neighbours in neighbours {
            let choose = Case::choose_kernel;
            let seconds = config.seconds;
            cases.push(choose(application, neighbours, stacks, &testbed, seconds, &first_pass)?);
        }
    }
    drop(first_pass);
    let rows = cases.iter().map(|case| case.rows.len()).sum::<usize>();
    let progress = Progress::new(rows * config.repeats);
    for repeat in 1..=config.repeats {
        for row in cases.iter_mut().flat_map(|case| &mut case.rows) {
            row.measure(&testbed, config.seconds)?;
            progress.step(format_args!("{repeat} of {}: {}", config.repeats, row.describe()));
        }
    }
    Ok(report(config, &cases))
}

/// Measurements of one application beside a number of CPU-bound programs.
struct Case {
    /// One for each of [`CONNECTIONS`].
    first_passes: Vec<FirstPass<StackKind>>,
    /// The kernel's best ways, and Tidegate's.
    rows: Vec<Row>,
}

impl Case {
    /// Measures the kernel's ways once, and chooses the best for each number of connections.
    fn choose_kernel(
        application: Application,
        neighbours: usize,
        stacks: &[StackKind],
        testbed: &FloodTestbed,
        seconds: f64,
        progress: &Progress,
    ) -> Result<Self, LabError> {
        let measured = stacks.iter().map(|&stack| {
            let mut row = Row::new(application, stack, neighbours);
            row.measure_rates(testbed, seconds.min(FIRST_PASS_SECONDS))?;
            progress.step(format_args!("first pass: {}", row.describe()));
            Ok(row)
        });
        let measured = measured.collect::<Result<Vec<_>, LabError>>()?;
        let first_pass = |index| {
            let ways = measured.iter();
            let ways = ways.map(|row| (row.stack, row.stack.name().to_owned(), row.rate(index)));
            FirstPass::new(Goal::Highest, ways)
        };
        let first_passes: Vec<_> = (0..CONNECTIONS.len()).map(first_pass).collect();
        let mut stacks = distinct_best(&first_passes);
        stacks.extend([StackKind::Embedded, StackKind::Attached]);
        let row = |stack| Row::new(application, stack, neighbours);
        Ok(Self { first_passes, rows: stacks.into_iter().map(row).collect() })
    }

    /// Best value of the kernel's rows.
    fn kernel_best(&self, value: impl Fn(&Row) -> f64, best: fn(f64, f64) -> f64) -> f64 {
        let kernel = self.rows.iter().filter(|row| row.stack.is_kernel());
        kernel.map(value).reduce(best).unwrap_or(f64::NAN)
    }

    fn of_stack(&self, stack: StackKind) -> impl Iterator<Item = &Row> {
        self.rows.iter().filter(move |row| row.stack == stack)
    }
}

impl Neighbours {
    fn start(core: usize, count: usize) -> Result<Self, LabError> {
        let start = |_| {
            let mut command = crate::testbed::process::command_on_core(core, "sh");
            ServerProcess::start("busy loop", command.args(["-c", "while :; do :; done"]))
        };
        (0..count).map(start).collect::<Result<_, _>>().map(Self)
    }

    /// Processor time of all programs since their start, in seconds: their own, and that with the
    /// interrupts during their time.
    fn cpu_seconds(&self) -> Result<[f64; 2], LabError> {
        let seconds = |ticks: fn(u32) -> Result<u64, LabError>| {
            let ticks = self.0.iter().map(|process| ticks(process.pid()));
            let ticks: u64 = ticks.sum::<Result<u64, _>>()?;
            Ok::<_, LabError>(ticks as f64 / cpu::ticks_per_second() as f64)
        };
        Ok([seconds(cpu::user_ticks)?, seconds(cpu::process_ticks)?])
    }
}

impl Row {
    fn new(application: Application, stack: StackKind, neighbours: usize) -> Self {
        Self {
            application,
            stack,
            neighbours,
            requests_per_second: Default::default(),
            answered: Vec::new(),
            neighbour_cpu: Vec::new(),
            neighbour_cpu_with_interrupts: Vec::new(),
            ack_p99_ms: Vec::new(),
        }
    }

    /// Starts the service and the CPU-bound programs, and measures the rates of the closed loop.
    fn measure_rates(
        &mut self,
        testbed: &FloodTestbed,
        seconds: f64,
    ) -> Result<(RunningService, Neighbours), LabError> {
        let core = testbed.server_core;
        let same_core = CoreAssignment { application: core, daemon: core };
        let service = start_service(testbed, self.application, self.stack, same_core, &[])?;
        let neighbours = Neighbours::start(core, self.neighbours)?;
        for (connections, rates) in CONNECTIONS.into_iter().zip(&mut self.requests_per_second) {
            rates.push(measure_rate(testbed, self.application, &service, connections, seconds)?);
        }
        Ok((service, neighbours))
    }

    fn measure(&mut self, testbed: &FloodTestbed, seconds: f64) -> Result<(), LabError> {
        let (service, neighbours) = self.measure_rates(testbed, seconds)?;
        if self.neighbours == NEIGHBOURS[0] {
            let (answered, [own, with_interrupts]) =
                measure_fixed_rate(testbed, &service, &neighbours, seconds)?;
            self.answered.push(answered);
            self.neighbour_cpu.push(own);
            self.neighbour_cpu_with_interrupts.push(with_interrupts);
            if self.application == Application::Echo {
                let client = &testbed.pair.a.namespace;
                let load_core = testbed.load_core;
                let target = service.target;
                let p99 = client.enter(|| measure_acks(target, load_core, seconds))??;
                self.ack_p99_ms.push(p99);
            }
        }
        drop(neighbours);
        service.stop();
        Ok(())
    }

    fn rate(&self, index: usize) -> f64 {
        median(self.requests_per_second[index].iter().copied())
    }

    fn describe(&self) -> String {
        let last = |values: &Vec<f64>| values.last().copied().unwrap_or(0.0);
        let rates = self.requests_per_second.each_ref().map(|rates| format!("{:.0}", last(rates)));
        format!(
            "{:<5} {:<14} beside {}: {} requests/s",
            self.application.name(),
            self.stack.name(),
            self.neighbours,
            rates.join(", ")
        )
    }
}

/// Requests per second in a closed loop: by a packaged benchmark program if there is one for the
/// application, else from kernel sockets.
fn measure_rate(
    testbed: &FloodTestbed,
    application: Application,
    service: &RunningService,
    connections: usize,
    seconds: f64,
) -> Result<f64, LabError> {
    let packaged =
        packaged_load::measure(testbed, application, service.target, connections, seconds);
    packaged.unwrap_or_else(|| {
        let load = TcpLoadConfig {
            warm_up_seconds: seconds / 4.0,
            ..service.kernel_load_config(testbed, connections, seconds)
        };
        Ok(testbed.pair.a.namespace.enter(|| load_tcp(&load))??.requests_per_second)
    })
}

/// Answered part of [`FIXED_RPS`], and CPU seconds per second of the neighbours meanwhile: their own,
/// and those with interrupts.
fn measure_fixed_rate(
    testbed: &FloodTestbed,
    service: &RunningService,
    neighbours: &Neighbours,
    seconds: f64,
) -> Result<(f64, [f64; 2]), LabError> {
    let load = TcpLoadConfig {
        rate_per_second: Some(FIXED_RPS),
        ..service.kernel_load_config(testbed, FIXED_RPS_CONNECTIONS, seconds)
    };
    let (began, before) = (Instant::now(), neighbours.cpu_seconds()?);
    let report = testbed.pair.a.namespace.enter(|| load_tcp(&load))??;
    let (after, elapsed) = (neighbours.cpu_seconds()?, began.elapsed().as_secs_f64());
    let cpu = [0, 1].map(|index| (after[index] - before[index]) / elapsed);
    Ok((report.requests_per_second / FIXED_RPS, cpu))
}

/// Time from sending a message to its acknowledgement, 99th percentile in milliseconds. The
/// kernel is the client; this thread polls the client's send queue.
fn measure_acks(target: SocketAddr, core: usize, seconds: f64) -> Result<f64, LabError> {
    cpu::pin_this_thread(core)?;
    let failed = || LabError::io("cannot time acknowledgements");
    let mut stream = TcpStream::connect(target).map_err(failed())?;
    stream.set_nodelay(true).map_err(failed())?;
    stream.set_read_timeout(Some(ACK_TIMEOUT)).map_err(failed())?;
    let mut times_ms = Vec::new();
    let began = Instant::now();
    while began.elapsed().as_secs_f64() < seconds {
        let sent = Instant::now();
        stream.write_all(&MESSAGE).map_err(failed())?;
        while sys::unacknowledged_bytes(stream.as_fd()).map_err(failed())? > 0 {
            if sent.elapsed() > ACK_TIMEOUT {
                return Err(LabError::Config("a message was not acknowledged in 10 s".into()));
            }
        }
        times_ms.push(sent.elapsed().as_secs_f64() * 1e3);
        stream.read_exact(&mut MESSAGE.clone()).map_err(failed())?;
        std::thread::sleep(ACK_PAUSE);
    }
    times_ms.sort_unstable_by(f64::total_cmp);
    Ok(times_ms[(times_ms.len() * 99 / 100).min(times_ms.len() - 1)])
}

/// Sets `figure` to the worst ratio of a row of `stack` to the kernel's best row, for all
/// applications and numbers of connections.
fn compare_rates(cases: &[Case], stack: StackKind, figure: &str, result: &mut Experiment) -> f64 {
    let mut worst: Option<(f64, KernelRows)> = None;
    for case in cases {
        for (index, first_pass) in case.first_passes.iter().enumerate() {
            let kernel = case.kernel_best(|row| row.rate(index), f64::max);
            for row in case.of_stack(stack) {
                let ratio = row.rate(index) / kernel;
                if worst.as_ref().is_none_or(|(lowest, _)| ratio < *lowest) {
                    worst = Some((ratio, first_pass.rows(kernel)));
                }
            }
        }
    }
    let Some((ratio, kernel)) = worst else { return f64::INFINITY };
    result.compare_with_best(figure, ratio, kernel);
    ratio
}

/// Worst ratio of the neighbours' CPU time beside Tidegate to that beside the kernel's server at the
/// same rate.
fn min_neighbour_share(cases: &[Case], cpu_times: fn(&Row) -> &Vec<f64>) -> f64 {
    let cpu = |row: &Row| median(cpu_times(row).iter().copied());
    let ratios = cases.iter().flat_map(|case| {
        let ours = case.rows.iter().filter(|row| !row.stack.is_kernel());
        let measured = ours.filter(|row| !cpu_times(row).is_empty());
        measured.map(|row| cpu(row) / case.kernel_best(cpu, f64::max))
    });
    round_to_thousandths(ratios.fold(f64::INFINITY, f64::min))
}

fn report(config: &TcpLabConfig, cases: &[Case]) -> Experiment {
    let mut result = Experiment::new("noisy");
    let [embedded, attached] = [StackKind::Embedded, StackKind::Attached];
    let ratios = [(embedded, "noisy_ratio_min_embedded"), (attached, "noisy_ratio_min_attached")]
        .map(|(stack, figure)| compare_rates(cases, stack, figure, &mut result));
    result.figure("noisy_ratio_min", round_to_thousandths(ratios[0].min(ratios[1])));
    let share = min_neighbour_share(cases, |row| &row.neighbour_cpu);
    result.figure("noisy_neighbour_share", share);
    let share = min_neighbour_share(cases, |row| &row.neighbour_cpu_with_interrupts);
    result.figure("noisy_neighbour_share_with_interrupts", share);
    let rows = || cases.iter().flat_map(|case| &case.rows);
    let ack = |row: &Row| median(row.ack_p99_ms.iter().copied());
    let timed: Vec<&Row> = rows().filter(|row| !row.ack_p99_ms.is_empty()).collect();
    let ours = timed.iter().filter(|row| !row.stack.is_kernel()).map(|row| ack(row));
    result.figure("noisy_ack_p99_ms", ours.fold(0.0, f64::max));
    let kernels = timed.iter().filter(|row| row.stack.is_kernel()).map(|row| ack(row));
    result.figure("noisy_ack_p99_ms_kernel", kernels.fold(f64::INFINITY, f64::min));
    let measured = |values: &Vec<f64>| (!values.is_empty()).then(|| median(values.iter().copied()));
    result.rows = rows()
        .map(|row| {
            json!({
                "program": row.application.name(),
                "way": row.stack.name(),
                "neighbours": row.neighbours,
                "rps_1": row.rate(0).round(),
                "rps_16": row.rate(1).round(),
                "rps_64": row.rate(2).round(),
                "answered": measured(&row.answered),
                "neighbour_cpu": measured(&row.neighbour_cpu),
                "neighbour_cpu_with_interrupts": measured(&row.neighbour_cpu_with_interrupts),
                "ack_p99_ms": measured(&row.ack_p99_ms),
            })
        })
        .collect();
    result.columns = vec![
        "program",
        "way",
        "neighbours",
        "rps_1",
        "rps_16",
        "rps_64",
        "answered",
        "neighbour_cpu",
        "ack_p99_ms",
    ];
    result.note(format!(
        "server, daemon and CPU-bound programs (neighbours) on core 1, the load on core 0; rps_N: \
         requests/s of a closed loop on N connections, by redis-benchmark for redis, wrk for \
         nginx, and kernel sockets for echo; medians of {}",
        config.repeats
    ));
    result.note(format!(
        "answered, neighbour_cpu: answered part of {FIXED_RPS} requests/s in an open loop, and CPU \
         seconds per second of the neighbour's own code meanwhile (neighbour_cpu_with_interrupts: \
         as ps and top count them, with the interrupts during its time: receive work that the \
         kernel does in softirqs counts as the neighbour's); ack_p99_ms: time from sending 64 bytes to \
         their acknowledgement, 99th percentile"
    ));
    result.note(
        "a first pass measures the kernel with its receive work in softirqs where Linux puts them \
         (kernel-softirq), by RPS on core 1 (kernel-rps), in a NAPI thread there (kernel-thread), \
         and in the program's own calls by net.core.busy_poll (kernel-busy-poll); the best of these \
         for each number of connections is measured again in turn with Tidegate, and the ratios \
         are to it",
    );
    result
}
