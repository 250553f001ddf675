//! A host that speaks to its own addresses: what it sends comes back in, and
//! nothing of it goes out.

use std::net::SocketAddr;

use tidegate_stack::{
    Config, Ownership, SendError, Shutdown, SocketError, TcpError, TcpId, TcpOptions, TcpState,
};
use tidegate_wire::{DropReason, EtherType, Medium, Protocol};

use crate::kit::packets::{ethernet, frame, ip, udp_packet};
use crate::kit::{FRAMES, Family, Host, SECOND_NS, both, config, mac};

const PORT: u16 = 80;

fn at(family: Family, port: u16) -> SocketAddr {
    SocketAddr::new(family.host(1), port)
}

impl Host {
    /// Lets frames come back in until the host has nothing more to say to itself.
    fn loop_all(&mut self) {
        for _ in 0..10_000 {
            if self.loop_once() == 0 {
                return;
            }
        }
        panic!("the host never stops talking to itself");
    }

    fn connect_to_itself(&mut self, local: Option<SocketAddr>, to: SocketAddr) -> TcpId {
        let (stack, arena) = (&mut self.stack, &mut self.arena);
        stack.tcp_connect(self.now_ns, arena, local, to, TcpOptions::default()).unwrap()
    }

    /// Writes at one end of a connection and reads at the other until all is there.
    fn carry(&mut self, from: TcpId, to: TcpId, data: &[u8]) {
        let (mut sent, mut got, mut buf) = (0, Vec::<u8>::new(), [0; 4096]);
        while got.len() < data.len() {
            let Self { stack, arena, now_ns } = self;
            match stack.tcp_send(*now_ns, arena, from, &data[sent..]) {
                Ok(len) => sent += len,
                Err(error) => assert!(matches!(error, TcpError::WouldBlock), "{error}"),
            }
            self.loop_all();
            let Self { stack, arena, now_ns } = self;
            match stack.tcp_recv(*now_ns, arena, to, &mut buf) {
                Ok(len) => got.extend(&buf[..len]),
                Err(error) => assert!(matches!(error, TcpError::WouldBlock), "{error}"),
            }
        }
        assert!(got == data, "other bytes");
    }

    fn shut(&mut self, id: TcpId) {
        let Self { stack, arena, now_ns } = self;
        stack.tcp_shutdown(*now_ns, arena, id, Shutdown::Write).unwrap();
        self.loop_all();
    }

    fn close(&mut self, id: TcpId) {
        let Self { stack, arena, now_ns } = self;
        stack.tcp_close(*now_ns, arena, id);
        self.loop_all();
    }
}

fn long() -> Vec<u8> {
    (0..300_000).map(|at| (at % 251) as u8).collect()
}

/// Host 1 of all kinds that there are: a port that completes checksums and one
/// that does not, and the link of a tunnel.
fn every_host(test: impl Fn(Host)) {
    let tunnel = Config { medium: Medium::Ip, ..config(1) };
    for config in [config(1), Config { transmit_checksum: true, ..config(1) }, tunnel] {
        test(Host::quiet(config));
    }
}

#[test]
fn a_datagram_to_an_own_address_comes_back_in() {
    both(|family| {
        every_host(|mut host| {
            let server = host.bind(at(family, PORT));
            let client = host.bind(SocketAddr::new(family.any(), 0));
            host.send(client, Some(at(family, PORT)), b"question");
            assert!(host.sent().is_empty(), "it is not for the wire");
            assert!(host.receive(server).is_none(), "it comes with the next turn");
            host.loop_all();
            let (client_at, local, question) = host.receive(server).unwrap();
            assert_eq!((client_at.ip(), local), (family.host(1), family.host(1)));
            assert_eq!(question, b"question");
            host.send(server, Some(client_at), b"answer");
            host.loop_all();
            let (server_at, _, answer) = host.receive(client).unwrap();
            assert_eq!((server_at, &*answer), (at(family, PORT), &b"answer"[..]));
            assert!(host.sent().is_empty());
            host.finish();
        });
    });
}

#[test]
fn a_socket_can_be_its_own_peer() {
    both(|family| {
        let mut host = Host::quiet(config(1));
        let socket = host.bind(SocketAddr::new(family.any(), PORT));
        host.stack.udp_connect(socket, at(family, PORT)).unwrap();
        assert_eq!(host.stack.udp_local_addr(socket), Some(at(family, PORT)));
        host.send(socket, None, b"me");
        host.loop_all();
        assert_eq!(host.receive(socket).unwrap().2, b"me");
        host.finish();
    });
}

#[test]
fn a_long_datagram_comes_back_in_fragments() {
    both(|family| {
        every_host(|mut host| {
            let server = host.bind(at(family, PORT));
            let client = host.bind(SocketAddr::new(family.any(), 0));
            let long: Vec<u8> = (0..20_000).map(|at| at as u8).collect();
            host.send(client, Some(at(family, PORT)), &long);
            host.loop_all();
            assert_eq!(host.receive(server).unwrap().2, long);
            host.finish();
        });
    });
}

#[test]
fn a_port_that_nobody_has_is_refused() {
    both(|family| {
        let mut host = Host::quiet(config(1));
        let client = host.bind(SocketAddr::new(family.any(), 0));
        host.stack.udp_connect(client, at(family, PORT)).unwrap();
        host.send(client, None, b"anybody?");
        host.loop_all();
        let error = host.stack.udp_take_error(client);
        assert_eq!(error, Some(SocketError::ConnectionRefused(at(family, PORT))));
        let stream = host.connect_to_itself(None, at(family, PORT));
        host.loop_all();
        let read = host.stack.tcp_recv(host.now_ns, &mut host.arena, stream, &mut [0; 9]);
        assert!(matches!(read, Err(TcpError::Refused(_))), "{read:?}");
        assert!(host.sent().is_empty());
        host.finish();
    });
}

#[test]
fn a_connection_to_an_own_address_carries_data_both_ways_and_ends() {
    both(|family| {
        every_host(|mut host| {
            let listener =
                host.stack.tcp_listen(at(family, PORT), 16, TcpOptions::default()).unwrap();
            let client = host.connect_to_itself(None, at(family, PORT));
            assert_eq!(host.stack.tcp_state(client), Some(TcpState::SynSent));
            host.loop_all();
            let server = host.stack.tcp_accept(listener).unwrap();
            assert_eq!(host.stack.tcp_peer_addr(server), host.stack.tcp_local_addr(client));
            host.carry(client, server, &long());
            host.carry(server, client, &long());
            host.shut(client);
            host.shut(server);
            assert_eq!(host.stack.tcp_state(client), Some(TcpState::TimeWait));
            host.close(client);
            host.close(server);
            host.stack.tcp_close_listener(host.now_ns, &mut host.arena, listener);
            host.pass(120 * SECOND_NS);
            assert_eq!(host.stack.tcp_connections(), 0);
            let retransmitted = host.stack.counters().transmit_drops.total();
            assert_eq!((retransmitted, host.sent().len()), (0, 0));
            host.finish();
        });
    });
}

#[test]
fn a_connection_can_be_its_own_peer() {
    both(|family| {
        let mut host = Host::quiet(config(1));
        let only = host.connect_to_itself(Some(at(family, PORT)), at(family, PORT));
        host.loop_all();
        assert_eq!(host.stack.tcp_state(only), Some(TcpState::Established));
        host.carry(only, only, &long());
        host.shut(only);
        host.close(only);
        host.pass(120 * SECOND_NS);
        assert_eq!((host.stack.tcp_connections(), host.sent().len()), (0, 0));
        host.finish();
    });
}

#[test]
fn both_ends_can_open_one_connection() {
    both(|family| {
        let mut host = Host::quiet(config(1));
        let one = host.connect_to_itself(Some(at(family, 1000)), at(family, 2000));
        let other = host.connect_to_itself(Some(at(family, 2000)), at(family, 1000));
        host.loop_all();
        for id in [one, other] {
            assert_eq!(host.stack.tcp_state(id), Some(TcpState::Established));
        }
        host.carry(one, other, &long());
        host.carry(other, one, &long());
        host.finish();
    });
}

#[test]
fn nobody_on_the_wire_can_send_from_an_own_address() {
    both(|family| {
        let mut host = Host::quiet(config(1));
        let socket = host.bind(at(family, PORT));
        let listener = host.stack.tcp_listen(at(family, PORT), 16, TcpOptions::default()).unwrap();
        host.send(socket, Some(at(family, PORT)), b"ours");
        host.loop_all();
        assert!(host.receive(socket).is_some());
        let own = family.host(1);
        let reason = match family {
            Family::V4 => DropReason::Ipv4SourceInvalid,
            Family::V6 => DropReason::Ipv6SourceInvalid,
        };
        let datagram = udp_packet(own, own, (PORT, PORT), b"theirs");
        // From the hardware address of host 1, too.
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
fn what_waits_to_come_back_in_is_bounded() {
    both(|family| {
        let mut host = Host::quiet(config(1));
        let limit = Config::ethernet(mac(1), [0; 16]).limits.transmit_frames.min(FRAMES as usize);
        let socket = host.bind(SocketAddr::new(family.any(), PORT));
        let mut waiting = 0;
        let refused = loop {
            let Host { stack, arena, now_ns } = &mut host;
            match stack.udp_send(*now_ns, arena, socket, Some(at(family, PORT)), None, b"x") {
                Ok(()) => waiting += 1,
                Err(error) => break error,
            }
            assert!(waiting <= limit, "there is no limit");
        };
        assert_eq!(refused, SendError::WouldBlock);
        assert_eq!(host.loop_once(), waiting);
        host.send(socket, Some(at(family, PORT)), b"there is room again");
        host.finish();
    });
}

#[test]
fn sockets_that_answer_each_other_have_one_turn_after_the_other() {
    both(|family| {
        let mut host = Host::quiet(config(1));
        let sockets = [1, 2].map(|port| host.bind(at(family, port)));
        host.send(sockets[0], Some(at(family, 2)), b"ball");
        for turn in 0..100 {
            assert_eq!(host.loop_once(), 1);
            let [from, to] = [turn % 2, (turn + 1) % 2];
            let (back, _, ball) = host.receive(sockets[to]).unwrap();
            assert_eq!(back.port(), from as u16 + 1);
            host.send(sockets[to], Some(back), &ball);
        }
        host.finish();
    });
}

#[test]
fn on_a_shared_address_it_may_be_the_kernels_and_is_refused() {
    both(|family| {
        let shared = Config { ownership: Ownership::Shared, ..config(1) };
        let mut host = Host::quiet(shared);
        let socket = host.bind(at(family, PORT));
        let Host { stack, arena, now_ns } = &mut host;
        let sent = stack.udp_send(*now_ns, arena, socket, Some(at(family, PORT)), None, b"x");
        assert_eq!(sent, Err(SendError::NetworkUnreachable(family.host(1))));
        let to = at(family, PORT);
        let connected = stack.tcp_connect(*now_ns, arena, None, to, TcpOptions::default());
        assert!(matches!(connected, Err(TcpError::PeerInvalid(_))));
        host.finish();
    });
}
