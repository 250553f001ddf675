//! Local ports in use by others on the same addresses.

/// Transport protocol with port numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Transport {
    /// User Datagram Protocol.
    Udp,
    /// Transmission Control Protocol.
    Tcp,
}

type PortPredicate = Box<dyn Fn(Transport, u16) -> bool + Send>;

/// Ports excluded from ephemeral port selection; none by default.
#[derive(Default)]
pub(crate) struct ReservedPorts(Option<PortPredicate>);

impl ReservedPorts {
    pub(crate) fn new(is_reserved: impl Fn(Transport, u16) -> bool + Send + 'static) -> Self {
        Self(Some(Box::new(is_reserved)))
    }

    pub(crate) fn contains(&self, transport: Transport, port: u16) -> bool {
        self.0.as_ref().is_some_and(|is_reserved| is_reserved(transport, port))
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use tidegate_memory::{Arena, ArenaConfig, FrameSize};
    use tidegate_wire::MacAddr;

    use super::*;
    use crate::{Config, Stack, TcpOptions, UdpOptions};

    #[test]
    fn never_chooses_a_reserved_port() {
        let arena = ArenaConfig { frames: 64, frame_size: FrameSize::K2, hugepages: false };
        let mut arena = Arena::new(arena).unwrap();
        let config = Config {
            addresses: vec!["192.0.2.1/24".parse().unwrap(), "2001:db8::1/64".parse().unwrap()],
            ..Config::ethernet(MacAddr([2, 0, 0, 0, 0, 1]), [7; 16])
        };
        let mut stack = Stack::new(config, 0).unwrap();
        stack.set_reserved_ports(|transport, port| match transport {
            Transport::Udp => port != 40_000,
            Transport::Tcp => port != 50_000,
        });
        for (local, peer) in [("192.0.2.1", "192.0.2.2:80"), ("2001:db8::1", "[2001:db8::2]:80")] {
            let any = SocketAddr::new(local.parse().unwrap(), 0);
            let peer = peer.parse().unwrap();
            let udp = stack.udp_bind(any, UdpOptions::default()).unwrap();
            assert_eq!(stack.udp_local_addr(udp).unwrap().port(), 40_000);
            stack.udp_close(udp, &mut arena);
            let options = TcpOptions::default();
            let stream = stack.tcp_connect(0, &mut arena, Some(any), peer, options);
            assert_eq!(stack.tcp_local_addr(stream.unwrap()).unwrap().port(), 50_000);
            let listener = stack.tcp_listen(any, 1, options).unwrap();
            assert_eq!(stack.tcp_listener_addr(listener).unwrap().port(), 50_000);
            stack.tcp_close_listener(0, &mut arena, listener);
            let own = SocketAddr::new(any.ip(), 60_000);
            assert!(stack.udp_bind(own, UdpOptions::default()).is_ok(), "explicit port");
        }
    }
}
