//! Rate of one session.

use crate::admission::{PacketRate, SourceId, SourceKey, SourceShare};

/// Limits the requests per second of each session, in constant memory. Whoever replays the cookie of
/// a session, from however many addresses, shares the rate of that session.
#[derive(Clone, Debug)]
pub struct SessionRate {
    rate: PacketRate,
    buckets: SourceShare,
}

impl SessionRate {
    /// Allows `rate_rps` requests per second to each session, and as many at once. `seed` is a
    /// secret.
    pub fn new(rate_rps: u64, seed: [u8; 16]) -> Self {
        let rate = PacketRate { burst_ns: 1_000_000_000, ..PacketRate::from_pps(rate_rps) };
        Self { rate, buckets: SourceShare::new(SourceKey::new(seed)) }
    }

    /// True if a request of the session `id` is within the rate; counts it then.
    pub fn admit(&mut self, id: u64, now_ns: u64) -> bool {
        let session = SourceId::from_bits(id);
        let admitted = self.buckets.has_room(now_ns, session, 0, self.rate);
        if admitted {
            self.buckets.charge(now_ns, session, 0, self.rate);
        }
        admitted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_one_session_and_no_other() {
        let mut rate = SessionRate::new(50, [7; 16]);
        let mut replayed = 0;
        for time_ms in 0..10_000 {
            let now_ns = 1_000_000_000 + time_ms * 1_000_000;
            replayed += usize::from(rate.admit(1, now_ns)) + usize::from(rate.admit(1, now_ns));
            assert!(rate.admit(1000 + time_ms / 10, now_ns), "{time_ms}");
        }
        assert!((550..=551).contains(&replayed), "{replayed}");
    }
}
