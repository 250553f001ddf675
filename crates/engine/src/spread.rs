//! Several cores behind one port, each with an engine and a stack of its own.

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, mpsc};

use tidegate_port::Port;
use tidegate_port::spread::{Branch, Crossing, Flow, LocalPort, spread};
use tidegate_port::steering::Protocol;
use tidegate_stack::{Ownership, PortGroups, SavedStack, Transport};
use tidegate_wire::MacAddr;

use crate::claim::Claims;
use crate::open::{NetConfig, OpenError, PortConfig};
use crate::prepared::{Prepared, open};
use crate::{Engine, EngineConfig};

/// Stacks behind one port.
pub struct SpreadStacks {
    /// An engine with its claims for each core; the first one has the card.
    pub stacks: Vec<(Engine, Claims)>,
    /// Where their ways cross; there is none with one core.
    pub crossing: Option<Arc<Crossing>>,
}

/// Opens the port of a configuration for `cores` cores.
///
/// # Errors
/// As [`crate::open()`]; and when the port cannot be spread, or the stack shares the
/// kernel's addresses.
pub fn open_spread(config: NetConfig, cores: usize) -> Result<SpreadStacks, OpenError> {
    let mut prepared = PreparedCores::new(config, cores)?;
    prepared.first().open_port()?;
    prepared.begin()
}

/// What the core with the card has of the others when the port is open.
type Spread = (Arc<Crossing>, Vec<Branch>);

/// As [`Prepared`], for one core or several.
pub struct PreparedCores {
    first: Prepared,
    others: Vec<NetConfig>,
    /// If there are others.
    spread: Option<mpsc::Receiver<Spread>>,
}

impl PreparedCores {
    /// As [`Prepared::new`].
    ///
    /// # Errors
    /// As [`Prepared::new`]; and when several cores are to share the kernel's
    /// addresses.
    pub fn new(mut config: NetConfig, cores: usize) -> Result<Self, OpenError> {
        if cores == 1 {
            let first = Prepared::new(config)?;
            return Ok(Self { first, others: Vec::new(), spread: None });
        }
        if config.ownership == Ownership::Shared {
            return Err(OpenError::SharedByCores);
        }
        let others = (1..cores).map(|_| beside(&config)).collect();
        let (sender, receiver) = mpsc::channel();
        config = config.wrap(Box::new(move |port| {
            let (trunk, branches) = spread(port, cores)?;
            // Whoever opens the port waits for it.
            let _ = sender.send((trunk.crossing(), branches));
            Ok(Box::new(trunk) as Box<dyn Port>)
        }));
        Ok(Self { first: Prepared::new(config)?, others, spread: Some(receiver) })
    }

    /// The core with the card, whose port is to be opened.
    pub fn first(&mut self) -> &mut Prepared {
        &mut self.first
    }

    /// Goes on with the hardware address of another process where a device has a new
    /// one each time that it is opened, unless one was chosen.
    pub fn keep_mac(&mut self, mac: MacAddr) {
        if self.first.keep_mac(mac) {
            self.others.iter_mut().for_each(|other| other.mac = other.mac.or(Some(mac)));
        }
    }

    /// Begins with empty stacks.
    ///
    /// # Errors
    /// As [`Prepared::begin`].
    pub fn begin(self) -> Result<SpreadStacks, OpenError> {
        let Self { first, others, spread } = self;
        join(first.begin()?, others, spread)
    }

    /// As [`PreparedCores::begin`], but the core with the card has the stack that
    /// another process has saved.
    ///
    /// # Errors
    /// As [`Prepared::go_on`].
    pub fn go_on(self, saved: SavedStack) -> Result<SpreadStacks, OpenError> {
        let Self { first, others, spread } = self;
        join(first.go_on(saved)?, others, spread)
    }
}

/// Opens the stacks of the other cores.
fn join(
    first: (Engine, Claims),
    others: Vec<NetConfig>,
    spread: Option<mpsc::Receiver<Spread>>,
) -> Result<SpreadStacks, OpenError> {
    let Some(spread) = spread else {
        return Ok(SpreadStacks { stacks: vec![first], crossing: None });
    };
    let (mut engine, _) = first;
    let secrets = engine.parts().0.tcp_secrets();
    let spread = spread.recv().map_err(|_| io::Error::other("the port was not opened"));
    let (crossing, branches) = spread.map_err(OpenError::Io)?;
    let claims = |core| Claims::among_cores(Arc::clone(&crossing), core);
    let mut all = vec![(engine, claims(0))];
    for (mut other, branch) in others.into_iter().zip(branches) {
        let open_branch = move |branch: Branch| Ok(Box::new(branch) as Box<dyn Port>);
        other.port = PortConfig::Custom(Box::new(move |_| open_branch(branch)));
        let (mut engine, _) = open(other)?;
        // What one stack has told a peer another one must keep.
        engine.parts().0.share_tcp_secrets(secrets);
        all.push((engine, claims(all.len())));
    }
    let mut engines = all.iter_mut().map(|(engine, _)| engine);
    if let Some(first) = engines.next() {
        first.admit_for(engines);
    }
    for (core, (engine, _)) in all.iter_mut().enumerate() {
        let place = Place { crossing: Arc::clone(&crossing), core };
        let (stack, _, _) = engine.parts();
        stack.set_port_groups(Arc::new(place.clone()));
        stack.set_reserved_ports(move |transport, port| {
            place.crossing.is_foreign(place.core, (protocol(transport), port))
        });
    }
    Ok(SpreadStacks { stacks: all, crossing: Some(crossing) })
}

/// Where a stack is among the others.
#[derive(Clone)]
struct Place {
    crossing: Arc<Crossing>,
    core: usize,
}

impl PortGroups for Place {
    fn join(&self, transport: Transport, local: SocketAddr, party: u64) {
        self.crossing.join(self.core, local_port(transport, local), local.ip(), party);
    }

    fn leave(&self, transport: Transport, local: SocketAddr, party: u64) {
        self.crossing.leave(self.core, local_port(transport, local), local.ip(), party);
    }

    fn begin(&self, transport: Transport, local: SocketAddr, remote: SocketAddr) -> bool {
        self.crossing.begin(self.core, Flow::new(protocol(transport), local, remote))
    }

    fn take_over(&self, transport: Transport, local: SocketAddr, remote: SocketAddr) {
        self.crossing.take_over(self.core, Flow::new(protocol(transport), local, remote));
    }

    fn end(&self, transport: Transport, local: SocketAddr, remote: SocketAddr) {
        self.crossing.end(self.core, Flow::new(protocol(transport), local, remote));
    }
}

fn protocol(transport: Transport) -> Protocol {
    match transport {
        Transport::Udp => Protocol::Udp,
        Transport::Tcp => Protocol::Tcp,
    }
}

fn local_port(transport: Transport, local: SocketAddr) -> LocalPort {
    (protocol(transport), local.port())
}

/// The configuration of a stack on the same addresses, but for its port.
fn beside(config: &NetConfig) -> NetConfig {
    let not_open = || io::Error::other("this port was not made");
    NetConfig {
        port: PortConfig::Custom(Box::new(move |_| Err(not_open()))),
        wraps: Vec::new(),
        addresses: config.addresses.clone(),
        routes: config.routes.clone(),
        ownership: config.ownership,
        mac: config.mac,
        vlan: config.vlan,
        limits: config.limits.clone(),
        arena: config.arena,
        engine: EngineConfig { gate: config.engine.gate.clone(), ..config.engine },
        own_thread: config.own_thread,
        counts_lock: config.counts_lock,
        ports_are_held: config.ports_are_held,
        // Who has the port refuses what is not to be taken.
        admission: None,
        // Each chooses ports of its own.
        seed: None,
        // Sockets that move keep their times.
        clock: config.clock,
    }
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, SocketAddr};
    use std::time::Instant;

    use tidegate_gate::Settings;
    use tidegate_gate::admission::{self, Admission, Class, Match, Source};
    use tidegate_port::mem::{MemConfig, wire};
    use tidegate_port::spread::Sharing;
    use tidegate_stack::{TcpOptions, UdpId, UdpOptions};
    use tidegate_wire::{DropReason, IpCidr};

    use super::*;

    const CORES: usize = 3;

    fn net(port: tidegate_port::mem::MemPort, address: &str) -> NetConfig {
        NetConfig::new(port).address(address.parse().unwrap()).seed([3; 16])
    }

    /// Lets all have their turns until `done`.
    fn run(engines: &mut [&mut Engine], mut done: impl FnMut(&mut [&mut Engine]) -> bool) {
        for _ in 0..10_000 {
            for engine in &mut *engines {
                engine.poll().unwrap();
            }
            if done(engines) {
                return;
            }
        }
        panic!("it does not happen");
    }

    #[test]
    fn every_core_has_sockets_of_its_own_on_one_address() {
        for (own, peer) in [("10.0.0.1/24", "10.0.0.2/24"), ("fd00::1/64", "fd00::2/64")] {
            let (near, far) = wire(&MemConfig::default()).unwrap();
            let spread = open_spread(net(near, own), CORES).unwrap();
            let SpreadStacks { stacks: cores, crossing } = spread;
            let crossing = crossing.unwrap();
            let (mut client, _) = open(net(far, peer)).unwrap();
            (1..CORES).for_each(|core| crossing.set_used(core));
            let own = own.split('/').next().unwrap().parse().unwrap();
            let (mut engines, claims): (Vec<_>, Vec<_>) = cores.into_iter().unzip();
            let mut servers = Vec::new();
            for (core, engine) in engines.iter_mut().enumerate() {
                let local = SocketAddr::new(own, 5000 + core as u16);
                let id = engine.parts().0.udp_bind(local, UdpOptions::default()).unwrap();
                let claim = claims[core].settle(Protocol::Udp, local, Sharing::Alone, None);
                servers.push((local, id, claim.unwrap().unwrap()));
            }
            let taken = claims[1].settle(Protocol::Udp, servers[0].0, Sharing::Alone, None);
            assert_eq!(taken.err().unwrap().kind(), io::ErrorKind::AddrInUse);
            let any = SocketAddr::new(peer.split('/').next().unwrap().parse().unwrap(), 0);
            let (stack, arena, now_ns) = client.parts();
            let asker = stack.udp_bind(any, UdpOptions::default()).unwrap();
            for (at, (local, ..)) in servers.iter().enumerate() {
                stack.udp_send(now_ns, arena, asker, Some(*local), None, &[at as u8]).unwrap();
            }
            let mut all: Vec<&mut Engine> = engines.iter_mut().chain([&mut client]).collect();
            let mut answers = Vec::new();
            run(&mut all, |all| {
                for (core, (_, id, _)) in servers.iter().enumerate() {
                    let (stack, arena, now_ns) = all[core].parts();
                    while let Some(datagram) = stack.udp_receive(arena, *id) {
                        assert_eq!(datagram.bytes(arena), [core as u8]);
                        let to = datagram.remote;
                        datagram.release(arena);
                        stack
                            .udp_send(now_ns, arena, *id, Some(to), None, &[core as u8 + 10])
                            .unwrap();
                    }
                    all[core].flush().unwrap();
                }
                let (stack, arena, _) = all[CORES].parts();
                while let Some(datagram) = stack.udp_receive(arena, asker) {
                    answers.push(datagram.bytes(arena)[0]);
                    datagram.release(arena);
                }
                answers.len() == CORES
            });
            answers.sort_unstable();
            assert_eq!(answers, [10, 11, 12]);
        }
    }

    /// Two cores with admission, of which the other one serves all, and a client with
    /// several addresses.
    struct Admitting {
        first: Engine,
        other: Engine,
        claims: Claims,
        client: Engine,
        own: IpAddr,
        began: Instant,
    }

    impl Admitting {
        fn new(own: &str, peers: &[String], admission: admission::Config) -> Self {
            let (near, far) = wire(&MemConfig::default()).unwrap();
            // No core stops receiving.
            let gate = tidegate_gate::Config { feedback: false, ..Default::default() };
            let near = net(near, own).gate(Settings::new(gate).unwrap());
            let SpreadStacks { stacks, .. } = open_spread(near.admission(admission), 2).unwrap();
            let (engines, claims): (Vec<_>, Vec<_>) = stacks.into_iter().unzip();
            let [first, other] = <[_; 2]>::try_from(engines).ok().unwrap();
            let [_, claims] = <[_; 2]>::try_from(claims).ok().unwrap();
            let far = NetConfig::new(far).seed([3; 16]);
            let far = peers.iter().fold(far, |far, peer| far.address(peer.parse().unwrap()));
            let (client, _) = open(far).unwrap();
            let own = own.parse::<IpCidr>().unwrap().address();
            Self { first, other, claims, client, own, began: Instant::now() }
        }

        fn claim(&mut self, protocol: Protocol, port: u16) -> SocketAddr {
            let local = SocketAddr::new(self.own, port);
            self.claims.settle(protocol, local, Sharing::Alone, None).unwrap().unwrap();
            local
        }

        /// Opens the ports of both sides again.
        fn open_again(&mut self, own: &str, admission: admission::Config) {
            let (near, far) = wire(&MemConfig::default()).unwrap();
            let near = net(near, own).admission(admission);
            for (engine, config) in
                [(&mut self.first, near), (&mut self.client, NetConfig::new(far))]
            {
                engine.close_port(false).unwrap();
                engine.open_port_again(config).unwrap();
            }
        }

        /// A socket of the other core.
        fn bind(&mut self, port: u16) -> UdpId {
            let local = self.claim(Protocol::Udp, port);
            self.other.parts().0.udp_bind(local, UdpOptions::default()).unwrap()
        }

        /// A socket of the client's.
        fn from(&mut self, peer: &str) -> UdpId {
            let local = SocketAddr::new(peer.parse::<IpCidr>().unwrap().address(), 0);
            self.client.parts().0.udp_bind(local, UdpOptions::default()).unwrap()
        }

        fn send(&mut self, from: UdpId, port: u16) {
            let (stack, arena, now_ns) = self.client.parts();
            let to = Some(SocketAddr::new(self.own, port));
            stack.udp_send(now_ns, arena, from, to, None, &[0; 64]).unwrap();
        }

        /// How many datagrams wait for a socket of the other core, which takes up to
        /// `most`.
        fn take(&mut self, id: UdpId, most: usize) -> usize {
            let (stack, arena, _) = self.other.parts();
            let mut taken = 0;
            while taken < most
                && let Some(datagram) = stack.udp_receive(arena, id)
            {
                datagram.release(arena);
                taken += 1;
            }
            taken
        }

        /// Lets each of them send to a socket on port 53 that reads less than there is.
        fn crowd(&mut self, strangers: &[UdpId], to: UdpId) {
            strangers.iter().for_each(|&stranger| self.send(stranger, 53));
            self.poll();
            self.take(to, 4);
            self.other.tell_level(to);
        }

        fn poll(&mut self) {
            assert!(self.began.elapsed().as_secs() < 60, "it does not happen");
            for engine in [&mut self.client, &mut self.first, &mut self.other] {
                engine.poll().unwrap();
                while engine.poll_event().is_some() {}
            }
        }

        /// Lets a peer finish a handshake with the other core.
        fn shake_hands(&mut self, peer: &str) {
            let server = self.claim(Protocol::Tcp, 80);
            self.other.parts().0.tcp_listen(server, 8, TcpOptions::default()).unwrap();
            let peer = peer.parse::<IpCidr>().unwrap().address();
            let (stack, arena, now_ns) = self.client.parts();
            let from = Some(SocketAddr::new(peer, 0));
            stack.tcp_connect(now_ns, arena, from, server, TcpOptions::default()).unwrap();
            while !self.admission().known().contains(Source::of(peer)) {
                self.poll();
            }
        }

        fn admission(&self) -> &Admission {
            self.first.admission().expect("the core with the card decides")
        }

        /// Frames that were refused at the card.
        fn refused(&mut self) -> u64 {
            let (_, port, _) = self.first.counters();
            let reasons = [
                DropReason::AdmissionClassClosed,
                DropReason::AdmissionRate,
                DropReason::AdmissionSourceShare,
            ];
            reasons.iter().map(|&reason| port.drops.get(reason)).sum()
        }

        /// Frames that the other core got.
        fn passed_on(&mut self) -> u64 {
            self.other.counters().1.received
        }
    }

    const STRANGERS: u16 = 32;

    /// The addresses of two friends and of strangers, and ours.
    fn crowds() -> [(&'static str, Vec<String>); 2] {
        let peers = |peer: &dyn Fn(u16) -> String| (2..4 + STRANGERS).map(peer).collect();
        [
            ("10.0.0.1/24", peers(&|n| format!("10.0.0.{n}/24"))),
            ("fd00::1/64", peers(&|n| format!("fd00::{n:x}/64"))),
        ]
    }

    /// What is too much for another core is refused at the card and never comes there.
    /// Who has finished a handshake there goes first, and who is exempt always passes.
    #[test]
    fn the_core_with_the_card_admits_for_all() {
        for (own, peers) in crowds() {
            let mut config = admission::Config::default();
            let guest = peers[1].parse::<IpCidr>().unwrap().address();
            let guest = IpCidr::new(guest, if guest.is_ipv4() { 32 } else { 128 }).unwrap();
            config.classes.insert(
                0,
                Class {
                    name: "guest".to_owned(),
                    rules: vec![Match { source: Some(guest), ..Match::default() }],
                    rank: 0,
                    guaranteed_pps: 0,
                    ceiling_pps: None,
                    exempt: true,
                },
            );
            let mut site = Admitting::new(own, &peers, config);
            site.shake_hands(&peers[0]);
            assert!(site.other.admission().is_none(), "it has nothing to decide");
            let [crowded, known, exempt] = [53, 54, 55].map(|port| site.bind(port));
            let senders: Vec<UdpId> = peers.iter().map(|peer| site.from(peer)).collect();
            let passed_before = site.passed_on();

            let (mut rounds, mut known_heard, mut exempt_heard) = (0, 0, 0);
            while site.refused() < 5_000 || known_heard < 100 {
                site.send(senders[0], 54);
                site.send(senders[1], 55);
                site.crowd(&senders[2..], crowded);
                rounds += 1;
                let heard = site.take(known, usize::MAX);
                known_heard += if site.admission().is_limiting() { heard } else { 0 };
                exempt_heard += site.take(exempt, usize::MAX);
            }
            assert_eq!(exempt_heard, rounds);
            let sent = (rounds * senders.len()) as u64;
            // What neighbours and the connection say meanwhile counts, too.
            let besides = (site.refused() + site.passed_on() - passed_before).checked_sub(sent);
            assert!(matches!(besides, Some(0..=8)), "{besides:?} of {sent}");
        }
    }

    #[test]
    fn admission_that_begins_anew_is_for_all_cores_again() {
        for (own, peers) in crowds() {
            let mut site = Admitting::new(own, &peers, admission::Config::default());
            let crowded = site.bind(53);
            let strangers: Vec<UdpId> = peers.iter().map(|peer| site.from(peer)).collect();
            site.open_again(own, admission::Config::default());
            while site.refused() < 100 {
                site.crowd(&strangers, crowded);
            }
        }
    }

    /// Lets a socket of each core ask one of each, itself too, by their own address.
    #[test]
    fn every_core_speaks_to_every_core_by_their_own_address() {
        for own in ["10.0.0.1/24", "fd00::1/64"] {
            let (near, _far) = wire(&MemConfig::default()).unwrap();
            let SpreadStacks { stacks, crossing } = open_spread(net(near, own), CORES).unwrap();
            (1..CORES).for_each(|core| crossing.as_ref().unwrap().set_used(core));
            let own = own.split('/').next().unwrap().parse().unwrap();
            let (mut engines, claims): (Vec<_>, Vec<_>) = stacks.into_iter().unzip();
            let mut sockets = Vec::new();
            for (core, engine) in engines.iter_mut().enumerate() {
                let local = SocketAddr::new(own, 5000 + core as u16);
                let id = engine.parts().0.udp_bind(local, UdpOptions::default()).unwrap();
                let claim = claims[core].settle(Protocol::Udp, local, Sharing::Alone, None);
                sockets.push((local, id, claim.unwrap().unwrap()));
            }
            for (core, engine) in engines.iter_mut().enumerate() {
                let (stack, arena, now_ns) = engine.parts();
                for (to, ..) in &sockets {
                    let from = sockets[core].1;
                    stack.udp_send(now_ns, arena, from, Some(*to), None, &[core as u8]).unwrap();
                }
            }
            let mut heard = Vec::new();
            run(&mut engines.iter_mut().collect::<Vec<_>>(), |engines| {
                for (core, (_, id, _)) in sockets.iter().enumerate() {
                    let (stack, arena, _) = engines[core].parts();
                    while let Some(datagram) = stack.udp_receive(arena, *id) {
                        let from = datagram.bytes(arena)[0];
                        assert_eq!(datagram.remote, sockets[usize::from(from)].0);
                        heard.push((from, core));
                        datagram.release(arena);
                    }
                }
                heard.len() == CORES * CORES
            });
            heard.sort_unstable();
            heard.dedup();
            assert_eq!(heard.len(), CORES * CORES);
        }
    }

    /// Listeners and datagram sockets on one port of two cores: each serves a part of the
    /// clients, and goes on with its connections when it takes no new ones.
    #[test]
    fn a_port_that_is_shared_is_served_by_several_cores() {
        const CLIENTS: usize = 64;
        for (own, peer) in [("10.0.0.1/24", "10.0.0.2/24"), ("fd00::1/64", "fd00::2/64")] {
            let (near, far) = wire(&MemConfig::default()).unwrap();
            let SpreadStacks { stacks, crossing } = open_spread(net(near, own), CORES).unwrap();
            (1..CORES).for_each(|core| crossing.as_ref().unwrap().set_used(core));
            let (client, _) = open(net(far, peer)).unwrap();
            let address = |cidr: &str| cidr.split('/').next().unwrap().parse().unwrap();
            let local = SocketAddr::new(address(own), 80);
            let any = SocketAddr::new(address(peer), 0);
            let (mut engines, claims): (Vec<_>, Vec<_>) = stacks.into_iter().unzip();
            let options = TcpOptions { reuse_port: true, ..TcpOptions::default() };
            let mut listeners = Vec::new();
            for core in 1..CORES {
                let (stack, _, _) = engines[core].parts();
                let listener = stack.tcp_listen(local, CLIENTS, options).unwrap();
                let options = UdpOptions { reuse_port: true, ..UdpOptions::default() };
                let socket = stack.udp_bind(local, options).unwrap();
                let settle = |protocol| {
                    let sharing = Sharing::ReusePort { party: 0 };
                    let claim = claims[core].settle(protocol, local, sharing, None);
                    let refused = claims[0].settle(protocol, local, Sharing::Alone, None);
                    assert!(refused.is_err(), "it is no other core's alone");
                    claim.unwrap().unwrap()
                };
                let claims = [Protocol::Tcp, Protocol::Udp].map(settle);
                listeners.push((listener, socket, claims));
            }
            engines.push(client);

            let (stack, arena, now_ns) = engines[CORES].parts();
            let options = TcpOptions::default();
            let mut connect = || stack.tcp_connect(now_ns, arena, None, local, options).unwrap();
            let connections: Vec<_> = (0..CLIENTS).map(|_| connect()).collect();
            let bind = |_| stack.udp_bind(any, UdpOptions::default()).unwrap();
            let askers: Vec<_> = (0..CLIENTS).map(bind).collect();
            let mut accepted = vec![Vec::new(); CORES];
            let mut served = [0; CORES];
            // Each server says which it is; each client asks until it has heard that.
            let mut heard = [vec![None; CLIENTS], vec![None; CLIENTS]];
            for round in 0..2_u8 {
                let mut answers = [vec![None; CLIENTS], vec![None; CLIENTS]];
                let mut has_asked = [false; CLIENTS];
                run(&mut engines.iter_mut().collect::<Vec<_>>(), |engines| {
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
                        while let Some(datagram) = stack.udp_receive(arena, *socket) {
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
                            stack.udp_send(now_ns, arena, askers[at], to, None, &[round]).unwrap();
                        }
                        let mut answer = [0; 1];
                        if stack.tcp_recv(now_ns, arena, id, &mut answer) == Ok(1) {
                            by_stream[at] = Some(answer[0]);
                        }
                    }
                    for (at, &id) in askers.iter().enumerate() {
                        while let Some(datagram) = stack.udp_receive(arena, id) {
                            by_datagram[at] = Some(datagram.bytes(arena)[0]);
                            datagram.release(arena);
                        }
                    }
                    engines[CORES].flush().unwrap();
                    answers.iter().flatten().all(Option::is_some)
                });
                for core in 1..CORES {
                    assert!(accepted[core].len() > CLIENTS / 8, "core {core} has its part");
                    assert!(served[core] > CLIENTS / 8, "core {core} has its part");
                }
                if round == 0 {
                    heard = answers;
                    // The listener of the last core takes no more connections.
                    let (listener, ..) = listeners[CORES - 2];
                    let (stack, arena, now_ns) = engines[CORES - 1].parts();
                    stack.tcp_close_listener(now_ns, arena, listener);
                } else {
                    assert_eq!(answers, heard, "all are where they were");
                }
            }
        }
    }

    #[test]
    fn no_two_cores_choose_the_same_port() {
        let (near, _far) = wire(&MemConfig::default()).unwrap();
        let mut cores = open_spread(net(near, "10.0.0.1/24"), 2).unwrap().stacks;
        let peer = "10.0.0.2:80".parse().unwrap();
        let mut ports = Vec::new();
        for _ in 0..50 {
            for (engine, claims) in &mut cores {
                let (stack, arena, now_ns) = engine.parts();
                let id = stack.tcp_connect(now_ns, arena, None, peer, TcpOptions::default());
                let local = stack.tcp_local_addr(id.unwrap()).unwrap();
                let claim = claims.settle(Protocol::Tcp, local, Sharing::Alone, None).unwrap();
                ports.push((local.port(), claim));
            }
        }
        ports.sort_unstable_by_key(|(port, _)| *port);
        assert!(ports.windows(2).all(|two| two[0].0 != two[1].0));
    }

    #[test]
    fn the_kernels_addresses_are_one_cores() {
        let (near, _far) = wire(&MemConfig::default()).unwrap();
        let shared = NetConfig::new(near).shared();
        assert!(matches!(open_spread(shared, 2), Err(OpenError::SharedByCores)));
    }
}
