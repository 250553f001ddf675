//! TIME-WAIT: keeps a connection until none of its segments can arrive any more (RFC 9293
//! section 3.6.1). A new connection may reuse the tuple earlier when it is safe (RFC 6191).

use super::Connection;
use crate::tcp::buffers::TcpShared;
use crate::tcp::flags::ConnFlags;
use crate::tcp::segment::Segment;
use crate::tcp::seq::Seq;
use crate::tcp::socket::TcpState;

/// Time in TIME-WAIT after which time stamps distinguish old segments from new segments.
const REUSE_AFTER_NS: u64 = 1_000_000_000;

impl Connection {
    /// Enters TIME-WAIT: both sides have sent and acknowledged everything.
    pub(crate) fn enter_time_wait(&mut self, now_ns: u64, shared: &mut TcpShared) {
        self.state = TcpState::TimeWait;
        // The application may wait for the end of the connection.
        self.flags.insert(ConnFlags::NOTIFY_READABLE);
        self.release_sending(shared);
        self.timers.clear_rtx();
        self.timers.set_idle(now_ns, shared.time_wait_ns);
    }

    /// True if a SYN may open a new connection in place of this connection in TIME-WAIT: its
    /// sequence number or time stamp is beyond those of the old connection (RFC 6191 section 2,
    /// RFC 9293 section 3.6.1).
    pub(crate) fn can_be_replaced_by(&self, syn: &Segment<'_>) -> bool {
        if !syn.is_syn() || syn.is_ack() || syn.is_rst() || syn.is_fin() {
            return false;
        }
        let beyond = self.receive.nxt.is_before(syn.seq);
        match syn.options.timestamps {
            Some((value, _)) if self.flags.contains(ConnFlags::TIMESTAMPS) => {
                Seq(self.receive.ts_recent).is_before(Seq(value))
                    || value == self.receive.ts_recent && beyond
            }
            // PAWS distinguishes old segments, which have no time stamps, from new segments.
            Some(_) => true,
            None => beyond,
        }
    }

    /// True if the local side may open a new connection in place of this connection in TIME-WAIT:
    /// our time stamps are now later than all that the connection has sent (RFC 6191 section 2,
    /// applied to the active side).
    pub(crate) fn can_be_replaced(&self, now_ns: u64, shared: &TcpShared) -> bool {
        let entered_ns = self.timers.idle_deadline_ns.saturating_sub(shared.time_wait_ns);
        self.state == TcpState::TimeWait
            && self.flags.contains(ConnFlags::TIMESTAMPS)
            && now_ns.saturating_sub(entered_ns) >= REUSE_AFTER_NS
    }

    /// Initial sequence number of the new connection, beyond those of this connection.
    pub(crate) fn next_iss(&self, proposed: Seq) -> Seq {
        if proposed.is_after(self.send.nxt) { proposed } else { self.send.nxt + 65_536 }
    }
}
