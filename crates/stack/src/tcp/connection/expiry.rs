//! Timers of a connection: when they are set, and what follows when they expire (RFC 6298
//! sections 5.4 to 5.7, RFC 8985 section 7, RFC 9293 sections 3.8.3, 3.8.4 and 3.8.6.1).

use super::Connection;
use crate::tcp::buffers::TcpShared;
use crate::tcp::flags::ConnFlags;
use crate::tcp::recovery::RecoveryPhase;
use crate::tcp::socket::{Failure, TcpState};
use crate::tcp::timers::{NEVER, NS_PER_MS, RtxTimer};

/// Longest time that a peer may delay the acknowledgement of a single segment (RFC 8985
/// section 7.2, WCDelAckT).
const WORST_CASE_DELAYED_ACK_NS: u64 = 200_000_000;
/// Time-out of a tail probe before the first RTT sample (RFC 8985 section 7.2).
const INITIAL_TAIL_PROBE_NS: u64 = 1_000_000_000;
/// Maximum retransmissions of data (R2 of RFC 9293 section 3.8.3; about 15 minutes).
const MAX_DATA_RETRIES: u8 = 15;
/// Maximum retransmissions of a SYN: at least three minutes (RFC 9293 section 3.8.3).
const MAX_SYN_RETRIES: u8 = 7;
const MAX_SYN_ACK_RETRIES: u8 = 5;
/// Maximum time without progress for a connection that the application has closed.
const MAX_ORPHAN_STALL_NS: u64 = 120_000_000_000;
/// Maximum time for which a segment that is not full is held back, with nothing in flight, as at
/// Linux.
const MAX_CORK_NS: u64 = 200_000_000;
/// Consecutive time-outs after which the path is suspected to swallow large packets
/// (RFC 4821 section 7.7).
const BLACK_HOLE_RETRIES: u8 = 5;

impl Connection {
    /// Handles all timers that are due.
    pub(crate) fn on_timers(&mut self, now_ns: u64, shared: &mut TcpShared) {
        if self.timers.ack_deadline_ns <= now_ns {
            self.timers.ack_deadline_ns = NEVER;
            self.acknowledge_now();
        }
        if self.timers.rtx_deadline_ns <= now_ns {
            self.on_wait_expired(now_ns, shared);
        }
        if self.timers.idle_deadline_ns <= now_ns {
            self.on_idle_deadline(now_ns, shared);
        }
    }

    /// Handles the deadline of TIME-WAIT, FIN-WAIT-2 or keep-alive.
    fn on_idle_deadline(&mut self, now_ns: u64, shared: &mut TcpShared) {
        self.timers.idle_deadline_ns = NEVER;
        match self.state {
            TcpState::TimeWait => self.abort(shared, None, false),
            TcpState::FinWait2 if self.flags.contains(ConnFlags::ORPHAN) => {
                self.abort(shared, None, false);
            }
            TcpState::Closed | TcpState::SynSent | TcpState::SynReceived => {}
            _ => self.send_keepalive_if_due(now_ns, shared),
        }
    }

    /// Sends a keep-alive probe, or aborts the connection when enough probes went unanswered.
    fn send_keepalive_if_due(&mut self, now_ns: u64, shared: &mut TcpShared) {
        let Some(keepalive) = self.options.keepalive else { return };
        let due_ns =
            self.timers.last_received_ns.saturating_add(u64::from(keepalive.idle_ms) * NS_PER_MS);
        if due_ns > now_ns {
            // The peer has sent segments since the timer was set.
            self.timers.idle_deadline_ns = due_ns;
            return;
        }
        // Data in flight is retransmitted and needs no probe.
        if self.recovery.flight.is_none() {
            if self.timers.keepalive_probes_sent >= keepalive.probes {
                return self.abort(shared, Some(Failure::TimedOut), true);
            }
            self.timers.keepalive_probes_sent += 1;
            self.flags.insert(ConnFlags::KEEPALIVE_NOW);
            self.flags.insert(ConnFlags::WANTS_OUTPUT);
        }
        self.timers.set_idle(now_ns, u64::from(keepalive.interval_ms) * NS_PER_MS);
    }

    /// Sets the timer: for the segments in flight, or earlier for data that waits for its time.
    pub(crate) fn arm_timer(&mut self, now_ns: u64) {
        self.arm_flight_timer(now_ns);
        if let Some(pacing_at_ns) = self.recovery.pacing_deadline_ns()
            && pacing_at_ns < self.timers.rtx_deadline_ns
        {
            self.timers.set_rtx(RtxTimer::Pacing, pacing_at_ns);
        }
    }

    /// Sets the timer for the segments in flight (RFC 6298 section 5, RFC 8985 section 7.2).
    fn arm_flight_timer(&mut self, now_ns: u64) {
        let Some(flight) = self.recovery.flight.as_ref().filter(|flight| !flight.is_empty()) else {
            return self.arm_window_probe(now_ns);
        };
        if self.send.window == 0 && self.is_synchronized() {
            // RFC 9293 section 3.8.6: the window has shrunk behind what was sent. Retransmissions
            // probe it, and do not end the connection while they are answered.
            if self.timers.rtx != RtxTimer::Persist {
                self.timers.window_probes_sent = 0;
            }
            return self.set_window_probe(self.timers.rto_base_ns);
        }
        let rto_at_ns = self.timers.rto_base_ns.saturating_add(self.recovery.rtt.rto_ns());
        let rto_at_ns = rto_at_ns.min(self.user_timeout_at_ns());
        self.timers.set_rtx(RtxTimer::Retransmission, rto_at_ns);
        if flight.reorder_deadline_ns != 0 && flight.reorder_deadline_ns < rto_at_ns {
            return self.timers.set_rtx(RtxTimer::Reordering, flight.reorder_deadline_ns);
        }
        let may_probe = self.flags.contains(ConnFlags::SACK)
            && self.is_synchronized()
            && self.recovery.phase == RecoveryPhase::Open
            && !self.flags.contains(ConnFlags::TAIL_PROBE_SENT)
            && !flight.has_sacked()
            && flight.lost_bytes() == 0
            && self.recovery.rtt.backoff == 0;
        if may_probe {
            let delayed_ack_ns = if flight.len() == 1 { WORST_CASE_DELAYED_ACK_NS } else { 0 };
            let wait_ns = self
                .recovery
                .rtt
                .smoothed_ns()
                .map_or(INITIAL_TAIL_PROBE_NS, |rtt| 2 * rtt + delayed_ack_ns);
            let probe_at_ns =
                self.timers.rto_base_ns.max(self.timers.last_sent_ns).saturating_add(wait_ns);
            if probe_at_ns < rto_at_ns {
                self.timers.set_rtx(RtxTimer::TailProbe, probe_at_ns);
            }
        }
    }

    /// Sets the timer while nothing is in flight. If data waits for the peer's window, this is
    /// the time of the next window probe (RFC 9293 section 3.8.6.1). If data waits for more data,
    /// this is the end of the wait.
    fn arm_window_probe(&mut self, now_ns: u64) {
        let fin_waits =
            self.flags.contains(ConnFlags::FIN_QUEUED) && !self.flags.contains(ConnFlags::FIN_SENT);
        if !self.can_transmit()
            || self.send.unsent() == 0 && !fin_waits
            || self.flags.contains(ConnFlags::WANTS_OUTPUT)
        {
            self.timers.clear_rtx();
        } else if self.is_held_by_cork() {
            if self.timers.rtx != RtxTimer::Cork || self.timers.rtx_deadline_ns == NEVER {
                self.timers.set_rtx(RtxTimer::Cork, now_ns.saturating_add(MAX_CORK_NS));
            }
        } else if self.timers.rtx != RtxTimer::Persist {
            self.timers.window_probes_sent = 0;
            self.timers.stalled_since_ns = now_ns;
            self.set_window_probe(now_ns);
        } else if self.timers.rtx_deadline_ns == NEVER {
            self.set_window_probe(now_ns);
        }
    }

    /// Sets the timer for the next window probe, counted from `since_ns`.
    fn set_window_probe(&mut self, since_ns: u64) {
        let wait_ns = self.recovery.rtt.probe_wait_ns(self.timers.window_probes_sent);
        let probe_at_ns = since_ns.saturating_add(wait_ns).min(self.user_timeout_at_ns());
        self.timers.set_rtx(RtxTimer::Persist, probe_at_ns);
    }

    /// Time at which the user time-out ends the connection, unless there is progress.
    fn user_timeout_at_ns(&self) -> u64 {
        self.options.user_timeout_ms.map_or(NEVER, |limit_ms| {
            self.timers.stalled_since_ns.saturating_add(u64::from(limit_ms) * NS_PER_MS)
        })
    }

    /// Handles expiry of the timer for segments in flight. The timer restarts only after the
    /// resulting output was sent: a full transmit queue says nothing about the peer.
    pub(crate) fn on_wait_expired(&mut self, now_ns: u64, shared: &mut TcpShared) {
        self.timers.rtx_deadline_ns = NEVER;
        match self.timers.rtx {
            RtxTimer::Off => {}
            RtxTimer::Reordering => {
                let outstanding = self.send.outstanding();
                self.detect_lost(now_ns);
                let is_open = self.recovery.phase == RecoveryPhase::Open;
                if is_open && self.recovery.lost_bytes() > 0 && !self.recovery.lost_only_mtu_probe()
                {
                    self.recovery.enter_fast_recovery(&self.send, outstanding);
                    self.on_recovery_entered();
                }
                self.flags.insert(ConnFlags::WANTS_OUTPUT);
            }
            RtxTimer::Pacing => {
                self.recovery.end_pacing_wait();
                self.flags.insert(ConnFlags::WANTS_OUTPUT);
            }
            RtxTimer::Cork => {
                self.flags.insert(ConnFlags::FORCE_OUTPUT);
                self.flags.insert(ConnFlags::WANTS_OUTPUT);
            }
            RtxTimer::TailProbe => {
                self.flags.insert(ConnFlags::TAIL_PROBE_NOW);
                self.flags.insert(ConnFlags::TAIL_PROBE_SENT);
                self.send.tail_probe_end = self.send.nxt;
                self.timers.rto_base_ns = now_ns;
                self.flags.insert(ConnFlags::WANTS_OUTPUT);
            }
            RtxTimer::Persist => self.on_window_probe(now_ns, shared),
            RtxTimer::Retransmission => self.on_timeout(now_ns, shared),
        }
    }

    /// True if the user time-out has passed, or the time-out of a closed connection without
    /// progress.
    fn should_give_up(&self, now_ns: u64) -> bool {
        let stalled_ns = now_ns.saturating_sub(self.timers.stalled_since_ns);
        let limit_ms = self.options.user_timeout_ms;
        limit_ms.is_some_and(|limit_ms| stalled_ns >= u64::from(limit_ms) * NS_PER_MS)
            || self.flags.contains(ConnFlags::ORPHAN)
                && self.is_synchronized()
                && stalled_ns >= MAX_ORPHAN_STALL_NS
    }

    fn give_up(&mut self, shared: &mut TcpShared) {
        let failure = self.soft_failure.unwrap_or(Failure::TimedOut);
        self.abort(shared, Some(failure), self.is_synchronized());
    }

    /// Sends a window probe, for as long as the peer answers (RFC 9293 section 3.8.6.1). While
    /// memory is scarce, a peer that only answers has no more time than a silent peer (RFC 6429
    /// section 4).
    fn on_window_probe(&mut self, now_ns: u64, shared: &mut TcpShared) {
        self.recovery.retries = self.recovery.retries.saturating_add(1);
        let probes = match shared.pool.is_scarce() {
            true => self.recovery.retries.max(self.timers.window_probes_sent),
            false => self.recovery.retries,
        };
        if probes > MAX_DATA_RETRIES || self.should_give_up(now_ns) {
            return self.give_up(shared);
        }
        self.timers.window_probes_sent = self.timers.window_probes_sent.saturating_add(1);
        self.timers.rto_base_ns = now_ns;
        if self.recovery.mark_first_lost() {
            self.flags.insert(ConnFlags::FORCE_RETRANSMISSION);
        } else {
            self.flags.insert(ConnFlags::FORCE_OUTPUT);
        }
        self.flags.insert(ConnFlags::WANTS_OUTPUT);
    }

    /// Handles a retransmission time-out (RFC 6298 sections 5.4 to 5.7).
    fn on_timeout(&mut self, now_ns: u64, shared: &mut TcpShared) {
        let max_retries = match self.state {
            TcpState::SynSent => MAX_SYN_RETRIES,
            TcpState::SynReceived => MAX_SYN_ACK_RETRIES,
            _ => MAX_DATA_RETRIES,
        };
        // An attempt to connect to a host reported unreachable ends with this time-out.
        let is_unreachable = self.state == TcpState::SynSent && self.soft_failure.is_some();
        self.recovery.retries = self.recovery.retries.saturating_add(1);
        if self.recovery.retries > max_retries || is_unreachable || self.should_give_up(now_ns) {
            return self.give_up(shared);
        }
        let outstanding = self.send.outstanding();
        let Some(flight) = &mut self.recovery.flight else { return };
        flight.reorder_deadline_ns = 0;
        if self.is_synchronized() {
            let sack = self.flags.contains(ConnFlags::SACK);
            self.recovery.enter_loss(&self.send, outstanding, sack);
            if self.recovery.retries == BLACK_HOLE_RETRIES {
                let is_v4 = self.tuple.is_v4();
                self.recovery.on_black_hole(now_ns, &mut self.send, is_v4, sack);
            }
        } else {
            // RFC 5681 section 3.1: after a lost SYN, the initial window is one segment.
            self.recovery.controller.window.cwnd = self.send.mss.into();
            self.flags.insert(ConnFlags::SYN_RETRANSMITTED);
            self.recovery.begin_loss_phase(&self.send);
        }
        self.recovery.mark_all_lost();
        self.flags.remove(ConnFlags::TAIL_PROBE_SENT);
        self.recovery.rtt.back_off();
        self.timers.rto_base_ns = now_ns;
        self.flags.insert(ConnFlags::FORCE_RETRANSMISSION);
        self.flags.insert(ConnFlags::WANTS_OUTPUT);
    }
}
