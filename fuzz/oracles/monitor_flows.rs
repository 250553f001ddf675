//! The monitor on any frames: each is in one flow or malformed, the fields of a flow are those that
//! the stack's parsers read, and no packet is lost or counted twice in a table of few flows.

use std::net::IpAddr;

use tidegate_apps::monitor::{FlowKind, FlowTable, Observation, TableConfig, Traffic};
use tidegate_device::packet::PassiveFrame;
use tidegate_wire::{EtherType, EthernetHeader, Ipv4Header, Ipv6Header, Protocol, UdpHeader};

/// Most bytes that the ring copies.
const SNAP_BYTES: usize = 64;

/// Unit of the times: the resolution of the table.
const STEP_NS: u64 = 1 << 18;

/// Runs one input: frames, each with its length before it. Returns the number of frames that are
/// in a flow.
pub fn check(mut input: &[u8]) -> u64 {
    let config = TableConfig {
        max_flows: 8,
        active_timeout_ns: 40 * STEP_NS,
        inactive_timeout_ns: 10 * STEP_NS,
        seed: [3; 16],
    };
    let mut table = FlowTable::new(&config, 0);
    let (mut frames, mut recorded, mut now_ns) = (0, Traffic::default(), 0);
    while let Some((&len, rest)) = input.split_first() {
        let (frame, rest) = rest.split_at(usize::from(len).min(rest.len()));
        input = rest;
        now_ns += u64::from(len) * STEP_NS;
        let observation = observe(frame);
        let mut record = |record: &tidegate_apps::monitor::FlowRecord| {
            assert!(record.traffic.packets > 0 && record.first_ns <= record.last_ns);
            recorded.add(record.traffic);
        };
        if let Some(observation) = observation {
            frames += 1;
            table.observe(now_ns, &[observation], &mut record);
        }
        table.expire(now_ns, 1, &mut record);
    }
    table.record_all(now_ns, &mut |record| recorded.add(record.traffic));
    let counters = *table.counters();
    let mut all = counters.untracked;
    for count in [counters.current, counters.ended, counters.evicted] {
        all.add(count.traffic);
    }
    assert_eq!(all, counters.observed);
    assert_eq!(recorded, counters.observed.since(counters.untracked));
    assert_eq!(counters.observed.packets, frames);
    frames
}

/// Observation of a frame, which is the same when only its first bytes were copied, as long as
/// these have all headers.
fn observe(bytes: &[u8]) -> Option<Observation> {
    let frame =
        PassiveFrame { data: bytes, frame_bytes: bytes.len(), vlan: None, segment_bytes: 0 };
    let merged = PassiveFrame { segment_bytes: 100, ..frame };
    if let Ok(merged) = Observation::parse(&merged) {
        assert!(merged.traffic.packets > 0);
    }
    let cut = PassiveFrame { data: &bytes[..bytes.len().min(SNAP_BYTES)], ..frame };
    let observation = Observation::parse(&frame).ok()?;
    if let Ok(of_cut) = Observation::parse(&cut) {
        assert_eq!(of_cut.traffic, observation.traffic);
    }
    assert_eq!(observation.traffic.packets, 1);
    assert!(observation.traffic.bytes <= bytes.len() as u64);
    compare(bytes, &observation);
    Some(observation)
}

/// Asserts that a packet is read as the stack's parsers read it.
fn compare(bytes: &[u8], observation: &Observation) {
    let Ok((ethernet, packet)) = EthernetHeader::parse(bytes) else { return };
    let FlowKind::Ip(flow) = observation.key.kind else {
        assert!(!matches!(ethernet.ethertype, EtherType::IPV4 | EtherType::IPV6));
        return;
    };
    let datagram = match ethernet.ethertype {
        EtherType::IPV4 => {
            let Ok((header, payload)) = Ipv4Header::parse(packet) else { return };
            assert_eq!(flow.source, IpAddr::V4(header.source));
            assert_eq!(flow.destination, IpAddr::V4(header.destination));
            assert_eq!((flow.protocol, flow.fragment), (header.protocol, header.is_fragment()));
            assert_eq!(observation.traffic.bytes, u64::from(header.total_bytes));
            payload
        }
        EtherType::IPV6 => {
            let Ok((header, payload)) = Ipv6Header::parse(packet) else { return };
            assert_eq!(flow.source, IpAddr::V6(header.source));
            assert_eq!(flow.destination, IpAddr::V6(header.destination));
            if header.next_header != Protocol::UDP {
                return;
            }
            payload
        }
        _ => return,
    };
    if flow.protocol == Protocol::UDP
        && !flow.fragment
        && let Ok((udp, _)) = UdpHeader::parse(datagram)
    {
        assert_eq!(flow.source_port, udp.source_port);
        assert_eq!(flow.destination_port, udp.destination_port);
    }
}
