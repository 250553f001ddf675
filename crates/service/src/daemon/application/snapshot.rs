//! Snapshot of an application for the next daemon.

use std::io;

use serde::{Deserialize, Serialize};

use super::Application;
use super::kernel_sockets::KernelSocketSnapshot;
use super::slots::SocketEntry;
use crate::daemon::ids::{Identity, PayloadBytes, SocketKey};
use crate::daemon::quota::AppSettings;
use crate::daemon::snapshot_error::InvalidSnapshot;
use crate::daemon::workers::AppFd;
use crate::ipc::command::{COMMAND_WORDS, Command, Handle};
use crate::ipc::event_fds::EventFds;
use crate::ipc::layout::SharedMemory;
use crate::ipc::notification::{NOTIFICATION_WORDS, Notification};
use crate::ipc::takeover_token::{TOKEN_BYTES, TakeoverToken};
use crate::ipc::version::ProtocolVersion;

/// Application as plain data.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(in crate::daemon) struct ApplicationSnapshot {
    pub(in crate::daemon) identity: Identity,
    pub(in crate::daemon) token: [u8; TOKEN_BYTES],
    /// Index of its shared memory.
    pub(in crate::daemon) memory: u32,
    pub(in crate::daemon) entries: Vec<EntrySnapshot>,
    pub(in crate::daemon) generations: Vec<u32>,
    pub(in crate::daemon) free_slots: Vec<u32>,
    pub(in crate::daemon) queued_notifications: Vec<[u64; NOTIFICATION_WORDS]>,
    /// Command that was taken from the ring and not executed.
    pub(in crate::daemon) deferred_command: Option<[u64; COMMAND_WORDS]>,
    pub(in crate::daemon) commands_taken: u64,
    pub(in crate::daemon) payload_bytes: PayloadBytes,
    /// Kernel sockets whose ports it has not bound here yet, with a descriptor each.
    pub(in crate::daemon) kernel_sockets: Vec<KernelSocketSnapshot>,
}

/// Socket held by an application, as plain data.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(in crate::daemon) struct EntrySnapshot {
    pub(in crate::daemon) handle: Handle,
    pub(in crate::daemon) key: SocketKey,
    pub(in crate::daemon) is_notification_queued: bool,
}

impl Application {
    /// Snapshot for the next daemon, in which its memory has index `memory_index`.
    pub(in crate::daemon) fn save(&mut self, memory_index: u32) -> ApplicationSnapshot {
        // The next daemon reads from the rings how far this one got.
        self.notifier.ring.publish();
        self.commands.ring.release();
        // A slot whose memory is being discarded right now would not be empty for the next daemon.
        for slot in self.memory_use.cancel_discards() {
            self.slots.free(slot);
        }
        let saved = |entry: &SocketEntry| EntrySnapshot {
            handle: entry.handle,
            key: entry.key,
            is_notification_queued: entry.is_notification_queued,
        };
        let queued = self.notifier.queued.iter();
        ApplicationSnapshot {
            identity: self.identity.clone(),
            token: *self.token.bytes(),
            memory: memory_index,
            entries: self.slots.entries.iter().flatten().map(saved).collect(),
            generations: self.slots.generations.clone(),
            free_slots: self.slots.free_slots.clone(),
            queued_notifications: queued.map(|notice| notice.to_words()).collect(),
            deferred_command: self.commands.deferred.map(Command::to_words),
            commands_taken: self.commands.taken,
            payload_bytes: self.payload_bytes,
            kernel_sockets: self.kernel_sockets.save(),
        }
    }

    /// Restores an application that another daemon saved.
    pub(in crate::daemon) fn restore(
        snapshot: ApplicationSnapshot,
        memory: SharedMemory,
        connection: AppFd,
        event_fds: EventFds<AppFd>,
        settings: &AppSettings,
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
        let protocol = identity.library.protocol.number();
        if let Err(reason) = ProtocolVersion::served(protocol) {
            let what = format!("{identity} cannot go on: {reason}");
            return Err(io::Error::new(io::ErrorKind::InvalidData, what));
        }
        let count = settings.attachments.add(identity.uid);
        let mut app = Self::new(identity, memory, connection, event_fds, None, count, settings)?;
        app.token = TakeoverToken::from_bytes(token);
        // An application that has corrupted its rings is found out when they are used.
        let _ = (app.commands.ring.resume(), app.notifier.ring.resume());
        app.slots.entries.resize_with(generations.len(), || None);
        app.slots.generations = generations;
        app.slots.free_slots = free_slots;
        app.notifier.queued = restored.ok_or(InvalidSnapshot("a notification is malformed"))?;
        // A superfluous wake-up is better than a lost one.
        app.notifier.wake_pending = true;
        let deferred = snapshot.deferred_command.map(Command::from_words);
        app.commands.deferred = deferred
            .map(|command| command.ok_or(InvalidSnapshot("a command is malformed")))
            .transpose()?;
        app.commands.taken = snapshot.commands_taken;
        app.payload_bytes = snapshot.payload_bytes;
        for EntrySnapshot { handle, key, is_notification_queued } in entries {
            let changes = app.memory.change_flag(handle.slot)?;
            let entry = app.slots.entries.get_mut(handle.slot as usize);
            let Some(entry @ None) = entry else {
                let what = "two sockets have one slot, or a slot is out of range";
                return Err(InvalidSnapshot(what).into());
            };
            *entry = Some(SocketEntry { handle, key, changes, is_notification_queued });
        }
        Ok(app)
    }
}
