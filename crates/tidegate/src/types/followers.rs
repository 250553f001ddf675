//! Leader and followers: of the threads that wait for sockets, one sleeps on the device, or on the
//! daemon's notifications, and the others, its followers, sleep on their doorbells until the leader
//! finds something for them. If all slept on the device, each packet would wake all.
//!
//! A leader that leaves its wait need not wake a follower: most threads come back in a moment, and
//! lead again. A watch thread wakes a follower if no thread has led between two of its looks.

use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tidegate_memory::Doorbell;

/// Time between two looks of the watch thread.
const WATCH_INTERVAL: Duration = Duration::from_millis(1);

/// Mean time between two waits of a thread, above which a thread that leaves its wait wakes a
/// follower to lead: the wake-up costs less than the packets' delay.
const MAX_SHORT_ABSENCE_NS: u64 = 200_000;

/// Weight of the past in the mean time between two waits: 7 of 8.
const MEAN_SHIFT: u32 = 3;

thread_local! {
    /// Time at which this thread's last wait ended.
    static WAIT_END_NS: Cell<Option<u64>> = const { Cell::new(None) };
}

/// Threads that wait without leading.
#[derive(Default)]
pub(crate) struct Followers {
    shared: Arc<Shared>,
    /// Mean time between two waits of a thread.
    absence_ns: u64,
    has_watch: bool,
}

/// State shared with the watch thread.
#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    /// Number of threads that sleep as leaders.
    leaders: AtomicUsize,
    /// Number of times that a thread has begun to lead.
    turns: AtomicUsize,
}

#[derive(Default)]
struct State {
    sleeping: Vec<Arc<Doorbell>>,
    /// The watch thread is to look for a leader.
    is_watching: bool,
    is_over: bool,
}

impl Followers {
    /// Adds a thread that sleeps on `bell` only. Returns false if the thread has to lead, since the
    /// process cannot have a watch thread.
    pub(crate) fn enter(&mut self, bell: &Arc<Doorbell>) -> bool {
        if !self.start_watch() {
            return false;
        }
        self.shared.lock().sleeping.push(Arc::clone(bell));
        if !self.has_leader() {
            self.shared.watch();
        }
        true
    }

    /// Removes a thread.
    pub(crate) fn leave(&mut self, bell: &Arc<Doorbell>) {
        self.shared.lock().sleeping.retain(|other| !Arc::ptr_eq(other, bell));
    }

    /// Counts the leaders that sleep now. Without one, the watch thread wakes a follower after one to
    /// two [`WATCH_INTERVAL`]s.
    pub(crate) fn set_leaders(&mut self, leaders: usize) {
        let before = self.shared.leaders.swap(leaders, Ordering::AcqRel);
        if leaders > before {
            self.shared.turns.fetch_add(1, Ordering::Relaxed);
        }
        if leaders == 0 && self.has_watch {
            self.shared.watch();
        }
    }

    /// Wakes the follower that slept last, if there is any.
    pub(crate) fn wake_one(&self) {
        if let Some(bell) = self.shared.lock().sleeping.last() {
            bell.ring();
        }
    }

    /// Records that this thread waits, once threads have followed.
    pub(crate) fn on_wait(&mut self, now_ns: impl FnOnce() -> u64) {
        if let Some(end_ns) = self.has_watch.then(|| WAIT_END_NS.take()).flatten() {
            let absence_ns = now_ns().saturating_sub(end_ns);
            self.absence_ns -= self.absence_ns >> MEAN_SHIFT;
            self.absence_ns += absence_ns >> MEAN_SHIFT;
        }
    }

    /// Records that this thread ends its wait, and wakes a follower to lead if the threads come
    /// back late.
    pub(crate) fn on_wait_end(&mut self, now_ns: impl FnOnce() -> u64) {
        if !self.has_watch {
            return;
        }
        let now_ns = now_ns();
        self.on_wait(|| now_ns);
        WAIT_END_NS.set(Some(now_ns));
        if self.are_absences_long() && !self.has_leader() {
            self.wake_one();
        }
    }

    /// True if a thread that has found nothing for it is to follow: a leader, or a thread that it
    /// `has_rung`, and that leads when it waits again.
    pub(crate) fn are_led(&self, has_rung: bool) -> bool {
        self.has_leader() || has_rung && !self.are_absences_long()
    }

    fn has_leader(&self) -> bool {
        self.shared.leaders.load(Ordering::Relaxed) > 0
    }

    /// True if threads come back late after their waits.
    fn are_absences_long(&self) -> bool {
        self.absence_ns > MAX_SHORT_ABSENCE_NS
    }

    fn start_watch(&mut self) -> bool {
        if !self.has_watch {
            let shared = Arc::clone(&self.shared);
            let thread = std::thread::Builder::new().name("leader-watch".to_owned());
            self.has_watch = thread.spawn(move || shared.run_watch()).is_ok();
        }
        self.has_watch
    }
}

impl Drop for Followers {
    fn drop(&mut self) {
        self.shared.lock().is_over = true;
        self.shared.changed.notify_one();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has the watch thread look for a leader, if anybody follows.
    fn watch(&self) {
        let mut state = self.lock();
        if !state.sleeping.is_empty() && !std::mem::replace(&mut state.is_watching, true) {
            drop(state);
            self.changed.notify_one();
        }
    }

    fn run_watch(&self) {
        let mut turns_before = 0;
        let mut state = self.lock();
        while !state.is_over {
            if !state.is_watching {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            let waited = self.changed.wait_timeout(state, WATCH_INTERVAL);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
            let turns = self.turns.load(Ordering::Relaxed);
            let has_changed = std::mem::replace(&mut turns_before, turns) != turns;
            match state.sleeping.last() {
                Some(_) if has_changed => {}
                Some(bell) if self.leaders.load(Ordering::Acquire) == 0 => bell.ring(),
                _ => state.is_watching = false,
            }
        }
    }
}

#[cfg(test)]
impl Followers {
    /// Numbers of leaders and of followers that sleep.
    pub(crate) fn sleeping(&self) -> (usize, usize) {
        (self.shared.leaders.load(Ordering::Relaxed), self.shared.lock().sleeping.len())
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;

    fn follow(followers: &mut Followers) -> Arc<Doorbell> {
        let bell = Arc::new(Doorbell::new().unwrap());
        bell.arm();
        assert!(followers.enter(&bell));
        bell
    }

    fn is_rung(bell: &Doorbell, seconds: i64) -> bool {
        let limit = Timespec { tv_sec: seconds, tv_nsec: 0 };
        poll(&mut [PollFd::new(bell, PollFlags::IN)], Some(&limit)).unwrap() > 0
    }

    #[test]
    fn watch_wakes_a_follower_when_no_thread_leads() {
        let mut followers = Followers::default();
        followers.set_leaders(1);
        let bells = [follow(&mut followers), follow(&mut followers)];
        followers.set_leaders(0);
        assert!(is_rung(&bells[1], 20), "the one that slept last");
        followers.leave(&bells[1]);
        assert!(is_rung(&bells[0], 20), "still nobody leads");
    }

    #[test]
    fn end_of_a_wait_wakes_a_follower_once_threads_come_back_late() {
        let mut followers = Followers::default();
        followers.set_leaders(1);
        let bell = follow(&mut followers);
        let mut now_ns = 0;
        let mut end_wait = |followers: &mut Followers, absence_ns| {
            now_ns += absence_ns;
            followers.on_wait_end(|| now_ns);
        };
        end_wait(&mut followers, 0);
        (0..100).for_each(|_| end_wait(&mut followers, MAX_SHORT_ABSENCE_NS / 2));
        assert!(!followers.are_absences_long());
        (0..100).for_each(|_| end_wait(&mut followers, 2 * MAX_SHORT_ABSENCE_NS));
        assert!(followers.are_absences_long());
        assert!(!is_rung(&bell, 0), "a thread leads");
        followers.shared.leaders.store(0, Ordering::Relaxed);
        end_wait(&mut followers, 0);
        assert!(is_rung(&bell, 0));
    }
}
