//! An application: its rings, its sockets, and what it may have.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::net::{RecvFlags, SendFlags, SocketType, getsockname, sockopt};
use tidegate_gate::CpuShare;
use tidegate_memory::shared::{Broken, Part, Receiver, Sender, Wanted};

use tidegate_port::steering::Protocol;

use super::coalescing::Coalescing;
use super::names::{Identity, Moved, SocketKey};
use super::quota::Terms;
use super::state::{Damaged, SavedApplication, SavedEntry};
use crate::contract::command::{COMMAND_WORDS, Command, Handle};
use crate::contract::greeting::{self, Welcome, send_welcome};
use crate::contract::layout::Memory;
use crate::contract::notice::{NOTICE_WORDS, Notice};
use crate::contract::ticket::Ticket;

/// In which time an application's share of a core is counted.
const SHARE_PERIOD_NS: u64 = 10_000_000;

/// So many ports of an application's are kept that it has not bound yet.
const MOST_HELD: usize = 64;

/// A port that an application has bound at the kernel.
struct HeldPort {
    protocol: Protocol,
    local: SocketAddr,
    socket: OwnedFd,
    /// Which it is of those that get the port here.
    part: greeting::Part,
}

/// An application that is attached.
pub(super) struct Application {
    pub(super) identity: Identity,
    pub(super) memory: Memory,
    /// By which a child of its process gets its sockets.
    pub(super) ticket: Ticket,
    /// The ticket of the one whose sockets it gets when it comes in.
    pub(super) heir_of: Option<Ticket>,
    /// Whose other end the application has. A byte wakes it, or us.
    connection: Arc<OwnedFd>,
    commands: Receiver<Part, COMMAND_WORDS>,
    notices: Sender<Part, NOTICE_WORDS>,
    pub(super) we_sleep: Wanted<Part>,
    it_sleeps: Wanted<Part>,
    entries: Vec<Option<Entry>>,
    /// How many sockets were in each place.
    generations: Vec<u32>,
    /// Which of them last gave back the memory of its place.
    clean: Vec<u32>,
    free: Vec<u32>,
    /// What found no room in the ring of notices.
    untold: VecDeque<Notice>,
    /// Something was put into the ring of notices and is not seen yet.
    has_told: bool,
    /// It was told of something since it was woken.
    may_wake: bool,
    coalescing: Coalescing,
    /// Ports that it has bound at the kernel, with the kernel's sockets, until it binds
    /// them here.
    held: VecDeque<HeldPort>,
    /// Local ports that it may bind.
    pub(super) ports_max: u32,
    /// Bytes that the data of its sockets may take.
    memory_max: u64,
    /// Of the core's time.
    pub(super) share: CpuShare,
    /// A command that waits until other cores have been asked, or is to be done now.
    held_back: Option<Command>,
    asked: Asked,
    /// How many commands were taken.
    pub(super) commands_taken: u64,
    /// What went through sockets that are gone.
    pub(super) moved: Moved,
    /// How often there was something to do for it lately.
    pub(super) work: u64,
}

/// Whether other cores have been asked for the port that a command wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asked {
    No,
    /// They are being asked.
    Now,
    Yes,
}

/// A socket that an application has.
struct Entry {
    handle: Handle,
    key: SocketKey,
    /// The application wants to be told of changes.
    changes: Wanted<Part>,
    /// It waits to be told of.
    waits_to_tell: bool,
}

/// Why an application is let go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Misbehaved {
    /// Its indices or its datagrams make no sense.
    #[error("it wrote nonsense into the shared memory")]
    Lied,
    /// A command that there is not.
    #[error("it asked for something that there is not")]
    Unknown,
}

impl From<Broken> for Misbehaved {
    fn from(_: Broken) -> Self {
        Self::Lied
    }
}

impl Application {
    pub(super) fn new(
        identity: Identity,
        memory: Memory,
        connection: OwnedFd,
        heir_of: Option<Ticket>,
        terms: Terms,
    ) -> io::Result<Self> {
        let places = memory.geometry().sockets;
        Ok(Self {
            identity,
            ticket: Ticket::new()?,
            heir_of,
            connection: Arc::new(connection),
            commands: memory.asked()?,
            notices: memory.telling()?,
            we_sleep: memory.daemon_sleeps()?,
            it_sleeps: memory.application_sleeps()?,
            memory,
            entries: Vec::new(),
            generations: Vec::new(),
            clean: Vec::new(),
            free: (0..places).rev().collect(),
            untold: VecDeque::new(),
            has_told: false,
            may_wake: false,
            coalescing: Coalescing::new(terms.coalescing.as_nanos() as u64),
            held: VecDeque::new(),
            ports_max: terms.quota.ports,
            memory_max: terms.quota.memory_bytes,
            share: CpuShare::new(terms.quota.cpu_share_percent, SHARE_PERIOD_NS, 0),
            held_back: None,
            asked: Asked::No,
            commands_taken: 0,
            moved: Moved::default(),
            work: 0,
        })
    }

    /// Lets it in, where there are so many cores.
    pub(super) fn welcome(&self, cores: usize) -> io::Result<()> {
        let (memory, ticket, cores) = (self.memory.clone(), self.ticket, cores as u32);
        send_welcome(self.as_fd(), &Welcome { memory, ticket, cores })
    }

    /// What another daemon needs to go on with it; its memory is number `memory`
    /// there.
    pub(super) fn save(&mut self, memory: u32) -> SavedApplication {
        // The other one finds in the memory how far we came.
        self.notices.publish();
        self.commands.release();
        let saved = |entry: &Entry| SavedEntry {
            handle: entry.handle,
            key: entry.key,
            waits_to_tell: entry.waits_to_tell,
        };
        SavedApplication {
            identity: self.identity.clone(),
            ticket: *self.ticket.bytes(),
            memory,
            entries: self.entries.iter().flatten().map(saved).collect(),
            generations: self.generations.clone(),
            free: self.free.clone(),
            untold: self.untold.iter().map(|notice| notice.to_words()).collect(),
            held_back: self.held_back.map(Command::to_words),
            commands_taken: self.commands_taken,
            moved: self.moved,
        }
    }

    /// Goes on with one that another daemon has saved.
    pub(super) fn restore(
        saved: SavedApplication,
        memory: Memory,
        connection: OwnedFd,
        terms: Terms,
    ) -> io::Result<Self> {
        let places = memory.geometry().sockets as usize;
        let SavedApplication { identity, ticket, entries, generations, free, untold, .. } = saved;
        let is_there = |place: u32| (place as usize) < places;
        if generations.len() > places || free.len() > places || !free.iter().all(|&f| is_there(f)) {
            return Err(Damaged("an application has more places than its memory").into());
        }
        let notices = untold.into_iter().map(Notice::from_words).collect::<Option<_>>();
        let mut app = Self::new(identity, memory, connection, None, terms)?;
        app.ticket = Ticket::from_bytes(ticket);
        // An application that has spoilt its rings is found out when they are used.
        let _ = (app.commands.resume(), app.notices.resume());
        app.entries.resize_with(generations.len(), || None);
        app.generations = generations;
        app.free = free;
        app.untold = notices.ok_or(Damaged("a notice is none"))?;
        // Told once too often is better than not at all.
        app.may_wake = true;
        let held_back = saved.held_back.map(Command::from_words);
        app.held_back = held_back.map(|it| it.ok_or(Damaged("a command is none"))).transpose()?;
        app.commands_taken = saved.commands_taken;
        app.moved = saved.moved;
        for SavedEntry { handle, key, waits_to_tell } in entries {
            let changes = app.memory.changes(handle.place)?;
            let place = app.entries.get_mut(handle.place as usize);
            match place {
                Some(place @ None) => {
                    *place = Some(Entry { handle, key, changes, waits_to_tell });
                }
                _ => return Err(Damaged("a socket has no place of its own").into()),
            }
        }
        Ok(app)
    }

    /// The other end of what it wakes us by, for another daemon.
    pub(super) fn connection(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.connection)
    }

    /// The next command, unless it has to be told of others first.
    pub(super) fn next_command(&mut self) -> Result<Option<Command>, Misbehaved> {
        if !self.untold.is_empty() || self.asked == Asked::Now {
            return Ok(None);
        }
        if let Some(command) = self.held_back.take() {
            return Ok(Some(command));
        }
        self.asked = Asked::No;
        let Some(words) = self.commands.pop()? else { return Ok(None) };
        self.commands_taken += 1;
        Command::from_words(words).map(Some).ok_or(Misbehaved::Unknown)
    }

    /// Whether other cores have been asked for the port that its command wants.
    pub(super) fn has_asked(&self) -> bool {
        self.asked == Asked::Yes
    }

    /// Its command waits until other cores have been asked.
    pub(super) fn hold_back(&mut self, command: Command) {
        (self.held_back, self.asked) = (Some(command), Asked::Now);
    }

    /// They have been asked: its command is done now, whatever comes of it.
    pub(super) fn on_asked(&mut self) {
        self.asked = Asked::Yes;
    }

    /// It is on another core now, which has others to ask.
    pub(super) fn ask_again(&mut self) {
        self.asked = Asked::No;
    }

    /// It has ended: what it waits for need not come true.
    pub(super) fn ask_nobody(&mut self) {
        (self.held_back, self.asked) = (None, Asked::No);
    }

    /// Gives the places of the commands back.
    pub(super) fn release_commands(&mut self) {
        self.commands.release();
    }

    /// It has bound a socket of the kernel's, which it shows.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] when it has not.
    pub(super) fn hold(&mut self, shown: OwnedFd, part: greeting::Part) -> io::Result<()> {
        let none = |_| io::Error::from(io::ErrorKind::InvalidInput);
        let protocol = match sockopt::socket_type(&shown).map_err(none)? {
            SocketType::STREAM => Protocol::Tcp,
            SocketType::DGRAM => Protocol::Udp,
            _ => return Err(io::ErrorKind::InvalidInput.into()),
        };
        let name = getsockname(&shown).map_err(none)?;
        let local = SocketAddr::try_from(name).map_err(|_| io::ErrorKind::InvalidInput)?;
        if local.port() == 0 {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        if self.held.len() == MOST_HELD {
            self.held.pop_front();
        }
        self.held.push_back(HeldPort { protocol, local, socket: shown, part });
        Ok(())
    }

    /// The kernel's socket that it has bound to this port, if it has shown it, and which
    /// part of what is there gets it.
    pub(super) fn take_held(
        &mut self,
        protocol: Protocol,
        local: SocketAddr,
    ) -> Option<(OwnedFd, greeting::Part)> {
        let ip = local.ip().to_canonical();
        let is_it = |held: &HeldPort| {
            let own = held.local.ip().to_canonical();
            let is_there = own.is_unspecified() || ip.is_unspecified() || own == ip;
            held.protocol == protocol && held.local.port() == local.port() && is_there
        };
        let at = self.held.iter().position(is_it)?;
        self.held.remove(at).map(|held| (held.socket, held.part))
    }

    /// Whether it may have one more socket: a place is free, and its memory.
    pub(super) fn has_room(&mut self) -> bool {
        !self.free.is_empty() && (self.has_memory() || self.clean_up() && self.has_memory())
    }

    fn has_memory(&self) -> bool {
        // What cannot be asked for is not held against it.
        self.memory_max == u64::MAX
            || self.memory.used_bytes().is_ok_and(|used| used < self.memory_max)
    }

    /// Gives the memory of free places back: a socket that moved little keeps it
    /// for the next one. Whether there was any.
    fn clean_up(&mut self) -> bool {
        let mut had_some = false;
        self.clean.resize(self.generations.len(), 0);
        for &number in &self.free {
            let (Some(generation), Some(clean)) =
                (self.generations.get(number as usize), self.clean.get_mut(number as usize))
            else {
                continue;
            };
            if clean != generation
                && let Ok(place) = self.memory.place(number)
            {
                place.discard();
                *clean = *generation;
                had_some = true;
            }
        }
        had_some
    }

    /// A free place for a new socket, and the name that the socket gets.
    pub(super) fn reserve(&mut self) -> io::Result<Handle> {
        let place = self.free.pop().ok_or(io::ErrorKind::QuotaExceeded)?;
        self.make_entry_at(place);
        // None is 0: names with that are no names elsewhere.
        let generation = &mut self.generations[place as usize];
        *generation = generation.wrapping_add(1).max(1);
        Ok(Handle { place, generation: *generation })
    }

    fn make_entry_at(&mut self, place: u32) {
        let least = place as usize + 1;
        if least > self.entries.len() {
            self.entries.resize_with(least, || None);
            self.generations.resize(least, 0);
        }
    }

    /// A place that was reserved is free again.
    pub(super) fn set_free(&mut self, place: u32) {
        self.free.push(place);
    }

    /// It has this socket from now on.
    pub(super) fn enter(&mut self, handle: Handle, key: SocketKey) -> io::Result<()> {
        let changes = self.memory.changes(handle.place)?;
        let entry = Entry { handle, key, changes, waits_to_tell: false };
        self.entries[handle.place as usize] = Some(entry);
        Ok(())
    }

    /// It does not have the socket in this place any more. If the place is its
    /// own, others may have what is in it.
    pub(super) fn leave(&mut self, place: u32, is_own: bool) {
        let entry = self.entries.get_mut(place as usize).and_then(Option::take);
        if entry.is_some() && !is_own {
            self.set_free(place);
        }
    }

    /// It gets a socket of the one whose heir it is, by the same name.
    pub(super) fn inherit(&mut self, handle: Handle, key: SocketKey) -> io::Result<()> {
        self.make_entry_at(handle.place);
        self.generations[handle.place as usize] = handle.generation;
        self.enter(handle, key)?;
        // It is told of the first thing that happens.
        self.memory.changes(handle.place)?.ask();
        Ok(())
    }

    /// It has got all it gets: the other places are free.
    pub(super) fn has_inherited(&mut self) {
        let Self { free, entries, .. } = self;
        free.retain(|&place| !matches!(entries.get(place as usize), Some(Some(_))));
    }

    /// The socket of this name; one that was there before is none.
    pub(super) fn key(&self, handle: Handle) -> Option<SocketKey> {
        let entry = self.entries.get(handle.place as usize)?.as_ref()?;
        (entry.handle == handle).then_some(entry.key)
    }

    /// Its sockets have other numbers from now on.
    pub(super) fn rename(&mut self, keys: &HashMap<SocketKey, SocketKey>) {
        for entry in self.entries.iter_mut().flatten() {
            if let Some(&key) = keys.get(&entry.key) {
                entry.key = key;
            }
        }
    }

    /// All sockets.
    pub(super) fn sockets(&self) -> impl Iterator<Item = (Handle, SocketKey)> {
        self.entries.iter().flatten().map(|entry| (entry.handle, entry.key))
    }

    fn entry(&mut self, place: u32) -> Option<&mut Entry> {
        self.entries.get_mut(place as usize)?.as_mut()
    }

    /// Tells of a change, if the application wants to know.
    pub(super) fn tell_changed(&mut self, place: u32) -> Result<(), Misbehaved> {
        let Some(entry) = self.entry(place) else { return Ok(()) };
        if entry.waits_to_tell || !entry.changes.take() {
            return Ok(());
        }
        let notice = Notice::Changed(entry.handle);
        if !self.try_tell(notice)? {
            self.untold.push_back(notice);
            if let Some(entry) = self.entry(place) {
                entry.waits_to_tell = true;
            }
        }
        Ok(())
    }

    /// Answers a command.
    pub(super) fn answer(&mut self, notice: Notice) -> Result<(), Misbehaved> {
        if !self.try_tell(notice)? {
            self.untold.push_back(notice);
        }
        Ok(())
    }

    fn try_tell(&mut self, notice: Notice) -> Result<bool, Misbehaved> {
        let told = self.notices.push(&notice.to_words())?;
        if told {
            self.has_told = true;
            self.coalescing.on_told(match notice {
                Notice::Changed(handle) => Some(handle.place),
                _ => None,
            });
        }
        Ok(told)
    }

    /// Lets the application see what it was told, and wakes it if it sleeps.
    /// Returns when it is to be woken, if that is later.
    pub(super) fn finish_telling(&mut self, now_ns: u64) -> Result<Option<u64>, Misbehaved> {
        while let Some(&notice) = self.untold.front() {
            if !self.try_tell(notice)? {
                break;
            }
            self.untold.pop_front();
            if let Notice::Changed(handle) = notice
                && let Some(entry) = self.entry(handle.place)
                && entry.handle == handle
            {
                entry.waits_to_tell = false;
            }
        }
        if std::mem::take(&mut self.has_told) {
            self.notices.publish();
            self.may_wake = true;
        }
        if !self.may_wake {
            return Ok(None);
        }
        let wake_at_ns = self.coalescing.wake_at(now_ns);
        if wake_at_ns > now_ns && self.it_sleeps.is_asked() {
            return Ok(Some(wake_at_ns));
        }
        self.may_wake = false;
        if !self.it_sleeps.take() {
            self.coalescing.on_awake();
        } else {
            self.coalescing.on_wake(now_ns);
            // A connection that is full has woken it already; one that is over is
            // found out by the next look.
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            let _ = rustix::net::send(&self.connection, &[0], flags);
        }
        Ok(None)
    }

    /// Whether it has told us something since, or waits to be told.
    pub(super) fn has_work(&mut self) -> bool {
        let wants = self.held_back.is_some() || !matches!(self.commands.is_empty(), Ok(true));
        !self.untold.is_empty() || wants && self.asked != Asked::Now
    }

    /// Takes the bytes away that woke us. Whether it is still there.
    pub(super) fn is_alive(&self) -> bool {
        let mut bytes = [0; 4096];
        match rustix::net::recv(&self.connection, &mut bytes, RecvFlags::DONTWAIT) {
            Ok((len, _)) => len > 0,
            Err(error) => error == rustix::io::Errno::AGAIN || error == rustix::io::Errno::INTR,
        }
    }
}

impl AsFd for Application {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.connection.as_fd()
    }
}
