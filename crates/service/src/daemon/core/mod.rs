//! Network core: rounds of the engine, each followed by the turns of the applications.

pub(super) mod commands;
pub(super) mod cores;
pub(super) mod inbox;
pub(super) mod load;

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tidegate_engine::{IdleStep, SleepPlan, WakeFds, pause};
use tidegate_gate::Settings;

use self::commands::SocketServer;
use self::cores::Cores;
use self::inbox::{CoreMessage, Inbox};
use self::load::LoadMeter;
use crate::daemon::application::{Application, ProtocolError};
use crate::daemon::ids::{AppNumber, SocketKey};
use crate::daemon::report::{DaemonReport, GateState};
use crate::daemon::socket::{PollResult, SocketKind};
use crate::daemon::transfer::table::{IN_TRANSIT, SocketTransfer, TransferTable};
use crate::daemon::upgrade::request::PendingHandover;
use crate::daemon::upgrade::save::RestoredCore;
use crate::daemon::{Log, UpgradeMode};
use crate::ipc::handshake::send_refusal;
use crate::ipc::layout::COMMAND_RING_SLOTS;

/// Interval between checks for exited applications while the core is busy.
const CHECK_INTERVAL_NS: u64 = 10_000_000;

/// Load windows after which the migration sets are counted anew and work counters are halved.
const REGROUP_WINDOWS: u32 = 10;

/// Time to wait for a device whose transmit ring is full.
const DEVICE_RETRY_INTERVAL: Duration = Duration::from_micros(100);

/// Network core: an engine, and the applications served from it.
pub(in crate::daemon) struct NetworkCore {
    pub(in crate::daemon) index: usize,
    pub(in crate::daemon) cores: Arc<Cores>,
    pub(in crate::daemon) server: SocketServer,
    pub(in crate::daemon) wake_fds: WakeFds,
    pub(in crate::daemon) apps: Vec<Option<Box<Application>>>,
    /// Application that has the first turn in the next round.
    first_turn: usize,
    /// Sockets to poll again, as the device was full or the socket is new on this core.
    pub(in crate::daemon) poll_queue: Vec<SocketKey>,
    inbox: Inbox,
    /// Message that arrived while the core was going to sleep.
    early_message: Option<CoreMessage>,
    meter: LoadMeter,
    /// Load windows completed.
    load_windows: u32,
    next_check_ns: u64,
    /// Other threads had the processor since the last round. If they were applications, they
    /// have left commands.
    others_ran: bool,
    /// True while commands of an exited application are drained.
    is_reaping: bool,
    /// Next coalesced wake-up of an application.
    wake_next_ns: Option<u64>,
    pub(in crate::daemon) upgrade: UpgradeMode,
    /// Handover that waits until all applications are on this core.
    pub(in crate::daemon) pending_handover: Option<PendingHandover>,
    /// Process of the daemon that has taken over.
    pub(in crate::daemon) successor: Option<u32>,
    pub(in crate::daemon) log: Log,
}

/// Position of a network core among others: its index and its inbox.
pub(in crate::daemon) struct CoreSlot {
    pub(in crate::daemon) index: usize,
    pub(in crate::daemon) inbox: Inbox,
    pub(in crate::daemon) cores: Arc<Cores>,
}

impl NetworkCore {
    /// Restores a core from what another daemon handed over.
    pub(in crate::daemon) fn restore(
        slot: CoreSlot,
        mut host: SocketServer,
        restored: RestoredCore,
        upgrade: UpgradeMode,
        log: Log,
    ) -> io::Result<Self> {
        host.sockets = restored.sockets;
        let fits = |transfer: &SocketTransfer| {
            let Some(socket) = host.sockets.get(transfer.key) else { return false };
            let may_be_shared =
                !transfer.is_shared || matches!(socket.kind, SocketKind::Listener(_));
            socket.holders.contains(&IN_TRANSIT) == transfer.is_in_transit() && may_be_shared
        };
        let now_ns = host.engine.read_clock();
        host.transfers = TransferTable::restore(restored.transfers, now_ns, fits)?;
        let keys = host.sockets.keys();
        for &key in &keys {
            let SocketServer { engine, sockets, socket_index, .. } = &mut host;
            let Some(socket) = sockets.get_mut(key) else { continue };
            socket_index.insert(socket.id(), key);
            socket.abort_if_corrupt(engine);
            // Events during the handover are found by polling every socket.
            socket.in_poll_queue = true;
        }
        host.restore_claims(restored.claims)?;
        host.claim_all_among_cores()?;
        let mut core = Self::new(slot, host, upgrade, log)?;
        core.cores.load(core.index).add_applications(restored.apps.iter().flatten().count());
        core.apps = restored.apps;
        core.poll_queue = keys;
        Ok(core)
    }

    pub(in crate::daemon) fn new(
        slot: CoreSlot,
        mut server: SocketServer,
        upgrade: UpgradeMode,
        log: Log,
    ) -> io::Result<Self> {
        let CoreSlot { index, inbox, cores } = slot;
        let wake_fds = server.engine.wake_fds()?;
        Ok(Self {
            index,
            cores,
            wake_fds,
            apps: Vec::new(),
            first_turn: 0,
            poll_queue: Vec::new(),
            inbox,
            early_message: None,
            meter: LoadMeter::default(),
            load_windows: 0,
            next_check_ns: server.engine.read_clock(),
            others_ran: false,
            is_reaping: false,
            wake_next_ns: None,
            upgrade,
            pending_handover: None,
            successor: None,
            server,
            log,
        })
    }

    /// Runs until it is told to stop. Remaining connections of applications are then reset,
    /// unless another daemon has taken over: returns the process ID of that daemon.
    ///
    /// # Errors
    /// When the device has failed.
    pub(in crate::daemon) fn run(mut self) -> io::Result<Option<u32>> {
        self.server.engine.take_over()?;
        while let Some(messages) = self.handle_messages()? {
            let received = self.server.engine.poll()?;
            self.measure_load();
            let events = self.handle_events();
            let commands = self.serve_applications(messages + received + events == 0);
            let looks = self.poll_queued();
            if events + commands + looks > 0 {
                let (stack, arena, now_ns) = self.server.engine.parts();
                stack.tcp_flush(now_ns, arena);
                self.server.engine.flush()?;
                // Transmission may have freed space, or ended a connection.
                self.handle_events();
            }
            self.notify_applications();
            self.server.release_closed();
            if messages + commands > 0 {
                self.server.engine.on_work();
            } else if self.others_ran {
                self.server.engine.on_cpu_contention();
            }
            self.others_ran = false;
            let is_busy = messages + received + events + commands > 0;
            self.meter.set_busy(is_busy);
            if is_busy {
                self.check_periodically();
            } else {
                self.wait_for_work()?;
            }
        }
        if self.successor.is_some() {
            return Ok(self.successor);
        }
        for number in 0..self.apps.len() {
            self.detach(number as AppNumber);
        }
        self.server.engine.flush()?;
        Ok(None)
    }

    /// Handles all messages. Returns their number, or `None` when the core must stop.
    fn handle_messages(&mut self) -> io::Result<Option<usize>> {
        let mut handled = 0;
        while let Some(message) =
            self.early_message.take().or_else(|| self.inbox.messages.try_recv().ok())
        {
            handled += 1;
            match message {
                CoreMessage::Attach(app, asked) => self.attach(app, asked)?,
                CoreMessage::Transfer(request) => self.handle_transfer(*request)?,
                CoreMessage::PortQuery(port) => self.on_port_query(port)?,
                CoreMessage::InsertBatch(family) => self.insert_batch(*family)?,
                CoreMessage::MoveLoad { to, busy_permille } => self.move_load(to, busy_permille)?,
                CoreMessage::MigrateProcess { pid, to } => self.migrate_process(pid, to)?,
                CoreMessage::Report(to) => {
                    let busy = self.cores.load(self.index).last_report().busy_permille;
                    let apps = self.apps.iter().flatten();
                    let report = DaemonReport::new(self.index, busy, &mut self.server, apps);
                    // The requester may have gone.
                    let _ = to.send(report);
                }
                CoreMessage::Gate(settings, to) => {
                    // The requester may have gone.
                    let _ = to.send(self.gate(settings));
                }
                CoreMessage::Gather => self.move_all_to_primary()?,
                CoreMessage::Gathered { unmoved } => self.on_gathered(unmoved)?,
                CoreMessage::HandOver(to) => self.start_handover(to)?,
                CoreMessage::Stop => return Ok(None),
            }
            if self.successor.is_some() {
                return Ok(None);
            }
        }
        Ok(Some(handled))
    }

    fn gate(&mut self, settings: Option<Settings>) -> io::Result<GateState> {
        let engine = &mut self.server.engine;
        settings.map_or(Ok(()), |settings| engine.set_gate(settings))?;
        let (settings, counters) = (engine.gate().settings().clone(), *engine.gate().counters());
        Ok(GateState { settings, counters, classes: engine.class_counters() })
    }

    /// Inserts an application; returns its index.
    pub(in crate::daemon) fn insert_application(&mut self, app: Box<Application>) -> AppNumber {
        let free = self.apps.iter().position(Option::is_none);
        let index = free.unwrap_or_else(|| {
            self.apps.push(None);
            self.apps.len() - 1
        });
        self.apps[index] = Some(app);
        index as AppNumber
    }

    /// Attaches an application. A fork child is forwarded until the core of its parent is found:
    /// `asked_cores` cores do not have the parent.
    fn attach(&mut self, app: Box<Application>, asked_cores: usize) -> io::Result<()> {
        let identity = app.identity.clone();
        if app.parent_token.is_none() {
            (self.log)(&format!("{identity} attached"));
            // `Cores::admit` has counted the application.
            self.insert_application(app);
            return Ok(());
        }
        let count = self.cores.count();
        if self.parent_of(&app).is_none() && count > 1 && asked_cores < self.cores.max_hops() {
            let next = (self.index + 1) % count;
            self.cores.recount_application(self.index, next);
            return self.cores.inbox(next).send(CoreMessage::Attach(app, asked_cores + 1));
        }
        let number = self.insert_application(app);
        match self.inherit_sockets(number) {
            Ok(()) => (self.log)(&format!("a fork child of {identity} attached")),
            Err(why) => {
                if let Some(Some(app)) = self.apps.get(number as usize) {
                    // The child may be gone.
                    let _ = send_refusal(app.as_fd(), &why.to_string());
                }
                (self.log)(&format!("a fork child of {} was rejected: {why}", identity.name));
                self.detach(number);
            }
        }
        Ok(())
    }

    /// Application of the same user whose takeover token the fork child presented.
    fn parent_of(&self, child: &Application) -> Option<AppNumber> {
        let token = child.parent_token?;
        let is_parent = |app: &Option<Box<Application>>| {
            let app = app.as_ref();
            app.is_some_and(|app| app.token.ct_eq(&token) && app.identity.uid == child.identity.uid)
        };
        Some(self.apps.iter().position(is_parent)? as AppNumber)
    }

    /// Gives a fork child the sockets of its parent.
    fn inherit_sockets(&mut self, number: AppNumber) -> io::Result<()> {
        let no_parent = || io::Error::other("no application of this user has this takeover token");
        let mut child = self.apps[number as usize].take().ok_or_else(no_parent)?;
        let parent = self.parent_of(&child).and_then(|parent| self.apps[parent as usize].as_ref());
        let inherited = match parent {
            Some(parent) => self.server.inherit(number, &mut child, parent),
            None => Err(no_parent()),
        };
        if inherited.is_ok() {
            // A child that misses the welcome has gone; the next check finds that out.
            let _ = child.welcome(self.cores.count());
        }
        self.apps[number as usize] = Some(child);
        inherited
    }

    /// Publishes the load of this core from time to time, if there are other cores.
    fn measure_load(&mut self) {
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
            self.cores.load(self.index).set_migration_sets(self.migration_sets().len());
        }
    }

    /// Polls the sockets that the stack has events for. Returns the number of events.
    pub(in crate::daemon) fn handle_events(&mut self) -> usize {
        let mut events = 0;
        while let Some(event) = self.server.engine.poll_event() {
            events += 1;
            if let Some(key) = self.server.socket_index.of_event(event) {
                self.poll_socket(key);
            }
        }
        events
    }

    /// Gives each application its turn. Applications that have used up their share of the core
    /// wait until the core is otherwise idle. Returns the number of commands executed.
    fn serve_applications(&mut self, is_idle: bool) -> usize {
        let count = self.apps.len();
        let (mut total, mut waits) = (0, false);
        for turn in 0..count {
            let number = (self.first_turn + turn) % count;
            let (_, _, now_ns) = self.server.engine.parts();
            let Some(app) = &mut self.apps[number] else { continue };
            if app.cpu_share.paused_until(now_ns).is_some() {
                waits = true;
            } else {
                total += self.serve_or_evict(number as AppNumber);
            }
        }
        if waits && is_idle && total == 0 {
            total +=
                (0..count).map(|number| self.serve_or_evict(number as AppNumber)).sum::<usize>();
        }
        self.first_turn =
            self.first_turn.checked_add(1).filter(|&first| first < count).unwrap_or(0);
        total
    }

    fn serve_or_evict(&mut self, number: AppNumber) -> usize {
        self.serve(number).unwrap_or_else(|why| {
            self.evict(number, why);
            0
        })
    }

    /// Executes commands of one application, up to a quota. Returns their number.
    fn serve(&mut self, number: AppNumber) -> Result<usize, ProtocolError> {
        let quota = self.server.engine.gate().settings().config().application_quota.packets();
        let quota = (quota as usize).min(COMMAND_RING_SLOTS);
        let (_, _, began_ns) = self.server.engine.parts();
        let mut done = 0;
        loop {
            let Some(Some(app)) = self.apps.get_mut(number as usize) else { return Ok(done) };
            let command = if done < quota { app.next_command()? } else { None };
            let Some(command) = command else {
                if done > 0 {
                    app.commands.release();
                    app.recent_work += done as u64;
                }
                if done > 0 && app.cpu_share.is_limited() {
                    let now_ns = self.server.engine.read_clock();
                    app.cpu_share.charge(now_ns, now_ns.saturating_sub(began_ns));
                }
                return Ok(done);
            };
            done += 1;
            if command.requested_port().is_some() && !self.is_reaping {
                // A restarted server finds its port free.
                self.reap_except(Some(number));
                if self.query_port(number, command) {
                    continue;
                }
            }
            let Some(Some(app)) = self.apps.get_mut(number as usize) else { return Ok(done) };
            let key = self.server.execute(number, app, command)?;
            self.free_ended_sockets();
            if let Some(key) = key {
                self.poll_socket(key);
            }
        }
    }

    /// Polls a socket, and notifies its holders.
    pub(in crate::daemon) fn poll_socket(&mut self, key: SocketKey) {
        let SocketServer { engine, sockets, .. } = &mut self.server;
        let Some(socket) = sockets.get_mut(key) else { return };
        let Ok(looked) = socket.poll(engine) else { return self.on_protocol_error(key) };
        if looked.poll_again && !std::mem::replace(&mut socket.in_poll_queue, true) {
            self.poll_queue.push(key);
        }
        if looked.notify {
            self.notify_holders(key);
        }
        if looked.is_done {
            self.server.end_socket(key, false);
            self.free_ended_sockets();
        }
    }

    /// Notifies the holders of a socket of a change.
    fn notify_holders(&mut self, key: SocketKey) {
        let mut at = 0;
        while let Some(&holder) = self.server.sockets.get(key).and_then(|s| s.holders.get(at)) {
            let Some(Some(app)) = self.apps.get_mut(holder.app as usize) else {
                at += 1;
                continue;
            };
            app.recent_work += 1;
            match app.notify_changed(holder.slot) {
                Ok(()) => at += 1,
                // Eviction removes the application from the holders.
                Err(why) => self.evict(holder.app, why),
            }
        }
    }

    /// Handles streams with invalid indices: evicts their only holder, or aborts a shared socket.
    fn on_protocol_error(&mut self, key: SocketKey) {
        let SocketServer { engine, sockets, .. } = &mut self.server;
        let Some(socket) = sockets.get_mut(key) else { return };
        match socket.holders.as_slice() {
            [holder] => {
                let app = holder.app;
                self.evict(app, ProtocolError::CorruptMemory);
            }
            // With several holders the offender is unknown.
            _ => {
                socket.abort(engine);
                self.notify_holders(key);
            }
        }
    }

    /// Frees the slots that ended sockets had at their holders.
    pub(in crate::daemon) fn free_ended_sockets(&mut self) {
        while let Some(gone) = self.server.ended.pop() {
            for holder in &gone.holders {
                if let Some(Some(app)) = self.apps.get_mut(holder.app as usize) {
                    let is_own = gone.slot.is_in(&app.memory);
                    app.payload_bytes.add(gone.payload_bytes());
                    app.slots.remove(holder.slot, is_own);
                }
            }
            // The origin may have exited before the other holders.
            if let Some(Some(app)) = self.apps.get_mut(gone.origin.app as usize)
                && gone.slot.is_in(&app.memory)
            {
                app.slots.free(gone.origin.slot);
            }
        }
    }

    /// Polls the sockets in the queue. Returns their number.
    fn poll_queued(&mut self) -> usize {
        let again = std::mem::take(&mut self.poll_queue);
        let count = again.len();
        for key in again {
            if let Some(socket) = self.server.sockets.get_mut(key) {
                socket.in_poll_queue = false;
                self.poll_socket(key);
            }
        }
        count
    }

    pub(in crate::daemon) fn notify_applications(&mut self) {
        let (_, _, now_ns) = self.server.engine.parts();
        self.wake_next_ns = None;
        for number in 0..self.apps.len() {
            let Some(app) = &mut self.apps[number] else { continue };
            match app.publish_notifications(now_ns) {
                Ok(later) => self.wake_next_ns = self.wake_next_ns.into_iter().chain(later).min(),
                Err(why) => self.evict(number as AppNumber, why),
            }
        }
    }

    /// Evicts an application that breaks the protocol.
    fn evict(&mut self, number: AppNumber, why: ProtocolError) {
        if let Some(Some(app)) = self.apps.get(number as usize) {
            (self.log)(&format!("{} was evicted: {why}", app.identity));
        }
        self.detach(number);
    }

    /// Detaches an application and ends its sockets. Data of sockets it has closed before still
    /// goes out, as far as the stack has space for it.
    pub(in crate::daemon) fn detach(&mut self, number: AppNumber) {
        let Some(mut app) = self.apps.get_mut(number as usize).and_then(Option::take) else {
            return;
        };
        let all: Vec<SocketKey> = app.sockets().map(|(_, key)| key).collect();
        for key in all {
            let SocketServer { engine, sockets, .. } = &mut self.server;
            let Some(socket) = sockets.get_mut(key) else { continue };
            if socket.holders.len() > 1 {
                self.server.leave_socket(number, &mut app, key);
                // The application may have written data without a notification.
                self.poll_socket(key);
                continue;
            }
            let is_done = matches!(socket.poll(engine), Ok(PollResult { is_done: true, .. }));
            self.server.end_socket(key, !is_done);
        }
        self.free_ended_sockets();
        self.cores.load(self.index).remove_applications(1);
        self.cores.detach_bell().ring();
    }

    /// Reaps an exited application: executes its remaining commands, then detaches it.
    fn reap(&mut self, number: AppNumber) {
        self.is_reaping = true;
        if let Some(Some(app)) = self.apps.get_mut(number as usize) {
            app.commands.cancel_deferred();
        }
        // A child that shares the rings could go on writing commands.
        let mut left = COMMAND_RING_SLOTS;
        while let Ok(done @ 1..) = self.serve(number)
            && left > done
        {
            left -= done;
        }
        self.is_reaping = false;
        self.detach(number);
    }

    /// Checks the applications at every [`CHECK_INTERVAL_NS`].
    fn check_periodically(&mut self) {
        let (_, _, now_ns) = self.server.engine.parts();
        if now_ns >= self.next_check_ns {
            self.next_check_ns = now_ns + CHECK_INTERVAL_NS;
            self.check_applications();
        }
    }

    fn check_applications(&mut self) {
        let (_, _, now_ns) = self.server.engine.parts();
        for key in self.server.expire_transfers(now_ns) {
            self.poll_socket(key);
        }
        self.free_ended_sockets();
        self.reap_except(None);
    }

    /// Reaps exited applications, so that their ports are free; `exempt` is not checked.
    pub(in crate::daemon) fn reap_except(&mut self, exempt: Option<AppNumber>) {
        let all = (0..self.apps.len() as AppNumber).filter(|&number| Some(number) != exempt);
        all.for_each(|number| self.reap_if_dead(number));
    }

    fn reap_if_dead(&mut self, number: AppNumber) {
        let Some(Some(app)) = self.apps.get(number as usize) else { return };
        if !app.is_alive() {
            (self.log)(&format!("{} has exited", app.identity));
            self.reap(number);
        }
    }

    /// Waits for work: busy-polls, pauses or sleeps, as the engine decides.
    fn wait_for_work(&mut self) -> io::Result<()> {
        match self.server.engine.idle_step() {
            IdleStep::Spin => self.check_periodically(),
            IdleStep::Pause => {
                self.check_periodically();
                self.others_ran = pause();
            }
            IdleStep::Sleep => {
                self.inbox.bell.arm();
                self.apps.iter().flatten().for_each(|app| app.daemon_sleeps.request());
                // The sender may have found the bell unarmed.
                self.early_message = self.inbox.messages.try_recv().ok();
                let slept = if self.early_message.is_none() { self.sleep() } else { Ok(()) };
                self.apps.iter().flatten().for_each(|app| app.daemon_sleeps.clear());
                self.inbox.bell.disarm();
                slept?;
                self.check_applications();
            }
        }
        Ok(())
    }

    fn sleep(&mut self) -> io::Result<()> {
        if self.apps.iter_mut().flatten().any(|app| app.has_work()) {
            return Ok(());
        }
        let Some(sleep) = self.server.engine.prepare_sleep()? else { return Ok(()) };
        let retry = (!self.poll_queue.is_empty()).then_some(DEVICE_RETRY_INTERVAL);
        let SleepPlan { timeout_ns, receive_paused } = sleep;
        let (_, _, now_ns) = self.server.engine.parts();
        let wakes_ns = self.wake_next_ns.into_iter().chain(self.server.transfers.next_expiry_ns());
        let wake_ns = wakes_ns.min().map(|wake_ns| wake_ns.saturating_sub(now_ns));
        let timeout = timeout_ns.into_iter().chain(wake_ns).map(Duration::from_nanos);
        let timeout = timeout.chain(retry).min();
        let timeout = timeout.map(|timeout| Timespec {
            tv_sec: timeout.as_secs().min(i32::MAX as u64) as i64,
            tv_nsec: i64::from(timeout.subsec_nanos()),
        });
        // While receiving is held back, frames stay in the device.
        let port = self.wake_fds.device.as_ref().filter(|_| !receive_paused).map(AsFd::as_fd);
        let own = port.into_iter().chain(self.wake_fds.neighbours.as_ref().map(AsFd::as_fd));
        let apps = self.apps.iter().flatten().map(|app| app.as_fd());
        let mut fds: Vec<PollFd<'_>> = own
            .chain([self.inbox.bell.as_fd()])
            .chain(apps)
            .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
            .collect();
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}
