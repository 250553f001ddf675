//! AF_XDP: frames straight from the driver, without the kernel's stack.
//!
//! A BPF program at the interface takes the frames that it was told to take
//! ([`Steering`]) and leaves the rest to the kernel. What it takes is put into
//! the [`Arena`], whose memory is registered with the kernel as a *umem*, and
//! is announced on the receive ring of an AF_XDP socket. There is one socket
//! for each receive queue.
//!
//! The program is held by a link that the process owns: it is off the interface
//! as soon as the process is gone, however it ended.
//!
//! One file for each thing of the kernel: [`umem`](self) memory, rings,
//! sockets, the program, its rules, busy polling; all raw calls are in `sys`.

mod admission;
mod alone;
mod busy_poll;
mod config;
mod error;
mod guard;
mod link;
mod napi;
mod netdev;
mod open;
mod program;
mod queue;
mod ring;
mod ring_loss;
mod socket;
mod steering;
mod sys;
mod traffic;
mod umem;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use tidegate_memory::Arena;
use tidegate_wire::DropReason;

use self::alone::{Alone, LOOK_EVERY};
use self::busy_poll::DeviceSettings;
pub use self::config::{BusyPoll, Copy, Mode, RingSizes, XdpConfig};
pub use self::error::XdpError;
pub use self::guard::Guard;
pub use self::link::Link;
pub use self::napi::NapiPoller;
use self::program::Program;
use self::queue::{Polling, Queue};
use self::ring_loss::RingLoss;
pub use self::steering::Steering;
use self::traffic::Traffic;
use crate::admission::{CLASSES_MAX, ClassCounts, ClassLimit, Early};
pub use crate::steering::{Protocol, Rule};
use crate::{Burst, Capabilities, Left, Port, PortCounters};

/// What the steering program did with the frames of the interface.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SteeringCounters {
    /// Sent to the port.
    pub taken: u64,
    /// Left to the kernel: no rule wants it.
    pub passed_not_steered: u64,
    /// Left to the kernel: neither IP with UDP or TCP, nor ARP.
    pub passed_other_protocol: u64,
    /// Left to the kernel: of another VLAN, or with two tags.
    pub passed_other_vlan: u64,
    /// Left to the kernel: a fragment, to an address that is not Tidegate's own.
    pub passed_fragment: u64,
    /// Left to the kernel: more IPv6 extension headers than are looked through.
    pub passed_extension: u64,
    /// Left to the kernel: cut short or not what it says it is.
    pub passed_malformed: u64,
    /// Left to the kernel: wanted, but on a queue that the port does not serve.
    pub passed_no_socket: u64,
}

/// How a port came to be opened.
struct Way {
    native: bool,
    zero_copy: bool,
    busy_poll: Option<BusyPoll>,
}

/// A port on AF_XDP sockets.
///
/// The arena that it was opened with must be the one passed to every call, and
/// serves this port alone. When the port is dropped, frames that the kernel
/// held stay lent: use [`XdpPort::close`] to get them back.
pub struct XdpPort {
    // Dropped in this order: without sockets the program passes everything to
    // the kernel, so nothing is lost between the two.
    queues: Vec<Queue>,
    program: Program,
    /// Polls the device when the sockets cannot.
    poller: Option<NapiPoller>,
    /// How the device is looked after while not everything is let in.
    alone: Alone,
    device: Option<DeviceSettings>,
    traffic: Traffic,
    readiness: OwnedFd,
    way: Way,
    ring_loss: RingLoss,
    next_receive: usize,
    next_transmit: usize,
    /// Bursts in a row that were full or large.
    large_bursts: u32,
    capabilities: Capabilities,
}

/// What a program takes at most for the work on a burst, in nanoseconds: the
/// device is told so when the port is busy. A device that looks on its own does
/// not stop, since a flood always brings more, and takes the processor from the
/// program.
const PATIENCE_NS: u64 = 10_000_000;
/// So many frames are a large burst.
const LARGE: usize = 16;
/// So many large bursts in a row make a busy port.
const BUSY: u32 = 8;

/// The steering program in the kernel, without a port.
pub struct Loaded(Option<Program>);

impl Loaded {
    /// What keeps the program at the interface after [`Port::close_for_now`], when it
    /// was to stay there.
    pub fn link(&self) -> Option<&Link> {
        self.0.as_ref()?.link()
    }

    /// The program is to take the place of the one that another process has on the
    /// interface, when [`Port::go_live`] says so.
    pub fn inherit(&mut self, link: Link) {
        if let Some(program) = &mut self.0 {
            program.inherit(link);
        }
    }
}

impl XdpPort {
    /// Opens a port: registers the arena's memory, attaches the program, binds
    /// a socket to each queue and begins to take what the rules say.
    ///
    /// The sockets belong to the network namespace of the calling thread.
    ///
    /// # Errors
    /// [`XdpError`] names what was wrong and the next step. Nothing is left
    /// attached or changed.
    pub fn open(config: XdpConfig, arena: &mut Arena) -> Result<Self, XdpError> {
        open::open(config, &mut None, arena)
    }

    /// Does the part of [`XdpPort::open`] that takes longest and needs no interface:
    /// some tenths of a second, for the kernel checks the program.
    ///
    /// # Errors
    /// [`XdpError`] when the kernel does not take the program.
    pub fn load() -> Result<Loaded, XdpError> {
        Ok(Loaded(Some(open::load()?)))
    }

    /// As [`XdpPort::open`], with what was loaded before. When it fails that is as it
    /// was, and this may be tried again; once it did not, a next time loads anew.
    ///
    /// # Errors
    /// As [`XdpPort::open`].
    pub fn open_loaded(
        config: XdpConfig,
        loaded: &mut Loaded,
        arena: &mut Arena,
    ) -> Result<Self, XdpError> {
        open::open(config, &mut loaded.0, arena)
    }

    /// Closes the port and gives the frames that the kernel held back to the
    /// arena.
    pub fn close(self, arena: &mut Arena) {
        drop(self);
        arena.reclaim_all();
    }

    /// Takes one thing more, from now on. What is taken already stays so.
    ///
    /// # Errors
    /// [`XdpError::Steering`] when there is no room for another rule.
    pub fn steer(&mut self, rule: Rule) -> Result<(), XdpError> {
        Ok(self.program.steer(&rule)?)
    }

    /// Leaves one thing to the kernel again, from now on. Does nothing when it
    /// was not taken.
    ///
    /// # Errors
    /// [`XdpError::Steering`] when the kernel refuses.
    pub fn unsteer(&mut self, rule: &Rule) -> Result<(), XdpError> {
        Ok(self.program.unsteer(rule)?)
    }

    /// What is taken now.
    pub fn steering(&self) -> &Steering {
        self.program.steering()
    }

    /// What the steering program did so far.
    ///
    /// # Errors
    /// [`XdpError::Steering`] when the kernel refuses to say.
    pub fn steering_counters(&self) -> Result<SteeringCounters, XdpError> {
        Ok(self.program.counters()?)
    }
}

impl Port for XdpPort {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn receive(&mut self, arena: &mut Arena, burst: &mut Burst, quota: usize) -> io::Result<usize> {
        let mut received = self.receive_round(arena, burst, quota)?;
        if self.program.is_limiting() {
            self.keep_device()?;
        }
        let polls = self.polls();
        if let Some(poller) = &mut self.poller
            && polls
            && quota > 0
            && poller.is_due(received, quota)
        {
            let waiting = |queues: &mut [Queue]| queues.iter_mut().map(Queue::waiting).sum();
            let before = waiting(&mut self.queues);
            poller.poll()?;
            poller.on_call(before, waiting(&mut self.queues));
            received += self.receive_round(arena, burst, quota - received)?;
        }
        self.next_receive = (self.next_receive + 1) % self.queues.len();
        if self.traffic.on_look(received) {
            self.set_device_for_traffic()?;
        }
        self.note_burst(received, quota);
        Ok(received)
    }

    fn transmit(&mut self, arena: &mut Arena, burst: &mut Burst) -> io::Result<usize> {
        let count = self.queues.len();
        let mut taken = 0;
        for turn in 0..count {
            let queue = &mut self.queues[(self.next_transmit + turn) % count];
            taken += queue.transmit(arena, burst)?;
        }
        self.next_transmit = (self.next_transmit + 1) % count;
        Ok(taken)
    }

    fn hold(&mut self, wait_ns: u64) -> io::Result<()> {
        if self.works_alone() {
            return Ok(());
        }
        // Where the kernel refuses, the device works meanwhile.
        let device = self.device.as_mut();
        if device.is_some_and(|device| device.hold(wait_ns).unwrap_or(false)) {
            self.traffic.set_heavy();
            self.run_device()?;
        }
        Ok(())
    }

    fn prepare_sleep(&mut self) -> io::Result<bool> {
        self.large_bursts = 0;
        self.traffic.on_sleep();
        self.set_device_for_traffic()?;
        let mut idle = true;
        for queue in &mut self.queues {
            idle &= queue.prepare_sleep()?;
        }
        Ok(idle)
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.readiness.as_fd())
    }

    fn set_steering(&mut self, rule: &Rule, take: bool) -> io::Result<()> {
        if take { self.steer(*rule) } else { self.unsteer(rule) }.map_err(io::Error::other)
    }

    fn admission(&mut self) -> Option<&mut dyn Early> {
        Some(self)
    }

    fn counters(&mut self) -> PortCounters {
        let mut counters = PortCounters::default();
        for queue in &self.queues {
            queue.add_counters(&mut counters);
        }
        // Nothing can be done about a refusal here; the drops go uncounted.
        for class in self.counts().unwrap_or_default() {
            let drops = &mut counters.drops;
            drops.add(DropReason::AdmissionClassClosed, class.refused_closed);
            drops.add(DropReason::AdmissionRate, class.refused_rate);
            drops.add(DropReason::AdmissionSourceShare, class.refused_source_share);
        }
        self.capabilities.detail = self.detail();
        counters
    }

    fn close_for_now(self: Box<Self>, arena: &mut Arena, keep: bool) -> Option<Left> {
        let Self { queues, mut program, .. } = *self;
        if !(keep && program.hold().is_ok()) {
            program.detach();
        }
        drop(queues);
        arena.reclaim_all();
        Some(Left::Xdp(Box::new(Loaded(Some(program)))))
    }

    fn go_live(&mut self) -> io::Result<()> {
        self.program.go_live()
    }
}

/// Frames that were let in and refused, of all classes.
fn in_and_out(counts: &[ClassCounts]) -> (u64, u64) {
    let sum = |part: fn(&ClassCounts) -> u64| counts.iter().map(part).sum();
    (sum(|class| class.admitted), sum(ClassCounts::refused))
}

/// Frames that are not admitted are dropped by the program on the interface,
/// before they are copied. Only frames that the port takes are judged.
impl Early for XdpPort {
    fn set_program(&mut self, program: &crate::admission::Program) -> io::Result<()> {
        self.program.admission().set_program(program)
    }

    fn set_known(&mut self, words: &[u64]) -> io::Result<()> {
        self.program.admission().set_known(words)
    }

    fn set_limits(&mut self, limits: Option<&[ClassLimit]>) -> io::Result<()> {
        let was_limiting = self.program.is_limiting();
        self.program.set_limits(limits)?;
        if was_limiting != limits.is_some() {
            let counts = self.program.admission().counts()?;
            self.alone = Alone::new(self.ring_loss.read()?, in_and_out(&counts));
            self.traffic.set_limiting(limits.is_some());
            self.set_device()?;
        }
        Ok(())
    }

    fn counts(&mut self) -> io::Result<[ClassCounts; CLASSES_MAX]> {
        let counts = self.program.admission().counts()?;
        if self.program.is_limiting() && self.alone.on_counts(in_and_out(&counts)) {
            self.set_device()?;
        }
        Ok(counts)
    }

    fn unseen(&mut self) -> io::Result<u64> {
        self.ring_loss.read()
    }
}

impl XdpPort {
    /// Runs the device's receive path once.
    fn run_device(&mut self) -> io::Result<()> {
        if let Some(poller) = &self.poller {
            return poller.look();
        }
        self.queues.iter().try_for_each(|queue| queue.socket().poll_device())
    }

    /// Whether the device runs the program on the interface without the port.
    fn works_alone(&self) -> bool {
        self.program.is_limiting() && self.alone.is_left()
    }

    /// Whether the port takes frames off the device itself.
    fn polls(&self) -> bool {
        !self.works_alone() && (self.traffic.is_heavy() || self.device.is_none())
    }

    /// Tells the device whether to wait for polls, from now on.
    fn set_device_for_traffic(&mut self) -> io::Result<()> {
        if self.works_alone() {
            return Ok(());
        }
        let heavy = self.traffic.is_heavy();
        let Some(device) = &mut self.device else { return Ok(()) };
        match if heavy { device.release() } else { device.interrupt() } {
            Ok(true) => self.run_device(),
            Ok(false) => Ok(()),
            // Where the kernel refuses, polls go on.
            Err(_) => {
                self.traffic.set_heavy();
                Ok(())
            }
        }
    }

    /// Looks now and then how the device fares while not everything is let in.
    fn keep_device(&mut self) -> io::Result<()> {
        if self.alone.looked.elapsed() < LOOK_EVERY {
            return Ok(());
        }
        let lost = self.ring_loss.read()?;
        if self.alone.on_look(lost) {
            self.set_device()
        } else if self.works_alone() {
            self.run_device()
        } else {
            Ok(())
        }
    }

    /// Tells the device when to look by itself, from now on.
    fn set_device(&mut self) -> io::Result<()> {
        let (alone, overrun) = (self.works_alone(), self.alone.overrun);
        let overrun = overrun && self.program.is_limiting();
        // Where the kernel refuses, the device looks at other times.
        let _ = self.device.as_mut().map(|device| match (alone, overrun) {
            (true, _) => device.work_alone(),
            (_, true) => device.hold(PATIENCE_NS),
            _ => device.release(),
        });
        self.run_device()
    }

    /// A port that is busy polls again, however late: until it goes to sleep
    /// the device waits for it.
    fn note_burst(&mut self, frames: usize, quota: usize) {
        if frames < LARGE.min(quota) {
            self.large_bursts = 0;
            return;
        }
        self.large_bursts = self.large_bursts.saturating_add(1);
        if self.large_bursts >= BUSY
            && self.polls()
            && let Some(device) = &mut self.device
        {
            // Where the kernel refuses, the device works behind our back.
            let _ = device.hold(PATIENCE_NS);
        }
    }

    /// Takes what waits in the rings, each queue in turn.
    fn receive_round(
        &mut self,
        arena: &mut Arena,
        burst: &mut Burst,
        quota: usize,
    ) -> io::Result<usize> {
        let (count, polls) = (self.queues.len(), self.polls());
        let mut received = 0;
        for turn in 0..count {
            let queue = &mut self.queues[(self.next_receive + turn) % count];
            received += queue.receive(arena, burst, quota - received, polls)?;
        }
        Ok(received)
    }

    fn detail(&self) -> String {
        let mut parts = vec![if self.way.native { "native" } else { "generic" }.to_string()];
        parts.push(if self.way.zero_copy { "zero-copy" } else { "copy" }.to_string());
        if let Some(settings) = &self.way.busy_poll {
            parts.push(if self.poller.is_some() {
                "busy polling by io_uring".to_string()
            } else if self.queues.iter().all(|queue| queue.polling() != Polling::Off) {
                format!("busy polling budget {}", settings.budget)
            } else {
                "no busy polling by this driver".to_string()
            });
            parts.push(if self.device.is_some() {
                format!("interrupts deferred {} us", settings.flush_timeout_ns / 1000)
            } else {
                "interrupts not deferred".to_string()
            });
        }
        parts.join(", ")
    }
}
