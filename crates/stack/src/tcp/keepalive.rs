//! Timer expiry of a connection, and keep-alive (RFC 9293 section 3.8.4).

use super::connection::{ConnFlags, Connection, NEVER, TcpShared};
use super::socket::{Failure, TcpState};

const NS_PER_MS: u64 = 1_000_000;

impl Connection {
    /// Handles all timers that are due.
    pub(crate) fn on_timers(&mut self, now_ns: u64, shared: &mut TcpShared) {
        if self.ack_deadline_ns <= now_ns {
            self.ack_deadline_ns = NEVER;
            self.acknowledge_now();
        }
        if self.rtx_deadline_ns <= now_ns {
            self.on_wait_expired(now_ns, shared);
        }
        if self.idle_deadline_ns <= now_ns {
            self.on_idle_deadline(now_ns, shared);
        }
    }

    /// Handles the deadline of TIME-WAIT, FIN-WAIT-2 or keep-alive.
    fn on_idle_deadline(&mut self, now_ns: u64, shared: &mut TcpShared) {
        self.idle_deadline_ns = NEVER;
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
        let due_ns = self.last_received_ns.saturating_add(u64::from(keepalive.idle_ms) * NS_PER_MS);
        if due_ns > now_ns {
            // The peer has sent segments since the timer was set.
            self.idle_deadline_ns = due_ns;
            return;
        }
        // Data in flight is retransmitted and needs no probe.
        if self.flight.is_none() {
            if self.keepalive_probes_sent >= keepalive.probes {
                return self.abort(shared, Some(Failure::TimedOut), true);
            }
            self.keepalive_probes_sent += 1;
            self.flags.insert(ConnFlags::KEEPALIVE_NOW);
            self.flags.insert(ConnFlags::WANTS_OUTPUT);
        }
        self.idle_deadline_ns = now_ns.saturating_add(u64::from(keepalive.interval_ms) * NS_PER_MS);
    }
}
