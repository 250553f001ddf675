//! Network core: rounds of the engine, each followed by the turns of the applications.
//!
//! The loop and all that it does for an application are here. Messages of other threads are
//! handled by a [`MessageHandler`], so nothing in this folder depends on migration, upgrade or
//! admission.

mod active_apps;
mod app_events;
mod commands;
pub(super) mod cores;
mod ending;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
mod idle;
pub(super) mod inbox;
pub(super) mod load;
pub(super) mod message;
mod poll;
mod port_programs;
mod port_query;
mod report;
mod round_shares;
mod round_timer;
mod serve;
pub(super) mod server;
#[cfg(any(test, fuzzing))]
mod testbed;
mod transfers;

use std::io;
use std::ops::ControlFlow;
use std::sync::Arc;

use tidegate_engine::{CpuContention, PriorityBoost, WakeFds, shorten_time_slice};

use self::active_apps::ActiveApps;
use self::app_events::AppEvents;
use self::cores::Cores;
use self::ending::EndingApps;
use self::inbox::Inbox;
use self::load::LoadMeter;
use self::message::CoreMessage;
use self::round_shares::RoundShares;
use self::round_timer::RoundTimer;
use self::server::SocketServer;
use crate::daemon::application::Application;
use crate::daemon::ids::{AppNumber, SocketKey};
use crate::daemon::log::Log;
use crate::daemon::workers::AppWaker;
use crate::ipc::takeover_token::TakeoverToken;

/// Load windows after which the migration sets are counted anew and work counters are halved.
const REGROUP_WINDOWS: u32 = 10;

/// Network core: an engine, and the applications served from it.
pub(super) struct NetworkCore {
    pub(super) index: usize,
    pub(super) cores: Arc<Cores>,
    pub(super) server: SocketServer,
    pub(super) wake_fds: WakeFds,
    pub(super) apps: Vec<Option<Box<Application>>>,
    app_events: AppEvents,
    pub(super) waker: AppWaker,
    active: ActiveApps,
    /// Application that has the first turn in the next round.
    first_turn: usize,
    /// Sockets to poll again: the device was full, the application had written more than one poll
    /// takes, or the socket is new on this core.
    pub(super) poll_queue: Vec<SocketKey>,
    /// Applications may have a limited share of the core.
    limits_shares: bool,
    /// A socket in the queue has more than one poll takes.
    has_more: bool,
    inbox: Inbox,
    /// Message that arrived while the core was going to sleep.
    early_message: Option<CoreMessage>,
    meter: LoadMeter,
    /// Load windows completed.
    load_windows: u32,
    next_check_ns: u64,
    /// Other threads had the processor since the last round. If they were applications, they
    /// have left commands.
    contention: Option<CpuContention>,
    /// Detached applications whose sockets have not all ended.
    ending: EndingApps,
    /// Data that this round takes from each application.
    shares: RoundShares,
    /// Timer of the rounds, if they are measured.
    rounds: Option<RoundTimer>,
    /// Priority beside CPU-bound threads.
    boost: PriorityBoost,
    /// True while commands of an exited application are drained.
    is_reaping: bool,
    pub(super) log: Log,
}

/// Position of a network core among others: its index and its inbox.
pub(super) struct CoreSlot {
    pub(super) index: usize,
    pub(super) inbox: Inbox,
    pub(super) cores: Arc<Cores>,
}

/// Handler of the messages to a network core.
pub(super) trait MessageHandler {
    /// Handles a message. Breaks when the core must stop, with the process ID of the daemon that
    /// has taken over, if any.
    ///
    /// # Errors
    /// When the core cannot continue.
    fn on_message(
        &mut self,
        core: &mut NetworkCore,
        message: CoreMessage,
    ) -> io::Result<ControlFlow<Option<u32>>>;

    /// Number of sets of applications on this core that can migrate independently.
    fn count_migration_sets(&self, core: &NetworkCore) -> usize;
}

impl NetworkCore {
    pub(super) fn new(slot: CoreSlot, mut server: SocketServer, log: Log) -> io::Result<Self> {
        let CoreSlot { index, inbox, cores } = slot;
        let wake_fds = server.engine.wake_fds()?;
        Ok(Self {
            index,
            cores,
            wake_fds,
            apps: Vec::new(),
            app_events: AppEvents::new()?,
            waker: AppWaker::new(),
            active: ActiveApps::default(),
            first_turn: 0,
            poll_queue: Vec::new(),
            limits_shares: false,
            has_more: false,
            inbox,
            early_message: None,
            meter: LoadMeter::default(),
            load_windows: 0,
            next_check_ns: server.engine.read_clock(),
            contention: None,
            ending: EndingApps::default(),
            shares: RoundShares::default(),
            rounds: None,
            boost: PriorityBoost::default(),
            is_reaping: false,
            server,
            log,
        })
    }

    /// Runs until it is told to stop. Remaining connections of applications are then reset,
    /// unless another daemon has taken over: returns the process ID of that daemon.
    ///
    /// # Errors
    /// When the device has failed.
    pub(super) fn run(mut self, mut handler: impl MessageHandler) -> io::Result<Option<u32>> {
        // Short turns let this thread run at once when it wakes beside CPU-bound threads. A kernel
        // that refuses makes it wait longer there.
        let _ = shorten_time_slice();
        self.server.engine.take_over()?;
        let successor = loop {
            self.rounds.iter_mut().for_each(RoundTimer::begin);
            match self.handle_messages(&mut handler)? {
                ControlFlow::Continue(messages) => self.run_round(messages, &handler)?,
                ControlFlow::Break(successor) => break successor,
            }
        };
        if successor.is_some() {
            return Ok(successor);
        }
        for number in 0..self.apps.len() {
            self.detach(number as AppNumber);
        }
        self.end_all_sockets();
        self.server.engine.flush()?;
        Ok(None)
    }

    /// Measures the rounds from now on, or no longer. Only for the thread that runs the core.
    ///
    /// # Errors
    /// If the kernel does not report scheduling times.
    pub(super) fn measure_rounds(&mut self, measures: bool) -> io::Result<()> {
        self.rounds = measures.then(RoundTimer::of_this_thread).transpose()?;
        Ok(())
    }

    /// Runs one round, after some messages: a round of the engine, then the turns of the
    /// applications.
    fn run_round(&mut self, messages: usize, handler: &impl MessageHandler) -> io::Result<()> {
        self.shares.begin_round(self.active.attached());
        let has_other_work = self.has_app_work() || self.has_app_at_work();
        let engine = &mut self.server.engine;
        let received = if has_other_work { engine.poll_briefly()? } else { engine.poll()? };
        self.measure_load(handler);
        let events = self.handle_events();
        if self.has_sleeping_apps() {
            self.collect_app_events();
        }
        let is_idle = messages + received + events == 0;
        let commands = self.serve_applications(is_idle);
        let looks = self.poll_queued(is_idle && commands == 0);
        if events + commands + looks > 0 {
            let (stack, arena, now_ns) = self.server.engine.parts();
            stack.tcp_flush(now_ns, arena);
            self.server.engine.flush()?;
            // Transmission may have freed space, or ended a connection.
            self.handle_events();
        }
        self.notify_applications();
        self.server.release_closed();
        let left_commands = messages + commands > 0;
        if left_commands {
            self.server.engine.on_work();
        }
        let contention = self.contention.take();
        if let Some(contention) = contention.filter(|found| found.is_cpu_bound || !left_commands) {
            self.server.engine.on_cpu_contention(contention);
        }
        self.end_sockets();
        let has_more = self.has_more || !self.ending.is_empty();
        let is_busy = messages + received + events + commands > 0 || has_more;
        self.meter.set_busy(is_busy);
        if is_busy {
            self.check_periodically();
            Ok(())
        } else {
            self.wait_for_work()
        }
    }

    /// Handles all messages. Returns their number, or the break of the handler.
    fn handle_messages(
        &mut self,
        handler: &mut impl MessageHandler,
    ) -> io::Result<ControlFlow<Option<u32>, usize>> {
        let mut handled = 0;
        while let Some(message) =
            self.early_message.take().or_else(|| self.inbox.messages.try_recv().ok())
        {
            handled += 1;
            if let ControlFlow::Break(successor) = handler.on_message(self, message)? {
                return Ok(ControlFlow::Break(successor));
            }
        }
        Ok(ControlFlow::Continue(handled))
    }

    /// Publishes the load of this core from time to time, if there are other cores.
    fn measure_load(&mut self, handler: &impl MessageHandler) {
        if self.cores.count() == 1 {
            return;
        }
        let (_, _, now_ns) = self.server.engine.parts();
        if !self.meter.on_round(now_ns, self.cores.load(self.index)) {
            return;
        }
        self.load_windows += 1;
        if self.load_windows.is_multiple_of(REGROUP_WINDOWS) {
            self.apps.iter_mut().flatten().for_each(|app| app.recent_work /= 2);
            let sets = handler.count_migration_sets(self);
            self.cores.load(self.index).set_migration_sets(sets);
        }
    }

    /// Inserts an application; returns its index.
    pub(super) fn insert_application(&mut self, app: Box<Application>) -> AppNumber {
        // A number that a socket still refers to is not reused: the memory of the socket may be
        // that of an application that has ended.
        let is_referred_to = |number| self.server.sockets.refers_to(number as AppNumber);
        let mut slots = self.apps.iter().enumerate();
        let free = slots.find(|(number, app)| app.is_none() && !is_referred_to(*number));
        let index = free.map_or(self.apps.len(), |(number, _)| number);
        if index == self.apps.len() {
            self.apps.push(None);
        }
        self.apps[index] = Some(app);
        if let Some(flow_steering) = self.cores.flow_steering() {
            flow_steering.set_active(self.index);
        }
        self.watch(index as AppNumber);
        index as AppNumber
    }
}

/// Application with this takeover token.
pub(super) fn find_by_token(
    apps: &mut [Option<Box<Application>>],
    token: TakeoverToken,
) -> Option<(AppNumber, &mut Application)> {
    let mut all = apps.iter_mut().enumerate();
    all.find_map(|(number, app)| {
        let app = app.as_deref_mut().filter(|app| app.token.ct_eq(&token))?;
        Some((number as AppNumber, app))
    })
}
