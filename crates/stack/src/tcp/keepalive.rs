//! The timers of a connection, and keep-alive (RFC 9293 section 3.8.4).

use super::connection::{Connection, Is, NEVER, Shared};
use super::socket::{Failure, TcpState};

const MS: u64 = 1_000_000;

impl Connection {
    /// Does what is due.
    pub(crate) fn on_timers(&mut self, now_ns: u64, shared: &mut Shared) {
        if self.ack_at_ns <= now_ns {
            self.ack_at_ns = NEVER;
            self.acknowledge_now();
        }
        if self.wait_until_ns <= now_ns {
            self.on_wait_over(now_ns, shared);
        }
        if self.idle_at_ns <= now_ns {
            self.on_idle(now_ns, shared);
        }
    }

    fn on_idle(&mut self, now_ns: u64, shared: &mut Shared) {
        self.idle_at_ns = NEVER;
        match self.state {
            TcpState::TimeWait => self.abort(shared, None, false),
            TcpState::FinWait2 if self.is.contains(Is::ORPHAN) => self.abort(shared, None, false),
            TcpState::Closed | TcpState::SynSent | TcpState::SynReceived => {}
            _ => self.keep_alive(now_ns, shared),
        }
    }

    fn keep_alive(&mut self, now_ns: u64, shared: &mut Shared) {
        let Some(keepalive) = self.options.keepalive else { return };
        let due_ns = self.heard_ns.saturating_add(u64::from(keepalive.idle_ms) * MS);
        if due_ns > now_ns {
            // It spoke since the timer was set.
            self.idle_at_ns = due_ns;
            return;
        }
        // Data on its way asks by itself.
        if self.flight.is_none() {
            if self.keepalives >= keepalive.probes {
                return self.abort(shared, Some(Failure::TimedOut), true);
            }
            self.keepalives += 1;
            self.is.insert(Is::KEEPALIVE_NOW);
            self.is.insert(Is::WANTS_OUTPUT);
        }
        self.idle_at_ns = now_ns.saturating_add(u64::from(keepalive.interval_ms) * MS);
    }
}
