//! Loopback: packets from a host to its own addresses come back in, and none leaves the host.

use std::net::SocketAddr;

use tidegate_stack::{
    AddressOwnership, Config, SendError, Shutdown, SocketError, TcpError, TcpId, TcpOptions,
    TcpState,
};
use tidegate_wire::{DropReason, EtherType, Medium, Protocol};

use crate::kit::packets::{ethernet, frame, ip, udp_packet};
use crate::kit::{FRAMES, Family, SECOND_NS, TestHost, config, for_each_family, mac};

const PORT: u16 = 80;

fn at(family: Family, port: u16) -> SocketAddr {
    SocketAddr::new(family.host(1), port)
}

impl TestHost {
    /// Passes frames back in until the host sends no more of them.
    fn run_loopback(&mut self) {
        for _ in 0..10_000 {
            if self.deliver_loopback() == 0 {
                return;
            }
        }
        panic!("the host never stops sending to itself");
    }

    fn connect_to_itself(&mut self, local: Option<SocketAddr>, to: SocketAddr) -> TcpId {
        let (stack, arena) = (&mut self.stack, &mut self.arena);
        stack.tcp_connect(self.now_ns, arena, local, to, TcpOptions::default()).unwrap()
    }

    /// Sends at one end of a connection and receives at the other until all data has arrived.
    fn transfer(&mut self, from: TcpId, to: TcpId, data: &[u8]) {
        let (mut sent, mut received, mut buf) = (0, Vec::<u8>::new(), [0; 4096]);
        while received.len() < data.len() {
            let Self { stack, arena, now_ns } = self;
            match stack.tcp_send(*now_ns, arena, from, &data[sent..]) {
                Ok(len) => sent += len,
                Err(error) => assert!(matches!(error, TcpError::WouldBlock), "{error}"),
            }
            self.run_loopback();
            let Self { stack, arena, now_ns } = self;
            match stack.tcp_recv(*now_ns, arena, to, &mut buf) {
                Ok(len) => received.extend(&buf[..len]),
                Err(error) => assert!(matches!(error, TcpError::WouldBlock), "{error}"),
            }
        }
        assert!(received == data, "received bytes differ");
    }

    fn shut_down_write(&mut self, id: TcpId) {
        let Self { stack, arena, now_ns } = self;
        stack.tcp_shutdown(*now_ns, arena, id, Shutdown::Write).unwrap();
        self.run_loopback();
    }

    fn close(&mut self, id: TcpId) {
        let Self { stack, arena, now_ns } = self;
        stack.tcp_close(*now_ns, arena, id);
        self.run_loopback();
    }
}

fn large_payload() -> Vec<u8> {
    (0..300_000).map(|at| (at % 251) as u8).collect()
}

/// Runs a test on host 1 of every kind: a device that completes checksums, a device that does
/// not, and a tunnel link.
fn for_each_host_kind(test: impl Fn(TestHost)) {
    let tunnel = config(1).medium(Medium::Ip);
    for config in [config(1), config(1).transmit_checksum(true), tunnel] {
        test(TestHost::quiet(config));
    }
}

#[test]
fn delivers_datagrams_to_local_addresses() {
    for_each_family(|family| {
        for_each_host_kind(|mut host| {
            let server = host.bind(at(family, PORT));
            let client = host.bind(SocketAddr::new(family.unspecified(), 0));
            host.send(client, Some(at(family, PORT)), b"question");
            assert!(host.sent().is_empty(), "loopback packets never reach the device");
            assert!(host.receive(server).is_none(), "loopback packets arrive in the next turn");
            host.run_loopback();
            let (client_at, local, question) = host.receive(server).unwrap();
            assert_eq!((client_at.ip(), local), (family.host(1), family.host(1)));
            assert_eq!(question, b"question");
            host.send(server, Some(client_at), b"answer");
            host.run_loopback();
            let (server_at, _, answer) = host.receive(client).unwrap();
            assert_eq!((server_at, &*answer), (at(family, PORT), &b"answer"[..]));
            assert!(host.sent().is_empty());
            host.finish();
        });
    });
}

#[test]
fn udp_socket_can_send_to_itself() {
    for_each_family(|family| {
        let mut host = TestHost::quiet(config(1));
        let socket = host.bind(SocketAddr::new(family.unspecified(), PORT));
        host.stack.udp_connect(socket, at(family, PORT)).unwrap();
        assert_eq!(host.stack.udp_local_addr(socket), Some(at(family, PORT)));
        host.send(socket, None, b"me");
        host.run_loopback();
        assert_eq!(host.receive(socket).unwrap().2, b"me");
        host.finish();
    });
}

#[test]
fn loops_back_long_datagrams_in_fragments() {
    for_each_family(|family| {
        for_each_host_kind(|mut host| {
            let server = host.bind(at(family, PORT));
            let client = host.bind(SocketAddr::new(family.unspecified(), 0));
            let long: Vec<u8> = (0..20_000).map(|at| at as u8).collect();
            host.send(client, Some(at(family, PORT)), &long);
            host.run_loopback();
            assert_eq!(host.receive(server).unwrap().2, long);
            host.finish();
        });
    });
}

#[test]
fn unused_local_port_refuses_datagrams_and_connections() {
    for_each_family(|family| {
        let mut host = TestHost::quiet(config(1));
        let client = host.bind(SocketAddr::new(family.unspecified(), 0));
        host.stack.udp_connect(client, at(family, PORT)).unwrap();
        host.send(client, None, b"anybody?");
        host.run_loopback();
        let error = host.stack.udp_take_error(client);
        assert_eq!(error, Some(SocketError::ConnectionRefused(at(family, PORT))));
        let stream = host.connect_to_itself(None, at(family, PORT));
        host.run_loopback();
        let read = host.stack.tcp_recv(host.now_ns, &mut host.arena, stream, &mut [0; 9]);
        assert!(matches!(read, Err(TcpError::Refused(_))), "{read:?}");
        assert!(host.sent().is_empty());
        host.finish();
    });
}

#[test]
fn connection_to_local_address_transfers_both_ways_and_closes() {
    for_each_family(|family| {
        for_each_host_kind(|mut host| {
            let listener =
                host.stack.tcp_listen(at(family, PORT), 16, TcpOptions::default()).unwrap();
            let client = host.connect_to_itself(None, at(family, PORT));
            assert_eq!(host.stack.tcp_state(client), Some(TcpState::SynSent));
            host.run_loopback();
            let server = host.stack.tcp_accept(listener).unwrap();
            assert_eq!(host.stack.tcp_peer_addr(server), host.stack.tcp_local_addr(client));
            host.transfer(client, server, &large_payload());
            host.transfer(server, client, &large_payload());
            host.shut_down_write(client);
            host.shut_down_write(server);
            assert_eq!(host.stack.tcp_state(client), Some(TcpState::TimeWait));
            host.close(client);
            host.close(server);
            host.stack.tcp_close_listener(host.now_ns, &mut host.arena, listener);
            host.advance(120 * SECOND_NS);
            assert_eq!(host.stack.tcp_connections(), 0);
            let retransmitted = host.stack.counters().transmit_drops.total();
            assert_eq!((retransmitted, host.sent().len()), (0, 0));
            host.finish();
        });
    });
}

#[test]
fn connection_can_connect_to_itself() {
    for_each_family(|family| {
        let mut host = TestHost::quiet(config(1));
        let only = host.connect_to_itself(Some(at(family, PORT)), at(family, PORT));
        host.run_loopback();
        assert_eq!(host.stack.tcp_state(only), Some(TcpState::Established));
        host.transfer(only, only, &large_payload());
        host.shut_down_write(only);
        host.close(only);
        host.advance(120 * SECOND_NS);
        assert_eq!((host.stack.tcp_connections(), host.sent().len()), (0, 0));
        host.finish();
    });
}

#[test]
fn supports_simultaneous_open_over_loopback() {
    for_each_family(|family| {
        let mut host = TestHost::quiet(config(1));
        let one = host.connect_to_itself(Some(at(family, 1000)), at(family, 2000));
        let other = host.connect_to_itself(Some(at(family, 2000)), at(family, 1000));
        host.run_loopback();
        for id in [one, other] {
            assert_eq!(host.stack.tcp_state(id), Some(TcpState::Established));
        }
        host.transfer(one, other, &large_payload());
        host.transfer(other, one, &large_payload());
        host.finish();
    });
}

#[test]
fn rejects_local_source_addresses_from_the_wire() {
    for_each_family(|family| {
        let mut host = TestHost::quiet(config(1));
        let socket = host.bind(at(family, PORT));
        let listener = host.stack.tcp_listen(at(family, PORT), 16, TcpOptions::default()).unwrap();
        host.send(socket, Some(at(family, PORT)), b"ours");
        host.run_loopback();
        assert!(host.receive(socket).is_some());
        let own = family.host(1);
        let reason = match family {
            Family::V4 => DropReason::Ipv4SourceInvalid,
            Family::V6 => DropReason::Ipv6SourceInvalid,
        };
        let datagram = udp_packet(own, own, (PORT, PORT), b"theirs");
        // Also from the hardware address of host 1.
        for from in [mac(1), mac(2)] {
            let ethertype = if family == Family::V4 { EtherType::IPV4 } else { EtherType::IPV6 };
            host.feed_dropped(&ethernet(mac(1), from, ethertype, &datagram), reason);
        }
        host.feed_dropped(&frame(&ip(own, own, Protocol::TCP, &[0; 20])), reason);
        assert!(host.receive(socket).is_none());
        assert_eq!(host.stack.tcp_acceptable(listener), 0);
        host.finish();
    });
}

#[test]
fn limits_the_loopback_queue() {
    for_each_family(|family| {
        let mut host = TestHost::quiet(config(1));
        let limit = Config::ethernet(mac(1), [0; 16]).limits.transmit_frames.min(FRAMES as usize);
        let socket = host.bind(SocketAddr::new(family.unspecified(), PORT));
        let mut queued = 0;
        let error = loop {
            let TestHost { stack, arena, now_ns } = &mut host;
            match stack.udp_send(*now_ns, arena, socket, Some(at(family, PORT)), None, b"x") {
                Ok(()) => queued += 1,
                Err(error) => break error,
            }
            assert!(queued <= limit, "the loopback queue exceeds its limit");
        };
        assert_eq!(error, SendError::WouldBlock);
        assert_eq!(host.deliver_loopback(), queued);
        host.send(socket, Some(at(family, PORT)), b"there is room again");
        host.finish();
    });
}

#[test]
fn delivers_loopback_replies_one_per_turn() {
    for_each_family(|family| {
        let mut host = TestHost::quiet(config(1));
        let sockets = [1, 2].map(|port| host.bind(at(family, port)));
        host.send(sockets[0], Some(at(family, 2)), b"ball");
        for turn in 0..100 {
            assert_eq!(host.deliver_loopback(), 1);
            let [from, to] = [turn % 2, (turn + 1) % 2];
            let (back, _, ball) = host.receive(sockets[to]).unwrap();
            assert_eq!(back.port(), from as u16 + 1);
            host.send(sockets[to], Some(back), &ball);
        }
        host.finish();
    });
}

#[test]
fn refuses_loopback_on_a_shared_address() {
    for_each_family(|family| {
        let shared = config(1).ownership(AddressOwnership::Shared);
        let mut host = TestHost::quiet(shared);
        let socket = host.bind(at(family, PORT));
        let TestHost { stack, arena, now_ns } = &mut host;
        let sent = stack.udp_send(*now_ns, arena, socket, Some(at(family, PORT)), None, b"x");
        assert_eq!(sent, Err(SendError::NetworkUnreachable(family.host(1))));
        let to = at(family, PORT);
        let connected = stack.tcp_connect(*now_ns, arena, None, to, TcpOptions::default());
        assert!(matches!(connected, Err(TcpError::PeerInvalid(_))));
        host.finish();
    });
}
