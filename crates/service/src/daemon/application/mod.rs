//! Attached application: its rings, its slots and its limits.

mod coalescing;
mod commands;
mod kernel_sockets;
mod notifications;
mod protocol_error;
mod slots;
pub(super) mod snapshot;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::net::RecvFlags;
use tidegate_gate::CpuShare;
use tidegate_memory::shared::{WakeFlag, WordRange};

pub(super) use self::protocol_error::ProtocolError;

use self::coalescing::WakeCoalescing;
use self::commands::CommandQueue;
use self::kernel_sockets::KernelSockets;
use self::notifications::Notifier;
use self::slots::SocketSlots;
use crate::daemon::ids::{Identity, PayloadBytes, SocketKey};
use crate::daemon::quota::AppSettings;
use crate::ipc::command::{Command, Handle};
use crate::ipc::handshake::{Welcome, send_welcome};
use crate::ipc::layout::SharedMemory;
use crate::ipc::notification::Notification;
use crate::ipc::takeover_token::TakeoverToken;

/// Period over which an application's share of a core is measured.
const SHARE_PERIOD_NS: u64 = 10_000_000;

/// Attached application.
pub(super) struct Application {
    pub(super) identity: Identity,
    pub(super) memory: SharedMemory,
    /// Takeover token: a fork child presents it to inherit the sockets.
    pub(super) token: TakeoverToken,
    /// Token of the parent whose sockets this application inherits when it attaches.
    pub(super) parent_token: Option<TakeoverToken>,
    /// Daemon's end of the connection. A byte on it wakes the other side.
    connection: Arc<OwnedFd>,
    pub(super) commands: CommandQueue,
    notifier: Notifier,
    pub(super) daemon_sleeps: WakeFlag<WordRange>,
    pub(super) slots: SocketSlots,
    /// Sockets that the application has bound at the kernel, until it binds their ports here.
    pub(super) kernel_sockets: KernelSockets,
    /// Quota of local ports that the application may bind.
    pub(super) max_ports: u32,
    /// Quota of memory for the data of its sockets, in bytes.
    max_memory_bytes: u64,
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
        connection: OwnedFd,
        parent_token: Option<TakeoverToken>,
        settings: AppSettings,
    ) -> io::Result<Self> {
        let coalescing = WakeCoalescing::new(settings.coalescing.as_nanos() as u64);
        Ok(Self {
            identity,
            token: TakeoverToken::new()?,
            parent_token,
            connection: Arc::new(connection),
            commands: CommandQueue::new(memory.command_receiver()?),
            notifier: Notifier::new(
                memory.notification_sender()?,
                memory.application_sleeps()?,
                coalescing,
            ),
            daemon_sleeps: memory.daemon_sleeps()?,
            slots: SocketSlots::new(memory.geometry().sockets),
            memory,
            kernel_sockets: KernelSockets::default(),
            max_ports: settings.quota.max_ports,
            max_memory_bytes: settings.quota.max_memory_bytes,
            cpu_share: CpuShare::new(settings.quota.cpu_share_percent, SHARE_PERIOD_NS, 0),
            payload_bytes: PayloadBytes::default(),
            recent_work: 0,
        })
    }

    /// Sends the welcome: its memory, its takeover token and the number of network cores.
    pub(super) fn welcome(&self, core_count: usize) -> io::Result<()> {
        let (memory, token, cores) = (self.memory.clone(), self.token, core_count as u32);
        send_welcome(self.as_fd(), &Welcome { memory, token, cores })
    }

    /// Connection that wakes the daemon, for the next daemon.
    pub(super) fn connection(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.connection)
    }

    /// Next command, or `None` while notifications are queued or a port query is in progress.
    pub(super) fn next_command(&mut self) -> Result<Option<Command>, ProtocolError> {
        if self.notifier.has_queued() { Ok(None) } else { self.commands.next() }
    }

    /// True if a command can run or notifications are queued.
    pub(super) fn has_work(&mut self) -> bool {
        self.notifier.has_queued() || self.commands.has_work()
    }

    /// True if the application may have one more socket: a free slot and memory within the quota.
    pub(super) fn has_space(&mut self) -> bool {
        self.slots.has_free()
            && (self.has_memory() || self.slots.discard_free(&self.memory) && self.has_memory())
    }

    fn has_memory(&self) -> bool {
        // Without a quota the system call for the memory in use is saved.
        self.max_memory_bytes == u64::MAX
            || self.memory.allocated_bytes().is_ok_and(|used| used < self.max_memory_bytes)
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

    /// Publishes the notifications, and wakes the application if it sleeps. Returns the time of
    /// a wake-up that is coalesced to later.
    pub(super) fn publish_notifications(
        &mut self,
        now_ns: u64,
    ) -> Result<Option<u64>, ProtocolError> {
        while let Some(notice) = self.notifier.retry_queued()? {
            if let Notification::Changed(handle) = notice
                && let Some(entry) = self.slots.entry(handle.slot)
                && entry.handle == handle
            {
                entry.is_notification_queued = false;
            }
        }
        Ok(self.notifier.publish(now_ns, &self.connection))
    }

    /// Drains the wake-up bytes. Returns false if the application has closed the connection.
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
