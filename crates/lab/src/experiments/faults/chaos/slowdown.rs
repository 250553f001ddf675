//! Many applications, one of them misbehaving: throughput that the others lose.

use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use tidegate::{Net, UdpSocket};

use super::ChaosConfig;
use super::echo_checker::EchoChecker;
use super::peers::is_time_out;
use super::target::Behaviour;
use super::target_process::TargetProcess;
use super::testbed::{ChaosTestbed, daemon_address, datagram_server};
use crate::LabError;
use crate::report::Progress;
use crate::testbed::stop::StopOnDrop;

/// Number of applications, including the last one.
const APPLICATIONS: usize = 24;

/// Requests in flight per application.
const REQUESTS_IN_FLIGHT: usize = 4;

/// Time after which a request without a reply counts as lost.
const LOSS_TIMEOUT: Duration = Duration::from_millis(500);

/// Time before requests are counted.
const WARM_UP: Duration = Duration::from_millis(200);

/// Behaviour of a misbehaving application, and of the reference application in its place, which
/// uses the processor in the same way but does no harm.
pub(super) const PAIRS: [(Behaviour, Behaviour); 3] = [
    (Behaviour::Flooding, Behaviour::MakingSystemCalls),
    (Behaviour::CorruptingSharedMemory, Behaviour::WritingPrivateMemory),
    (Behaviour::NotReading, Behaviour::Reading),
];

/// Requests/s of the other applications in each run: next to the reference application, and next
/// to the misbehaving one.
pub(super) struct Slowdown {
    pub(super) bad: Behaviour,
    pub(super) runs: Vec<[f64; 2]>,
}

impl Slowdown {
    pub(super) fn median(&self, of: impl Fn(&[f64; 2]) -> f64) -> f64 {
        crate::stats::median(self.runs.iter().map(of))
    }

    /// Median loss of the other applications in percent.
    pub(super) fn loss_percent(&self) -> f64 {
        self.median(|[without, with]| 100.0 * (1.0 - with / without))
    }
}

/// Measures each misbehaving application and its reference in turn.
pub(super) fn run(
    testbed: &ChaosTestbed,
    config: &ChaosConfig,
    progress: &Progress,
) -> Result<Vec<Slowdown>, LabError> {
    let mut slowdowns: Vec<Slowdown> =
        PAIRS.iter().map(|(bad, _)| Slowdown { bad: *bad, runs: Vec::new() }).collect();
    for repeat in 0..config.repeats {
        for ((bad, reference), slowdown) in PAIRS.iter().zip(&mut slowdowns) {
            // The order alternates, so that neither case is favoured and a change over time
            // affects both.
            let [first, second] = if repeat % 2 == 0 {
                [(1, *bad), (0, *reference)]
            } else {
                [(0, *reference), (1, *bad)]
            };
            let mut run = [0.0; 2];
            for (side, behaviour) in [first, second, second, first] {
                run[side] +=
                    measure_requests_per_s(testbed, behaviour, config.seconds / 2.0)? / 2.0;
            }
            progress.step(format_args!(
                "{} {:<10} {:.0} requests/s, without {:.0}",
                repeat + 1,
                bad.name(),
                run[1],
                run[0]
            ));
            slowdown.runs.push(run);
        }
    }
    Ok(slowdowns)
}

/// Requests/s answered for all applications except the last one, which has behaviour `last`.
fn measure_requests_per_s(
    testbed: &ChaosTestbed,
    last: Behaviour,
    seconds: f64,
) -> Result<f64, LabError> {
    let path = testbed.socket();
    let (answered, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    let mut child = TargetProcess::start(last, &path, 9999, 1)?;
    child.wait_until_started(last)?;
    thread::scope(|scope| {
        let stop_at_end = StopOnDrop(&stop);
        let clients: Vec<_> = (0..APPLICATIONS - 1)
            .map(|number| {
                let (path, stop, answered) = (&path, &stop, &answered);
                scope.spawn(move || run_client(path, number, stop, answered))
            })
            .collect();
        thread::sleep(WARM_UP);
        let (before, began) = (answered.load(Ordering::Relaxed), Instant::now());
        thread::sleep(Duration::from_secs_f64(seconds));
        let count = answered.load(Ordering::Relaxed) - before;
        let rate = count as f64 / began.elapsed().as_secs_f64();
        drop(stop_at_end);
        for client in clients {
            let result = client.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            result.map_err(LabError::io("an application failed next to a misbehaving one"))?;
        }
        Ok(rate)
    })
}

/// Sends a few requests at a time, and checks every reply.
fn run_client(
    path: &Path,
    number: usize,
    stop: &AtomicBool,
    answered: &AtomicU64,
) -> io::Result<()> {
    let net = Net::attach(path, "good")?;
    let socket = UdpSocket::bind(&net, (daemon_address(number), 0))?;
    socket.set_read_timeout(Some(LOSS_TIMEOUT))?;
    let mut checker = EchoChecker::new(number as u64);
    let request = checker.next_piece(64).to_vec();
    let mut received = [0; 2048];
    while !stop.load(Ordering::Relaxed) {
        for _ in 0..REQUESTS_IN_FLIGHT {
            socket.send_to(&request, datagram_server(number))?;
        }
        for _ in 0..REQUESTS_IN_FLIGHT {
            match socket.recv_from(&mut received) {
                Ok((len, _)) => checker.check(&received[..len])?,
                Err(error) if is_time_out(&error) => break,
                Err(error) => return Err(error),
            }
            answered.fetch_add(1, Ordering::Relaxed);
        }
    }
    Ok(())
}
