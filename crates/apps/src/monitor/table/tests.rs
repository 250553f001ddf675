use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use proptest::prelude::*;
use tidegate_wire::Protocol;

use super::*;
use crate::monitor::flow::IpFlow;

const SECOND_NS: u64 = 1_000_000_000;

fn table(max_flows: usize) -> FlowTable {
    FlowTable::new(
        &TableConfig {
            max_flows,
            active_timeout_ns: 60 * SECOND_NS,
            inactive_timeout_ns: 15 * SECOND_NS,
            seed: [7; 16],
        },
        0,
    )
}

/// Flow number `number`, of one family or the other.
fn key(number: u32) -> FlowKey {
    let address = |low: u32| -> IpAddr {
        match number % 2 {
            0 => Ipv4Addr::from_bits(low).into(),
            _ => Ipv6Addr::from_bits(0x2001_0db8 << 96 | u128::from(low)).into(),
        }
    };
    let flow = IpFlow {
        source: address(number),
        destination: address(1),
        protocol: Protocol::UDP,
        source_port: 9,
        destination_port: 53,
        fragment: false,
    };
    FlowKey { vlan: 0, kind: FlowKind::Ip(flow) }
}

fn observation(number: u32, packets: u64) -> Observation {
    let traffic = Traffic { packets, bytes: 100 * packets };
    Observation { key: key(number), traffic, tcp_flags: 1 << (number % 8) }
}

fn sum(all: impl IntoIterator<Item = Traffic>) -> Traffic {
    let mut total = Traffic::default();
    all.into_iter().for_each(|traffic| total.add(traffic));
    total
}

/// Checks that all traffic is in one of the counters, and that of the current flows in the table.
fn check_balance(table: &mut FlowTable) {
    let counters = *table.counters();
    let TableCounters { observed, current, ended, evicted, untracked } = counters;
    assert_eq!(sum([current.traffic, ended.traffic, evicted.traffic, untracked]), observed);
    let listed = table.top(usize::MAX, Order::Bytes, Span::Whole);
    assert_eq!(listed.len() as u64, current.flows);
    assert_eq!(sum(listed.iter().map(|(_, traffic)| *traffic)), current.traffic);
    assert!(current.flows <= table.max_flows() as u64);
}

proptest! {
    #[test]
    fn every_packet_is_counted_once(
        steps in prop::collection::vec((0u32..60, 1u64..50, 0u64..4_000, any::<bool>()), 1..400),
    ) {
        let mut table = table(16);
        let (mut now_ns, mut records) = (0, Vec::new());
        let mut sent: HashMap<FlowKey, u64> = HashMap::new();
        for (number, packets, wait_ms, expires) in steps {
            now_ns += wait_ms * 1_000_000;
            let mut record = |record: &FlowRecord| records.push(*record);
            table.observe(now_ns, &[observation(number, packets)], &mut record);
            *sent.entry(key(number)).or_default() += packets;
            if expires {
                prop_assert!(table.expire(now_ns, 64, &mut record) <= 64);
            }
            check_balance(&mut table);
        }
        table.record_all(now_ns, &mut |record| records.push(*record));
        let counters = *table.counters();
        let recorded = sum(records.iter().map(|record| record.traffic));
        prop_assert_eq!(recorded, counters.observed.since(counters.untracked));
        let mut by_flow: HashMap<FlowKey, u64> = HashMap::new();
        for record in &records {
            prop_assert!(record.traffic.packets > 0);
            prop_assert!(record.first_ns <= record.last_ns && record.last_ns <= now_ns);
            *by_flow.entry(record.key).or_default() += record.traffic.packets;
        }
        for (key, packets) in by_flow {
            prop_assert!(packets <= sent[&key], "more than was sent");
        }
    }

    #[test]
    fn many_observations_count_as_one_by_one(
        steps in prop::collection::vec(prop::collection::vec((0u32..60, 1u64..50), 0..100), 1..20),
    ) {
        let [mut together, mut singly] = [table(16), table(16)];
        let [mut all, mut each] = [Vec::new(), Vec::new()];
        for (step, observations) in steps.into_iter().enumerate() {
            let now_ns = step as u64 * 4 * SECOND_NS;
            let observations: Vec<_> =
                observations.into_iter().map(|(number, packets)| observation(number, packets)).collect();
            together.observe(now_ns, &observations, &mut |record| all.push(*record));
            for observation in observations {
                singly.observe(now_ns, &[observation], &mut |record| each.push(*record));
            }
            prop_assert_eq!(together.counters(), singly.counters());
            prop_assert_eq!(&all, &each);
        }
    }

    #[test]
    fn lists_the_largest_flows_of_each_span(
        sizes in prop::collection::vec(1u64..1000, 1..12),
        more in prop::collection::vec(0u64..1000, 12),
        count in 0usize..14,
    ) {
        // Few flows in many buckets: every flow is tracked.
        let mut table = table(4096);
        let add = |table: &mut FlowTable, sizes: &[u64]| {
            for (number, &packets) in sizes.iter().enumerate().filter(|(_, packets)| **packets > 0) {
                table.observe(0, &[observation(number as u32, packets)], &mut |_| {});
            }
        };
        let expected = |sizes: &[u64]| {
            let mut sizes: Vec<u64> = sizes.iter().copied().filter(|packets| *packets > 0).collect();
            sizes.sort_unstable_by(|a, b| b.cmp(a));
            sizes.truncate(count);
            sizes
        };
        let listed = |flows: Vec<(FlowKey, Traffic)>| -> Vec<u64> {
            flows.iter().map(|(_, traffic)| traffic.packets).collect()
        };
        add(&mut table, &sizes);
        for order in [Order::Bytes, Order::Packets] {
            prop_assert_eq!(listed(table.top(count, order, Span::Whole)), expected(&sizes));
        }
        prop_assert_eq!(listed(table.top(count, Order::Packets, Span::SinceLast)), expected(&sizes));
        let more = &more[..sizes.len()];
        add(&mut table, more);
        prop_assert_eq!(listed(table.top(count, Order::Packets, Span::SinceLast)), expected(more));
    }
}

/// A flood of flows of one packet each, 50 times as many as the table holds, with 100 flows that
/// send every 500th packet together.
#[test]
fn flood_of_random_flows_does_not_evict_large_flows() {
    let mut table = table(2048);
    let (mut now_ns, mut large_sent) = (0, 0);
    for number in 0..1_000_000_u32 {
        now_ns += 1_000;
        table.observe(now_ns, &[observation(1000 + number, 1)], &mut |_| {});
        if number % 5 == 0 {
            // Flow 0 to 99, each every 500 packets.
            table.observe(now_ns, &[observation(number / 5 % 100, 1)], &mut |_| {});
            large_sent += 1;
        }
        if number % 100 == 0 {
            table.expire(now_ns, 64, &mut |_| {});
        }
    }
    check_balance(&mut table);
    let top = table.top(100, Order::Packets, Span::Whole);
    let large: Vec<_> = (0..100).map(key).collect();
    let found = top.iter().filter(|(key, _)| large.contains(key));
    let (flows, packets) =
        found.fold((0, 0), |(flows, packets), (_, traffic)| (flows + 1, packets + traffic.packets));
    assert_eq!(flows, 100, "every large flow is among the largest");
    assert!(packets * 100 >= large_sent * 99, "{packets} of {large_sent} packets tracked");
    assert!(table.counters().untracked.packets > 0, "the flood did not fill the table");
}

/// Under the same flood a flow that begins in the middle gets a place too.
#[test]
fn new_flow_gets_a_place_during_a_flood() {
    let mut table = table(2048);
    for number in 0..200_000_u32 {
        let now_ns = u64::from(number) * 1_000;
        table.observe(now_ns, &[observation(1000 + number, 1)], &mut |_| {});
        if number >= 100_000 && number % 100 == 0 {
            table.observe(now_ns, &[observation(0, 1)], &mut |_| {});
        }
    }
    let top = table.top(1, Order::Packets, Span::Whole);
    assert_eq!(top[0].0, key(0));
    assert!(top[0].1.packets > 980, "{} of 1000 packets", top[0].1.packets);
}

#[test]
fn timeouts_make_records() {
    let mut table = table(64);
    let mut records = Vec::new();
    let expire = |table: &mut FlowTable, now_ns: u64, records: &mut Vec<FlowRecord>| {
        table.expire(now_ns, 64, &mut |record| records.push(*record));
    };
    // Flow 0 sends every 10 s, flow 1 once.
    table.observe(SECOND_NS, &[observation(1, 2)], &mut |_| {});
    for second in (0..=70).step_by(10) {
        let now_ns = (second * SECOND_NS).max(SECOND_NS);
        table.observe(now_ns, &[observation(0, 1)], &mut |_| {});
        expire(&mut table, now_ns, &mut records);
    }
    let reasons: Vec<_> = records.iter().map(|record| (record.reason, record.key)).collect();
    assert_eq!(reasons, [(EndReason::Idle, key(1)), (EndReason::Active, key(0))]);
    assert_eq!(records[0].traffic, Traffic { packets: 2, bytes: 200 });
    let is_between = |record: &FlowRecord, first: u64, last: u64| {
        let early_ns = last * SECOND_NS - record.last_ns;
        record.first_ns == first * SECOND_NS && early_ns < 1 << TICK_BITS
    };
    assert!(is_between(&records[0], 1, 1));
    // From 1 s to 70 s.
    assert_eq!(records[1].traffic.packets, 8);
    assert!(is_between(&records[1], 1, 70));
    table.observe(80 * SECOND_NS, &[observation(0, 1)], &mut |_| {});
    expire(&mut table, 100 * SECOND_NS, &mut records);
    let last = records[2];
    assert_eq!((last.reason, last.traffic.packets), (EndReason::Idle, 1));
    assert_eq!((last.first_ns, last.tcp_flags), (80 * SECOND_NS, 1));
    assert_eq!(table.counters().ended.flows, 2);
    assert_eq!(table.counters().current, FlowCount::default());
    expire(&mut table, 200 * SECOND_NS, &mut records);
    assert_eq!(records.len(), 3);
}

/// The longest timeout that the command line takes.
#[test]
fn flow_without_packets_stays_until_a_timeout_of_eleven_days() {
    let timeout_ns = 1_000_000 * SECOND_NS;
    let config = TableConfig {
        max_flows: 64,
        active_timeout_ns: timeout_ns,
        inactive_timeout_ns: timeout_ns,
        seed: [7; 16],
    };
    let mut table = FlowTable::new(&config, 0);
    table.observe(SECOND_NS, &[observation(0, 1)], &mut |_| {});
    let mut reasons = Vec::new();
    for (now_ns, flows) in [(timeout_ns, 1), (timeout_ns + 2 * SECOND_NS, 0)] {
        table.expire(now_ns, 64, &mut |record| reasons.push(record.reason));
        assert_eq!(table.counters().current.flows, flows);
    }
    assert_eq!(reasons, [EndReason::Idle]);
}

#[test]
fn whole_table_is_examined_each_second() {
    let mut table = table(65_536);
    for number in 0..1000 {
        table.observe(0, &[observation(number, 1)], &mut |_| {});
    }
    let mut ended = 0;
    for tick in 0..=1000 {
        let now_ns = 16 * SECOND_NS + tick * SECOND_NS / 1000;
        while table.expire(now_ns, 64, &mut |_| ended += 1) == 64 {}
    }
    assert_eq!((ended, table.counters().current.flows), (1000, 0));
}
