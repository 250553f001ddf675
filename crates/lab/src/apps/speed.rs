//! `lab apps`: requests per second of unmodified programs, calm and under a
//! flood.

use std::thread;
use std::time::Duration;

use serde_json::json;

use super::program::Program;
use super::site::{Asked, Cores, Served, Way, check, serve};
use crate::error::LabError;
use crate::experiment::Experiment;
use crate::livelock::bench::{Bench, GIGABIT_LINE_PPS, Meter, ReceiveWork, Source};
use crate::load::{TcpLoadConfig, TcpLoadReport, load_tcp};
use crate::tcp::{TcpConfig, cores, median};

/// Connections that ask.
const CONNECTIONS: u16 = 50;
/// Requests per second while a flood comes: so many that the core that also
/// sends the flood can make them.
pub(super) const UNDER_FLOOD_RPS: f64 = 10_000.0;
/// A source is known when it was seen in two periods of a second in a row, and
/// the first one is not whole.
const LEARNING_SECONDS: f64 = 4.0;
/// From the beginning of the flood to that of the measurement.
const SETTLING_SECONDS: f64 = 1.0;
/// Nobody's.
const FLOODED_PORT: u16 = 9;

/// One program, served in one way.
struct Row {
    program: Program,
    way: Way,
    calm: Vec<Asked>,
    /// Answered over due, calm and under the flood.
    flooded: Vec<(f64, f64)>,
    offered_pps: Vec<f64>,
}

/// Redis, memcached and nginx on the kernel, with a stack inside, and attached
/// to the daemon.
///
/// # Errors
/// When a program is not installed or does not start.
pub fn run(config: &TcpConfig) -> Result<Experiment, LabError> {
    check(&Program::ALL)?;
    let (server_core, load_core) = cores()?;
    let bench = Bench::new(server_core, load_core)?;
    let mut rows: Vec<Row> = Program::ALL
        .into_iter()
        .flat_map(|program| Way::ALL.map(|way| (program, way)))
        .map(|(program, way)| {
            let (calm, flooded, offered_pps) = (Vec::new(), Vec::new(), Vec::new());
            Row { program, way, calm, flooded, offered_pps }
        })
        .collect();
    let on_one = Cores { program: server_core, daemon: server_core };
    for repeat in 1..=config.repeats {
        for row in &mut rows {
            let served = serve(&bench, row.program, row.way, on_one, flags(row.way))?;
            let calm = served.ask(&bench, row.way, CONNECTIONS, config.seconds)?;
            eprintln!(
                "{repeat} {:<9} {:<13} {:>8.0} requests/s, p99 {:.0} us",
                row.program.name(),
                row.way.name(),
                calm.load.requests_per_second,
                calm.load.latency.p99_us
            );
            row.calm.push(calm);
            if row.program == Program::Redis {
                let (answered, offered_pps) = flood(&bench, &served, row.way, config.seconds)?;
                eprintln!(
                    "{repeat} {:<9} {:<13} under {offered_pps:.0} packets/s: {:.3} of {:.3}",
                    row.program.name(),
                    row.way.name(),
                    answered.1,
                    answered.0
                );
                row.flooded.push(answered);
                row.offered_pps.push(offered_pps);
            }
            served.stop();
        }
    }
    Ok(report(config, &rows))
}

/// What makes a stack of ours know its peers when not everything can be taken.
fn flags(way: Way) -> &'static [&'static str] {
    match way {
        Way::Kernel | Way::KernelThread => &[],
        Way::Embedded | Way::Attached => &["--admission"],
    }
}

/// The part of the requests that is answered, calm and while strangers flood,
/// and how many packets they send per second.
pub(super) fn flood(
    bench: &Bench,
    served: &Served,
    way: Way,
    seconds: f64,
) -> Result<((f64, f64), f64), LabError> {
    let load = TcpLoadConfig {
        rate_per_second: Some(UNDER_FLOOD_RPS),
        warm_up_seconds: LEARNING_SECONDS,
        seconds,
        ..served.load(bench, CONNECTIONS.into())
    };
    let calm = bench.pair.a.namespace.enter(|| load_tcp(&load))??;
    let work = match way {
        Way::Kernel => ReceiveWork::Steered,
        Way::KernelThread => ReceiveWork::Thread,
        Way::Embedded | Way::Attached => ReceiveWork::Server,
    };
    let target = (served.target.ip(), FLOODED_PORT).into();
    let payload: &[u8] = &[0; 18];
    let payloads = std::iter::repeat_n(payload, Source::Strangers.flows());
    let mut flood = bench.flood(Source::Strangers, target, payloads, work)?;
    let during = TcpLoadConfig { warm_up_seconds: LEARNING_SECONDS + SETTLING_SECONDS, ..load };
    let client = bench.pair.a.namespace.spawn(move || load_tcp(&during))?;
    // Known before the flood, and measured all through it.
    thread::sleep(Duration::from_secs_f64(LEARNING_SECONDS));
    let time = Duration::from_secs_f64(seconds + SETTLING_SECONDS);
    let rate = Some(GIGABIT_LINE_PPS);
    let measured = bench.measure(&mut flood, &Meter::Answers, rate, Duration::ZERO, time);
    let flooded = client.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
    flood.set_rate(Some(0.0))?;
    let answered = |load: &TcpLoadReport| load.requests_per_second / UNDER_FLOOD_RPS;
    Ok(((answered(&calm), answered(&flooded)), measured?.offered_pps))
}

impl Row {
    fn rps(&self) -> f64 {
        median(self.calm.iter().map(|run| run.load.requests_per_second))
    }

    /// What is left of the calm rate under the flood.
    fn kept(&self) -> Option<f64> {
        let kept = self.flooded.iter().map(|(calm, flooded)| flooded / calm);
        (!self.flooded.is_empty()).then(|| median(kept))
    }
}

fn report(config: &TcpConfig, rows: &[Row]) -> Experiment {
    let mut result = Experiment::new("apps");
    let find = |program, way| {
        rows.iter()
            .find(|row| row.program == program && row.way == way)
            .expect("every program is served in every way")
    };
    for program in Program::ALL {
        let [steered, threaded] =
            [Way::Kernel, Way::KernelThread].map(|way| find(program, way).rps());
        let kernel = steered.max(threaded);
        let [embedded, attached] =
            [Way::Embedded, Way::Attached].map(|way| find(program, way).rps() / kernel);
        let name = program.name();
        result.figure(&format!("{name}_ratio"), embedded.max(attached));
        result.figure(&format!("{name}_ratio_embedded"), embedded);
        result.figure(&format!("{name}_ratio_attached"), attached);
    }
    let kept = |way| find(Program::Redis, way).kept().unwrap_or(0.0);
    result.figure("redis_under_flood", kept(Way::Embedded).max(kept(Way::Attached)));
    result.figure("redis_under_flood_embedded", kept(Way::Embedded));
    result.figure("redis_under_flood_attached", kept(Way::Attached));
    result.figure("redis_under_flood_kernel", kept(Way::Kernel));
    result.figure("redis_under_flood_kernel_thread", kept(Way::KernelThread));
    result.rows = rows
        .iter()
        .map(|row| {
            let of = |figure: fn(&Asked) -> f64| median(row.calm.iter().map(figure));
            let all = |count: fn(&Asked) -> u64| row.calm.iter().map(count).sum::<u64>();
            json!({
                "program": row.program.name(),
                "way": row.way.name(),
                "requests_per_second": row.rps().round(),
                "p50_us": of(|run| run.load.latency.p50_us),
                "p99_us": of(|run| run.load.latency.p99_us),
                "server_core_percent": of(|run| run.server_core_percent),
                "kept_under_flood": row.kept(),
                "flood_pps": (!row.offered_pps.is_empty())
                    .then(|| median(row.offered_pps.iter().copied()).round()),
                "wrong_answers": all(|run| run.load.wrong_answers),
                "broken": all(|run| run.load.broken),
            })
        })
        .collect();
    result.columns = vec![
        "program",
        "way",
        "requests_per_second",
        "p50_us",
        "p99_us",
        "server_core_percent",
        "kept_under_flood",
        "flood_pps",
    ];
    result.note(format!(
        "programs as Debian has them, one process and one thread; {CONNECTIONS} connections, one \
         request each at a time, answers of 64 bytes; the server's side on core 1, the load on \
         core 0 by a program on its device, which makes a question of each answer; medians of {}",
        config.repeats
    ));
    result.note(
        "kernel: receive work by RPS, which leaves the driver's part and merging to core 0; the \
         others have all receive work on core 1, in a NAPI thread or in their own polls; ratios \
         are to the better one of the kernel's",
    );
    result.note(format!(
        "under the flood: {UNDER_FLOOD_RPS} requests/s in an open loop while 8,192 strangers send \
         UDP to nobody's port, up to the rate of a line of 1 Gb/s, from core 0 too, which asks \
         by a stack of its own; what is kept is what is answered over what was answered calm"
    ));
    result
}
