//! Slots of an application: the handles of its sockets.

use std::collections::HashMap;
use std::io;

use tidegate_memory::shared::{WakeFlag, WordRange};

use crate::daemon::ids::SocketKey;
use crate::ipc::command::Handle;
use crate::ipc::layout::SharedMemory;

/// Sockets of an application by slot, and the free slots.
pub(in crate::daemon) struct SocketSlots {
    pub(super) entries: Vec<Option<SocketEntry>>,
    /// Generation of the last socket in each slot.
    pub(super) generations: Vec<u32>,
    /// Generation that each slot had when its memory was last discarded.
    discarded_generations: Vec<u32>,
    pub(super) free_slots: Vec<u32>,
}

/// Socket held by an application.
pub(super) struct SocketEntry {
    pub(super) handle: Handle,
    pub(super) key: SocketKey,
    /// Set by the application to request a notification of the next change.
    pub(super) changes: WakeFlag<WordRange>,
    /// Its change notification waits for space in the ring.
    pub(super) is_notification_queued: bool,
}

impl SocketSlots {
    pub(super) fn new(slot_count: u32) -> Self {
        Self {
            entries: Vec::new(),
            generations: Vec::new(),
            discarded_generations: Vec::new(),
            free_slots: (0..slot_count).rev().collect(),
        }
    }

    pub(super) fn has_free(&self) -> bool {
        !self.free_slots.is_empty()
    }

    /// Removes the free slots with memory to discard: a socket that moved little left it for the
    /// next socket there.
    pub(super) fn take_dirty(&mut self) -> Vec<u32> {
        let Self { generations, discarded_generations, free_slots, .. } = self;
        let is_dirty = |&mut slot: &mut u32| {
            let generation = generations.get(slot as usize);
            generation.is_some() && generation != discarded_generations.get(slot as usize)
        };
        free_slots.extract_if(.., is_dirty).collect()
    }

    /// Frees a slot whose memory was discarded.
    pub(super) fn free_discarded(&mut self, slot: u32) {
        self.discarded_generations.resize(self.generations.len(), 0);
        let generation = self.generations.get(slot as usize);
        if let (Some(generation), Some(discarded)) =
            (generation, self.discarded_generations.get_mut(slot as usize))
        {
            *discarded = *generation;
        }
        self.free(slot);
    }

    /// Reserves a free slot for a new socket; returns the socket's handle.
    pub(in crate::daemon) fn reserve(&mut self) -> io::Result<Handle> {
        let slot = self.free_slots.pop().ok_or(io::ErrorKind::QuotaExceeded)?;
        self.ensure(slot);
        // Generations start at 1: other tables take 0 for no handle.
        let generation = &mut self.generations[slot as usize];
        *generation = generation.wrapping_add(1).max(1);
        Ok(Handle { slot, generation: *generation })
    }

    fn ensure(&mut self, slot: u32) {
        let min_len = slot as usize + 1;
        if min_len > self.entries.len() {
            self.entries.resize_with(min_len, || None);
            self.generations.resize(min_len, 0);
        }
    }

    /// Frees a reserved slot.
    pub(in crate::daemon) fn free(&mut self, slot: u32) {
        self.free_slots.push(slot);
    }

    /// Inserts a socket at its handle; the slot of the handle is in `memory`.
    pub(super) fn insert(
        &mut self,
        memory: &SharedMemory,
        handle: Handle,
        key: SocketKey,
    ) -> io::Result<()> {
        let changes = memory.change_flag(handle.slot)?;
        let entry = SocketEntry { handle, key, changes, is_notification_queued: false };
        self.entries[handle.slot as usize] = Some(entry);
        Ok(())
    }

    /// Removes the socket in this slot. A slot in the application's own memory stays reserved:
    /// other holders may still use its contents.
    pub(in crate::daemon) fn remove(&mut self, slot: u32, is_own: bool) {
        let entry = self.entries.get_mut(slot as usize).and_then(Option::take);
        if entry.is_some() && !is_own {
            self.free(slot);
        }
    }

    /// Inserts a socket of the parent under the same handle.
    pub(super) fn inherit(
        &mut self,
        memory: &SharedMemory,
        handle: Handle,
        key: SocketKey,
    ) -> io::Result<()> {
        self.ensure(handle.slot);
        self.generations[handle.slot as usize] = handle.generation;
        self.insert(memory, handle, key)?;
        // The first event is notified.
        memory.change_flag(handle.slot)?.request();
        Ok(())
    }

    /// Finishes inheriting: slots without a socket become free.
    pub(in crate::daemon) fn finish_inheriting(&mut self) {
        let Self { free_slots, entries, .. } = self;
        free_slots.retain(|&place| !matches!(entries.get(place as usize), Some(Some(_))));
    }

    /// Socket with this handle; `None` if its generation is outdated.
    pub(super) fn key(&self, handle: Handle) -> Option<SocketKey> {
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
    pub(super) fn sockets(&self) -> impl Iterator<Item = (Handle, SocketKey)> {
        self.entries.iter().flatten().map(|entry| (entry.handle, entry.key))
    }

    pub(super) fn entry(&mut self, slot: u32) -> Option<&mut SocketEntry> {
        self.entries.get_mut(slot as usize)?.as_mut()
    }
}
