//! The engine of a router.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use tidegate::{Arena, DropCounters, DropReason};
use tidegate_engine::Clock;
use tidegate_gate::{Gate, Next, Ring, Rings, Settings};
use tidegate_memory::Frame;
use tidegate_port::{Burst, Port, PortCounters};
use tidegate_stack::{Counters, Router};

use crate::screen::{QUEUE_PACKETS, ScreenCounters, ScreenLink, Verdict};

/// The most frames that a port is asked for at once.
const BURST: usize = 64;
/// A receive turn without a quota ends after so long all the same, so that the
/// process can be told to stop.
const TURN_MAX_NS: u64 = 100_000_000;
/// How long to wait with frames for a port that takes none.
const RETRY_TRANSMIT_NS: u64 = 200_000;
/// Receive turns with frames since the last sleep, from which on there is a
/// load that does not let the router sleep.
const LOADED_TURNS: u32 = 32;
/// The longest time between two looks at a port under load, in nanoseconds.
const LOADED_LOOK_NS: u64 = 10_000_000;
/// How often to look for packets that the screen has forgotten.
const EXPIRE_NS: u64 = 100_000_000;
/// The gate's name for the queue to the screen.
const SCREEN_QUEUE: u64 = 0;
/// The gate's name for the transmit queue of the first port; the others follow.
const FIRST_OUTPUT_QUEUE: u64 = 1;
/// A transmit queue as long as this is full, as far as feedback is concerned. It
/// takes more, without feedback.
const OUTPUT_QUEUE_PACKETS: u32 = 512;

/// What a router did since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ForwarderCounters {
    /// Turns that were served.
    pub turns: u64,
    /// Turns of receive rings in which frames came.
    pub busy_turns: u64,
    /// Times that it made ready to sleep.
    pub sleeps: u64,
}

/// What came of one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// A ring was served; so many packets moved.
    Served(usize),
    /// Work is left, but programs come first now.
    Yield,
    /// Nothing may be done now. Receiving is held back until the time, in
    /// nanoseconds; `None`: it is not.
    Wait(Option<u64>),
}

/// What came of a receive turn.
#[derive(Clone, Copy, Debug, Default)]
struct Received {
    frames: usize,
    /// Feedback ended it, not the quota nor the ring.
    held: bool,
}

/// One port's figures.
#[derive(Clone, Debug)]
pub struct PortReport {
    /// The kind of port and how it works.
    pub kind: String,
    /// At the port.
    pub port: PortCounters,
    /// At its interface.
    pub stack: Counters,
}

/// A router: ports, an arena, interfaces, a gate, and maybe a screen.
pub struct Forwarder {
    // Ports come first: they are closed before the arena that the kernel may
    // still be writing to is unmapped.
    ports: Vec<Box<dyn Port>>,
    arena: Arena,
    router: Router,
    gate: Gate,
    screen: Option<ScreenLink>,
    clock: Clock,
    now_ns: u64,
    incoming: Burst,
    /// The part of each transmit queue that has its turn.
    outgoing: Vec<Burst>,
    /// Between receive work and protocol work, in the modes that have it.
    input: VecDeque<(usize, Frame)>,
    input_drops: DropCounters,
    expire_at_ns: u64,
    /// Receive turns with frames since the last sleep.
    awake_turns: u32,
    counters: ForwarderCounters,
}

impl Forwarder {
    /// Joins ports, the one arena that they were opened with, and a router with
    /// an interface for each.
    pub fn new(
        ports: Vec<Box<dyn Port>>,
        arena: Arena,
        router: Router,
        screen: Option<ScreenLink>,
        settings: Settings,
        clock: Clock,
    ) -> Self {
        let now_ns = clock.now_ns();
        let rings = Rings {
            receive: ports.len(),
            transmit: ports.len(),
            application: usize::from(screen.is_some()),
        };
        let outgoing = ports.iter().map(|_| Burst::with_capacity(BURST)).collect();
        Self {
            gate: Gate::new(settings, rings, now_ns),
            ports,
            arena,
            router,
            screen,
            clock,
            now_ns,
            incoming: Burst::with_capacity(BURST),
            outgoing,
            input: VecDeque::new(),
            input_drops: DropCounters::new(),
            expire_at_ns: 0,
            awake_turns: 0,
            counters: ForwarderCounters::default(),
        }
    }

    /// When to look, and how much to take.
    pub fn gate(&mut self) -> &mut Gate {
        &mut self.gate
    }

    /// Reads the clock.
    pub fn read_clock(&mut self) -> u64 {
        self.now_ns = self.clock.now_ns();
        self.now_ns
    }

    /// Does what the gate says is next.
    ///
    /// # Errors
    /// When a port is of no further use.
    pub fn step(&mut self) -> io::Result<Step> {
        self.read_clock();
        let turn = match self.gate.next(self.now_ns) {
            Next::Serve(turn) => turn,
            Next::Yield => return Ok(Step::Yield),
            Next::Wait { held_until_ns } => return Ok(Step::Wait(held_until_ns)),
        };
        self.counters.turns += 1;
        let mut held = false;
        let taken = match turn.ring {
            Ring::Receive(port) => {
                let received = self.receive(port, turn.quota as usize)?;
                held = received.held;
                received.frames
            }
            Ring::Transmit(port) => self.transmit(port, turn.quota as usize)?,
            Ring::Application(_) => self.collect_verdicts(turn.quota as usize),
        };
        if self.gate.measures_time() {
            self.read_clock();
        }
        self.gate.on_served(turn, taken as u32, self.now_ns);
        if held {
            // It was not the ring that ended the turn.
            self.gate.on_ready(turn.ring);
        }
        Ok(Step::Served(taken))
    }

    /// Every port and the screen may have something.
    pub fn look_everywhere(&mut self) {
        self.gate.on_all_ready();
    }

    /// Serves the timers, and gives up what the screen has forgotten.
    pub fn serve_timers(&mut self) {
        let now_ns = self.now_ns;
        if self.router.next_timeout().is_some_and(|due_ns| due_ns <= now_ns) {
            self.router.handle_timeout(now_ns, &mut self.arena);
            self.announce_transmits();
        }
        if now_ns >= self.expire_at_ns
            && let Some(screen) = &mut self.screen
        {
            self.expire_at_ns = now_ns + EXPIRE_NS;
            let (router, arena) = (&mut self.router, &mut self.arena);
            screen.expire(now_ns, &mut |transit, reason| router.discard(transit, reason, arena));
            self.tell_screen_level();
        }
    }

    /// Receives up to `quota` frames from a port and passes them on. Without a
    /// quota and without feedback it ends when none is left: under a flood,
    /// never (Mogul and Ramakrishnan, section 6.6.2, show what comes of that).
    fn receive(&mut self, port: usize, quota: usize) -> io::Result<Received> {
        let began_ns = self.now_ns;
        let mut received = Received::default();
        while received.frames < quota {
            let most = BURST.min(quota - received.frames).min(self.screen_room());
            let frames = self.ports[port].receive(&mut self.arena, &mut self.incoming, most)?;
            if frames == 0 {
                break;
            }
            while let Some(frame) = self.incoming.pop_front() {
                self.router.ingest(self.now_ns, port, frame, &mut self.arena);
                self.pass_on();
            }
            received.frames += frames;
            self.finish_burst();
            if received.frames < quota {
                let now_ns = self.read_clock();
                // The rest is better left with the card, before any work goes
                // into it.
                received.held = self.gate.held_until(now_ns).is_some();
                if received.held || now_ns - began_ns > TURN_MAX_NS {
                    break;
                }
            }
        }
        if received.frames > 0 {
            self.counters.busy_turns += 1;
            self.tell_ports_of_load()?;
        }
        Ok(received)
    }

    /// The most frames to receive, so that feedback can hold the others back:
    /// all of them may be for the screen. One that is stuck has no say.
    fn screen_room(&self) -> usize {
        let feedback = self.gate.settings().config().feedback;
        let screen = self.screen.as_ref().filter(|_| feedback);
        let room = screen.map(|screen| QUEUE_PACKETS - screen.waiting());
        room.filter(|room| *room > 0).unwrap_or(usize::MAX)
    }

    /// Under load the cards are to wait for the router, however long its
    /// protocol work takes: one that lost patience would receive on its own,
    /// before all else that this core has to do. A port tells its own card when
    /// bursts are large, but not the one that frames leave by, nor when bursts
    /// are small: with that alone a router with a quota of 10 forwarded about a
    /// fifth less at 700,000 packets a second and more.
    fn tell_ports_of_load(&mut self) -> io::Result<()> {
        self.awake_turns = self.awake_turns.saturating_add(1);
        if self.awake_turns == LOADED_TURNS {
            self.ports.iter_mut().try_for_each(|port| port.hold(LOADED_LOOK_NS))?;
        }
        Ok(())
    }

    /// Forwards what may be forwarded, or shows it to the screen.
    #[inline]
    fn pass_on(&mut self) {
        while let Some(transit) = self.router.poll_transit() {
            let Some(screen) = &mut self.screen else {
                self.router.forward(self.now_ns, transit, &mut self.arena);
                continue;
            };
            match screen.offer(self.now_ns, transit, &self.arena) {
                Ok(()) if !screen.wants_flush() => {}
                Ok(()) => self.flush_screen(),
                Err((transit, reason)) => self.router.discard(transit, reason, &mut self.arena),
            }
        }
    }

    /// Sends the screen what it was not sent yet, and tells the gate who has
    /// work now.
    fn finish_burst(&mut self) {
        self.flush_screen();
        self.tell_screen_level();
        self.announce_transmits();
    }

    fn flush_screen(&mut self) {
        if let Some(screen) = &mut self.screen {
            let (router, arena) = (&mut self.router, &mut self.arena);
            screen.flush(&mut |transit, reason| router.discard(transit, reason, arena));
        }
    }

    fn tell_screen_level(&mut self) {
        let Some(screen) = &self.screen else { return };
        let waiting = screen.waiting() as u32;
        self.gate.on_queue_level(self.now_ns, SCREEN_QUEUE, waiting, QUEUE_PACKETS as u32);
    }

    fn announce_transmits(&mut self) {
        for port in 0..self.ports.len() {
            if self.has_to_send(port) {
                self.gate.on_ready(Ring::Transmit(port));
                self.tell_output_level(port);
            }
        }
    }

    fn tell_output_level(&mut self, port: usize) {
        let waiting = self.outgoing[port].len() + self.router.transmit_queue(port).len();
        let queue = FIRST_OUTPUT_QUEUE + port as u64;
        self.gate.on_queue_level(self.now_ns, queue, waiting as u32, OUTPUT_QUEUE_PACKETS);
    }

    /// Takes verdicts and does what they say; returns how many.
    fn collect_verdicts(&mut self, quota: usize) -> usize {
        let Some(screen) = &mut self.screen else { return 0 };
        let (now_ns, mut gone) = (self.now_ns, Vec::new());
        let (router, arena) = (&mut self.router, &mut self.arena);
        let judged = screen.collect(
            quota,
            &mut |transit, verdict| match verdict {
                Verdict::Pass => router.forward(now_ns, transit, arena),
                Verdict::Refuse => router.discard(transit, DropReason::ScreenRefused, arena),
            },
            &mut |transit, reason| gone.push((transit, reason)),
        );
        for (transit, reason) in gone {
            self.router.discard(transit, reason, &mut self.arena);
        }
        self.tell_screen_level();
        self.announce_transmits();
        judged
    }

    /// Hands up to `quota` frames to a port; returns how many it took.
    fn transmit(&mut self, port: usize, quota: usize) -> io::Result<usize> {
        let (queue, outgoing) = (self.router.transmit_queue(port), &mut self.outgoing[port]);
        let taken = if outgoing.is_empty() && queue.len() <= quota {
            self.ports[port].transmit(&mut self.arena, queue)?
        } else {
            while outgoing.len() < quota
                && let Some(frame) = queue.pop_front()
            {
                outgoing.push_back(frame);
            }
            self.ports[port].transmit(&mut self.arena, outgoing)?
        };
        if self.gate.watches_queues() {
            self.tell_output_level(port);
        }
        Ok(taken)
    }

    fn has_to_send(&mut self, port: usize) -> bool {
        !self.outgoing[port].is_empty() || !self.router.transmit_queue(port).is_empty()
    }

    /// The upper half of the modes `interrupt` and `moderated`: moves up to
    /// `limit` frames of each port to the input queue. What does not fit is
    /// dropped, after work was spent on it. Returns how many came.
    ///
    /// # Errors
    /// When a port is of no further use.
    pub fn take_in(&mut self, limit: u32) -> io::Result<usize> {
        let room = self.gate.settings().config().input_queue as usize;
        let mut taken = 0;
        for port in 0..self.ports.len() {
            let most = BURST.min(limit as usize);
            taken += self.ports[port].receive(&mut self.arena, &mut self.incoming, most)?;
            while let Some(frame) = self.incoming.pop_front() {
                if self.input.len() < room {
                    self.input.push_back((port, frame));
                } else {
                    self.arena.free(frame);
                    self.input_drops.count(DropReason::InputQueueFull);
                }
            }
        }
        Ok(taken)
    }

    /// The lower half: the protocol work of up to `limit` packets of the input
    /// queue, the verdicts of the screen, the timers, and sending. Returns how
    /// many packets and verdicts there were.
    ///
    /// # Errors
    /// When a port is of no further use.
    pub fn process_input(&mut self, limit: usize) -> io::Result<usize> {
        self.read_clock();
        let mut done = 0;
        while done < limit
            && let Some((port, frame)) = self.input.pop_front()
        {
            self.router.ingest(self.now_ns, port, frame, &mut self.arena);
            self.pass_on();
            done += 1;
        }
        self.flush_screen();
        done += self.collect_verdicts(limit);
        self.serve_timers();
        for port in 0..self.ports.len() {
            self.transmit(port, usize::MAX)?;
        }
        Ok(done)
    }

    /// Whether frames wait between the halves.
    pub fn has_input(&self) -> bool {
        !self.input.is_empty()
    }

    /// Makes ready to sleep; `None` when there is work already. Else how long
    /// at most, in nanoseconds; `u64::MAX` is as long as nothing comes. Held
    /// back, what arrives stays with the card.
    ///
    /// # Errors
    /// When a port is of no further use.
    pub fn prepare_sleep(&mut self, held_until_ns: Option<u64>) -> io::Result<Option<u64>> {
        for port in &mut self.ports {
            match held_until_ns {
                Some(until_ns) => port.hold(until_ns.saturating_sub(self.now_ns))?,
                None if port.prepare_sleep()? => {}
                None => return Ok(None),
            }
        }
        if held_until_ns.is_none() {
            self.awake_turns = 0;
        }
        self.counters.sleeps += 1;
        let now_ns = self.read_clock();
        let unsent = (0..self.ports.len()).any(|port| self.has_to_send(port));
        let judging = self.screen.as_ref().is_some_and(|screen| screen.waiting() > 0);
        let due = [
            self.router.next_timeout(),
            held_until_ns,
            unsent.then_some(now_ns + RETRY_TRANSMIT_NS),
            judging.then_some(now_ns + EXPIRE_NS),
        ];
        let due_ns = due.into_iter().flatten().min();
        Ok(Some(due_ns.map_or(u64::MAX, |due_ns| due_ns.saturating_sub(now_ns))))
    }

    /// Copies of the descriptors that become readable when frames arrive.
    ///
    /// # Errors
    /// When the process has no descriptor left.
    pub fn port_fds(&self) -> io::Result<Vec<OwnedFd>> {
        let fds = self.ports.iter().filter_map(Port::wake_fd);
        fds.map(|fd| fd.try_clone_to_owned()).collect()
    }

    /// A copy of the screen's descriptor, which changes with each connection;
    /// the number tells one connection from the next.
    ///
    /// # Errors
    /// When the process has no descriptor left.
    pub fn screen_fd(&self) -> io::Result<Option<(u64, OwnedFd)>> {
        let Some(screen) = &self.screen else { return Ok(None) };
        let Some(fd) = screen.wake_fd() else { return Ok(None) };
        Ok(Some((screen.counters().connections, fd.as_fd().try_clone_to_owned()?)))
    }

    /// Which connection to the screen this is; 0 while there is none.
    pub fn screen_connection(&self) -> u64 {
        let connected = self.screen.as_ref().filter(|screen| screen.is_connected());
        connected.map_or(0, |screen| screen.counters().connections)
    }

    /// What was done so far.
    pub fn counters(&self) -> ForwarderCounters {
        self.counters
    }

    /// What passed through the screen; `None` when there is none.
    pub fn screen_counters(&self) -> Option<ScreenCounters> {
        self.screen.as_ref().map(ScreenLink::counters)
    }

    /// What each port and its interface counted.
    pub fn reports(&mut self) -> Vec<PortReport> {
        let stacks: Vec<Counters> =
            self.router.stacks().iter().map(|stack| stack.counters().clone()).collect();
        let report = |(port, stack): (&mut Box<dyn Port>, Counters)| {
            let counters = port.counters();
            let capabilities = port.capabilities();
            let kind = format!("{} ({})", capabilities.kind, capabilities.detail);
            PortReport { kind, port: counters, stack }
        };
        self.ports.iter_mut().zip(stacks).map(report).collect()
    }

    /// Every drop, at ports, interfaces and between them, by reason.
    pub fn drops(&mut self) -> DropCounters {
        let mut drops = self.input_drops.clone();
        for report in self.reports() {
            drops.merge(&report.port.drops);
            drops.merge(&report.stack.drops);
            drops.merge(&report.stack.transmit_drops);
        }
        drops
    }
}

impl Drop for Forwarder {
    fn drop(&mut self) {
        // The frames go with the arena; the screen's are only handed back so
        // that none is lost from the account.
        if let Some(screen) = &mut self.screen {
            let (router, arena) = (&mut self.router, &mut self.arena);
            screen.release(&mut |transit, reason| router.discard(transit, reason, arena));
        }
    }
}

#[cfg(test)]
mod tests;
