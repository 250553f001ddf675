//! The daemon is replaced by another one, under load.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tidegate::{Net, TcpListener};

use super::honest::{Honest, beside};
use super::peers::PATIENCE;
use super::site::{Site, own};
use crate::LabError;
use crate::stop::StopAtEnd;

/// How often it is replaced.
const UPGRADES: u64 = 10;

/// How long the load has the daemon for itself between two upgrades.
const BETWEEN: Duration = Duration::from_millis(300);

/// Where the application listens whose client looks at the clock.
const PORT: u16 = 9500;

/// Bytes that go there and back.
const PIECE: usize = 64;

/// What came of it.
#[derive(Debug, Default)]
pub(super) struct Upgraded {
    pub(super) upgrades: u64,
    /// Connections that broke, of the load and of the client with the clock.
    pub(super) lost: u64,
    /// The longest that the client waited for an answer.
    pub(super) pause: Duration,
}

/// Ends the last daemon, which nobody here has started.
struct Ends<'s>(&'s Site);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        let pid = self.0.report().ok().and_then(|report| i32::try_from(report.pid).ok());
        if let Some(pid) = pid.and_then(Pid::from_raw) {
            // It may have ended.
            let _ = kill_process(pid, Signal::TERM);
        }
    }
}

/// Replaces the daemon again and again under applications that exchange numbers,
/// and under a client that asks and waits.
pub(super) fn run(site: &Site) -> Result<Upgraded, LabError> {
    let _ends = Ends(site);
    let address = SocketAddr::new(own(0), PORT);
    let honest = Honest::default();
    let stop = AtomicBool::new(false);
    let longest_ns = AtomicU64::new(0);
    let (ready, is_ready) = mpsc::channel();
    let asked = thread::scope(|scope| {
        let stop_client = StopAtEnd(&stop);
        let server = || echo(&site.socket(), address, &ready);
        scope.spawn(move || server().inspect_err(|error| eprintln!("the server: {error}")));
        is_ready
            .recv_timeout(PATIENCE)
            .map_err(|_| LabError::Config("an application cannot listen".to_owned()))?;
        let client =
            scope.spawn(|| site.pair.a.namespace.enter(|| ask(address, &stop, &longest_ns)));
        let upgraded = beside(site, &honest, || {
            thread::sleep(BETWEEN);
            longest_ns.store(0, Ordering::Relaxed);
            for _ in 0..UPGRADES {
                site.upgrade_daemon()?;
                thread::sleep(BETWEEN);
            }
            Ok(Duration::from_nanos(longest_ns.load(Ordering::Relaxed)))
        });
        drop(stop_client);
        let asked = client.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        upgraded.map(|pause| (pause, asked))
    });
    let (pause, asked) = asked?;
    let mut lost = honest.errors().len() as u64;
    if let Err(error) = asked {
        eprintln!("the client with the clock: {error}");
        lost += 1;
    }
    Ok(Upgraded { upgrades: UPGRADES, lost, pause })
}

/// An application that sends back what its one client says.
fn echo(socket: &std::path::Path, address: SocketAddr, ready: &mpsc::Sender<()>) -> io::Result<()> {
    let net = Net::attach(socket, "echo")?;
    let listener = TcpListener::bind(&net, address)?;
    // Who waits for it has a limit.
    let _ = ready.send(());
    let (mut stream, _) = listener.accept()?;
    stream.set_nodelay(true)?;
    let mut piece = [0; PIECE];
    while let Ok(len @ 1..) = stream.read(&mut piece) {
        stream.write_all(&piece[..len])?;
    }
    Ok(())
}

/// A client of the kernel's that asks, waits for the answer, and looks how long
/// that took.
fn ask(address: SocketAddr, stop: &AtomicBool, longest_ns: &AtomicU64) -> io::Result<()> {
    let mut stream = TcpStream::connect_timeout(&address, PATIENCE)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut number: u64 = 0;
    while !stop.load(Ordering::Relaxed) {
        let began = Instant::now();
        let said = [number as u8; PIECE];
        stream.write_all(&said)?;
        let mut heard = [0; PIECE];
        stream.read_exact(&mut heard)?;
        if said != heard {
            return Err(io::Error::other("another answer came back"));
        }
        longest_ns.fetch_max(began.elapsed().as_nanos() as u64, Ordering::Relaxed);
        number += 1;
    }
    Ok(())
}
