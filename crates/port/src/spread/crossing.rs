//! What the cores behind one port share.

use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tidegate_memory::Doorbell;

use super::LocalPort;
use super::directory::{Directory, View};
use super::flow::Flow;
use super::shared_port::Sharing;

/// How long a core may take to look once: it may have to wait for its processor.
const ROUND_LIMIT: Duration = Duration::from_secs(1);

/// Where the ways of several cores cross: who has which local port, and how a port
/// goes from one core to another.
///
/// Core 0 has the card. A core that gives ports away says [`Crossing::park`], takes
/// what has come for it, says [`Crossing::wait_until_sent`] and hands over what it
/// knows, and the other one says [`Crossing::hand`]. Frames that come meanwhile
/// wait, in their order.
///
/// A port whose claims all say so may be shared ([`Sharing::ReusePort`]): cores with
/// sockets on it ([`Crossing::join`]) get a part of its new flows each, and flows stay
/// with the core that has a socket for them ([`Crossing::begin`]).
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

    /// Claims a local port for a core once more.
    ///
    /// # Errors
    /// [`io::ErrorKind::AddrInUse`] when another core has it, and it is not shared, or a
    /// socket that this core has joined with is at an address of another party's.
    pub fn claim(&self, core: usize, port: LocalPort, sharing: Sharing) -> io::Result<()> {
        let may_have = self.directory.claim(port, core, sharing);
        if may_have { Ok(()) } else { Err(io::ErrorKind::AddrInUse.into()) }
    }

    /// Takes back a claim that was made so.
    pub fn release(&self, core: usize, port: LocalPort, sharing: Sharing) {
        self.directory.release(port, core, sharing);
    }

    /// Whether a core may claim a port so.
    pub fn is_open_to(&self, core: usize, port: LocalPort, sharing: Sharing) -> bool {
        self.directory.is_open_to(port, core, sharing)
    }

    /// Whether a core other than this one has the port.
    pub fn is_foreign(&self, core: usize, port: LocalPort) -> bool {
        self.directory.is_foreign(port, core)
    }

    /// Whether the port is at this core, or at none, and not on its way.
    pub fn is_at(&self, core: usize, port: LocalPort) -> bool {
        self.directory.is_at(port, core)
    }

    /// Whether the claims of a port may be on several cores: all of them share it.
    pub fn can_be_shared(&self, port: LocalPort) -> bool {
        self.directory.can_be_shared(port)
    }

    /// A socket of this party's on a core takes what anybody sends to this address and
    /// port, which it may share with those of other cores. That is so once the core has
    /// claimed the port.
    pub fn join(&self, core: usize, port: LocalPort, address: IpAddr, party: u64) {
        self.directory.join(port, address, party, core);
    }

    /// It does so no longer.
    pub fn leave(&self, core: usize, port: LocalPort, address: IpAddr, party: u64) {
        self.directory.leave(port, address, party, core);
    }

    /// A core is to have a socket for a flow, and gets its frames from now on. Whether
    /// that may be: there is none yet.
    pub fn begin(&self, core: usize, flow: Flow) -> bool {
        self.directory.begin(flow, core)
    }

    /// A socket for a flow has come to a core from another one.
    pub fn take_over(&self, core: usize, flow: Flow) {
        self.directory.take_over(flow, core);
    }

    /// A core has no socket for a flow any more.
    pub fn end(&self, core: usize, flow: Flow) {
        self.directory.end(flow, core);
    }

    /// A core is used from now on: it hears what all need to hear.
    pub fn set_used(&self, core: usize) {
        self.used.fetch_or(1 << core, Ordering::Relaxed);
    }

    /// From now on frames for these ports, or for the core's part of them, wait. All
    /// that came before is where it finds it when it looks next.
    ///
    /// # Errors
    /// [`io::ErrorKind::TimedOut`] when the core with the card does not run: the
    /// ports stay where they were.
    pub fn park(&self, core: usize, ports: &[LocalPort]) -> io::Result<()> {
        ports.iter().for_each(|&port| self.directory.park(port, core));
        let round = self.rounds.load(Ordering::SeqCst);
        // Whoever was in the middle of a look when it began has finished that. The
        // core with the card itself is in the middle of none.
        let has_looked = || core == 0 || self.rounds.load(Ordering::SeqCst) > round;
        let back = || ports.iter().map(|&port| (port, 0));
        self.wait(has_looked).inspect_err(|_| self.hand(core, core, back()))
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

    /// These ports are another core's from now on, and so are the frames that waited.
    /// Of those that are shared, so many claims have moved.
    pub fn hand(&self, from: usize, to: usize, ports: impl IntoIterator<Item = (LocalPort, u32)>) {
        for (port, claims) in ports {
            self.directory.hand(port, from, to, claims);
        }
        self.handed.fetch_add(1, Ordering::SeqCst);
        self.bell.ring();
    }

    pub(super) fn view(&self) -> View<'_> {
        self.directory.view(self.used.load(Ordering::Relaxed))
    }

    pub(super) fn handed(&self) -> u64 {
        self.handed.load(Ordering::SeqCst)
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
