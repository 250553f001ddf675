//! Attached application: its rings, its sockets and its limits.

mod coalescing;

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::net::{RecvFlags, SendFlags, SocketType, getsockname, sockopt};
use tidegate_gate::CpuShare;
use tidegate_memory::shared::{PeerError, Receiver, Sender, WakeFlag, WordRange};

use tidegate_device::steering::TransportProtocol;

use crate::daemon::application::coalescing::WakeCoalescing;
use crate::daemon::ids::{Identity, PayloadBytes, SocketKey};
use crate::daemon::quota::AppSettings;
use crate::daemon::upgrade::snapshot::{ApplicationSnapshot, EntrySnapshot, InvalidSnapshot};
use crate::ipc::command::{COMMAND_WORDS, Command, Handle};
use crate::ipc::handshake::{self, Welcome, send_welcome};
use crate::ipc::layout::SharedMemory;
use crate::ipc::notification::{NOTIFICATION_WORDS, Notification};
use crate::ipc::takeover_token::TakeoverToken;

/// Period over which an application's share of a core is measured.
const SHARE_PERIOD_NS: u64 = 10_000_000;

/// Kernel sockets kept for an application until it binds their ports here; the oldest is dropped.
const MAX_KERNEL_SOCKETS: usize = 64;

/// Kernel socket that an application has bound and registered.
struct KernelSocket {
    protocol: TransportProtocol,
    local: SocketAddr,
    socket: OwnedFd,
    /// Shard of the kernel socket that gets the port here.
    shard: handshake::Shard,
}

/// Attached application.
pub(in crate::daemon) struct Application {
    pub(in crate::daemon) identity: Identity,
    pub(in crate::daemon) memory: SharedMemory,
    /// Takeover token: a fork child presents it to inherit the sockets.
    pub(in crate::daemon) token: TakeoverToken,
    /// Token of the parent whose sockets this application inherits when it attaches.
    pub(in crate::daemon) parent_token: Option<TakeoverToken>,
    /// Daemon's end of the connection. A byte on it wakes the other side.
    connection: Arc<OwnedFd>,
    commands: Receiver<WordRange, COMMAND_WORDS>,
    notifications: Sender<WordRange, NOTIFICATION_WORDS>,
    pub(in crate::daemon) daemon_sleeps: WakeFlag<WordRange>,
    application_sleeps: WakeFlag<WordRange>,
    entries: Vec<Option<SocketEntry>>,
    /// Generation of the last socket in each slot.
    generations: Vec<u32>,
    /// Generation that each slot had when its memory was last discarded.
    discarded_generations: Vec<u32>,
    free_slots: Vec<u32>,
    /// Notifications that found the ring full.
    queued_notifications: VecDeque<Notification>,
    /// Notifications were written to the ring and are not published yet.
    has_unpublished: bool,
    /// Notifications were published since the last wake-up.
    wake_pending: bool,
    coalescing: WakeCoalescing,
    /// Sockets that the application has bound at the kernel, until it binds their ports here.
    kernel_sockets: VecDeque<KernelSocket>,
    /// Quota of local ports that the application may bind.
    pub(in crate::daemon) max_ports: u32,
    /// Quota of memory for the data of its sockets, in bytes.
    max_memory_bytes: u64,
    /// Limit on its share of the core's time.
    pub(in crate::daemon) cpu_share: CpuShare,
    /// Command deferred while other cores are queried for its port, or due now.
    deferred_command: Option<Command>,
    port_query: PortQueryState,
    /// Commands taken from the ring so far.
    pub(in crate::daemon) commands_taken: u64,
    /// Payload bytes moved through sockets that have ended.
    pub(in crate::daemon) payload_bytes: PayloadBytes,
    /// Commands and notifications of the last load windows; decays by half.
    pub(in crate::daemon) recent_work: u64,
}

/// Progress of the query to other cores for the port that a command wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PortQueryState {
    NotStarted,
    /// Other cores are being queried.
    InProgress,
    Done,
}

/// Socket held by an application.
struct SocketEntry {
    handle: Handle,
    key: SocketKey,
    /// Set by the application to request a notification of the next change.
    changes: WakeFlag<WordRange>,
    /// Its change notification waits in `queued_notifications`.
    is_notification_queued: bool,
}

/// Reason to evict an application.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(in crate::daemon) enum ProtocolError {
    /// Ring indices or datagrams in its shared memory make no sense.
    #[error("invalid indices or datagrams in the shared memory")]
    CorruptMemory,
    /// Its command ring holds a command that does not exist.
    #[error("unknown command")]
    UnknownCommand,
}

impl From<PeerError> for ProtocolError {
    fn from(_: PeerError) -> Self {
        Self::CorruptMemory
    }
}

impl Application {
    pub(in crate::daemon) fn new(
        identity: Identity,
        memory: SharedMemory,
        connection: OwnedFd,
        parent_token: Option<TakeoverToken>,
        settings: AppSettings,
    ) -> io::Result<Self> {
        let slot_count = memory.geometry().sockets;
        Ok(Self {
            identity,
            token: TakeoverToken::new()?,
            parent_token,
            connection: Arc::new(connection),
            commands: memory.command_receiver()?,
            notifications: memory.notification_sender()?,
            daemon_sleeps: memory.daemon_sleeps()?,
            application_sleeps: memory.application_sleeps()?,
            memory,
            entries: Vec::new(),
            generations: Vec::new(),
            discarded_generations: Vec::new(),
            free_slots: (0..slot_count).rev().collect(),
            queued_notifications: VecDeque::new(),
            has_unpublished: false,
            wake_pending: false,
            coalescing: WakeCoalescing::new(settings.coalescing.as_nanos() as u64),
            kernel_sockets: VecDeque::new(),
            max_ports: settings.quota.max_ports,
            max_memory_bytes: settings.quota.max_memory_bytes,
            cpu_share: CpuShare::new(settings.quota.cpu_share_percent, SHARE_PERIOD_NS, 0),
            deferred_command: None,
            port_query: PortQueryState::NotStarted,
            commands_taken: 0,
            payload_bytes: PayloadBytes::default(),
            recent_work: 0,
        })
    }

    /// Sends the welcome: its memory, its takeover token and the number of network cores.
    pub(in crate::daemon) fn welcome(&self, core_count: usize) -> io::Result<()> {
        let (memory, token, cores) = (self.memory.clone(), self.token, core_count as u32);
        send_welcome(self.as_fd(), &Welcome { memory, token, cores })
    }

    /// Snapshot for the next daemon, in which its memory has index `memory`.
    pub(in crate::daemon) fn save(&mut self, memory_index: u32) -> ApplicationSnapshot {
        // The next daemon reads from the rings how far this one got.
        self.notifications.publish();
        self.commands.release();
        let saved = |entry: &SocketEntry| EntrySnapshot {
            handle: entry.handle,
            key: entry.key,
            is_notification_queued: entry.is_notification_queued,
        };
        ApplicationSnapshot {
            identity: self.identity.clone(),
            token: *self.token.bytes(),
            memory: memory_index,
            entries: self.entries.iter().flatten().map(saved).collect(),
            generations: self.generations.clone(),
            free_slots: self.free_slots.clone(),
            queued_notifications: self
                .queued_notifications
                .iter()
                .map(|notice| notice.to_words())
                .collect(),
            deferred_command: self.deferred_command.map(Command::to_words),
            commands_taken: self.commands_taken,
            payload_bytes: self.payload_bytes,
        }
    }

    /// Restores an application that another daemon saved.
    pub(in crate::daemon) fn restore(
        snapshot: ApplicationSnapshot,
        memory: SharedMemory,
        connection: OwnedFd,
        settings: AppSettings,
    ) -> io::Result<Self> {
        let slot_count = memory.geometry().sockets as usize;
        let ApplicationSnapshot {
            identity,
            token,
            entries,
            generations,
            free_slots,
            queued_notifications,
            ..
        } = snapshot;
        let is_in_range = |place: u32| (place as usize) < slot_count;
        if generations.len() > slot_count
            || free_slots.len() > slot_count
            || !free_slots.iter().all(|&f| is_in_range(f))
        {
            return Err(InvalidSnapshot("an application has more slots than its memory").into());
        }
        let restored =
            queued_notifications.into_iter().map(Notification::from_words).collect::<Option<_>>();
        let mut app = Self::new(identity, memory, connection, None, settings)?;
        app.token = TakeoverToken::from_bytes(token);
        // An application that has corrupted its rings is found out when they are used.
        let _ = (app.commands.resume(), app.notifications.resume());
        app.entries.resize_with(generations.len(), || None);
        app.generations = generations;
        app.free_slots = free_slots;
        app.queued_notifications =
            restored.ok_or(InvalidSnapshot("a notification is malformed"))?;
        // A superfluous wake-up is better than a lost one.
        app.wake_pending = true;
        let held_back = snapshot.deferred_command.map(Command::from_words);
        app.deferred_command =
            held_back.map(|it| it.ok_or(InvalidSnapshot("a command is malformed"))).transpose()?;
        app.commands_taken = snapshot.commands_taken;
        app.payload_bytes = snapshot.payload_bytes;
        for EntrySnapshot { handle, key, is_notification_queued } in entries {
            let changes = app.memory.change_flag(handle.slot)?;
            let place = app.entries.get_mut(handle.slot as usize);
            match place {
                Some(place @ None) => {
                    *place = Some(SocketEntry { handle, key, changes, is_notification_queued });
                }
                _ => {
                    return Err(InvalidSnapshot(
                        "two sockets have one slot, or a slot is out of range",
                    )
                    .into());
                }
            }
        }
        Ok(app)
    }

    /// Connection that wakes the daemon, for the next daemon.
    pub(in crate::daemon) fn connection(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.connection)
    }

    /// Next command, or `None` while notifications are queued or a port query is in progress.
    pub(in crate::daemon) fn next_command(&mut self) -> Result<Option<Command>, ProtocolError> {
        if !self.queued_notifications.is_empty() || self.port_query == PortQueryState::InProgress {
            return Ok(None);
        }
        if let Some(command) = self.deferred_command.take() {
            return Ok(Some(command));
        }
        self.port_query = PortQueryState::NotStarted;
        let Some(words) = self.commands.pop()? else { return Ok(None) };
        self.commands_taken += 1;
        Command::from_words(words).map(Some).ok_or(ProtocolError::UnknownCommand)
    }

    /// True once other cores have been queried for the port that the current command wants.
    pub(in crate::daemon) fn has_queried_port(&self) -> bool {
        self.port_query == PortQueryState::Done
    }

    /// Defers a command until other cores have been queried.
    pub(in crate::daemon) fn defer_command(&mut self, command: Command) {
        (self.deferred_command, self.port_query) = (Some(command), PortQueryState::InProgress);
    }

    /// Ends the port query: the deferred command runs next, whatever its outcome.
    pub(in crate::daemon) fn on_port_query_done(&mut self) {
        self.port_query = PortQueryState::Done;
    }

    /// Resets the port query after a migration: the new core has other cores to query.
    pub(in crate::daemon) fn reset_port_query(&mut self) {
        self.port_query = PortQueryState::NotStarted;
    }

    /// Drops the deferred command of an application that has exited.
    pub(in crate::daemon) fn cancel_deferred_command(&mut self) {
        (self.deferred_command, self.port_query) = (None, PortQueryState::NotStarted);
    }

    /// Frees the ring slots of the commands taken.
    pub(in crate::daemon) fn release_commands(&mut self) {
        self.commands.release();
    }

    /// Registers a socket that the application has bound at the kernel.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] unless `descriptor` is a TCP or UDP socket bound to a port.
    pub(in crate::daemon) fn register_kernel_socket(
        &mut self,
        descriptor: OwnedFd,
        shard: handshake::Shard,
    ) -> io::Result<()> {
        let none = |_| io::Error::from(io::ErrorKind::InvalidInput);
        let protocol = match sockopt::socket_type(&descriptor).map_err(none)? {
            SocketType::STREAM => TransportProtocol::Tcp,
            SocketType::DGRAM => TransportProtocol::Udp,
            _ => return Err(io::ErrorKind::InvalidInput.into()),
        };
        let name = getsockname(&descriptor).map_err(none)?;
        let local = SocketAddr::try_from(name).map_err(|_| io::ErrorKind::InvalidInput)?;
        if local.port() == 0 {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        if self.kernel_sockets.len() == MAX_KERNEL_SOCKETS {
            self.kernel_sockets.pop_front();
        }
        self.kernel_sockets.push_back(KernelSocket { protocol, local, socket: descriptor, shard });
        Ok(())
    }

    /// Removes and returns the kernel socket bound to this port, and the shard that gets the port.
    pub(in crate::daemon) fn take_kernel_socket(
        &mut self,
        protocol: TransportProtocol,
        local: SocketAddr,
    ) -> Option<(OwnedFd, handshake::Shard)> {
        let ip = local.ip().to_canonical();
        let is_match = |held: &KernelSocket| {
            let own = held.local.ip().to_canonical();
            let is_there = own.is_unspecified() || ip.is_unspecified() || own == ip;
            held.protocol == protocol && held.local.port() == local.port() && is_there
        };
        let index = self.kernel_sockets.iter().position(is_match)?;
        self.kernel_sockets.remove(index).map(|held| (held.socket, held.shard))
    }

    /// True if the application may have one more socket: a free slot and memory within the quota.
    pub(in crate::daemon) fn has_space(&mut self) -> bool {
        !self.free_slots.is_empty()
            && (self.has_memory() || self.discard_free_slots() && self.has_memory())
    }

    fn has_memory(&self) -> bool {
        // Without a quota the system call for the memory in use is saved.
        self.max_memory_bytes == u64::MAX
            || self.memory.allocated_bytes().is_ok_and(|used| used < self.max_memory_bytes)
    }

    /// Discards the memory of free slots: a socket that moved little left it for the next socket
    /// there. Returns true if there was any.
    fn discard_free_slots(&mut self) -> bool {
        let mut discarded_any = false;
        self.discarded_generations.resize(self.generations.len(), 0);
        for &slot in &self.free_slots {
            let (Some(generation), Some(clean)) = (
                self.generations.get(slot as usize),
                self.discarded_generations.get_mut(slot as usize),
            ) else {
                continue;
            };
            if clean != generation
                && let Ok(place) = self.memory.slot(slot)
            {
                place.discard();
                *clean = *generation;
                discarded_any = true;
            }
        }
        discarded_any
    }

    /// Reserves a free slot for a new socket; returns the socket's handle.
    pub(in crate::daemon) fn reserve_slot(&mut self) -> io::Result<Handle> {
        let slot = self.free_slots.pop().ok_or(io::ErrorKind::QuotaExceeded)?;
        self.ensure_slot(slot);
        // Generations start at 1: other tables take 0 for no handle.
        let generation = &mut self.generations[slot as usize];
        *generation = generation.wrapping_add(1).max(1);
        Ok(Handle { slot, generation: *generation })
    }

    fn ensure_slot(&mut self, slot: u32) {
        let min_len = slot as usize + 1;
        if min_len > self.entries.len() {
            self.entries.resize_with(min_len, || None);
            self.generations.resize(min_len, 0);
        }
    }

    /// Frees a reserved slot.
    pub(in crate::daemon) fn free_slot(&mut self, slot: u32) {
        self.free_slots.push(slot);
    }

    /// Inserts a socket at its handle.
    pub(in crate::daemon) fn insert_socket(
        &mut self,
        handle: Handle,
        key: SocketKey,
    ) -> io::Result<()> {
        let changes = self.memory.change_flag(handle.slot)?;
        let entry = SocketEntry { handle, key, changes, is_notification_queued: false };
        self.entries[handle.slot as usize] = Some(entry);
        Ok(())
    }

    /// Removes the socket in this slot. A slot in the application's own memory stays reserved:
    /// other holders may still use its contents.
    pub(in crate::daemon) fn remove_socket(&mut self, slot: u32, is_own: bool) {
        let entry = self.entries.get_mut(slot as usize).and_then(Option::take);
        if entry.is_some() && !is_own {
            self.free_slot(slot);
        }
    }

    /// Inserts a socket of the parent under the same handle.
    pub(in crate::daemon) fn inherit_socket(
        &mut self,
        handle: Handle,
        key: SocketKey,
    ) -> io::Result<()> {
        self.ensure_slot(handle.slot);
        self.generations[handle.slot as usize] = handle.generation;
        self.insert_socket(handle, key)?;
        // The first event is notified.
        self.memory.change_flag(handle.slot)?.request();
        Ok(())
    }

    /// Finishes inheriting: slots without a socket become free.
    pub(in crate::daemon) fn finish_inheriting(&mut self) {
        let Self { free_slots, entries, .. } = self;
        free_slots.retain(|&place| !matches!(entries.get(place as usize), Some(Some(_))));
    }

    /// Socket with this handle; `None` if its generation is outdated.
    pub(in crate::daemon) fn key(&self, handle: Handle) -> Option<SocketKey> {
        let entry = self.entries.get(handle.slot as usize)?.as_ref()?;
        (entry.handle == handle).then_some(entry.key)
    }

    /// Replaces socket keys after a migration.
    pub(in crate::daemon) fn update_keys(&mut self, keys: &HashMap<SocketKey, SocketKey>) {
        for entry in self.entries.iter_mut().flatten() {
            if let Some(&key) = keys.get(&entry.key) {
                entry.key = key;
            }
        }
    }

    /// All sockets: handle and key of each.
    pub(in crate::daemon) fn sockets(&self) -> impl Iterator<Item = (Handle, SocketKey)> {
        self.entries.iter().flatten().map(|entry| (entry.handle, entry.key))
    }

    fn entry(&mut self, slot: u32) -> Option<&mut SocketEntry> {
        self.entries.get_mut(slot as usize)?.as_mut()
    }

    /// Notifies the application of a change if it has requested that.
    pub(in crate::daemon) fn notify_changed(&mut self, slot: u32) -> Result<(), ProtocolError> {
        let Some(entry) = self.entry(slot) else { return Ok(()) };
        if entry.is_notification_queued || !entry.changes.take() {
            return Ok(());
        }
        let notice = Notification::Changed(entry.handle);
        if !self.try_notify(notice)? {
            self.queued_notifications.push_back(notice);
            if let Some(entry) = self.entry(slot) {
                entry.is_notification_queued = true;
            }
        }
        Ok(())
    }

    /// Answers a command.
    pub(in crate::daemon) fn answer(&mut self, notice: Notification) -> Result<(), ProtocolError> {
        if !self.try_notify(notice)? {
            self.queued_notifications.push_back(notice);
        }
        Ok(())
    }

    fn try_notify(&mut self, notice: Notification) -> Result<bool, ProtocolError> {
        let is_pushed = self.notifications.push(&notice.to_words())?;
        if is_pushed {
            self.has_unpublished = true;
            self.coalescing.on_notified(match notice {
                Notification::Changed(handle) => Some(handle.slot),
                _ => None,
            });
        }
        Ok(is_pushed)
    }

    /// Publishes the notifications, and wakes the application if it sleeps. Returns the time of
    /// a wake-up that is coalesced to later.
    pub(in crate::daemon) fn publish_notifications(
        &mut self,
        now_ns: u64,
    ) -> Result<Option<u64>, ProtocolError> {
        while let Some(&notice) = self.queued_notifications.front() {
            if !self.try_notify(notice)? {
                break;
            }
            self.queued_notifications.pop_front();
            if let Notification::Changed(handle) = notice
                && let Some(entry) = self.entry(handle.slot)
                && entry.handle == handle
            {
                entry.is_notification_queued = false;
            }
        }
        if std::mem::take(&mut self.has_unpublished) {
            self.notifications.publish();
            self.wake_pending = true;
        }
        if !self.wake_pending {
            return Ok(None);
        }
        let wake_at_ns = self.coalescing.wake_at(now_ns);
        if wake_at_ns > now_ns && self.application_sleeps.is_requested() {
            return Ok(Some(wake_at_ns));
        }
        self.wake_pending = false;
        if !self.application_sleeps.take() {
            self.coalescing.on_awake();
        } else {
            self.coalescing.on_wake(now_ns);
            // A full connection has woken the application already; a closed one is found out by
            // the next check.
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            let _ = rustix::net::send(&self.connection, &[0], flags);
        }
        Ok(None)
    }

    /// True if a command can run or notifications are queued.
    pub(in crate::daemon) fn has_work(&mut self) -> bool {
        let wants =
            self.deferred_command.is_some() || !matches!(self.commands.is_empty(), Ok(true));
        !self.queued_notifications.is_empty()
            || wants && self.port_query != PortQueryState::InProgress
    }

    /// Drains the wake-up bytes. Returns false if the application has closed the connection.
    pub(in crate::daemon) fn is_alive(&self) -> bool {
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
