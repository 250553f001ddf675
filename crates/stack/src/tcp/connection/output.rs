//! Output of a connection: selects the next segment to send (RFC 9293 sections 3.7.4 and 3.8.6.2.1).

use tidegate_wire::tcp::TcpFlags;

use super::Connection;
use crate::tcp::buffers::TcpShared;
use crate::tcp::flags::ConnFlags;
use crate::tcp::options::OptionBytes;
use crate::tcp::recovery::{RecoveryPhase, SentSegment};
use crate::tcp::segment::OutSegment;
use crate::tcp::seq::Seq;
use crate::tcp::socket::TcpState;
use crate::tcp::timers::RtxTimer;

/// Segments sent on duplicate acknowledgements before a loss is certain (limited transmit,
/// RFC 3042).
const LIMITED_TRANSMIT: u32 = 2;

impl Connection {
    /// Returns the next segment to send on a path with an MTU of `mtu` bytes; `None` when there is
    /// nothing to send now.
    pub(crate) fn poll_output(
        &mut self,
        now_ns: u64,
        mtu: usize,
        shared: &mut TcpShared,
    ) -> Option<OutSegment> {
        let out = match self.state {
            TcpState::Closed => self.reset_out(),
            TcpState::SynSent | TcpState::SynReceived => self.syn_out(now_ns, shared),
            TcpState::TimeWait | TcpState::FinWait2 => self.ack_out(now_ns),
            _ => {
                self.set_mtu(mtu);
                self.data_out(now_ns, shared)
            }
        };
        self.traffic.sent_segments = self.traffic.sent_segments.wrapping_add(out.is_some().into());
        // After each segment there may be another.
        self.flags.set(ConnFlags::WANTS_OUTPUT, out.is_some() && self.may_have_more_output());
        if self.state != TcpState::Closed && !self.flags.contains(ConnFlags::WANTS_OUTPUT) {
            self.arm_timer(now_ns);
        }
        out
    }

    /// True if another call may return another segment.
    fn may_have_more_output(&self) -> bool {
        !self.is_synchronized()
            || self.may_have_output()
            || self.flags.contains(ConnFlags::ACK_NOW)
            || self.receive.acks_owed > 0
            || self.flags.contains(ConnFlags::KEEPALIVE_NOW)
            || self.flags.contains(ConnFlags::TAIL_PROBE_NOW)
    }

    fn reset_out(&mut self) -> Option<OutSegment> {
        if !self.flags.take(ConnFlags::RESET_NOW) {
            return None;
        }
        let mut out = OutSegment::bare(self.tuple, TcpFlags::RST | TcpFlags::ACK);
        (out.seq, out.ack) = (self.send.seq_in_window(), self.receive.nxt);
        Some(out)
    }

    /// Returns the SYN or SYN-ACK if it is due, for the first time or as a retransmission. A segment
    /// that is no SYN is answered with an acknowledgement alone (RFC 5961 sections 3.2 and 4.2).
    fn syn_out(&mut self, now_ns: u64, shared: &mut TcpShared) -> Option<OutSegment> {
        let iss = self.send.base - 1;
        let first = self.recovery.flight.is_none();
        let is_retransmission = !first && self.flags.contains(ConnFlags::FORCE_RETRANSMISSION);
        let is_answer = self.flags.take(ConnFlags::SYN_ACK_NOW);
        if !first && !is_retransmission && !is_answer {
            return self.ack_out(now_ns);
        }
        if first {
            self.record_sent(now_ns, shared, iss, iss + 1, true, false);
        } else if let Some(flight) = self.recovery.flight.as_mut().filter(|_| is_retransmission) {
            flight.on_retransmitted(now_ns, iss, iss + 1);
            self.count_retransmitted();
        }
        self.flags.remove(ConnFlags::FORCE_RETRANSMISSION);
        let mut out = OutSegment::bare(self.tuple, TcpFlags::SYN);
        out.seq = iss;
        let is_syn_ack = self.state == TcpState::SynReceived;
        if is_syn_ack {
            out.flags = TcpFlags::SYN | TcpFlags::ACK;
            out.ack = self.receive.nxt;
            out.window = self.window_field(false);
            self.on_ack_sent();
        } else {
            let window = self.options.receive_buffer_bytes.min(u16::MAX.into());
            out.window = window as u16;
        }
        // No answer may mean that the peer or a router does not handle the ECN bits
        // (RFC 3168 section 6.1.1.1).
        if is_retransmission {
            self.flags.insert(ConnFlags::SENDS_NO_ECT);
        }
        if self.flags.contains(ConnFlags::ECN) && !is_retransmission {
            let bits = if is_syn_ack { TcpFlags::ECE } else { TcpFlags::ECE | TcpFlags::CWR };
            out.flags = out.flags | bits;
        }
        out.options = self.syn_options(now_ns, shared.link_mss, is_syn_ack);
        Some(out)
    }

    fn syn_options(&self, now_ns: u64, link_mss: u16, is_syn_ack: bool) -> OptionBytes {
        let mut options = OptionBytes::new();
        options.push_mss(self.mss_of_link(link_mss));
        // A SYN-ACK offers only the options that the SYN has offered.
        if self.flags.contains(ConnFlags::SACK) || !is_syn_ack {
            options.push_sack_permitted();
        }
        if self.flags.contains(ConnFlags::TIMESTAMPS) || !is_syn_ack {
            let echo = if is_syn_ack { self.receive.ts_recent } else { 0 };
            options.push_timestamps(self.send.timestamp(now_ns), echo);
        }
        if self.receive.window_shift > 0 || self.receive.peer_window_shift > 0 || !is_syn_ack {
            options.push_window_shift(self.receive.window_shift);
        }
        options
    }

    /// Records a segment as sent.
    #[inline(always)]
    pub(super) fn record_sent(
        &mut self,
        now_ns: u64,
        shared: &mut TcpShared,
        start: Seq,
        end: Seq,
        syn: bool,
        fin: bool,
    ) {
        let flight = self.recovery.flight.get_or_insert_with(|| shared.acquire_flight());
        if flight.is_empty() {
            // RFC 6298 section 5.1.
            self.timers.rto_base_ns = now_ns;
            self.timers.stalled_since_ns = now_ns;
            if !syn {
                flight.delivery.begin(now_ns, start, end);
            }
        }
        flight.push(SentSegment::new(start, end, now_ns, syn, fin));
        self.send.nxt = end;
        self.timers.last_sent_ns = now_ns;
    }

    /// Returns the next segment of a synchronized connection.
    fn data_out(&mut self, now_ns: u64, shared: &mut TcpShared) -> Option<OutSegment> {
        // SACK blocks go out in segments without data, which have space for all blocks.
        if self.flags.contains(ConnFlags::ACK_NOW)
            && (self.receive.out_of_order.is_some() || self.receive.has_dsack_range())
        {
            return self.ack_out(now_ns);
        }
        if self.recovery.prefers_new_data() {
            if let Some(out) = self.new_data(now_ns, shared) {
                return Some(out);
            }
            self.recovery.on_no_new_data(self.send.nxt);
        }
        if !self.recovery.prefers_new_data()
            && let Some(out) = self.next_retransmission(now_ns)
        {
            return Some(out);
        }
        if let Some(out) = self.new_data(now_ns, shared) {
            return Some(out);
        }
        if self.flags.take(ConnFlags::TAIL_PROBE_NOW)
            && let Some(last) =
                self.recovery.flight.as_ref().and_then(|flight| flight.last()).copied()
        {
            // RFC 8985 section 7.3: without new data to send, the last segment goes out again.
            self.flags.insert(ConnFlags::TAIL_PROBE_RETRANSMITS);
            return Some(self.retransmit(now_ns, last));
        }
        self.ack_out(now_ns)
    }

    fn next_retransmission(&mut self, now_ns: u64) -> Option<OutSegment> {
        let (cwnd, pipe) = (self.recovery.controller.window.cwnd, self.pipe());
        let forced = self.flags.contains(ConnFlags::FORCE_RETRANSMISSION);
        let lost = *self.recovery.flight.as_mut()?.first_lost()?;
        if !forced && pipe + lost.bytes().min(self.send.mss.into()) > cwnd && pipe > 0 {
            return None;
        }
        self.flags.remove(ConnFlags::FORCE_RETRANSMISSION);
        Some(self.retransmit(now_ns, lost))
    }

    /// Retransmits a segment, or as much of it as the path carries now.
    fn retransmit(&mut self, now_ns: u64, sent: SentSegment) -> OutSegment {
        let data_bytes = sent.bytes() - u32::from(sent.fin);
        let max_bytes = u32::from(self.send.mss);
        let (data_bytes, fin) = match data_bytes > max_bytes {
            true => (max_bytes, false),
            false => (data_bytes, sent.fin),
        };
        let end = sent.start + data_bytes + u32::from(fin);
        if let Some(flight) = &mut self.recovery.flight {
            flight.on_retransmitted(now_ns, sent.start, end);
        }
        self.recovery.count_sent(end.since(sent.start));
        self.recovery.on_resent(now_ns, sent.start, end);
        self.count_retransmitted();
        self.timers.last_sent_ns = now_ns;
        // RFC 3168 section 6.1.5: retransmissions are not marked as ECN-capable.
        self.build_segment(now_ns, sent.start, data_bytes, fin)
    }

    fn count_retransmitted(&mut self) {
        let count = &mut self.traffic.retransmitted_segments;
        *count = count.wrapping_add(1);
    }

    fn new_data(&mut self, now_ns: u64, shared: &mut TcpShared) -> Option<OutSegment> {
        if !self.can_transmit() || self.flags.contains(ConnFlags::FIN_SENT) {
            return None;
        }
        let unsent = self.send.unsent();
        if unsent == 0 && !self.flags.contains(ConnFlags::FIN_QUEUED) {
            return None;
        }
        if self.recovery.flight.is_none() {
            self.restart_after_idle(now_ns);
        }
        let mss = u32::from(self.send.mss);
        let usable = self.send.usable_window();
        let forced = self.flags.take(ConnFlags::FORCE_OUTPUT);
        if forced && usable == 0 {
            return Some(self.window_probe(now_ns));
        }
        let sack = self.flags.contains(ConnFlags::SACK);
        let probe_bytes = self.recovery.mtu_probe_bytes(now_ns, &self.send, sack, usable);
        let probe_bytes = probe_bytes.filter(|_| !self.flags.contains(ConnFlags::TAIL_PROBE_NOW));
        let bytes = probe_bytes.unwrap_or(unsent.min(mss).min(usable));
        let drains_queue = bytes == unsent;
        let at_once = || self.options.no_delay || self.flags.contains(ConnFlags::FIN_QUEUED);
        let fin = self.flags.contains(ConnFlags::FIN_QUEUED) && drains_queue && usable > bytes;
        if bytes == 0 && !fin {
            return None;
        }
        let is_held = drains_queue && bytes < mss && self.is_corked();
        if !forced && (is_held || !self.send.is_worth_sending(bytes, drains_queue, at_once)) {
            return None;
        }
        if !self.fits_congestion_window(bytes, fin) {
            return None;
        }
        let is_paced = bytes > 0 && !forced && !self.flags.contains(ConnFlags::TAIL_PROBE_NOW);
        if is_paced && !self.recovery.take_pacing_credit(now_ns, &self.send, bytes) {
            // The rate follows the window: a larger window is of use.
            self.flags.insert(ConnFlags::WINDOW_LIMITED);
            return None;
        }
        let start = self.send.nxt;
        let end = start + bytes + u32::from(fin);
        self.record_sent(now_ns, shared, start, end, false, fin);
        self.recovery.count_sent(bytes);
        if probe_bytes.is_some() {
            self.recovery.on_mtu_probe_sent(&self.send, start, end);
        }
        if bytes < mss {
            self.send.small_segment_end = end;
        }
        if fin {
            self.flags.insert(ConnFlags::FIN_SENT);
        }
        if self.flags.take(ConnFlags::TAIL_PROBE_NOW) {
            self.flags.remove(ConnFlags::TAIL_PROBE_RETRANSMITS);
            self.send.tail_probe_end = end;
        }
        let mut out = self.build_segment(now_ns, start, bytes, fin);
        if bytes == usable && bytes < mss {
            // The window has cut the segment: no more can come until the peer's application reads.
            out.flags = out.flags | TcpFlags::PSH;
        }
        out.ecn_capable =
            self.flags.contains(ConnFlags::ECN) && !self.flags.contains(ConnFlags::SENDS_NO_ECT);
        if self.flags.contains(ConnFlags::ECN) && bytes > 0 && self.flags.take(ConnFlags::SEND_CWR)
        {
            out.flags = out.flags | TcpFlags::CWR;
        }
        Some(out)
    }

    /// True while segments that are not full are held back (`TCP_CORK`): not at the end of the data,
    /// and not while the application waits for space, and so cannot write more.
    fn is_corked(&self) -> bool {
        self.options.cork
            && !self.flags.contains(ConnFlags::FIN_QUEUED)
            && !self.flags.contains(ConnFlags::WRITE_BLOCKED)
    }

    /// True if only the cork holds the unsent data back.
    pub(super) fn is_held_by_cork(&self) -> bool {
        let unsent = self.send.unsent();
        unsent > 0
            && unsent < self.send.mss.into()
            && unsent <= self.send.usable_window()
            && self.is_corked()
    }

    /// Returns a probe of the peer's closed window while nothing is in flight (RFC 9293 section
    /// 3.8.6.1): an old sequence number without data, which every peer has to answer with its
    /// acknowledgement and window (section 3.10.7.4).
    ///
    /// The RFC's own form is one octet of new data. A peer that does not take the octet leaves it
    /// in flight, to be retransmitted apart from the data that follows. Probes without data are
    /// those of Linux, and have the form of keep-alive probes (section 3.8.4): peers answer them.
    fn window_probe(&mut self, now_ns: u64) -> OutSegment {
        self.build_segment(now_ns, self.send.una - 1, 0, false)
    }

    /// Restarts the congestion window after an idle period (RFC 5681 section 4.1).
    #[inline(always)]
    pub(super) fn restart_after_idle(&mut self, now_ns: u64) {
        let idle_ns = now_ns.saturating_sub(self.timers.last_sent_ns);
        if idle_ns > self.recovery.rtt.rto_ns() && self.timers.rtx != RtxTimer::Persist {
            self.recovery.forget_undo();
            self.recovery.controller.restart_after_idle(self.send.mss.into());
        }
    }

    fn fits_congestion_window(&mut self, bytes: u32, fin: bool) -> bool {
        let pipe = self.pipe();
        let mut cwnd = self.recovery.controller.window.cwnd;
        if !self.flags.contains(ConnFlags::SACK) && self.recovery.phase == RecoveryPhase::Open {
            // RFC 3042. The pipe already excludes the segments that have arrived.
            let extra = u32::from(self.recovery.duplicate_acks).min(LIMITED_TRANSMIT);
            cwnd = cwnd.saturating_sub(
                u32::from(self.recovery.duplicate_acks).saturating_sub(extra)
                    * u32::from(self.send.mss),
            );
        }
        let fits = pipe == 0
            || pipe + bytes <= cwnd
            || bytes == 0 && fin
            || self.flags.contains(ConnFlags::TAIL_PROBE_NOW);
        self.flags.set(
            ConnFlags::WINDOW_LIMITED,
            !fits || pipe + bytes + u32::from(self.send.mss) > cwnd,
        );
        fits
    }

    /// Returns a segment without data, if an acknowledgement or a keep-alive probe is due.
    fn ack_out(&mut self, now_ns: u64) -> Option<OutSegment> {
        if self.flags.take(ConnFlags::KEEPALIVE_NOW) {
            // RFC 9293 section 3.8.4: a sequence number that the peer has acknowledged.
            return Some(self.build_segment(now_ns, self.send.nxt - 1, 0, false));
        }
        if !self.flags.contains(ConnFlags::ACK_NOW) && self.receive.acks_owed == 0 {
            return None;
        }
        let mut out = self.build_segment(now_ns, self.send.seq_in_window(), 0, false);
        if self.flags.contains(ConnFlags::SACK) {
            let mut blocks = [(Seq(0), Seq(0)); 4];
            let count = self.receive.fill_sack_blocks(&mut blocks);
            out.options.push_sack(&blocks[..count]);
        }
        Some(out)
    }

    /// Builds a segment of a synchronized connection, with the fields that all of them carry.
    fn build_segment(&mut self, now_ns: u64, seq: Seq, data_bytes: u32, fin: bool) -> OutSegment {
        let mut out = OutSegment::bare(self.tuple, TcpFlags::ACK);
        (out.seq, out.ack) = (seq, self.receive.nxt);
        out.window = self.window_field(true);
        out.data_at = seq.since(self.send.base);
        out.data_bytes = data_bytes as u16;
        if self.flags.contains(ConnFlags::TIMESTAMPS) {
            out.options.push_timestamps(self.send.timestamp(now_ns), self.receive.ts_recent);
        }
        if fin {
            out.flags = out.flags | TcpFlags::FIN;
        }
        if data_bytes > 0 && out.data_at + data_bytes >= self.send.queued_bytes {
            out.flags = out.flags | TcpFlags::PSH;
        }
        if self.flags.contains(ConnFlags::ECN) && self.flags.contains(ConnFlags::SEND_ECE) {
            out.flags = out.flags | TcpFlags::ECE;
        }
        self.on_ack_sent();
        out
    }
}
