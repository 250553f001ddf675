//! The sending side: which segment goes out next (RFC 9293 sections 3.7.4 and
//! 3.8.6.2.1).

use tidegate_wire::tcp::TcpFlags;

use super::connection::{Connection, DEFAULT_MSS, Is, Shared, Wait};
use super::options::OptionBytes;
use super::recovery::{Phase, Sent};
use super::segment::Out;
use super::seq::Seq;
use super::socket::TcpState;

/// Segments that recovery may bring over before a loss is certain (RFC 3042).
const LIMITED_TRANSMIT: u32 = 2;

impl Connection {
    /// The next segment to send, for a path that carries `mtu` bytes; `None`
    /// when there is nothing to send now.
    pub(crate) fn poll_output(
        &mut self,
        now_ns: u64,
        mtu: usize,
        shared: &mut Shared,
    ) -> Option<Out> {
        let out = match self.state {
            TcpState::Closed => self.reset_out(),
            TcpState::SynSent | TcpState::SynReceived => self.syn_out(now_ns, mtu, shared),
            TcpState::TimeWait | TcpState::FinWait2 => self.ack_out(now_ns),
            _ => {
                self.set_mtu(mtu);
                self.data_out(now_ns, shared)
            }
        };
        // Until there is nothing, there may be more.
        self.is.set(Is::WANTS_OUTPUT, out.is_some() && self.may_have_more());
        if self.state != TcpState::Closed && !self.is.contains(Is::WANTS_OUTPUT) {
            self.arm(now_ns);
        }
        out
    }

    /// Whether it is worth asking for one more segment.
    fn may_have_more(&self) -> bool {
        !self.is_synchronized()
            || self.may_have_output()
            || self.is.contains(Is::ACK_NOW)
            || self.acks_owed > 0
            || self.is.contains(Is::KEEPALIVE_NOW)
            || self.is.contains(Is::TAIL_PROBE_NOW)
    }

    fn reset_out(&mut self) -> Option<Out> {
        if !self.is.take(Is::RESET_NOW) {
            return None;
        }
        let mut out = Out::bare(self.ends, TcpFlags::RST | TcpFlags::ACK);
        (out.seq, out.ack) = (self.seq_in_window(), self.rcv_nxt);
        Some(out)
    }

    /// Where a segment without data stands: SND.NXT, or the edge of a window that was
    /// closed behind what was sent. The peer drops what lies beyond its window, with
    /// what it acknowledges.
    fn seq_in_window(&self) -> Seq {
        self.nxt.min(self.una + self.window)
    }

    /// The SYN, with or without an acknowledgement, the first time or again.
    fn syn_out(&mut self, now_ns: u64, mtu: usize, shared: &mut Shared) -> Option<Out> {
        let iss = self.send_base - 1;
        let first = self.flight.is_none();
        let again = !first && self.is.contains(Is::FORCE_RETRANSMISSION);
        let answer = self.state == TcpState::SynReceived && self.is.contains(Is::ACK_NOW);
        if !first && !again && !answer {
            return None;
        }
        if first {
            self.record(now_ns, shared, iss, iss + 1, true, false);
        } else if let Some(flight) = self.flight.as_mut().filter(|_| again) {
            flight.resent(now_ns, iss, iss + 1);
        }
        self.is.remove(Is::FORCE_RETRANSMISSION);
        let mut out = Out::bare(self.ends, TcpFlags::SYN);
        out.seq = iss;
        let is_answer = self.state == TcpState::SynReceived;
        if is_answer {
            out.flags = TcpFlags::SYN | TcpFlags::ACK;
            out.ack = self.rcv_nxt;
            out.window = self.window_field(false);
            self.on_acknowledgement_sent();
        } else {
            let window = self.options.receive_buffer_bytes.min(u16::MAX.into());
            out.window = window as u16;
        }
        // A peer or router that does not know the bits may be why nothing came
        // (RFC 3168 section 6.1.1.1).
        if self.is.contains(Is::ECN) && !again {
            let bits = if is_answer { TcpFlags::ECE } else { TcpFlags::ECE | TcpFlags::CWR };
            out.flags = out.flags | bits;
        }
        out.options = self.syn_options(now_ns, mtu, is_answer);
        Some(out)
    }

    fn syn_options(&self, now_ns: u64, mtu: usize, is_answer: bool) -> OptionBytes {
        let mut options = OptionBytes::new();
        options.mss(self.offered_mss(mtu));
        // An answer offers only what was offered to us.
        if self.is.contains(Is::SACK) || !is_answer {
            options.sack_permitted();
        }
        if self.is.contains(Is::TIMESTAMPS) || !is_answer {
            let echo = if is_answer { self.ts_recent } else { 0 };
            options.timestamps(self.ts_now(now_ns), echo);
        }
        if self.shift_out > 0 || self.shift_in > 0 || !is_answer {
            options.window_shift(self.shift_out);
        }
        options
    }

    /// What we say that we take (RFC 9293 section 3.7.1): what the link takes.
    fn offered_mss(&self, mtu: usize) -> u16 {
        let headers = if self.ends.is_v4() { 40 } else { 60 };
        let fits = u16::try_from(mtu.saturating_sub(headers)).unwrap_or(u16::MAX);
        fits.max(DEFAULT_MSS[usize::from(!self.ends.is_v4())])
    }

    /// Notes a segment as sent.
    fn record(
        &mut self,
        now_ns: u64,
        shared: &mut Shared,
        start: Seq,
        end: Seq,
        syn: bool,
        fin: bool,
    ) {
        let flight = self.flight.get_or_insert_with(|| shared.take_flight());
        if flight.is_empty() {
            // RFC 6298 section 5.1.
            self.rto_base_ns = now_ns;
            self.stalled_ns = now_ns;
        }
        flight.push(Sent {
            start,
            end,
            at_ns: now_ns,
            syn,
            fin,
            sacked: false,
            lost: false,
            repeated: false,
        });
        self.nxt = end;
        self.last_sent_ns = now_ns;
    }

    /// Once both sides are synchronized.
    fn data_out(&mut self, now_ns: u64, shared: &mut Shared) -> Option<Out> {
        // Selective acknowledgements go out on their own, where there is room
        // for all of their blocks.
        if self.is.contains(Is::ACK_NOW) && (self.gaps.is_some() || self.has_duplicate()) {
            return self.ack_out(now_ns);
        }
        if let Some(out) = self.retransmission(now_ns) {
            return Some(out);
        }
        if let Some(out) = self.new_data(now_ns, shared) {
            return Some(out);
        }
        if self.is.take(Is::TAIL_PROBE_NOW)
            && let Some(last) = self.flight.as_ref().and_then(|flight| flight.last()).copied()
        {
            // RFC 8985 section 7.3: nothing new to send, so the last again.
            self.is.insert(Is::TAIL_PROBE_REPEATS);
            return Some(self.repeat(now_ns, last));
        }
        self.ack_out(now_ns)
    }

    fn retransmission(&mut self, now_ns: u64) -> Option<Out> {
        let (cwnd, pipe) = (self.controller.window.cwnd, self.pipe());
        let forced = self.is.contains(Is::FORCE_RETRANSMISSION);
        let lost = *self.flight.as_mut()?.first_lost()?;
        if !forced && pipe + lost.bytes().min(self.mss.into()) > cwnd && pipe > 0 {
            return None;
        }
        self.is.remove(Is::FORCE_RETRANSMISSION);
        Some(self.repeat(now_ns, lost))
    }

    /// Sends a segment again, or as much of it as the path takes now.
    fn repeat(&mut self, now_ns: u64, sent: Sent) -> Out {
        let data_bytes = sent.bytes() - u32::from(sent.fin);
        let most = u32::from(self.mss);
        let (data_bytes, fin) = match data_bytes > most {
            true => (most, false),
            false => (data_bytes, sent.fin),
        };
        let end = sent.start + data_bytes + u32::from(fin);
        if let Some(flight) = &mut self.flight {
            flight.resent(now_ns, sent.start, end);
        }
        self.count_sent(end.since(sent.start));
        self.last_sent_ns = now_ns;
        // RFC 3168 section 6.1.5: not marked as ECN-capable.
        self.segment(now_ns, sent.start, data_bytes, fin)
    }

    fn new_data(&mut self, now_ns: u64, shared: &mut Shared) -> Option<Out> {
        if !self.sends() || self.is.contains(Is::FIN_SENT) {
            return None;
        }
        let unsent = self.unsent();
        if unsent == 0 && !self.is.contains(Is::FIN_QUEUED) {
            return None;
        }
        if self.flight.is_none() {
            self.restart_after_idle(now_ns);
        }
        let mss = u32::from(self.mss);
        let usable = (self.una + self.window).since(self.nxt);
        let forced = self.is.take(Is::FORCE_WINDOW);
        let probe_bytes = self.path_probe_bytes(now_ns, usable);
        let mut bytes = probe_bytes.unwrap_or(unsent.min(mss).min(usable));
        if forced && bytes == 0 {
            // RFC 9293 section 3.8.6.1: one byte beyond the window.
            bytes = unsent.min(1);
        }
        let all = bytes == unsent;
        let fin = self.is.contains(Is::FIN_QUEUED)
            && all
            && (forced || usable > bytes || unsent == 0 && usable > 0);
        if bytes == 0 && !fin {
            return None;
        }
        if !forced && !self.is_worth_sending(bytes, all) {
            return None;
        }
        if !self.fits_congestion_window(bytes, fin) {
            return None;
        }
        let start = self.nxt;
        let end = start + bytes + u32::from(fin);
        self.record(now_ns, shared, start, end, false, fin);
        self.count_sent(bytes);
        if probe_bytes.is_some() {
            self.on_path_probe_sent(start, end);
        }
        if bytes < mss {
            self.small_end = end;
        }
        if fin {
            self.is.insert(Is::FIN_SENT);
        }
        if self.is.take(Is::TAIL_PROBE_NOW) {
            self.is.remove(Is::TAIL_PROBE_REPEATS);
            self.probe_end = end;
        }
        let mut out = self.segment(now_ns, start, bytes, fin);
        out.ecn_capable = self.is.contains(Is::ECN);
        if self.is.contains(Is::ECN) && bytes > 0 && self.is.take(Is::TELL_REDUCED) {
            out.flags = out.flags | TcpFlags::CWR;
        }
        Some(out)
    }

    /// RFC 5681 section 4.1.
    fn restart_after_idle(&mut self, now_ns: u64) {
        let idle_ns = now_ns.saturating_sub(self.last_sent_ns);
        if idle_ns > self.rtt.rto_ns() && self.wait != Wait::Window {
            self.controller.restart(self.mss.into(), idle_ns);
        }
    }

    /// Silly window avoidance and Nagle (RFC 9293 sections 3.8.6.2.1 and 3.7.4).
    fn is_worth_sending(&self, bytes: u32, all: bool) -> bool {
        let small_is_out = self.small_end.is_after(self.una);
        bytes >= self.mss.into()
            || all && (self.options.no_delay || self.is.contains(Is::FIN_QUEUED) || !small_is_out)
            || bytes > 0 && !all && bytes >= self.max_window / 2
    }

    fn fits_congestion_window(&mut self, bytes: u32, fin: bool) -> bool {
        let pipe = self.pipe();
        let mut cwnd = self.controller.window.cwnd;
        if !self.is.contains(Is::SACK) && self.phase == Phase::Open {
            // RFC 3042; the pipe is smaller already by what has arrived.
            let extra = u32::from(self.duplicate_acks).min(LIMITED_TRANSMIT);
            cwnd = cwnd.saturating_sub(
                u32::from(self.duplicate_acks).saturating_sub(extra) * u32::from(self.mss),
            );
        }
        let fits = pipe == 0
            || pipe + bytes <= cwnd
            || bytes == 0 && fin
            || self.is.contains(Is::TAIL_PROBE_NOW);
        self.is.set(Is::WINDOW_LIMITED, !fits || pipe + bytes + u32::from(self.mss) > cwnd);
        fits
    }

    /// An acknowledgement, if one is due.
    fn ack_out(&mut self, now_ns: u64) -> Option<Out> {
        if self.is.take(Is::KEEPALIVE_NOW) {
            // RFC 9293 section 3.8.4: a number that the peer has acknowledged.
            return Some(self.segment(now_ns, self.nxt - 1, 0, false));
        }
        if !self.is.contains(Is::ACK_NOW) && self.acks_owed == 0 {
            return None;
        }
        let mut out = self.segment(now_ns, self.seq_in_window(), 0, false);
        if self.is.contains(Is::SACK) {
            let mut blocks = [(Seq(0), Seq(0)); 4];
            let count = self.sack_blocks(&mut blocks);
            out.options.sack(&blocks[..count]);
        }
        Some(out)
    }

    /// A segment of an open connection, with everything that every one has.
    fn segment(&mut self, now_ns: u64, seq: Seq, data_bytes: u32, fin: bool) -> Out {
        let mut out = Out::bare(self.ends, TcpFlags::ACK);
        (out.seq, out.ack) = (seq, self.rcv_nxt);
        out.window = self.window_field(true);
        out.data_at = seq.since(self.send_base);
        out.data_bytes = data_bytes as u16;
        if self.is.contains(Is::TIMESTAMPS) {
            out.options.timestamps(self.ts_now(now_ns), self.ts_recent);
        }
        if fin {
            out.flags = out.flags | TcpFlags::FIN;
        }
        if data_bytes > 0 && out.data_at + data_bytes >= self.outgoing_bytes {
            out.flags = out.flags | TcpFlags::PSH;
        }
        if self.is.contains(Is::ECN) && self.is.contains(Is::ECHO_CONGESTION) {
            out.flags = out.flags | TcpFlags::ECE;
        }
        self.on_acknowledgement_sent();
        out
    }
}
