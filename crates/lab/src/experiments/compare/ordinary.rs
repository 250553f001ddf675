//! `lab ordinary`: an ordinary day. A client on kernel sockets that never sleeps, on core 0; a server
//! on core 1, on Tidegate as it starts by itself, and on the kernel at its best.

use serde_json::{Value, json};

use super::spinning_client::{Case, MANY_IN_FLIGHT, Run, Traffic};
use crate::error::LabError;
use crate::experiments::kernel_best::{FIRST_PASS_SECONDS, FirstPass, Goal};
use crate::report::experiment::{Experiment, KernelRows};
use crate::report::progress::Progress;
use crate::stats::{median, round_to_thousandths};
use crate::testbed::receive_work::ReceiveWork;
use crate::testbed::tcp::{KernelProgram, ServerKind, TcpLabConfig, TcpTestbed, choose_cores};

/// Requests in flight of a few peers: enough to keep the server from sleeping, too few for large
/// bursts.
const FEW_IN_FLIGHT: usize = 4;

const TRAFFIC: [Traffic; 10] = [
    Traffic::Tcp { connections: 1 },
    Traffic::Tcp { connections: FEW_IN_FLIGHT },
    Traffic::Tcp { connections: MANY_IN_FLIGHT },
    Traffic::Udp { in_flight: 1 },
    Traffic::Udp { in_flight: FEW_IN_FLIGHT },
    Traffic::Udp { in_flight: MANY_IN_FLIGHT },
    Traffic::Stream { into_server: true, offload: false },
    Traffic::Stream { into_server: false, offload: false },
    Traffic::Stream { into_server: true, offload: true },
    Traffic::Stream { into_server: false, offload: true },
];

/// Figure to which the worst case of the traffic counts.
fn figure(traffic: Traffic) -> &'static str {
    match traffic {
        Traffic::Tcp { connections: 1 } | Traffic::Udp { in_flight: 1 } => "latency_ratio",
        Traffic::Tcp { connections: FEW_IN_FLIGHT } | Traffic::Udp { in_flight: FEW_IN_FLIGHT } => {
            "rate_4_ratio"
        }
        Traffic::Tcp { .. } | Traffic::Udp { .. } => "rate_64_ratio",
        Traffic::Stream { into_server: true, offload: false } => "stream_in_ratio",
        Traffic::Stream { into_server: false, offload: false } => "stream_out_ratio",
        Traffic::Stream { into_server: true, offload: true } => "stream_in_gso_ratio",
        Traffic::Stream { into_server: false, offload: true } => "stream_out_gso_ratio",
    }
}

/// The kernel's servers for the traffic.
fn kernel_servers(traffic: Traffic) -> Vec<ServerKind> {
    let datagrams = ReceiveWork::KERNEL.map(|work| {
        // Datagrams have one program.
        ServerKind::Kernel(KernelProgram::Epoll, work)
    });
    match traffic {
        Traffic::Tcp { .. } => ServerKind::KERNEL.to_vec(),
        Traffic::Udp { .. } => datagrams.to_vec(),
        Traffic::Stream { .. } => ServerKind::kernel_stream_servers(),
    }
}

/// Measurements of one case: the kernel's best and Tidegate's.
struct CaseResults {
    case: Case,
    kernel: FirstPass<ServerKind>,
    kernel_runs: Vec<Run>,
    own_runs: Vec<Run>,
}

fn median_of(runs: &[Run], figure: fn(&Run) -> f64) -> f64 {
    median(runs.iter().map(figure))
}

impl CaseResults {
    /// Median ratio of Tidegate's run to the kernel's run beside it: the speed of a shared machine
    /// changes from one pair to the next.
    fn ratio_of(&self, figure: fn(&Run) -> f64) -> f64 {
        let pairs = self.own_runs.iter().zip(&self.kernel_runs);
        median(pairs.map(|(own, kernel)| figure(own) / figure(kernel)))
    }

    /// Tidegate's value over the kernel's.
    fn ratio(&self) -> f64 {
        self.ratio_of(|run| run.value)
    }

    /// Tidegate's processor time for a unit of work over the kernel's.
    fn cpu_ratio(&self) -> f64 {
        self.ratio_of(|run| run.server_us)
    }

    fn kernel_rows(&self) -> KernelRows {
        self.kernel.rows(median_of(&self.kernel_runs, |run| run.value))
    }

    fn rows(&self) -> [Value; 2] {
        let row = |server: &str, runs: &[Run]| {
            json!({
                "case": self.case.to_string(),
                "server": server,
                "value": round_to_thousandths(median_of(runs, |run| run.value)),
                "unit": self.case.traffic.unit(),
                "server_us": round_to_thousandths(median_of(runs, |run| run.server_us)),
            })
        };
        let kernel = self.kernel.best().name();
        [row("tidegate", &self.own_runs), row(&kernel, &self.kernel_runs)]
    }
}

/// Measures Tidegate beside the kernel in each case.
///
/// # Errors
/// If namespaces cannot be created, or a server does not start.
pub fn run(config: &TcpLabConfig, only: Option<&str>) -> Result<Experiment, LabError> {
    let (server_core, load_core) = choose_cores()?;
    let testbed = TcpTestbed::new(server_core, load_core)?;
    let cases = Case::of_traffic(&TRAFFIC, only)?;
    testbed.wait_for_ipv6()?;
    let first_seconds = (config.seconds / 4.0).clamp(0.1, FIRST_PASS_SECONDS);
    let ways = cases.iter().map(|case| kernel_servers(case.traffic).len()).sum();
    let progress = Progress::of_part("first pass", ways);
    let mut results = Vec::new();
    for case in cases {
        let servers = kernel_servers(case.traffic);
        let kernel =
            FirstPass::measure(case.traffic.goal(), &servers, ServerKind::name, |server_kind| {
                let run = case.measure_serve(&testbed, server_kind, first_seconds)?;
                step(&progress, case, server_kind, run);
                Ok(run.value)
            })?;
        results.push(CaseResults { case, kernel, kernel_runs: Vec::new(), own_runs: Vec::new() });
    }
    drop(progress);
    let progress = Progress::new(2 * results.len() * config.repeats);
    for _ in 0..config.repeats {
        for CaseResults { case, kernel, kernel_runs, own_runs } in &mut results {
            for (server_kind, runs) in
                [(kernel.best(), kernel_runs), (ServerKind::TidegateDefault, own_runs)]
            {
                let run = case.measure_serve(&testbed, server_kind, config.seconds)?;
                step(&progress, *case, server_kind, run);
                runs.push(run);
            }
        }
    }
    Ok(conclude(&results))
}

fn step(progress: &Progress, case: Case, server_kind: ServerKind, run: Run) {
    progress.step(format_args!(
        "{case:<40} {:<22} {:.1} {}, {:.2} us of the server's core",
        server_kind.name(),
        run.value,
        case.traffic.unit(),
        run.server_us
    ));
}

fn conclude(results: &[CaseResults]) -> Experiment {
    let mut result = Experiment::new("ordinary");
    for traffic in TRAFFIC {
        let name = figure(traffic);
        if result.figures.contains_key(name) {
            continue;
        }
        let of_figure = results.iter().filter(|one| figure(one.case.traffic) == name);
        // The worse of protocols and families.
        let worst = match traffic.goal() {
            Goal::Lowest => of_figure.max_by(|one, other| one.ratio().total_cmp(&other.ratio())),
            Goal::Highest => of_figure.min_by(|one, other| one.ratio().total_cmp(&other.ratio())),
        };
        if let Some(worst) = worst {
            result.compare_with_best(name, worst.ratio(), worst.kernel_rows());
        }
    }
    let busy = results.iter().filter(|one| figure(one.case.traffic) == "rate_64_ratio");
    if let Some(worst) = busy.map(CaseResults::cpu_ratio).reduce(f64::max) {
        result.figure("cpu_64_ratio", round_to_thousandths(worst));
    }
    result.rows = results.iter().flat_map(CaseResults::rows).collect();
    result.note(
        "a client on kernel sockets on core 0 that never sleeps; the server on core 1: tidegate serve \
         echo with no option but interface and address, and the same server on kernel sockets in the \
         kernel's best way, chosen in a first pass and measured again in turn; messages of 64 bytes",
    );
    result.note(
        "latency_ratio: median with one request in flight, below 1 is better; rate_4_ratio and \
         rate_64_ratio: requests/s with 4 and 64 in flight; stream_*_ratio: bytes one way with frames \
         as on a wire, with _gso with GSO and GRO at both ends; each the worse of TCP and UDP, IPv4 and IPv6; cpu_64_ratio: busy time of \
         the server's core for a request with 64 in flight over the kernel's, the worst case; each the \
         median ratio of two runs one after the other",
    );
    result
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testbed::tcp::Family;

    #[test]
    fn cases_are_chosen_by_their_words() {
        assert_eq!(Case::of_traffic(&TRAFFIC, None).unwrap().len(), 2 * TRAFFIC.len());
        assert_eq!(Case::of_traffic(&TRAFFIC, Some("UDP IPv6")).unwrap().len(), 3);
        assert!(
            Case::of_traffic(&TRAFFIC, Some("no such case"))
                .unwrap_err()
                .to_string()
                .contains("no such case")
        );
    }

    fn results(traffic: Traffic, own: &[f64], kernel: &[f64]) -> CaseResults {
        let best = ServerKind::KERNEL[0];
        let runs = |values: &[f64], server_us| {
            values.iter().map(|&value| Run { value, server_us }).collect()
        };
        CaseResults {
            case: Case { traffic, family: Family::V4 },
            kernel: FirstPass::new(traffic.goal(), [(best, best.name(), kernel[0])]),
            kernel_runs: runs(kernel, 1.0),
            own_runs: runs(own, 2.0),
        }
    }

    #[test]
    fn figures_have_the_worst_case() {
        let results = |traffic, own, kernel| results(traffic, &[own], &[kernel]);
        let result = conclude(&[
            results(Traffic::Tcp { connections: 1 }, 10.0, 20.0),
            results(Traffic::Udp { in_flight: 1 }, 30.0, 20.0),
            results(Traffic::Udp { in_flight: 4 }, 70.0, 100.0),
            results(Traffic::Tcp { connections: 64 }, 300.0, 100.0),
            results(Traffic::Udp { in_flight: 64 }, 50.0, 100.0),
        ]);
        assert_eq!(result.figures["latency_ratio"], 1.5);
        assert_eq!(result.figures["rate_4_ratio"], 0.7);
        assert_eq!(result.figures["rate_64_ratio"], 0.5);
        assert_eq!(result.figures["cpu_64_ratio"], 2.0);
        assert!(!result.figures.contains_key("stream_in_ratio"));
    }

    /// On a machine that is slower for a while, both sides of a pair are.
    #[test]
    fn ratio_is_that_of_runs_one_after_the_other() {
        let traffic = Traffic::Tcp { connections: 1 };
        let results = results(traffic, &[18.0, 36.0, 36.0], &[20.0, 20.0, 40.0]);
        assert_eq!(results.ratio(), 0.9);
    }
}
