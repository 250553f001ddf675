//! Which sockets are on their way from one application to another.

use std::collections::HashMap;

use super::names::{NOBODY, Owner, SocketKey};
use super::state::{Damaged, SavedPassage};

/// A socket that nobody takes for so long is closed.
pub(super) const PATIENCE_NS: u64 = 60_000_000_000;

/// Who has a socket that is on its way.
pub(super) const ON_ITS_WAY: Owner = Owner { app: NOBODY, place: 0 };

/// The sockets on their way, by what the kernel calls their descriptors.
#[derive(Default)]
pub(super) struct Passages(pub(super) HashMap<u64, Passage>);

#[derive(Clone, Copy)]
pub(super) struct Passage {
    pub(super) key: SocketKey,
    pub(super) uid: u32,
    /// How many may still take it.
    pub(super) count: u32,
    pub(super) until_ns: u64,
}

impl Passages {
    pub(super) fn save(&self) -> Vec<SavedPassage> {
        let save = |(&cookie, &Passage { key, uid, count, .. }): (&u64, &Passage)| SavedPassage {
            cookie,
            key,
            uid,
            count,
        };
        self.0.iter().map(save).collect()
    }

    /// Those that another daemon has saved. `is_there` says whether a socket is one
    /// that is on its way.
    pub(super) fn restore(
        saved: Vec<SavedPassage>,
        now_ns: u64,
        is_there: impl Fn(SocketKey) -> bool,
    ) -> Result<Self, Damaged> {
        let until_ns = now_ns.saturating_add(PATIENCE_NS);
        let mut passages = Self::default();
        for SavedPassage { cookie, key, uid, count } in saved {
            let is_known = passages.0.values().any(|passage| passage.key == key);
            let passage = Passage { key, uid, count: count.max(1), until_ns };
            if !is_there(key) || is_known || passages.0.insert(cookie, passage).is_some() {
                return Err(Damaged("a socket on its way is none"));
            }
        }
        Ok(passages)
    }

    /// Which socket is on its way by this name.
    pub(super) fn key(&self, cookie: u64) -> Option<SocketKey> {
        self.0.get(&cookie).map(|passage| passage.key)
    }

    /// Takes those of these sockets out, for another core.
    pub(super) fn take_out(&mut self, keys: &[SocketKey]) -> Vec<(u64, Passage)> {
        self.0.extract_if(|_, passage| keys.contains(&passage.key)).collect()
    }

    /// Puts those in that came from another core, with the numbers that their
    /// sockets have here.
    pub(super) fn put_in(
        &mut self,
        passages: Vec<(u64, Passage)>,
        keys: &HashMap<SocketKey, SocketKey>,
    ) {
        let here = |(cookie, passage): (u64, Passage)| {
            Some((cookie, Passage { key: *keys.get(&passage.key)?, ..passage }))
        };
        self.0.extend(passages.into_iter().filter_map(here));
    }

    /// When the next of them is closed.
    pub(super) fn next_ns(&self) -> Option<u64> {
        self.0.values().map(|passage| passage.until_ns).min()
    }
}
