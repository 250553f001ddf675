//! Timers of a connection, and its links in the tables of all connections.

mod links;

pub(crate) use links::{NO_INDEX, TICK_BITS, TableLinks, tick_of};

use super::identity::milliseconds;
use super::socket::Keepalive;

/// No deadline.
pub(crate) const NEVER: u64 = u64::MAX;

pub(crate) const NS_PER_MS: u64 = 1_000_000;

/// Delay of an acknowledgement, to combine it with others or with data (RFC 9293 section
/// 3.8.6.3 allows half a second).
const DELAYED_ACK_NS: u64 = 40_000_000;

/// Rate limit of challenge ACKs: milliseconds for each in the long run (RFC 5961 section 7: ten in
/// five seconds).
///
/// The limit is per connection: a shared counter would let an attacker learn about other
/// connections.
const CHALLENGE_INTERVAL_MS: u32 = 500;

/// Number of challenge ACKs at once, in reply to segments with payload. Segments without payload
/// get one: two hosts that disagree about their sequence numbers would answer each other's
/// acknowledgements for ever.
const CHALLENGE_BURST: u32 = 10;

/// Purpose of the retransmission timer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub(crate) enum RtxTimer {
    /// The timer is not needed.
    Off,
    /// Retransmission time-out (RFC 6298).
    Retransmission,
    /// Tail loss probe (RFC 8985 section 7).
    TailProbe,
    /// Reordering window of RACK: segments may only be late (RFC 8985 section 6.2).
    Reordering,
    /// Zero-window probe (RFC 9293 section 3.8.6.1).
    Persist,
    /// A segment that is not full is held back for more data (`TCP_CORK`).
    Cork,
    /// New data waits, so that it does not leave as one burst.
    Pacing,
}

/// Timers of a connection, and the times that they count from.
pub(crate) struct Timers {
    /// Purpose of the retransmission timer, and its deadline below.
    pub(crate) rtx: RtxTimer,
    /// Keep-alive probes sent since the last segment of the peer.
    pub(crate) keepalive_probes_sent: u8,
    /// Probes sent into the peer's closed window. They are counted apart from the back-off of the
    /// retransmission time-out: their answers are no round-trip samples.
    pub(crate) window_probes_sent: u8,
    /// Due time of the next challenge ACK: rate limit of RFC 5961 section 7.
    challenge_due_ms: u32,
    pub(crate) rtx_deadline_ns: u64,
    /// Deadline of a delayed acknowledgement.
    pub(crate) ack_deadline_ns: u64,
    /// Deadline of keep-alive, FIN-WAIT-2 or TIME-WAIT.
    pub(crate) idle_deadline_ns: u64,
    /// Start of the retransmission time-out.
    pub(crate) rto_base_ns: u64,
    /// Time of the last segment with data, and of the last acceptable segment of the peer.
    pub(crate) last_sent_ns: u64,
    pub(crate) last_received_ns: u64,
    /// Time since which nothing was acknowledged.
    pub(crate) stalled_since_ns: u64,
}

/// Snapshot of the deadlines of [`Timers`].
#[derive(Clone, Copy, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub(crate) struct TimerSnapshot {
    wait: RtxTimer,
    wait_in_ns: Option<u64>,
    ack_in_ns: Option<u64>,
    idle_in_ns: Option<u64>,
    keepalives: u8,
    window_probes: u8,
    /// Time until the next challenge ACK is due at the latest; wraps.
    challenge_in_ms: u32,
}

/// Ages of the past times of [`Timers`], in nanoseconds.
pub(crate) struct TimeAges {
    pub(crate) rto_base_ns: u64,
    pub(crate) sent_ns: u64,
    pub(crate) received_ns: u64,
    pub(crate) stalled_ns: u64,
}

/// Time between `at_ns` and `now_ns`.
pub(crate) fn age_ns(now_ns: u64, at_ns: u64) -> u64 {
    now_ns.saturating_sub(at_ns)
}

/// Time from `now_ns` until a deadline; `None` without a deadline.
fn remaining_ns(now_ns: u64, at_ns: u64) -> Option<u64> {
    (at_ns != NEVER).then_some(at_ns.saturating_sub(now_ns))
}

fn deadline_ns(now_ns: u64, remaining_ns: Option<u64>) -> u64 {
    remaining_ns.map_or(NEVER, |left_ns| now_ns.saturating_add(left_ns))
}

impl Timers {
    /// No timer is set.
    pub(crate) fn new(now_ns: u64) -> Self {
        Self {
            rtx: RtxTimer::Off,
            keepalive_probes_sent: 0,
            window_probes_sent: 0,
            challenge_due_ms: 0,
            rtx_deadline_ns: NEVER,
            ack_deadline_ns: NEVER,
            idle_deadline_ns: NEVER,
            rto_base_ns: now_ns,
            last_sent_ns: now_ns,
            last_received_ns: now_ns,
            stalled_since_ns: now_ns,
        }
    }

    /// Earliest deadline.
    #[inline]
    pub(crate) fn deadline_ns(&self) -> u64 {
        self.rtx_deadline_ns.min(self.ack_deadline_ns).min(self.idle_deadline_ns)
    }

    /// Sets the retransmission timer for a purpose.
    #[inline]
    pub(crate) fn set_rtx(&mut self, purpose: RtxTimer, deadline_ns: u64) {
        (self.rtx, self.rtx_deadline_ns) = (purpose, deadline_ns);
    }

    /// Clears the retransmission timer.
    #[inline]
    pub(crate) fn clear_rtx(&mut self) {
        self.set_rtx(RtxTimer::Off, NEVER);
    }

    /// Clears all deadlines.
    #[inline]
    pub(crate) fn clear(&mut self) {
        self.clear_rtx();
        (self.ack_deadline_ns, self.idle_deadline_ns) = (NEVER, NEVER);
    }

    /// Starts the delay of an acknowledgement, unless one is delayed already.
    #[inline]
    pub(crate) fn delay_ack(&mut self, now_ns: u64) {
        if self.ack_deadline_ns == NEVER {
            self.ack_deadline_ns = now_ns.saturating_add(DELAYED_ACK_NS);
        }
    }

    /// Starts keep-alive, or the wait in FIN-WAIT-2 or TIME-WAIT.
    pub(crate) fn set_idle(&mut self, now_ns: u64, wait_ns: u64) {
        self.idle_deadline_ns = now_ns.saturating_add(wait_ns);
    }

    /// Starts the keep-alive timer, if keep-alive is enabled (RFC 9293 section 3.8.4).
    pub(crate) fn start_keepalive(&mut self, now_ns: u64, keepalive: Option<Keepalive>) {
        if let Some(keepalive) = keepalive {
            self.set_idle(now_ns, u64::from(keepalive.idle_ms) * NS_PER_MS);
        }
    }

    /// Takes one challenge ACK from the rate limit; false when the limit is used up (RFC 5961
    /// section 7). The reply to a segment that `has_payload` may be one of a burst.
    pub(crate) fn take_challenge_ack(&mut self, now_ns: u64, has_payload: bool) -> bool {
        // Each challenge ACK moves the due time of the next one by the interval. The due time may
        // lie ahead of now by at most the burst.
        let now_ms = milliseconds(now_ns);
        let ahead_ms = self.challenge_due_ms.wrapping_sub(now_ms);
        let is_ahead = ahead_ms <= CHALLENGE_BURST * CHALLENGE_INTERVAL_MS;
        let ahead_ms = if is_ahead { ahead_ms } else { 0 };
        let burst = if has_payload { CHALLENGE_BURST } else { 1 };
        let is_allowed = ahead_ms + CHALLENGE_INTERVAL_MS <= burst * CHALLENGE_INTERVAL_MS;
        if is_allowed {
            self.challenge_due_ms = now_ms.wrapping_add(ahead_ms + CHALLENGE_INTERVAL_MS);
        }
        is_allowed
    }

    /// Takes a snapshot of the deadlines.
    pub(crate) fn save(&self, now_ns: u64) -> TimerSnapshot {
        TimerSnapshot {
            wait: self.rtx,
            wait_in_ns: remaining_ns(now_ns, self.rtx_deadline_ns),
            ack_in_ns: remaining_ns(now_ns, self.ack_deadline_ns),
            idle_in_ns: remaining_ns(now_ns, self.idle_deadline_ns),
            keepalives: self.keepalive_probes_sent,
            window_probes: self.window_probes_sent,
            challenge_in_ms: self.challenge_due_ms.wrapping_sub(milliseconds(now_ns)),
        }
    }

    /// Restores a snapshot, and the times that are so long ago.
    pub(crate) fn restore(now_ns: u64, saved: &TimerSnapshot, ages: &TimeAges) -> Self {
        Self {
            rtx: saved.wait,
            keepalive_probes_sent: saved.keepalives,
            window_probes_sent: saved.window_probes,
            challenge_due_ms: milliseconds(now_ns).wrapping_add(saved.challenge_in_ms),
            rtx_deadline_ns: deadline_ns(now_ns, saved.wait_in_ns),
            ack_deadline_ns: deadline_ns(now_ns, saved.ack_in_ns),
            idle_deadline_ns: deadline_ns(now_ns, saved.idle_in_ns),
            rto_base_ns: now_ns.saturating_sub(ages.rto_base_ns),
            last_sent_ns: now_ns.saturating_sub(ages.sent_ns),
            last_received_ns: now_ns.saturating_sub(ages.received_ns),
            stalled_since_ns: now_ns.saturating_sub(ages.stalled_ns),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rfc5961_7_ten_challenge_acks_in_five_seconds() {
        let mut timers = Timers::new(0);
        let start_ns = 7_000_000_000;
        let taken = (0..30).filter(|_| timers.take_challenge_ack(start_ns, true)).count();
        assert_eq!(taken, CHALLENGE_BURST as usize);
        let later_ns = start_ns + u64::from(CHALLENGE_INTERVAL_MS) * NS_PER_MS;
        assert!(timers.take_challenge_ack(later_ns, true));
        assert!(!timers.take_challenge_ack(later_ns, true));
    }

    #[test]
    fn segments_without_payload_get_one_challenge_ack_in_each_interval() {
        let mut timers = Timers::new(0);
        for interval in 0..4 {
            let now_ns = u64::from(interval * CHALLENGE_INTERVAL_MS) * NS_PER_MS;
            assert!(timers.take_challenge_ack(now_ns, false));
            assert!(!timers.take_challenge_ack(now_ns, false));
        }
    }

    #[test]
    fn a_delayed_acknowledgement_keeps_its_first_deadline() {
        let mut timers = Timers::new(0);
        timers.delay_ack(5);
        timers.delay_ack(9);
        assert_eq!(timers.deadline_ns(), 5 + DELAYED_ACK_NS);
        timers.clear();
        assert_eq!(timers.deadline_ns(), NEVER);
    }
}
