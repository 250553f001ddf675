//! Return to the congestion state before a recovery that turns out to be needless: the segments
//! were late or reordered, not lost (RFC 3522, RFC 3708, RFC 4015, RFC 5682).

use super::flight::{AckArrival, AckProgress};
use super::{Recovery, RecoveryPhase};
use crate::tcp::congestion::CongestionController;
use crate::tcp::identity::milliseconds;
use crate::tcp::send::SendState;
use crate::tcp::seq::Seq;

/// Detection of a needless time-out by what is acknowledged after it (F-RTO with SACK, RFC 5682
/// section 3.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Frto {
    /// Not in use: the lost segments are sent again.
    Off,
    /// The first segment was sent again; its acknowledgement has not arrived (step 2).
    AwaitsAck,
    /// New data goes before retransmissions until the next acknowledgement (step 3).
    SendsNewData,
}

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
    frto: Frto,
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

    /// True if nothing was sent again, not even by a tail probe.
    fn has_resent_nothing(&self) -> bool {
        self.resent_ms.is_none() && self.resent_bytes == 0
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
        let undo = Undo { controller, start, end, resent_bytes, resent_ms: None, frto: Frto::Off };
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

    /// Begins to watch whether a time-out was needless.
    pub(super) fn begin_frto(&mut self) {
        if let Some(undo) = self.undo_mut() {
            undo.frto = Frto::AwaitsAck;
        }
    }

    /// Goes on with the retransmission of lost segments.
    pub(super) fn end_frto(&mut self) {
        if let Some(undo) = self.undo_mut() {
            undo.frto = Frto::Off;
        }
    }

    /// True while new data goes before retransmissions (RFC 5682 section 3.1, step 2.b).
    #[inline]
    pub(crate) fn prefers_new_data(&self) -> bool {
        let undo = self.after_loss.as_ref().and_then(|after_loss| after_loss.undo.as_ref());
        undo.is_some_and(|undo| undo.frto == Frto::SendsNewData)
    }

    /// Goes on with the retransmission of lost segments if no new data was sent: the application or
    /// the Nagle algorithm has nothing for now. `nxt` is SND.NXT.
    pub(crate) fn on_no_new_data(&mut self, nxt: Seq) {
        if nxt == self.end {
            self.end_frto();
        }
    }

    /// Advances the detection of a needless time-out by an acknowledgement; returns true when the
    /// time-out was needless.
    fn judge_by_frto(&mut self, send: &SendState, progress: &AckProgress, duplicate: bool) -> bool {
        let end = self.end;
        let Some(undo) = self.undo_mut() else { return false };
        let new_bytes = send.unsent().min(send.mss.into());
        let has_new_data = new_bytes > 0 && new_bytes <= send.usable_window();
        match undo.frto {
            Frto::AwaitsAck if progress.acked > 0 => {
                let may_send = send.una.is_before(end) && has_new_data;
                undo.frto = if may_send { Frto::SendsNewData } else { Frto::Off };
            }
            Frto::SendsNewData => {
                if progress.first_original.is_some_and(|start| start.is_before(end)) {
                    return true;
                }
                if duplicate || progress.sacked > 0 {
                    undo.frto = Frto::Off;
                }
            }
            Frto::Off | Frto::AwaitsAck => {}
        }
        false
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

    /// Returns to the state before the recovery if the acknowledgement `ack` with its `progress`
    /// shows that it was needless. Returns true when the state was restored.
    pub(crate) fn undo_if_needless(
        &mut self,
        arrival: &AckArrival,
        ack: Seq,
        send: &SendState,
        progress: &AckProgress,
        duplicate: bool,
    ) -> bool {
        let is_recovering = self.phase != RecoveryPhase::Open;
        // Acknowledgements of one burst report a loss and then the delivery, before any output.
        let is_loss_gone = self.phase == RecoveryPhase::FastRecovery
            && progress.delivered > 0
            && self.lost_bytes() == 0;
        let is_needless = self.undo_mut().is_some_and(|undo| {
            is_loss_gone && undo.has_resent_nothing()
                || progress.dsack.is_some_and(|range| undo.count_duplicate(range))
                || progress.acked > 0 && is_recovering && undo.is_answer_to_original(arrival, ack)
        });
        if !is_needless && !self.judge_by_frto(send, progress, duplicate) {
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
