use std::collections::HashMap;
use std::net::{Ipv4Addr, Ipv6Addr};

use tidegate_wire::{EtherType, Protocol};

use super::*;
use crate::monitor::flow::{FlowKey, Traffic};
use crate::monitor::table::EndReason;

const SECOND_NS: u64 = 1_000_000_000;
const UNIX_SECONDS: u64 = 1_700_000_000;

/// Collector that knows only what templates say (RFC 7011 section 3).
#[derive(Default)]
struct Collector {
    templates: HashMap<u16, Vec<(u16, usize)>>,
    /// Template of each record, and its fields by information element.
    records: Vec<(u16, HashMap<u16, u128>)>,
    template_messages: usize,
    longest: usize,
}

fn number(bytes: &[u8]) -> u128 {
    bytes.iter().fold(0, |number, byte| number << 8 | u128::from(*byte))
}

fn u16_at(bytes: &[u8], at: usize) -> usize {
    number(&bytes[at..at + 2]) as usize
}

impl Collector {
    fn collect(&mut self, message: &[u8]) {
        assert_eq!((u16_at(message, 0), u16_at(message, 2)), (10, message.len()));
        assert_eq!(number(&message[8..12]) as usize, self.records.len(), "sequence");
        assert_eq!(number(&message[12..16]), 77, "domain");
        self.longest = self.longest.max(message.len());
        let mut sets = &message[16..];
        while !sets.is_empty() {
            let (id, length) = (u16_at(sets, 0) as u16, u16_at(sets, 2));
            let body = &sets[4..length];
            match id {
                2 => {
                    self.template_messages += 1;
                    self.learn(body, 4);
                }
                3 => self.learn(body, 6),
                _ => self.read(id, body),
            }
            sets = &sets[length..];
        }
    }

    fn learn(&mut self, mut body: &[u8], header: usize) {
        while !body.is_empty() {
            let (id, count) = (u16_at(body, 0) as u16, u16_at(body, 2));
            let fields = body[header..][..4 * count].chunks(4);
            let fields = fields.map(|field| (u16_at(field, 0) as u16, u16_at(field, 2)));
            self.templates.insert(id, fields.collect());
            body = &body[header + 4 * count..];
        }
    }

    fn read(&mut self, id: u16, mut body: &[u8]) {
        let fields = &self.templates[&id];
        while !body.is_empty() {
            let mut record = HashMap::new();
            for &(element, bytes) in fields {
                record.insert(element, number(&body[..bytes]));
                body = &body[bytes..];
            }
            self.records.push((id, record));
        }
    }
}

fn exporter() -> Exporter {
    Exporter::new(ExporterConfig { domain: 77, unix_epoch_ns: UNIX_SECONDS * SECOND_NS })
}

fn record(kind: FlowKind) -> FlowRecord {
    FlowRecord {
        key: FlowKey { vlan: 7, kind },
        traffic: Traffic { packets: 3, bytes: 300 },
        first_ns: SECOND_NS,
        last_ns: 2 * SECOND_NS,
        tcp_flags: 0x12,
        reason: EndReason::Idle,
    }
}

fn ip_flow(source: IpAddr, destination: IpAddr, protocol: Protocol) -> FlowKind {
    let (source_port, destination_port) = (0x1234, 0x0800);
    let fragment = false;
    FlowKind::Ip(IpFlow { source, destination, protocol, source_port, destination_port, fragment })
}

fn v4(protocol: Protocol) -> FlowKind {
    ip_flow(Ipv4Addr::new(192, 0, 2, 1).into(), Ipv4Addr::new(192, 0, 2, 2).into(), protocol)
}

fn v6(protocol: Protocol) -> FlowKind {
    ip_flow(Ipv6Addr::LOCALHOST.into(), Ipv6Addr::UNSPECIFIED.into(), protocol)
}

#[test]
fn records_carry_the_fields_of_their_templates() {
    let (mut exporter, mut collector) = (exporter(), Collector::default());
    let mut send = |message: &[u8]| {
        collector.collect(message);
        true
    };
    let metering = MeteringCounters { ignored_packets: 5, ignored_bytes: 400 };
    exporter.poll(0, &metering, &mut send);
    for kind in [
        v4(Protocol::TCP),
        v6(Protocol::UDP),
        v4(Protocol::ICMPV4),
        v6(Protocol::ICMPV6),
        FlowKind::Other(EtherType::ARP),
    ] {
        exporter.push(SECOND_NS, &record(kind), &mut send);
    }
    exporter.finish(3 * SECOND_NS, &metering, &mut send);
    let records = collector.records;
    let ids: Vec<_> = records.iter().map(|(id, _)| *id).collect();
    assert_eq!(ids, [259, 256, 257, 256, 257, 258, 259]);
    for (_, record) in &records[1..6] {
        assert_eq!((record[&2], record[&58], record[&136]), (3, 7, 1));
        let begin_ms = u128::from(UNIX_SECONDS + 1) * 1000;
        assert_eq!((record[&152], record[&153]), (begin_ms, begin_ms + 1000));
    }
    let [tcp, udp, icmp, icmpv6, other] = [1, 2, 3, 4, 5].map(|at: usize| &records[at].1);
    assert_eq!((tcp[&8], tcp[&12]), (0xc000_0201, 0xc000_0202));
    assert_eq!((tcp[&7], tcp[&11], tcp[&32], tcp[&4], tcp[&6]), (0x1234, 0x0800, 0, 6, 0x12));
    assert_eq!((udp[&27], udp[&28], udp[&11], udp[&4], udp[&1]), (1, 0, 0x0800, 17, 300));
    assert_eq!((icmp[&11], icmp[&32]), (0, 0x0800));
    assert_eq!((icmpv6[&11], icmpv6[&139]), (0, 0x0800));
    assert_eq!((other[&256], other[&352]), (0x0806, 300));
    let last = &records[6].1;
    assert_eq!((last[&149], last[&41], last[&42]), (77, 2, 5));
    assert_eq!((last[&164], last[&165]), (5, 400));
}

#[test]
fn templates_are_repeated_and_records_do_not_wait_for_long() {
    let (mut exporter, mut collector) = (exporter(), Collector::default());
    let metering = MeteringCounters::default();
    for tenth in 0..=1250_u64 {
        let now_ns = tenth * SECOND_NS / 10;
        let mut send = |message: &[u8]| {
            collector.collect(message);
            true
        };
        exporter.poll(now_ns, &metering, &mut send);
        if tenth == 5 {
            exporter.push(now_ns, &record(v4(Protocol::UDP)), &mut send);
        }
        if tenth == 14 {
            assert_eq!(collector.records.len(), 1);
        }
        if tenth == 15 {
            assert_eq!(collector.records.len(), 2);
        }
    }
    assert_eq!(collector.template_messages, 3, "at 0, 60 and 120 s");
}

#[test]
fn messages_fit_into_the_minimum_mtu() {
    let (mut exporter, mut collector) = (exporter(), Collector::default());
    let mut send = |message: &[u8]| {
        collector.collect(message);
        true
    };
    let metering = MeteringCounters::default();
    exporter.poll(0, &metering, &mut send);
    for number in 0..1000 {
        let kind = if number % 3 == 0 { v6(Protocol::UDP) } else { v4(Protocol::UDP) };
        exporter.push(0, &record(kind), &mut send);
    }
    exporter.finish(0, &metering, &mut send);
    assert_eq!(collector.records.len(), 1002);
    assert!((1100..=1232).contains(&collector.longest), "{} bytes", collector.longest);
    assert_eq!(exporter.counters().records, 1000);
}

#[test]
fn collector_detects_messages_that_were_not_sent() {
    let mut exporter = exporter();
    let metering = MeteringCounters::default();
    let mut sequences = Vec::new();
    for is_sent in [true, false, true] {
        let mut send = |message: &[u8]| {
            sequences.push(number(&message[8..12]));
            is_sent
        };
        exporter.poll(0, &metering, &mut send);
        exporter.push(0, &record(v4(Protocol::UDP)), &mut send);
        exporter.poll(2 * SECOND_NS, &metering, &mut send);
    }
    // The counters are a data record too.
    assert_eq!(sequences, [0, 1, 2, 3]);
    let counters = exporter.counters();
    assert_eq!((counters.records, counters.lost_records), (2, 1));
}
