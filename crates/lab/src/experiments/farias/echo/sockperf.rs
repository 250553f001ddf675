//! sockperf: its client on kernel sockets, its server unmodified on the kernel and on Tidegate.

use serde_json::json;

use super::EchoPoint;
use crate::error::LabError;
use crate::experiments::kernel_best::Goal;
use crate::experiments::packaged_program::ProgramResults;
use crate::report::experiment::Experiment;
use crate::report::progress::Progress;
use crate::testbed::apps::StackKind;
use crate::testbed::apps::packaged_pair::{RoundTrips, SockperfLoad, measure_round_trips};
use crate::testbed::flood::FloodTestbed;
use crate::testbed::tcp::{TcpLabConfig, choose_cores};

/// Measures round trips of sockperf at the point of one client, and adds them to `result`.
pub(super) fn add_rows(
    config: &TcpLabConfig,
    EchoPoint { connections, bytes }: EchoPoint,
    result: &mut Experiment,
) -> Result<(), LabError> {
    let (server_core, load_core) = choose_cores()?;
    let testbed = FloodTestbed::new(server_core, load_core)?;
    let measure = |stack: StackKind, progress: &Progress| {
        let run =
            measure_round_trips(&testbed, stack, SockperfLoad::PingPong, bytes, config.seconds)?;
        progress.step(format_args!(
            "sockperf {:<22} {bytes:>5} B: p50 {:.1} us, p90 {:.1} us",
            stack.name(),
            run.p50_us,
            run.p90_us
        ));
        Ok(run)
    };
    let steps = ProgramResults::<RoundTrips>::first_pass_steps();
    let progress = Progress::of_part("first pass, sockperf", steps);
    let mut results = ProgramResults::choose_kernel(
        Goal::Lowest,
        |run: &RoundTrips| run.p50_us,
        |stack| measure(stack, &progress),
    )?;
    drop(progress);
    let progress = Progress::of_part("sockperf", results.rows().len() * config.repeats);
    for _ in 0..config.repeats {
        results.measure(|stack| measure(stack, &progress))?;
    }
    results.compare(result, "p50_ratio_1_sockperf");
    result.rows.extend(results.rows().iter().map(|row| {
        json!({
            "server": format!("sockperf-{}", row.stack.name()),
            "connections": connections,
            "bytes": bytes,
            "requests_per_second": row.median(|run| 1e6 / run.mean_us),
            "p50_us": row.median(|run| run.p50_us),
            "spread_percent": row.spread_percent(|run| run.p50_us),
            "p90_us": row.median(|run| run.p90_us),
            "p99_us": row.median(|run| run.p99_us),
        })
    }));
    result.note(
        "sockperf: Debian's package, ping-pong on one TCP connection, its client on kernel sockets \
         on core 0, its server unmodified on core 1: on the kernel's best way by its median, \
         embedded, and attached to a daemon on core 1 (p50_ratio_1_sockperf_embedded, _attached); \
         spread: of the median, largest less smallest of all repetitions, in percent",
    );
    Ok(())
}
