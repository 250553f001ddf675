//! Properties of the scheduler: nothing waits while the link is free, no flow starves, ceilings
//! hold, memory is bounded.

use proptest::prelude::*;

use super::*;

const GIGABIT: u64 = 1_000_000_000;

/// Queues of numbered frames of one size, sent on a link of 1 Gb/s in virtual time.
struct Link {
    scheduler: Scheduler<(u8, u16)>,
    now_ns: u64,
}

impl Link {
    fn new(config: &Config, max_frames: usize) -> Self {
        config.check().unwrap();
        Self { scheduler: config.scheduler(max_frames), now_ns: 1_000_000_000 }
    }

    /// Queues a frame of a flow, which never expires; false if it was dropped.
    fn push(&mut self, class: u8, flow: u16, bytes: u32) -> bool {
        let id = FlowId::new(class, flow.into());
        let queued = Queued { value: (class, flow), bytes, expires_ns: u64::MAX };
        self.scheduler.push(id, queued).is_ok()
    }

    /// Waits until the next frame is due and sends it.
    fn send(&mut self) -> Option<(u8, u16)> {
        self.now_ns = self.now_ns.max(self.scheduler.next_due_ns()?);
        let released = self.scheduler.pop(self.now_ns).expect("a frame is due");
        assert!(!released.is_expired);
        Some(released.value)
    }
}

fn two_ranks() -> Config {
    let rule = Match::default().dscp(46);
    let classes = vec![Class::new("urgent").rules(vec![rule])];
    Config::default().classes(classes).ceiling_bps(GIGABIT)
}

#[test]
fn frame_of_a_better_rank_overtakes_all_that_wait() {
    let mut link = Link::new(&two_ranks(), 1000);
    (0..100).for_each(|flow| assert!(link.push(1, flow % 8, 1514)));
    link.send();
    assert!(link.push(0, 9, 64));
    assert_eq!(link.send(), Some((0, 9)));
}

#[test]
fn new_flow_goes_before_those_that_had_their_turn() {
    let mut link = Link::new(&Config::default().ceiling_bps(GIGABIT), 1000);
    (0..80).for_each(|frame| assert!(link.push(0, frame % 8, 1514)));
    (0..8).for_each(|_| {
        link.send();
    });
    assert!(link.push(0, 99, 64));
    assert_eq!(link.send(), Some((0, 99)));
}

#[test]
fn classes_of_one_rank_share_by_weight() {
    let rule = |dscp| vec![Match::default().dscp(dscp)];
    let classes =
        vec![Class::new("one").rules(rule(1)), Class::new("three").rules(rule(3)).weight(3)];
    let mut link = Link::new(&Config::default().classes(classes).ceiling_bps(GIGABIT), 1000);
    let mut sent = [0_u32; 2];
    for _ in 0..4000 {
        (0..2).for_each(|class| {
            while link.scheduler.flow_bytes(FlowId::new(class, 0)) < 6000 {
                assert!(link.push(class, 0, 1500));
            }
        });
        let (class, _) = link.send().unwrap();
        sent[usize::from(class)] += 1;
    }
    assert!(sent[0].abs_diff(1000) <= 2 && sent[1].abs_diff(3000) <= 2, "{sent:?}");
}

#[test]
fn idle_time_of_a_class_earns_nothing() {
    let rule = |dscp| vec![Match::default().dscp(dscp)];
    let classes = vec![Class::new("a").rules(rule(1)), Class::new("b").rules(rule(2))];
    let mut link = Link::new(&Config::default().classes(classes).ceiling_bps(GIGABIT), 1000);
    for _ in 0..1000 {
        assert!(link.push(0, 0, 1500));
        link.send();
    }
    for _ in 0..100 {
        assert!(link.push(0, 0, 1500) && link.push(1, 0, 1500));
    }
    let first: Vec<u8> = (0..20).map(|_| link.send().unwrap().0).collect();
    assert_eq!(first.iter().filter(|&&class| class == 1).count(), 10, "{first:?}");
}

#[test]
fn expired_frame_is_dropped_and_takes_no_time_of_the_link() {
    let mut link = Link::new(&Config::default().ceiling_bps(GIGABIT), 10);
    let (flow, now_ns) = (FlowId::new(0, 0), link.now_ns);
    for (value, expires_ns) in [((0, 1), now_ns), ((0, 2), now_ns + 1)] {
        assert!(link.scheduler.push(flow, Queued { value, bytes: 1500, expires_ns }).is_ok());
    }
    let expired = link.scheduler.pop(now_ns).unwrap();
    assert!(expired.is_expired && expired.value == (0, 1));
    assert_eq!(link.send(), Some((0, 2)));
    let counters = link.scheduler.counters().next().unwrap();
    assert_eq!((counters.sent, counters.dropped, counters.queued), (1, 1, 0));
}

#[test]
fn full_queues_have_space_for_flows_and_classes_that_have_nothing_there() {
    let mut link = Link::new(&two_ranks(), 600);
    for flow in 60..100 {
        (0..1000).for_each(|frame| {
            link.push(1, frame % 50, 1500);
        });
        assert!(link.push(1, flow, 64), "flow {flow} of the full class");
        assert!(link.push(0, flow, 64), "flow {flow} of the other class");
        (0..2).for_each(|_| {
            link.send();
        });
    }
}

#[test]
fn waiting_connections_of_a_flow_return_in_their_order() {
    let mut link = Link::new(&two_ranks(), 10);
    let flow = FlowId::new(1, 5);
    [7, 3, 9].into_iter().for_each(|index| link.scheduler.wait(flow, index));
    link.scheduler.wait(FlowId::new(0, 5), 1);
    let taken: Vec<u32> = std::iter::from_fn(|| link.scheduler.take_waiting(flow)).collect();
    assert_eq!(taken, [7, 3, 9]);
}

#[test]
fn program_conditions_select_rules_by_the_program_of_a_port() {
    let text = r#"
        [[class]]
        name = "backup"
        match = [{ program = "rsync", protocol = "tcp" }, { user = 1000, local-port = "1-99" }]
        [[class]]
        name = "dns"
        match = [{ local-port = 53 }, { destination = "2001:db8::/32" }]
    "#;
    let config: Config = toml::from_str(text).unwrap();
    config.check().unwrap();
    assert_eq!(config.names().collect::<Vec<_>>(), ["backup", "dns", "others"]);
    let rules = config.rule_set();
    assert!(rules.names_programs());
    let of = |name, user| rules.rules_of(Some(Program { name, user }));
    let nobody = rules.rules_of(None);
    let packet = |protocol, port, destination: &str| PacketMeta {
        protocol: tidegate_wire::Protocol(protocol),
        local_port: Some(port),
        destination: destination.parse().unwrap(),
        dscp: 0,
    };
    for (packet, bits, class) in [
        (packet(6, 873, "192.0.2.1"), of("rsync", 0), 0),
        (packet(17, 873, "192.0.2.1"), of("rsync", 0), 2),
        (packet(6, 873, "192.0.2.1"), nobody, 2),
        (packet(17, 53, "192.0.2.1"), of("named", 1000), 0),
        (packet(17, 53, "192.0.2.1"), of("named", 1), 1),
        (packet(17, 53, "192.0.2.1"), nobody, 1),
        (packet(17, 999, "2001:db8::7"), nobody, 1),
    ] {
        assert_eq!(rules.class_of(&packet, bits), class, "{packet:?}");
    }
}

#[test]
fn settings_with_a_mistake_are_refused() {
    let refused = |text: &str| {
        let config: Config = toml::from_str(text).unwrap();
        config.check().unwrap_err().to_string()
    };
    for (text, expected) in [
        ("ceiling-bps = 7", "ceiling-bps 7 is too low"),
        ("max-delay-ms = 0", "max-delay-ms is 0"),
        ("[[class]]\nname = ''", "invalid name"),
        ("[[class]]\nname = 'a'\n[[class]]\nname = 'b'", "`a` matches every packet"),
        ("[[class]]\nname = 'a'\nmatch = [{dscp = 1}]\n[[class]]\nname = 'a'", "in use"),
        ("[[class]]\nname = 'others'\nmatch = [{dscp = 1}]", "in use"),
        ("[[class]]\nname = 'a'\nweight = 0", "weight is a number"),
        ("[[class]]\nname = 'a'\nceiling-bps = 0", "ceiling-bps 0 is too low"),
        ("[[class]]\nname = 'a'\nset-dscp = 64", "set-dscp is"),
        ("[[class]]\nname = 'a'\nmatch = [{dscp = 64}]", "dscp is"),
        ("[[class]]\nname = 'a'\nmatch = [{local-port = 'none'}]", "local-port none"),
        ("[[class]]\nname = 'a'\nmatch = [{protocol = 'neighbour'}]", "always goes first"),
    ] {
        let error = refused(text);
        assert!(error.contains(expected), "{text}: {error}");
    }
}

proptest! {
    /// Any classes, any arrivals: a link that has frames and time sends one; a class keeps its
    /// ceiling; the memory is that of the limit.
    #[test]
    fn link_never_idles_ceilings_hold_and_memory_is_bounded(
        ceilings in proptest::collection::vec((0_u8..3, 1_u32..5, proptest::option::of(20_u64..400)), 1..5),
        arrivals in proptest::collection::vec((0_u8..5, 0_u16..40, 64_u32..9000, 0_u64..30_000), 1..600),
    ) {
        let classes: Vec<Class> = ceilings.iter().enumerate().map(|(at, &(rank, weight, mbps))| {
            Class::new(format!("c{at}"))
                .rules(vec![Match::default().dscp(at as u8)])
                .rank(rank)
                .weight(weight)
                .ceiling_bps(mbps.map(|mbps| mbps * 1_000_000))
        }).collect();
        let config = Config::default().classes(classes).ceiling_bps(GIGABIT);
        let all = config.names().count() as u8;
        let mut link = Link::new(&config, 128);
        let start_ns = link.now_ns;
        let mut sent_bytes = vec![0_u64; all.into()];
        let mut accepted = 0;
        let mut sent = 0;
        for &(class, flow, bytes, gap_ns) in &arrivals {
            accepted += u32::from(link.push(class % all, flow, bytes));
            link.now_ns += gap_ns;
            let due = link.scheduler.next_due_ns().is_some_and(|due_ns| due_ns <= link.now_ns);
            let before = link.scheduler.queued();
            let released = link.scheduler.pop(link.now_ns);
            prop_assert_eq!(due, released.is_some(), "the link idles with {} frames", before);
            if let Some(released) = released {
                sent += 1;
                let _ = released.value;
            }
            prop_assert!(link.scheduler.queued() <= 128);
        }
        while link.send().is_some() {
            sent += 1;
        }
        prop_assert_eq!(accepted, sent);
        prop_assert!(link.scheduler.capacity() <= 128);
        for (at, counters) in link.scheduler.counters().enumerate() {
            sent_bytes[at] = counters.sent_bytes;
        }
        let elapsed_ns = link.now_ns - start_ns;
        for (at, &(_, _, mbps)) in ceilings.iter().enumerate() {
            let bps = mbps.map_or(GIGABIT, |mbps| mbps * 1_000_000);
            // The last frame leaves before its time is over.
            let burst_ns = 1_000_000 + 9000 * 8_000_000_000 / bps;
            let max_bits = (elapsed_ns + burst_ns) as u128 * bps as u128 / 1_000_000_000;
            prop_assert!((sent_bytes[at] * 8) as u128 <= max_bits + 8 * 9000, "class {}", at);
        }
    }

    /// Flows of a class that always have frames of any sizes get equal bytes.
    #[test]
    fn no_flow_starves_beside_others_that_always_have_frames(
        sizes in proptest::collection::vec(64_u32..9000, 2..12),
    ) {
        let mut link = Link::new(&Config::default().ceiling_bps(GIGABIT), 1000);
        let mut bytes = vec![0_u64; sizes.len()];
        let rounds = 4000;
        for _ in 0..rounds {
            for (flow, &size) in sizes.iter().enumerate() {
                while link.scheduler.flow_bytes(FlowId::new(0, flow as u64)) < 9000 {
                    prop_assert!(link.push(0, flow as u16, size));
                }
            }
            let (_, flow) = link.send().unwrap();
            bytes[usize::from(flow)] += u64::from(sizes[usize::from(flow)]);
        }
        let (least, most) = (bytes.iter().min().unwrap(), bytes.iter().max().unwrap());
        prop_assert!(most - least <= 2 * (1514 + 9000), "{:?} for {:?}", bytes, sizes);
    }
}
