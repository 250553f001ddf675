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
/// what has come for it, hands over what it knows, and the other one says
/// [`Crossing::hand`]. Frames that come meanwhile wait, in their order.
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

    /// A core is used from now on: it hears what all need to hear.
    pub fn set_used(&self, core: usize) {
        self.used.fetch_or(1 << core, Ordering::Relaxed);
    }

    pub(super) fn is_used(&self, core: usize) -> bool {
        self.used.load(Ordering::Relaxed) & 1 << core != 0
    }

    /// From now on frames for these ports wait. When this returns, all that came
    /// before is where the core `core`, which has had the ports, finds it with its
    /// next looks, and the card has all that it has sent.
    ///
    /// # Errors
    /// [`io::ErrorKind::TimedOut`] when the core with the card does not run: the
    /// ports stay where they were.
    pub fn park(&self, core: usize, ports: &[LocalPort]) -> io::Result<()> {
        for &(protocol, port) in ports {
            self.directory.park(protocol, port);
        }
        // The core with the card knows by itself what it has taken.
        let Some(lane) = core.checked_sub(1).and_then(|at| self.lanes.get(at)) else {
            return Ok(());
        };
        let began = Instant::now();
        let round = self.rounds.load(Ordering::SeqCst);
        loop {
            let is_through =
                lane.sent.load(Ordering::Relaxed) == lane.forwarded.load(Ordering::Acquire);
            // Whoever was in the middle of a look when it began has finished that.
            if is_through && self.rounds.load(Ordering::SeqCst) > round {
                return Ok(());
            }
            if began.elapsed() > ROUND_LIMIT {
                self.hand(core, ports);
                return Err(io::ErrorKind::TimedOut.into());
            }
            self.bell.ring();
            std::thread::yield_now();
        }
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
