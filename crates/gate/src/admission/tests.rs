//! Admission as a whole, on a virtual clock: a server with a queue, and crowds
//! that send to it.

use std::net::{IpAddr, Ipv4Addr};

use proptest::prelude::*;
use tidegate_wire::{Medium, Protocol};

use super::*;

const MS: u64 = 1_000_000;
const S: u64 = 1_000 * MS;
const SEED: [u8; 16] = [5; 16];
const QUEUE: u64 = 1024;

fn udp_from(source: u32) -> Facts {
    Facts {
        kind: Kind::Ip(Protocol::UDP),
        source: Some(IpAddr::V4(Ipv4Addr::from_bits(source))),
        port: Some(53),
        packet_bytes: 60,
    }
}

fn config(text: &str) -> Config {
    toml::from_str(text).unwrap()
}

fn admission(config: &Config) -> Admission {
    Admission::new(config, SEED).unwrap()
}

/// Senders of one kind.
struct Crowd {
    facts: Facts,
    /// Sources follow each other from the one in `facts`.
    sources: u32,
    rate_pps: u64,
    sent: u64,
    queued: u64,
    due: u64,
}

impl Crowd {
    fn new(source: u32, sources: u32, rate_pps: u64) -> Self {
        Self { facts: udp_from(source), sources, rate_pps, sent: 0, queued: 0, due: 0 }
    }

    fn next(&mut self) -> Facts {
        let Some(IpAddr::V4(first)) = self.facts.source else { panic!("an IPv4 crowd") };
        // A step that is odd goes through all of a power of two.
        let turn = (self.sent as u32).wrapping_mul(0x9e37_79b1) % self.sources;
        let source = Some(IpAddr::V4(Ipv4Addr::from_bits(first.to_bits() + turn)));
        Facts { source, ..self.facts }
    }
}

/// A server that takes `capacity_pps` from a queue.
struct Server {
    admission: Admission,
    capacity_pps: u64,
    now_ns: u64,
    queue: u64,
    served: u64,
    lost_late: u64,
    due: u64,
    /// What was served since the last period, for `on_period`.
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
            lost_late: 0,
            due: 0,
            period: Pressure::default(),
        }
    }

    fn run(&mut self, for_ns: u64, crowds: &mut [Crowd]) {
        for crowd in &mut *crowds {
            (crowd.sent, crowd.queued) = (0, 0);
        }
        (self.served, self.lost_late) = (0, 0);
        for _ in 0..for_ns / STEP_NS {
            self.step(crowds);
        }
    }

    fn step(&mut self, crowds: &mut [Crowd]) {
        self.now_ns += STEP_NS;
        // Nobody is always the first to find room.
        let first = self.now_ns as usize / 1000 % crowds.len();
        crowds.rotate_left(first);
        for crowd in &mut *crowds {
            crowd.due += crowd.rate_pps * STEP_NS;
            while crowd.due >= S {
                crowd.due -= S;
                let facts = crowd.next();
                crowd.sent += 1;
                crowd.queued += u64::from(self.arrive(&facts));
            }
        }
        crowds.rotate_right(first);
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

    fn arrive(&mut self, facts: &Facts) -> bool {
        if self.admission.is_limiting() {
            let Verdict::Admit { .. } = self.admission.decide(self.now_ns, facts) else {
                return false;
            };
        } else {
            self.admission.learn(facts);
        }
        if self.queue == QUEUE {
            self.lost_late += 1;
            self.period.lost_late += 1;
            return false;
        }
        self.queue += 1;
        true
    }
}

/// The part of its packets that a crowd got into the queue.
fn kept(crowd: &Crowd) -> f64 {
    crowd.queued as f64 / crowd.sent as f64
}

#[test]
fn the_default_policy_is_valid_and_reads_what_it_writes() {
    let config = Config::default();
    let admission = admission(&config);
    let names: Vec<_> = admission.classes().names().collect();
    assert_eq!(names, ["neighbour", "icmp", "known", "strangers"]);
    let text = toml::to_string(&config).unwrap();
    assert_eq!(toml::from_str::<Config>(&text).unwrap(), config);
    let neighbour = Facts { kind: Kind::Neighbour, port: None, ..udp_from(1) };
    let malformed = Facts { kind: Kind::Malformed, source: None, ..neighbour };
    let classes = [neighbour, malformed, udp_from(1)].map(|facts| admission.classify(&facts));
    assert_eq!(classes, [0, 3, 3]);
}

#[test]
fn wrong_settings_are_refused_with_the_reason() {
    let class = |name: &str, more: &str| format!("[[class]]\nname = '{name}'\n{more}\n");
    let everything = || class("all", "");
    let cases = [
        (class("", ""), "class 1 has the name \"\""),
        (class(&"x".repeat(32), ""), "give it one of 1 to 31 bytes"),
        (class("a", "match = [{port = 1}]") + &class("a", ""), "two classes are called `a`"),
        (class("others", "match = [{port = 1}]"), "`others` is the class of"),
        (
            (0..16)
                .map(|n| class(&format!("c{n}"), &format!("match = [{{port = {n}}}]")))
                .collect(),
            "17 classes are too many",
        ),
        (
            class(
                "a",
                &format!(
                    "match = [{}]",
                    (0..32).map(|n| format!("{{port={n}}},")).collect::<String>()
                ),
            ),
            "33 rules are too many",
        ),
        (
            class("a", "guaranteed-pps = 5\nceiling-pps = 4"),
            "guaranteed-pps 5 is above ceiling-pps 4",
        ),
        (class("a", "ceiling-pps = 0"), "ceiling-pps 0 would never"),
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
        (class("a", "match = [{size = 'none'}]"), "size none is no size"),
        (class("a", "match = [{port = 70000}]"), "there is no port 70000"),
        ("low-mark-percent = 80".into(), "the low mark must be under"),
        ("high-mark-percent = 101".into(), "at most 100"),
        ("calm-after-ms = 0".into(), "calm-after-ms is 0"),
        ("known-sources = 0".into(), "known-sources is 0"),
    ];
    for (text, reason) in cases {
        let error = Admission::new(&config(&text), SEED).unwrap_err().to_string();
        assert!(error.contains(reason), "{text}: {error}");
    }
    // What cannot even be read.
    for (text, reason) in [
        ("colour = 1".to_owned(), "unknown field"),
        (class("a", "match = [{port = '9-1'}]"), "is empty"),
        (class("a", "match = [{protocol = 'dns'}]"), "is no protocol"),
        (class("a", "match = [{source = '10.0.0.0/33'}]"), "longer than the address"),
        (class("a", "match = [{size = true}]"), "a number, or a range"),
    ] {
        let error = toml::from_str::<Config>(&text).unwrap_err().to_string();
        assert!(error.contains(reason), "{text}: {error}");
    }
}

#[test]
fn classes_that_only_touch_are_fine() {
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
    let near = Facts { port: Some(80), ..udp_from(0x0a01_0203) };
    let far = Facts { port: Some(80), ..udp_from(0x0b01_0203) };
    let classes = [udp_from(1), near, far].map(|facts| admission.classify(&facts));
    assert_eq!(classes, [0, 1, 2]);
}

/// The scene of the issue: a known peer, and a flood of strangers.
fn flooded(strangers: u32) -> (Server, [Crowd; 2]) {
    let mut server = Server::new(&Config::default(), 400_000);
    let mut peer = [Crowd::new(0x0a00_0001, 1, 5_000)];
    server.run(3 * S, &mut peer);
    assert!(!server.admission.is_limiting());
    assert_eq!(kept(&peer[0]), 1.0);
    let [peer] = peer;
    (server, [peer, Crowd::new(0x5000_0000, strangers, 1_000_000)])
}

#[test]
fn a_known_peer_is_answered_through_a_flood_and_the_peak_is_kept() {
    for strangers in [1, 50, 1 << 24] {
        let (mut server, mut crowds) = flooded(strangers);
        // From the first packet of the flood on.
        server.run(S, &mut crowds);
        assert!(kept(&crowds[0]) >= 0.985, "{strangers}: {}", kept(&crowds[0]));
        // And when it has settled.
        server.run(2 * S, &mut crowds);
        assert!(server.admission.is_limiting());
        assert!(kept(&crowds[0]) >= 0.999, "{strangers}: {}", kept(&crowds[0]));
        assert!(server.served >= 2 * 400_000 * 95 / 100, "{strangers}: {}", server.served);
        // It ends: nothing is refused any more, and soon all is open.
        crowds[1].rate_pps = 10_000;
        server.run(100 * MS, &mut crowds);
        server.run(S, &mut crowds);
        assert_eq!(kept(&crowds[1]), 1.0, "{strangers}");
        server.run(S, &mut crowds);
        assert!(!server.admission.is_limiting());
    }
}

#[test]
fn known_peers_that_ask_for_more_than_ever_are_not_held_to_what_they_had() {
    let mut admission = admission(&Config::default());
    let mut now_ns = S;
    // Strangers who ask nobody are not served, only in the way.
    let mut period = |admission: &mut Admission, asked: u32, strangers: u32| {
        let mut let_in = |facts| matches!(admission.decide(now_ns, &facts), Verdict::Admit { .. });
        let served = (0..asked).filter(|_| let_in(udp_from(1))).count() as u64;
        let in_the_way = (0..strangers).filter(|&n| let_in(udp_from(0x5000_0000 + n))).count();
        let level_percent = if in_the_way > 500 { 100 } else { 0 };
        now_ns += Config::PERIOD_NS;
        admission.on_period(now_ns, &Pressure { served, level_percent, ..Pressure::default() });
        u64::from(asked) - served
    };
    for _ in 0..600 {
        admission.learn(&udp_from(1));
        assert_eq!(period(&mut admission, 50, 0), 0);
    }
    // They make up for lost time, all at once: there is room for it, and each
    // packet that was refused would be a connection that waits.
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
fn known_peers_that_ask_for_too_much_share_what_there_is() {
    let (mut server, mut crowds) = flooded(1 << 24);
    crowds[0].rate_pps = 800_000;
    server.run(S, &mut crowds);
    server.run(S, &mut crowds);
    assert!(server.admission.counters()[2].refused() > 0);
    assert!(server.lost_late < 800_000 / 20, "{}", server.lost_late);
    assert!(server.served >= 400_000 * 95 / 100, "{}", server.served);
}

#[test]
fn without_admission_the_same_peer_is_lost() {
    // Drop-tail, for comparison: one class.
    let text = "[[class]]\nname = 'all'\nguaranteed-pps = 100000000";
    let mut server = Server::new(&config(text), 400_000);
    let mut crowds = [Crowd::new(1, 1, 5_000), Crowd::new(0x5000_0000, 1 << 24, 1_000_000)];
    server.run(2 * S, &mut crowds);
    assert!(kept(&crowds[0]) < 0.6, "{}", kept(&crowds[0]));
}

#[test]
fn sources_of_one_class_share_fairly() {
    let text = "[[class]]\nname = 'all'";
    let mut server = Server::new(&config(text), 100_000);
    let mut crowds = [
        Crowd::new(0x0a00_0001, 20, 20_000),
        Crowd::new(0x5000_0000, 1, 500_000),
        Crowd::new(0x6000_0000, 1, 100_000),
    ];
    server.run(2 * S, &mut crowds);
    server.run(2 * S, &mut crowds);
    // 100,000 for 22 sources, of which 20 ask for 1,000 each.
    assert!(kept(&crowds[0]) > 0.95, "the quiet: {}", kept(&crowds[0]));
    let loud = crowds[1].queued.max(crowds[2].queued) as f64;
    let other = crowds[1].queued.min(crowds[2].queued) as f64;
    assert!(loud / other < 1.2, "the loud: {loud} and {other}");
}

#[test]
fn a_class_that_nobody_matches_costs_the_others_nothing() {
    let text = "
        [[class]]
        name = 'nobody'
        match = [{protocol = '132'}]
        guaranteed-pps = 90000
        [[class]]
        name = 'all'
        rank = 1";
    let mut server = Server::new(&config(text), 100_000);
    let mut crowd = [Crowd::new(1, 1 << 20, 300_000)];
    server.run(S, &mut crowd);
    server.run(S, &mut crowd);
    assert!(server.served > 90_000, "{}", server.served);
    assert_eq!(server.admission.counters()[0].arrived(), 0);
}

#[test]
fn a_guarantee_does_not_shut_out_those_who_go_first() {
    // Nothing is served at all, so the total is as small as it gets, and the
    // strangers' guarantee as large as that.
    let mut admission = admission(&Config::default());
    admission.confirm(udp_from(1).source_id());
    let stuck = Pressure { lost_late: 1, level_percent: 100, ..Pressure::default() };
    for period in 0..400 {
        let now_ns = period * Config::PERIOD_NS;
        admission.on_period(now_ns, &stuck);
        for stranger in 0..100 {
            admission.decide(now_ns, &udp_from(1000 + stranger));
        }
    }
    let known = admission.decide(400 * Config::PERIOD_NS, &udp_from(1));
    assert!(matches!(known, Verdict::Admit { .. }), "{known:?}");
}

#[test]
fn a_guaranteed_rate_is_there_when_it_is_asked_for() {
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
    let late = Crowd { facts: Facts { port: Some(54), ..udp_from(7) }, ..Crowd::new(7, 1, 0) };
    let mut crowds = [Crowd::new(1, 1 << 20, 500_000), late];
    server.run(S, &mut crowds);
    crowds[1].rate_pps = 9_000;
    server.run(S, &mut crowds);
    assert!(kept(&crowds[1]) > 0.97, "{}", kept(&crowds[1]));
    assert!(server.served > 90_000, "{}", server.served);
}

#[test]
fn an_exempt_class_is_left_alone_and_takes_nothing_from_the_others() {
    let text = "
        [[class]]
        name = 'dns'
        match = [{port = 53}]
        [[class]]
        name = 'rest'
        exempt = true";
    let mut server = Server::new(&config(text), 100_000);
    let mut crowd = [Crowd::new(1, 1 << 20, 500_000)];
    server.run(S, &mut crowd);
    // Five times what can be served, of something that is not served here.
    let rest = Facts { port: Some(22), ..udp_from(7) };
    server.run(0, &mut crowd);
    for _ in 0..1_000_000 {
        assert_eq!(server.admission.decide(server.now_ns, &rest), Verdict::Admit { class: 1 });
        server.step(&mut crowd);
    }
    assert!(server.served > 95_000, "{}", server.served);
}

#[test]
fn a_reader_that_stops_is_not_drowned_and_is_found_again() {
    let (mut server, mut crowds) = flooded(1 << 24);
    server.run(S, &mut crowds);
    server.capacity_pps = 0;
    server.run(S, &mut crowds);
    server.capacity_pps = 400_000;
    server.run(100 * MS, &mut crowds);
    server.run(S, &mut crowds);
    assert!(kept(&crowds[0]) > 0.999, "{}", kept(&crowds[0]));
    assert!(server.served > 400_000 * 9 / 10, "{}", server.served);
}

#[test]
fn a_server_that_gets_slower_is_followed() {
    let (mut server, mut crowds) = flooded(1 << 24);
    server.run(S, &mut crowds);
    server.capacity_pps = 50_000;
    server.run(200 * MS, &mut crowds);
    server.run(S, &mut crowds);
    assert!(kept(&crowds[0]) > 0.999, "{}", kept(&crowds[0]));
    assert!(server.served > 45_000, "{}", server.served);
}

#[test]
fn a_clock_that_jumps_does_no_harm() {
    for jump_ns in [-3600 * S as i64, 7200 * S as i64, -5 * MS as i64] {
        let (mut server, mut crowds) = flooded(1 << 24);
        server.now_ns += 7200 * S;
        server.run(S, &mut crowds);
        server.now_ns = server.now_ns.strict_add_signed(jump_ns);
        server.run(S, &mut crowds);
        assert!(kept(&crowds[0]) > 0.99, "{jump_ns}: {}", kept(&crowds[0]));
        assert!(server.served > 400_000 * 8 / 10, "{jump_ns}: {}", server.served);
        assert!(server.admission.is_limiting());
    }
}

#[test]
fn hours_that_passed_at_once_do_not_make_forget() {
    let (mut server, mut crowds) = flooded(1);
    server.now_ns += 100 * 3600 * S;
    server.run(10 * MS, &mut crowds[..1]);
    assert!(server.admission.known().contains(udp_from(0x0a00_0001).source_id()));
}

#[test]
fn a_flood_teaches_nothing() {
    let (mut server, mut crowds) = flooded(50);
    server.run(5 * S, &mut crowds);
    let stranger = udp_from(0x5000_0003);
    assert!(!server.admission.known().contains(stranger.source_id()));
    server.admission.learn(&stranger);
    assert!(!server.admission.known().contains(stranger.source_id()));
}

#[test]
fn a_port_that_decides_by_itself_is_believed() {
    let mut admission = admission(&Config::default());
    admission.on_period(S, &Pressure::default());
    let full = Pressure { served: 1000, lost_late: 50, level_percent: 100, unseen_permille: 0 };
    assert!(admission.on_period(S + 5 * MS, &full));
    let mut totals = [ClassCounters::default(); 4];
    for period in 1..200 {
        totals[2].admitted += 25;
        totals[3].admitted += 900;
        totals[3].refused_rate += 4000;
        admission.on_port_counters(&totals);
        let pressure =
            Pressure { served: 925, lost_late: 0, level_percent: 10, unseen_permille: 0 };
        admission.on_period(S + (1 + period) * 5 * MS, &pressure);
    }
    assert_eq!(admission.counters(), totals);
    let Rate::Limited(pace) = admission.limits()[3].class else { panic!("not limited") };
    let strangers = pace.rate_pps();
    assert!(strangers > 185_000, "queues are short, so more is tried: {strangers}");
    assert_eq!(admission.limits()[2].source, Rate::Open, "nobody known was refused");
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
        let facts = Facts::of_frame(medium, &frame);
        prop_assert!(facts.packet_bytes as usize <= frame.len());
        let mut admission = admission(&Config::default());
        admission.learn(&facts);
        let Verdict::Admit { class } = admission.decide(0, &facts) else {
            panic!("refused in calm time")
        };
        prop_assert!(class < admission.classes().len());
    }

    #[test]
    fn whatever_happens_every_packet_is_counted_and_limits_stay_sane(
        events in proptest::collection::vec((any::<u16>(), 0_u64..20_000_000, 0_u32..=120, 0_u64..5000), 1..300),
        jump: u64,
    ) {
        let mut admission = admission(&Config::default());
        let (mut now_ns, mut shown) = (jump >> 1, 0);
        for (n, (source, step_ns, level_percent, served)) in events.into_iter().enumerate() {
            now_ns = if n == 150 { jump } else { now_ns.saturating_add(step_ns) };
            for _ in 0..source % 8 {
                admission.decide(now_ns, &udp_from(source.into()));
                shown += 1;
            }
            let lost_late = u64::from(level_percent > 100);
            admission.on_period(now_ns, &Pressure { served, lost_late, level_percent, unseen_permille: 0 });
            let calm = admission.limits().iter().all(|limit| *limit == ClassLimit::OPEN);
            prop_assert_eq!(calm, !admission.is_limiting());
        }
        let counted: u64 = admission.counters().iter().map(ClassCounters::arrived).sum();
        prop_assert_eq!(counted, shown);
    }
}

#[test]
fn the_seed_decides_everything() {
    let run = || {
        let (mut server, mut crowds) = flooded(1 << 24);
        server.run(S, &mut crowds);
        (server.served, server.admission.counters().to_vec(), server.admission.total_pps())
    };
    assert_eq!(run(), run());
}
