//! Local ports that are shared with other stacks on the same addresses.

use std::net::SocketAddr;
use std::sync::Arc;

use crate::{Stack, Transport};

/// Who is told of the sockets of a stack that share their port (`reuse_port`), so that
/// other stacks on the same addresses can have some on it, too.
pub trait PortGroups: Send + Sync {
    /// A socket takes what anybody sends to `local`.
    fn join(&self, transport: Transport, local: SocketAddr);

    /// It does so no longer.
    fn leave(&self, transport: Transport, local: SocketAddr);

    /// There is to be a connection, or a connected socket, between these ends. Whether
    /// that may be: no other stack has one.
    fn begin(&self, transport: Transport, local: SocketAddr, remote: SocketAddr) -> bool;

    /// There is one that has come from another stack, which has not said that it has
    /// ended.
    fn take_over(&self, transport: Transport, local: SocketAddr, remote: SocketAddr);

    /// There is none any more.
    fn end(&self, transport: Transport, local: SocketAddr, remote: SocketAddr);
}

/// Nobody, if the stack is alone.
#[derive(Clone, Default)]
pub(crate) struct Told(Option<Arc<dyn PortGroups>>);

impl Told {
    #[inline]
    pub(crate) fn tell(&self, what: impl FnOnce(&dyn PortGroups)) {
        if let Some(groups) = &self.0 {
            what(&**groups);
        }
    }

    /// As [`PortGroups::begin`].
    #[inline]
    pub(crate) fn begin(
        &self,
        transport: Transport,
        local: SocketAddr,
        remote: SocketAddr,
    ) -> bool {
        self.0.as_ref().is_none_or(|groups| groups.begin(transport, local, remote))
    }
}

impl Stack {
    /// Tells `groups` of the sockets that share their port: at once of those there are,
    /// later of each that comes and goes.
    pub fn set_port_groups(&mut self, groups: Arc<dyn PortGroups>) {
        let told = Told(Some(groups));
        self.udp.set_port_groups(told.clone());
        self.tcp.set_port_groups(told);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use tidegate_memory::{Arena, ArenaConfig, FrameSize};
    use tidegate_wire::MacAddr;

    use super::*;
    use crate::{Config, MovingSockets, SocketError, TcpOptions, UdpOptions};

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
        fn join(&self, transport: Transport, local: SocketAddr) {
            self.add(format!("{transport:?} join {local}"));
        }

        fn leave(&self, transport: Transport, local: SocketAddr) {
            self.add(format!("{transport:?} leave {local}"));
        }

        fn begin(&self, transport: Transport, local: SocketAddr, remote: SocketAddr) -> bool {
            self.add(format!("{transport:?} begin {local} {remote}"));
            remote.port() != 666
        }

        fn take_over(&self, transport: Transport, local: SocketAddr, remote: SocketAddr) {
            self.add(format!("{transport:?} take over {local} {remote}"));
        }

        fn end(&self, transport: Transport, local: SocketAddr, remote: SocketAddr) {
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

    fn told(stack: &mut Stack) -> Arc<Log> {
        let log = Arc::new(Log::default());
        stack.set_port_groups(Arc::clone(&log) as Arc<dyn PortGroups>);
        log
    }

    #[test]
    fn datagram_sockets_that_share_a_port_are_told() {
        for (own, peer) in
            [("192.0.2.1:53", "192.0.2.2:9"), ("[2001:db8::1]:53", "[2001:db8::2]:9")]
        {
            let ((mut stack, mut arena), (mut other, mut its_arena)) = (stack(), stack());
            other.share_tcp_secrets(stack.tcp_secrets());
            let shared = UdpOptions { reuse_port: true, ..UdpOptions::default() };
            let first = stack.udp_bind(own.parse().unwrap(), shared).unwrap();
            let log = told(&mut stack);
            assert_eq!(log.take(), [format!("Udp join {own}")], "it was there before");
            let alone = own.replace(":53", ":54");
            stack.udp_bind(alone.parse().unwrap(), UdpOptions::default()).unwrap();
            assert!(log.take().is_empty(), "it shares nothing");
            stack.udp_connect(first, peer.parse().unwrap()).unwrap();
            let connected = [format!("Udp begin {own} {peer}"), format!("Udp leave {own}")];
            assert_eq!(log.take(), connected);
            let elsewhere = peer.replace(":9", ":666");
            let refused = stack.udp_connect(first, elsewhere.parse().unwrap());
            assert_eq!(refused, Err(SocketError::AddressInUse(own.parse().unwrap())));
            assert_eq!(log.take(), [format!("Udp begin {own} {elsewhere}")], "it stays as it was");

            let moving = MovingSockets { udp: vec![first], ..MovingSockets::default() };
            let taken = stack.take_out(0, &mut arena, &moving);
            assert!(log.take().is_empty(), "its flow goes on");
            let its_log = told(&mut other);
            let moved = other.put_in(0, &mut its_arena, taken).unwrap();
            assert_eq!(its_log.take(), [format!("Udp take over {own} {peer}")]);
            let (_, id) = moved.udp[0];
            other.udp_disconnect(id).unwrap();
            let back = [format!("Udp end {own} {peer}"), format!("Udp join {own}")];
            assert_eq!(its_log.take(), back);
            other.udp_close(id, &mut its_arena);
            assert_eq!(its_log.take(), [format!("Udp leave {own}")]);
        }
    }

    #[test]
    fn a_listener_that_shares_its_port_is_told_for_each_family_that_it_takes() {
        let ((mut stack, mut arena), (mut other, mut its_arena)) = (stack(), stack());
        other.share_tcp_secrets(stack.tcp_secrets());
        let (log, its_log) = (told(&mut stack), told(&mut other));
        let options = TcpOptions { reuse_port: true, dual_stack: true, ..TcpOptions::default() };
        let id = stack.tcp_listen("[::]:80".parse().unwrap(), 8, options).unwrap();
        assert_eq!(log.take(), ["Tcp join [::]:80", "Tcp join 0.0.0.0:80"]);
        let moving = MovingSockets { listeners: vec![id], ..MovingSockets::default() };
        let taken = stack.take_out(0, &mut arena, &moving);
        assert_eq!(log.take(), ["Tcp leave [::]:80", "Tcp leave 0.0.0.0:80"]);
        let moved = other.put_in(0, &mut its_arena, taken).unwrap();
        assert_eq!(its_log.take(), ["Tcp join [::]:80", "Tcp join 0.0.0.0:80"]);
        other.tcp_close_listener(0, &mut its_arena, moved.listeners[0].1);
        assert_eq!(its_log.take().len(), 2);
    }
}
