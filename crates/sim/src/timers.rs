//! Timers of a core.

pub(crate) const NEVER_NS: u64 = u64::MAX;

/// Index of a timer. One timer for each background task follows from `Background` on.
#[derive(Clone, Copy)]
pub(crate) enum Timer {
    Interrupt,
    ReceivePaused,
    Transmitted,
    Tick,
    Stack,
    Admission,
    Background,
}

/// Timers of a core: a time for each, [`NEVER_NS`] if it is not set.
pub(crate) struct Timers {
    at_ns: Vec<u64>,
    /// Time of the earliest timer.
    next_ns: u64,
}

impl Timers {
    /// Creates the timers of a core without background tasks; none is set.
    pub(crate) fn new() -> Self {
        Self { at_ns: vec![NEVER_NS; Timer::Background as usize], next_ns: NEVER_NS }
    }

    /// Adds the timer of the next background task.
    pub(crate) fn add(&mut self, at_ns: u64) {
        self.at_ns.push(at_ns);
        self.find_next();
    }

    pub(crate) fn set(&mut self, timer: Timer, at_ns: u64) {
        self.at_ns[timer as usize] = at_ns;
        self.find_next();
    }

    #[inline]
    pub(crate) fn at_ns(&self, timer: Timer) -> u64 {
        self.at_ns[timer as usize]
    }

    /// Time of the earliest timer when it was last looked for.
    #[inline]
    pub(crate) fn next_ns(&self) -> u64 {
        self.next_ns
    }

    #[inline]
    pub(crate) fn find_next(&mut self) {
        self.next_ns = self.at_ns.iter().copied().min().unwrap_or(NEVER_NS);
    }

    /// Sets the timer at `index` a period later if it is due, and returns true then.
    #[inline]
    pub(crate) fn advance(&mut self, index: usize, now_ns: u64, period_ns: u64) -> bool {
        let is_due = self.at_ns[index] <= now_ns;
        if is_due {
            self.at_ns[index] += period_ns;
        }
        is_due
    }
}
