//! TIME-WAIT: remembering a connection until no segment of it can come any more
//! (RFC 9293 section 3.6.1), and letting the same ends begin anew before that
//! when it is safe (RFC 6191).

use super::connection::{Connection, Is, NEVER, Shared, Wait};
use super::segment::Segment;
use super::seq::Seq;
use super::socket::TcpState;

/// After so long in TIME-WAIT time stamps tell old segments from new ones.
const REPLACEABLE_NS: u64 = 1_000_000_000;

impl Connection {
    /// Everything is said and acknowledged.
    pub(crate) fn enter_time_wait(&mut self, now_ns: u64, shared: &mut Shared) {
        self.state = TcpState::TimeWait;
        self.release_sending(shared);
        (self.wait, self.wait_until_ns) = (Wait::Nothing, NEVER);
        self.idle_at_ns = now_ns.saturating_add(shared.time_wait_ns);
    }

    /// Whether a SYN may begin a new connection in place of this one, which is
    /// in TIME-WAIT: its numbers or time stamps are beyond all that the old one
    /// had (RFC 6191 section 2, RFC 9293 section 3.6.1).
    pub(crate) fn gives_way_to(&self, syn: &Segment<'_>) -> bool {
        if !syn.is_syn() || syn.is_ack() || syn.is_rst() || syn.is_fin() {
            return false;
        }
        let beyond = self.rcv_nxt.is_before(syn.seq);
        match syn.options.timestamps {
            Some((value, _)) if self.is.contains(Is::TIMESTAMPS) => {
                Seq(self.ts_recent).is_before(Seq(value)) || value == self.ts_recent && beyond
            }
            // PAWS will tell old segments, which have none, from new ones.
            Some(_) => true,
            None => beyond,
        }
    }

    /// Whether we may begin a new connection in place of this one: it is in
    /// TIME-WAIT, and our time stamps are later by now than all that it sent
    /// (RFC 6191 section 2, seen from the other side).
    pub(crate) fn may_be_replaced(&self, now_ns: u64, shared: &Shared) -> bool {
        let since_ns = self.idle_at_ns.saturating_sub(shared.time_wait_ns);
        self.state == TcpState::TimeWait
            && self.is.contains(Is::TIMESTAMPS)
            && now_ns.saturating_sub(since_ns) >= REPLACEABLE_NS
    }

    /// The number that the new connection begins with is beyond ours.
    pub(crate) fn next_iss(&self, proposed: Seq) -> Seq {
        if proposed.is_after(self.nxt) { proposed } else { self.nxt + 65_536 }
    }
}
