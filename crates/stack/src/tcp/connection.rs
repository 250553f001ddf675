//! One connection: what it holds, and its states (RFC 9293 section 3.3).

use std::sync::Arc;

use bitflags::bitflags;
use serde::{Deserialize, Serialize};

use super::chunks::{Chunks, Strand};
use super::congestion::Controller;
use super::options::TIMESTAMPS_BYTES;
use super::path_search::PathSearch;
use super::receive::Gaps;
use super::recovery::{Flight, Phase};
use super::rtt::RoundTrip;
use super::segment::Ends;
use super::seq::Seq;
use super::socket::{Failure, TcpListenerId, TcpOptions, TcpState};
use super::timers::tick_of;

/// No deadline.
pub(crate) const NEVER: u64 = u64::MAX;

/// No place in a table.
pub(crate) const NOWHERE: u32 = u32::MAX;

/// The segment size that every host takes: for IPv4 and for IPv6 (RFC 9293
/// section 3.7.1).
pub(crate) const DEFAULT_MSS: [u16; 2] = [536, 1220];

/// No peer makes us send smaller segments than this: each costs a header.
pub(crate) const LEAST_MSS: u16 = 64;

/// What the tables need to find a connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Links {
    pub(crate) hash: u32,
    /// The next one with this hash.
    pub(crate) hash_next: u32,
    pub(crate) timer_previous: u32,
    pub(crate) timer_next: u32,
    /// Which slot of the wheel; [`NOWHERE`] when it is in none.
    pub(crate) timer_slot: u32,
    /// The tick it is there for.
    pub(crate) timer_tick: u64,
}

impl Links {
    /// Whether the wheel would be later than `at_ns`.
    #[inline]
    pub(crate) fn is_later_than(&self, at_ns: u64) -> bool {
        self.timer_slot == NOWHERE || tick_of(at_ns) < self.timer_tick
    }
}

/// Why the retransmission timer runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Wait {
    Nothing,
    /// For an acknowledgement (RFC 6298).
    Retransmission,
    /// To find out early whether the tail was lost (RFC 8985 section 7).
    TailProbe,
    /// For segments that may only be late (RFC 8985 section 6.2).
    Reordering,
    /// For the peer's window to open (RFC 9293 section 3.8.6.1).
    Window,
}

/// What connections share.
pub(crate) struct Shared {
    pub(crate) chunks: Chunks,
    /// The options used last: most connections have the same.
    options: Arc<TcpOptions>,
    /// Scoreboards and reassembly lists without a connection.
    #[expect(clippy::vec_box, reason = "connections hold boxes, which move here and back")]
    flights: Vec<Box<Flight>>,
    #[expect(clippy::vec_box, reason = "connections hold boxes, which move here and back")]
    gaps: Vec<Box<Gaps>>,
    /// The largest payload that the link takes.
    pub(crate) link_mss: u16,
    /// How long TIME-WAIT lasts, and FIN-WAIT-2 when nobody reads any more.
    pub(crate) time_wait_ns: u64,
    pub(crate) fin_wait_2_ns: u64,
}

/// Scoreboards and lists that are kept for the next who needs one.
const SPARES: usize = 256;

impl Shared {
    pub(crate) fn new(limit_bytes: usize, time_wait_ns: u64, link_mss: u16) -> Self {
        Self {
            link_mss,
            chunks: Chunks::new(limit_bytes),
            options: Arc::default(),
            flights: Vec::new(),
            gaps: Vec::new(),
            time_wait_ns,
            fin_wait_2_ns: time_wait_ns,
        }
    }

    /// Options to be held by a connection, the same memory for those who have
    /// the same.
    pub(crate) fn options(&mut self, options: TcpOptions) -> Arc<TcpOptions> {
        let options = options.within_limits();
        if *self.options != options {
            self.options = Arc::new(options);
        }
        Arc::clone(&self.options)
    }

    pub(crate) fn take_flight(&mut self) -> Box<Flight> {
        self.flights.pop().unwrap_or_default()
    }

    pub(crate) fn give_flight(&mut self, mut flight: Box<Flight>) {
        if self.flights.len() < SPARES && flight.recycle() {
            self.flights.push(flight);
        }
    }

    pub(crate) fn take_gaps(&mut self) -> Box<Gaps> {
        self.gaps.pop().unwrap_or_default()
    }

    pub(crate) fn give_gaps(&mut self, mut gaps: Box<Gaps>) {
        if self.gaps.len() < SPARES {
            gaps.clear();
            self.gaps.push(gaps);
        }
    }
}

/// One connection. Fields are grouped by the file that is about them.
pub(crate) struct Connection {
    pub(crate) ends: Ends,
    pub(crate) links: Links,
    /// The listener that it came through, until it is accepted.
    pub(crate) listener: Option<TcpListenerId>,
    pub(crate) state: TcpState,
    pub(crate) options: Arc<TcpOptions>,
    /// Why it ended, until the application has been told.
    pub(crate) failure: Option<Failure>,
    /// What ICMP said about the path; believed when nothing gets through.
    pub(crate) soft_failure: Option<Failure>,

    // Sending.
    /// The oldest number not acknowledged (SND.UNA).
    pub(crate) una: Seq,
    /// The next number to send (SND.NXT).
    pub(crate) nxt: Seq,
    /// The number of the first byte of `outgoing`.
    pub(crate) send_base: Seq,
    pub(crate) outgoing: Strand,
    pub(crate) outgoing_bytes: u32,
    /// The peer's window (SND.WND), the largest ever, and the segment that told
    /// it (SND.WL1, SND.WL2).
    pub(crate) window: u32,
    pub(crate) max_window: u32,
    pub(crate) window_seq: Seq,
    pub(crate) window_ack: Seq,
    /// The largest payload that the peer takes, without options.
    pub(crate) peer_mss: u16,
    /// The largest payload that goes out now, options taken off.
    pub(crate) mss: u16,
    /// What the path was found to carry when nothing larger came through.
    pub(crate) mss_limit: u16,
    /// What peer and link take, options included.
    pub(crate) mss_most: u16,
    /// The end of the last segment that was smaller than it could be (Nagle as
    /// Minshall has it).
    pub(crate) small_end: Seq,
    pub(crate) last_sent_ns: u64,

    // Receiving.
    /// The next number expected (RCV.NXT).
    pub(crate) rcv_nxt: Seq,
    /// Behind the last number that the peer may send.
    pub(crate) rcv_edge: Seq,
    /// The number of the first byte of `incoming`.
    pub(crate) read_seq: Seq,
    pub(crate) incoming: Strand,
    pub(crate) gaps: Option<Box<Gaps>>,
    /// What came twice, to be told (RFC 2883); empty if nothing.
    pub(crate) duplicate: (Seq, Seq),
    /// Bytes received since the last acknowledgement.
    pub(crate) unacknowledged: u32,
    /// Bytes read since the last acknowledgement.
    pub(crate) consumed: u32,
    /// The largest segment that came.
    pub(crate) heard_mss: u16,
    /// Duplicate acknowledgements owed to a peer without SACK.
    pub(crate) acks_owed: u8,
    pub(crate) last_ack_sent: Seq,
    pub(crate) heard_ns: u64,

    // Options (RFC 7323).
    pub(crate) shift_in: u8,
    pub(crate) shift_out: u8,
    pub(crate) ts_recent: u32,
    pub(crate) ts_recent_s: u32,
    pub(crate) ts_offset: u32,

    // Recovery.
    pub(crate) flight: Option<Box<Flight>>,
    /// Looking for the way back to larger segments.
    pub(crate) search: Option<Box<PathSearch>>,
    pub(crate) rtt: RoundTrip,
    pub(crate) controller: Controller,
    pub(crate) phase: Phase,
    /// Recovery ends when this is acknowledged.
    pub(crate) recovery_end: Seq,
    /// What the last tail probe sent ends here.
    pub(crate) probe_end: Seq,
    /// A window reduction for a congestion mark is in force up to here.
    pub(crate) cwr_end: Seq,
    pub(crate) duplicate_acks: u8,
    /// RFC 8985 section 6.2: grows when retransmissions prove needless.
    pub(crate) reordering_steps: u8,
    /// Retransmissions in a row without progress.
    pub(crate) retries: u8,
    /// Since when nothing was acknowledged.
    pub(crate) stalled_ns: u64,

    // Timers.
    pub(crate) wait: Wait,
    pub(crate) wait_until_ns: u64,
    pub(crate) ack_at_ns: u64,
    /// Keep-alive, FIN-WAIT-2, TIME-WAIT.
    pub(crate) idle_at_ns: u64,
    pub(crate) rto_base_ns: u64,
    /// When the next challenge ACK is due at the latest.
    pub(crate) challenge_due_ms: u32,
    pub(crate) keepalives: u8,

    pub(crate) is: Is,
}

bitflags! {
    /// What is so, yes or no.
    #[derive(Clone, Copy, Debug)]
    pub(crate) struct Is: u64 {
        /// We did not begin it.
        const PASSIVE = 1 << 0;
        /// The application has no handle on it any more, or has none yet.
        const ORPHAN = 1 << 1;
        const IN_ACCEPT_QUEUE = 1 << 2;
        /// Found by its ends.
        const INDEXED = 1 << 3;
        /// Counted among those in TIME-WAIT.
        const IN_TIME_WAIT = 1 << 4;
        /// Counted in the SYN queue of its listener.
        const IN_SYN_QUEUE = 1 << 5;
        /// In the queue of those with something to send.
        const PENDING = 1 << 6;
        const WANTS_OUTPUT = 1 << 7;
        const TIMESTAMPS = 1 << 8;
        const SACK = 1 << 9;
        const ECN = 1 << 10;
        /// Congestion marks came: say so until the peer reacts (RFC 3168).
        const ECHO_CONGESTION = 1 << 11;
        /// Say that the window was reduced.
        const TELL_REDUCED = 1 << 12;
        /// The application sends nothing more.
        const FIN_QUEUED = 1 << 13;
        const FIN_SENT = 1 << 14;
        const FIN_RECEIVED = 1 << 15;
        const READ_SHUT = 1 << 16;
        const ACK_NOW = 1 << 17;
        const RESET_NOW = 1 << 18;
        const KEEPALIVE_NOW = 1 << 19;
        /// Send one segment whatever the congestion window says.
        const FORCE_RETRANSMISSION = 1 << 20;
        /// Send one segment whatever the peer's window says.
        const FORCE_WINDOW = 1 << 21;
        const TAIL_PROBE_NOW = 1 << 22;
        /// A tail probe is on its way.
        const TAIL_PROBED = 1 << 23;
        /// It was sent before.
        const TAIL_PROBE_REPEATS = 1 << 24;
        const REORDERING_SEEN = 1 << 25;
        /// Our SYN went out more than once.
        const SYN_REPEATED = 1 << 26;
        /// The congestion window kept us from sending.
        const WINDOW_LIMITED = 1 << 27;
        /// The application could not write all it wanted.
        const WRITE_BLOCKED = 1 << 28;
        /// Among those who wait for memory to write to.
        const STARVED = 1 << 29;
        const TELL_READABLE = 1 << 30;
        const TELL_WRITABLE = 1 << 31;
        const READABLE_TOLD = 1 << 32;
        const WRITABLE_TOLD = 1 << 33;
    }
}

impl Is {
    /// Whether it was so; it is not any more.
    pub(crate) fn take(&mut self, what: Self) -> bool {
        let was = self.contains(what);
        self.remove(what);
        was
    }

    /// Whether it was not so; it is now.
    pub(crate) fn newly(&mut self, what: Self) -> bool {
        let was = self.contains(what);
        self.insert(what);
        !was
    }
}

impl Connection {
    /// A connection that has sent and received nothing yet.
    pub(crate) fn new(
        now_ns: u64,
        ends: Ends,
        options: Arc<TcpOptions>,
        iss: Seq,
        ts_offset: u32,
    ) -> Self {
        let default_mss = DEFAULT_MSS[usize::from(!ends.is_v4())];
        Self {
            ends,
            links: Links {
                hash: 0,
                hash_next: NOWHERE,
                timer_previous: NOWHERE,
                timer_next: NOWHERE,
                timer_slot: NOWHERE,
                timer_tick: 0,
            },
            listener: None,
            state: TcpState::Closed,
            shift_out: options.window_shift(),
            controller: Controller::new(options.congestion_control, default_mss.into()),
            options,
            failure: None,
            soft_failure: None,
            una: iss,
            nxt: iss,
            send_base: iss + 1,
            outgoing: Strand::EMPTY,
            outgoing_bytes: 0,
            window: 0,
            max_window: 0,
            window_seq: Seq(0),
            window_ack: Seq(0),
            peer_mss: default_mss,
            mss: default_mss,
            mss_limit: u16::MAX,
            mss_most: default_mss,
            small_end: iss,
            last_sent_ns: now_ns,
            rcv_nxt: Seq(0),
            rcv_edge: Seq(0),
            read_seq: Seq(0),
            incoming: Strand::EMPTY,
            gaps: None,
            duplicate: (Seq(0), Seq(0)),
            unacknowledged: 0,
            consumed: 0,
            heard_mss: DEFAULT_MSS[0],
            acks_owed: 0,
            last_ack_sent: Seq(0),
            heard_ns: now_ns,
            shift_in: 0,
            ts_recent: 0,
            ts_recent_s: 0,
            ts_offset,
            flight: None,
            search: None,
            rtt: RoundTrip::default(),
            phase: Phase::Open,
            recovery_end: iss,
            probe_end: iss,
            cwr_end: iss,
            duplicate_acks: 0,
            reordering_steps: 1,
            retries: 0,
            stalled_ns: now_ns,
            wait: Wait::Nothing,
            wait_until_ns: NEVER,
            ack_at_ns: NEVER,
            idle_at_ns: NEVER,
            rto_base_ns: now_ns,
            challenge_due_ms: 0,
            keepalives: 0,
            is: Is::empty(),
        }
    }

    /// The peer told the largest segment that it takes, or did not.
    pub(crate) fn set_peer_mss(&mut self, told: Option<u16>) {
        let default = DEFAULT_MSS[usize::from(!self.ends.is_v4())];
        self.peer_mss = told.unwrap_or(default).max(LEAST_MSS);
    }

    /// Works out the largest payload for a path that carries `mtu` bytes.
    pub(crate) fn set_mtu(&mut self, mtu: usize) {
        let headers = if self.ends.is_v4() { 40 } else { 60 };
        let fits = u16::try_from(mtu.saturating_sub(headers)).unwrap_or(u16::MAX);
        self.set_mss_most(fits.min(self.peer_mss).max(LEAST_MSS));
    }

    /// Peer and link take segments of so many bytes, options included.
    pub(crate) fn set_mss_most(&mut self, bytes: u16) {
        let options = if self.is.contains(Is::TIMESTAMPS) { TIMESTAMPS_BYTES as u16 } else { 0 };
        self.mss_most = bytes;
        self.mss = self.mss_most.min(self.mss_limit) - options;
    }

    /// Whether its ends are its own still: it is found by them.
    pub(crate) fn has_ends(&self) -> bool {
        self.state != TcpState::Closed || self.is.contains(Is::RESET_NOW)
    }

    /// Whether segments may still leave from our end, other than answers.
    pub(crate) fn sends_from_its_address(&self) -> bool {
        !matches!(self.state, TcpState::Closed | TcpState::TimeWait)
    }

    /// Bytes that wait to be read.
    #[inline]
    pub(crate) fn readable(&self) -> u32 {
        (self.rcv_nxt - u32::from(self.is.contains(Is::FIN_RECEIVED))).since(self.read_seq)
    }

    /// Bytes that were given to us and never sent.
    #[inline]
    pub(crate) fn unsent(&self) -> u32 {
        self.outgoing_bytes.saturating_sub(self.nxt.since(self.send_base))
    }

    /// Room for more to send.
    #[inline]
    pub(crate) fn writable(&self) -> u32 {
        self.options.send_buffer_bytes.saturating_sub(self.outgoing_bytes)
    }

    /// Whether a good part of the send buffer is free: what readiness tells.
    pub(crate) fn has_room(&self) -> bool {
        self.writable() > self.options.send_buffer_bytes / 3
    }

    /// How much of that there is memory for.
    pub(crate) fn appendable(&self, chunks: &Chunks) -> usize {
        let end = self.outgoing_bytes as usize;
        let allowed = chunks.allowance_bytes().saturating_sub(end);
        (self.writable() as usize).min(allowed).min(self.outgoing.appendable(chunks, end))
    }

    /// Whether everything that was sent, our FIN included, is acknowledged.
    pub(crate) fn fin_acknowledged(&self) -> bool {
        self.is.contains(Is::FIN_SENT) && self.una == self.nxt
    }

    /// Whether both sides have agreed to speak.
    pub(crate) fn is_synchronized(&self) -> bool {
        !matches!(self.state, TcpState::Closed | TcpState::SynSent | TcpState::SynReceived)
    }

    /// Whether the application may still send.
    pub(crate) fn can_send(&self) -> bool {
        matches!(self.state, TcpState::Established | TcpState::CloseWait)
            && !self.is.contains(Is::FIN_QUEUED)
    }

    /// Whether our side may still have data or a FIN to bring over.
    pub(crate) fn sends(&self) -> bool {
        matches!(
            self.state,
            TcpState::Established
                | TcpState::CloseWait
                | TcpState::FinWait1
                | TcpState::Closing
                | TcpState::LastAck
        )
    }

    /// The first of its timers.
    pub(crate) fn deadline_ns(&self) -> u64 {
        self.wait_until_ns.min(self.ack_at_ns).min(self.idle_at_ns)
    }

    /// Ends the connection at once. The peer is told if `reset`.
    pub(crate) fn abort(&mut self, shared: &mut Shared, failure: Option<Failure>, reset: bool) {
        if self.state == TcpState::Closed {
            return;
        }
        // Nobody is told who has not heard of us.
        self.is.set(Is::RESET_NOW, reset && self.state != TcpState::SynSent);
        if self.is.contains(Is::RESET_NOW) {
            self.is.insert(Is::WANTS_OUTPUT);
        }
        self.state = TcpState::Closed;
        if self.failure.is_none() {
            self.failure = failure;
        }
        self.release_sending(shared);
        self.release_gaps(shared);
        self.wait = Wait::Nothing;
        (self.wait_until_ns, self.ack_at_ns, self.idle_at_ns) = (NEVER, NEVER, NEVER);
        self.is.insert(Is::TELL_READABLE);
        self.is.insert(Is::TELL_WRITABLE);
    }

    /// Gives back everything that only sending needs.
    pub(crate) fn release_sending(&mut self, shared: &mut Shared) {
        self.outgoing.clear(&mut shared.chunks);
        self.outgoing_bytes = 0;
        if let Some(flight) = self.flight.take() {
            shared.give_flight(flight);
        }
    }

    pub(crate) fn release_gaps(&mut self, shared: &mut Shared) {
        if let Some(gaps) = self.gaps.take() {
            shared.give_gaps(gaps);
        }
    }

    /// The application sends nothing more: a FIN follows what it has written
    /// (RFC 9293 section 3.10.4).
    pub(crate) fn queue_fin(&mut self) {
        if self.is.contains(Is::FIN_QUEUED) || self.state == TcpState::Closed {
            return;
        }
        self.is.insert(Is::FIN_QUEUED);
        self.is.insert(Is::WANTS_OUTPUT);
        self.is.insert(Is::TELL_WRITABLE);
        match self.state {
            TcpState::Established => self.state = TcpState::FinWait1,
            TcpState::CloseWait => self.state = TcpState::LastAck,
            _ => {}
        }
    }

    /// Gives back all memory, before the connection is forgotten.
    pub(crate) fn release(&mut self, shared: &mut Shared) {
        self.release_sending(shared);
        self.release_gaps(shared);
        self.incoming.clear(&mut shared.chunks);
    }

    /// The clock of the time stamps: milliseconds, from a secret beginning
    /// (RFC 7323 section 5.4).
    pub(crate) fn ts_now(&self, now_ns: u64) -> u32 {
        ((now_ns / 1_000_000) as u32).wrapping_add(self.ts_offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With the slot around it and its share of the hash table.
    #[test]
    fn an_idle_connection_is_small() {
        let bytes = size_of::<Connection>();
        assert!(bytes <= 392, "{bytes} bytes");
    }
}
