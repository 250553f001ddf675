//! Place of an application in the lists of its core.

/// Lists of its core that an application is in.
#[derive(Default)]
pub(in crate::daemon) struct Turn {
    /// Its commands are polled in every round.
    pub(in crate::daemon) is_polled: bool,
    /// It has been asked for a wake-up with its next command.
    pub(in crate::daemon) is_asleep: bool,
    /// Its notifications are published at the end of the round.
    pub(in crate::daemon) is_notified: bool,
    /// Its exit is noted.
    pub(in crate::daemon) is_exit_noted: bool,
    /// Time of its last command, or of its last wake-up.
    pub(in crate::daemon) last_command_ns: u64,
    /// Bytes taken from its streams in a round, and the number of that round.
    taken: (u64, usize),
}

impl Turn {
    /// Bytes taken from its streams in this round.
    pub(in crate::daemon) fn taken_in(&self, round: u64) -> usize {
        if self.taken.0 == round { self.taken.1 } else { 0 }
    }

    /// Adds bytes taken in this round.
    pub(in crate::daemon) fn note_taken(&mut self, round: u64, bytes: usize) {
        self.taken = (round, self.taken_in(round) + bytes);
    }
}
