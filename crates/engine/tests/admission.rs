//! Equivalence of the BPF program and the gate: same class and same verdict for each frame.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use fastrand::Rng;
use tidegate_device::Medium;
use tidegate_device::admission::{ClassCounts, EarlyDrop, MAX_CLASSES};
use tidegate_device::xdp::{XdpError, XdpGuard};
use tidegate_engine::admission::{device_limits, install_classes};
use tidegate_gate::admission::{
    Admission, Config, LimitDecision, Limiter, Limits, PacketMeta, PacketRate, RateLimit,
    RefusalReason, SourceId,
};

/// Loads the BPF program; `None` if this machine does not permit that.
fn guard() -> Option<XdpGuard> {
    match XdpGuard::load() {
        Ok(guard) => Some(guard),
        Err(XdpError::NotPermitted { .. }) => {
            tidegate_needs::skip("root", "loading a BPF program needs root");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

const POLICIES: [&str; 5] = [
    "",
    "
    [[class]]
    name = 'dns'
    match = [{protocol = 'udp', port = 53, size = '0-80'}, {protocol = 'tcp', port = 53}]
    [[class]]
    name = 'near'
    match = [{source = '10.0.0.0/8'}, {source = '2001:db8::/32', port = '1000-2000'}]
    [[class]]
    name = 'trusted'
    match = [{known = true, protocol = 'udp'}]
    [[class]]
    name = 'far'
    match = [{source = '2001:db8:0:0:8000::/65'}, {source = '192.0.2.64/26', known = false}]
    [[class]]
    name = 'control'
    match = [{protocol = 'neighbour'}, {protocol = 'icmp'}, {protocol = '132'}]",
    "
    [[class]]
    name = 'small'
    match = [{size = '0-60'}]
    [[class]]
    name = 'tcp'
    match = [{protocol = 'tcp'}]
    [[class]]
    name = 'unknown'
    match = [{known = false}]",
    r"
    [[class]]
    name = 'path'
    match = [{protocol = 'tcp', payload = 'GET /'}]
    [[class]]
    name = 'name'
    match = [{payload = '\x03abc', payload-at = 12}, {protocol = 'udp', payload = 'zz', payload-at = 46}]
    [[class]]
    name = 'start'
    match = [{payload = 'g', known = false}]",
    "
    [[class]]
    name = 'all'",
];

const DESTINATION_PORTS: [u16; 5] = [53, 54, 1000, 2000, 65535];

/// Starts of payloads that rules know, and some that they nearly do.
const PAYLOADS: [(&str, usize); 6] =
    [("GET /x", 0), ("get /X1", 0), ("GET /y", 0), ("\x03ABC", 12), ("\x03abd", 12), ("zZ", 46)];

fn pick<T: Copy>(rng: &mut Rng, of: &[T]) -> T {
    of[rng.usize(0..of.len())]
}

fn address_v4(rng: &mut Rng) -> Ipv4Addr {
    let network = pick(rng, &[0x0a00_0000_u32, 0xc000_0240, 0xc000_0200, 0x0101_0100]);
    Ipv4Addr::from_bits(network + rng.u32(0..4))
}

fn address_v6(rng: &mut Rng) -> Ipv6Addr {
    let network = pick(rng, &[0x2001_0db8_u128 << 96, 0xfd00 << 112]);
    let host = pick(rng, &[1, 1 << 63]);
    Ipv6Addr::from_bits(network | u128::from(rng.u32(0..3)) << 64 | host)
}

fn upper_layer(rng: &mut Rng) -> (u8, Vec<u8>) {
    let protocol = pick(rng, &[17, 17, 6, 1, 58, 132, 44, 43, 0]);
    let mut bytes: Vec<u8> = (0..rng.usize(0..80)).map(|_| rng.u8(..)).collect();
    if protocol == 6
        && let Some(offset) = bytes.get_mut(12)
    {
        *offset = pick(rng, &[0x50, 0x50, 0x80, 0xf0, 0x40, 0]);
    }
    let header_bytes = match protocol {
        6 => bytes.get(12).map_or(0, |offset| usize::from(offset >> 4) * 4),
        _ => 8,
    };
    let (text, at) = pick(rng, &PAYLOADS);
    if let Some(place) =
        bytes.get_mut(header_bytes + at..).and_then(|rest| rest.get_mut(..text.len()))
    {
        place.copy_from_slice(text.as_bytes());
    }
    if let Some(port) = bytes.get_mut(2..4) {
        port.copy_from_slice(&pick(rng, &DESTINATION_PORTS).to_be_bytes());
    }
    if protocol == 58 && !bytes.is_empty() {
        bytes[0] = rng.u8(130..140);
    }
    (protocol, bytes)
}

fn ipv4(rng: &mut Rng) -> Vec<u8> {
    let (protocol, payload) = upper_layer(rng);
    let options = pick(rng, &[0, 0, 0, 4, 40]);
    let total = (20 + options + payload.len()) as u16;
    let mut packet = vec![0x45 + (options / 4) as u8, 0];
    packet.extend(total.to_be_bytes());
    packet.extend([0, 1]);
    packet.extend(pick(rng, &[0_u16, 0, 0x4000, 0x2000, 0x0010]).to_be_bytes());
    packet.extend([64, protocol, 0, 0]);
    packet.extend(address_v4(rng).octets());
    packet.extend([10, 0, 0, 1]);
    packet.extend(vec![1; options]);
    packet.extend(payload);
    packet
}

fn ipv6(rng: &mut Rng) -> Vec<u8> {
    let (mut next, mut payload) = upper_layer(rng);
    for _ in 0..pick(rng, &[0, 0, 0, 1, 2, 5, 6, 7]) {
        let more = pick(rng, &[0, 0, 1, 3]);
        let mut header = vec![next, more];
        header.resize(8 + 8 * usize::from(more), 0);
        header.extend(payload);
        payload = header;
        next = pick(rng, &[0, 43, 60, 60, 44]);
    }
    let mut packet = vec![0x60, 0, 0, 0];
    packet.extend((payload.len() as u16).to_be_bytes());
    packet.extend([next, pick(rng, &[64, 255])]);
    packet.extend(address_v6(rng).octets());
    packet.extend([0; 16]);
    packet.extend(payload);
    packet
}

fn arp(rng: &mut Rng) -> Vec<u8> {
    let mut packet = vec![0, 1, 8, 0, 6, 4, 0, 1, 2, 0, 0, 0, 0, 1];
    packet.extend(address_v4(rng).octets());
    packet.extend([0; 10]);
    packet
}

fn frame(rng: &mut Rng) -> Vec<u8> {
    let (ethertype, packet) = match rng.u8(0..10) {
        0..4 => (0x0800_u16, ipv4(rng)),
        4..8 => (0x86dd, ipv6(rng)),
        8 => (0x0806, arp(rng)),
        _ => (0x88cc, vec![1; 40]),
    };
    let mut frame = vec![2; 12];
    if rng.u8(0..5) == 0 {
        frame.extend(pick(rng, &[0x8100_u16, 0x88a8]).to_be_bytes());
        frame.extend([0, 7]);
    }
    frame.extend(ethertype.to_be_bytes());
    frame.extend(packet);
    match rng.u8(0..8) {
        0 => frame.truncate(rng.usize(14..=frame.len())),
        1 => frame.resize(frame.len() + rng.usize(1..40), 0),
        2 => {
            let at = rng.usize(12..frame.len());
            frame[at] = rng.u8(..);
        }
        _ => {}
    }
    frame
}

/// Admission with some of the test's source addresses already known.
fn admission(policy: &str, seed: u8) -> Admission {
    let config = match policy {
        "" => Config::default(),
        text => toml::from_str(text).unwrap(),
    };
    let mut admission = Admission::new(&config, [seed; 16]).unwrap();
    let mut rng = Rng::with_seed(1);
    for _ in 0..8 {
        admission.confirm(SourceId::from_address(IpAddr::V4(address_v4(&mut rng))));
    }
    admission.confirm(SourceId::from_address(IpAddr::V6(address_v6(&mut rng))));
    admission.confirm(SourceId::from_address(IpAddr::V6(address_v6(&mut rng))));
    admission
}

fn configure(guard: &mut XdpGuard, admission: &mut Admission, limits: &Limits) {
    install_classes(admission, guard).unwrap();
    guard.set_known_sources(&admission.known_sources().words().collect::<Vec<_>>()).unwrap();
    guard.set_limits(Some(&device_limits(limits))).unwrap();
}

#[test]
fn bpf_and_gate_classify_random_frames_alike() {
    for (seed, policy) in POLICIES.into_iter().enumerate() {
        let Some(mut guard) = guard() else { return };
        let mut admission = admission(policy, seed as u8);
        configure(&mut guard, &mut admission, &Limits::UNLIMITED);
        let mut rng = Rng::with_seed(seed as u64);
        let mut expected = [ClassCounts::default(); MAX_CLASSES];
        for n in 0..20_000 {
            let frame = frame(&mut rng);
            let meta = PacketMeta::parse(Medium::Ethernet, &frame);
            expected[admission.classify(&meta)].admitted += 1;
            assert!(guard.try_frame(&frame).unwrap());
            // Comparing after each frame would take long.
            if n % 16 == 15 {
                assert_eq!(guard.counts().unwrap(), expected, "{policy}: {meta:?} {frame:x?}");
            }
        }
        let seen = expected.iter().filter(|counts| counts.admitted > 100).count();
        assert_eq!(seen, admission.classes().len(), "every class has been tried: {expected:?}");
    }
}

/// Interval so long that no bucket refills while the test runs.
const NO_REFILL_INTERVAL_NS: u64 = 3_000_000_000_000;

fn rate_of_packets(packets: u64) -> PacketRate {
    PacketRate {
        interval_ns: NO_REFILL_INTERVAL_NS,
        burst_ns: (packets - 1) * NO_REFILL_INTERVAL_NS,
    }
}

fn random_limits(rng: &mut Rng) -> Limits {
    let mut limits = Limits::UNLIMITED;
    limits.total = rng.bool().then(|| rate_of_packets(rng.u64(1..1000)));
    for limit in &mut limits.classes {
        limit.class = match rng.u8(0..6) {
            0 => RateLimit::Unlimited,
            1 => RateLimit::Closed,
            2..4 => RateLimit::Limited(rate_of_packets(rng.u64(1..200))),
            _ => RateLimit::Shared(rate_of_packets(rng.u64(1..200))),
        };
        if rng.bool() {
            limit.source = RateLimit::Limited(rate_of_packets(rng.u64(1..20)));
        }
    }
    limits
}

#[test]
fn bpf_and_gate_admit_random_frames_alike() {
    let mut over_share = 0;
    for seed in 0..20_u8 {
        let Some(mut guard) = guard() else { return };
        let mut admission = admission(POLICIES[usize::from(seed) % POLICIES.len()], seed);
        let mut rng = Rng::with_seed(seed.into());
        let limits = random_limits(&mut rng);
        configure(&mut guard, &mut admission, &limits);
        let mut limiter = Limiter::new(admission.source_key());
        let mut expected = [ClassCounts::default(); MAX_CLASSES];
        for _ in 0..1500 {
            let frame = frame(&mut rng);
            let meta = PacketMeta::parse(Medium::Ethernet, &frame);
            let class = admission.classify(&meta);
            // Any time works, since the intervals are so long.
            let decision = limiter.decide(1 << 60, &limits, class, meta.source_id());
            let admitted = matches!(decision, LimitDecision::Admit { .. });
            assert_eq!(guard.try_frame(&frame).unwrap(), admitted, "{meta:?} {frame:x?}");
            count(&mut expected[class], decision);
        }
        over_share += expected.iter().map(|counts| counts.admitted_over_share).sum::<u64>();
        assert_eq!(guard.counts().unwrap(), expected);
    }
    assert!(over_share > 100, "{over_share} frames of sources above their share were admitted");
}

fn count(counts: &mut ClassCounts, decision: LimitDecision) {
    match decision {
        LimitDecision::Admit { over_share } => {
            counts.admitted += 1;
            counts.admitted_over_share += u64::from(over_share);
        }
        LimitDecision::Refuse(RefusalReason::ClassClosed) => counts.refused_closed += 1,
        LimitDecision::Refuse(RefusalReason::ClassRate) => counts.refused_rate += 1,
        LimitDecision::Refuse(RefusalReason::SourceShare) => counts.refused_source_share += 1,
    }
}

#[test]
fn guard_without_limits_admits_everything_and_records_sources() {
    let Some(mut guard) = guard() else { return };
    let mut rng = Rng::with_seed(1);
    let mut senders = Vec::new();
    for _ in 0..20 {
        let packet = ipv4(&mut rng);
        let source: [u8; 4] = packet[12..16].try_into().unwrap();
        let frame = [&[2; 12][..], &[8, 0], &packet].concat();
        if PacketMeta::parse(Medium::Ethernet, &frame).source.is_some() {
            senders.push(1 << 32 | u64::from(u32::from_be_bytes(source)));
        }
        assert!(guard.try_frame(&frame).unwrap());
    }
    let mut seen = Vec::new();
    guard.take_seen(|source| seen.push(source)).unwrap();
    assert!(!seen.is_empty() && seen.iter().all(|source| senders.contains(source)));
    guard.take_seen(|source| panic!("reported twice: {source}")).unwrap();
    assert_eq!(guard.counts().unwrap(), [ClassCounts::default(); MAX_CLASSES]);
}
