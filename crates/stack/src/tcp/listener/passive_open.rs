//! Segments for listeners: new connections, and SYN cookies when the SYN queue is full (RFC 9293
//! section 3.10.7.2, RFC 4987).

use std::sync::Arc;

use tidegate_wire::DropReason;
use tidegate_wire::tcp::TcpFlags;

use super::cookie;
use crate::Transport;
use crate::ports::PortGroupsHandle;
use crate::tcp::connection::Connection;
use crate::tcp::demux::TcpTable;
use crate::tcp::flags::ConnFlags;
use crate::tcp::identity::milliseconds;
use crate::tcp::segment::{FourTuple, OutSegment, Segment};
use crate::tcp::seq::Seq;
use crate::tcp::socket::{TcpOptions, TcpState};

/// Time after the last SYN cookie was sent in which acknowledgements are checked for cookies:
/// two time steps of a cookie.
const COOKIE_LIFETIME_NS: u64 = 2 << 36;

/// Window of a SYN-ACK with a cookie, in bytes.
fn cookie_window(options: &TcpOptions) -> u16 {
    u16::try_from(options.receive_buffer_bytes).unwrap_or(u16::MAX)
}

/// True when a listener may have a connection with this four-tuple. False when another stack
/// that shares the port has that connection.
fn may_open_flow(port_groups: &PortGroupsHandle, options: &TcpOptions, tuple: &FourTuple) -> bool {
    !options.reuse_port || port_groups.begin_flow(Transport::Tcp, tuple.local(), tuple.remote())
}

impl TcpTable {
    /// Processes a segment for a listener (RFC 9293 section 3.10.7.2). `iss_after_time_wait` is the
    /// initial sequence number to use when the segment replaces a connection in TIME-WAIT.
    ///
    /// # Errors
    /// The drop reason.
    pub(crate) fn handle_listener_segment(
        &mut self,
        now_ns: u64,
        tuple: FourTuple,
        segment: &Segment<'_>,
        listener_index: u32,
        iss_after_time_wait: Option<Seq>,
    ) -> Result<(), DropReason> {
        if segment.is_rst() {
            return Err(DropReason::TcpReset);
        }
        if segment.is_ack() {
            return self.handle_listener_ack(now_ns, tuple, segment, listener_index);
        }
        if !segment.is_syn() || segment.is_fin() {
            return Err(DropReason::TcpFlags);
        }
        let id = self.listeners.id(listener_index);
        let is_full = self.connections.is_full();
        let half_open_limit = self.half_open_limit;
        let Some(listener) = self.listeners.at_mut(listener_index) else {
            return Err(DropReason::TcpNoSocket);
        };
        if listener.is_full() {
            return Err(DropReason::TcpAcceptQueueFull);
        }
        if listener.half_open >= half_open_limit {
            let options = Arc::clone(&listener.options);
            self.cookies_until_ns = now_ns.saturating_add(COOKIE_LIFETIME_NS);
            self.send_syn_cookie(now_ns, tuple, segment, &options);
            return Ok(());
        }
        if is_full {
            return Err(DropReason::TcpTableFull);
        }
        if !may_open_flow(&self.port_groups, &listener.options, &tuple) {
            return Err(DropReason::TcpNoSocket);
        }
        listener.half_open += 1;
        let options = Arc::clone(&listener.options);
        let iss = iss_after_time_wait.unwrap_or_else(|| self.initial_seq(now_ns, &tuple));
        let offset = self.timestamp_offset(&tuple);
        let mut connection = Connection::new(now_ns, tuple, options, iss, offset);
        connection.state = TcpState::SynReceived;
        connection.listener = Some(id);
        connection.flags.insert(ConnFlags::PASSIVE);
        connection.flags.insert(ConnFlags::ORPHAN);
        connection.flags.insert(ConnFlags::IN_SYN_QUEUE);
        connection.receive.begin(segment.seq);
        connection.apply_syn_options(now_ns, segment);
        // RFC 3168 section 6.1.1: a SYN that offers ECN has both bits.
        let offer = TcpFlags::ECE | TcpFlags::CWR;
        connection
            .flags
            .set(ConnFlags::ECN, segment.flags.contains(offer) && !segment.congestion_experienced);
        connection.send.window = segment.window.into();
        connection.send.max_window = connection.send.window;
        (connection.send.window_seq, connection.send.window_ack) = (segment.seq, iss);
        connection.flags.insert(ConnFlags::WANTS_OUTPUT);
        self.insert(now_ns, connection);
        Ok(())
    }

    /// Answers a SYN with a SYN cookie, without keeping state.
    fn send_syn_cookie(
        &mut self,
        now_ns: u64,
        tuple: FourTuple,
        segment: &Segment<'_>,
        options: &TcpOptions,
    ) {
        let mut out = OutSegment::bare(tuple, TcpFlags::SYN | TcpFlags::ACK);
        out.seq = cookie::encode(&self.secret, self.clock.ns(now_ns), &tuple, segment);
        out.ack = segment.seq + 1;
        out.window = cookie_window(options);
        out.options.push_mss(self.link_mss[usize::from(!tuple.is_v4())]);
        if let Some((value, _)) = segment.options.timestamps {
            // Without time stamps the other options cannot be encoded.
            if segment.options.sack_permitted {
                out.options.push_sack_permitted();
            }
            let offset = self.timestamp_offset(&tuple);
            let now = milliseconds(now_ns).wrapping_add(offset);
            out.options.push_timestamps(cookie::timestamp(now, segment), value);
            if segment.options.window_shift.is_some() {
                out.options.push_window_shift(options.window_shift());
            }
        }
        self.reply(out);
    }

    /// Processes an acknowledgement that has no connection: it may carry a SYN cookie.
    fn handle_listener_ack(
        &mut self,
        now_ns: u64,
        tuple: FourTuple,
        segment: &Segment<'_>,
        listener_index: u32,
    ) -> Result<(), DropReason> {
        let id = self.listeners.id(listener_index);
        let Some(listener) = self.listeners.at(listener_index) else {
            return Err(DropReason::TcpNoSocket);
        };
        // Another stack that shares the port may have sent the cookie.
        let shares = listener.options.reuse_port && self.port_groups.is_set();
        let accepts_cookies = now_ns < self.cookies_until_ns || shares;
        let may_bring_cookie = accepts_cookies && !segment.is_syn() && !segment.is_fin();
        let cookie_options = match may_bring_cookie {
            true => cookie::decode(&self.secret, self.clock.ns(now_ns), &tuple, segment),
            false => None,
        };
        let Some(cookie_options) = cookie_options else {
            // RFC 9293 section 3.10.7.2, second check.
            return Err(self.reply_reset(now_ns, tuple, segment));
        };
        if listener.is_full() {
            return Err(DropReason::TcpAcceptQueueFull);
        }
        if self.connections.is_full() {
            return Err(DropReason::TcpTableFull);
        }
        if !may_open_flow(&self.port_groups, &listener.options, &tuple) {
            return Err(DropReason::TcpNoSocket);
        }
        let offset = self.timestamp_offset(&tuple);
        let iss = segment.ack - 1;
        let mut connection =
            Connection::new(now_ns, tuple, Arc::clone(&listener.options), iss, offset);
        connection.listener = Some(id);
        connection.flags.insert(ConnFlags::PASSIVE);
        connection.flags.insert(ConnFlags::ORPHAN);
        connection.state = TcpState::SynReceived;
        connection.send.nxt = segment.ack;
        connection.receive.begin(segment.seq - 1);
        connection.receive.edge =
            connection.receive.nxt + u32::from(cookie_window(&connection.options));
        connection.send.set_peer_mss(Some(cookie_options.mss), tuple.is_v4());
        connection.flags.set(ConnFlags::SACK, cookie_options.sack);
        connection.flags.set(ConnFlags::TIMESTAMPS, segment.options.timestamps.is_some());
        if let Some((value, _)) = segment.options.timestamps {
            connection.receive.set_ts_recent(now_ns, value);
        }
        match cookie_options.window_shift {
            Some(shift) => connection.receive.peer_window_shift = shift,
            None => {
                (connection.receive.peer_window_shift, connection.receive.window_shift) = (0, 0);
            }
        }
        connection.set_mtu(usize::from(u16::MAX));
        connection.recovery.controller.set_mss(connection.send.mss.into());
        let index = self.insert(now_ns, connection);
        self.handle_connection_segment(now_ns, index, segment)
    }
}
