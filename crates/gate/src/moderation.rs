//! Interrupt moderation: minimum time between two interrupts of a device (Jonack and Murta: the
//! throttle of Intel's e1000).

const SECOND_NS: u64 = 1_000_000_000;

/// Interrupt throttle: minimum gap and last interrupt.
#[derive(Clone, Debug)]
pub(crate) struct InterruptModeration {
    min_gap_ns: u64,
    last_ns: Option<u64>,
}

impl InterruptModeration {
    pub(crate) fn new(interrupts_per_second: u32) -> Self {
        Self { min_gap_ns: SECOND_NS / u64::from(interrupts_per_second.max(1)), last_ns: None }
    }

    /// Records an interrupt.
    pub(crate) fn on_interrupt(&mut self, now_ns: u64) {
        self.last_ns = Some(now_ns);
    }

    /// Earliest time of the next interrupt.
    pub(crate) fn next_ns(&self, now_ns: u64) -> u64 {
        match self.last_ns {
            // A clock that stepped back must not silence the device.
            Some(last_ns) if last_ns <= now_ns => {
                now_ns.max(last_ns.saturating_add(self.min_gap_ns))
            }
            _ => now_ns,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn enforces_the_minimum_gap() {
        let mut moderation = InterruptModeration::new(8000);
        assert_eq!(moderation.next_ns(5), 5, "the first comes at once");
        moderation.on_interrupt(5);
        assert_eq!(moderation.next_ns(10), 125_005);
        assert_eq!(moderation.next_ns(200_000), 200_000);
        moderation.on_interrupt(200_000);
        assert_eq!(moderation.next_ns(100), 100, "the clock stepped back");
    }
}
