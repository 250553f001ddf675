//! Load measurements: the input of admission control.

/// Load measurements since the last call of
/// [`Admission::on_period`](super::Admission::on_period).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pressure {
    /// Packets served: read by an application, forwarded or replied to.
    pub served: u64,
    /// Packets dropped after work was spent on them, because a device ring or a socket queue
    /// was full.
    pub late_drops: u64,
    /// Fill level of the fullest queue to an application, in percent.
    pub level_percent: u32,
    /// Share of the receive turns after which admitted packets were left on the device, in percent.
    /// No work was spent on these packets yet.
    pub backlog_percent: u32,
    /// Arriving packets that were lost unexamined, from any source, per thousand. Admitting
    /// fewer packets leaves more time to empty the receive ring.
    pub rx_missed_permille: u32,
}

impl Pressure {
    /// True if packets above the last rank would gain from fewer admitted packets.
    pub(super) fn is_missing_packets(&self) -> bool {
        self.rx_missed_permille >= MISSING_PERMILLE
    }

    /// True if so many packets were lost unexamined that the total is reduced at once.
    pub(super) fn is_overrun(&self) -> bool {
        self.rx_missed_permille >= OVERRUN_PERMILLE
    }

    /// True if work was spent on packets that were then dropped. Refusing them early saves that
    /// work, whoever sent them.
    pub(super) fn has_late_losses(&self) -> bool {
        self.late_drops > 0
    }

    /// True if packets were lost for lack of space or time.
    pub(super) fn has_losses(&self) -> bool {
        self.late_drops > 0 || self.is_overrun()
    }
}

/// Share of packets lost unexamined at which the total is reduced. Ranks above the last
/// lose the same share.
const MISSING_PERMILLE: u32 = 3;
/// Share of packets lost unexamined that requires an immediate reduction.
const OVERRUN_PERMILLE: u32 = 100;

/// Fewer packets than this are no backlog, even if the device was never found empty: they arrived
/// while the thread did not run.
const MIN_BACKLOG_PACKETS: u64 = 16;

/// Counter of receive turns between two periods of admission.
///
/// A poll that finds packets says nothing: under a flood each poll does, whatever room is left. Only
/// packets left after a full quota are a backlog.
#[derive(Clone, Copy, Debug, Default)]
pub struct BacklogMeter {
    received: u64,
    turns: u64,
    emptied: u64,
}

impl BacklogMeter {
    /// Records a receive turn. `emptied` is true if the device was found without admitted packets
    /// in the turn, so that the server keeps up with what is admitted.
    #[inline]
    pub fn on_turn(&mut self, received: usize, emptied: bool) {
        self.received += received as u64;
        self.turns += 1;
        self.emptied += u64::from(emptied);
    }

    /// Replaces the number of turns that emptied the device, if the device knows better.
    pub fn set_emptied(&mut self, turns: u64) {
        self.emptied = turns;
    }

    /// Returns the share of the turns since the last call that left packets, in percent.
    pub fn take(&mut self) -> u32 {
        let Self { received, turns, emptied } = std::mem::take(self);
        if received < MIN_BACKLOG_PACKETS {
            return 0;
        }
        (100 * turns.saturating_sub(emptied) / turns.max(1)) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_packets_left_after_a_full_quota_are_a_backlog() {
        let mut meter = BacklogMeter::default();
        meter.on_turn(64, false);
        meter.on_turn(64, false);
        assert_eq!(meter.take(), 100);
        meter.on_turn(64, false);
        meter.on_turn(64, true);
        assert_eq!(meter.take(), 50);
        meter.on_turn(15, false);
        assert_eq!(meter.take(), 0, "too few packets");
        meter.on_turn(64, false);
        meter.set_emptied(2);
        assert_eq!(meter.take(), 0, "the device was emptied before it polled");
    }
}
