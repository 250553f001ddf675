//! Work that is reserved for admitted sessions.

use crate::admission::{Bucket, PacketRate};

/// Sessions below which the mean work of a session says nothing.
const MIN_SESSIONS: u64 = 32;

/// Interval at which what was learned counts half.
const HALVING_NS: u64 = 30_000_000_000;

/// Work that may be promised at once: sessions come in bursts.
const BURST_NS: u64 = 1_000_000_000;

/// Promised work per second, in percent. More than a second's: the mean is an estimate, and the waits
/// of new sessions hold back what is too much.
const PROMISED_PERCENT: u64 = 110;

/// Admits new sessions only as far as there is time for all of their requests.
///
/// Each new session is charged with the mean work of a session, from its first request to its last,
/// as the server has measured it. So the requests of admitted sessions find time later, however long
/// a client thinks between two of them.
#[derive(Clone, Debug, Default)]
pub struct SessionReservation {
    /// Work of all requests of sessions, and the sessions that were admitted, both halved now and
    /// then.
    work_ns: u64,
    sessions: u64,
    next_halving_ns: Option<u64>,
    /// Promised work.
    promised: Bucket,
}

impl SessionReservation {
    /// True if the server has time for one more session.
    pub fn has_room(&self, now_ns: u64) -> bool {
        self.rate().is_none_or(|rate| self.promised.has_room(now_ns, rate))
    }

    /// Reserves the work of one session.
    pub fn reserve(&mut self, now_ns: u64) {
        if let Some(rate) = self.rate() {
            self.promised.charge(now_ns, rate);
        }
        self.sessions += 1;
    }

    /// Records the work for one request of a session, the first included.
    pub fn on_work(&mut self, now_ns: u64, work_ns: u64) {
        self.work_ns = self.work_ns.saturating_add(work_ns);
        let next_ns = self.next_halving_ns.get_or_insert(now_ns.saturating_add(HALVING_NS));
        if now_ns >= *next_ns {
            *next_ns = now_ns.saturating_add(HALVING_NS);
            self.work_ns /= 2;
            self.sessions /= 2;
        }
    }

    /// Rate of new sessions, once enough is known.
    fn rate(&self) -> Option<PacketRate> {
        let session_ns = self.work_ns.checked_div(self.sessions)?;
        let interval_ns = (session_ns.saturating_mul(100) / PROMISED_PERCENT).max(1);
        let burst_ns = BURST_NS.max(interval_ns);
        (self.sessions >= MIN_SESSIONS).then_some(PacketRate { interval_ns, burst_ns })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn admits_sessions_for_which_there_is_time() {
        let mut reservation = SessionReservation::default();
        // Sessions of 10 ms: 110 of them are promised in a second, and as many at once.
        for number in 0..1000 {
            reservation.reserve(number);
            reservation.on_work(number, 10 * MS);
        }
        let (mut admitted, start_ns) = (0, 5_000 * MS);
        for time_ms in 0..10_000 {
            let now_ns = start_ns + time_ms * MS;
            if reservation.has_room(now_ns) {
                reservation.reserve(now_ns);
                reservation.on_work(now_ns, 10 * MS);
                admitted += 1;
            }
        }
        assert!((1190..=1215).contains(&admitted), "{admitted}");
    }

    #[test]
    fn knows_nothing_at_first_and_forgets() {
        let mut reservation = SessionReservation::default();
        for _ in 0..MIN_SESSIONS - 1 {
            reservation.reserve(0);
            reservation.on_work(0, 1_000_000 * MS);
        }
        assert!(reservation.has_room(0), "too few sessions");
        reservation.reserve(0);
        assert!((0..9).any(|_| {
            reservation.reserve(0);
            !reservation.has_room(0)
        }));
        // After hours of small sessions the long ones are forgotten.
        for second in 1..1000 {
            let now_ns = second * 1000 * MS;
            reservation.reserve(now_ns);
            reservation.on_work(now_ns, MS);
        }
        assert!(reservation.rate().unwrap().interval_ns < 2 * MS);
    }
}
