//! Two stacks on a link that loses, duplicates, delays, reorders and corrupts frames:
//! every byte arrives once and in order, and every connection ends.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use proptest::prelude::*;
use tidegate_stack::{
    Config, CongestionControl, Keepalive, Shutdown, SocketSelection, TcpError, TcpId,
    TcpListenerId, TcpOptions, TcpState,
};

use crate::kit::{Family, SECOND_NS, TestHost, config, for_each_family, mac};
use crate::migration::{migrate_sockets, new_id};
use crate::upgrade::upgrade;

const MS: u64 = 1_000_000;
const PORT: u16 = 80;

/// Faults of a link, each in cases per thousand, and its one-way delay.
#[derive(Clone, Copy, Debug, Default)]
pub struct Link {
    pub lost: u32,
    pub duplicated: u32,
    pub delayed: u32,
    pub corrupted: u32,
    pub delay_ns: u64,
    pub seed: u64,
    /// Rate of each direction in bytes per millisecond; 0 for no limit.
    pub bytes_per_ms: u64,
    /// Bytes that may wait for their turn in each direction, if the rate is limited.
    pub queue_bytes: u64,
}

/// Link state: the frames in flight and the generator that decides their faults.
struct Wire {
    link: Link,
    state: u64,
    /// Frames by arrival time and a unique number; the flag is true for frames to `b`.
    in_flight: BTreeMap<(u64, u64), (bool, Vec<u8>)>,
    count: u64,
    /// Time at which each direction has sent what waits there.
    free_at_ns: [u64; 2],
    /// Frames for which the queue had no space.
    overflows: u64,
}

impl Wire {
    fn new(link: Link) -> Self {
        let in_flight = BTreeMap::new();
        Self { link, state: link.seed | 1, in_flight, count: 0, free_at_ns: [0; 2], overflows: 0 }
    }

    /// Time at which a frame of `bytes` bytes has left through the bottleneck; `None` when the
    /// queue has no space for the frame.
    fn depart(&mut self, now_ns: u64, to_b: bool, bytes: usize) -> Option<u64> {
        let Link { bytes_per_ms, queue_bytes, .. } = self.link;
        if bytes_per_ms == 0 {
            return Some(now_ns);
        }
        let free_at_ns = &mut self.free_at_ns[usize::from(to_b)];
        let waiting_bytes = free_at_ns.saturating_sub(now_ns) * bytes_per_ms / MS;
        if waiting_bytes + bytes as u64 > queue_bytes {
            self.overflows += 1;
            return None;
        }
        *free_at_ns = now_ns.max(*free_at_ns) + bytes as u64 * MS / bytes_per_ms;
        Some(*free_at_ns)
    }

    /// Draws an event of probability `thousandths` / 1000 (xorshift).
    fn happens(&mut self, thousandths: u32) -> bool {
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        (self.state >> 20) % 1000 < u64::from(thousandths)
    }

    fn send(&mut self, now_ns: u64, to_b: bool, mut bytes: Vec<u8>) {
        if self.happens(self.link.lost) {
            return;
        }
        let Some(now_ns) = self.depart(now_ns, to_b, bytes.len()) else { return };
        if self.happens(self.link.corrupted) {
            let at = self.state as usize % bytes.len();
            bytes[at] ^= 1 << (self.state % 8);
        }
        let copies = 1 + usize::from(self.happens(self.link.duplicated));
        for _ in 0..copies {
            let delayed = self.happens(self.link.delayed);
            let extra = if delayed { self.link.delay_ns * (1 + self.state % 5) } else { 0 };
            self.count += 1;
            let at = (now_ns + self.link.delay_ns + extra, self.count);
            self.in_flight.insert(at, (to_b, bytes.clone()));
        }
    }
}

/// One side of an exchange: the application and its connection.
pub struct Endpoint {
    id: Option<TcpId>,
    to_send: usize,
    sent: usize,
    received: Vec<u8>,
    write_closed: bool,
    received_eof: bool,
    failure: Option<TcpError>,
    /// The connection after its handle was closed.
    closed: Option<TcpId>,
    /// Maximum bytes read by one call.
    max_read_bytes: usize,
    salt: u8,
}

impl Endpoint {
    pub fn new(to_send: usize, max_read_bytes: usize, salt: u8) -> Self {
        Self {
            id: None,
            to_send,
            sent: 0,
            received: Vec::new(),
            write_closed: false,
            received_eof: false,
            failure: None,
            closed: None,
            max_read_bytes,
            salt,
        }
    }

    fn byte(&self, at: usize) -> u8 {
        (at % 249) as u8 ^ self.salt
    }

    /// Acts as an application: writes, reads, shuts down writing after the last byte, and
    /// closes once both directions have ended.
    fn run_application(&mut self, host: &mut TestHost) {
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
        let mut buf = vec![0; self.max_read_bytes];
        while !self.received_eof && self.failure.is_none() {
            match host.stack.tcp_recv(now_ns, &mut host.arena, id, &mut buf) {
                Ok(0) => self.received_eof = true,
                Ok(len) => self.received.extend(&buf[..len]),
                Err(TcpError::WouldBlock | TcpError::NotConnected) => break,
                Err(error) => self.failure = Some(error),
            }
            if self.max_read_bytes < 1000 {
                break;
            }
        }
        let established = host.stack.tcp_state(id) != Some(TcpState::SynSent);
        if self.sent == self.to_send && !self.write_closed && established && self.failure.is_none()
        {
            match host.stack.tcp_shutdown(now_ns, &mut host.arena, id, Shutdown::Write) {
                Ok(()) => self.write_closed = true,
                Err(TcpError::NotConnected) => {}
                Err(error) => self.failure = Some(error),
            }
        }
        if self.write_closed && self.received_eof || self.failure.is_some() {
            host.stack.tcp_close(now_ns, &mut host.arena, id);
            self.closed = self.id.take();
        }
    }

    fn is_done(&self) -> bool {
        self.write_closed && self.received_eof || self.failure.is_some()
    }
}

pub struct Exchange {
    a: TestHost,
    b: TestHost,
    wire: Wire,
    listener: TcpListenerId,
    client: Endpoint,
    server: Endpoint,
    /// Probability per step that a side is upgraded, in thousandths.
    upgrade_permille: u32,
    /// Probability per step that the sockets of a side migrate to its other stack, in
    /// thousandths.
    migration_permille: u32,
    other_stacks: [TestHost; 2],
}

fn config_of(n: u8) -> Config {
    let mut config = config(n);
    config.limits.tcp_time_wait_ns = 2 * SECOND_NS;
    config
}

fn host(n: u8, other: u8, memory_bytes: Option<usize>) -> TestHost {
    let mut config = config_of(n);
    if let Some(bytes) = memory_bytes {
        config.limits.tcp_buffer_bytes = bytes;
    }
    let mut host = TestHost::quiet(config);
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
    pub fn new(
        family: Family,
        link: Link,
        options: TcpOptions,
        up: Endpoint,
        down: Endpoint,
    ) -> Self {
        Self::on_hosts([host(1, 2, None), host(2, 1, None)], family, link, options, up, down)
    }

    /// [`Exchange::new`] between hosts with `memory_bytes` of TCP memory each.
    pub fn with_memory(
        family: Family,
        link: Link,
        options: TcpOptions,
        up: Endpoint,
        down: Endpoint,
        memory_bytes: usize,
    ) -> Self {
        let hosts = [host(1, 2, Some(memory_bytes)), host(2, 1, Some(memory_bytes))];
        Self::on_hosts(hosts, family, link, options, up, down)
    }

    fn on_hosts(
        [mut a, mut b]: [TestHost; 2],
        family: Family,
        link: Link,
        options: TcpOptions,
        up: Endpoint,
        down: Endpoint,
    ) -> Self {
        let to = SocketAddr::new(family.host(2), PORT);
        let any = SocketAddr::new(family.unspecified(), PORT);
        let listener = b.stack.tcp_listen(any, 4, options).unwrap();
        let id = a.stack.tcp_connect(a.now_ns, &mut a.arena, None, to, options).unwrap();
        let client = Endpoint { id: Some(id), ..up };
        let mut other_stacks = [host(1, 2, None), host(2, 1, None)];
        for (host, other) in [&a, &b].into_iter().zip(&mut other_stacks) {
            other.stack.set_tcp_secrets(host.stack.tcp_secrets());
        }
        Self {
            a,
            b,
            wire: Wire::new(link),
            listener,
            client,
            server: down,
            upgrade_permille: 0,
            migration_permille: 0,
            other_stacks,
        }
    }

    /// Migrates the sockets of a side between its two stacks, with `moves` / 1000 probability
    /// per step.
    pub fn with_moves(self, migration_permille: u32) -> Self {
        Self { migration_permille, ..self }
    }

    fn migrate_some(&mut self) {
        if self.migration_permille == 0 {
            return;
        }
        let sides = [(&mut self.a, &mut self.client), (&mut self.b, &mut self.server)];
        for (at, (host, side)) in sides.into_iter().enumerate() {
            if !self.wire.happens(self.migration_permille) {
                continue;
            }
            let connections = side.id.into_iter().chain(side.closed).collect();
            let listeners = if at == 1 { vec![self.listener] } else { Vec::new() };
            let sockets = SocketSelection { listeners, connections, ..SocketSelection::default() };
            let moved = migrate_sockets(host, &mut self.other_stacks[at], &sockets);
            std::mem::swap(host, &mut self.other_stacks[at]);
            side.id = side.id.map(|old| {
                new_id(&moved.connections, old).expect("a connection with an open handle migrates")
            });
            side.closed = side.closed.and_then(|old| new_id(&moved.connections, old));
            if at == 1 {
                // A closed listener does not migrate.
                self.listener = new_id(&moved.listeners, self.listener).unwrap_or(self.listener);
            }
        }
    }

    /// Saves a side and restores it into a fresh arena, with `upgrades` / 1000 probability
    /// per step.
    pub fn with_upgrades(self, upgrade_permille: u32) -> Self {
        Self { upgrade_permille, ..self }
    }

    fn apply_changes(&mut self) {
        self.upgrade_some();
        self.migrate_some();
    }

    fn upgrade_some(&mut self) {
        if self.upgrade_permille == 0 {
            return;
        }
        for (n, host) in [(1, &mut self.a), (2, &mut self.b)] {
            if self.wire.happens(self.upgrade_permille) {
                upgrade(host, config_of(n));
            }
        }
    }

    /// Runs until both applications are done. Returns the elapsed time in nanoseconds.
    pub fn run(&mut self, limit_ns: u64) -> u64 {
        self.run_until(limit_ns, |exchange| exchange.client.is_done() && exchange.server.is_done())
    }

    /// True once the server has received `bytes` bytes.
    pub fn server_has(&self, bytes: usize) -> bool {
        self.server.received.len() >= bytes
    }

    /// Frames that the queues of the link had no space for.
    pub fn overflows(&self) -> u64 {
        self.wire.overflows
    }

    /// Window that the server offers, in bytes.
    pub fn server_window(&self) -> u32 {
        let info = self.server.id.and_then(|id| self.b.stack.tcp_info(id));
        info.map_or(0, |info| info.receive_window_bytes)
    }

    /// Runs until `done` returns true. Returns the elapsed time in nanoseconds.
    pub fn run_until(&mut self, limit_ns: u64, done: impl Fn(&Self) -> bool) -> u64 {
        let start_ns = self.a.now_ns;
        for _ in 0..2_000_000 {
            self.collect();
            self.apply_changes();
            self.run_applications();
            self.collect();
            self.apply_changes();
            if done(self) {
                return self.a.now_ns - start_ns;
            }
            let flying = self.wire.in_flight.keys().next().map(|key| key.0);
            let timers = [self.a.stack.next_timeout(), self.b.stack.next_timeout()];
            let unread = self.has_unread_data().then_some(self.a.now_ns + MS);
            let times = timers.into_iter().flatten().chain(flying).chain(unread);
            let Some(next_ns) = times.min() else {
                // No SYN got through: the server never learned of its client.
                if self.client.failure.is_some() && self.server.id.is_none() {
                    return self.a.now_ns - start_ns;
                }
                panic!("no timer and no frame in flight: {:?} {:?}", self.info(), self.progress());
            };
            assert!(
                next_ns < start_ns + limit_ns,
                "the exchange exceeds its time limit: {:?} {:?}",
                self.info(),
                self.progress()
            );
            self.advance(next_ns);
        }
        panic!("the exchange does not end: {:?} {:?}", self.info(), self.progress());
    }

    /// True while an application has unread data. End of stream stays readable, so a side
    /// that has received it counts as having none.
    fn has_unread_data(&self) -> bool {
        let has_unread = |host: &TestHost, side: &Endpoint| {
            !side.received_eof && side.id.is_some_and(|id| host.stack.tcp_readiness(id).readable)
        };
        has_unread(&self.a, &self.client) || has_unread(&self.b, &self.server)
    }

    fn info(&self) -> impl std::fmt::Debug + use<> {
        let of = |host: &TestHost, side: &Endpoint| side.id.and_then(|id| host.stack.tcp_info(id));
        (of(&self.a, &self.client), of(&self.b, &self.server))
    }

    fn progress(&self) -> impl std::fmt::Debug + use<> {
        let of = |side: &Endpoint| {
            (side.sent, side.received.len(), side.write_closed, side.received_eof, side.failure)
        };
        (of(&self.client), of(&self.server))
    }

    fn advance(&mut self, now_ns: u64) {
        for host in [&mut self.a, &mut self.b] {
            host.now_ns = host.now_ns.max(now_ns);
            host.stack.handle_timeout(host.now_ns, &mut host.arena);
        }
        while let Some(entry) = self.wire.in_flight.first_entry() {
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
            self.wire.send(now_ns, true, bytes);
        }
        for bytes in self.b.sent() {
            self.wire.send(now_ns, false, bytes);
        }
    }

    fn run_applications(&mut self) {
        if self.server.id.is_none()
            && !self.server.is_done()
            && let Ok(id) = self.b.stack.tcp_accept(self.listener)
        {
            self.server.id = Some(id);
        }
        self.client.run_application(&mut self.a);
        self.server.run_application(&mut self.b);
    }

    /// Asserts that all data arrived intact and that nothing is left behind.
    pub fn check(self) {
        assert_eq!((self.client.failure, self.server.failure), (None, None));
        for (from, to) in [(&self.client, &self.server), (&self.server, &self.client)] {
            assert_eq!(to.received.len(), from.to_send);
            let wrong = to.received.iter().enumerate().find(|&(at, &byte)| byte != from.byte(at));
            assert_eq!(wrong, None);
        }
        self.close_all();
    }

    /// Runs until every connection has ended, and finishes the stacks.
    fn close_all(mut self) {
        let now_ns = self.b.now_ns;
        self.b.stack.tcp_close_listener(now_ns, &mut self.b.arena, self.listener);
        let limit_ns = self.a.now_ns + 3000 * SECOND_NS;
        while self.a.stack.tcp_connections() + self.b.stack.tcp_connections() > 0 {
            self.collect();
            self.apply_changes();
            self.collect();
            let flying = self.wire.in_flight.keys().next().map(|key| key.0);
            let timers = [self.a.stack.next_timeout(), self.b.stack.next_timeout()];
            let next_ns = timers
                .into_iter()
                .flatten()
                .chain(flying)
                .min()
                .expect("a timer or a frame in flight");
            assert!(next_ns < limit_ns, "connections are still open at the time limit");
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

    /// Asserts that both sides have ended; a failure is accepted with `may_fail`.
    pub fn check_ended(self, may_fail: bool) {
        let failed = self.client.failure.is_some() || self.server.failure.is_some();
        if !failed {
            return self.check();
        }
        assert!(may_fail, "{:?}", self.progress());
        self.close_all();
    }
}

#[test]
fn exchanges_data_over_lossless_link() {
    for_each_family(|family| {
        let link = Link { delay_ns: 5 * MS, ..Link::default() };
        let (up, down) = (Endpoint::new(300_000, 8000, 0), Endpoint::new(200_000, 8000, 0x55));
        let mut exchange = Exchange::new(family, link, TcpOptions::default(), up, down);
        let took_ns = exchange.run(60 * SECOND_NS);
        // Six round trips of slow start from ten segments, and two for the handshake.
        assert!(took_ns < 150 * MS, "{} ms", took_ns / MS);
        exchange.check();
    });
}

#[test]
fn exchanges_one_byte_or_none() {
    for_each_family(|family| {
        for (up, down) in [(1, 0), (0, 1), (0, 0)] {
            let link = Link { delay_ns: MS, ..Link::default() };
            let (up, down) = (Endpoint::new(up, 8000, 0), Endpoint::new(down, 8000, 1));
            let mut exchange = Exchange::new(family, link, TcpOptions::default(), up, down);
            exchange.run(60 * SECOND_NS);
            exchange.check();
        }
    });
}

/// Parameters of one exchange: family, link, options and sizes.
#[derive(Clone, Debug)]
pub struct Plan {
    family: Family,
    link: Link,
    options: TcpOptions,
    /// Bytes sent each way.
    sizes: (usize, usize),
    read_sizes: (usize, usize),
}

prop_compose! {
    /// Any plan.
    pub fn plans()(
        v6 in any::<bool>(),
        link in links(),
        sizes in (0usize..150_000, 0usize..150_000),
        buffers in (2048u32..200_000, 2048u32..200_000),
        read_sizes in (1usize..20_000, 100usize..20_000),
        newreno in any::<bool>(),
        no_delay in any::<bool>(),
        ecn in any::<bool>(),
    ) -> Plan {
        let congestion_control = match newreno {
            true => CongestionControl::NewReno,
            false => CongestionControl::Cubic,
        };
        // The reset of a peer that has given up may be lost.
        let keepalive = Keepalive::default().idle_ms(60_000).interval_ms(10_000).probes(20);
        let options = TcpOptions::default()
            .send_buffer_bytes(buffers.0)
            .receive_buffer_bytes(buffers.1)
            .no_delay(no_delay)
            .ecn(ecn)
            .keepalive(keepalive)
            .congestion_control(congestion_control);
        Plan { family: if v6 { Family::V6 } else { Family::V4 }, link, options, sizes, read_sizes }
    }
}

prop_compose! {
    fn links()(
        lost in 0u32..250,
        duplicated in 0u32..200,
        delayed in 0u32..300,
        corrupted in 0u32..60,
        delay_us in 1u64..100_000,
        seed in any::<u64>(),
    ) -> Link {
        let delay_ns = delay_us * 1000;
        Link { lost, duplicated, delayed, corrupted, delay_ns, seed, ..Link::default() }
    }
}

impl Plan {
    /// Runs the exchange as altered by `change`, and checks how it ended.
    pub fn carry_out(self, change: impl FnOnce(Exchange) -> Exchange) {
        let Self { family, link, options, sizes, read_sizes } = self;
        // With a quarter of all frames lost each way, the SYN or the last segments may be
        // given up. Both sides still have to end.
        let may_fail = link.lost > 100;
        // Small reads make many steps, so such an exchange transfers less.
        let limited =
            |size: usize, max_read_bytes: usize| size.min(max_read_bytes.saturating_mul(2000));
        let up = Endpoint::new(limited(sizes.0, read_sizes.1), read_sizes.0, 0);
        let down = Endpoint::new(limited(sizes.1, read_sizes.0), read_sizes.1, 0xaa);
        let mut exchange = change(Exchange::new(family, link, options, up, down));
        exchange.run(100_000 * SECOND_NS);
        exchange.check_ended(may_fail);
    }
}

/// Proptest configuration of the exchange tests: 96 cases each.
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
