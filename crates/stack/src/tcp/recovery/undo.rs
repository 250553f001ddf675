//! Return to the congestion state before a recovery that turns out to be needless: the segments
//! were late or reordered, not lost (RFC 3522, RFC 3708, RFC 4015).

use super::flight::AckArrival;
use super::{Recovery, RecoveryPhase};
use crate::tcp::congestion::CongestionController;
use crate::tcp::identity::milliseconds;
use crate::tcp::seq::Seq;

/// State to return to while a recovery may be needless.
#[derive(Debug)]
pub(super) struct Undo {
    controller: CongestionController,
    /// Sequence numbers that were in flight when the recovery began.
    start: Seq,
    end: Seq,
    /// Retransmitted bytes that no D-SACK has reported as duplicates.
    resent_bytes: u32,
    /// Time of the first retransmission in milliseconds.
    resent_ms: Option<u32>,
}

impl Undo {
    /// Counts a duplicate range; returns true when every retransmission was a duplicate
    /// (RFC 3708 section 3).
    fn count_duplicate(&mut self, (start, end): (Seq, Seq)) -> bool {
        let is_of_recovery = self.start.is_at_or_before(start) && end.is_at_or_before(self.end);
        if is_of_recovery && self.resent_ms.is_some() && self.resent_bytes > 0 {
            self.resent_bytes = self.resent_bytes.saturating_sub(end.since(start));
            return self.resent_bytes == 0;
        }
        false
    }

    /// True when an acknowledgement of new data is for a segment that was sent before the first
    /// retransmission (Eifel detection, RFC 3522 section 3.2).
    fn is_answer_to_original(&self, arrival: &AckArrival, ack: Seq) -> bool {
        let is_echo_older = arrival
            .echoed_ms
            .zip(self.resent_ms)
            .is_some_and(|(echoed, resent)| Seq(echoed).is_before(Seq(resent)));
        is_echo_older && ack.is_after(self.start)
    }
}

impl Recovery {
    /// Notes the state before a recovery, with the sequence numbers `start..end` in flight.
    pub(super) fn begin_undo(&mut self, start: Seq, end: Seq) {
        // A tail probe in flight counts, since a D-SACK may report the probe.
        let resent_bytes = self.flight.as_ref().map_or(0, |flight| flight.resent_bytes());
        let controller = self.controller;
        let undo = Undo { controller, start, end, resent_bytes, resent_ms: None };
        self.after_loss.get_or_insert_default().undo = Some(undo);
    }

    #[inline]
    fn undo_mut(&mut self) -> Option<&mut Undo> {
        self.after_loss.as_mut()?.undo.as_mut()
    }

    /// True while a recovery may turn out to be needless.
    #[inline]
    pub(crate) fn may_undo(&self) -> bool {
        self.after_loss.as_ref().is_some_and(|after_loss| after_loss.undo.is_some())
    }

    /// Keeps the present state, needless or not: the window has a reason of its own now.
    pub(crate) fn forget_undo(&mut self) {
        if let Some(after_loss) = &mut self.after_loss {
            after_loss.undo = None;
            if after_loss.mtu_search.is_none() {
                self.after_loss = None;
            }
        }
    }

    /// Notes the retransmission of `start..end`.
    pub(crate) fn on_resent(&mut self, now_ns: u64, start: Seq, end: Seq) {
        if let Some(undo) = self.undo_mut()
            && start.is_before(undo.end)
        {
            undo.resent_bytes = undo.resent_bytes.saturating_add(end.since(start));
            undo.resent_ms.get_or_insert(milliseconds(now_ns));
        }
    }

    /// Returns to the state before the recovery if the acknowledgement shows that it was needless.
    /// `dsack` is the duplicate range that the acknowledgement reports, `progressed` tells that it
    /// acknowledges new data. Returns true when the state was restored.
    pub(crate) fn undo_if_needless(
        &mut self,
        arrival: &AckArrival,
        ack: Seq,
        dsack: Option<(Seq, Seq)>,
        progressed: bool,
    ) -> bool {
        let is_recovering = self.phase != RecoveryPhase::Open;
        let is_needless = self.undo_mut().is_some_and(|undo| {
            dsack.is_some_and(|range| undo.count_duplicate(range))
                || progressed && is_recovering && undo.is_answer_to_original(arrival, ack)
        });
        if !is_needless {
            return false;
        }
        let undo = self.after_loss.as_mut().and_then(|after_loss| after_loss.undo.take());
        let Some(undo) = undo else { return false };
        let cwnd = self.controller.window.cwnd.max(undo.controller.window.cwnd);
        self.controller = undo.controller;
        self.controller.window.cwnd = cwnd;
        if self.phase == RecoveryPhase::Loss
            && let Some(flight) = &mut self.flight
        {
            flight.unmark_lost();
        }
        self.phase = RecoveryPhase::Open;
        self.duplicate_acks = 0;
        true
    }
}
