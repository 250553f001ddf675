//! One network core: rounds of the engine and of the applications' turns.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tidegate_engine::{OpenError, Sleep, Step, WakeFds, pause};
use tidegate_memory::Doorbell;

use super::application::{Application, Misbehaved};
use super::calls::Host;
use super::names::{AppNumber, SocketKey};
use super::passing::{NOBODY, Passages, Request};
use super::report::Report;
use super::save::{Belongings, Restored, save};
use super::socket::Looked;
use super::{Log, Upgrade};
use crate::contract::greeting::{send_refusal, send_welcome};
use crate::contract::layout::COMMANDS;

/// How many commands of one application are done before the next has its turn.
const COMMANDS_A_TURN: usize = 128;

/// While there is work, applications are looked after this often.
const CHECK_NS: u64 = 10_000_000;

/// How long to wait for a port that is full.
const RETRY: Duration = Duration::from_micros(100);

/// Before it hands over, the core listens for so long without an answer: some
/// round trips in one network.
const HUSH_NS: u64 = 2_000_000;

/// How long a port may be busy that another process has closed, and how often to
/// look.
const BUSY_LIMIT: Duration = Duration::from_secs(2);
const BUSY_RETRY: Duration = Duration::from_millis(1);

/// Opens a port that another process has closed: the kernel takes its time to let
/// go of it.
///
/// # Errors
/// As `open`, when it fails for another reason or for too long.
pub(super) fn open_closed(
    mut open: impl FnMut() -> Result<(), OpenError>,
) -> Result<(), OpenError> {
    let began = Instant::now();
    loop {
        match open() {
            Err(error) if error.is_busy() && began.elapsed() < BUSY_LIMIT => {
                std::thread::sleep(BUSY_RETRY);
            }
            opened => return opened,
        }
    }
}

/// Why a daemon on the kernel's addresses is not replaced.
const SHARES: &str = "it lives on the kernel's addresses, and while it is replaced the kernel \
    would break its connections off: restart it instead";

/// What others want of the core.
pub(super) enum Message {
    /// An application has attached.
    Joined(Box<Application>),
    /// An application shows the descriptor of a socket that is on its way.
    Pass(Box<Request>),
    /// How things stand.
    Report(mpsc::Sender<Report>),
    /// Another daemon is to go on in this one's place.
    HandOver(HandOver),
    /// It ends.
    Stop,
}

/// How the core and who asks it to hand over hear of each other.
pub(super) struct HandOver {
    /// What there is to be handed over, or why it is not.
    pub(super) offer: mpsc::Sender<Result<Parcel, String>>,
    /// The process that has taken it and goes on, if any. The core waits for this
    /// word.
    pub(super) outcome: mpsc::Receiver<Option<u32>>,
}

/// Everything that another daemon needs.
pub(super) struct Parcel {
    pub(super) state: Vec<u8>,
    pub(super) belongings: Belongings,
}

/// How others reach the core.
#[derive(Clone)]
pub(super) struct Post {
    pub(super) messages: mpsc::Sender<Message>,
    pub(super) bell: Arc<Doorbell>,
}

impl Post {
    /// # Errors
    /// When the core has ended.
    pub(super) fn send(&self, message: Message) -> io::Result<()> {
        self.messages.send(message).map_err(|_| io::Error::other("the network core has ended"))?;
        self.bell.ring();
        Ok(())
    }

    /// How things stand.
    ///
    /// # Errors
    /// When the core has ended.
    pub(super) fn report(&self) -> io::Result<Report> {
        let (sender, receiver) = mpsc::channel();
        self.send(Message::Report(sender))?;
        receiver.recv().map_err(|_| io::Error::other("the network core has ended"))
    }
}

/// One network core.
pub(super) struct Core {
    host: Host,
    wake: WakeFds,
    apps: Vec<Option<Box<Application>>>,
    /// Who has the first turn in the next round.
    first: usize,
    /// Sockets whose datagrams found the port full.
    again: Vec<SocketKey>,
    messages: mpsc::Receiver<Message>,
    /// One that came while the core fell asleep.
    came: Option<Message>,
    bell: Arc<Doorbell>,
    next_check_ns: u64,
    /// Others had the processor since the last round. If they were applications,
    /// they have left commands.
    others_ran: bool,
    /// When the next application is to be woken that was told of something.
    wake_next_ns: Option<u64>,
    upgrade: Upgrade,
    /// The process that goes on in this one's place.
    successor: Option<u32>,
    log: Log,
}

impl Core {
    /// One that goes on with what another daemon had.
    pub(super) fn restore(
        mut host: Host,
        restored: Restored,
        upgrade: Upgrade,
        log: Log,
    ) -> io::Result<(Self, Post)> {
        host.sockets = restored.sockets;
        let is_on_its_way = |key| {
            let socket = host.sockets.get(key);
            socket.is_some_and(|socket| socket.holders.contains(&NOBODY))
        };
        let now_ns = host.engine.read_clock();
        host.passages = Passages::restore(restored.passages, now_ns, is_on_its_way)?;
        let keys = host.sockets.keys();
        for &key in &keys {
            let Host { engine, sockets, owners, .. } = &mut host;
            let Some(socket) = sockets.get_mut(key) else { continue };
            owners.insert(socket.id(), key);
            socket.end_if_spoilt(engine);
            // What happened meanwhile is found out by a look at all of them.
            socket.waits_for_port = true;
        }
        let (mut core, post) = Self::new(host, upgrade, log)?;
        core.apps = restored.apps;
        core.again = keys;
        Ok((core, post))
    }

    pub(super) fn new(mut host: Host, upgrade: Upgrade, log: Log) -> io::Result<(Self, Post)> {
        let (sender, messages) = mpsc::channel();
        let bell = Arc::new(Doorbell::new()?);
        let post = Post { messages: sender, bell: Arc::clone(&bell) };
        let wake = host.engine.wake_fds()?;
        let core = Self {
            wake,
            apps: Vec::new(),
            first: 0,
            again: Vec::new(),
            messages,
            came: None,
            bell,
            next_check_ns: host.engine.read_clock(),
            others_ran: false,
            wake_next_ns: None,
            upgrade,
            successor: None,
            host,
            log,
        };
        Ok((core, post))
    }

    /// Runs until it is told to stop. Connections of applications that are still
    /// there are reset then, unless another daemon goes on with them: gives the
    /// process of that one.
    ///
    /// # Errors
    /// When the port is of no further use.
    pub(super) fn run(mut self) -> io::Result<Option<u32>> {
        while let Some(messages) = self.take_messages()? {
            let received = self.host.engine.poll()?;
            let events = self.take_events();
            let commands = self.serve_applications();
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
            if messages + received + events + commands > 0 {
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
        while let Some(message) = self.came.take().or_else(|| self.messages.try_recv().ok()) {
            taken += 1;
            match message {
                Message::Joined(app) => self.join(app),
                Message::Pass(request) => {
                    if let Some(key) = self.host.pass(&mut self.apps, *request) {
                        self.look(key);
                    }
                    self.forget_gone();
                }
                Message::Report(to) => {
                    let report = Report::new(&mut self.host, self.apps.iter().flatten());
                    // Who asked may have gone.
                    let _ = to.send(report);
                }
                Message::HandOver(to) => {
                    self.successor = self.hand_over(&to)?;
                    if self.successor.is_some() {
                        return Ok(None);
                    }
                }
                Message::Stop => return Ok(None),
            }
        }
        Ok(Some(taken))
    }

    /// Offers everything to another daemon, and waits whether that goes on. If it
    /// does not, this one does, as if nothing had happened.
    fn hand_over(&mut self, to: &HandOver) -> io::Result<Option<u32>> {
        let refusal = match &self.upgrade {
            Upgrade::Refused(why) => Some((*why).to_owned()),
            _ if !self.host.kernels.is_empty() => Some(SHARES.to_owned()),
            _ => None,
        };
        if let Some(why) = refusal {
            // Who asked may have gone.
            let _ = to.offer.send(Err(why));
            return Ok(None);
        }
        self.hush()?;
        self.tell_applications();
        let stack = self.host.engine.save()?;
        if matches!(self.upgrade, Upgrade::Anew(_)) {
            self.host.engine.close_port();
        }
        let (state, belongings) = save(stack, &mut self.host, &mut self.apps);
        let offer = state.encode().map(|state| Parcel { state, belongings });
        let _ = to.offer.send(offer.map_err(|error| error.to_string()));
        // Who asked says nothing when it got nothing.
        let successor = to.outcome.recv().ok().flatten();
        if successor.is_none() {
            self.open_again()?;
        }
        Ok(successor)
    }

    /// Hears what is on its way, and lets nobody say more: those who wait for an
    /// answer send nothing meanwhile, so nothing of theirs is lost while nobody has
    /// the port.
    fn hush(&mut self) -> io::Result<()> {
        let until_ns = self.host.engine.read_clock() + HUSH_NS;
        while self.host.engine.read_clock() < until_ns {
            self.host.engine.poll()?;
        }
        Ok(())
    }

    /// Opens the port again that another daemon was to have.
    fn open_again(&mut self) -> io::Result<()> {
        let Upgrade::Anew(config) = &mut self.upgrade else { return Ok(()) };
        let engine = &mut self.host.engine;
        let opened = open_closed(|| engine.open_port_again(config().map_err(OpenError::Io)?));
        opened.map_err(|error| {
            let what = "an upgrade has failed, and then the port could not be opened";
            io::Error::other(format!("{what}: {error}"))
        })?;
        self.wake = self.host.engine.wake_fds()?;
        Ok(())
    }

    fn join(&mut self, mut app: Box<Application>) {
        let free = self.apps.iter().position(Option::is_none);
        let place = free.unwrap_or_else(|| {
            self.apps.push(None);
            self.apps.len() - 1
        });
        let identity = app.identity.clone();
        if app.heir_of.is_none() {
            (self.log)(&format!("{identity} attached"));
            self.apps[place] = Some(app);
            return;
        }
        let inherited = self.bequeath(place as AppNumber, &mut app);
        if let Err(why) = &inherited {
            // It may be gone.
            let _ = send_refusal(app.as_fd(), &why.to_string());
        }
        self.apps[place] = Some(app);
        match inherited {
            Ok(()) => (self.log)(&format!("a child of {identity} attached")),
            Err(why) => {
                (self.log)(&format!("an heir of {} was sent away: {why}", identity.name));
                self.let_go(place as AppNumber);
            }
        }
    }

    /// Gives an heir the sockets of the one whose ticket it has.
    fn bequeath(&mut self, number: AppNumber, heir: &mut Application) -> io::Result<()> {
        let uid = heir.identity.uid;
        let ticket = heir.heir_of;
        let is_parent = |app: &&Application| {
            ticket.is_some_and(|ticket| app.ticket.is(&ticket)) && app.identity.uid == uid
        };
        let parent = self.apps.iter().flatten().map(AsRef::as_ref).find(is_parent);
        let parent = parent.ok_or_else(|| {
            io::Error::other("no program of this user has the ticket that it showed")
        })?;
        self.host.inherit(number, heir, parent)?;
        // One that does not hear this is gone, which is found out later.
        let _ = send_welcome(heir.as_fd(), &heir.memory, &heir.ticket);
        Ok(())
    }

    /// Looks at the sockets that something happened to. Returns how many events
    /// there were.
    fn take_events(&mut self) -> usize {
        let mut events = 0;
        while let Some(event) = self.host.engine.poll_event() {
            events += 1;
            if let Some(key) = self.host.owners.of_event(event) {
                self.look(key);
            }
        }
        events
    }

    /// Gives each application its turn. Returns how many commands were done.
    fn serve_applications(&mut self) -> usize {
        let count = self.apps.len();
        let mut total = 0;
        for turn in 0..count {
            let number = (self.first + turn) % count;
            match self.serve(number as AppNumber) {
                Ok(done) => total += done,
                Err(why) => self.cast_out(number as AppNumber, why),
            }
        }
        self.first = self.first.checked_add(1).filter(|&first| first < count).unwrap_or(0);
        total
    }

    fn serve(&mut self, number: AppNumber) -> Result<usize, Misbehaved> {
        let mut done = 0;
        loop {
            let Some(Some(app)) = self.apps.get_mut(number as usize) else { return Ok(done) };
            let command = if done < COMMANDS_A_TURN { app.next_command()? } else { None };
            let Some(command) = command else {
                if done > 0 {
                    app.release_commands();
                }
                return Ok(done);
            };
            done += 1;
            let key = self.host.call(number, app, command)?;
            self.forget_gone();
            if let Some(key) = key {
                self.look(key);
            }
        }
    }

    /// Looks at a socket, and tells those who have it.
    fn look(&mut self, key: SocketKey) {
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
    fn forget_gone(&mut self) {
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

    fn tell_applications(&mut self) {
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
    fn let_go(&mut self, number: AppNumber) {
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
    }

    /// An application has ended: does what it asked for before.
    fn bury(&mut self, number: AppNumber) {
        // A child that it left behind could go on asking.
        for _ in 0..COMMANDS / COMMANDS_A_TURN {
            if !matches!(self.serve(number), Ok(1..)) {
                break;
            }
        }
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
        for number in 0..self.apps.len() {
            let Some(app) = &self.apps[number] else { continue };
            if !app.is_alive() {
                (self.log)(&format!("{} has ended", app.identity));
                self.bury(number as AppNumber);
            }
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
                self.bell.arm();
                self.apps.iter().flatten().for_each(|app| app.we_sleep.ask());
                // Who sent it may have found the bell not armed yet.
                self.came = self.messages.try_recv().ok();
                let slept = if self.came.is_none() { self.sleep() } else { Ok(()) };
                self.apps.iter().flatten().for_each(|app| app.we_sleep.clear());
                self.bell.disarm();
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
            .chain([self.bell.as_fd()])
            .chain(apps)
            .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
            .collect();
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}
