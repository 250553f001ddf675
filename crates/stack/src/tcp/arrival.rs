//! What a connection does with a segment, in the order of RFC 9293 section
//! 3.10.7, with the checks of RFC 5961 and RFC 7323 where they belong.

use tidegate_wire::DropReason;
use tidegate_wire::tcp::TcpFlags;

use super::connection::{Connection, Is, NEVER, Shared, Wait};
use super::recovery::Phase;
use super::segment::{Out, Segment};
use super::seq::Seq;
use super::socket::{Failure, TcpState};

/// Answers to segments that are out of place: so many at once, and one in so
/// many milliseconds in the long run (RFC 5961 section 7: ten in five seconds).
/// Each connection has a limit of its own, so that nobody learns from it about
/// another one.
const CHALLENGE_BURST: u32 = 10;
const CHALLENGE_MS: u32 = 500;

/// Time stamps older than this say nothing (RFC 7323 section 5.5).
const TIMESTAMP_AGE_S: u32 = 24 * 24 * 3600;

/// What came of a segment besides what the connection notes itself.
#[derive(Debug, Default)]
pub(crate) struct Arrived {
    /// An answer that is not one of the connection's own.
    pub(crate) answer: Option<Out>,
    /// It is established now.
    pub(crate) established: bool,
}

impl Connection {
    /// Takes a segment. The listener, if it has one, may be out of room for
    /// another connection: then nothing is established yet. What came of it
    /// stands in `arrived`, also when the rest of the segment is of no use.
    ///
    /// # Errors
    /// Why it is of no use.
    pub(crate) fn arrival(
        &mut self,
        now_ns: u64,
        segment: &Segment<'_>,
        may_establish: bool,
        arrived: &mut Arrived,
        shared: &mut Shared,
    ) -> Result<(), DropReason> {
        match self.state {
            TcpState::Closed => return Err(DropReason::TcpNoSocket),
            TcpState::SynSent => {
                if !self.syn_sent_arrival(now_ns, segment, arrived, shared)? {
                    return Ok(());
                }
            }
            _ => {
                let Some(segment) = self.check(now_ns, segment, shared)? else {
                    return Ok(());
                };
                let was_received = self.state == TcpState::SynReceived;
                if was_received && !may_establish {
                    return Err(DropReason::TcpAcceptQueueFull);
                }
                self.check_ack(now_ns, &segment, arrived, shared)?;
                return self.text(now_ns, &segment, shared);
            }
        }
        let segment = Segment { seq: segment.seq + 1, flags: without_syn(segment), ..*segment };
        self.text(now_ns, &segment, shared)
    }

    /// RFC 9293 section 3.10.7.3. Returns whether to go on with the text.
    fn syn_sent_arrival(
        &mut self,
        now_ns: u64,
        segment: &Segment<'_>,
        arrived: &mut Arrived,
        shared: &mut Shared,
    ) -> Result<bool, DropReason> {
        let acceptable =
            segment.is_ack() && segment.ack.is_after(self.una) && segment.ack.is_up_to(self.nxt);
        if segment.is_ack() && !acceptable {
            arrived.answer = segment.reset(self.ends);
            return if arrived.answer.is_some() {
                Ok(false)
            } else {
                Err(DropReason::TcpAckInvalid)
            };
        }
        if segment.is_rst() {
            if !acceptable {
                return Err(DropReason::TcpReset);
            }
            self.abort(shared, Some(Failure::Refused), false);
            return Ok(false);
        }
        if !segment.is_syn() {
            return Err(DropReason::TcpFlags);
        }
        self.begin_receiving(segment.seq);
        // As our SYN said.
        self.rcv_edge += self.options.receive_buffer_bytes.min(u16::MAX.into());
        self.learn_options(now_ns, segment);
        self.take_window(segment, false);
        self.heard_ns = now_ns;
        if !acceptable {
            // Both began at once (RFC 9293 section 3.5, figure 8).
            self.state = TcpState::SynReceived;
            self.is.remove(Is::ECN);
            self.acknowledge_now();
            return Ok(false);
        }
        self.is.set(
            Is::ECN,
            self.is.contains(Is::ECN)
                && segment.flags.contains(TcpFlags::ECE)
                && !segment.flags.contains(TcpFlags::CWR),
        );
        self.acknowledged(now_ns, segment, false, shared);
        self.establish(now_ns, arrived);
        self.acknowledge_now();
        Ok(true)
    }

    /// What the options of a SYN say about the connection (RFC 9293 section
    /// 3.7.1, RFC 7323 sections 2.2 and 3.2, RFC 2018 section 2).
    pub(crate) fn learn_options(&mut self, now_ns: u64, segment: &Segment<'_>) {
        let options = &segment.options;
        self.set_peer_mss(options.mss);
        self.is.set(Is::SACK, options.sack_permitted);
        self.is.set(Is::TIMESTAMPS, options.timestamps.is_some());
        if let Some((value, _)) = options.timestamps {
            (self.ts_recent, self.ts_recent_s) = (value, seconds(now_ns));
        }
        match options.window_shift {
            Some(shift) => self.shift_in = shift,
            None => (self.shift_in, self.shift_out) = (0, 0),
        }
        self.set_mtu(usize::from(u16::MAX));
        self.controller.set_mss(self.mss.into());
        if self.is.contains(Is::SYN_REPEATED) {
            // RFC 5681 section 3.1: one segment to begin with.
            self.controller.window.cwnd = self.mss.into();
        }
    }

    pub(crate) fn establish(&mut self, now_ns: u64, arrived: &mut Arrived) {
        self.state = TcpState::Established;
        self.phase = Phase::Open;
        self.rtt.lost_syn = self.is.contains(Is::SYN_REPEATED);
        self.retries = 0;
        self.wait = Wait::Nothing;
        self.is.insert(Is::TELL_WRITABLE);
        self.is.insert(Is::WANTS_OUTPUT);
        self.start_keepalive(now_ns);
        if self.is.contains(Is::FIN_QUEUED) {
            self.state = TcpState::FinWait1;
        }
        arrived.established = true;
    }

    /// Keep-alive begins to count (RFC 9293 section 3.8.4).
    pub(crate) fn start_keepalive(&mut self, now_ns: u64) {
        if let Some(keepalive) = self.options.keepalive {
            self.idle_at_ns = now_ns.saturating_add(u64::from(keepalive.idle_ms) * 1_000_000);
        }
    }

    /// The first four checks of RFC 9293 section 3.10.7.4: sequence number,
    /// RST, security (none), SYN; and PAWS before them. Returns the segment
    /// to go on with; `None` when it is done with.
    fn check<'s>(
        &mut self,
        now_ns: u64,
        segment: &Segment<'s>,
        shared: &mut Shared,
    ) -> Result<Option<Segment<'s>>, DropReason> {
        let mut segment = *segment;
        // The answer to our SYN while we answer its own: simultaneous open.
        if self.state == TcpState::SynReceived
            && segment.is_syn()
            && segment.seq + 1 == self.rcv_nxt
        {
            if !segment.is_ack() {
                // Our answer was lost.
                self.acknowledge_now();
                return Ok(None);
            }
            (segment.seq, segment.flags) = (self.rcv_nxt, without_syn(&segment));
        }
        self.check_timestamps(now_ns, &segment, shared)?;
        self.check_sequence(now_ns, &segment, shared)?;
        if segment.is_rst() {
            return self.take_reset(now_ns, &segment, shared).map(|()| None);
        }
        if segment.is_syn() {
            if self.state == TcpState::SynReceived && self.is.contains(Is::PASSIVE) {
                // Fourth: back to where it came from.
                self.abort(shared, None, false);
                return Err(DropReason::TcpFlags);
            }
            // RFC 5961 section 4.2.
            self.challenge(now_ns);
            return Err(DropReason::TcpFlags);
        }
        if !segment.is_ack() {
            return Err(DropReason::TcpFlags);
        }
        self.note_timestamps(now_ns, &segment);
        Ok(Some(segment))
    }

    /// RFC 7323 section 5.3, R1, and section 3.2.
    fn check_timestamps(
        &mut self,
        now_ns: u64,
        segment: &Segment<'_>,
        shared: &Shared,
    ) -> Result<(), DropReason> {
        if !self.is.contains(Is::TIMESTAMPS) || segment.is_rst() {
            return Ok(());
        }
        let Some((value, _)) = segment.options.timestamps else {
            return Err(DropReason::TcpTimestampMissing);
        };
        let is_old = Seq(value).is_before(Seq(self.ts_recent));
        if is_old && seconds(now_ns).wrapping_sub(self.ts_recent_s) < TIMESTAMP_AGE_S {
            self.challenge_duplicate(now_ns, segment, shared);
            return Err(DropReason::TcpPaws);
        }
        Ok(())
    }

    /// RFC 7323 section 4.3, (2).
    fn note_timestamps(&mut self, now_ns: u64, segment: &Segment<'_>) {
        if let Some((value, _)) =
            segment.options.timestamps.filter(|_| self.is.contains(Is::TIMESTAMPS))
            && segment.seq.is_up_to(self.last_ack_sent)
            && Seq(self.ts_recent).is_up_to(Seq(value))
        {
            (self.ts_recent, self.ts_recent_s) = (value, seconds(now_ns));
        }
    }

    /// RFC 9293 section 3.10.7.4, first: table 6.
    fn check_sequence(
        &mut self,
        now_ns: u64,
        segment: &Segment<'_>,
        shared: &Shared,
    ) -> Result<(), DropReason> {
        let edge = self.rcv_edge;
        let first_in = self.rcv_nxt.is_up_to(segment.seq) && segment.seq.is_before(edge);
        let len = segment.len();
        let acceptable = if len == 0 {
            // RFC 9293 allows the number right behind the window too when that
            // is closed; peers send so also when it is open and full.
            first_in || segment.seq == self.rcv_nxt || segment.seq == edge
        } else {
            let last = segment.end() - 1;
            let last_in = self.rcv_nxt.is_up_to(last) && last.is_before(edge);
            // Data at the edge of a closed window is not taken, but what it
            // acknowledges is (section 3.10.7.4: "special allowance").
            first_in
                || last_in
                || segment.seq == self.rcv_nxt
                || segment.seq.is_before(self.rcv_nxt) && !segment.end().is_before(edge)
        };
        if acceptable {
            return Ok(());
        }
        if segment.is_rst() {
            return Err(DropReason::TcpReset);
        }
        let is_old = segment.end().is_up_to(self.rcv_nxt);
        self.challenge_duplicate(now_ns, segment, shared);
        Err(if is_old { DropReason::TcpDuplicate } else { DropReason::TcpSequence })
    }

    /// Answers what is out of place with where we are. Data that came twice is
    /// answered each time, since our acknowledgement may have been lost;
    /// anything else seldom.
    fn challenge_duplicate(&mut self, now_ns: u64, segment: &Segment<'_>, shared: &Shared) {
        if self.state == TcpState::TimeWait && segment.is_fin() {
            // The time starts anew (RFC 9293 section 3.10.7.4, eighth).
            self.idle_at_ns = now_ns.saturating_add(shared.time_wait_ns);
        }
        if self.state == TcpState::TimeWait || segment.len() > 0 {
            let end = segment.end().min(self.rcv_nxt);
            if segment.end().is_up_to(self.rcv_nxt) && !segment.payload.is_empty() {
                return self.note_duplicate(segment.seq, end);
            }
            if segment.end().is_up_to(self.rcv_nxt) {
                return self.acknowledge_now();
            }
        }
        // A keep-alive probe is one number short of what we expect.
        if segment.seq + 1 == self.rcv_nxt {
            return self.acknowledge_now();
        }
        self.challenge(now_ns);
    }

    /// RFC 5961 section 7.
    pub(crate) fn challenge(&mut self, now_ns: u64) {
        // Each puts the time when the next is due off by its share; they may
        // come before that by as much as the burst.
        let now_ms = (now_ns / 1_000_000) as u32;
        let ahead_ms = self.challenge_due_ms.wrapping_sub(now_ms);
        let is_ahead = ahead_ms <= CHALLENGE_BURST * CHALLENGE_MS;
        let ahead_ms = if is_ahead { ahead_ms } else { 0 };
        if ahead_ms + CHALLENGE_MS <= CHALLENGE_BURST * CHALLENGE_MS {
            self.challenge_due_ms = now_ms.wrapping_add(ahead_ms + CHALLENGE_MS);
            self.acknowledge_now();
        }
    }

    /// RFC 9293 section 3.10.7.4, second; RFC 5961 section 3.2.
    fn take_reset(
        &mut self,
        now_ns: u64,
        segment: &Segment<'_>,
        shared: &mut Shared,
    ) -> Result<(), DropReason> {
        if segment.seq != self.rcv_nxt {
            self.challenge(now_ns);
            return Err(DropReason::TcpReset);
        }
        if self.state == TcpState::TimeWait {
            // RFC 1337: a reset does not end it early.
            return Err(DropReason::TcpReset);
        }
        let failure = match self.state {
            TcpState::SynReceived if !self.is.contains(Is::PASSIVE) => Failure::Refused,
            TcpState::Closing | TcpState::LastAck => Failure::Ended,
            _ => Failure::Reset,
        };
        self.abort(shared, Some(failure), false);
        Ok(())
    }

    /// RFC 9293 section 3.10.7.4, fifth; RFC 5961 section 5.2.
    fn check_ack(
        &mut self,
        now_ns: u64,
        segment: &Segment<'_>,
        arrived: &mut Arrived,
        shared: &mut Shared,
    ) -> Result<(), DropReason> {
        if self.state == TcpState::SynReceived {
            let acceptable = segment.ack.is_after(self.una) && segment.ack.is_up_to(self.nxt);
            if !acceptable {
                arrived.answer = segment.reset(self.ends);
                return Ok(());
            }
            self.take_window(segment, true);
            self.establish(now_ns, arrived);
            self.heard_ns = now_ns;
            self.acknowledged(now_ns, segment, false, shared);
            return Ok(());
        }
        let oldest = self.una - self.max_window;
        if segment.ack.is_before(oldest) || segment.ack.is_after(self.nxt) {
            self.challenge(now_ns);
            return Err(DropReason::TcpAckInvalid);
        }
        self.heard_ns = now_ns;
        self.keepalives = 0;
        if segment.ack.is_before(self.una) {
            return Ok(());
        }
        let before = self.window;
        self.take_window(segment, true);
        // RFC 5681 section 2.
        let duplicate = segment.ack == self.una
            && self.una != self.nxt
            && segment.len() == 0
            && before == self.window
            // Answers to window probes are no sign of loss.
            && self.window > 0;
        if self.wait == Wait::Window {
            // The peer answers: it is alive, however long its window is shut.
            self.retries = 0;
        }
        if before == 0 && self.window > 0 && self.wait == Wait::Window {
            self.on_window_opened(segment.ack);
        }
        self.acknowledged(now_ns, segment, duplicate, shared);
        self.on_fin_acknowledged(now_ns, shared);
        Ok(())
    }

    /// What was sent into the closed window goes again at once.
    fn on_window_opened(&mut self, ack: Seq) {
        self.rtt.backoff = 0;
        self.wait = Wait::Nothing;
        if ack == self.una
            && let Some(flight) = &mut self.flight
        {
            flight.mark_first_lost();
            self.is.insert(Is::FORCE_RETRANSMISSION);
        }
        self.is.insert(Is::WANTS_OUTPUT);
    }

    /// RFC 9293 section 3.10.7.4: updates SND.WND by newer segments only.
    fn take_window(&mut self, segment: &Segment<'_>, scaled: bool) {
        let is_newer = self.window_seq.is_before(segment.seq)
            || self.window_seq == segment.seq && self.window_ack.is_up_to(segment.ack);
        if scaled && !is_newer && self.is_synchronized() {
            return;
        }
        let shift = if scaled { self.shift_in } else { 0 };
        let window = u32::from(segment.window) << shift;
        if window > self.window && self.may_have_output() {
            self.is.insert(Is::WANTS_OUTPUT);
        }
        self.window = window;
        self.max_window = self.max_window.max(window);
        (self.window_seq, self.window_ack) = (segment.seq, segment.ack);
    }

    /// Moves on when our FIN is acknowledged.
    fn on_fin_acknowledged(&mut self, now_ns: u64, shared: &mut Shared) {
        if !self.fin_acknowledged() {
            return;
        }
        match self.state {
            TcpState::FinWait1 => {
                self.state = TcpState::FinWait2;
                if self.is.contains(Is::ORPHAN) {
                    self.wait_as_orphan(now_ns, shared);
                }
            }
            TcpState::Closing => self.enter_time_wait(now_ns, shared),
            TcpState::LastAck => {
                self.state = TcpState::Closed;
                (self.wait_until_ns, self.ack_at_ns, self.idle_at_ns) = (NEVER, NEVER, NEVER);
            }
            _ => {}
        }
    }

    /// Nobody will read what the peer still sends, so it need not take for ever
    /// to end.
    pub(crate) fn wait_as_orphan(&mut self, now_ns: u64, shared: &Shared) {
        self.idle_at_ns = now_ns.saturating_add(shared.fin_wait_2_ns);
    }

    /// RFC 9293 section 3.10.7.4, sixth to eighth. Urgent data is delivered in
    /// line with the rest, as RFC 6093 section 6 advises.
    fn text(
        &mut self,
        now_ns: u64,
        segment: &Segment<'_>,
        shared: &mut Shared,
    ) -> Result<(), DropReason> {
        let receives =
            matches!(self.state, TcpState::Established | TcpState::FinWait1 | TcpState::FinWait2);
        if !receives {
            return Ok(());
        }
        if self.is.contains(Is::ECN) {
            self.note_congestion(segment);
        }
        let news = segment.seq + segment.payload.len() as u32;
        if self.is.contains(Is::ORPHAN)
            && self.listener.is_none()
            && !segment.payload.is_empty()
            && news.is_after(self.rcv_nxt)
        {
            // RFC 9293 section 3.10.4: nobody is there to read it.
            self.abort(shared, Some(Failure::Reset), true);
            return Ok(());
        }
        let window = self.rcv_edge.since(segment.seq) as usize;
        let fits = segment.payload.len().min(window);
        if fits > 0 {
            self.take_text(now_ns, segment.seq, &segment.payload[..fits], shared)?;
        }
        if fits < segment.payload.len() {
            // The rest lies beyond the window.
            self.acknowledge_now();
        } else if segment.is_fin() && self.rcv_nxt == news {
            self.take_fin(now_ns, shared);
        } else if segment.is_fin() && news.is_after(self.rcv_nxt) {
            self.acknowledge_now();
        }
        if self.is.contains(Is::READ_SHUT) && self.readable() > 0 {
            let unread = self.readable() as usize;
            self.consume(unread, shared);
        }
        Ok(())
    }

    /// RFC 3168 section 6.1.3.
    fn note_congestion(&mut self, segment: &Segment<'_>) {
        if segment.flags.contains(TcpFlags::CWR) {
            self.is.remove(Is::ECHO_CONGESTION);
        }
        if segment.congestion_experienced {
            self.is.insert(Is::ECHO_CONGESTION);
        }
    }
}

/// Seconds are enough for the age of time stamps.
pub(crate) fn seconds(now_ns: u64) -> u32 {
    (now_ns / 1_000_000_000) as u32
}

fn without_syn(segment: &Segment<'_>) -> TcpFlags {
    TcpFlags(segment.flags.0 & !TcpFlags::SYN.0)
}
