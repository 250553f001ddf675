//! Attached application: its rings, its slots and its limits.

mod coalescing;
mod commands;
pub(super) mod kernel_sockets;
mod memory_use;
mod notifications;
mod protocol_error;
mod slots;
pub(super) mod snapshot;
mod turn;

use std::io;

use tidegate_gate::CpuShare;
use tidegate_memory::shared::{WakeFlag, WordRange};

pub(super) use self::kernel_sockets::KernelSocket;
pub(super) use self::protocol_error::ProtocolError;
pub(super) use self::turn::Turn;

use self::coalescing::WakeCoalescing;
use self::commands::CommandQueue;
use self::kernel_sockets::KernelSockets;
use self::memory_use::MemoryUse;
use self::notifications::Notifier;
use self::slots::SocketSlots;
use crate::daemon::attachment_counts::AttachmentCount;
use crate::daemon::ids::{Identity, PayloadBytes, SocketKey};
use crate::daemon::quota::AppSettings;
use crate::daemon::workers::{AppFd, AppWaker, PortReleases, WakeCores};
use crate::ipc::command::{Command, Handle};
use crate::ipc::event_fds::EventFds;
use crate::ipc::handshake::Welcome;
use crate::ipc::layout::SharedMemory;
use crate::ipc::notification::Notification;
use crate::ipc::processor::LastProcessor;
use crate::ipc::takeover_token::TakeoverToken;

/// Period over which an application's share of a core is measured.
const SHARE_PERIOD_NS: u64 = 10_000_000;

/// Time after its last command or notification in which an application that is awake counts as at
/// work, in nanoseconds.
const MAX_WORK_NS: u64 = 5_000_000;

/// Attached application.
pub(super) struct Application {
    pub(super) identity: Identity,
    pub(super) memory: SharedMemory,
    /// Takeover token: a fork child presents it to inherit the sockets.
    pub(super) token: TakeoverToken,
    /// Token of the parent whose sockets this application inherits when it attaches.
    pub(super) parent_token: Option<TakeoverToken>,
    /// Daemon's end of the connection. What the application sends on it stays there.
    connection: AppFd,
    pub(super) event_fds: EventFds<AppFd>,
    /// The application has closed the connection.
    pub(super) has_exited: bool,
    pub(super) turn: Turn,
    pub(super) commands: CommandQueue,
    notifier: Notifier,
    pub(super) daemon_sleeps: WakeFlag<WordRange>,
    daemon_processor: LastProcessor,
    application_processor: LastProcessor,
    pub(super) slots: SocketSlots,
    /// Sockets that the application has bound at the kernel, until it binds their ports here.
    pub(super) kernel_sockets: KernelSockets,
    /// Releases of ports of its kernel sockets.
    releases: PortReleases,
    /// Quota of local ports that the application may bind.
    pub(super) max_ports: u32,
    memory_use: MemoryUse,
    _count: AttachmentCount,
    /// Limit on its share of the core's time.
    pub(super) cpu_share: CpuShare,
    /// Payload bytes moved through sockets that have ended.
    pub(super) payload_bytes: PayloadBytes,
    /// Commands and notifications of the last load windows; decays by half.
    pub(super) recent_work: u64,
}

impl Application {
    pub(super) fn new(
        identity: Identity,
        memory: SharedMemory,
        connection: AppFd,
        event_fds: EventFds<AppFd>,
        parent_token: Option<TakeoverToken>,
        count: AttachmentCount,
        settings: &AppSettings,
    ) -> io::Result<Self> {
        let coalescing = WakeCoalescing::new(settings.coalescing.as_nanos() as u64);
        Ok(Self {
            identity,
            token: TakeoverToken::new()?,
            parent_token,
            connection,
            event_fds,
            has_exited: false,
            turn: Turn::default(),
            commands: CommandQueue::new(memory.command_receiver()?),
            notifier: Notifier::new(
                memory.notification_sender()?,
                memory.application_sleeps()?,
                coalescing,
            ),
            daemon_sleeps: memory.daemon_sleeps()?,
            daemon_processor: memory.daemon_processor()?,
            application_processor: memory.application_processor()?,
            slots: SocketSlots::new(memory.geometry().sockets),
            memory,
            kernel_sockets: KernelSockets::default(),
            releases: PortReleases::default(),
            max_ports: settings.quota.max_ports,
            _count: count,
            memory_use: MemoryUse::new(settings.quota.max_memory_bytes),
            cpu_share: CpuShare::new(settings.quota.cpu_share_percent, SHARE_PERIOD_NS, 0),
            payload_bytes: PayloadBytes::default(),
            recent_work: 0,
        })
    }

    /// Welcome: its memory, its wake-ups, its takeover token and the number of network cores.
    pub(super) fn welcome(&self, core_count: usize) -> Welcome<AppFd> {
        let (memory, event_fds) = (self.memory.clone(), self.event_fds.clone());
        Welcome { memory, event_fds, token: self.token, cores: core_count as u32 }
    }

    /// Daemon's end of the connection.
    pub(super) fn connection(&self) -> &AppFd {
        &self.connection
    }

    /// Next command, or `None` while notifications are queued or a port query is in progress.
    pub(super) fn next_command(&mut self) -> Result<Option<Command>, ProtocolError> {
        if self.notifier.has_queued() || self.waits_for_workers() {
            return Ok(None);
        }
        self.commands.next()
    }

    /// True if a command can run or notifications are queued.
    pub(super) fn has_work(&mut self) -> bool {
        self.notifier.has_queued() || !self.waits_for_workers() && self.commands.has_work()
    }

    /// True while a command waits for something, which no wake-up of the application announces.
    pub(super) fn has_deferred(&self) -> bool {
        self.notifier.has_queued() || self.commands.has_deferred()
    }

    /// True while notifications wait for space in the ring.
    pub(super) fn has_queued_notifications(&self) -> bool {
        self.notifier.has_queued()
    }

    /// True while a command waits until workers have measured or discarded the memory, or released
    /// ports.
    fn waits_for_workers(&mut self) -> bool {
        if self.commands.waits_for_workers {
            self.free_discarded_slots();
            self.commands.waits_for_workers =
                self.memory_use.is_pending() || self.releases.are_pending();
        }
        self.commands.waits_for_workers
    }

    /// Registers a socket that the application has bound at the kernel, until it binds the port
    /// here.
    pub(super) fn register_kernel_socket(&mut self, kernel_socket: KernelSocket, wake: &WakeCores) {
        kernel_socket.socket.count_releases(&self.releases, wake);
        self.kernel_sockets.register(kernel_socket);
    }

    /// Counts the releases of ports that another daemon had registered.
    pub(super) fn count_releases(&self, wake: &WakeCores) {
        let sockets = self.kernel_sockets.descriptors();
        sockets.for_each(|socket| socket.count_releases(&self.releases, wake));
    }

    /// True while workers are about to release ports of its kernel sockets.
    pub(super) fn is_releasing_ports(&self) -> bool {
        self.releases.are_pending()
    }

    /// True if the application may have one more socket: a free slot and memory within the quota,
    /// as [`Application::check_space`] has found it.
    pub(super) fn has_space(&self) -> bool {
        self.slots.has_free() && self.memory_use.is_within_quota()
    }

    /// Finds out if there is space for one more socket. Returns false if a worker has to measure or
    /// discard memory first; then check again for the same command.
    pub(super) fn check_space(&mut self, wake: &WakeCores) -> bool {
        self.free_discarded_slots();
        if !self.slots.has_free() || !self.memory_use.is_limited() {
            return self.slots.has_free() || !self.memory_use.is_pending();
        }
        if self.memory_use.is_pending() {
            return false;
        }
        let mut dirty = Vec::new();
        if self.memory_use.take_current() {
            if !self.memory_use.is_within_quota() {
                dirty = self.slots.take_dirty();
            }
            if dirty.is_empty() {
                return true;
            }
        }
        self.memory_use.start(&self.connection, &self.memory, wake, dirty, true);
        false
    }

    /// Discards the memory of a slot, which is free afterwards.
    pub(super) fn discard_slot(&mut self, slot: u32, wake: &WakeCores) {
        self.memory_use.start(&self.connection, &self.memory, wake, vec![slot], false);
    }

    fn free_discarded_slots(&mut self) {
        for slot in self.memory_use.collect() {
            self.slots.free_discarded(slot);
        }
    }

    /// Bytes of memory in use when they were last measured.
    pub(super) fn memory_bytes(&self) -> u64 {
        self.memory_use.used_bytes()
    }

    /// Inserts a socket at its handle.
    pub(super) fn insert_socket(&mut self, handle: Handle, key: SocketKey) -> io::Result<()> {
        self.slots.insert(&self.memory, handle, key)
    }

    /// Inserts a socket of the parent under the same handle.
    pub(super) fn inherit_socket(&mut self, handle: Handle, key: SocketKey) -> io::Result<()> {
        self.slots.inherit(&self.memory, handle, key)
    }

    /// Socket with this handle; `None` if its generation is outdated.
    pub(super) fn key(&self, handle: Handle) -> Option<SocketKey> {
        self.slots.key(handle)
    }

    /// All sockets: handle and key of each.
    pub(super) fn sockets(&self) -> impl Iterator<Item = (Handle, SocketKey)> {
        self.slots.sockets()
    }

    /// Notifies the application of a change if it has requested that.
    pub(super) fn notify_changed(&mut self, slot: u32) -> Result<(), ProtocolError> {
        let Some(entry) = self.slots.entry(slot) else { return Ok(()) };
        if !entry.is_notification_queued && entry.changes.take() {
            let notice = Notification::Changed(entry.handle);
            entry.is_notification_queued = self.notifier.notify(notice)?;
        }
        Ok(())
    }

    /// Answers a command.
    pub(super) fn answer(&mut self, notice: Notification) -> Result<(), ProtocolError> {
        self.notifier.notify(notice)?;
        Ok(())
    }

    /// Publishes the notifications, and wakes the application if it sleeps. Returns true if the
    /// wake-up is coalesced to later.
    pub(super) fn publish_notifications(
        &mut self,
        now_ns: u64,
        waker: &mut AppWaker,
    ) -> Result<bool, ProtocolError> {
        while let Some(notice) = self.notifier.retry_queued()? {
            if let Notification::Changed(handle) = notice
                && let Some(entry) = self.slots.entry(handle.slot)
                && entry.handle == handle
            {
                entry.is_notification_queued = false;
            }
        }
        Ok(self.notifier.publish(now_ns, waker, &self.event_fds.application))
    }

    /// Tells the application that its network core runs on `processor`. Returns true if the
    /// application ran there last.
    pub(super) fn note_processor(&self, processor: usize) -> bool {
        self.daemon_processor.publish(processor);
        self.application_processor.is(processor)
    }

    /// True if the application is probably at work on its notifications, or writing commands.
    pub(super) fn is_at_work(&self, now_ns: u64) -> bool {
        let last_ns = self.turn.last_command_ns.max(self.notifier.published_ns());
        now_ns < last_ns.saturating_add(MAX_WORK_NS) && !self.notifier.is_application_asleep()
    }

    /// Number of notifications that the application has been sent since it last slept.
    pub(super) fn notifications_since_sleep(&self) -> u32 {
        self.notifier.since_sleep()
    }

    /// Wakes the application, if it sleeps and has notifications, before the core sleeps.
    pub(super) fn wake_before_sleep(&mut self, now_ns: u64, waker: &mut AppWaker) {
        self.notifier.wake_before_sleep(now_ns, waker, &self.event_fds.application);
    }
}
