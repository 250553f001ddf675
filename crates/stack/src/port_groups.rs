//! Local ports that are shared with other stacks on the same addresses.

use std::net::SocketAddr;
use std::sync::Arc;

use crate::{Stack, Transport};

/// Who is told of the sockets of a stack that share their port (`reuse_port`), so that
/// other stacks on the same addresses can have some on it, too.
pub trait PortGroups: Send + Sync {
    /// A socket of this party's takes what anybody sends to `local`.
    fn join(&self, transport: Transport, local: SocketAddr, party: u64);

    /// It does so no longer.
    fn leave(&self, transport: Transport, local: SocketAddr, party: u64);

    /// There is to be a connection, or a connected socket, between these ends. Whether
    /// that may be: there is none yet, and none is on its way to another stack.
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

    /// Whether other stacks may have sockets on the same ports.
    pub(crate) fn is_anybody(&self) -> bool {
        self.0.is_some()
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
        fn join(&self, transport: Transport, local: SocketAddr, _: u64) {
            self.add(format!("{transport:?} join {local}"));
        }

        fn leave(&self, transport: Transport, local: SocketAddr, _: u64) {
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

    /// Takes frames of one stack to another one.
    fn carry(from: (&mut Stack, &mut Arena), to: (&mut Stack, &mut Arena)) {
        let frames: Vec<_> = from.0.transmit_queue().drain(..).collect();
        for frame in frames {
            let copy = to.1.alloc_from(from.1.bytes(&frame)).unwrap();
            from.1.free(frame);
            to.0.ingest(0, copy, to.1);
        }
        to.0.tcp_flush(0, to.1);
    }

    /// A full stack answers with a cookie, and the acknowledgement comes to another one.
    #[test]
    fn a_cookie_of_one_stack_is_good_at_another_on_the_port() {
        for (own, peer) in [("192.0.2.1", "192.0.2.2"), ("2001:db8::1", "2001:db8::2")] {
            let on = |address: &str, half_open| {
                let prefix = if address.contains(':') { 64 } else { 24 };
                let mut config = Config::ip([7; 16]);
                config.addresses = vec![format!("{address}/{prefix}").parse().unwrap()];
                config.limits.tcp_half_open = half_open;
                Stack::new(config, 0).unwrap()
            };
            let (mut full, mut other, mut client) = (on(own, 0), on(own, 8), on(peer, 8));
            other.share_tcp_secrets(full.tcp_secrets());
            let log = told(&mut other);
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
            let began = [format!("Tcp join {local}"), format!("Tcp begin {local} {remote}")];
            assert_eq!(log.take(), began);
            let accepted = other.tcp_accept(listener).unwrap();
            // It cannot leave the port any more.
            other.tcp_set_options(0, &mut b, accepted, TcpOptions::default()).unwrap();
            other.tcp_abort(0, &mut b, accepted);
            assert_eq!(log.take(), [format!("Tcp end {local} {remote}")]);
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
