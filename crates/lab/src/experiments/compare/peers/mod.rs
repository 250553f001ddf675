//! `lab peers`: other user-space network stacks on the same link in the same run. A client on kernel
//! sockets that never sleeps, on core 0; a server on core 1, on Tidegate as it starts by itself, and
//! on each peer.
//!
//! A peer is a small program on its stack and a packet socket, with a protocol of its own:
//! `--iface NAME --address ADDRESS/BITS --port NUMBER --role echo|sink|source --connections COUNT`. It
//! serves at that address, which the kernel does not have, prints a line when it is ready, and ends
//! by SIGTERM. An echo server echoes TCP and UDP; a sink only receives and a source only sends.

mod programs;

use serde_json::{Value, json};

use self::programs::{LeftOut, Peer};
use super::spinning_client::{Case, MANY_IN_FLIGHT, Run, Traffic};
use crate::error::LabError;
use crate::experiments::kernel_best::{FIRST_PASS_SECONDS, FirstPass, Goal};
use crate::report::experiment::Experiment;
use crate::report::progress::Progress;
use crate::stats::{median, round_to_thousandths, spread_percent};
use crate::testbed::receive_work::ReceiveWork;
use crate::testbed::tcp::{ServerKind, TcpLabConfig, TcpTestbed, choose_cores};

/// Tidegate on a packet socket.
const ON_PACKET: ServerKind = ServerKind::TidegatePacket(ReceiveWork::Softirq);
const TRAFFIC: [Traffic; 5] = [
    Traffic::Tcp { connections: 1 },
    Traffic::Tcp { connections: MANY_IN_FLIGHT },
    Traffic::Udp { in_flight: MANY_IN_FLIGHT },
    Traffic::Stream { into_server: true, offload: false },
    Traffic::Stream { into_server: false, offload: false },
];
/// Ways to do the receive work of a peer's device.
const WAYS: [ReceiveWork; 2] = [ReceiveWork::Softirq, ReceiveWork::Steered];

/// Figure to which the worst case of the traffic counts.
fn figure(traffic: Traffic) -> &'static str {
    match traffic {
        _ if traffic.goal() == Goal::Lowest => "peer_latency_ratio",
        Traffic::Stream { .. } => "peer_stream_ratio",
        _ => "peer_rate_ratio",
    }
}

fn arguments(traffic: Traffic) -> [&'static str; 4] {
    match traffic {
        Traffic::Tcp { connections: 1 } => ["--role", "echo", "--connections", "1"],
        Traffic::Tcp { .. } => ["--role", "echo", "--connections", "64"],
        Traffic::Udp { .. } => ["--role", "echo", "--connections", "0"],
        Traffic::Stream { into_server: true, .. } => ["--role", "sink", "--connections", "1"],
        Traffic::Stream { into_server: false, .. } => ["--role", "source", "--connections", "1"],
    }
}

/// Measures `peer` in one case.
///
/// # Errors
/// Also if nothing arrives.
fn measure(
    case: Case,
    testbed: &TcpTestbed,
    peer: &Peer,
    work: ReceiveWork,
    seconds: f64,
) -> Result<Run, LabError> {
    let Peer { name, program } = peer;
    let run = case.measure(testbed, seconds, || {
        testbed.start_peer(name, program, work, case.family, &arguments(case.traffic))
    })?;
    if run.value > 0.0 {
        return Ok(run);
    }
    Err(LabError::Config(format!("{name} moves no bytes")))
}

/// Peer in one case, with the best way to do its receive work.
struct PeerRuns<'p> {
    peer: &'p Peer,
    work: ReceiveWork,
    runs: Vec<f64>,
}

/// Measurements of one case.
struct CaseResults<'p> {
    case: Case,
    own: Vec<f64>,
    /// Tidegate on a packet socket, as the peers.
    own_packet: Vec<f64>,
    peers: Vec<PeerRuns<'p>>,
    left_out: Vec<LeftOut>,
}

impl<'p> CaseResults<'p> {
    /// Measures each peer once in each way.
    fn first_pass(
        case: Case,
        peers: &'p [Peer],
        testbed: &TcpTestbed,
        seconds: f64,
        progress: &Progress,
    ) -> Self {
        let mut results = Self {
            case,
            own: Vec::new(),
            own_packet: Vec::new(),
            peers: Vec::new(),
            left_out: Vec::new(),
        };
        for peer in peers {
            let name = |work: ReceiveWork| work.kernel_name().to_owned();
            let first = FirstPass::measure(case.traffic.goal(), &WAYS, name, |work| {
                let run = measure(case, testbed, peer, work, seconds)?;
                step(progress, case, &peer.name, run.value);
                Ok(run.value)
            });
            match first {
                Ok(first) => {
                    results.peers.push(PeerRuns { peer, work: first.best(), runs: Vec::new() });
                }
                Err(error) => {
                    progress.line(format_args!("{case}: {} is left out: {error}", peer.name));
                    results.left_out.push(LeftOut::new(&peer.name, &error));
                }
            }
        }
        results
    }

    /// Measures Tidegate and each peer. A peer that fails is left out of the case.
    fn measure(
        &mut self,
        testbed: &TcpTestbed,
        seconds: f64,
        progress: &Progress,
    ) -> Result<(), LabError> {
        let case = self.case;
        let Self { own, own_packet, peers, left_out, .. } = self;
        for (server_kind, runs) in [(ServerKind::TidegateDefault, own), (ON_PACKET, own_packet)] {
            let run = case.measure_serve(testbed, server_kind, seconds)?;
            step(progress, case, &server_kind.name(), run.value);
            runs.push(run.value);
        }
        peers.retain_mut(|PeerRuns { peer, work, runs }| {
            match measure(case, testbed, peer, *work, seconds) {
                Ok(run) => {
                    step(progress, case, &peer.name, run.value);
                    runs.push(run.value);
                    true
                }
                Err(error) => {
                    progress.line(format_args!("{case}: {} is left out: {error}", peer.name));
                    left_out.push(LeftOut::new(&peer.name, &error));
                    false
                }
            }
        });
        Ok(())
    }

    /// Tidegate's value over that of the best peer: the median of the ratios, since what disturbs the
    /// machine for a while disturbs the measurements that follow each other.
    fn ratio(&self) -> Option<f64> {
        let by_value = |one: &&PeerRuns<'_>, other: &&PeerRuns<'_>| {
            median(&one.runs).total_cmp(&median(&other.runs))
        };
        let best = match self.case.traffic.goal() {
            Goal::Lowest => self.peers.iter().min_by(by_value),
            Goal::Highest => self.peers.iter().max_by(by_value),
        };
        best.map(|best| self.own_over(&best.runs))
    }

    /// Median of the ratios of Tidegate's values to others, measured in turn.
    fn own_over(&self, others: &[f64]) -> f64 {
        median(self.own.iter().zip(others).map(|(own, other)| own / other))
    }

    fn rows(&self) -> Vec<Value> {
        let row = |server: &str, work: Option<ReceiveWork>, runs: &[f64]| {
            json!({
                "case": self.case.to_string(),
                "server": server,
                "receive_work": work.map(|work| match work {
                    ReceiveWork::Steered => "rps",
                    _ => "softirq",
                }),
                "value": round_to_thousandths(median(runs)),
                "unit": self.case.traffic.unit(),
                "spread_percent": spread_percent(runs.iter().copied()),
                "tidegate_over": round_to_thousandths(self.own_over(runs)),
                "left_out": null,
            })
        };
        let mut rows = vec![
            row(&ServerKind::TidegateDefault.name(), None, &self.own),
            row(&ON_PACKET.name(), Some(ReceiveWork::Softirq), &self.own_packet),
        ];
        let peers = self.peers.iter();
        rows.extend(peers.map(|PeerRuns { peer, work, runs }| row(&peer.name, Some(*work), runs)));
        rows.extend(self.left_out.iter().map(|peer| left_out_row(Some(self.case), peer)));
        rows
    }
}

fn left_out_row(case: Option<Case>, LeftOut { name, reason }: &LeftOut) -> Value {
    json!({
        "case": case.map_or_else(|| "all".to_owned(), |case| case.to_string()),
        "server": name,
        "receive_work": null,
        "value": null,
        "unit": null,
        "spread_percent": null,
        "tidegate_over": null,
        "left_out": reason,
    })
}

fn step(progress: &Progress, case: Case, server: &str, value: f64) {
    let unit = case.traffic.unit();
    progress.step(format_args!("{:<40} {server:<12} {value:.1} {unit}", case.to_string()));
}

/// Peers and cases to measure.
#[derive(Clone, Debug, Default)]
pub struct PeerSelection {
    /// Names of the peers; all if empty.
    pub peers: Vec<String>,
    /// Text that the names of the cases contain.
    pub case: Option<String>,
}

/// Measures Tidegate beside the peers in each case. A peer that cannot be built or does not serve is
/// left out by name, with the reason.
///
/// # Errors
/// If namespaces cannot be created, or Tidegate does not start.
pub fn run(config: &TcpLabConfig, selection: &PeerSelection) -> Result<Experiment, LabError> {
    let cases = Case::of_traffic(&TRAFFIC, selection.case.as_deref())?;
    let (server_core, load_core) = choose_cores()?;
    let (peers, left_out) = programs::find(&selection.peers)?;
    let testbed = TcpTestbed::new(server_core, load_core)?;
    testbed.wait_for_ipv6()?;
    let progress = Progress::of_part("first pass", cases.len() * peers.len() * WAYS.len());
    let seconds = (config.seconds / 4.0).clamp(0.1, FIRST_PASS_SECONDS);
    let first_pass = |case| CaseResults::first_pass(case, &peers, &testbed, seconds, &progress);
    let mut results: Vec<CaseResults<'_>> = cases.into_iter().map(first_pass).collect();
    drop(progress);
    let servers: usize = results.iter().map(|one| 2 + one.peers.len()).sum();
    let progress = Progress::new(servers * config.repeats);
    for _ in 0..config.repeats {
        for one in &mut results {
            one.measure(&testbed, config.seconds, &progress)?;
        }
    }
    Ok(conclude(&results, &left_out))
}

fn conclude(results: &[CaseResults<'_>], left_out: &[LeftOut]) -> Experiment {
    let mut result = Experiment::new("peers");
    for traffic in TRAFFIC {
        let name = figure(traffic);
        let of_figure = results.iter().filter(|one| figure(one.case.traffic) == name);
        let ratios = of_figure.filter_map(CaseResults::ratio);
        // The worse of protocols, directions and families.
        let worst = match traffic.goal() {
            Goal::Lowest => ratios.reduce(f64::max),
            Goal::Highest => ratios.reduce(f64::min),
        };
        if let Some(worst) = worst {
            result.figure(name, round_to_thousandths(worst));
        }
    }
    result.rows = results.iter().flat_map(CaseResults::rows).collect();
    result.rows.extend(left_out.iter().map(|peer| left_out_row(None, peer)));
    result.columns = vec![
        "case",
        "server",
        "receive_work",
        "value",
        "unit",
        "spread_percent",
        "tidegate_over",
        "left_out",
    ];
    result.note(
        "a client on kernel sockets on core 0 that never sleeps; the server on core 1: tidegate serve \
         echo with no option but interface and address (tidegate-packet: the same with --io packet), \
         and a small program on each peer that never sleeps, on a packet socket with batches of 64 frames; the receive work of a peer's device \
         where a first pass finds it best, in softirqs where Linux puts them or by RPS on the \
         server's core; messages of 64 bytes, frames as on a wire; in turn, medians",
    );
    result.note(
        "peer_latency_ratio: median on one TCP connection, below 1 is better; peer_rate_ratio: \
         requests/s on 64 TCP connections and with 64 datagrams in flight; peer_stream_ratio: bytes \
         one way on one TCP connection; each the median of Tidegate's values over those of the best peer \
         that were measured in turn, the worse of protocols, directions, IPv4 and IPv6",
    );
    result
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testbed::tcp::Family;

    fn peer(name: &str) -> Peer {
        Peer { name: name.to_owned(), program: name.into() }
    }

    fn results<'p>(traffic: Traffic, own: f64, peers: &[(&'p Peer, f64)]) -> CaseResults<'p> {
        let runs = |&(peer, value)| PeerRuns { peer, work: WAYS[0], runs: vec![value] };
        CaseResults {
            case: Case { traffic, family: Family::V4 },
            own: vec![own],
            own_packet: vec![own],
            peers: peers.iter().map(runs).collect(),
            left_out: Vec::new(),
        }
    }

    #[test]
    fn figures_compare_the_worst_case_with_the_best_peer() {
        let (one, other) = (peer("one"), peer("other"));
        let missing = LeftOut { name: "vpp".to_owned(), reason: "no program".to_owned() };
        let mut failed = results(TRAFFIC[2], 50.0, &[(&one, 40.0)]);
        failed.left_out.push(LeftOut { name: "other".to_owned(), reason: "exited".to_owned() });
        let all = [
            results(TRAFFIC[0], 10.0, &[(&one, 5.0), (&other, 20.0)]),
            results(TRAFFIC[1], 300.0, &[(&one, 100.0), (&other, 150.0)]),
            failed,
            results(TRAFFIC[3], 1.0, &[]),
        ];
        let result = conclude(&all, &[missing]);
        assert_eq!(result.figures["peer_latency_ratio"], 2.0);
        assert_eq!(result.figures["peer_rate_ratio"], 1.25);
        assert!(!result.figures.contains_key("peer_stream_ratio"));
        let left_out = |row: &&Value| !row["left_out"].is_null();
        let left_out: Vec<&Value> = result.rows.iter().filter(left_out).collect();
        assert_eq!(left_out.len(), 2, "{left_out:?}");
        assert_eq!(
            (&left_out[0]["server"], &left_out[0]["left_out"]),
            (&json!("other"), &json!("exited"))
        );
        assert_eq!((&left_out[1]["server"], &left_out[1]["case"]), (&json!("vpp"), &json!("all")));
        assert!(result.to_string().contains("no program"), "{result}");
    }

    #[test]
    fn cases_are_chosen_by_their_words() {
        assert_eq!(Case::of_traffic(&TRAFFIC, None).unwrap().len(), 2 * TRAFFIC.len());
        assert_eq!(Case::of_traffic(&TRAFFIC, Some("UDP")).unwrap().len(), 2);
        assert!(
            Case::of_traffic(&TRAFFIC, Some("no such case"))
                .unwrap_err()
                .to_string()
                .contains("no such case")
        );
    }
}
