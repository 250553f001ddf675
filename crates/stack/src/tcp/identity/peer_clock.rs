//! Clock visible to peers: source of initial sequence numbers, time stamps and SYN cookies.
//! The clock continues when another process takes over, whose own clock has another origin.

/// Offset of the peer-visible clock to the caller's clock. Both fields wrap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PeerClock {
    offset_ns: u64,
    offset_ms: u32,
}

/// Reading of a [`PeerClock`].
#[derive(Clone, Copy, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub(crate) struct PeerTime {
    ns: u64,
    ms: u32,
}

/// Milliseconds of the caller's clock, the resolution of time stamps; wraps.
pub(crate) fn milliseconds(now_ns: u64) -> u32 {
    (now_ns / 1_000_000) as u32
}

/// The time in whole seconds, wrapping: precise enough for the age of time stamps.
pub(crate) fn whole_seconds(now_ns: u64) -> u32 {
    (now_ns / 1_000_000_000) as u32
}

impl PeerClock {
    /// Peer-visible time in nanoseconds, for everything except time stamps.
    pub(crate) fn ns(&self, now_ns: u64) -> u64 {
        now_ns.wrapping_add(self.offset_ns)
    }

    /// Offset of the time stamp clock, in milliseconds.
    pub(crate) fn offset_ms(&self) -> u32 {
        self.offset_ms
    }

    /// Reads the clock at `now_ns`.
    pub(crate) fn peer_time(&self, now_ns: u64) -> PeerTime {
        let ms = milliseconds(now_ns).wrapping_add(self.offset_ms);
        PeerTime { ns: self.ns(now_ns), ms }
    }

    /// Returns a clock that reads `start` at `now_ns`.
    pub(crate) fn starting_at(start: PeerTime, now_ns: u64) -> Self {
        Self {
            offset_ns: start.ns.wrapping_sub(now_ns),
            offset_ms: start.ms.wrapping_sub(milliseconds(now_ns)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_continues_across_repeated_moves() {
        const MS: u64 = 1_000_000;
        let first = PeerClock::default();
        let second = PeerClock::starting_at(first.peer_time(5_000_700_000), 300_000);
        assert_eq!(second.ns(300_000), 5_000_700_000);
        let third = PeerClock::starting_at(second.peer_time(7 * MS), 900 * MS);
        let (before, after) = (second.peer_time(7 * MS), third.peer_time(900 * MS));
        assert_eq!((before.ns, before.ms), (after.ns, after.ms));
        assert_eq!(third.peer_time(901 * MS).ms, before.ms + 1);
    }
}
