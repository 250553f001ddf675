//! What the cores behind one port share.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tidegate_memory::Doorbell;

use super::directory::{Directory, Owner};
use crate::steering::{Protocol, Rule};

/// How long a core may take to look once: it may have to wait for its processor.
const ROUND_LIMIT: Duration = Duration::from_secs(1);

/// A local port.
pub type LocalPort = (Protocol, u16);

/// Where the ways of several cores cross: who has which local port, and how a port
/// goes from one core to another.
///
/// Core 0 has the card. A core that gives ports away says [`Crossing::park`], takes
/// what has come for it, says [`Crossing::wait_until_sent`] and hands over what it
/// knows, and the other one says [`Crossing::hand`]. Frames that come meanwhile
/// wait, in their order.
pub struct Crossing {
    directory: Directory,
    /// How often the core with the card has taken frames and passed them on.
    rounds: AtomicU64,
    /// Changes whenever a port has arrived at a core.
    handed: AtomicU64,
    /// Wakes the core with the card.
    bell: Arc<Doorbell>,
    /// Cores that are used, a bit for each.
    used: AtomicU64,
    /// Of each core without a card.
    lanes: Box<[Lane]>,
}

/// Frames from one core to the card.
#[derive(Default)]
struct Lane {
    sent: AtomicU64,
    /// Those of them that the card has taken.
    forwarded: AtomicU64,
}

impl Crossing {
    pub(super) fn new(cores: usize, bell: Arc<Doorbell>) -> Self {
        Self {
            directory: Directory::new(),
            rounds: AtomicU64::new(0),
            handed: AtomicU64::new(0),
            bell,
            used: AtomicU64::new(1),
            lanes: (1..cores).map(|_| Lane::default()).collect(),
        }
    }

    /// How many cores there are.
    pub fn cores(&self) -> usize {
        self.lanes.len() + 1
    }

    /// Whether a core other than this one has the port.
    pub fn is_foreign(&self, core: usize, (protocol, port): LocalPort) -> bool {
        self.directory.is_foreign(protocol, port, core)
    }

    /// Whether a port that is claimed is on its way from one core to another.
    pub fn is_on_its_way(&self, port: LocalPort) -> bool {
        matches!(self.owner(port), Owner::Parked)
    }

    /// A core is used from now on: it hears what all need to hear.
    pub fn set_used(&self, core: usize) {
        self.used.fetch_or(1 << core, Ordering::Relaxed);
    }

    pub(super) fn is_used(&self, core: usize) -> bool {
        self.used.load(Ordering::Relaxed) & 1 << core != 0
    }

    /// From now on frames for these ports, which the core `core` has, wait. All that
    /// came before is where it finds it when it looks next.
    ///
    /// # Errors
    /// [`io::ErrorKind::TimedOut`] when the core with the card does not run: the
    /// ports stay where they were.
    pub fn park(&self, core: usize, ports: &[LocalPort]) -> io::Result<()> {
        for &(protocol, port) in ports {
            self.directory.park(protocol, port);
        }
        let round = self.rounds.load(Ordering::SeqCst);
        // Whoever was in the middle of a look when it began has finished that. The
        // core with the card itself is in the middle of none.
        let has_looked = || core == 0 || self.rounds.load(Ordering::SeqCst) > round;
        self.wait(has_looked).inspect_err(|_| self.hand(core, ports))
    }

    /// Waits until the card has all that a core has sent.
    ///
    /// # Errors
    /// [`io::ErrorKind::TimedOut`] when the core with the card does not run.
    pub fn wait_until_sent(&self, core: usize) -> io::Result<()> {
        let Some(lane) = core.checked_sub(1).and_then(|at| self.lanes.get(at)) else {
            return Ok(());
        };
        let sent = lane.sent.load(Ordering::Relaxed);
        self.wait(|| lane.forwarded.load(Ordering::Acquire) >= sent)
    }

    /// Has the core with the card look until `done`.
    fn wait(&self, done: impl Fn() -> bool) -> io::Result<()> {
        let began = Instant::now();
        while !done() {
            if began.elapsed() > ROUND_LIMIT {
                return Err(io::ErrorKind::TimedOut.into());
            }
            self.bell.ring();
            std::thread::yield_now();
        }
        Ok(())
    }

    /// These ports are this core's from now on, and so are the frames that waited.
    pub fn hand(&self, core: usize, ports: &[LocalPort]) {
        for &(protocol, port) in ports {
            self.directory.hand(protocol, port, core);
        }
        self.handed.fetch_add(1, Ordering::SeqCst);
        self.bell.ring();
    }

    pub(super) fn owner(&self, (protocol, port): LocalPort) -> Owner {
        self.directory.owner(protocol, port)
    }

    pub(super) fn handed(&self) -> u64 {
        self.handed.load(Ordering::SeqCst)
    }

    /// Claims a local port for a core, or takes the claim back.
    pub(super) fn set_steering(&self, core: usize, rule: &Rule, take: bool) -> io::Result<()> {
        let &Rule::Port { protocol, address: None, port } = rule else {
            return Err(io::ErrorKind::Unsupported.into());
        };
        if !take {
            self.directory.release(protocol, port, core);
        } else if !self.directory.claim(protocol, port, core) {
            return Err(io::ErrorKind::AddrInUse.into());
        }
        Ok(())
    }

    pub(super) fn on_sent(&self, core: usize, frames: usize) {
        if let Some(lane) = self.lanes.get(core - 1) {
            lane.sent.fetch_add(frames as u64, Ordering::Relaxed);
        }
    }

    pub(super) fn on_forwarded(&self, core: usize, frames: usize) {
        if let Some(lane) = self.lanes.get(core - 1) {
            lane.forwarded.fetch_add(frames as u64, Ordering::Release);
        }
    }

    pub(super) fn on_round(&self) {
        self.rounds.fetch_add(1, Ordering::SeqCst);
    }
}
