//! One network core: rounds of the engine and of the applications' turns.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tidegate_engine::{Sleep, Step, WakeFds, pause};
use tidegate_gate::Settings;

use super::application::{Application, Misbehaved};
use super::calls::Host;
use super::cores::Cores;
use super::handover::Leaving;
use super::load::Meter;
use super::names::{AppNumber, SocketKey};
use super::passages::{ON_ITS_WAY, Passage, Passages};
use super::post::{Inbox, Message};
use super::report::{GateState, Report};
use super::save::Restored;
use super::socket::{Kind, Looked};
use super::{Log, Upgrade};
use crate::contract::greeting::send_refusal;
use crate::contract::layout::COMMANDS;

/// While there is work, applications are looked after this often.
const CHECK_NS: u64 = 10_000_000;

/// Who can go elsewhere is found out after so many windows of the meter.
const WINDOWS: u32 = 10;

/// How long to wait for a port that is full.
const RETRY: Duration = Duration::from_micros(100);

/// One network core.
pub(super) struct Core {
    pub(super) number: usize,
    pub(super) cores: Arc<Cores>,
    pub(super) host: Host,
    pub(super) wake: WakeFds,
    pub(super) apps: Vec<Option<Box<Application>>>,
    /// Who has the first turn in the next round.
    first: usize,
    /// Sockets whose datagrams found the port full.
    pub(super) again: Vec<SocketKey>,
    inbox: Inbox,
    /// One that came while the core fell asleep.
    came: Option<Message>,
    meter: Meter,
    /// How often the meter was read.
    windows: u32,
    next_check_ns: u64,
    /// Others had the processor since the last round. If they were applications,
    /// they have left commands.
    others_ran: bool,
    /// It does what one has asked for that has ended.
    is_burying: bool,
    /// When the next application is to be woken that was told of something.
    wake_next_ns: Option<u64>,
    pub(super) upgrade: Upgrade,
    /// Who is to go on in this one's place waits until everything is here.
    pub(super) leaving: Option<Leaving>,
    /// The process that goes on in this one's place.
    pub(super) successor: Option<u32>,
    pub(super) log: Log,
}

/// Which core it is, among others.
pub(super) struct Seat {
    pub(super) number: usize,
    pub(super) inbox: Inbox,
    pub(super) cores: Arc<Cores>,
}

impl Core {
    /// One that goes on with what another daemon had.
    pub(super) fn restore(
        seat: Seat,
        mut host: Host,
        restored: Restored,
        upgrade: Upgrade,
        log: Log,
    ) -> io::Result<Self> {
        host.sockets = restored.sockets;
        let fits = |passage: &Passage| {
            let Some(socket) = host.sockets.get(passage.key) else { return false };
            let may_be_shared = !passage.is_shared || matches!(socket.kind, Kind::Listener(_));
            socket.holders.contains(&ON_ITS_WAY) == passage.is_on_its_way() && may_be_shared
        };
        let now_ns = host.engine.read_clock();
        host.passages = Passages::restore(restored.passages, now_ns, fits)?;
        let keys = host.sockets.keys();
        for &key in &keys {
            let Host { engine, sockets, owners, .. } = &mut host;
            let Some(socket) = sockets.get_mut(key) else { continue };
            owners.insert(socket.id(), key);
            socket.end_if_spoilt(engine);
            // What happened meanwhile is found out by a look at all of them.
            socket.waits_for_port = true;
        }
        host.take_again(restored.taken)?;
        host.settle_all()?;
        let mut core = Self::new(seat, host, upgrade, log)?;
        core.cores.load(core.number).add_applications(restored.apps.iter().flatten().count());
        core.apps = restored.apps;
        core.again = keys;
        Ok(core)
    }

    pub(super) fn new(seat: Seat, mut host: Host, upgrade: Upgrade, log: Log) -> io::Result<Self> {
        let Seat { number, inbox, cores } = seat;
        let wake = host.engine.wake_fds()?;
        Ok(Self {
            number,
            cores,
            wake,
            apps: Vec::new(),
            first: 0,
            again: Vec::new(),
            inbox,
            came: None,
            meter: Meter::default(),
            windows: 0,
            next_check_ns: host.engine.read_clock(),
            others_ran: false,
            is_burying: false,
            wake_next_ns: None,
            upgrade,
            leaving: None,
            successor: None,
            host,
            log,
        })
    }

    /// Runs until it is told to stop. Connections of applications that are still
    /// there are reset then, unless another daemon goes on with them: gives the
    /// process of that one.
    ///
    /// # Errors
    /// When the port is of no further use.
    pub(super) fn run(mut self) -> io::Result<Option<u32>> {
        self.host.engine.go_live()?;
        while let Some(messages) = self.take_messages()? {
            let received = self.host.engine.poll()?;
            self.measure();
            let events = self.take_events();
            let commands = self.serve_applications(messages + received + events == 0);
            let looks = self.look_again();
            if events + commands + looks > 0 {
                let (stack, arena, now_ns) = self.host.engine.parts();
                stack.tcp_flush(now_ns, arena);
                self.host.engine.flush()?;
                // What was sent may have made room, or ended something.
                self.take_events();
            }
            self.tell_applications();
            self.host.release_closed();
            if messages + commands > 0 {
                self.host.engine.on_work();
            } else if self.others_ran {
                self.host.engine.on_crowded();
            }
            self.others_ran = false;
            let is_busy = messages + received + events + commands > 0;
            self.meter.set_busy(is_busy);
            if is_busy {
                self.check_sometimes();
            } else {
                self.wait()?;
            }
        }
        if self.successor.is_some() {
            return Ok(self.successor);
        }
        for number in 0..self.apps.len() {
            self.let_go(number as AppNumber);
        }
        self.host.engine.flush()?;
        Ok(None)
    }

    /// `None` when it is to stop.
    fn take_messages(&mut self) -> io::Result<Option<usize>> {
        let mut taken = 0;
        while let Some(message) = self.came.take().or_else(|| self.inbox.messages.try_recv().ok()) {
            taken += 1;
            match message {
                Message::Joined(app, asked) => self.join(app, asked)?,
                Message::Pass(request) => self.pass(*request)?,
                Message::Wanted(port) => self.on_wanted(port)?,
                Message::Adopt(family) => self.adopt(*family)?,
                Message::Shed { to, busy } => self.shed(to, busy)?,
                Message::Give { pid, to } => self.give_process(pid, to)?,
                Message::Report(to) => {
                    let busy = self.cores.load(self.number).said().busy;
                    let apps = self.apps.iter().flatten();
                    let report = Report::new(self.number, busy, &mut self.host, apps);
                    // Who asked may have gone.
                    let _ = to.send(report);
                }
                Message::Gate(settings, to) => {
                    // Who asked may have gone.
                    let _ = to.send(self.gate(settings));
                }
                Message::Gather => self.gather()?,
                Message::Gathered { left } => self.on_gathered(left)?,
                Message::HandOver(to) => self.step_down(to)?,
                Message::Stop => return Ok(None),
            }
            if self.successor.is_some() {
                return Ok(None);
            }
        }
        Ok(Some(taken))
    }

    fn gate(&mut self, settings: Option<Settings>) -> io::Result<GateState> {
        let engine = &mut self.host.engine;
        settings.map_or(Ok(()), |settings| engine.set_gate(settings))?;
        let (settings, counters) = (engine.gate().settings().clone(), *engine.gate().counters());
        Ok(GateState { settings, counters, classes: engine.class_counters() })
    }

    /// Gives an application a number.
    pub(super) fn seat(&mut self, app: Box<Application>) -> AppNumber {
        let free = self.apps.iter().position(Option::is_none);
        let place = free.unwrap_or_else(|| {
            self.apps.push(None);
            self.apps.len() - 1
        });
        self.apps[place] = Some(app);
        place as AppNumber
    }

    /// An application comes in. One that inherits must find its parent: `asked`
    /// cores have not got it.
    fn join(&mut self, app: Box<Application>, asked: usize) -> io::Result<()> {
        let identity = app.identity.clone();
        if app.heir_of.is_none() {
            (self.log)(&format!("{identity} attached"));
            // Who let it in has counted it.
            self.seat(app);
            return Ok(());
        }
        let count = self.cores.count();
        if self.parent_of(&app).is_none() && count > 1 && asked < self.cores.most_hops() {
            let next = (self.number + 1) % count;
            self.cores.count_one_elsewhere(self.number, next);
            return self.cores.post(next).send(Message::Joined(app, asked + 1));
        }
        let number = self.seat(app);
        match self.bequeath(number) {
            Ok(()) => (self.log)(&format!("a child of {identity} attached")),
            Err(why) => {
                if let Some(Some(app)) = self.apps.get(number as usize) {
                    // It may be gone.
                    let _ = send_refusal(app.as_fd(), &why.to_string());
                }
                (self.log)(&format!("an heir of {} was sent away: {why}", identity.name));
                self.let_go(number);
            }
        }
        Ok(())
    }

    /// The one of the same user whose ticket an heir has.
    fn parent_of(&self, heir: &Application) -> Option<AppNumber> {
        let ticket = heir.heir_of?;
        let is_parent = |app: &Option<Box<Application>>| {
            let app = app.as_ref();
            app.is_some_and(|app| app.ticket.is(&ticket) && app.identity.uid == heir.identity.uid)
        };
        Some(self.apps.iter().position(is_parent)? as AppNumber)
    }

    /// Gives an heir the sockets of the one whose ticket it has.
    fn bequeath(&mut self, number: AppNumber) -> io::Result<()> {
        let lost = || io::Error::other("no program of this user has the ticket that it showed");
        let mut heir = self.apps[number as usize].take().ok_or_else(lost)?;
        let parent = self.parent_of(&heir).and_then(|parent| self.apps[parent as usize].as_ref());
        let inherited = match parent {
            Some(parent) => self.host.inherit(number, &mut heir, parent),
            None => Err(lost()),
        };
        if inherited.is_ok() {
            // One that does not hear this is gone, which is found out later.
            let _ = heir.welcome(self.cores.count());
        }
        self.apps[number as usize] = Some(heir);
        inherited
    }

    /// Says from time to time how busy it is, when there are others.
    fn measure(&mut self) {
        if self.cores.count() == 1 {
            return;
        }
        let (_, _, now_ns) = self.host.engine.parts();
        if !self.meter.on_round(now_ns, self.cores.load(self.number)) {
            return;
        }
        self.windows += 1;
        if self.windows.is_multiple_of(WINDOWS) {
            self.apps.iter_mut().flatten().for_each(|app| app.work /= 2);
            self.cores.load(self.number).set_families(self.kins().len());
        }
    }

    /// Looks at the sockets that something happened to. Returns how many events
    /// there were.
    pub(super) fn take_events(&mut self) -> usize {
        let mut events = 0;
        while let Some(event) = self.host.engine.poll_event() {
            events += 1;
            if let Some(key) = self.host.owners.of_event(event) {
                self.look(key);
            }
        }
        events
    }

    /// Gives each application its turn. Those that have had their share of the time
    /// wait until nobody else wants anything. Returns how many commands were done.
    fn serve_applications(&mut self, is_idle: bool) -> usize {
        let count = self.apps.len();
        let (mut total, mut waits) = (0, false);
        for turn in 0..count {
            let number = (self.first + turn) % count;
            let (_, _, now_ns) = self.host.engine.parts();
            let Some(app) = &mut self.apps[number] else { continue };
            if app.share.held_until(now_ns).is_some() {
                waits = true;
            } else {
                total += self.serve_or_cast_out(number as AppNumber);
            }
        }
        if waits && is_idle && total == 0 {
            total +=
                (0..count).map(|number| self.serve_or_cast_out(number as AppNumber)).sum::<usize>();
        }
        self.first = self.first.checked_add(1).filter(|&first| first < count).unwrap_or(0);
        total
    }

    fn serve_or_cast_out(&mut self, number: AppNumber) -> usize {
        self.serve(number).unwrap_or_else(|why| {
            self.cast_out(number, why);
            0
        })
    }

    /// Does what an application asks for, up to a quota. Returns how much it was.
    fn serve(&mut self, number: AppNumber) -> Result<usize, Misbehaved> {
        let quota = self.host.engine.gate().settings().config().application_quota.packets();
        let quota = (quota as usize).min(COMMANDS);
        let (_, _, began_ns) = self.host.engine.parts();
        let mut done = 0;
        loop {
            let Some(Some(app)) = self.apps.get_mut(number as usize) else { return Ok(done) };
            let command = if done < quota { app.next_command()? } else { None };
            let Some(command) = command else {
                if done > 0 {
                    app.release_commands();
                    app.work += done as u64;
                }
                if done > 0 && app.share.is_limited() {
                    let now_ns = self.host.engine.read_clock();
                    app.share.charge(now_ns, now_ns.saturating_sub(began_ns));
                }
                return Ok(done);
            };
            done += 1;
            if command.wanted_port().is_some() && !self.is_burying {
                // As with a server that is started again.
                self.bury_dead_but(Some(number));
                if self.asks_for_port(number, command) {
                    continue;
                }
            }
            let Some(Some(app)) = self.apps.get_mut(number as usize) else { return Ok(done) };
            let key = self.host.call(number, app, command)?;
            self.forget_gone();
            if let Some(key) = key {
                self.look(key);
            }
        }
    }

    /// Looks at a socket, and tells those who have it.
    pub(super) fn look(&mut self, key: SocketKey) {
        let Host { engine, sockets, .. } = &mut self.host;
        let Some(socket) = sockets.get_mut(key) else { return };
        let Ok(looked) = socket.look(engine) else { return self.on_lie(key) };
        if looked.again && !std::mem::replace(&mut socket.waits_for_port, true) {
            self.again.push(key);
        }
        if looked.tell {
            self.tell(key);
        }
        if looked.is_done {
            self.host.end(key, false);
            self.forget_gone();
        }
    }

    /// Tells those who have a socket of a change.
    fn tell(&mut self, key: SocketKey) {
        let mut at = 0;
        while let Some(&holder) = self.host.sockets.get(key).and_then(|s| s.holders.get(at)) {
            let Some(Some(app)) = self.apps.get_mut(holder.app as usize) else {
                at += 1;
                continue;
            };
            app.work += 1;
            match app.tell_changed(holder.place) {
                Ok(()) => at += 1,
                // It is among the holders no more.
                Err(why) => self.cast_out(holder.app, why),
            }
        }
    }

    /// The streams of a socket make no sense.
    fn on_lie(&mut self, key: SocketKey) {
        let Host { engine, sockets, .. } = &mut self.host;
        let Some(socket) = sockets.get_mut(key) else { return };
        match socket.holders.as_slice() {
            [holder] => {
                let app = holder.app;
                self.cast_out(app, Misbehaved::Lied);
            }
            // Nobody knows which of them it was.
            _ => {
                socket.break_off(engine);
                self.tell(key);
            }
        }
    }

    /// Those who had sockets that have ended have places for others.
    pub(super) fn forget_gone(&mut self) {
        while let Some(gone) = self.host.gone.pop() {
            for holder in &gone.holders {
                if let Some(Some(app)) = self.apps.get_mut(holder.app as usize) {
                    let is_own = gone.place.is_of(&app.memory);
                    app.moved.add(gone.moved());
                    app.leave(holder.place, is_own);
                }
            }
            // Who asked for it may have ended before the others.
            if let Some(Some(app)) = self.apps.get_mut(gone.origin.app as usize)
                && gone.place.is_of(&app.memory)
            {
                app.set_free(gone.origin.place);
            }
        }
    }

    /// Returns how many there were.
    fn look_again(&mut self) -> usize {
        let again = std::mem::take(&mut self.again);
        let count = again.len();
        for key in again {
            if let Some(socket) = self.host.sockets.get_mut(key) {
                socket.waits_for_port = false;
                self.look(key);
            }
        }
        count
    }

    pub(super) fn tell_applications(&mut self) {
        let (_, _, now_ns) = self.host.engine.parts();
        self.wake_next_ns = None;
        for number in 0..self.apps.len() {
            let Some(app) = &mut self.apps[number] else { continue };
            match app.finish_telling(now_ns) {
                Ok(later) => self.wake_next_ns = self.wake_next_ns.into_iter().chain(later).min(),
                Err(why) => self.cast_out(number as AppNumber, why),
            }
        }
    }

    /// Lets an application go that does what it must not.
    fn cast_out(&mut self, number: AppNumber, why: Misbehaved) {
        if let Some(Some(app)) = self.apps.get(number as usize) {
            (self.log)(&format!("{} was let go: {why}", app.identity));
        }
        self.let_go(number);
    }

    /// Ends all that an application had. What it has closed before still goes
    /// out, as far as the stack has room for it.
    pub(super) fn let_go(&mut self, number: AppNumber) {
        let Some(mut app) = self.apps.get_mut(number as usize).and_then(Option::take) else {
            return;
        };
        let all: Vec<SocketKey> = app.sockets().map(|(_, key)| key).collect();
        for key in all {
            let Host { engine, sockets, .. } = &mut self.host;
            let Some(socket) = sockets.get_mut(key) else { continue };
            if socket.holders.len() > 1 {
                self.host.leave(number, &mut app, key);
                // It may have written something and told nobody.
                self.look(key);
                continue;
            }
            let is_done = matches!(socket.look(engine), Ok(Looked { is_done: true, .. }));
            self.host.end(key, !is_done);
        }
        self.forget_gone();
        self.cores.load(self.number).remove_applications(1);
        self.cores.let_go_bell().ring();
    }

    /// An application has ended: does what it asked for before.
    fn bury(&mut self, number: AppNumber) {
        self.is_burying = true;
        if let Some(Some(app)) = self.apps.get_mut(number as usize) {
            app.ask_nobody();
        }
        // A child that it left behind could go on asking.
        let mut left = COMMANDS;
        while let Ok(done @ 1..) = self.serve(number)
            && left > done
        {
            left -= done;
        }
        self.is_burying = false;
        self.let_go(number);
    }

    /// Finds out whether applications have ended, now and then.
    fn check_sometimes(&mut self) {
        let (_, _, now_ns) = self.host.engine.parts();
        if now_ns >= self.next_check_ns {
            self.next_check_ns = now_ns + CHECK_NS;
            self.check();
        }
    }

    fn check(&mut self) {
        let (_, _, now_ns) = self.host.engine.parts();
        for key in self.host.end_late_passages(now_ns) {
            self.look(key);
        }
        self.forget_gone();
        self.bury_dead_but(None);
    }

    /// Nobody who has ended has a port any more, except for `one` who may want it.
    pub(super) fn bury_dead_but(&mut self, one: Option<AppNumber>) {
        let all = (0..self.apps.len() as AppNumber).filter(|&number| Some(number) != one);
        all.for_each(|number| self.bury_if_dead(number));
    }

    fn bury_if_dead(&mut self, number: AppNumber) {
        let Some(Some(app)) = self.apps.get(number as usize) else { return };
        if !app.is_alive() {
            (self.log)(&format!("{} has ended", app.identity));
            self.bury(number);
        }
    }

    /// There is nothing to do.
    fn wait(&mut self) -> io::Result<()> {
        match self.host.engine.idle_step() {
            Step::Spin => self.check_sometimes(),
            Step::Pause => {
                self.check_sometimes();
                self.others_ran = pause();
            }
            Step::Sleep => {
                self.inbox.bell.arm();
                self.apps.iter().flatten().for_each(|app| app.we_sleep.ask());
                // Who sent it may have found the bell not armed yet.
                self.came = self.inbox.messages.try_recv().ok();
                let slept = if self.came.is_none() { self.sleep() } else { Ok(()) };
                self.apps.iter().flatten().for_each(|app| app.we_sleep.clear());
                self.inbox.bell.disarm();
                slept?;
                self.check();
            }
        }
        Ok(())
    }

    fn sleep(&mut self) -> io::Result<()> {
        if self.apps.iter_mut().flatten().any(|app| app.has_work()) {
            return Ok(());
        }
        let Some(sleep) = self.host.engine.prepare_sleep()? else { return Ok(()) };
        let retry = (!self.again.is_empty()).then_some(RETRY);
        let Sleep { timeout_ns, held } = sleep;
        let (_, _, now_ns) = self.host.engine.parts();
        let wakes_ns = self.wake_next_ns.into_iter().chain(self.host.passages.next_ns());
        let wake_ns = wakes_ns.min().map(|wake_ns| wake_ns.saturating_sub(now_ns));
        let timeout = timeout_ns.into_iter().chain(wake_ns).map(Duration::from_nanos);
        let timeout = timeout.chain(retry).min();
        let timeout = timeout.map(|timeout| Timespec {
            tv_sec: timeout.as_secs().min(i32::MAX as u64) as i64,
            tv_nsec: i64::from(timeout.subsec_nanos()),
        });
        // While receiving is held back, what arrives stays with the card.
        let port = self.wake.port.as_ref().filter(|_| !held).map(AsFd::as_fd);
        let own = port.into_iter().chain(self.wake.neighbours.as_ref().map(AsFd::as_fd));
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
