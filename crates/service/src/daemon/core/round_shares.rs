//! Shares of a round: the data that it takes from the streams of each application.
//!
//! Data of one application costs the core time, and the others wait for the end of the round. So a
//! round takes a limited amount from all applications together, in equal shares.

use crate::daemon::application::Turn;

/// Cost that one round takes from the streams of all applications together, in bytes of a TCP
/// stream. On a veth pair, where each frame costs the most, a round then ends within some 300 us.
pub(super) const MAX_ROUND_BYTES: usize = 64 << 10;
/// Minimum share of an application, in bytes: some full segments.
const MIN_SHARE_BYTES: usize = 8 << 10;

/// Shares of the current round.
#[derive(Default)]
pub(super) struct RoundShares {
    round: u64,
    /// Applications from which this round has taken data, and the last one.
    senders: usize,
    last_senders: usize,
}

impl RoundShares {
    /// Begins a round.
    pub(super) fn begin_round(&mut self) {
        self.round += 1;
        self.last_senders = std::mem::take(&mut self.senders);
    }

    /// Bytes that this round may still take from an application.
    pub(super) fn left_for(&self, turn: &Turn) -> usize {
        let share = (MAX_ROUND_BYTES / self.last_senders.max(1)).max(MIN_SHARE_BYTES);
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
        shares.begin_round();
        assert_eq!(shares.left_for(&turns[0]), MAX_ROUND_BYTES);
        for turn in &mut turns {
            shares.note_taken(turn, 100);
            shares.note_taken(turn, 0);
            shares.note_taken(turn, 200);
            assert_eq!(shares.left_for(turn), MAX_ROUND_BYTES - 300);
        }
        shares.begin_round();
        assert_eq!(shares.left_for(&turns[0]), MAX_ROUND_BYTES / 2);
        shares.note_taken(&mut turns[0], MAX_ROUND_BYTES);
        assert_eq!(shares.left_for(&turns[0]), 0);
        assert_eq!(shares.left_for(&turns[1]), MAX_ROUND_BYTES / 2);
        shares.begin_round();
        assert_eq!(shares.left_for(&turns[0]), MAX_ROUND_BYTES);
    }
}
