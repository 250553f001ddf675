//! The poll loop.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use tidegate_memory::Arena;
use tidegate_port::{Burst, Capabilities, Port, PortCounters};
use tidegate_stack::{Counters, Event, Stack};

use crate::{Clock, Idle, IdleConfig, KernelNeighbours, Step};

/// Sleep no longer than this while frames wait for a port that is full.
const RETRY_TRANSMIT_NS: u64 = 200_000;

/// How an engine runs.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// At most so many frames are received before the stack's timers and its
    /// transmit queue have their turn.
    pub receive_quota: usize,
    /// How to wait when there is nothing to do.
    pub idle: IdleConfig,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self { receive_quota: 64, idle: IdleConfig::default() }
    }
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

/// How long a sleep may last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sleep {
    /// Until the next timer, in nanoseconds; `None` when there is none.
    pub timeout_ns: Option<u64>,
}

/// A port, an arena and a stack, run to completion on one core.
pub struct Engine {
    // The port comes first: it is closed before the arena that the kernel may
    // still be writing to is unmapped.
    port: Box<dyn Port>,
    arena: Arena,
    stack: Stack,
    neighbours: Option<KernelNeighbours>,
    config: EngineConfig,
    clock: Clock,
    /// When the clock was last read.
    now_ns: u64,
    idle: Idle,
    incoming: Burst,
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
        let incoming = Burst::with_capacity(config.receive_quota);
        Self {
            port,
            arena,
            stack,
            neighbours,
            config,
            clock,
            now_ns,
            idle,
            incoming,
            counters: EngineCounters::default(),
        }
    }

    /// One round: receives a burst, lets the stack take it, serves timers,
    /// transmits. Returns how many frames were received.
    ///
    /// # Errors
    /// When the port is of no further use.
    pub fn poll(&mut self) -> io::Result<usize> {
        let now_ns = self.read_clock();
        let received =
            self.port.receive(&mut self.arena, &mut self.incoming, self.config.receive_quota)?;
        while let Some(frame) = self.incoming.pop_front() {
            self.stack.ingest(now_ns, frame, &mut self.arena);
        }
        if self.stack.next_timeout().is_some_and(|timeout_ns| timeout_ns <= now_ns) {
            self.stack.handle_timeout(now_ns, &mut self.arena);
        }
        if let Some(neighbours) = &mut self.neighbours {
            neighbours.update(now_ns, &mut self.stack, &mut self.arena)?;
        }
        self.counters.rounds += 1;
        if received > 0 {
            self.counters.busy_rounds += 1;
            self.idle.on_work(now_ns);
        }
        self.flush()?;
        Ok(received)
    }

    /// Hands what the stack has made to the port, as much as it takes.
    ///
    /// # Errors
    /// When the port is of no further use.
    pub fn flush(&mut self) -> io::Result<()> {
        self.port.transmit(&mut self.arena, self.stack.transmit_queue())?;
        Ok(())
    }

    /// The next thing that happened to a socket. Requests for neighbours are
    /// served here and not shown.
    pub fn poll_event(&mut self) -> Option<Event> {
        loop {
            match self.stack.poll_event()? {
                Event::NeighbourWanted(address) => {
                    if let Some(neighbours) = &mut self.neighbours {
                        neighbours.resolve(address);
                    }
                }
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
        let now_ns = self.read_clock();
        self.idle.step(now_ns)
    }

    /// Makes ready to sleep on [`Engine::wake_fds`]. `None` when there is work
    /// already.
    ///
    /// # Errors
    /// When the port is of no further use.
    pub fn prepare_sleep(&mut self) -> io::Result<Option<Sleep>> {
        if !self.port.prepare_sleep()? {
            return Ok(None);
        }
        self.counters.sleeps += 1;
        if let Some(neighbours) = &mut self.neighbours {
            neighbours.on_sleep();
        }
        let now_ns = self.read_clock();
        let timer_ns = self.stack.next_timeout().map(|at_ns| at_ns.saturating_sub(now_ns));
        let retry_ns = (!self.stack.transmit_queue().is_empty()).then_some(RETRY_TRANSMIT_NS);
        let timeout_ns = timer_ns.into_iter().chain(retry_ns).min();
        Ok(Some(Sleep { timeout_ns }))
    }

    /// Copies of the descriptors that become readable when there is work, for
    /// a sleeper who cannot hold the engine meanwhile.
    ///
    /// # Errors
    /// When the process has no descriptor left.
    pub fn wake_fds(&self) -> io::Result<Vec<OwnedFd>> {
        let port = self.port.wake_fd();
        let neighbours = self.neighbours.as_ref().map(AsFd::as_fd);
        port.into_iter().chain(neighbours).map(|fd| fd.try_clone_to_owned()).collect()
    }

    /// The port, for what only it can do.
    pub fn port(&mut self) -> &mut dyn Port {
        &mut *self.port
    }

    /// What the port can do.
    pub fn capabilities(&self) -> &Capabilities {
        self.port.capabilities()
    }

    /// What the engine, the port and the stack counted.
    pub fn counters(&mut self) -> (EngineCounters, PortCounters, &Counters) {
        (self.counters, self.port.counters(), self.stack.counters())
    }

    /// Frames of the arena that are neither in use nor with the port.
    pub fn frames_available(&self) -> usize {
        self.arena.available()
    }
}
