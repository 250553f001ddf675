//! Shares of a round: the data that it takes from the streams of each application.
//!
//! Data of one application costs the core time, and the others wait for the end of the round. So a
//! round takes a limited amount from all applications together, in equal shares.

use crate::daemon::application::Turn;

/// Cost that one round takes from the streams of all applications together, in bytes of a TCP
/// stream. On a veth pair, where each frame costs the most, a round then ends within some 300 us.
pub(super) const MAX_ROUND_BYTES: usize = 64 << 10;
/// The same while only one application is attached: nobody else waits for the end of the round, and
/// larger pieces cost less. On a veth pair such a round ends within 1 ms.
const MAX_LONE_ROUND_BYTES: usize = 256 << 10;
/// Minimum share of an application, in bytes: some full segments.
const MIN_SHARE_BYTES: usize = 8 << 10;

/// Shares of the current round.
pub(super) struct RoundShares {
    round: u64,
    /// Cost that this round may take.
    max_bytes: usize,
    /// Applications from which this round has taken data, and the last one.
    senders: usize,
    last_senders: usize,
}

impl Default for RoundShares {
    fn default() -> Self {
        Self { round: 0, max_bytes: MAX_ROUND_BYTES, senders: 0, last_senders: 0 }
    }
}

impl RoundShares {
    /// Begins a round while this number of applications is attached.
    pub(super) fn begin_round(&mut self, attached: usize) {
        self.round += 1;
        self.max_bytes = if attached <= 1 { MAX_LONE_ROUND_BYTES } else { MAX_ROUND_BYTES };
        self.last_senders = std::mem::take(&mut self.senders);
    }

    /// Bytes that this round may still take from an application.
    pub(super) fn left_for(&self, turn: &Turn) -> usize {
        let share = (self.max_bytes / self.last_senders.max(1)).max(MIN_SHARE_BYTES);
        share.saturating_sub(turn.taken_in(self.round))
    }

    /// Records that this round has taken data from an application.
    pub(super) fn note_taken(&mut self, turn: &mut Turn, bytes: usize) {
        if bytes > 0 {
            self.senders += usize::from(turn.taken_in(self.round) == 0);
            turn.note_taken(self.round, bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn senders_of_the_last_round_share_equally() {
        let (mut shares, mut turns) = (RoundShares::default(), [Turn::default(), Turn::default()]);
        shares.begin_round(2);
        assert_eq!(shares.left_for(&turns[0]), MAX_ROUND_BYTES);
        for turn in &mut turns {
            shares.note_taken(turn, 100);
            shares.note_taken(turn, 0);
            shares.note_taken(turn, 200);
            assert_eq!(shares.left_for(turn), MAX_ROUND_BYTES - 300);
        }
        shares.begin_round(2);
        assert_eq!(shares.left_for(&turns[0]), MAX_ROUND_BYTES / 2);
        shares.note_taken(&mut turns[0], MAX_ROUND_BYTES);
        assert_eq!(shares.left_for(&turns[0]), 0);
        assert_eq!(shares.left_for(&turns[1]), MAX_ROUND_BYTES / 2);
        shares.begin_round(2);
        assert_eq!(shares.left_for(&turns[0]), MAX_ROUND_BYTES);
        shares.begin_round(1);
        assert_eq!(shares.left_for(&turns[0]), MAX_LONE_ROUND_BYTES);
    }
}
