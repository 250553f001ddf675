//! Wake-up coalescing: the time to wake an application that sleeps.
//!
//! An application that is woken for each request of many peers pays a context switch for each.
//! As NICs coalesce interrupts, an application that was just woken is not woken again within
//! an interval, and the events of the interval arrive together. A few peers that alternate
//! requests and answers are not delayed: an event on a recently notified socket wakes the
//! application at once.

/// Number of recently notified sockets whose events wake the application at once.
const MAX_RECENT_SOCKETS: usize = 4;

/// Last wake-up of an application, and the notifications since.
#[derive(Clone, Copy, Debug)]
pub(super) struct WakeCoalescing {
    interval_ns: u64,
    woken_ns: Option<u64>,
    /// Slots of the last sockets notified, the latest first.
    recent_slots: [Option<u32>; MAX_RECENT_SOCKETS],
    /// Since it was last awake, the application was notified of a socket outside `recent_slots`.
    has_other_sockets: bool,
    /// Since it was last awake, the application was sent an answer.
    has_answer: bool,
}

impl WakeCoalescing {
    pub(super) fn new(interval_ns: u64) -> Self {
        let recent_slots = [None; MAX_RECENT_SOCKETS];
        Self {
            interval_ns,
            woken_ns: None,
            recent_slots,
            has_other_sockets: false,
            has_answer: false,
        }
    }

    /// Records a notification of a socket, or of an answer with `None`.
    pub(super) fn on_notified(&mut self, slot: Option<u32>) {
        self.has_answer |= slot.is_none();
        if slot.is_some() && !self.recent_slots.contains(&slot) {
            self.has_other_sockets = true;
            self.recent_slots.rotate_right(1);
            self.recent_slots[0] = slot;
        }
    }

    /// Time to wake the application: now, or when the interval is over.
    pub(super) fn wake_at(&self, now_ns: u64) -> u64 {
        let waits = self.has_other_sockets && !self.has_answer;
        match self.woken_ns {
            Some(woken_ns) if waits => now_ns.max(woken_ns + self.interval_ns),
            _ => now_ns,
        }
    }

    /// Records a wake-up.
    pub(super) fn on_wake(&mut self, now_ns: u64) {
        self.woken_ns = Some(now_ns);
        self.on_awake();
    }

    /// Records that the application is awake and sees its notifications.
    pub(super) fn on_awake(&mut self) {
        (self.has_other_sockets, self.has_answer) = (false, false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn coalesces_wakeups_only_with_many_active_sockets() {
        let mut coalescing = WakeCoalescing::new(50);
        coalescing.on_notified(Some(1));
        assert_eq!(coalescing.wake_at(100), 100, "no recent wake-up");
        coalescing.on_wake(100);
        coalescing.on_notified(Some(1));
        assert_eq!(coalescing.wake_at(110), 110, "the same socket again");
        coalescing.on_wake(110);
        coalescing.on_notified(Some(2));
        assert_eq!(coalescing.wake_at(120), 160, "another socket");
        assert_eq!(coalescing.wake_at(170), 170, "after the interval");
        coalescing.on_notified(None);
        assert_eq!(coalescing.wake_at(120), 120, "an answer is never delayed");
        coalescing.on_wake(120);
        coalescing.on_notified(Some(1));
        coalescing.on_notified(Some(2));
        assert_eq!(coalescing.wake_at(130), 130, "two sockets only");
        coalescing.on_wake(130);
        for place in (3..8).chain(1..8) {
            coalescing.on_notified(Some(place));
            assert_eq!(coalescing.wake_at(140), 180, "more sockets than are remembered");
            coalescing.on_wake(130);
        }
    }

    #[test]
    fn zero_interval_wakes_at_once() {
        let mut coalescing = WakeCoalescing::new(0);
        coalescing.on_wake(100);
        coalescing.on_notified(Some(2));
        assert_eq!(coalescing.wake_at(100), 100);
    }
}
