//! The clock that peers see: in initial sequence numbers, time stamps and SYN
//! cookies. It goes on when another process takes over whose own clock has
//! another beginning.

use serde::{Deserialize, Serialize};

/// How far that clock is ahead of the caller's. Both numbers wrap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PeerClock {
    ahead_ns: u64,
    ahead_ms: u32,
}

/// What it shows at some moment.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Shown {
    ns: u64,
    ms: u32,
}

/// Milliseconds are enough for what peers are told; they wrap.
pub(crate) fn milliseconds(now_ns: u64) -> u32 {
    (now_ns / 1_000_000) as u32
}

impl PeerClock {
    /// Nanoseconds, for everything but time stamps.
    pub(crate) fn ns(&self, now_ns: u64) -> u64 {
        now_ns.wrapping_add(self.ahead_ns)
    }

    /// What time stamps are ahead, in milliseconds.
    pub(crate) fn ahead_ms(&self) -> u32 {
        self.ahead_ms
    }

    /// What it shows now.
    pub(crate) fn show(&self, now_ns: u64) -> Shown {
        let ms = milliseconds(now_ns).wrapping_add(self.ahead_ms);
        Shown { ns: self.ns(now_ns), ms }
    }

    /// A clock that shows this now.
    pub(crate) fn showing(shown: Shown, now_ns: u64) -> Self {
        Self {
            ahead_ns: shown.ns.wrapping_sub(now_ns),
            ahead_ms: shown.ms.wrapping_sub(milliseconds(now_ns)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_goes_on_from_where_it_was_however_often_it_moves() {
        const MS: u64 = 1_000_000;
        let first = PeerClock::default();
        let second = PeerClock::showing(first.show(5_000_700_000), 300_000);
        assert_eq!(second.ns(300_000), 5_000_700_000);
        let third = PeerClock::showing(second.show(7 * MS), 900 * MS);
        let (before, after) = (second.show(7 * MS), third.show(900 * MS));
        assert_eq!((before.ns, before.ms), (after.ns, after.ms));
        assert_eq!(third.show(901 * MS).ms, before.ms + 1);
    }
}
