//! The poll loop.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use tidegate_gate::admission::{Admission, ClassCounters, Config};
use tidegate_gate::{Gate, Interrupt, Mode, Next, Ring, Rings, Settings};
use tidegate_memory::Arena;
use tidegate_port::{Burst, Capabilities, Left, Port, PortCounters};
use tidegate_stack::{Counters, Event, FULL, Stack, UdpId};
use tidegate_wire::DropCounters;

use crate::admission::{AdmissionError, Admitter, Role, is_due};
use crate::pressure::{OtherCores, PressureMeter};
use crate::{Clock, Idle, IdleConfig, KernelNeighbours, Step};

/// Sleep no longer than this while frames wait for a port that is full.
const RETRY_TRANSMIT_NS: u64 = 200_000;

/// The most frames that a port is asked for at once, whatever the quota.
const BURST_MAX: usize = 256;

/// How an engine runs.
#[derive(Clone, Debug, Default)]
pub struct EngineConfig {
    /// When to look for packets, and how many to take.
    pub gate: Settings,
    /// How to wait when there is nothing to do.
    pub idle: IdleConfig,
}

/// What an engine did since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineCounters {
    /// Rounds of the poll loop.
    pub rounds: u64,
    /// Rounds in which frames were received.
    pub busy_rounds: u64,
    /// Times that it made ready to sleep.
    pub sleeps: u64,
}

/// How to sleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sleep {
    /// Until the next timer, in nanoseconds; `None` when there is none.
    pub timeout_ns: Option<u64>,
    /// Receiving is held back: a readable port is no reason to wake up.
    pub held: bool,
}

/// What to sleep on.
#[derive(Debug, Default)]
pub struct WakeFds {
    /// Readable when a frame has arrived.
    pub port: Option<OwnedFd>,
    /// Readable when the kernel's neighbours have changed.
    pub neighbours: Option<OwnedFd>,
}

/// What came of one step of the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stepped {
    /// A ring was served; so many frames were received.
    Served(usize),
    /// It is the application's turn to take so many datagrams.
    Application(u32),
    /// Work is left, but programs come first now.
    Yield,
    /// There is nothing to do, or receiving is held back.
    Wait,
}

/// A port, an arena and a stack, run to completion on one core.
pub struct Engine {
    // The port comes first: it is closed before the arena that the kernel may
    // still be writing to is unmapped.
    pub(crate) port: Box<dyn Port>,
    pub(crate) arena: Arena,
    pub(crate) stack: Stack,
    /// What is left of a port that was closed for another process.
    pub(crate) left: Option<Left>,
    neighbours: Option<KernelNeighbours>,
    gate: Gate,
    admission: Role,
    pressure: PressureMeter,
    /// Until when receiving is held back.
    held_until_ns: Option<u64>,
    clock: Clock,
    /// When the clock was last read.
    now_ns: u64,
    idle: Idle,
    pub(crate) incoming: Burst,
    /// Between receive work and protocol work, in the modes that have it.
    pub(crate) input: Burst,
    pub(crate) input_drops: DropCounters,
    counters: EngineCounters,
}

impl Engine {
    /// Joins a port, the arena it was opened with and a stack. `neighbours`
    /// connects the stack to the kernel's neighbour table when they share an
    /// address.
    pub fn new(
        port: Box<dyn Port>,
        arena: Arena,
        stack: Stack,
        clock: Clock,
        neighbours: Option<KernelNeighbours>,
        config: EngineConfig,
    ) -> Self {
        let now_ns = clock.now_ns();
        let idle = Idle::new(config.idle, now_ns);
        let rings = Rings { receive: 1, transmit: 1, application: 1 };
        let gate = Gate::new(config.gate, rings, now_ns);
        let incoming = Burst::with_capacity(BURST_MAX);
        Self {
            port,
            arena,
            stack,
            left: None,
            neighbours,
            gate,
            admission: Role::None,
            pressure: PressureMeter::default(),
            held_until_ns: None,
            clock,
            now_ns,
            idle,
            incoming,
            input: Burst::new(),
            input_drops: DropCounters::new(),
            counters: EngineCounters::default(),
        }
    }

    /// From now on, when not everything can be taken, admission says what is: for
    /// the engines behind this one, too, if it did before. The seed should be secret.
    ///
    /// # Errors
    /// When the settings make no sense or the port does not take them.
    pub fn set_admission(&mut self, config: &Config, seed: [u8; 16]) -> Result<(), AdmissionError> {
        let mut admitter = Admitter::new(config, seed, &mut *self.port)?;
        if let Some(others) = self.admitter().and_then(Admitter::others) {
            admitter.listen_to(Arc::clone(others));
        }
        self.admission = Role::Decides(Box::new(admitter));
        self.stack.tell_confirmed_peers();
        Ok(())
    }

    /// Admission, if it is decided here.
    pub fn admission(&self) -> Option<&Admission> {
        self.admitter().map(Admitter::admission)
    }

    fn admitter(&self) -> Option<&Admitter> {
        match &self.admission {
            Role::Decides(admitter) => Some(admitter),
            _ => None,
        }
    }

    /// If this engine decides what is admitted, it does so for those behind it,
    /// too, who tell it how things go there.
    pub(crate) fn admit_for<'s>(&mut self, others: impl Iterator<Item = &'s mut Self>) {
        let Role::Decides(admitter) = &mut self.admission else { return };
        let told = Arc::new(OtherCores::default());
        admitter.listen_to(Arc::clone(&told));
        for other in others {
            other.admission = Role::Tells { to: Arc::clone(&told), due_ns: 0 };
            other.stack.tell_confirmed_peers();
        }
    }

    /// One round: receives a burst, lets the stack take it, serves timers,
    /// transmits. Returns how many frames were received. What follows until
    /// the next call is the application's turn.
    ///
    /// # Errors
    /// When the port is of no further use.
    pub fn poll(&mut self) -> io::Result<usize> {
        self.read_clock();
        self.gate.on_all_ready();
        let mut received = 0;
        while let Stepped::Served(frames) = self.step()? {
            received += frames;
        }
        self.held_until_ns = self.gate.held_until(self.now_ns);
        self.serve_timers()?;
        self.counters.rounds += 1;
        if received > 0 {
            self.counters.busy_rounds += 1;
            self.idle.on_work(self.now_ns);
        }
        self.pressure.on_round(received);
        self.admit_by_pressure()?;
        // The transmit ring had its turn: there is something only if timers
        // made it, or the card was full.
        if !self.stack.transmit_queue().is_empty() {
            self.flush()?;
        }
        Ok(received)
    }

    /// Does what the gate says is next.
    ///
    /// # Errors
    /// When the port is of no further use.
    #[inline]
    pub fn step(&mut self) -> io::Result<Stepped> {
        let turn = match self.gate.next(self.now_ns) {
            Next::Serve(turn) => turn,
            Next::Yield => return Ok(Stepped::Yield),
            Next::Wait { held_until_ns } => {
                self.held_until_ns = held_until_ns;
                return Ok(Stepped::Wait);
            }
        };
        let taken = match turn.ring {
            Ring::Receive(_) => self.receive(turn.quota as usize)?,
            Ring::Transmit(_) => {
                self.flush()?;
                0
            }
            Ring::Application(_) => {
                // Its time is the program's own and not charged to packets.
                self.gate.on_served(turn, 0, self.now_ns);
                return Ok(Stepped::Application(turn.quota));
            }
        };
        if self.gate.measures_time() {
            self.read_clock();
        }
        self.gate.on_served(turn, taken as u32, self.now_ns);
        Ok(Stepped::Served(taken))
    }

    /// Receives up to `quota` frames and lets the stack take them.
    #[inline]
    fn receive(&mut self, quota: usize) -> io::Result<usize> {
        let looped = if self.stack.has_looped() { self.loop_back(quota)? } else { 0 };
        // The wire has a quota of its own: what we send to ourselves takes nothing
        // from it.
        let mut received = 0;
        while received < quota {
            let most = BURST_MAX.min(quota - received);
            let (port, arena, incoming) = (&mut *self.port, &mut self.arena, &mut self.incoming);
            let frames = match &mut self.admission {
                Role::Decides(admitter) => {
                    admitter.receive(self.now_ns, port, arena, incoming, most)?
                }
                _ => port.receive(arena, incoming, most)?,
            };
            self.stack.ingest_burst(self.now_ns, &mut self.incoming, &mut self.arena);
            received += frames;
            if frames < most {
                break;
            }
        }
        Ok(received.max(looped))
    }

    /// Lets up to `quota` frames that the stack sends to its own addresses come
    /// back in. What they make it send to itself has the next turn.
    #[cold]
    pub(crate) fn loop_back(&mut self, quota: usize) -> io::Result<usize> {
        let looped = self.stack.looped_queue();
        let quota = quota.min(looped.len());
        let frames = self.port.loop_back(&mut self.arena, looped, &mut self.incoming, quota)?;
        self.stack.ingest_burst(self.now_ns, &mut self.incoming, &mut self.arena);
        Ok(frames)
    }

    /// Whether frames wait that the stack sends to its own addresses: they come
    /// in when the engine runs next.
    #[inline]
    pub fn has_looped(&self) -> bool {
        self.stack.has_looped()
    }

    /// Sets what is admitted by how things go, when that is due.
    #[inline]
    fn admit_by_pressure(&mut self) -> io::Result<()> {
        let admitter = match &mut self.admission {
            Role::Decides(admitter) if admitter.is_due(self.now_ns) => admitter,
            Role::Tells { to, due_ns } if is_due(self.now_ns, *due_ns) => {
                *due_ns = self.now_ns.saturating_add(Config::PERIOD_NS);
                to.tell(&self.pressure.take(self.stack.counters(), None));
                return Ok(());
            }
            _ => return Ok(()),
        };
        let early = admitter.early_work(&mut *self.port)?;
        let pressure = self.pressure.take(self.stack.counters(), early);
        admitter.on_period(self.now_ns, &pressure, &mut *self.port)
    }

    /// Lets the stack's timers and the kernel's neighbours have their turn.
    ///
    /// # Errors
    /// When netlink is of no further use.
    pub fn serve_timers(&mut self) -> io::Result<()> {
        let now_ns = self.now_ns;
        if self.stack.next_timeout().is_some_and(|timeout_ns| timeout_ns <= now_ns) {
            self.stack.handle_timeout(now_ns, &mut self.arena);
        }
        if let Some(neighbours) = &mut self.neighbours {
            neighbours.update(now_ns, &mut self.stack, &mut self.arena)?;
        }
        Ok(())
    }

    /// Hands what the stack has made to the port, as much as it takes.
    ///
    /// # Errors
    /// When the port is of no further use.
    pub fn flush(&mut self) -> io::Result<()> {
        self.port.transmit(&mut self.arena, self.stack.transmit_queue())?;
        Ok(())
    }

    /// The next thing that happened to a socket. Requests for neighbours and
    /// peers who finished a handshake are served here and not shown.
    #[inline]
    pub fn poll_event(&mut self) -> Option<Event> {
        if self.stack.has_events() { self.next_event() } else { None }
    }

    fn next_event(&mut self) -> Option<Event> {
        loop {
            match self.stack.poll_event()? {
                Event::NeighbourWanted(address) => {
                    if let Some(neighbours) = &mut self.neighbours {
                        neighbours.resolve(address);
                    }
                }
                Event::PeerConfirmed(peer) => match &mut self.admission {
                    Role::Decides(admitter) => admitter.confirm(peer),
                    Role::Tells { to, .. } => to.confirm(peer),
                    Role::None => {}
                },
                event => return Some(event),
            }
        }
    }

    /// The stack, the arena its frames live in, and the time of the last round
    /// or of [`Engine::read_clock`], for calls on sockets.
    #[inline]
    pub fn parts(&mut self) -> (&mut Stack, &mut Arena, u64) {
        (&mut self.stack, &mut self.arena, self.now_ns)
    }

    /// Reads the clock, in nanoseconds. Once for a whole burst is enough.
    pub fn read_clock(&mut self) -> u64 {
        self.now_ns = self.clock.now_ns();
        self.now_ns
    }

    /// The stack.
    pub fn stack(&self) -> &Stack {
        &self.stack
    }

    /// How to wait after a round without work.
    pub fn idle_step(&mut self) -> Step {
        if self.held_until_ns.is_some() {
            return Step::Sleep;
        }
        if self.gate.settings().config().mode == Mode::Dedicated {
            return Step::Spin;
        }
        let now_ns = self.read_clock();
        self.idle.step(now_ns)
    }

    /// There was work that did not come from the port: back to the first step.
    pub fn on_work(&mut self) {
        self.idle.on_work(self.now_ns);
    }

    /// Others had the processor during a pause: it is not for waiting on.
    pub fn on_crowded(&mut self) {
        self.idle.on_crowded();
    }

    /// Makes ready to sleep on [`Engine::wake_fds`]. `None` when there is work
    /// already.
    ///
    /// # Errors
    /// When the port is of no further use.
    pub fn prepare_sleep(&mut self) -> io::Result<Option<Sleep>> {
        let now_ns = self.read_clock();
        let held_ns = self.held_until_ns.take().map(|until_ns| until_ns.saturating_sub(now_ns));
        match held_ns {
            // The port is left alone: what arrives stays with the card.
            Some(held_ns) => self.port.hold(held_ns)?,
            None if self.has_looped() || !self.port.prepare_sleep()? => return Ok(None),
            None => {}
        }
        self.counters.sleeps += 1;
        if let Some(neighbours) = &mut self.neighbours {
            neighbours.on_sleep();
        }
        let timeout_ns = self.timeout_ns().into_iter().chain(held_ns).min();
        Ok(Some(Sleep { timeout_ns, held: held_ns.is_some() }))
    }

    /// Copies of the descriptors that become readable when there is work, for
    /// a sleeper who cannot hold the engine meanwhile.
    ///
    /// # Errors
    /// When the process has no descriptor left.
    pub fn wake_fds(&self) -> io::Result<WakeFds> {
        let copy = |fd: BorrowedFd<'_>| fd.try_clone_to_owned();
        let port = self.port.wake_fd().map(copy).transpose()?;
        let neighbours = self.neighbours.as_ref().map(|own| copy(own.as_fd())).transpose()?;
        Ok(WakeFds { port, neighbours })
    }

    /// Tells the gate how full a socket's queue is.
    pub fn tell_level(&mut self, id: UdpId) {
        match self.stack.udp_fill(id) {
            Some(fill) => self.tell_fill(id, fill),
            None => self.gate.on_queue_closed(id.to_bits()),
        }
    }

    /// Tells the gate how full the queues behind a socket are, in parts of
    /// [`FULL`].
    pub fn tell_fill(&mut self, id: UdpId, fill: u32) {
        self.pressure.on_level(fill * 100 / FULL);
        self.gate.on_queue_level(self.now_ns, id.to_bits(), fill, FULL);
    }

    /// Whether anything depends on how full queues are.
    pub fn wants_levels(&self) -> bool {
        !matches!(self.admission, Role::None) || self.gate.settings().config().feedback
    }

    /// The card raised its interrupt: the gate's rings wait for their turns.
    pub fn on_interrupt(&mut self) -> Interrupt {
        let now_ns = self.read_clock();
        self.gate.on_ready(Ring::Transmit(0));
        self.gate.on_interrupt(now_ns, 0)
    }

    /// How long until the next timer, in nanoseconds.
    pub fn timeout_ns(&mut self) -> Option<u64> {
        let now_ns = self.read_clock();
        let retry_ns = (!self.stack.transmit_queue().is_empty()).then_some(RETRY_TRANSMIT_NS);
        let timer_ns = self.stack.next_timeout().map(|at_ns| at_ns.saturating_sub(now_ns));
        timer_ns.into_iter().chain(retry_ns).min()
    }

    /// When to look, and how much to take.
    #[inline]
    pub fn gate(&mut self) -> &mut Gate {
        &mut self.gate
    }

    /// Changes the settings of receive scheduling from now on.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] for another mode: which threads there are is
    /// settled when the stack is opened.
    pub fn set_gate(&mut self, settings: Settings) -> io::Result<()> {
        let (now, new) = (self.gate.settings().config().mode, settings.config().mode);
        if now != new {
            let (now, new) = (now.name(), new.name());
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("the mode is {now} and cannot become {new} while it runs: start again"),
            ));
        }
        self.gate.set(settings);
        Ok(())
    }

    /// What was admitted and refused of each class; nothing without admission.
    pub fn class_counters(&self) -> Vec<(String, ClassCounters)> {
        self.admission().map_or_else(Vec::new, |admission| {
            let names = admission.classes().names().map(str::to_owned);
            names.zip(admission.counters().iter().copied()).collect()
        })
    }

    /// The port, for what only it can do.
    pub fn port(&mut self) -> &mut dyn Port {
        &mut *self.port
    }

    /// What the port can do.
    pub fn capabilities(&self) -> &Capabilities {
        self.port.capabilities()
    }

    /// What the engine, the port and the stack counted. What did not fit in
    /// the input queue or was not admitted was dropped at the port.
    pub fn counters(&mut self) -> (EngineCounters, PortCounters, &Counters) {
        let mut port = self.port.counters();
        let admitter_drops = self.admitter().map(Admitter::drops);
        for drops in admitter_drops.into_iter().chain([&self.input_drops]) {
            port.received -= drops.total().min(port.received);
            port.drops.merge(drops);
        }
        (self.counters, port, self.stack.counters())
    }

    /// Frames of the arena that are neither in use nor with the port.
    pub fn frames_available(&self) -> usize {
        self.arena.available()
    }
}
