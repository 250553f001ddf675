//! Memory of connections whose peers do not read: they end before others go without.

use std::net::SocketAddr;

use tidegate_stack::{TcpError, TcpId, TcpListenerId, TcpOptions};
use tidegate_wire::DropReason;

use crate::kit::{Family, SECOND_NS, TestHost, config, for_each_family, mac};

const MS: u64 = 1_000_000;
const PORT: u16 = 80;
const MEMORY_BYTES: usize = 4 << 20;

/// A client host with ample memory, and a server with little.
struct Hosts {
    family: Family,
    client: TestHost,
    server: TestHost,
    listener: TcpListenerId,
}

impl Hosts {
    fn new(family: Family, memory_bytes: usize) -> Self {
        let host = |n: u8, other: u8, memory_bytes: usize| {
            let mut config = config(n);
            config.limits.tcp_buffer_bytes = memory_bytes;
            let mut host = TestHost::quiet(config);
            let TestHost { stack, arena, now_ns } = &mut host;
            stack.set_neighbour(*now_ns, family.host(other), Some(mac(other)), arena);
            host
        };
        let (client, mut server) = (host(1, 2, 256 << 20), host(2, 1, memory_bytes));
        let any = SocketAddr::new(family.unspecified(), PORT);
        let options = TcpOptions::default().no_delay(true);
        let listener = server.stack.tcp_listen(any, 4096, options).unwrap();
        Self { family, client, server, listener }
    }

    /// Delivers frames both ways until none is left.
    fn deliver(&mut self) {
        loop {
            let (up, down) = (self.client.sent(), self.server.sent());
            if up.is_empty() && down.is_empty() {
                return;
            }
            up.iter().for_each(|bytes| self.server.feed(bytes));
            down.iter().for_each(|bytes| self.client.feed(bytes));
        }
    }

    /// Advances both clocks; every timer fires on time.
    fn advance(&mut self, ns: u64) {
        let end_ns = self.server.now_ns + ns;
        while self.server.now_ns < end_ns {
            let timeouts = [self.client.stack.next_timeout(), self.server.stack.next_timeout()];
            let next_ns = timeouts.into_iter().flatten().min().unwrap_or(end_ns);
            let now_ns = next_ns.clamp(self.server.now_ns + MS, end_ns.max(next_ns)).min(end_ns);
            self.client.advance(now_ns - self.client.now_ns);
            self.server.advance(now_ns - self.server.now_ns);
            self.deliver();
        }
    }

    /// Opens a connection: its ends at the client and at the server.
    fn connect(&mut self, receive_buffer_bytes: u32) -> (TcpId, TcpId) {
        let to = SocketAddr::new(self.family.host(2), PORT);
        let options = TcpOptions::default().receive_buffer_bytes(receive_buffer_bytes);
        let TestHost { stack, arena, now_ns } = &mut self.client;
        let client = stack.tcp_connect(*now_ns, arena, None, to, options).unwrap();
        self.deliver();
        let server = self.server.stack.tcp_accept(self.listener).unwrap();
        (client, server)
    }

    /// Writes at the server until no more is accepted; returns the number of bytes.
    fn fill(&mut self, server: TcpId) -> usize {
        let TestHost { stack, arena, now_ns } = &mut self.server;
        let mut bytes = 0;
        loop {
            match stack.tcp_send(*now_ns, arena, server, &[7; 16_384]) {
                Ok(len) => bytes += len,
                Err(TcpError::WouldBlock) => return bytes,
                Err(error) => panic!("{error}"),
            }
        }
    }

    /// Sends a request and an answer of `bytes` over a connection; returns the bytes that arrive.
    fn exchange(&mut self, (client, server): (TcpId, TcpId), bytes: usize) -> usize {
        let TestHost { stack, arena, now_ns } = &mut self.client;
        stack.tcp_send(*now_ns, arena, client, b"request").unwrap();
        self.deliver();
        let (mut buf, mut sent, mut received) = ([0; 16_384], 0, 0);
        let TestHost { stack, arena, now_ns } = &mut self.server;
        assert_eq!(stack.tcp_recv(*now_ns, arena, server, &mut buf), Ok(7));
        for _ in 0..200 {
            let TestHost { stack, arena, now_ns } = &mut self.server;
            let piece = vec![9; bytes - sent];
            sent += stack.tcp_send(*now_ns, arena, server, &piece).unwrap_or(0);
            self.deliver();
            let TestHost { stack, arena, now_ns } = &mut self.client;
            received += stack.tcp_recv(*now_ns, arena, client, &mut buf).unwrap_or(0);
            self.deliver();
        }
        received
    }
}

#[test]
fn a_new_connection_is_served_while_others_do_not_read() {
    for_each_family(|family| {
        let mut hosts = Hosts::new(family, MEMORY_BYTES);
        let idle: Vec<_> = (0..200)
            .map(|_| {
                let (client, server) = hosts.connect(4096);
                hosts.fill(server);
                hosts.deliver();
                (client, server)
            })
            .collect();
        let reader = hosts.connect(65_536);
        assert_eq!(hosts.exchange(reader, 20_000), 20_000, "in the moment of the attack");
        hosts.advance(SECOND_NS);
        let reader = hosts.connect(65_536);
        assert_eq!(hosts.exchange(reader, 100_000), 100_000, "later");
        let ended = hosts.server.transmit_drops(DropReason::TcpStalled);
        assert!(ended > 0 && ended < 200, "{ended} connections were ended");
        let has_failed = |id| hosts.server.stack.tcp_readiness(id).failed;
        let failed: Vec<_> = idle.iter().map(|&(_, server)| has_failed(server)).collect();
        assert!(failed.is_sorted_by(|a, b| a >= b), "the oldest end first: {failed:?}");
    });
}

#[test]
fn a_connection_that_does_not_read_lives_while_memory_is_ample() {
    for_each_family(|family| {
        let mut hosts = Hosts::new(family, MEMORY_BYTES);
        let (client, server) = hosts.connect(4096);
        hosts.fill(server);
        hosts.advance(600 * SECOND_NS);
        let mut buf = [0; 4096];
        let TestHost { stack, arena, now_ns } = &mut hosts.client;
        assert_eq!(stack.tcp_recv(*now_ns, arena, client, &mut buf), Ok(4096));
        hosts.deliver();
        assert_eq!(hosts.server.transmit_drops(DropReason::TcpStalled), 0);
        assert_eq!(hosts.server.stack.tcp_take_error(server), None);
    });
}

#[test]
fn a_peer_that_only_answers_has_limited_time_while_memory_is_scarce() {
    for_each_family(|family| {
        for (memory_bytes, is_scarce) in [(4 << 20, false), (5 << 18, true)] {
            let mut hosts = Hosts::new(family, memory_bytes);
            let (_, server) = hosts.connect(4096);
            hosts.fill(server);
            hosts.advance(1800 * SECOND_NS);
            assert_eq!(hosts.server.stack.tcp_readiness(server).failed, is_scarce);
        }
    });
}
