//! List of the sockets of an embedded stack, for reports.

use std::net::SocketAddr;

use tidegate_stack::{QUEUE_FILL_SCALE, Stack, TcpInfo};

use super::handle::Net;

/// Socket of an embedded stack.
#[derive(Clone, Copy, Debug)]
pub struct SocketEntry {
    /// Protocol and role of the socket.
    pub role: SocketRole,
    /// Local address.
    pub local: Option<SocketAddr>,
    /// Address of the peer of a connected socket.
    pub peer: Option<SocketAddr>,
    /// Amount queued for the program: datagrams, connections or bytes.
    pub waiting: usize,
}

/// Protocol and role of a socket.
#[derive(Clone, Copy, Debug)]
pub enum SocketRole {
    /// UDP socket, with the fill level of its receive queue in percent.
    Udp {
        /// Fill level of the receive queue.
        fill_percent: u32,
    },
    /// TCP listener.
    Listener,
    /// TCP connection.
    Connection(TcpInfo),
}

impl Net {
    /// Lists the sockets of an embedded stack, at most `max` of them: UDP sockets, listeners, then
    /// connections. The stack does nothing else meanwhile. None for an attached stack.
    pub fn sockets(&self, max: usize) -> Vec<SocketEntry> {
        let Some(core) = self.lock_embedded() else { return Vec::new() };
        list_sockets(core.engine.stack(), max)
    }
}

fn list_sockets(stack: &Stack, max: usize) -> Vec<SocketEntry> {
    let udp = stack.udp_sockets().map(|id| {
        let fill = stack.udp_queue_fill(id).unwrap_or(0);
        SocketEntry {
            role: SocketRole::Udp { fill_percent: fill * 100 / QUEUE_FILL_SCALE },
            local: stack.udp_local_addr(id),
            peer: stack.udp_peer_addr(id),
            waiting: stack.udp_queue_len(id),
        }
    });
    let listeners = stack.tcp_listeners().map(|id| SocketEntry {
        role: SocketRole::Listener,
        local: stack.tcp_listener_addr(id),
        peer: None,
        waiting: stack.tcp_acceptable(id),
    });
    let connections = stack.tcp_sockets().filter_map(|id| {
        Some(SocketEntry {
            role: SocketRole::Connection(stack.tcp_info(id)?),
            local: stack.tcp_local_addr(id),
            peer: stack.tcp_peer_addr(id),
            waiting: stack.tcp_readable(id),
        })
    });
    udp.chain(listeners).chain(connections).take(max).collect()
}
