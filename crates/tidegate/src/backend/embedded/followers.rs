//! Leader and followers: of the threads that wait for sockets, one sleeps on the device and runs the
//! stack, and the others, its followers, sleep on their doorbells until the leader finds something
//! for them. If all slept on the device, each packet would wake all.
//!
//! A leader that leaves its wait need not wake a follower: most threads come back in a moment, and
//! lead again. A watch thread wakes a follower if no thread has led for [`MAX_ABSENCE`].

use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tidegate_memory::Doorbell;

/// Time after which the watch thread wakes a follower to lead.
const MAX_ABSENCE: Duration = Duration::from_millis(1);

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
pub(super) struct Followers {
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
    pub(super) fn enter(&mut self, bell: &Arc<Doorbell>) -> bool {
        if !self.start_watch() {
            return false;
        }
        self.shared.lock().sleeping.push(Arc::clone(bell));
        true
    }

    /// Removes a thread.
    pub(super) fn leave(&mut self, bell: &Arc<Doorbell>) {
        self.shared.lock().sleeping.retain(|other| !Arc::ptr_eq(other, bell));
    }

    /// Counts the leaders that sleep now. Without one, the watch thread wakes a follower after
    /// [`MAX_ABSENCE`].
    pub(super) fn set_leaders(&mut self, leaders: usize) {
        self.shared.leaders.store(leaders, Ordering::Release);
        if leaders == 0 && self.has_watch {
            self.shared.watch();
        }
    }

    /// Wakes the follower that slept last, if there is any.
    pub(super) fn wake_one(&self) {
        if let Some(bell) = self.shared.lock().sleeping.last() {
            bell.ring();
        }
    }

    /// Records that this thread waits, as long as threads follow.
    pub(super) fn on_wait(&mut self, now_ns: u64) {
        if let Some(end_ns) = self.has_watch.then(|| WAIT_END_NS.take()).flatten() {
            let absence_ns = now_ns.saturating_sub(end_ns);
            self.absence_ns -= self.absence_ns >> MEAN_SHIFT;
            self.absence_ns += absence_ns >> MEAN_SHIFT;
        }
    }

    /// Records that this thread ends its wait, and wakes a follower to lead if the threads come
    /// back late.
    pub(super) fn on_wait_end(&mut self, now_ns: u64) {
        if !self.has_watch {
            return;
        }
        WAIT_END_NS.set(Some(now_ns));
        if self.are_absences_long() && self.shared.leaders.load(Ordering::Relaxed) == 0 {
            self.wake_one();
        }
    }

    /// True if threads come back late after their waits.
    pub(super) fn are_absences_long(&self) -> bool {
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
            self.changed.notify_one();
        }
    }

    fn run_watch(&self) {
        let mut state = self.lock();
        while !state.is_over {
            if !state.is_watching {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            let waited = self.changed.wait_timeout(state, MAX_ABSENCE);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
            match state.sleeping.last() {
                Some(bell) if self.leaders.load(Ordering::Acquire) == 0 => bell.ring(),
                _ => state.is_watching = false,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tidegate_device::mem::{MemConfig, wire};

    use super::*;
    use crate::{AddressProbe, Net, NetConfig, UdpSocket};

    #[test]
    fn one_of_the_waiting_threads_leads() {
        let (device, _peer) = wire(&MemConfig::default()).unwrap();
        let config = NetConfig::new(device)
            .address("192.0.2.1/24".parse().unwrap())
            .address_probe(AddressProbe::Off);
        let net = Net::open(config).unwrap();
        let sockets: Vec<_> =
            (0..5).map(|n| UdpSocket::bind(&net, ("192.0.2.1", 7000 + n)).unwrap()).collect();
        let waiting = || {
            let core = net.embedded().unwrap().lock();
            let shared = &core.followers.shared;
            (shared.leaders.load(Ordering::Relaxed), shared.lock().sleeping.len())
        };
        std::thread::scope(|scope| {
            for socket in &sockets {
                scope.spawn(|| socket.recv_from(&mut [0; 16]).unwrap());
            }
            while waiting() != (1, 4) {
                std::thread::yield_now();
            }
            for (n, socket) in sockets.iter().enumerate() {
                socket.send_to(b"end", ("192.0.2.1", 7000 + n as u16)).unwrap();
            }
        });
        assert_eq!(waiting(), (0, 0));
    }
}
