//! Two stacks and a link that loses, doubles, delays, reorders and corrupts:
//! every byte arrives once and in order, and every connection ends.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use proptest::prelude::*;
use tidegate_stack::{
    Config, CongestionControl, Keepalive, MovingSockets, Shutdown, TcpError, TcpId, TcpListenerId,
    TcpOptions, TcpState,
};

use crate::kit::{Family, Host, SECOND_NS, both, config, mac};
use crate::moving::{move_between, renamed};
use crate::upgrade::upgrade;

const MS: u64 = 1_000_000;
const PORT: u16 = 80;

/// What a link does to frames, each in so many of a thousand cases.
#[derive(Clone, Copy, Debug, Default)]
pub struct Link {
    pub lost: u32,
    pub doubled: u32,
    pub late: u32,
    pub corrupted: u32,
    pub delay_ns: u64,
    pub seed: u64,
}

/// Frames under way, and what happens to them.
struct Wire {
    link: Link,
    state: u64,
    /// By time of arrival and a number to keep them apart: whether to `b`.
    flying: BTreeMap<(u64, u64), (bool, Vec<u8>)>,
    count: u64,
}

impl Wire {
    fn new(link: Link) -> Self {
        Self { link, state: link.seed | 1, flying: BTreeMap::new(), count: 0 }
    }

    /// Whether something of `thousandths` happens (xorshift).
    fn happens(&mut self, thousandths: u32) -> bool {
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        (self.state >> 20) % 1000 < u64::from(thousandths)
    }

    fn take(&mut self, now_ns: u64, to_b: bool, mut bytes: Vec<u8>) {
        if self.happens(self.link.lost) {
            return;
        }
        if self.happens(self.link.corrupted) {
            let at = self.state as usize % bytes.len();
            bytes[at] ^= 1 << (self.state % 8);
        }
        let copies = 1 + usize::from(self.happens(self.link.doubled));
        for _ in 0..copies {
            let late = self.happens(self.link.late);
            let extra = if late { self.link.delay_ns * (1 + self.state % 5) } else { 0 };
            self.count += 1;
            let at = (now_ns + self.link.delay_ns + extra, self.count);
            self.flying.insert(at, (to_b, bytes.clone()));
        }
    }
}

/// One side of an exchange.
pub struct Side {
    id: Option<TcpId>,
    to_send: usize,
    sent: usize,
    received: Vec<u8>,
    shut: bool,
    ended: bool,
    failure: Option<TcpError>,
    /// The connection after its handle was closed.
    closed: Option<TcpId>,
    /// Reads at most so much at a time.
    appetite: usize,
    salt: u8,
}

impl Side {
    pub fn new(to_send: usize, appetite: usize, salt: u8) -> Self {
        Self {
            id: None,
            to_send,
            sent: 0,
            received: Vec::new(),
            shut: false,
            ended: false,
            failure: None,
            closed: None,
            appetite,
            salt,
        }
    }

    fn byte(&self, at: usize) -> u8 {
        (at % 249) as u8 ^ self.salt
    }

    /// Does what a program would: writes, reads, shuts when all is written, and
    /// closes when both sides have.
    fn act(&mut self, host: &mut Host) {
        let Some(id) = self.id else { return };
        let now_ns = host.now_ns;
        while self.sent < self.to_send && self.failure.is_none() {
            let piece: Vec<u8> =
                (self.sent..self.to_send.min(self.sent + 5000)).map(|at| self.byte(at)).collect();
            match host.stack.tcp_send(now_ns, &mut host.arena, id, &piece) {
                Ok(len) => self.sent += len,
                Err(TcpError::WouldBlock | TcpError::NotConnected) => break,
                Err(error) => self.failure = Some(error),
            }
        }
        let mut buf = vec![0; self.appetite];
        while !self.ended && self.failure.is_none() {
            match host.stack.tcp_recv(now_ns, &mut host.arena, id, &mut buf) {
                Ok(0) => self.ended = true,
                Ok(len) => self.received.extend(&buf[..len]),
                Err(TcpError::WouldBlock | TcpError::NotConnected) => break,
                Err(error) => self.failure = Some(error),
            }
            if self.appetite < 1000 {
                break;
            }
        }
        let established = host.stack.tcp_state(id) != Some(TcpState::SynSent);
        if self.sent == self.to_send && !self.shut && established && self.failure.is_none() {
            match host.stack.tcp_shutdown(now_ns, &mut host.arena, id, Shutdown::Write) {
                Ok(()) => self.shut = true,
                Err(TcpError::NotConnected) => {}
                Err(error) => self.failure = Some(error),
            }
        }
        if self.shut && self.ended || self.failure.is_some() {
            host.stack.tcp_close(now_ns, &mut host.arena, id);
            self.closed = self.id.take();
        }
    }

    fn is_done(&self) -> bool {
        self.shut && self.ended || self.failure.is_some()
    }
}

pub struct Exchange {
    a: Host,
    b: Host,
    wire: Wire,
    listener: TcpListenerId,
    client: Side,
    server: Side,
    /// In so many of a thousand moments a side is replaced.
    upgrades: u32,
    /// In so many of a thousand moments the sockets of a side move to its other
    /// stack.
    moves: u32,
    other_stacks: [Host; 2],
}

fn config_of(n: u8) -> Config {
    let mut config = config(n);
    config.limits.tcp_time_wait_ns = 2 * SECOND_NS;
    config
}

fn host(n: u8, other: u8) -> Host {
    let mut host = Host::quiet(config_of(n));
    for family in [Family::V4, Family::V6] {
        host.stack.set_neighbour(
            host.now_ns,
            family.host(other),
            Some(mac(other)),
            &mut host.arena,
        );
    }
    host
}

impl Exchange {
    pub fn new(family: Family, link: Link, options: TcpOptions, up: Side, down: Side) -> Self {
        let (mut a, mut b) = (host(1, 2), host(2, 1));
        let to = SocketAddr::new(family.host(2), PORT);
        let any = SocketAddr::new(family.any(), PORT);
        let listener = b.stack.tcp_listen(any, 4, options).unwrap();
        let id = a.stack.tcp_connect(a.now_ns, &mut a.arena, None, to, options).unwrap();
        let client = Side { id: Some(id), ..up };
        let mut other_stacks = [host(1, 2), host(2, 1)];
        for (host, other) in [&a, &b].into_iter().zip(&mut other_stacks) {
            other.stack.share_tcp_secrets(host.stack.tcp_secrets());
        }
        Self {
            a,
            b,
            wire: Wire::new(link),
            listener,
            client,
            server: down,
            upgrades: 0,
            moves: 0,
            other_stacks,
        }
    }

    /// In so many of a thousand moments the sockets of a side move from one of
    /// its stacks to the other.
    pub fn with_moves(self, moves: u32) -> Self {
        Self { moves, ..self }
    }

    fn move_some(&mut self) {
        if self.moves == 0 {
            return;
        }
        let sides = [(&mut self.a, &mut self.client), (&mut self.b, &mut self.server)];
        for (at, (host, side)) in sides.into_iter().enumerate() {
            if !self.wire.happens(self.moves) {
                continue;
            }
            let connections = side.id.into_iter().chain(side.closed).collect();
            let listeners = if at == 1 { vec![self.listener] } else { Vec::new() };
            let sockets = MovingSockets { listeners, connections, ..MovingSockets::default() };
            let moved = move_between(host, &mut self.other_stacks[at], &sockets);
            std::mem::swap(host, &mut self.other_stacks[at]);
            side.id = side.id.map(|old| renamed(&moved.connections, old).expect("it moves"));
            side.closed = side.closed.and_then(|old| renamed(&moved.connections, old));
            if at == 1 {
                // It may be closed.
                self.listener = renamed(&moved.listeners, self.listener).unwrap_or(self.listener);
            }
        }
    }

    /// In so many of a thousand moments a side is saved, and another with a
    /// fresh arena goes on.
    pub fn with_upgrades(self, upgrades: u32) -> Self {
        Self { upgrades, ..self }
    }

    fn change_some(&mut self) {
        self.upgrade_some();
        self.move_some();
    }

    fn upgrade_some(&mut self) {
        if self.upgrades == 0 {
            return;
        }
        for (n, host) in [(1, &mut self.a), (2, &mut self.b)] {
            if self.wire.happens(self.upgrades) {
                upgrade(host, config_of(n));
            }
        }
    }

    /// Runs until both programs are done. Returns how long it took.
    pub fn run(&mut self, limit_ns: u64) -> u64 {
        self.run_until(limit_ns, |exchange| exchange.client.is_done() && exchange.server.is_done())
    }

    /// Whether the server has received so much.
    pub fn server_has(&self, bytes: usize) -> bool {
        self.server.received.len() >= bytes
    }

    /// Runs until `done`. Returns how long it took.
    pub fn run_until(&mut self, limit_ns: u64, done: impl Fn(&Self) -> bool) -> u64 {
        let start_ns = self.a.now_ns;
        for _ in 0..2_000_000 {
            self.collect();
            self.change_some();
            self.act();
            self.collect();
            self.change_some();
            if done(self) {
                return self.a.now_ns - start_ns;
            }
            let flying = self.wire.flying.keys().next().map(|key| key.0);
            let timers = [self.a.stack.next_timeout(), self.b.stack.next_timeout()];
            let hungry = self.is_hungry().then_some(self.a.now_ns + MS);
            let times = timers.into_iter().flatten().chain(flying).chain(hungry);
            let Some(next_ns) = times.min() else {
                // No SYN got through: the server never heard of its client.
                if self.client.failure.is_some() && self.server.id.is_none() {
                    return self.a.now_ns - start_ns;
                }
                panic!("nothing happens any more: {:?} {:?}", self.info(), self.progress());
            };
            assert!(
                next_ns < start_ns + limit_ns,
                "it takes too long: {:?} {:?}",
                self.info(),
                self.progress()
            );
            self.advance(next_ns);
        }
        panic!("it never ends: {:?} {:?}", self.info(), self.progress());
    }

    /// Whether a program has left something to be read. (The end of what
    /// comes stays readable; who has seen it has nothing left.)
    fn is_hungry(&self) -> bool {
        let left = |host: &Host, side: &Side| {
            !side.ended && side.id.is_some_and(|id| host.stack.tcp_readiness(id).readable)
        };
        left(&self.a, &self.client) || left(&self.b, &self.server)
    }

    fn info(&self) -> impl std::fmt::Debug + use<> {
        let of = |host: &Host, side: &Side| side.id.and_then(|id| host.stack.tcp_info(id));
        (of(&self.a, &self.client), of(&self.b, &self.server))
    }

    fn progress(&self) -> impl std::fmt::Debug + use<> {
        let of =
            |side: &Side| (side.sent, side.received.len(), side.shut, side.ended, side.failure);
        (of(&self.client), of(&self.server))
    }

    fn advance(&mut self, now_ns: u64) {
        for host in [&mut self.a, &mut self.b] {
            host.now_ns = host.now_ns.max(now_ns);
            host.stack.handle_timeout(host.now_ns, &mut host.arena);
        }
        while let Some(entry) = self.wire.flying.first_entry() {
            if entry.key().0 > now_ns {
                break;
            }
            let (to_b, bytes) = entry.remove();
            if to_b { self.b.feed(&bytes) } else { self.a.feed(&bytes) }
        }
    }

    fn collect(&mut self) {
        let now_ns = self.a.now_ns;
        for bytes in self.a.sent() {
            self.wire.take(now_ns, true, bytes);
        }
        for bytes in self.b.sent() {
            self.wire.take(now_ns, false, bytes);
        }
    }

    fn act(&mut self) {
        if self.server.id.is_none()
            && !self.server.is_done()
            && let Ok(id) = self.b.stack.tcp_accept(self.listener)
        {
            self.server.id = Some(id);
        }
        self.client.act(&mut self.a);
        self.server.act(&mut self.b);
    }

    /// Everything arrived, and nothing is left behind.
    pub fn check(self) {
        assert_eq!((self.client.failure, self.server.failure), (None, None));
        for (from, to) in [(&self.client, &self.server), (&self.server, &self.client)] {
            assert_eq!(to.received.len(), from.to_send);
            let wrong = to.received.iter().enumerate().find(|&(at, &byte)| byte != from.byte(at));
            assert_eq!(wrong, None);
        }
        self.end();
    }

    /// Every connection comes to its end, and every stack.
    fn end(mut self) {
        let now_ns = self.b.now_ns;
        self.b.stack.tcp_close_listener(now_ns, &mut self.b.arena, self.listener);
        let limit_ns = self.a.now_ns + 3000 * SECOND_NS;
        while self.a.stack.tcp_connections() + self.b.stack.tcp_connections() > 0 {
            self.collect();
            self.change_some();
            self.collect();
            let flying = self.wire.flying.keys().next().map(|key| key.0);
            let timers = [self.a.stack.next_timeout(), self.b.stack.next_timeout()];
            let next_ns = timers.into_iter().flatten().chain(flying).min().expect("an end");
            assert!(next_ns < limit_ns, "connections are left");
            self.advance(next_ns);
        }
        self.collect();
        self.a.sent();
        self.b.sent();
        let [other_a, other_b] = self.other_stacks;
        for host in [self.a, self.b, other_a, other_b] {
            assert_eq!(host.stack.tcp_memory_used(), 0);
            host.finish();
        }
    }

    /// Both sides have ended, however they did.
    pub fn check_ended(self, may_fail: bool) {
        let failed = self.client.failure.is_some() || self.server.failure.is_some();
        if !failed {
            return self.check();
        }
        assert!(may_fail, "{:?}", self.progress());
        self.end();
    }
}

#[test]
fn an_exchange_over_a_good_link() {
    both(|family| {
        let link = Link { delay_ns: 5 * MS, ..Link::default() };
        let (up, down) = (Side::new(300_000, 8000, 0), Side::new(200_000, 8000, 0x55));
        let mut exchange = Exchange::new(family, link, TcpOptions::default(), up, down);
        let took_ns = exchange.run(60 * SECOND_NS);
        // Six round trips of slow start from ten segments, and two to begin.
        assert!(took_ns < 150 * MS, "{} ms", took_ns / MS);
        exchange.check();
    });
}

#[test]
fn one_byte_and_none() {
    both(|family| {
        for (up, down) in [(1, 0), (0, 1), (0, 0)] {
            let link = Link { delay_ns: MS, ..Link::default() };
            let (up, down) = (Side::new(up, 8000, 0), Side::new(down, 8000, 1));
            let mut exchange = Exchange::new(family, link, TcpOptions::default(), up, down);
            exchange.run(60 * SECOND_NS);
            exchange.check();
        }
    });
}

/// An exchange to be made, of any kind over any link.
#[derive(Clone, Debug)]
pub struct Plan {
    family: Family,
    link: Link,
    options: TcpOptions,
    /// Bytes each way, and how many at a time are written and read.
    sizes: (usize, usize),
    appetites: (usize, usize),
}

prop_compose! {
    /// Any plan.
    pub fn plans()(
        v6 in any::<bool>(),
        link in links(),
        sizes in (0usize..150_000, 0usize..150_000),
        buffers in (2048u32..200_000, 2048u32..200_000),
        appetites in (1usize..20_000, 100usize..20_000),
        newreno in any::<bool>(),
        no_delay in any::<bool>(),
        ecn in any::<bool>(),
    ) -> Plan {
        let options = TcpOptions {
            send_buffer_bytes: buffers.0,
            receive_buffer_bytes: buffers.1,
            no_delay,
            ecn,
            // A peer that has given up may not get the word through.
            keepalive: Some(Keepalive { idle_ms: 60_000, interval_ms: 10_000, probes: 20 }),
            congestion_control: match newreno {
                true => CongestionControl::NewReno,
                false => CongestionControl::Cubic,
            },
            ..TcpOptions::default()
        };
        Plan { family: if v6 { Family::V6 } else { Family::V4 }, link, options, sizes, appetites }
    }
}

prop_compose! {
    fn links()(
        lost in 0u32..250,
        doubled in 0u32..200,
        late in 0u32..300,
        corrupted in 0u32..60,
        delay_us in 1u64..100_000,
        seed in any::<u64>(),
    ) -> Link {
        Link { lost, doubled, late, corrupted, delay_ns: delay_us * 1000, seed }
    }
}

impl Plan {
    /// Makes the exchange, changed by `change`, and checks how it ended.
    pub fn carry_out(self, change: impl FnOnce(Exchange) -> Exchange) {
        let Self { family, link, options, sizes, appetites } = self;
        // With a quarter of everything lost both ways, a SYN or the last segments
        // may be given up: then both sides have to end all the same.
        let may_fail = link.lost > 100;
        // A tiny appetite makes many steps: less to eat then.
        let eaten = |size: usize, appetite: usize| size.min(appetite.saturating_mul(2000));
        let up = Side::new(eaten(sizes.0, appetites.1), appetites.0, 0);
        let down = Side::new(eaten(sizes.1, appetites.0), appetites.1, 0xaa);
        let mut exchange = change(Exchange::new(family, link, options, up, down));
        exchange.run(100_000 * SECOND_NS);
        exchange.check_ended(may_fail);
    }
}

/// How often exchanges are made.
pub fn cases() -> ProptestConfig {
    ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn every_byte_arrives_once_and_in_order_over_any_link(plan in plans()) {
        plan.carry_out(|exchange| exchange);
    }
}
