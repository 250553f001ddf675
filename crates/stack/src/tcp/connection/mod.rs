//! One connection (RFC 9293): what its halves decide together.
//!
//! Sending, receiving, recovery and timers are structs of their own, each with its methods. The
//! connection joins them: `arrival` processes a received segment, `ack` its acknowledgement and
//! `data` its payload; `output` selects what to send; `expiry` sets timers and acts on them.

mod ack;
mod arrival;
mod data;
mod expiry;
mod fast_path;
mod output;
mod snapshot;
mod time_wait;

use std::sync::Arc;

pub(crate) use arrival::SegmentOutcome;
pub(crate) use snapshot::{ConnectionSnapshot, ensure_valid};

use super::buffers::{BufferPool, TcpShared};
use super::flags::ConnFlags;
use super::receive::ReceiveState;
use super::recovery::Recovery;
use super::segment::FourTuple;
use super::send::{DEFAULT_MSS, SendState};
use super::seq::Seq;
use super::socket::{Failure, TcpListenerId, TcpOptions, TcpState, TcpTraffic};
use super::timers::{RtxTimer, TableLinks, Timers};

/// Consecutive time-outs after which a peer counts as silent.
const SILENT_RETRIES: u8 = 2;

/// One connection.
pub(crate) struct Connection {
    pub(crate) tuple: FourTuple,
    pub(crate) links: TableLinks,
    /// Listener that created the connection, until it is accepted.
    pub(crate) listener: Option<TcpListenerId>,
    pub(crate) state: TcpState,
    /// Number of times that the send buffer was doubled.
    send_growth: u8,
    pub(crate) options: Arc<TcpOptions>,
    /// Reason of the end, until it was reported to the application.
    pub(crate) failure: Option<Failure>,
    /// Last ICMP error of the path; reported when the connection gives up (soft error of RFC 1122
    /// section 4.2.3.9).
    pub(crate) soft_failure: Option<Failure>,

    pub(crate) send: SendState,
    pub(crate) receive: ReceiveState,
    pub(crate) recovery: Recovery,
    pub(crate) timers: Timers,
    pub(crate) flags: ConnFlags,
    pub(crate) traffic: TcpTraffic,
}

impl Connection {
    /// Connection in CLOSED that has sent and received nothing.
    pub(crate) fn new(
        now_ns: u64,
        tuple: FourTuple,
        options: Arc<TcpOptions>,
        iss: Seq,
        ts_offset: u32,
    ) -> Self {
        let default_mss = DEFAULT_MSS[usize::from(!tuple.is_v4())];
        Self {
            tuple,
            links: TableLinks::default(),
            listener: None,
            state: TcpState::Closed,
            send_growth: 0,
            send: SendState::new(iss, ts_offset, default_mss),
            receive: ReceiveState::new(options.window_shift()),
            recovery: Recovery::new(options.congestion_control, default_mss, iss),
            timers: Timers::new(now_ns),
            options,
            failure: None,
            soft_failure: None,
            flags: ConnFlags::empty(),
            traffic: TcpTraffic::default(),
        }
    }

    /// Sets the MSS for a path MTU of `mtu` bytes.
    #[inline(always)]
    pub(crate) fn set_mtu(&mut self, mtu: usize) {
        let timestamps = self.flags.contains(ConnFlags::TIMESTAMPS);
        self.send.set_mtu(mtu, self.tuple.is_v4(), timestamps);
    }

    /// Estimate of the bytes in flight (RFC 6675, pipe).
    fn pipe(&self) -> u32 {
        self.recovery.pipe(&self.send, self.flags.contains(ConnFlags::SACK))
    }

    /// Window field of a segment to send. `scaled` is false for a SYN (RFC 7323 section 2.2).
    #[inline(always)]
    fn window_field(&mut self, scaled: bool) -> u16 {
        let unread = self.readable();
        self.receive.window_field(scaled, self.receive_buffer_bytes(), unread)
    }

    /// Size of the receive buffer now, in bytes.
    #[inline]
    pub(crate) fn receive_buffer_bytes(&self) -> u32 {
        self.options.grown_receive_buffer(self.receive.growth)
    }

    /// Size of the send buffer now, in bytes.
    #[inline]
    pub(crate) fn send_buffer_bytes(&self) -> u32 {
        self.options.grown_send_buffer(self.send_growth)
    }

    /// True when the application may be told that it can write.
    #[inline]
    pub(crate) fn has_send_space(&self) -> bool {
        // Half of the first size is free space in each larger buffer too.
        self.send.queued_bytes < self.options.send_buffer_bytes / 2
            || self.send.has_space(self.send_buffer_bytes())
    }

    /// True while the connection holds its four-tuple, by which segments find it.
    pub(crate) fn holds_tuple(&self) -> bool {
        self.state != TcpState::Closed || self.flags.contains(ConnFlags::RESET_NOW)
    }

    /// True while the connection may send segments of its own from its local address; answers are
    /// not counted.
    pub(crate) fn uses_local_address(&self) -> bool {
        !matches!(self.state, TcpState::Closed | TcpState::TimeWait)
    }

    /// Leaves a connection that is just established in the SYN queue of its listener, if its peer
    /// has sent nothing and the listener defers such connections; returns true then.
    pub(crate) fn defer_accept(&mut self, now_ns: u64) -> bool {
        let Some(seconds) = self.options.defer_accept_s else { return false };
        // A connection from a SYN cookie is in no queue.
        let is_deferred = !self.has_input() && self.is_deferred();
        if is_deferred {
            self.timers.set_idle(now_ns, u64::from(seconds) * 1_000_000_000);
        }
        is_deferred
    }

    /// True for a connection that is established, but waits for data before it can be accepted.
    pub(crate) fn is_deferred(&self) -> bool {
        self.flags.contains(ConnFlags::IN_SYN_QUEUE)
            && matches!(self.state, TcpState::Established | TcpState::CloseWait)
    }

    /// True if the peer has sent data or the end of it.
    pub(crate) fn has_input(&self) -> bool {
        self.readable() > 0 || self.flags.contains(ConnFlags::FIN_RECEIVED)
    }

    /// True if what can be read is all that the application gets: the peer has ended its data, or
    /// reading was shut down.
    pub(crate) fn has_read_ended(&self) -> bool {
        self.flags.contains(ConnFlags::FIN_RECEIVED) || self.flags.contains(ConnFlags::READ_SHUT)
    }

    /// Bytes that the application can read.
    #[inline]
    pub(crate) fn readable(&self) -> u32 {
        let fin = u32::from(self.flags.contains(ConnFlags::FIN_RECEIVED));
        (self.receive.nxt - fin).since(self.receive.read_seq)
    }

    /// Bytes that can be appended now: free in the send buffer and backed by memory. A connection
    /// whose peer takes no data gets nothing of the reserve.
    pub(crate) fn appendable_bytes(&self, pool: &BufferPool) -> usize {
        match pool.has_reserve() || !self.is_stalled() {
            true => self.send.appendable_bytes(self.send_buffer_bytes(), pool),
            false => 0,
        }
    }

    /// True while the peer does not take the data that waits for it: its window is closed, or it
    /// has not answered since a second time-out.
    pub(crate) fn is_stalled(&self) -> bool {
        let is_silent = self.recovery.retries >= SILENT_RETRIES;
        self.can_transmit()
            && self.send.queued_bytes > 0
            && (self.timers.rtx == RtxTimer::Persist || is_silent)
    }

    /// True when everything sent is acknowledged, including our FIN.
    pub(crate) fn fin_acknowledged(&self) -> bool {
        self.flags.contains(ConnFlags::FIN_SENT) && self.send.una == self.send.nxt
    }

    /// True in the synchronized states of RFC 9293 section 3.3.2 (from ESTABLISHED on).
    pub(crate) fn is_synchronized(&self) -> bool {
        !matches!(self.state, TcpState::Closed | TcpState::SynSent | TcpState::SynReceived)
    }

    /// True when the application may still send.
    pub(crate) fn can_send(&self) -> bool {
        matches!(self.state, TcpState::Established | TcpState::CloseWait)
            && !self.flags.contains(ConnFlags::FIN_QUEUED)
    }

    /// True in states in which data or a FIN may still have to be delivered to the peer.
    pub(crate) fn can_transmit(&self) -> bool {
        matches!(
            self.state,
            TcpState::Established
                | TcpState::CloseWait
                | TcpState::FinWait1
                | TcpState::Closing
                | TcpState::LastAck
        )
    }

    /// Ends the connection at once. Sends a RST if `reset`.
    pub(crate) fn abort(&mut self, shared: &mut TcpShared, failure: Option<Failure>, reset: bool) {
        if self.state == TcpState::Closed {
            return;
        }
        // No RST in SYN-SENT: the peer does not know the connection.
        self.flags.set(ConnFlags::RESET_NOW, reset && self.state != TcpState::SynSent);
        if self.flags.contains(ConnFlags::RESET_NOW) {
            self.flags.insert(ConnFlags::WANTS_OUTPUT);
        }
        self.state = TcpState::Closed;
        if self.failure.is_none() {
            self.failure = failure;
        }
        self.release_sending(shared);
        self.receive.release_out_of_order(shared);
        self.timers.clear();
        self.flags.insert(ConnFlags::NOTIFY_READABLE);
        self.flags.insert(ConnFlags::NOTIFY_WRITABLE);
    }

    /// Frees the send buffer and the scoreboard.
    pub(crate) fn release_sending(&mut self, shared: &mut TcpShared) {
        self.send.release(&mut shared.pool);
        self.recovery.release(shared);
    }

    /// Shuts down sending: a FIN follows the written data (RFC 9293 section 3.10.4).
    pub(crate) fn queue_fin(&mut self) {
        if self.flags.contains(ConnFlags::FIN_QUEUED) || self.state == TcpState::Closed {
            return;
        }
        self.flags.insert(ConnFlags::FIN_QUEUED);
        self.flags.insert(ConnFlags::WANTS_OUTPUT);
        self.flags.insert(ConnFlags::NOTIFY_WRITABLE);
        // Closed in both directions now: that concerns readers too.
        if self.flags.contains(ConnFlags::FIN_RECEIVED) {
            self.flags.insert(ConnFlags::NOTIFY_READABLE);
        }
        match self.state {
            TcpState::Established => self.state = TcpState::FinWait1,
            TcpState::CloseWait => self.state = TcpState::LastAck,
            _ => {}
        }
    }

    /// Frees all memory, before the connection is removed.
    pub(crate) fn release(&mut self, shared: &mut TcpShared) {
        self.release_sending(shared);
        self.receive.release_out_of_order(shared);
        self.receive.queue.clear(&mut shared.pool);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The slot and the share of the hash table come on top.
    #[test]
    fn an_idle_connection_is_small() {
        let bytes = size_of::<Connection>();
        assert!(bytes <= 424, "{bytes} bytes");
    }
}
