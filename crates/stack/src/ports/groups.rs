//! Local ports shared with other stacks on the same addresses (`SO_REUSEPORT`).

use std::net::SocketAddr;
use std::sync::Arc;

use crate::Transport;

/// Registry of the sockets with `reuse_port`, so that several stacks on the same addresses can have
/// sockets on one port.
pub trait PortGroups: Send + Sync {
    /// Adds a socket of `owner` that receives from any peer on `local`.
    fn join(&self, transport: Transport, local: SocketAddr, owner: u64);

    /// Removes such a socket.
    fn leave(&self, transport: Transport, local: SocketAddr, owner: u64);

    /// Registers a connection or connected socket before it is created. Returns false if the flow
    /// must not be used: it exists already, or it is migrating to another stack.
    fn begin_flow(&self, transport: Transport, local: SocketAddr, remote: SocketAddr) -> bool;

    /// Registers a flow that has migrated from another stack, which has not called
    /// [`PortGroups::end_flow`] for it.
    fn take_over_flow(&self, transport: Transport, local: SocketAddr, remote: SocketAddr);

    /// Removes a flow.
    fn end_flow(&self, transport: Transport, local: SocketAddr, remote: SocketAddr);
}

/// Optional registry; none for a stack that shares no ports.
#[derive(Clone, Default)]
pub(crate) struct PortGroupsHandle(Option<Arc<dyn PortGroups>>);

impl PortGroupsHandle {
    pub(crate) fn new(groups: Arc<dyn PortGroups>) -> Self {
        Self(Some(groups))
    }

    #[inline]
    pub(crate) fn notify(&self, call: impl FnOnce(&dyn PortGroups)) {
        if let Some(groups) = &self.0 {
            call(&**groups);
        }
    }

    /// True if other stacks may have sockets on the same ports.
    pub(crate) fn is_set(&self) -> bool {
        self.0.is_some()
    }

    /// Calls [`PortGroups::begin_flow`]; true without a registry.
    #[inline]
    pub(crate) fn begin_flow(
        &self,
        transport: Transport,
        local: SocketAddr,
        remote: SocketAddr,
    ) -> bool {
        self.0.as_ref().is_none_or(|groups| groups.begin_flow(transport, local, remote))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use tidegate_memory::{Arena, ArenaConfig, FrameSize};
    use tidegate_wire::MacAddr;

    use super::*;
    use crate::{Config, SocketError, SocketSelection, Stack, TcpOptions, UdpOptions};

    #[derive(Default)]
    struct Log(Mutex<Vec<String>>);

    impl Log {
        fn add(&self, line: String) {
            self.0.lock().unwrap().push(line);
        }

        fn take(&self) -> Vec<String> {
            std::mem::take(&mut self.0.lock().unwrap())
        }
    }

    impl PortGroups for Log {
        fn join(&self, transport: Transport, local: SocketAddr, _: u64) {
            self.add(format!("{transport:?} join {local}"));
        }

        fn leave(&self, transport: Transport, local: SocketAddr, _: u64) {
            self.add(format!("{transport:?} leave {local}"));
        }

        fn begin_flow(&self, transport: Transport, local: SocketAddr, remote: SocketAddr) -> bool {
            self.add(format!("{transport:?} begin {local} {remote}"));
            remote.port() != 666
        }

        fn take_over_flow(&self, transport: Transport, local: SocketAddr, remote: SocketAddr) {
            self.add(format!("{transport:?} take over {local} {remote}"));
        }

        fn end_flow(&self, transport: Transport, local: SocketAddr, remote: SocketAddr) {
            self.add(format!("{transport:?} end {local} {remote}"));
        }
    }

    fn stack() -> (Stack, Arena) {
        let arena = ArenaConfig { frames: 64, frame_size: FrameSize::K2, hugepages: false };
        let config = Config {
            addresses: vec!["192.0.2.1/24".parse().unwrap(), "2001:db8::1/64".parse().unwrap()],
            ..Config::ethernet(MacAddr([2, 0, 0, 0, 0, 1]), [7; 16])
        };
        (Stack::new(config, 0).unwrap(), Arena::new(arena).unwrap())
    }

    fn set_logging_port_groups(stack: &mut Stack) -> Arc<Log> {
        let log = Arc::new(Log::default());
        stack.set_port_groups(Arc::clone(&log) as Arc<dyn PortGroups>);
        log
    }

    #[test]
    fn notifies_port_groups_of_udp_sockets() {
        for (own, peer) in
            [("192.0.2.1:53", "192.0.2.2:9"), ("[2001:db8::1]:53", "[2001:db8::2]:9")]
        {
            let ((mut stack, mut arena), (mut other, mut its_arena)) = (stack(), stack());
            other.set_tcp_secrets(stack.tcp_secrets());
            let shared = UdpOptions { reuse_port: true, ..UdpOptions::default() };
            let first = stack.udp_bind(own.parse().unwrap(), shared).unwrap();
            let log = set_logging_port_groups(&mut stack);
            assert_eq!(log.take(), [format!("Udp join {own}")], "existing socket");
            let alone = own.replace(":53", ":54");
            stack.udp_bind(alone.parse().unwrap(), UdpOptions::default()).unwrap();
            assert!(log.take().is_empty(), "the socket shares no port");
            stack.udp_connect(first, peer.parse().unwrap()).unwrap();
            let connected = [format!("Udp begin {own} {peer}"), format!("Udp leave {own}")];
            assert_eq!(log.take(), connected);
            let elsewhere = peer.replace(":9", ":666");
            let refused = stack.udp_connect(first, elsewhere.parse().unwrap());
            assert_eq!(refused, Err(SocketError::AddressInUse(own.parse().unwrap())));
            assert_eq!(
                log.take(),
                [format!("Udp begin {own} {elsewhere}")],
                "the socket stays connected"
            );

            let moving = SocketSelection { udp: vec![first], ..SocketSelection::default() };
            let extracted = stack.extract_sockets(0, &mut arena, &moving);
            assert!(log.take().is_empty(), "the flow continues");
            let its_log = set_logging_port_groups(&mut other);
            let moved = other.insert_sockets(0, &mut its_arena, extracted).unwrap();
            assert_eq!(its_log.take(), [format!("Udp take over {own} {peer}")]);
            let (_, id) = moved.udp[0];
            other.udp_disconnect(id).unwrap();
            let back = [format!("Udp end {own} {peer}"), format!("Udp join {own}")];
            assert_eq!(its_log.take(), back);
            other.udp_close(id, &mut its_arena);
            assert_eq!(its_log.take(), [format!("Udp leave {own}")]);
        }
    }

    /// Passes the queued frames of one stack to another stack.
    fn carry(from: (&mut Stack, &mut Arena), to: (&mut Stack, &mut Arena)) {
        let frames: Vec<_> = from.0.transmit_queue().drain(..).collect();
        for frame in frames {
            let copy = to.1.alloc_from(from.1.bytes(&frame)).unwrap();
            from.1.free(frame);
            to.0.handle_frame(0, copy, to.1);
        }
        to.0.tcp_flush(0, to.1);
    }

    /// A stack with a full SYN queue answers with a cookie; the acknowledgement reaches another
    /// stack.
    #[test]
    fn syn_cookie_is_accepted_by_another_stack_on_the_port() {
        for (own, peer) in [("192.0.2.1", "192.0.2.2"), ("2001:db8::1", "2001:db8::2")] {
            let on = |address: &str, half_open| {
                let prefix = if address.contains(':') { 64 } else { 24 };
                let mut config = Config::ip([7; 16]);
                config.addresses = vec![format!("{address}/{prefix}").parse().unwrap()];
                config.limits.tcp_half_open = half_open;
                Stack::new(config, 0).unwrap()
            };
            let (mut full, mut other, mut client) = (on(own, 0), on(own, 8), on(peer, 8));
            other.set_tcp_secrets(full.tcp_secrets());
            let log = set_logging_port_groups(&mut other);
            let [mut a, mut b, mut c] = [(); 3].map(|()| stack().1);
            let local = SocketAddr::new(own.parse().unwrap(), 80);
            let options = TcpOptions { reuse_port: true, ..TcpOptions::default() };
            full.tcp_listen(local, 8, options).unwrap();
            let listener = other.tcp_listen(local, 8, options).unwrap();
            let id = client.tcp_connect(0, &mut c, None, local, TcpOptions::default()).unwrap();
            let remote = client.tcp_local_addr(id).unwrap();
            carry((&mut client, &mut c), (&mut full, &mut a));
            carry((&mut full, &mut a), (&mut client, &mut c));
            carry((&mut client, &mut c), (&mut other, &mut b));
            assert_eq!(other.tcp_acceptable(listener), 1);
            let logged = [format!("Tcp join {local}"), format!("Tcp begin {local} {remote}")];
            assert_eq!(log.take(), logged);
            let accepted = other.tcp_accept(listener).unwrap();
            // An accepted connection cannot leave the port group.
            other.tcp_set_options(0, &mut b, accepted, TcpOptions::default()).unwrap();
            other.tcp_abort(0, &mut b, accepted);
            assert_eq!(log.take(), [format!("Tcp end {local} {remote}")]);
        }
    }

    #[test]
    fn notifies_port_groups_of_listeners_for_each_family() {
        let ((mut stack, mut arena), (mut other, mut its_arena)) = (stack(), stack());
        other.set_tcp_secrets(stack.tcp_secrets());
        let (log, its_log) =
            (set_logging_port_groups(&mut stack), set_logging_port_groups(&mut other));
        let options = TcpOptions { reuse_port: true, dual_stack: true, ..TcpOptions::default() };
        let id = stack.tcp_listen("[::]:80".parse().unwrap(), 8, options).unwrap();
        assert_eq!(log.take(), ["Tcp join [::]:80", "Tcp join 0.0.0.0:80"]);
        let moving = SocketSelection { listeners: vec![id], ..SocketSelection::default() };
        let extracted = stack.extract_sockets(0, &mut arena, &moving);
        assert_eq!(log.take(), ["Tcp leave [::]:80", "Tcp leave 0.0.0.0:80"]);
        let moved = other.insert_sockets(0, &mut its_arena, extracted).unwrap();
        assert_eq!(its_log.take(), ["Tcp join [::]:80", "Tcp join 0.0.0.0:80"]);
        other.tcp_close_listener(0, &mut its_arena, moved.listeners[0].1);
        assert_eq!(its_log.take().len(), 2);
    }
}
