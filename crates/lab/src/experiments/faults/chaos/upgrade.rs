//! Upgrades of the daemon under load.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tidegate::{Net, TcpListener};

use super::peers::REPLY_TIMEOUT;
use super::testbed::{ChaosTestbed, daemon_address};
use super::well_behaved::{WellBehaved, with_well_behaved};
use crate::LabError;
use crate::testbed::stop::StopOnDrop;

/// Number of upgrades.
const UPGRADE_COUNT: u64 = 10;

/// Time under load between two upgrades.
const UPGRADE_INTERVAL: Duration = Duration::from_millis(300);

/// Port of the application whose client measures the round-trip time.
const ECHO_PORT: u16 = 9500;

/// Size in bytes of a message that is echoed.
const MESSAGE_BYTES: usize = 64;

/// Result of the upgrades.
#[derive(Debug, Default)]
pub(super) struct UpgradeResults {
    pub(super) upgrades: u64,
    /// Connections that broke, of the well-behaved applications and of the measuring client.
    pub(super) lost: u64,
    /// Longest round trip of the measuring client.
    pub(super) pause: Duration,
}

/// Guard that terminates the last daemon, which was started by an upgrade and not by this process.
struct TerminateDaemonOnDrop<'s>(&'s ChaosTestbed);

impl Drop for TerminateDaemonOnDrop<'_> {
    fn drop(&mut self) {
        let pid = self.0.report().ok().and_then(|report| i32::try_from(report.pid).ok());
        if let Some(pid) = pid.and_then(Pid::from_raw) {
            // The daemon may have exited already.
            let _ = kill_process(pid, Signal::TERM);
        }
    }
}

/// Upgrades the daemon repeatedly while well-behaved applications exchange data and a client
/// measures round trips.
pub(super) fn run(testbed: &ChaosTestbed) -> Result<UpgradeResults, LabError> {
    let _terminate = TerminateDaemonOnDrop(testbed);
    let address = SocketAddr::new(daemon_address(0), ECHO_PORT);
    let well_behaved = WellBehaved::default();
    let stop = AtomicBool::new(false);
    let longest_ns = AtomicU64::new(0);
    let (ready, is_ready) = mpsc::channel();
    let result = thread::scope(|scope| {
        let stop_client = StopOnDrop(&stop);
        let server = || echo(&testbed.socket(), address, &ready);
        scope.spawn(move || server().inspect_err(|error| eprintln!("the server: {error}")));
        is_ready
            .recv_timeout(REPLY_TIMEOUT)
            .map_err(|_| LabError::Config("the echo application could not listen".to_owned()))?;
        let client = scope.spawn(|| {
            testbed.pair.a.namespace.enter(|| measure_round_trips(address, &stop, &longest_ns))
        });
        let upgraded = with_well_behaved(testbed, &well_behaved, || {
            thread::sleep(UPGRADE_INTERVAL);
            longest_ns.store(0, Ordering::Relaxed);
            for _ in 0..UPGRADE_COUNT {
                testbed.upgrade_daemon()?;
                thread::sleep(UPGRADE_INTERVAL);
            }
            Ok(Duration::from_nanos(longest_ns.load(Ordering::Relaxed)))
        });
        drop(stop_client);
        let client_result =
            client.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        upgraded.map(|pause| (pause, client_result))
    });
    let (pause, client_result) = result?;
    let mut lost = well_behaved.errors().len() as u64;
    if let Err(error) = client_result {
        eprintln!("the measuring client: {error}");
        lost += 1;
    }
    Ok(UpgradeResults { upgrades: UPGRADE_COUNT, lost, pause })
}

/// Application that echoes the data of its only client.
fn echo(socket: &std::path::Path, address: SocketAddr, ready: &mpsc::Sender<()>) -> io::Result<()> {
    let net = Net::attach(socket, "echo")?;
    let listener = TcpListener::bind(&net, address)?;
    // The receiver waits for this signal with a time limit.
    let _ = ready.send(());
    let (mut stream, _) = listener.accept()?;
    stream.set_nodelay(true)?;
    let mut piece = [0; MESSAGE_BYTES];
    while let Ok(len @ 1..) = stream.read(&mut piece) {
        stream.write_all(&piece[..len])?;
    }
    Ok(())
}

/// Client on the kernel's stack that sends a message, waits for its echo, and records the longest
/// round trip in nanoseconds.
fn measure_round_trips(
    address: SocketAddr,
    stop: &AtomicBool,
    longest_ns: &AtomicU64,
) -> io::Result<()> {
    let mut stream = TcpStream::connect_timeout(&address, REPLY_TIMEOUT)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(REPLY_TIMEOUT))?;
    let mut number: u64 = 0;
    while !stop.load(Ordering::Relaxed) {
        let began = Instant::now();
        let sent = [number as u8; MESSAGE_BYTES];
        stream.write_all(&sent)?;
        let mut received = [0; MESSAGE_BYTES];
        stream.read_exact(&mut received)?;
        if sent != received {
            return Err(io::Error::other("the echo differs from the message sent"));
        }
        longest_ns.fetch_max(began.elapsed().as_nanos() as u64, Ordering::Relaxed);
        number += 1;
    }
    Ok(())
}
