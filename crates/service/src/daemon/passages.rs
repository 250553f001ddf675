//! Which sockets are on their way from one application to another, or are listeners
//! that others may have.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use super::names::{NOBODY, Owner, SocketKey};
use super::state::{Damaged, SavedPassage};

/// A socket that nobody takes for so long is closed.
pub(super) const PATIENCE_NS: u64 = 60_000_000_000;

/// Who has a socket that is on its way.
pub(super) const ON_ITS_WAY: Owner = Owner { app: NOBODY, place: 0 };

/// What a socket goes with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(super) struct Shown {
    /// The kernel's name of a descriptor. It is never that of another socket.
    pub(super) cookie: u64,
    /// Which it is of the sockets that go with it.
    pub(super) part: u8,
}

/// The sockets that whoever shows their descriptors gets.
#[derive(Default)]
pub(super) struct Passages(pub(super) HashMap<Shown, Passage>);

#[derive(Clone, Copy)]
pub(super) struct Passage {
    pub(super) key: SocketKey,
    pub(super) uid: u32,
    /// How many may still take it: while there are any, it is on its way.
    pub(super) count: u32,
    pub(super) until_ns: u64,
    /// It is a listener, which others on the kernel's socket may have at any time.
    pub(super) is_shared: bool,
    /// How many sockets go with the descriptor.
    pub(super) parts: u8,
}

impl Passage {
    pub(super) fn is_on_its_way(&self) -> bool {
        self.count > 0
    }
}

impl Passages {
    pub(super) fn save(&self) -> Vec<SavedPassage> {
        let save = |(&shown, passage): (&Shown, &Passage)| {
            let Passage { key, uid, count, is_shared, parts, .. } = *passage;
            SavedPassage { shown, key, uid, count, is_shared, parts }
        };
        self.0.iter().map(save).collect()
    }

    /// Those that another daemon has saved. `fits` says whether a socket is one that is
    /// like this.
    pub(super) fn restore(
        saved: Vec<SavedPassage>,
        now_ns: u64,
        fits: impl Fn(&Passage) -> bool,
    ) -> Result<Self, Damaged> {
        let until_ns = now_ns.saturating_add(PATIENCE_NS);
        let mut passages = Self::default();
        for SavedPassage { shown, key, uid, count, is_shared, parts } in saved {
            let is_known = passages.0.values().any(|passage| passage.key == key);
            let passage = Passage { key, uid, count, until_ns, is_shared, parts };
            let is_right = (passage.is_on_its_way() || is_shared) && fits(&passage);
            if !is_right || is_known || passages.0.insert(shown, passage).is_some() {
                return Err(Damaged("a socket on its way is none"));
            }
        }
        Ok(passages)
    }

    /// Whether neither the descriptor nor the socket is known: a descriptor is that of
    /// one socket, and a socket has one.
    pub(super) fn is_free(&self, shown: Shown, key: SocketKey) -> bool {
        !self.0.contains_key(&shown) && self.0.values().all(|passage| passage.key != key)
    }

    /// A listener has ended.
    pub(super) fn forget(&mut self, key: SocketKey) {
        self.0.retain(|_, passage| passage.key != key);
    }

    /// Which socket one gets for this.
    pub(super) fn key(&self, shown: Shown) -> Option<SocketKey> {
        self.0.get(&shown).map(|passage| passage.key)
    }

    /// Takes those of these sockets out, for another core.
    pub(super) fn take_out(&mut self, keys: &[SocketKey]) -> Vec<(Shown, Passage)> {
        self.0.extract_if(|_, passage| keys.contains(&passage.key)).collect()
    }

    /// Puts those in that came from another core, with the numbers that their
    /// sockets have here.
    pub(super) fn put_in(
        &mut self,
        passages: Vec<(Shown, Passage)>,
        keys: &HashMap<SocketKey, SocketKey>,
    ) {
        let here = |(shown, passage): (Shown, Passage)| {
            Some((shown, Passage { key: *keys.get(&passage.key)?, ..passage }))
        };
        self.0.extend(passages.into_iter().filter_map(here));
    }

    /// When the next of them is closed.
    pub(super) fn next_ns(&self) -> Option<u64> {
        let on_their_way = self.0.values().filter(|passage| passage.is_on_its_way());
        on_their_way.map(|passage| passage.until_ns).min()
    }
}
