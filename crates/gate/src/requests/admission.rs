//! Decision about one request.

use crate::admission::{Bucket, PacketRate};

/// Factor between the longest waits of neighbouring ranks.
const WAIT_FACTOR: u64 = 16;

/// Longest wait of any rank: a client has given up after a longer one.
const MAX_WAIT_NS: u64 = 2_000_000_000;

/// Burst tolerance of guaranteed rates and ceilings: requests come in bursts.
const BURST_NS: u64 = 100_000_000;

/// Class of requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RequestClass {
    /// Precedence: rank 0 before rank 1.
    pub rank: u8,
    /// Requests per second that are admitted whatever the rank and the load.
    pub guaranteed_rps: u64,
    /// Maximum requests per second, also without overload; `None` is unlimited.
    pub ceiling_rps: Option<u64>,
}

/// Reason of a refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestRefusal {
    /// The class is above its ceiling.
    Ceiling,
    /// Requests of the rank would wait too long.
    Wait,
}

/// Decides which requests are admitted, by their classes and their waits.
///
/// # Examples
/// ```
/// use tidegate_gate::requests::{RequestAdmission, RequestClass, RequestRefusal};
///
/// let session = RequestClass::default();
/// let other = RequestClass { rank: 1, ..session };
/// let mut admission = RequestAdmission::new(&[session, other], 20_000_000);
/// let (now_ns, wait_ns) = (1_000_000_000, 50_000_000);
/// assert_eq!(admission.admit(0, now_ns, wait_ns), Ok(0));
/// assert_eq!(admission.admit(1, now_ns, wait_ns), Err(RequestRefusal::Wait));
/// ```
#[derive(Clone, Debug)]
pub struct RequestAdmission {
    classes: Vec<ClassState>,
    /// Longest wait of each level.
    max_wait_ns: Vec<u64>,
}

#[derive(Clone, Debug)]
struct ClassState {
    /// Index of the rank among the ranks in use.
    level: usize,
    guaranteed: Option<Limit>,
    ceiling: Option<Limit>,
}

/// Rate with its state.
#[derive(Clone, Debug)]
struct Limit {
    bucket: Bucket,
    rate: PacketRate,
}

impl Limit {
    fn new(rate_rps: u64) -> Self {
        let rate = PacketRate::from_pps(rate_rps);
        let burst_ns = rate.burst_ns.max(BURST_NS);
        Self { bucket: Bucket::default(), rate: PacketRate { burst_ns, ..rate } }
    }

    fn has_room(&self, now_ns: u64) -> bool {
        self.bucket.has_room(now_ns, self.rate)
    }

    fn charge(&mut self, now_ns: u64) {
        self.bucket.charge(now_ns, self.rate);
    }
}

impl RequestAdmission {
    /// Creates the decision for `classes`, which callers name by their indices. Requests of the
    /// last rank wait at most `max_wait_ns`, those of each rank before it 16 times as long.
    pub fn new(classes: &[RequestClass], max_wait_ns: u64) -> Self {
        let mut ranks: Vec<u8> = classes.iter().map(|class| class.rank).collect();
        ranks.sort_unstable();
        ranks.dedup();
        let waits = std::iter::successors(Some(max_wait_ns.min(MAX_WAIT_NS)), |wait| {
            Some(wait.saturating_mul(WAIT_FACTOR).min(MAX_WAIT_NS))
        });
        let mut max_wait_ns: Vec<u64> = waits.take(ranks.len()).collect();
        max_wait_ns.reverse();
        let classes = classes.iter().map(|class| ClassState {
            level: ranks.partition_point(|&rank| rank < class.rank),
            guaranteed: (class.guaranteed_rps > 0).then(|| Limit::new(class.guaranteed_rps)),
            ceiling: class.ceiling_rps.map(Limit::new),
        });
        Self { classes: classes.collect(), max_wait_ns }
    }

    /// Number of levels: ranks in use, of which 0 comes first.
    pub fn level_count(&self) -> usize {
        self.max_wait_ns.len()
    }

    /// Level of a class.
    pub fn level(&self, class: usize) -> usize {
        self.classes[class].level
    }

    /// Longest wait of a request of a level.
    pub fn max_wait_ns(&self, level: usize) -> u64 {
        self.max_wait_ns[level]
    }

    /// Decides about a request that would wait for `wait_ns`. Returns the level at which it is
    /// served: its own, or the first while the class is within its guaranteed rate.
    ///
    /// # Errors
    /// When the request is refused.
    pub fn admit(
        &mut self,
        class: usize,
        now_ns: u64,
        wait_ns: u64,
    ) -> Result<usize, RequestRefusal> {
        let state = &mut self.classes[class];
        if state.ceiling.as_ref().is_some_and(|ceiling| !ceiling.has_room(now_ns)) {
            return Err(RequestRefusal::Ceiling);
        }
        let guaranteed = state.guaranteed.as_mut().filter(|limit| limit.has_room(now_ns));
        let level = match guaranteed {
            Some(limit) => {
                limit.charge(now_ns);
                0
            }
            None if wait_ns > self.max_wait_ns[state.level] => return Err(RequestRefusal::Wait),
            None => state.level,
        };
        if let Some(ceiling) = &mut state.ceiling {
            ceiling.charge(now_ns);
        }
        Ok(level)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 1_000_000_000;
    const MS: u64 = 1_000_000;

    fn class(rank: u8) -> RequestClass {
        RequestClass { rank, ..RequestClass::default() }
    }

    #[test]
    fn last_rank_is_refused_first() {
        let mut admission = RequestAdmission::new(&[class(7), class(0), class(3)], 2 * MS);
        let mut admitted = |wait_ns| [1, 2, 0].map(|class| admission.admit(class, S, wait_ns).ok());
        assert_eq!(admitted(2 * MS), [Some(0), Some(1), Some(2)]);
        assert_eq!(admitted(2 * MS + 1), [Some(0), Some(1), None]);
        assert_eq!(admitted(32 * MS + 1), [Some(0), None, None]);
        assert_eq!(admitted(513 * MS), [None; 3]);
        assert_eq!(admission.level_count(), 3);
    }

    #[test]
    fn longest_wait_is_bounded() {
        let ranks: Vec<_> = (0..5).map(class).collect();
        let admission = RequestAdmission::new(&ranks, 20 * MS);
        let waits: Vec<u64> = (0..5).map(|level| admission.max_wait_ns(level)).collect();
        assert_eq!(waits, [2 * S, 2 * S, 2 * S, 320 * MS, 20 * MS]);
    }

    #[test]
    fn guaranteed_rate_passes_any_load_and_no_more() {
        let guaranteed = RequestClass { guaranteed_rps: 100, ..class(1) };
        let mut admission = RequestAdmission::new(&[class(0), guaranteed], MS);
        let mut admitted = 0;
        for time_ms in 0..10_000 {
            for _ in 0..10 {
                match admission.admit(1, S + time_ms * MS, S) {
                    Ok(level) => {
                        assert_eq!(level, 0);
                        admitted += 1;
                    }
                    Err(refusal) => assert_eq!(refusal, RequestRefusal::Wait),
                }
            }
        }
        assert!((1000..=1011).contains(&admitted), "{admitted}");
    }

    #[test]
    fn ceiling_holds_without_load_and_refused_requests_do_not_count() {
        let limited = RequestClass { ceiling_rps: Some(100), ..class(1) };
        let mut admission = RequestAdmission::new(&[class(0), limited], MS);
        let mut admit = |time_ms, wait_ns| admission.admit(1, S + time_ms * MS, wait_ns);
        assert_eq!((0..1000).filter(|_| admit(0, 0).is_ok()).count(), 11);
        assert_eq!(admit(0, 0), Err(RequestRefusal::Ceiling));
        for time_ms in 1..200 {
            assert!(admit(time_ms, S).is_err());
        }
        assert_eq!((0..1000).filter(|_| admit(200, 0).is_ok()).count(), 11);
    }
}
