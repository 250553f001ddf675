//! Admission controller on a virtual clock: a server with a queue, and groups of senders.

use std::net::{IpAddr, Ipv4Addr};

use proptest::prelude::*;
use tidegate_wire::{Medium, Protocol};

use super::*;

const MS: u64 = 1_000_000;
const S: u64 = 1_000 * MS;
const SEED: [u8; 16] = [5; 16];
const QUEUE: u64 = 1024;

fn udp_from(source: u32) -> PacketMeta<'static> {
    PacketMeta {
        kind: PacketKind::Ip(Protocol::UDP),
        source: Some(IpAddr::V4(Ipv4Addr::from_bits(source))),
        destination_port: Some(53),
        packet_bytes: 60,
        payload: &[],
    }
}

fn config(text: &str) -> Config {
    toml::from_str(text).unwrap()
}

fn admission(config: &Config) -> Admission {
    Admission::new(config, SEED).unwrap()
}

/// Group of senders with equal packets.
struct SenderGroup {
    meta: PacketMeta<'static>,
    /// Number of sources, with consecutive addresses from the one in `meta`.
    sources: u32,
    rate_pps: u64,
    sent: u64,
    queued: u64,
    due: u64,
}

impl SenderGroup {
    fn new(source: u32, sources: u32, rate_pps: u64) -> Self {
        Self { meta: udp_from(source), sources, rate_pps, sent: 0, queued: 0, due: 0 }
    }

    fn next(&mut self) -> PacketMeta<'static> {
        let Some(IpAddr::V4(first)) = self.meta.source else { panic!("an IPv4 source") };
        // An odd step visits all residues of a power of two.
        let offset = (self.sent as u32).wrapping_mul(0x9e37_79b1) % self.sources;
        let source = Some(IpAddr::V4(Ipv4Addr::from_bits(first.to_bits() + offset)));
        PacketMeta { source, ..self.meta }
    }
}

/// Server that serves `capacity_pps` from a queue.
struct Server {
    admission: Admission,
    capacity_pps: u64,
    now_ns: u64,
    queue: u64,
    served: u64,
    late_drops: u64,
    due: u64,
    /// Measurements since the last period, for `on_period`.
    period: Pressure,
}

const STEP_NS: u64 = 1_000;

impl Server {
    fn new(config: &Config, capacity_pps: u64) -> Self {
        Self {
            admission: admission(config),
            capacity_pps,
            now_ns: S,
            queue: 0,
            served: 0,
            late_drops: 0,
            due: 0,
            period: Pressure::default(),
        }
    }

    fn run(&mut self, for_ns: u64, groups: &mut [SenderGroup]) {
        for group in &mut *groups {
            (group.sent, group.queued) = (0, 0);
        }
        (self.served, self.late_drops) = (0, 0);
        for _ in 0..for_ns / STEP_NS {
            self.step(groups);
        }
    }

    fn step(&mut self, groups: &mut [SenderGroup]) {
        self.now_ns += STEP_NS;
        // Rotates the groups, so that no group is always first to find space.
        let first = self.now_ns as usize / 1000 % groups.len();
        groups.rotate_left(first);
        for group in &mut *groups {
            group.due += group.rate_pps * STEP_NS;
            while group.due >= S {
                group.due -= S;
                let meta = group.next();
                group.sent += 1;
                group.queued += u64::from(self.arrive(&meta));
            }
        }
        groups.rotate_right(first);
        self.due += self.capacity_pps * STEP_NS;
        while self.due >= S {
            self.due -= S;
            let served = u64::from(self.queue > 0);
            self.queue -= served;
            self.served += served;
            self.period.served += served;
        }
        if self.now_ns % Config::PERIOD_NS < STEP_NS {
            self.period.level_percent = (self.queue * 100 / QUEUE) as u32;
            self.admission.on_period(self.now_ns, &self.period);
            self.period = Pressure::default();
        }
    }

    fn arrive(&mut self, meta: &PacketMeta) -> bool {
        if self.admission.is_limiting() {
            let AdmissionVerdict::Admit { .. } = self.admission.decide(self.now_ns, meta) else {
                return false;
            };
        } else {
            self.admission.learn(meta);
        }
        if self.queue == QUEUE {
            self.late_drops += 1;
            self.period.late_drops += 1;
            return false;
        }
        self.queue += 1;
        true
    }
}

/// Share of a group's packets that were queued.
fn queued_share(group: &SenderGroup) -> f64 {
    group.queued as f64 / group.sent as f64
}

#[test]
fn default_config_is_valid_and_round_trips_as_toml() {
    let config = Config::default();
    let admission = admission(&config);
    let names: Vec<_> = admission.classes().names().collect();
    assert_eq!(names, ["neighbour", "icmp", "known", "unknown"]);
    let text = toml::to_string(&config).unwrap();
    assert_eq!(toml::from_str::<Config>(&text).unwrap(), config);
    let neighbour =
        PacketMeta { kind: PacketKind::Neighbour, destination_port: None, ..udp_from(1) };
    let malformed = PacketMeta { kind: PacketKind::Malformed, source: None, ..neighbour };
    let classes = [neighbour, malformed, udp_from(1)].map(|meta| admission.classify(&meta));
    assert_eq!(classes, [0, 3, 3]);
}

#[test]
fn rejects_invalid_settings_with_the_reason() {
    let class = |name: &str, more: &str| format!("[[class]]\nname = '{name}'\n{more}\n");
    let everything = || class("all", "");
    let cases = [
        (class("", ""), "class 1 has the invalid name \"\""),
        (class(&"x".repeat(32), ""), "use 1 to 31 bytes"),
        (class("a", "match = [{port = 1}]") + &class("a", ""), "two classes have the name `a`"),
        (class("others", "match = [{port = 1}]"), "`others` is reserved"),
        (
            (0..16)
                .map(|n| class(&format!("c{n}"), &format!("match = [{{port = {n}}}]")))
                .collect(),
            "too many classes: 17",
        ),
        (
            class(
                "a",
                &format!(
                    "match = [{}]",
                    (0..32).map(|n| format!("{{port={n}}},")).collect::<String>()
                ),
            ),
            "too many rules: 33",
        ),
        (
            class("a", "guaranteed-pps = 5\nceiling-pps = 4"),
            "guaranteed-pps 5 is above ceiling-pps 4",
        ),
        (class("a", "ceiling-pps = 0"), "ceiling-pps 0 would admit no packet"),
        (class("a", "exempt = true\nrank = 1"), "class `a` is exempt"),
        (everything() + &class("b", ""), "class `b` can never match: `all`"),
        (everything() + &class("b", "match = [{known = true}]"), "put `b` first"),
        (
            class("a", "match = [{source = '10.0.0.0/8'}]")
                + &class("b", "match = [{port = 53, source = '10.1.0.0/16'}]"),
            "class `b` can never match: `a`",
        ),
        (
            class("a", "match = [{port = '50-60'}]")
                + &class("b", "match = [{protocol = 'udp', port = 53}]"),
            "class `b` can never match",
        ),
        (class("a", "match = [{protocol = 'icmp', port = 53}]"), "icmp has no ports"),
        (class("a", "match = [{size = 'none'}]"), "size none is invalid"),
        (class("a", "match = [{port = 70000}]"), "port 70000 is out of range"),
        ("low-mark-percent = 80".into(), "the low mark must be under"),
        ("high-mark-percent = 101".into(), "at most 100"),
        ("calm-after-ms = 0".into(), "calm-after-ms is 0"),
        ("known-sources = 0".into(), "known-sources is 0"),
    ];
    for (text, reason) in cases {
        let error = Admission::new(&config(&text), SEED).unwrap_err().to_string();
        assert!(error.contains(reason), "{text}: {error}");
    }
    // Text that cannot be parsed.
    for (text, reason) in [
        ("colour = 1".to_owned(), "unknown field"),
        (class("a", "match = [{port = '9-1'}]"), "is empty"),
        (class("a", "match = [{protocol = 'dns'}]"), "unknown protocol"),
        (class("a", "match = [{source = '10.0.0.0/33'}]"), "longer than the address"),
        (class("a", "match = [{size = true}]"), "a number, or a range"),
    ] {
        let error = toml::from_str::<Config>(&text).unwrap_err().to_string();
        assert!(error.contains(reason), "{text}: {error}");
    }
}

#[test]
fn accepts_disjoint_classes() {
    let text = "
        [[class]]
        name = 'dns'
        match = [{protocol = 'udp', port = 53}, {protocol = 'tcp', port = 53}]
        [[class]]
        name = 'near'
        match = [{source = '10.0.0.0/8'}, {source = 'fd00::/8'}]
        rank = 1";
    let admission = admission(&config(text));
    let names: Vec<_> = admission.classes().names().collect();
    assert_eq!(names, ["dns", "near", "others"]);
    let near = PacketMeta { destination_port: Some(80), ..udp_from(0x0a01_0203) };
    let far = PacketMeta { destination_port: Some(80), ..udp_from(0x0b01_0203) };
    let classes = [udp_from(1), near, far].map(|meta| admission.classify(&meta));
    assert_eq!(classes, [0, 1, 2]);
}

/// Server with a known peer, and a flood from unknown sources (the scenario of the issue).
fn server_under_flood(unknown: u32) -> (Server, [SenderGroup; 2]) {
    let mut server = Server::new(&Config::default(), 400_000);
    let mut peer = [SenderGroup::new(0x0a00_0001, 1, 5_000)];
    server.run(3 * S, &mut peer);
    assert!(!server.admission.is_limiting());
    assert_eq!(queued_share(&peer[0]), 1.0);
    let [peer] = peer;
    (server, [peer, SenderGroup::new(0x5000_0000, unknown, 1_000_000)])
}

#[test]
fn known_peer_is_served_through_a_flood_at_peak_throughput() {
    for unknown in [1, 50, 1 << 24] {
        let (mut server, mut groups) = server_under_flood(unknown);
        // From the first packet of the flood on.
        server.run(S, &mut groups);
        assert!(queued_share(&groups[0]) >= 0.985, "{unknown}: {}", queued_share(&groups[0]));
        // After the rates have settled.
        server.run(2 * S, &mut groups);
        assert!(server.admission.is_limiting());
        assert!(queued_share(&groups[0]) >= 0.999, "{unknown}: {}", queued_share(&groups[0]));
        assert!(server.served >= 2 * 400_000 * 95 / 100, "{unknown}: {}", server.served);
        // The flood ends: no packet is refused, and soon the limits are lifted.
        groups[1].rate_pps = 10_000;
        server.run(100 * MS, &mut groups);
        server.run(S, &mut groups);
        assert_eq!(queued_share(&groups[1]), 1.0, "{unknown}");
        server.run(S, &mut groups);
        assert!(!server.admission.is_limiting());
    }
}

#[test]
fn known_peers_with_rising_demand_are_not_refused() {
    let mut admission = admission(&Config::default());
    let mut now_ns = S;
    // Packets of unknown sources fill the queue but are not served.
    let mut period = |admission: &mut Admission, asked: u32, unknown: u32| {
        let mut admits =
            |meta| matches!(admission.decide(now_ns, &meta), AdmissionVerdict::Admit { .. });
        let served = (0..asked).filter(|_| admits(udp_from(1))).count() as u64;
        let unserved = (0..unknown).filter(|&n| admits(udp_from(0x5000_0000 + n))).count();
        let level_percent = if unserved > 500 { 100 } else { 0 };
        now_ns += Config::PERIOD_NS;
        admission.on_period(now_ns, &Pressure { served, level_percent, ..Pressure::default() });
        u64::from(asked) - served
    };
    for _ in 0..600 {
        admission.learn(&udp_from(1));
        assert_eq!(period(&mut admission, 50, 0), 0);
    }
    // The peers catch up in bursts. There is capacity for them, and each refused packet would
    // stall a connection.
    for asked in [50, 0, 400, 0, 50, 400] {
        for _ in 0..40 {
            let refused = period(&mut admission, asked, 5000);
            assert_eq!(refused, 0, "of {asked}");
        }
    }
    assert!(admission.is_limiting());
    assert!(admission.counters()[3].refused() > 1_000_000);
}

#[test]
fn known_peers_share_the_capacity_when_demand_exceeds_it() {
    let (mut server, mut groups) = server_under_flood(1 << 24);
    groups[0].rate_pps = 800_000;
    server.run(S, &mut groups);
    server.run(S, &mut groups);
    assert!(server.admission.counters()[2].refused() > 0);
    assert!(server.late_drops < 800_000 / 20, "{}", server.late_drops);
    assert!(server.served >= 400_000 * 95 / 100, "{}", server.served);
}

#[test]
fn known_peer_loses_packets_without_separate_classes() {
    // Drop-tail, for comparison: a single class.
    let text = "[[class]]\nname = 'all'\nguaranteed-pps = 100000000";
    let mut server = Server::new(&config(text), 400_000);
    let mut groups =
        [SenderGroup::new(1, 1, 5_000), SenderGroup::new(0x5000_0000, 1 << 24, 1_000_000)];
    server.run(2 * S, &mut groups);
    assert!(queued_share(&groups[0]) < 0.6, "{}", queued_share(&groups[0]));
}

#[test]
fn sources_of_one_class_share_fairly() {
    let text = "[[class]]\nname = 'all'";
    let mut server = Server::new(&config(text), 100_000);
    let mut groups = [
        SenderGroup::new(0x0a00_0001, 20, 20_000),
        SenderGroup::new(0x5000_0000, 1, 500_000),
        SenderGroup::new(0x6000_0000, 1, 100_000),
    ];
    server.run(2 * S, &mut groups);
    server.run(2 * S, &mut groups);
    // 100,000 for 22 sources, of which 20 send 1,000 each.
    assert!(queued_share(&groups[0]) > 0.95, "quiet sources: {}", queued_share(&groups[0]));
    let loud = groups[1].queued.max(groups[2].queued) as f64;
    let other = groups[1].queued.min(groups[2].queued) as f64;
    assert!(loud / other < 1.2, "loud sources: {loud} and {other}");
}

#[test]
fn unmatched_class_costs_other_classes_nothing() {
    let text = "
        [[class]]
        name = 'nobody'
        match = [{protocol = '132'}]
        guaranteed-pps = 90000
        [[class]]
        name = 'all'
        rank = 1";
    let mut server = Server::new(&config(text), 100_000);
    let mut group = [SenderGroup::new(1, 1 << 20, 300_000)];
    server.run(S, &mut group);
    server.run(S, &mut group);
    assert!(server.served > 90_000, "{}", server.served);
    assert_eq!(server.admission.counters()[0].arrived(), 0);
}

#[test]
fn guarantee_does_not_shut_out_higher_ranks() {
    // Nothing is served at all, so the total is at its minimum, which equals the guarantee of
    // the unknown sources.
    let mut admission = admission(&Config::default());
    admission.confirm(udp_from(1).source_id());
    let stuck = Pressure { late_drops: 1, level_percent: 100, ..Pressure::default() };
    for period in 0..400 {
        let now_ns = period * Config::PERIOD_NS;
        admission.on_period(now_ns, &stuck);
        for stranger in 0..100 {
            admission.decide(now_ns, &udp_from(1000 + stranger));
        }
    }
    let known = admission.decide(400 * Config::PERIOD_NS, &udp_from(1));
    assert!(matches!(known, AdmissionVerdict::Admit { .. }), "{known:?}");
}

#[test]
fn guaranteed_rate_is_available_on_demand() {
    let text = "
        [[class]]
        name = 'dns'
        match = [{port = 53}]
        [[class]]
        name = 'late'
        match = [{port = 54}]
        guaranteed-pps = 10000
        rank = 1";
    let mut server = Server::new(&config(text), 100_000);
    let late = SenderGroup {
        meta: PacketMeta { destination_port: Some(54), ..udp_from(7) },
        ..SenderGroup::new(7, 1, 0)
    };
    let mut groups = [SenderGroup::new(1, 1 << 20, 500_000), late];
    server.run(S, &mut groups);
    groups[1].rate_pps = 9_000;
    server.run(S, &mut groups);
    assert!(queued_share(&groups[1]) > 0.97, "{}", queued_share(&groups[1]));
    assert!(server.served > 90_000, "{}", server.served);
}

#[test]
fn exempt_class_is_unlimited_and_takes_no_share() {
    let text = "
        [[class]]
        name = 'dns'
        match = [{port = 53}]
        [[class]]
        name = 'rest'
        exempt = true";
    let mut server = Server::new(&config(text), 100_000);
    let mut group = [SenderGroup::new(1, 1 << 20, 500_000)];
    server.run(S, &mut group);
    // Five times the capacity, in packets of a class that this server does not serve.
    let rest = PacketMeta { destination_port: Some(22), ..udp_from(7) };
    server.run(0, &mut group);
    for _ in 0..1_000_000 {
        assert_eq!(
            server.admission.decide(server.now_ns, &rest),
            AdmissionVerdict::Admit { class: 1 }
        );
        server.step(&mut group);
    }
    assert!(server.served > 95_000, "{}", server.served);
}

#[test]
fn recovers_after_the_reader_stalls() {
    let (mut server, mut groups) = server_under_flood(1 << 24);
    server.run(S, &mut groups);
    server.capacity_pps = 0;
    server.run(S, &mut groups);
    server.capacity_pps = 400_000;
    server.run(100 * MS, &mut groups);
    server.run(S, &mut groups);
    assert!(queued_share(&groups[0]) > 0.999, "{}", queued_share(&groups[0]));
    assert!(server.served > 400_000 * 9 / 10, "{}", server.served);
}

#[test]
fn follows_a_server_that_slows_down() {
    let (mut server, mut groups) = server_under_flood(1 << 24);
    server.run(S, &mut groups);
    server.capacity_pps = 50_000;
    server.run(200 * MS, &mut groups);
    server.run(S, &mut groups);
    assert!(queued_share(&groups[0]) > 0.999, "{}", queued_share(&groups[0]));
    assert!(server.served > 45_000, "{}", server.served);
}

#[test]
fn tolerates_clock_jumps() {
    for jump_ns in [-3600 * S as i64, 7200 * S as i64, -5 * MS as i64] {
        let (mut server, mut groups) = server_under_flood(1 << 24);
        server.now_ns += 7200 * S;
        server.run(S, &mut groups);
        server.now_ns = server.now_ns.strict_add_signed(jump_ns);
        server.run(S, &mut groups);
        assert!(queued_share(&groups[0]) > 0.99, "{jump_ns}: {}", queued_share(&groups[0]));
        assert!(server.served > 400_000 * 8 / 10, "{jump_ns}: {}", server.served);
        assert!(server.admission.is_limiting());
    }
}

#[test]
fn forward_clock_jump_does_not_expire_known_sources() {
    let (mut server, mut groups) = server_under_flood(1);
    server.now_ns += 100 * 3600 * S;
    server.run(10 * MS, &mut groups[..1]);
    assert!(server.admission.known_sources().contains(udp_from(0x0a00_0001).source_id()));
}

#[test]
fn learns_no_source_during_a_flood() {
    let (mut server, mut groups) = server_under_flood(50);
    server.run(5 * S, &mut groups);
    let stranger = udp_from(0x5000_0003);
    assert!(!server.admission.known_sources().contains(stranger.source_id()));
    server.admission.learn(&stranger);
    assert!(!server.admission.known_sources().contains(stranger.source_id()));
}

#[test]
fn applies_counters_of_a_device_that_drops_early() {
    let mut admission = admission(&Config::default());
    admission.on_period(S, &Pressure::default());
    let full = Pressure { served: 1000, late_drops: 50, level_percent: 100, ..Pressure::default() };
    assert!(admission.on_period(S + 5 * MS, &full));
    let mut totals = [ClassCounters::default(); 4];
    for period in 1..200 {
        totals[2].admitted += 25;
        totals[3].admitted += 900;
        totals[3].refused_rate += 4000;
        admission.on_device_counters(&totals);
        let pressure = Pressure { served: 925, level_percent: 10, ..Pressure::default() };
        admission.on_period(S + (1 + period) * 5 * MS, &pressure);
    }
    assert_eq!(admission.counters(), totals);
    let RateLimit::Shared(rate) = admission.limits().classes[3].class else {
        panic!("not limited")
    };
    let unknown = rate.rate_pps();
    assert!(unknown > 185_000, "queues are short, so the rate rises: {unknown}");
    assert_eq!(
        admission.limits().classes[2].source,
        RateLimit::Unlimited,
        "no known source was refused"
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_bytes_are_classified(
        frame in proptest::collection::vec(any::<u8>(), 0..200),
        ethertype in proptest::sample::select(vec![0x0800_u16, 0x86dd, 0x0806, 0x8100]),
        medium in proptest::sample::select(vec![Medium::Ethernet, Medium::Ip]),
    ) {
        let mut frame = frame;
        if let Some(field) = frame.get_mut(12..14) {
            field.copy_from_slice(&ethertype.to_be_bytes());
        }
        let meta = PacketMeta::parse(medium, &frame);
        prop_assert!(meta.packet_bytes as usize <= frame.len());
        let mut admission = admission(&Config::default());
        admission.learn(&meta);
        let AdmissionVerdict::Admit { class } = admission.decide(0, &meta) else {
            panic!("refused without limits")
        };
        prop_assert!(class < admission.classes().len());
    }

    #[test]
    fn counts_every_packet_and_keeps_limits_consistent(
        events in proptest::collection::vec((any::<u16>(), 0_u64..20_000_000, 0_u32..=120, 0_u64..5000), 1..300),
        jump: u64,
    ) {
        let mut admission = admission(&Config::default());
        let (mut now_ns, mut decided) = (jump >> 1, 0);
        for (n, (source, step_ns, level_percent, served)) in events.into_iter().enumerate() {
            now_ns = if n == 150 { jump } else { now_ns.saturating_add(step_ns) };
            for _ in 0..source % 8 {
                admission.decide(now_ns, &udp_from(source.into()));
                decided += 1;
            }
            let late_drops = u64::from(level_percent > 100);
            admission.on_period(now_ns, &Pressure { served, late_drops, level_percent, ..Pressure::default() });
            let unlimited = *admission.limits() == Limits::UNLIMITED;
            prop_assert!(unlimited || admission.is_limiting());
        }
        let counted: u64 = admission.counters().iter().map(ClassCounters::arrived).sum();
        prop_assert_eq!(counted, decided);
    }
}

#[test]
fn same_seed_gives_same_results() {
    let run = || {
        let (mut server, mut groups) = server_under_flood(1 << 24);
        server.run(S, &mut groups);
        (server.served, server.admission.counters().to_vec(), server.admission.total_pps())
    };
    assert_eq!(run(), run());
}

/// Server behind a ring that drops at no cost, with nothing lost after work was spent.
fn pressure_of_a_full_ring() -> impl Strategy<Value = Pressure> {
    (0_u64..5000, 0_u32..=100, 0_u32..=100, 0_u32..=1000).prop_map(
        |(served, level_percent, backlog_percent, rx_missed_permille)| Pressure {
            served,
            late_drops: 0,
            level_percent,
            backlog_percent,
            rx_missed_permille,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// A refusal implies that somebody else wanted the rest.
    #[test]
    fn one_class_alone_is_never_refused(
        periods in proptest::collection::vec((pressure_of_a_full_ring(), 0_u32..2000), 1..100),
        sources in 1_u32..2000,
    ) {
        let mut admission = admission(&Config::default());
        let mut now_ns = S;
        for (pressure, packets) in periods {
            for packet in 0..packets {
                admission.decide(now_ns, &udp_from(0x5000_0000 + packet % sources));
            }
            now_ns += Config::PERIOD_NS;
            admission.on_period(now_ns, &pressure);
        }
        prop_assert_eq!(admission.counters().iter().map(ClassCounters::refused).sum::<u64>(), 0);
    }

    /// A packet is refused only if the total was used up: in some time until now as many packets
    /// were admitted as the total allows.
    #[test]
    fn refusal_implies_that_the_total_is_used(
        rates in proptest::array::uniform3(1_u64..400_000),
        share_pps in 1_u64..200_000,
        arrivals in proptest::collection::vec((0_u64..20_000, 0_usize..3, 0_u32..4), 1..2000),
    ) {
        let (total_pps, first_pps) = (rates[0] + 1000, rates[1].min(rates[0]));
        let total = PacketRate::from_pps(total_pps);
        let limit = |class| ClassLimit {
            class,
            source: RateLimit::Limited(PacketRate::from_pps(share_pps)),
        };
        let mut limits = Limits { total: Some(total), ..Limits::UNLIMITED };
        limits.classes[0] = limit(RateLimit::Shared(PacketRate::from_pps(first_pps)));
        limits.classes[1] = limit(RateLimit::Shared(PacketRate::from_pps(rates[2])));
        limits.classes[2] = limit(RateLimit::Closed);
        let mut limiter = Limiter::new(SourceKey::new(SEED));
        let (mut now_ns, mut admitted): (u64, Vec<u64>) = (S, Vec::new());
        for (step_ns, class, source) in arrivals {
            now_ns += step_ns;
            let source = udp_from(source).source_id();
            if let LimitDecision::Admit { .. } = limiter.decide(now_ns, &limits, class, source) {
                admitted.push(now_ns);
                continue;
            }
            let is_used = admitted.iter().rev().enumerate().any(|(count, since_ns)| {
                let allowed_ns = now_ns - since_ns + total.burst_ns / 2;
                (count as u64 + 1) * total.interval_ns > allowed_ns
            });
            prop_assert!(is_used, "refused at {} after {} packets", now_ns - S, admitted.len());
        }
    }
}

#[test]
fn lone_source_gets_what_the_server_can_do() {
    for sources in [1, 2, 10, 1000] {
        for times in [1, 2, 5, 10] {
            let mut server = Server::new(&Config::default(), 50_000);
            let mut group = [SenderGroup::new(0x5000_0000, sources, 50_000 * times)];
            server.run(S, &mut group);
            server.run(S, &mut group);
            let served = server.served;
            assert!(served >= 50_000 * 95 / 100, "{sources} sources, {times} times: {served}");
        }
    }
}

/// A source that its class refuses has used nothing of its share.
#[test]
fn refused_packet_costs_its_source_nothing() {
    let rate = |burst_packets| PacketRate { interval_ns: S, burst_ns: burst_packets * S };
    let mut limits = Limits::UNLIMITED;
    limits.classes[0] =
        ClassLimit { class: RateLimit::Limited(rate(1)), source: RateLimit::Limited(rate(2)) };
    let mut limiter = Limiter::new(SourceKey::new(SEED));
    let [loud, quiet] = [1, 2].map(|source| udp_from(source).source_id());
    let mut decide = |now_ns, source| limiter.decide(now_ns, &limits, 0, source);
    let admitted = LimitDecision::Admit { over_share: false };
    assert_eq!(decide(S, loud), admitted);
    assert_eq!(decide(S, loud), admitted);
    for _ in 0..100 {
        assert_eq!(decide(S, quiet), LimitDecision::Refuse(RefusalReason::ClassRate));
    }
    // Two seconds later the class has room for three packets, and the quiet source for its own.
    for _ in 0..2 {
        assert_eq!(decide(3 * S, quiet), admitted);
    }
}
