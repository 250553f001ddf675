//! Options of a socket, as its program has set them.

use std::net::SocketAddr;

use libc::{c_int, linger};
use tidegate::{CongestionControl, Keepalive, TcpOptions, UdpOptions};

/// Options of a socket.
#[derive(Clone)]
pub(crate) struct Settings {
    /// Address of `bind`, for a TCP socket that neither listens nor connects yet.
    pub(crate) bound: Option<SocketAddr>,
    pub(crate) reuse_address: bool,
    pub(crate) reuse_port: bool,
    pub(crate) broadcast: bool,
    pub(crate) v6_only: bool,
    pub(crate) no_delay: bool,
    pub(crate) cork: bool,
    pub(crate) sends_keepalives: bool,
    pub(crate) keepalive: Keepalive,
    /// Buffer sizes that the program has chosen, in bytes.
    pub(crate) send_buffer_bytes: Option<u32>,
    pub(crate) receive_buffer_bytes: Option<u32>,
    pub(crate) hop_limit: Option<u8>,
    pub(crate) traffic_class: u8,
    pub(crate) user_timeout_ms: Option<u32>,
    pub(crate) congestion_control: CongestionControl,
    pub(crate) defer_accept_s: Option<u16>,
    pub(crate) dont_fragment: bool,
    pub(crate) linger: linger,
    /// Options that request control messages: level and name.
    pub(crate) control_requests: Vec<(c_int, c_int)>,
}

impl Settings {
    /// Options of a new socket.
    pub(crate) fn new() -> Self {
        Self {
            bound: None,
            reuse_address: false,
            reuse_port: false,
            broadcast: false,
            v6_only: false,
            no_delay: false,
            cork: false,
            sends_keepalives: false,
            keepalive: Keepalive::default(),
            send_buffer_bytes: None,
            receive_buffer_bytes: None,
            hop_limit: None,
            traffic_class: 0,
            user_timeout_ms: None,
            congestion_control: CongestionControl::Cubic,
            defer_accept_s: None,
            dont_fragment: false,
            linger: linger { l_onoff: 0, l_linger: 0 },
            control_requests: Vec::new(),
        }
    }

    /// Options of a connection that was accepted: those that the kernel inherits.
    pub(crate) fn accepted(&self) -> Self {
        Self { bound: None, ..self.clone() }
    }

    /// Options of a TCP socket.
    pub(crate) fn tcp_options(&self, is_v6: bool) -> TcpOptions {
        let mut options = TcpOptions::default();
        // A buffer of a chosen size does not grow.
        if let Some(bytes) = self.send_buffer_bytes {
            options = options.send_buffer_bytes(bytes);
        }
        if let Some(bytes) = self.receive_buffer_bytes {
            options = options.receive_buffer_bytes(bytes);
        }
        options
            .no_delay(self.no_delay)
            .cork(self.cork)
            .dual_stack(is_v6 && !self.v6_only)
            .reuse_port(self.reuse_port)
            .congestion_control(self.congestion_control)
            .hop_limit(self.hop_limit)
            .traffic_class(self.traffic_class)
            .keepalive(self.sends_keepalives.then_some(self.keepalive))
            .user_timeout_ms(self.user_timeout_ms)
            .defer_accept_s(self.defer_accept_s)
    }

    /// Options of a UDP socket.
    pub(crate) fn udp_options(&self, is_v6: bool) -> UdpOptions {
        UdpOptions::default()
            .dual_stack(is_v6 && !self.v6_only)
            .reuse_address(self.reuse_address)
            .reuse_port(self.reuse_port)
            .hop_limit(self.hop_limit)
            .traffic_class(self.traffic_class)
            .dont_fragment(self.dont_fragment)
            .queue_bytes(self.receive_buffer_bytes.map(|bytes| bytes as usize))
    }

    /// True if closing resets the connection.
    pub(crate) fn resets_on_close(&self) -> bool {
        self.linger.l_onoff != 0 && self.linger.l_linger == 0
    }

    /// Seconds for which closing waits.
    pub(crate) fn linger_s(&self) -> Option<c_int> {
        (self.linger.l_onoff != 0 && self.linger.l_linger > 0).then_some(self.linger.l_linger)
    }
}
