//! When to wake an application that sleeps.
//!
//! A program that is woken for each request of many peers pays a context switch
//! for each. As cards put their interrupts off, an application that was just
//! woken is not woken again at once: what comes meanwhile comes together. Few
//! peers that ask, wait and ask again are not kept waiting: whatever comes from
//! one of the sockets that it was told of lately does so at once.

/// So many sockets are few.
const FEW: usize = 4;

/// When an application was woken, and for what.
#[derive(Clone, Copy, Debug)]
pub(super) struct Coalescing {
    interval_ns: u64,
    woken_ns: Option<u64>,
    /// The last sockets that it was told of, the latest first.
    lately: [Option<u32>; FEW],
    /// Since it was awake it was told of another than those.
    is_crowd: bool,
    /// Since it was awake it was answered.
    is_answer: bool,
}

impl Coalescing {
    pub(super) fn new(interval_ns: u64) -> Self {
        let lately = [None; FEW];
        Self { interval_ns, woken_ns: None, lately, is_crowd: false, is_answer: false }
    }

    /// The application was told of a socket, or was answered.
    pub(super) fn on_told(&mut self, place: Option<u32>) {
        self.is_answer |= place.is_none();
        if place.is_some() && !self.lately.contains(&place) {
            self.is_crowd = true;
            self.lately.rotate_right(1);
            self.lately[0] = place;
        }
    }

    /// When to wake it: now, or then.
    pub(super) fn wake_at(&self, now_ns: u64) -> u64 {
        let waits = self.is_crowd && !self.is_answer;
        match self.woken_ns {
            Some(woken_ns) if waits => now_ns.max(woken_ns + self.interval_ns),
            _ => now_ns,
        }
    }

    /// It is woken.
    pub(super) fn on_wake(&mut self, now_ns: u64) {
        self.woken_ns = Some(now_ns);
        self.on_awake();
    }

    /// It is awake, and sees what it was told.
    pub(super) fn on_awake(&mut self) {
        (self.is_crowd, self.is_answer) = (false, false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_peers_wake_it_once_in_a_while_and_few_each_time() {
        let mut coalescing = Coalescing::new(50);
        coalescing.on_told(Some(1));
        assert_eq!(coalescing.wake_at(100), 100, "it slept for long");
        coalescing.on_wake(100);
        coalescing.on_told(Some(1));
        assert_eq!(coalescing.wake_at(110), 110, "the same peer again");
        coalescing.on_wake(110);
        coalescing.on_told(Some(2));
        assert_eq!(coalescing.wake_at(120), 160, "another one");
        assert_eq!(coalescing.wake_at(170), 170, "after the interval");
        coalescing.on_told(None);
        assert_eq!(coalescing.wake_at(120), 120, "somebody waits for an answer");
        coalescing.on_wake(120);
        coalescing.on_told(Some(1));
        coalescing.on_told(Some(2));
        assert_eq!(coalescing.wake_at(130), 130, "they are but two");
        coalescing.on_wake(130);
        for place in (3..8).chain(1..8) {
            coalescing.on_told(Some(place));
            assert_eq!(coalescing.wake_at(140), 180, "too many for that");
            coalescing.on_wake(130);
        }
    }

    #[test]
    fn without_an_interval_nothing_waits() {
        let mut coalescing = Coalescing::new(0);
        coalescing.on_wake(100);
        coalescing.on_told(Some(2));
        assert_eq!(coalescing.wake_at(100), 100);
    }
}
