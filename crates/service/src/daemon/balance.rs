//! How many cores are used, and what goes from one to another.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::Duration;

use super::cores::Cores;
use super::load::{Said, WHOLE};
use super::post::Message;

/// How often the cores are looked at.
const LOOK: Duration = Duration::from_millis(100);

/// A core that is so busy has too much to do.
const FULL: u32 = 800;

/// A core is given something if it is less busy than another one by this.
const DIFFERENCE: u32 = 300;

/// Cores that are so busy on average with one less need not be so many.
const LITTLE: u32 = 500;

/// For how many looks things must be so: more is used soon, less after a while.
const SOON: u32 = 3;
const WHILE: u32 = 20;

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Step {
    from: usize,
    to: usize,
    /// How much of a core's time goes with it at most.
    busy: u32,
}

/// Decides, look by look.
struct Policy {
    limits: RangeInclusive<usize>,
    used: usize,
    full_looks: u32,
    little_looks: u32,
}

impl Policy {
    fn new(limits: RangeInclusive<usize>) -> Self {
        Self { used: *limits.start(), limits, full_looks: 0, little_looks: 0 }
    }

    /// What to do about cores that are as busy as that.
    fn look(&mut self, cores: &[Said]) -> Option<Step> {
        let used = &cores[..self.used.min(cores.len())];
        let busiest = (0..used.len()).max_by_key(|&core| used[core].busy)?;
        let Said { busy, families, .. } = used[busiest];
        self.full_looks = if busy >= FULL && families > 1 { self.full_looks + 1 } else { 0 };
        if self.full_looks >= SOON {
            self.full_looks = 0;
            let idlest = (0..used.len()).min_by_key(|&core| used[core].busy)?;
            let difference = busy - used[idlest].busy;
            if difference >= DIFFERENCE {
                return Some(Step { from: busiest, to: idlest, busy: difference / 2 });
            }
            if self.used < *self.limits.end() {
                self.used += 1;
                return Some(Step { from: busiest, to: self.used - 1, busy: busy / 2 });
            }
        }
        let total: u32 = used.iter().map(|core| core.busy).sum();
        let is_little =
            self.used > *self.limits.start() && total <= LITTLE * (self.used as u32 - 1);
        self.little_looks = if is_little { self.little_looks + 1 } else { 0 };
        if self.little_looks >= WHILE {
            self.little_looks = 0;
            self.used -= 1;
            let to = (0..self.used).min_by_key(|&core| used[core].busy)?;
            return Some(Step { from: self.used, to, busy: WHOLE });
        }
        None
    }
}

/// The thread that looks after the cores of a daemon.
pub(super) struct Balance {
    stop: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Balance {
    pub(super) fn start(cores: Arc<Cores>, limits: RangeInclusive<usize>) -> std::io::Result<Self> {
        let (stop, stopped) = mpsc::channel();
        let run = move || {
            let mut policy = Policy::new(limits);
            let mut before = vec![0; cores.count()];
            while stopped.recv_timeout(LOOK) == Err(RecvTimeoutError::Timeout) {
                let step = policy.look(&look(&cores, &mut before));
                cores.set_used(policy.used);
                if let Some(Step { from, to, busy }) = step {
                    // A core that has ended is found out by whoever watches it.
                    let _ = cores.post(from).send(Message::Shed { to, busy });
                }
            }
        };
        let thread = std::thread::Builder::new().name("tidegate-balance".into()).spawn(run)?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }
}

/// How busy the cores are. One that has said nothing since has slept.
fn look(cores: &Cores, before: &mut [u64]) -> Vec<Said> {
    let of = |(core, before): (usize, &mut u64)| {
        let said = cores.load(core).said();
        let has_slept = std::mem::replace(before, said.told) == said.told;
        if has_slept { Said { busy: 0, ..said } } else { said }
    };
    before.iter_mut().enumerate().map(of).collect()
}

impl Drop for Balance {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            // A panic was reported by the thread itself.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cores(busy: &[u32]) -> Vec<Said> {
        busy.iter().map(|&busy| Said { busy, families: 2, ..Said::default() }).collect()
    }

    /// What is decided when things stay so for as many looks as it takes.
    fn decide(policy: &mut Policy, busy: &[u32]) -> Option<Step> {
        (0..WHILE).find_map(|_| policy.look(&cores(busy)))
    }

    #[test]
    fn a_full_core_gives_half_to_a_fresh_one() {
        let mut policy = Policy::new(1..=3);
        assert_eq!(decide(&mut policy, &[700, 0, 0]), None);
        assert_eq!(decide(&mut policy, &[900, 0, 0]), Some(Step { from: 0, to: 1, busy: 450 }));
        assert_eq!(decide(&mut policy, &[900, 850, 0]), Some(Step { from: 0, to: 2, busy: 450 }));
        assert_eq!(decide(&mut policy, &[900, 850, 990]), None, "there are no more");
    }

    #[test]
    fn one_that_has_room_comes_before_a_fresh_one() {
        let mut policy = Policy::new(2..=3);
        assert_eq!(decide(&mut policy, &[400, 1000, 0]), Some(Step { from: 1, to: 0, busy: 300 }));
        assert_eq!(policy.used, 2);
    }

    #[test]
    fn what_cannot_be_divided_stays() {
        let mut policy = Policy::new(1..=2);
        let one = [Said { busy: WHOLE, families: 1, ..Said::default() }, Said::default()];
        assert!((0..100).all(|_| policy.look(&one).is_none()));
    }

    #[test]
    fn a_moment_is_no_reason() {
        let mut policy = Policy::new(1..=2);
        for _ in 0..10 {
            assert_eq!(policy.look(&cores(&[1000, 0])), None);
            assert_eq!(policy.look(&cores(&[1000, 0])), None);
            assert_eq!(policy.look(&cores(&[100, 0])), None);
        }
    }

    #[test]
    fn cores_that_are_not_needed_give_everything_away() {
        let mut policy = Policy::new(1..=3);
        policy.used = 3;
        let step = decide(&mut policy, &[300, 200, 100]);
        assert_eq!(step, Some(Step { from: 2, to: 1, busy: WHOLE }));
        let step = decide(&mut policy, &[200, 200, 0]);
        assert_eq!(step, Some(Step { from: 1, to: 0, busy: WHOLE }));
        assert_eq!(decide(&mut policy, &[0, 0, 0]), None, "one stays");
        let mut policy = Policy::new(2..=3);
        assert_eq!(decide(&mut policy, &[0, 0, 0]), None, "as many as it was told");
    }

    #[test]
    fn what_was_divided_is_not_joined_at_once() {
        let mut policy = Policy::new(1..=2);
        assert!(decide(&mut policy, &[820, 0]).is_some());
        assert_eq!(decide(&mut policy, &[410, 410]), None);
    }
}
