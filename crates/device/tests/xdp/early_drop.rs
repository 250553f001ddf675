//! Frames that admission refuses on the interface.

use super::*;

/// Class rules with a single class for all packets.
fn one_class() -> Classifier {
    Classifier {
        rules: vec![admission::ClassRule {
            class: 0,
            family: 0,
            known: 0,
            protocol: u16::MAX,
            port_low: 0,
            port_high: 1 << 16,
            size_low: 0,
            size_high: u32::MAX,
            source: 0,
            source_mask: 0,
            payload: [0; admission::PAYLOAD_WINDOW],
            payload_mask: [0; admission::PAYLOAD_WINDOW],
            payload_end: 0,
        }],
        default_class: 0,
        hash_seed: 1,
        hash_multiplier: 1,
    }
}

#[test]
fn refused_frames_are_dropped_on_the_interface() {
    if !can_create_namespaces() {
        return;
    }
    let pair = VethPair::new(1);
    let (mut near, mut far) = (arena(1024), arena(1024));
    let mut sender = open(&pair.right, Steering::default(), &mut far);
    let mut device = open(&pair.left, rules([udp(53)]), &mut near);
    device.early_drop().unwrap().set_classifier(&one_class()).unwrap();
    // An interval so long that the test is over before a second packet is due.
    let one_packet = RateLimit::Limited { interval_ns: 3_000_000_000_000, burst_ns: 0 };
    let closed = ClassLimit { class: RateLimit::Closed, source: RateLimit::Unlimited };
    let limited = ClassLimit { class: one_packet, source: RateLimit::Unlimited };
    let two = RateLimit::Limited { interval_ns: 3_000_000_000_000, burst_ns: 3_000_000_000_000 };
    let shared = ClassLimit { class: two, source: one_packet };
    let reasons = [
        DropReason::AdmissionClassClosed,
        DropReason::AdmissionRate,
        DropReason::AdmissionSourceShare,
    ];
    let expected = [[3, 0, 0], [3, 2, 0], [3, 2, 2]];
    let cases = [
        (closed, LEFT_ADDRESSES[0], 0),
        (limited, LEFT_ADDRESSES[1], 1),
        (shared, LEFT_ADDRESSES[0], 1),
    ];
    for ((limit, address, admitted), expected) in cases.into_iter().zip(expected) {
        let classes = [limit; MAX_CLASSES];
        let limits = Limits { total: RateLimit::Unlimited, classes };
        device.early_drop().unwrap().set_limits(Some(&limits)).unwrap();
        // A UDP port without a rule stays with the kernel, whatever the limits are.
        for to in [54, 53, 53, 53] {
            send_frame(&mut sender, &mut far, &frames::datagram(address, to, None));
        }
        let drops = |device: &mut XdpDevice| {
            let counters = device.counters();
            reasons.map(|reason| counters.drops.get(reason))
        };
        wait_until("the drops", || (drops(&mut device) == expected).then_some(()));
        let mut burst = Burst::new();
        wait_until("what was admitted", || {
            device.receive(&mut near, &mut burst, 64).unwrap();
            (burst.len() >= admitted).then_some(())
        });
        assert_eq!(burst.len(), admitted);
        burst.drain(..).for_each(|frame| near.free(frame));
    }
    // Without limits every frame is admitted, and none is examined or counted.
    device.early_drop().unwrap().set_limits(None).unwrap();
    for address in LEFT_ADDRESSES {
        let frame = frames::datagram(address, 53, None);
        send_frame(&mut sender, &mut far, &frame);
        receive_frame(&mut device, &mut near, "a datagram", |bytes| bytes == frame);
    }
    assert_eq!(device.counters().drops.total(), 7);
    device.close(&mut near);
    sender.close(&mut far);
}
