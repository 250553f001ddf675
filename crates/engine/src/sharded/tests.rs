//! Tests of several engines on one device.

use std::net::{IpAddr, SocketAddr};
use std::time::Instant;

use tidegate_device::mem::{MemConfig, wire};
use tidegate_device::sharded::PortSharing;
use tidegate_gate::Settings;
use tidegate_gate::admission::{self, Admission, Class, Match, SourceId};
use tidegate_stack::{SocketSelection, TcpError, TcpOptions, TcpState, UdpId, UdpOptions};
use tidegate_wire::{DropReason, IpCidr};

use super::*;
use crate::open;

const CORES: usize = 3;

fn net(port: tidegate_device::mem::MemDevice, address: &str) -> NetConfig {
    NetConfig::new(port).address(address.parse().unwrap()).seed([3; 16])
}

/// Polls all engines in turn until `done`.
fn poll_until(engines: &mut [&mut Engine], mut done: impl FnMut(&mut [&mut Engine]) -> bool) {
    for _ in 0..10_000 {
        for engine in &mut *engines {
            engine.poll().unwrap();
        }
        if done(engines) {
            return;
        }
    }
    panic!("the condition was never met");
}

#[test]
fn each_core_serves_its_own_sockets_on_one_address() {
    for (own, peer) in [("10.0.0.1/24", "10.0.0.2/24"), ("fd00::1/64", "fd00::2/64")] {
        let (near, far) = wire(&MemConfig::default()).unwrap();
        let sharded = open_sharded(net(near, own), CORES).unwrap();
        let ShardedStacks { stacks: cores, flow_steering } = sharded;
        let flow_steering = flow_steering.unwrap();
        let (mut client, _) = open(net(far, peer)).unwrap();
        (1..CORES).for_each(|core| flow_steering.set_active(core));
        let own = own.split('/').next().unwrap().parse().unwrap();
        let (mut engines, claims): (Vec<_>, Vec<_>) = cores.into_iter().unzip();
        let mut servers = Vec::new();
        for (core, engine) in engines.iter_mut().enumerate() {
            let local = SocketAddr::new(own, 5000 + core as u16);
            let id = engine.parts().0.udp_bind(local, UdpOptions::default()).unwrap();
            let claim = claims[core].claim_among_cores(
                engine.device(),
                TransportProtocol::Udp,
                local,
                PortSharing::Exclusive,
                None,
            );
            servers.push((local, id, claim.unwrap().unwrap()));
        }
        let taken = claims[1].claim_among_cores(
            engines[1].device(),
            TransportProtocol::Udp,
            servers[0].0,
            PortSharing::Exclusive,
            None,
        );
        assert_eq!(taken.err().unwrap().kind(), io::ErrorKind::AddrInUse);
        let any = SocketAddr::new(peer.split('/').next().unwrap().parse().unwrap(), 0);
        let (stack, arena, now_ns) = client.parts();
        let client_socket = stack.udp_bind(any, UdpOptions::default()).unwrap();
        for (index, (local, ..)) in servers.iter().enumerate() {
            stack
                .udp_send(now_ns, arena, client_socket, Some(*local), None, &[index as u8])
                .unwrap();
        }
        let mut all: Vec<&mut Engine> = engines.iter_mut().chain([&mut client]).collect();
        let mut answers = Vec::new();
        poll_until(&mut all, |all| {
            for (core, (_, id, _)) in servers.iter().enumerate() {
                let (stack, arena, now_ns) = all[core].parts();
                while let Some(datagram) = stack.udp_recv(arena, *id) {
                    assert_eq!(datagram.bytes(arena), [core as u8]);
                    let to = datagram.remote;
                    datagram.release(arena);
                    stack.udp_send(now_ns, arena, *id, Some(to), None, &[core as u8 + 10]).unwrap();
                }
                all[core].flush().unwrap();
            }
            let (stack, arena, _) = all[CORES].parts();
            while let Some(datagram) = stack.udp_recv(arena, client_socket) {
                answers.push(datagram.bytes(arena)[0]);
                datagram.release(arena);
            }
            answers.len() == CORES
        });
        answers.sort_unstable();
        assert_eq!(answers, [10, 11, 12]);
    }
}

/// Two cores with admission, of which the secondary core serves all sockets, and a client with
/// several addresses.
struct AdmissionTestbed {
    primary: Engine,
    secondary: Engine,
    claims: PortClaims,
    client: Engine,
    address: IpAddr,
    started: Instant,
}

impl AdmissionTestbed {
    fn new(own: &str, peers: &[String], admission: admission::Config) -> Self {
        let (near, far) = wire(&MemConfig::default()).unwrap();
        // No core pauses receiving.
        let gate = tidegate_gate::Config::default().feedback(false);
        let near = net(near, own).gate(Settings::new(gate).unwrap());
        let ShardedStacks { stacks, flow_steering } =
            open_sharded(near.admission(admission), 2).unwrap();
        // Only active cores get the answers of neighbour discovery.
        flow_steering.as_ref().unwrap().set_active(1);
        let (engines, claims): (Vec<_>, Vec<_>) = stacks.into_iter().unzip();
        let [primary, secondary] = <[_; 2]>::try_from(engines).ok().unwrap();
        let [_, claims] = <[_; 2]>::try_from(claims).ok().unwrap();
        let far = NetConfig::new(far).seed([3; 16]);
        let far = peers.iter().fold(far, |far, peer| far.address(peer.parse().unwrap()));
        let (client, _) = open(far).unwrap();
        let address = own.parse::<IpCidr>().unwrap().address();
        Self { primary, secondary, claims, client, address, started: Instant::now() }
    }

    fn claim(&mut self, protocol: TransportProtocol, port: u16) -> SocketAddr {
        let local = SocketAddr::new(self.address, port);
        self.claims
            .claim_among_cores(self.primary.device(), protocol, local, PortSharing::Exclusive, None)
            .unwrap()
            .unwrap();
        local
    }

    /// Reopens the devices of both sides.
    fn reopen(&mut self, own: &str, admission: admission::Config) {
        let (near, far) = wire(&MemConfig::default()).unwrap();
        let near = net(near, own).admission(admission);
        for (engine, config) in [(&mut self.primary, near), (&mut self.client, NetConfig::new(far))]
        {
            engine.close_device(false).unwrap();
            engine.reopen_device(config).unwrap();
        }
    }

    /// Binds a socket on the secondary core.
    fn bind_secondary(&mut self, port: u16) -> UdpId {
        let local = self.claim(TransportProtocol::Udp, port);
        self.secondary.parts().0.udp_bind(local, UdpOptions::default()).unwrap()
    }

    /// Binds a socket of the client to the address `peer`.
    fn bind_client(&mut self, peer: &str) -> UdpId {
        let local = SocketAddr::new(peer.parse::<IpCidr>().unwrap().address(), 0);
        self.client.parts().0.udp_bind(local, UdpOptions::default()).unwrap()
    }

    fn send(&mut self, from: UdpId, port: u16) {
        let (stack, arena, now_ns) = self.client.parts();
        let to = Some(SocketAddr::new(self.address, port));
        stack.udp_send(now_ns, arena, from, to, None, &[0; 64]).unwrap();
    }

    /// Receives up to `max` datagrams from a socket of the secondary core; returns their
    /// number.
    fn receive(&mut self, id: UdpId, max: usize) -> usize {
        let (stack, arena, _) = self.secondary.parts();
        let mut taken = 0;
        while taken < max
            && let Some(datagram) = stack.udp_recv(arena, id)
        {
            datagram.release(arena);
            taken += 1;
        }
        taken
    }

    /// Sends one datagram from each sender to port 53, whose socket reads fewer than arrive.
    fn overload(&mut self, senders: &[UdpId], to: UdpId) {
        senders.iter().for_each(|&sender| self.send(sender, 53));
        self.poll();
        self.receive(to, 4);
        self.secondary.report_level(to);
    }

    fn poll(&mut self) {
        assert!(self.started.elapsed().as_secs() < 60, "timed out after 60 s");
        for engine in [&mut self.client, &mut self.primary, &mut self.secondary] {
            engine.poll().unwrap();
            while engine.poll_event().is_some() {}
        }
    }

    /// Completes a TCP handshake of `peer` with the secondary core.
    fn complete_handshake(&mut self, peer: &str) {
        let server = self.claim(TransportProtocol::Tcp, 80);
        self.secondary.parts().0.tcp_listen(server, 8, TcpOptions::default()).unwrap();
        let peer = peer.parse::<IpCidr>().unwrap().address();
        let (stack, arena, now_ns) = self.client.parts();
        let from = Some(SocketAddr::new(peer, 0));
        stack.tcp_connect(now_ns, arena, from, server, TcpOptions::default()).unwrap();
        while !self.admission().known_sources().contains(SourceId::from_address(peer)) {
            self.poll();
        }
    }

    fn admission(&self) -> &Admission {
        self.primary.admission().expect("the primary core decides")
    }

    /// Frames refused at the primary core.
    fn refused_frames(&mut self) -> u64 {
        let (_, port, _) = self.primary.counters();
        let reasons = [
            DropReason::AdmissionClassClosed,
            DropReason::AdmissionRate,
            DropReason::AdmissionSourceShare,
        ];
        reasons.iter().map(|&reason| port.drops.get(reason)).sum()
    }

    /// Frames forwarded to the secondary core.
    fn forwarded_frames(&mut self) -> u64 {
        self.secondary.counters().1.received
    }
}

const UNKNOWN_SOURCES: u16 = 32;

/// Server address, and addresses of two preferred peers and of the unknown sources.
fn address_sets() -> [(&'static str, Vec<String>); 2] {
    let peers = |peer: &dyn Fn(u16) -> String| (2..4 + UNKNOWN_SOURCES).map(peer).collect();
    [
        ("10.0.0.1/24", peers(&|n| format!("10.0.0.{n}/24"))),
        ("fd00::1/64", peers(&|n| format!("fd00::{n:x}/64"))),
    ]
}

/// The primary core refuses the overload of a secondary core, so the frames never reach that
/// core. A peer with a completed handshake takes precedence, and an exempt peer always passes.
#[test]
fn primary_core_admits_for_all_cores() {
    for (own, peers) in address_sets() {
        let mut config = admission::Config::default();
        let guest = peers[1].parse::<IpCidr>().unwrap().address();
        let guest = IpCidr::new(guest, if guest.is_ipv4() { 32 } else { 128 }).unwrap();
        config.classes.insert(
            0,
            Class::new("guest").rules(vec![Match::default().source(guest)]).exempt(true),
        );
        let mut testbed = AdmissionTestbed::new(own, &peers, config);
        testbed.complete_handshake(&peers[0]);
        assert!(testbed.secondary.admission().is_none(), "a secondary core decides nothing");
        let [overloaded, known, exempt] = [53, 54, 55].map(|port| testbed.bind_secondary(port));
        let senders: Vec<UdpId> = peers.iter().map(|peer| testbed.bind_client(peer)).collect();
        let forwarded_before = testbed.forwarded_frames();

        let (mut rounds, mut known_received, mut exempt_received) = (0, 0, 0);
        while testbed.refused_frames() < 5_000 || known_received < 100 {
            testbed.send(senders[0], 54);
            testbed.send(senders[1], 55);
            testbed.overload(&senders[2..], overloaded);
            rounds += 1;
            let received = testbed.receive(known, usize::MAX);
            known_received += if testbed.admission().is_limiting() { received } else { 0 };
            exempt_received += testbed.receive(exempt, usize::MAX);
        }
        assert_eq!(exempt_received, rounds);
        let sent = (rounds * senders.len()) as u64;
        // Neighbour discovery and the TCP connection add a few frames.
        let extra = (testbed.refused_frames() + testbed.forwarded_frames() - forwarded_before)
            .checked_sub(sent);
        assert!(matches!(extra, Some(0..=8)), "{extra:?} of {sent}");
    }
}

/// A source that asks a socket of a secondary core becomes known; one that sends elsewhere does not.
#[test]
fn primary_core_learns_who_asks_another_core() {
    for (own, peers) in address_sets() {
        let config = admission::Config::default().learning_period_ms(10);
        let mut testbed = AdmissionTestbed::new(own, &peers, config);
        testbed.bind_secondary(53);
        let [asking, other] = [0, 1].map(|n| testbed.bind_client(&peers[n]));
        let [asking_source, other_source] = [0, 1]
            .map(|n: usize| SourceId::from_address(peers[n].parse::<IpCidr>().unwrap().address()));
        while !testbed.admission().known_sources().contains(asking_source) {
            testbed.send(other, 54);
            testbed.send(asking, 53);
            testbed.poll();
        }
        // Peers of one IPv6 prefix count as one source.
        let is_known = testbed.admission().known_sources().contains(other_source);
        assert_eq!(is_known, other_source == asking_source);
    }
}

#[test]
fn reopened_admission_covers_all_cores() {
    for (own, peers) in address_sets() {
        let mut testbed = AdmissionTestbed::new(own, &peers, admission::Config::default());
        let overloaded = testbed.bind_secondary(53);
        let senders: Vec<UdpId> = peers.iter().map(|peer| testbed.bind_client(peer)).collect();
        testbed.reopen(own, admission::Config::default());
        while testbed.refused_frames() < 100 {
            testbed.overload(&senders, overloaded);
        }
    }
}

/// A socket of each core sends to a socket of each core, its own included, by the shared
/// address.
#[test]
fn cores_reach_each_other_by_shared_address() {
    for own in ["10.0.0.1/24", "fd00::1/64"] {
        let (near, _far) = wire(&MemConfig::default()).unwrap();
        let ShardedStacks { stacks, flow_steering } = open_sharded(net(near, own), CORES).unwrap();
        (1..CORES).for_each(|core| flow_steering.as_ref().unwrap().set_active(core));
        let own = own.split('/').next().unwrap().parse().unwrap();
        let (mut engines, claims): (Vec<_>, Vec<_>) = stacks.into_iter().unzip();
        let mut sockets = Vec::new();
        for (core, engine) in engines.iter_mut().enumerate() {
            let local = SocketAddr::new(own, 5000 + core as u16);
            let id = engine.parts().0.udp_bind(local, UdpOptions::default()).unwrap();
            let claim = claims[core].claim_among_cores(
                engine.device(),
                TransportProtocol::Udp,
                local,
                PortSharing::Exclusive,
                None,
            );
            sockets.push((local, id, claim.unwrap().unwrap()));
        }
        for (core, engine) in engines.iter_mut().enumerate() {
            let (stack, arena, now_ns) = engine.parts();
            for (to, ..) in &sockets {
                let from = sockets[core].1;
                stack.udp_send(now_ns, arena, from, Some(*to), None, &[core as u8]).unwrap();
            }
        }
        let mut received = Vec::new();
        poll_until(&mut engines.iter_mut().collect::<Vec<_>>(), |engines| {
            for (core, (_, id, _)) in sockets.iter().enumerate() {
                let (stack, arena, _) = engines[core].parts();
                while let Some(datagram) = stack.udp_recv(arena, *id) {
                    let from = datagram.bytes(arena)[0];
                    assert_eq!(datagram.remote, sockets[usize::from(from)].0);
                    received.push((from, core));
                    datagram.release(arena);
                }
            }
            received.len() == CORES * CORES
        });
        received.sort_unstable();
        received.dedup();
        assert_eq!(received.len(), CORES * CORES);
    }
}

/// Listeners and UDP sockets share one port on two cores. Each core serves some of the clients,
/// and keeps its connections after its listener closes.
#[test]
fn several_cores_serve_a_shared_port() {
    const CLIENTS: usize = 64;
    for (own, peer) in [("10.0.0.1/24", "10.0.0.2/24"), ("fd00::1/64", "fd00::2/64")] {
        let (near, far) = wire(&MemConfig::default()).unwrap();
        let ShardedStacks { stacks, flow_steering } = open_sharded(net(near, own), CORES).unwrap();
        (1..CORES).for_each(|core| flow_steering.as_ref().unwrap().set_active(core));
        let (client, _) = open(net(far, peer)).unwrap();
        let address = |cidr: &str| cidr.split('/').next().unwrap().parse().unwrap();
        let local = SocketAddr::new(address(own), 80);
        let any = SocketAddr::new(address(peer), 0);
        let (mut engines, claims): (Vec<_>, Vec<_>) = stacks.into_iter().unzip();
        let options = TcpOptions::default().reuse_port(true);
        let mut listeners = Vec::new();
        for core in 1..CORES {
            let (stack, _, _) = engines[core].parts();
            let listener = stack.tcp_listen(local, CLIENTS, options).unwrap();
            let options = UdpOptions::default().reuse_port(true);
            let socket = stack.udp_bind(local, options).unwrap();
            let settle = |protocol| {
                let sharing = PortSharing::ReusePort { owner: 0 };
                let mut claim = |core: usize, sharing| {
                    let device = engines[core].device();
                    claims[core].claim_among_cores(device, protocol, local, sharing, None)
                };
                let claimed = claim(core, sharing);
                let refused = claim(0, PortSharing::Exclusive);
                assert!(refused.is_err(), "no other core can claim the port exclusively");
                claimed.unwrap().unwrap()
            };
            let claims = [TransportProtocol::Tcp, TransportProtocol::Udp].map(settle);
            listeners.push((listener, socket, claims));
        }
        engines.push(client);

        let (stack, arena, now_ns) = engines[CORES].parts();
        let options = TcpOptions::default();
        let mut connect = || stack.tcp_connect(now_ns, arena, None, local, options).unwrap();
        let connections: Vec<_> = (0..CLIENTS).map(|_| connect()).collect();
        let bind = |_| stack.udp_bind(any, UdpOptions::default()).unwrap();
        let client_sockets: Vec<_> = (0..CLIENTS).map(bind).collect();
        let mut accepted = vec![Vec::new(); CORES];
        let mut served = [0; CORES];
        // Each server answers with its core number; each client asks until it has an answer.
        let mut first_answers = [vec![None; CLIENTS], vec![None; CLIENTS]];
        for round in 0..2_u8 {
            let mut answers = [vec![None; CLIENTS], vec![None; CLIENTS]];
            let mut has_asked = [false; CLIENTS];
            poll_until(&mut engines.iter_mut().collect::<Vec<_>>(), |engines| {
                for core in 1..CORES {
                    let (listener, socket, ..) = &listeners[core - 1];
                    let (stack, arena, now_ns) = engines[core].parts();
                    accepted[core].extend(stack.tcp_accept(*listener));
                    for &id in &accepted[core] {
                        let mut asked = [0; 1];
                        if stack.tcp_recv(now_ns, arena, id, &mut asked) == Ok(1) {
                            stack.tcp_send(now_ns, arena, id, &[core as u8]).unwrap();
                        }
                    }
                    while let Some(datagram) = stack.udp_recv(arena, *socket) {
                        let to = Some(datagram.remote);
                        datagram.release(arena);
                        let answer = [core as u8];
                        stack.udp_send(now_ns, arena, *socket, to, None, &answer).unwrap();
                        served[core] += 1;
                    }
                    engines[core].flush().unwrap();
                }
                let (stack, arena, now_ns) = engines[CORES].parts();
                let [by_stream, by_datagram] = &mut answers;
                for (at, &id) in connections.iter().enumerate() {
                    if !has_asked[at] && stack.tcp_send(now_ns, arena, id, &[round]).is_ok() {
                        has_asked[at] = true;
                        let to = Some(local);
                        stack
                            .udp_send(now_ns, arena, client_sockets[at], to, None, &[round])
                            .unwrap();
                    }
                    let mut answer = [0; 1];
                    if stack.tcp_recv(now_ns, arena, id, &mut answer) == Ok(1) {
                        by_stream[at] = Some(answer[0]);
                    }
                }
                for (at, &id) in client_sockets.iter().enumerate() {
                    while let Some(datagram) = stack.udp_recv(arena, id) {
                        by_datagram[at] = Some(datagram.bytes(arena)[0]);
                        datagram.release(arena);
                    }
                }
                engines[CORES].flush().unwrap();
                answers.iter().flatten().all(Option::is_some)
            });
            for core in 1..CORES {
                assert!(accepted[core].len() > CLIENTS / 8, "core {core} has its share");
                assert!(served[core] > CLIENTS / 8, "core {core} has its share");
            }
            if round == 0 {
                first_answers = answers;
                // The listener of the last core closes.
                let (listener, ..) = listeners[CORES - 2];
                let (stack, arena, now_ns) = engines[CORES - 1].parts();
                stack.tcp_close_listener(now_ns, arena, listener);
            } else {
                assert_eq!(answers, first_answers, "each client stays on its core");
            }
        }
    }
}

#[test]
fn cores_choose_different_ephemeral_ports() {
    let (near, _far) = wire(&MemConfig::default()).unwrap();
    let mut cores = open_sharded(net(near, "10.0.0.1/24"), 2).unwrap().stacks;
    let peer = "10.0.0.2:80".parse().unwrap();
    let mut ports = Vec::new();
    for _ in 0..50 {
        for (engine, claims) in &mut cores {
            let (stack, arena, now_ns) = engine.parts();
            let id = stack.tcp_connect(now_ns, arena, None, peer, TcpOptions::default());
            let local = stack.tcp_local_addr(id.unwrap()).unwrap();
            let (device, sharing) = (engine.device(), PortSharing::Exclusive);
            let claim = claims
                .claim_among_cores(device, TransportProtocol::Tcp, local, sharing, None)
                .unwrap();
            ports.push((local.port(), claim));
        }
    }
    ports.sort_unstable_by_key(|(port, _)| *port);
    assert!(ports.windows(2).all(|two| two[0].0 != two[1].0));
}

/// The port of a migrating socket is in use, although its stack no longer has the socket.
#[test]
fn connects_from_no_port_that_is_migrating() {
    for (own, peers) in address_sets() {
        let (near, far) = wire(&MemConfig::default()).unwrap();
        let ShardedStacks { stacks, flow_steering } = open_sharded(net(near, own), 2).unwrap();
        let flow_steering = flow_steering.unwrap();
        let mut engines: Vec<_> = stacks.into_iter().map(|(engine, _)| engine).collect();
        let (_client, _) = open(net(far, &peers[0])).unwrap();
        let peer = SocketAddr::new(peers[0].parse::<IpCidr>().unwrap().address(), 80);
        let migrating = 50_000;
        for port in 32_768..=u16::MAX {
            let core = usize::from(port != migrating);
            let port = (TransportProtocol::Tcp, port);
            flow_steering.claim(core, port, PortSharing::Exclusive).unwrap();
        }
        let mut connect = |core: usize| {
            let (stack, arena, now_ns) = engines[core].parts();
            let id = stack.tcp_connect(now_ns, arena, None, peer, TcpOptions::default())?;
            Ok(stack.tcp_local_addr(id).unwrap().port())
        };
        flow_steering.park(0, &[(TransportProtocol::Tcp, migrating)]).unwrap();
        assert_eq!(connect(0), Err(TcpError::NoPortFree(peer)));
        flow_steering.hand_over(0, 0, [((TransportProtocol::Tcp, migrating), 0)]);
        assert_eq!(connect(0), Ok(migrating), "the port came back");
    }
}

/// Pauses receiving of an engine until the feedback times out.
fn pause_receiving(engine: &mut Engine, socket: UdpId) {
    engine.read_clock();
    engine.report_fill(socket, tidegate_stack::QUEUE_FILL_SCALE);
    assert_eq!(engine.poll().unwrap(), 0);
}

#[test]
fn frames_passed_on_are_drained_while_receiving_is_paused() {
    for (own, peers) in address_sets() {
        let (near, far) = wire(&MemConfig::default()).unwrap();
        // Feedback that does not time out during the test.
        let gate = tidegate_gate::Config::default().feedback_timeout_us(100_000_000);
        let near = net(near, own).gate(Settings::new(gate).unwrap());
        let ShardedStacks { stacks, .. } = open_sharded(near, 2).unwrap();
        let (mut engines, claims): (Vec<_>, Vec<_>) = stacks.into_iter().unzip();
        let (mut client, _) = open(net(far, &peers[0])).unwrap();
        let address = own.parse::<IpCidr>().unwrap().address();
        let local = SocketAddr::new(address, 53);
        let sharing = PortSharing::Exclusive;
        let device = engines[1].device();
        claims[1].claim_among_cores(device, TransportProtocol::Udp, local, sharing, None).unwrap();
        let server = engines[1].parts().0.udp_bind(local, UdpOptions::default()).unwrap();
        let any = SocketAddr::new(peers[0].parse::<IpCidr>().unwrap().address(), 0);
        let socket = client.parts().0.udp_bind(any, UdpOptions::default()).unwrap();
        let send = |client: &mut Engine| {
            let (stack, arena, now_ns) = client.parts();
            stack.udp_send(now_ns, arena, socket, Some(local), None, b"x").unwrap();
        };
        send(&mut client);
        let [primary, secondary] = &mut engines[..] else { panic!("there are two cores") };
        poll_until(&mut [&mut client, &mut *primary, &mut *secondary], |all| {
            all[2].stack().udp_queue_len(server) == 1
        });
        pause_receiving(secondary, server);
        for _ in 0..100 {
            send(&mut client);
            client.poll().unwrap();
            primary.poll().unwrap();
            assert_eq!(secondary.poll().unwrap(), 0, "receiving is paused");
        }
        assert_eq!(secondary.stack().udp_queue_len(server), 1);
        assert!(secondary.drain_passed_frames().unwrap());
        assert_eq!(secondary.stack().udp_queue_len(server), 101);
        // Without a free frame they have to stay.
        send(&mut client);
        client.poll().unwrap();
        primary.poll().unwrap();
        let arena = secondary.parts().1;
        let frames: Vec<_> = std::iter::from_fn(|| arena.alloc()).collect();
        assert!(!secondary.drain_passed_frames().unwrap());
        let arena = secondary.parts().1;
        frames.into_iter().for_each(|frame| arena.free(frame));
        assert!(secondary.drain_passed_frames().unwrap());
        assert_eq!(secondary.stack().udp_queue_len(server), 102);
    }
}

/// Segments that a paused core has not received yet belong to a connection that leaves it.
#[test]
fn connection_migrates_from_a_core_whose_receiving_is_paused() {
    for (own, peers) in address_sets() {
        let (near, far) = wire(&MemConfig::default()).unwrap();
        let gate = tidegate_gate::Config::default().feedback_timeout_us(100_000_000);
        let near = net(near, own).gate(Settings::new(gate).unwrap());
        let ShardedStacks { stacks, flow_steering } = open_sharded(near, 2).unwrap();
        let flow_steering = flow_steering.unwrap();
        flow_steering.set_active(1);
        let (mut engines, claims): (Vec<_>, Vec<_>) = stacks.into_iter().unzip();
        let (mut client, _) = open(net(far, &peers[0])).unwrap();
        let local = SocketAddr::new(own.parse::<IpCidr>().unwrap().address(), 80);
        let sharing = PortSharing::Exclusive;
        let device = engines[1].device();
        claims[1].claim_among_cores(device, TransportProtocol::Tcp, local, sharing, None).unwrap();
        let [primary, secondary] = &mut engines[..] else { panic!("there are two cores") };
        let any = SocketAddr::new(local.ip(), 0);
        let slow = secondary.parts().0.udp_bind(any, UdpOptions::default()).unwrap();
        let options = TcpOptions::default();
        let listener = secondary.parts().0.tcp_listen(local, 1, options).unwrap();
        let (stack, arena, now_ns) = client.parts();
        let ours = stack.tcp_connect(now_ns, arena, None, local, options).unwrap();
        poll_until(&mut [&mut client, &mut *primary, &mut *secondary], |all| {
            all[2].stack().tcp_acceptable(listener) == 1
        });
        let theirs = secondary.parts().0.tcp_accept(listener).unwrap();
        // Three quarters of the slow socket's queue are full.
        secondary.read_clock();
        secondary.report_fill(slow, tidegate_stack::QUEUE_FILL_SCALE * 3 / 4 + 1);
        assert_eq!(secondary.poll().unwrap(), 0);
        let (stack, arena, now_ns) = client.parts();
        stack.tcp_send(now_ns, arena, ours, b"in flight").unwrap();
        client.poll().unwrap();
        primary.poll().unwrap();
        assert_eq!(secondary.poll().unwrap(), 0, "receiving is paused");
        let port = (TransportProtocol::Tcp, 80);
        std::thread::scope(|scope| {
            let parked = scope.spawn(|| flow_steering.park(1, &[port]));
            while !parked.is_finished() {
                primary.poll().unwrap();
            }
            parked.join().unwrap().unwrap();
        });
        assert!(secondary.drain_passed_frames().unwrap());
        let selection = SocketSelection {
            listeners: vec![listener],
            connections: vec![theirs],
            ..SocketSelection::default()
        };
        let (stack, arena, now_ns) = secondary.parts();
        let extracted = stack.extract_sockets(now_ns, arena, &selection);
        secondary.flush().unwrap();
        let (stack, arena, now_ns) = primary.parts();
        let moved = stack.insert_sockets(now_ns, arena, extracted).unwrap();
        flow_steering.hand_over(1, 0, [(port, 1)]);
        let theirs = moved.connections[0].1;
        poll_until(&mut [&mut client, &mut *primary, &mut *secondary], |all| {
            all[1].stack().tcp_readable(theirs) == b"in flight".len()
        });
        assert_eq!(client.stack().tcp_state(ours), Some(TcpState::Established));
    }
}

#[test]
fn paused_primary_core_transmits_for_the_others() {
    for (own, peers) in address_sets() {
        let (near, far) = wire(&MemConfig::default()).unwrap();
        let gate = tidegate_gate::Config::default().feedback_timeout_us(100_000_000);
        let near = net(near, own).gate(Settings::new(gate).unwrap());
        let ShardedStacks { stacks, flow_steering } = open_sharded(near, 2).unwrap();
        // Answers to neighbour requests go to active cores.
        flow_steering.unwrap().set_active(1);
        let (mut engines, _): (Vec<_>, Vec<_>) = stacks.into_iter().unzip();
        let (mut client, _) = open(net(far, &peers[0])).unwrap();
        let peer = SocketAddr::new(peers[0].parse::<IpCidr>().unwrap().address(), 9);
        let sink = client.parts().0.udp_bind(peer, UdpOptions::default()).unwrap();
        let any = SocketAddr::new(own.parse::<IpCidr>().unwrap().address(), 0);
        let [primary, secondary] = &mut engines[..] else { panic!("there are two cores") };
        let slow = primary.parts().0.udp_bind(any, UdpOptions::default()).unwrap();
        let socket = secondary.parts().0.udp_bind(any, UdpOptions::default()).unwrap();
        let send = |secondary: &mut Engine| {
            let (stack, arena, now_ns) = secondary.parts();
            stack.udp_send(now_ns, arena, socket, Some(peer), None, b"x").unwrap();
        };
        send(secondary);
        // Resolves the neighbours.
        poll_until(&mut [&mut client, &mut *primary, &mut *secondary], |all| {
            all[0].stack().udp_queue_len(sink) == 1
        });
        pause_receiving(primary, slow);
        send(secondary);
        secondary.poll().unwrap();
        primary.poll().unwrap();
        client.poll().unwrap();
        assert_eq!(client.stack().udp_queue_len(sink), 2);
    }
}
