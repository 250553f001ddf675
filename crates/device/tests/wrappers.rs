//! The device wrappers: fault injection, tracing, capture, over an in-memory link.

use std::collections::BTreeMap;
use std::io;

use proptest::prelude::*;
use tidegate_device::capture::{Capture, CaptureConfig};
use tidegate_device::fault::{FaultConfig, FaultInjector, FaultRates, MAX_REORDER_DISTANCE};
use tidegate_device::mem::{MemConfig, MemDevice, wire};
use tidegate_device::pcap::Reader;
use tidegate_device::trace::Trace;
use tidegate_device::{Burst, Device, Medium};
use tidegate_memory::{Arena, ArenaConfig, Checksum, FrameSize};
use tidegate_wire::checksum::pseudo_header_v4;
use tidegate_wire::{DropReason, Ipv4Header, Protocol, UdpHeader, udp};

fn arena(frames: u32) -> Arena {
    Arena::new(ArenaConfig { frames, frame_size: FrameSize::K2, hugepages: false }).unwrap()
}

fn ip_wire() -> (MemDevice, MemDevice) {
    wire(&MemConfig::default().medium(Medium::Ip).capacity(512)).unwrap()
}

fn send(device: &mut impl Device, arena: &mut Arena, frames: impl IntoIterator<Item = Vec<u8>>) {
    let mut burst: Burst =
        frames.into_iter().map(|bytes| arena.alloc_from(&bytes).unwrap()).collect();
    while !burst.is_empty() {
        device.transmit(arena, &mut burst).unwrap();
    }
}

/// Receives until no frame is waiting: a wrapper may hold frames until a later call.
fn receive_all(device: &mut impl Device, arena: &mut Arena) -> Vec<Vec<u8>> {
    let mut frames = Vec::new();
    let mut burst = Burst::new();
    let mut idle = false;
    while !idle {
        let count = device.receive(arena, &mut burst, 16).unwrap();
        assert!(count <= 16 && count == burst.len());
        idle = count == 0 && device.prepare_sleep().unwrap();
        for frame in burst.drain(..) {
            frames.push(arena.bytes(&frame).to_vec());
            arena.free(frame);
        }
    }
    frames
}

fn numbered_frames(count: u32) -> impl Iterator<Item = Vec<u8>> {
    (0..count).map(|number| [&number.to_be_bytes()[..], &[0; 60]].concat())
}

fn numbers(frames: &[Vec<u8>]) -> Vec<u32> {
    frames.iter().map(|frame| u32::from_be_bytes(frame[..4].try_into().unwrap())).collect()
}

/// Sends `count` numbered frames from one end to the other. Returns the received frames and the
/// number of frames dropped by fault injection.
fn through_faults(config: FaultConfig, on_receive: bool, count: u32) -> (Vec<Vec<u8>>, u64) {
    let (near, far) = ip_wire();
    let mut arena = arena(512);
    let mut faulty = FaultInjector::new(near, config).unwrap();
    let mut clean = far;
    let frames = if on_receive {
        send(&mut clean, &mut arena, numbered_frames(count));
        receive_all(&mut faulty, &mut arena)
    } else {
        send(&mut faulty, &mut arena, numbered_frames(count));
        // Held frames leave with later calls.
        assert!(receive_all(&mut faulty, &mut arena).is_empty());
        receive_all(&mut clean, &mut arena)
    };
    let counters = faulty.counters();
    let lost = counters.drops.get(DropReason::FaultInjected);
    let passed = if on_receive { counters.received } else { counters.transmitted };
    assert_eq!(passed, frames.len() as u64);
    drop(faulty.into_inner(&mut arena));
    assert_eq!(arena.available(), arena.capacity(), "no frame was lost");
    (frames, lost)
}

fn both(faults: FaultRates, seed: u64) -> FaultConfig {
    FaultConfig::default().seed(seed).receive(faults).transmit(faults)
}

proptest! {
    #[test]
    fn faults_repeat_from_their_seed_and_account_for_each_frame(
        seed: u64,
        loss in 0.0..=1.0,
        duplication in 0.0..=1.0,
        reordering in 0.0..=1.0,
        corruption in 0.0..=1.0,
        on_receive: bool,
        count in 0u32..100,
    ) {
        let rates = FaultRates::default().loss(loss).duplication(duplication);
        let rates = rates.reordering(reordering).corruption(corruption);
        let config = both(rates, seed);
        let (frames, lost) = through_faults(config, on_receive, count);
        prop_assert_eq!(&through_faults(config, on_receive, count), &(frames.clone(), lost));
        // Every frame was received, was dropped by fault injection, or was received twice.
        let survivors = u64::from(count) - lost;
        let received = frames.len() as u64;
        prop_assert!(survivors <= received && received <= 2 * survivors);
    }

    #[test]
    fn no_faults_change_nothing(seed: u64, on_receive: bool, count in 0u32..100) {
        let (frames, lost) = through_faults(both(FaultRates::default(), seed), on_receive, count);
        prop_assert_eq!(numbers(&frames), (0..count).collect::<Vec<_>>());
        prop_assert_eq!(lost, 0);
    }

    #[test]
    fn reordering_alone_loses_nothing_and_is_bounded(seed: u64, on_receive: bool) {
        let faults = FaultRates::default().reordering(0.3);
        let (frames, _) = through_faults(both(faults, seed), on_receive, 200);
        let order = numbers(&frames);
        let mut sorted = order.clone();
        sorted.sort_unstable();
        prop_assert_eq!(sorted, (0..200).collect::<Vec<_>>());
        prop_assert_ne!(&order, &(0..200).collect::<Vec<_>>());
        for (position, &number) in order.iter().enumerate() {
            let overtaken_by = order[..position].iter().filter(|&&other| other > number).count();
            prop_assert!(overtaken_by <= MAX_REORDER_DISTANCE as usize, "{order:?}");
        }
    }
}

#[test]
fn each_fault_acts_alone() {
    for on_receive in [false, true] {
        let all = FaultRates::default().loss(1.0);
        assert_eq!(through_faults(both(all, 1), on_receive, 50), (Vec::new(), 50));

        let all = FaultRates::default().duplication(1.0);
        let (frames, lost) = through_faults(both(all, 1), on_receive, 50);
        assert_eq!(lost, 0);
        assert_eq!(numbers(&frames), (0..50).flat_map(|n| [n, n]).collect::<Vec<_>>());

        let all = FaultRates::default().corruption(1.0);
        let (frames, _) = through_faults(both(all, 1), on_receive, 50);
        let mut bits = BTreeMap::new();
        for (frame, sent) in frames.iter().zip(numbered_frames(50)) {
            let changed: Vec<_> =
                frame.iter().zip(&sent).enumerate().filter(|(_, (a, b))| a != b).collect();
            assert_eq!(changed.len(), 1, "one byte");
            let (at, (was, is)) = changed[0];
            assert_eq!((was ^ is).count_ones(), 1, "one bit");
            *bits.entry(at).or_insert(0) += 1;
        }
        assert!(bits.len() > 10, "not always the same position: {bits:?}");
    }
}

/// A UDP packet whose checksum field holds the sum of the pseudo-header.
fn unfilled_udp() -> Vec<u8> {
    let (from, to) = ("192.0.2.1".parse().unwrap(), "192.0.2.2".parse().unwrap());
    let mut packet = vec![0; 20 + 8 + 32];
    let datagram = Ipv4Header::new(from, to, Protocol::UDP, 40).unwrap().emit(&mut packet).unwrap();
    UdpHeader::new(4000, 53, 32).unwrap().emit(datagram).unwrap();
    let pseudo = pseudo_header_v4(from, to, Protocol::UDP, 40).fold();
    datagram[6..8].copy_from_slice(&pseudo.to_be_bytes());
    packet
}

#[test]
fn receiver_detects_corruption_under_partial_checksum() {
    // Only the corrupted bit makes the datagram invalid.
    let faults = FaultRates::default().corruption(1.0);
    let (near, mut far) = ip_wire();
    let mut arena = arena(64);
    let mut near = FaultInjector::new(near, both(faults, 3)).unwrap();
    let mut refused = 0;
    for _ in 0..40 {
        let mut burst = Burst::from_iter(arena.alloc_from(&unfilled_udp()));
        burst[0].set_checksum(Checksum::Partial { start: 20, offset: 6 });
        near.transmit(&mut arena, &mut burst).unwrap();
        far.receive(&mut arena, &mut burst, 8).unwrap();
        let frame = burst.pop_front().unwrap();
        assert_eq!(frame.checksum(), Checksum::Unknown);
        let right = Ipv4Header::parse(arena.bytes(&frame)).is_ok_and(|(ip, datagram)| {
            ip.source.octets() == [192, 0, 2, 1]
                && ip.destination.octets() == [192, 0, 2, 2]
                && UdpHeader::parse(datagram).is_ok()
                && udp::verify_v4(ip.source, ip.destination, datagram).is_ok()
        });
        refused += u32::from(!right);
        arena.free(frame);
    }
    assert_eq!(refused, 40);
}

#[test]
fn rejects_probabilities_outside_zero_to_one() {
    for wrong in [-0.1, 1.1, f64::NAN] {
        let faults = FaultRates::default().reordering(wrong);
        for config in
            [FaultConfig::default().receive(faults), FaultConfig::default().transmit(faults)]
        {
            let error = FaultInjector::new(ip_wire().0, config).err().unwrap();
            assert!(error.to_string().contains("reordering"), "{error}");
        }
    }
}

#[test]
fn held_frames_prevent_sleep_and_are_released() {
    let faults = FaultRates::default().reordering(1.0);
    let (near, mut far) = ip_wire();
    let mut arena = arena(8);
    let mut near = FaultInjector::new(near, both(faults, 9)).unwrap();
    send(&mut near, &mut arena, numbered_frames(1));
    send(&mut far, &mut arena, numbered_frames(1));
    assert!(!near.prepare_sleep().unwrap());
    assert_eq!(receive_all(&mut near, &mut arena).len(), 1);
    assert_eq!(receive_all(&mut far, &mut arena).len(), 1);
    assert!(near.prepare_sleep().unwrap());
}

#[test]
fn trace_has_a_line_for_every_frame() {
    let (near, mut far) = ip_wire();
    let mut arena = arena(16);
    let mut near = Trace::new(near, Vec::new());
    send(&mut near, &mut arena, [unfilled_udp()]);
    assert_eq!(receive_all(&mut far, &mut arena).len(), 1);
    send(&mut far, &mut arena, [vec![0x45; 3], vec![0x60; 8], vec![]]);
    assert_eq!(receive_all(&mut near, &mut arena).len(), 3);
    let (_, lines) = near.into_parts();
    assert_eq!(
        String::from_utf8(lines.unwrap()).unwrap(),
        "> 60 192.0.2.1 4000 > 192.0.2.2 53 UDP 32\n\
         < 3 refused: ipv4_truncated\n\
         < 8 refused: ipv6_truncated\n\
         < 0 not an IP packet\n"
    );
}

/// Writer that fails after a number of bytes, like a full disk.
struct FullDisk(usize);

impl io::Write for FullDisk {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let Some(space) = self.0.checked_sub(bytes.len()) else {
            return Err(io::ErrorKind::StorageFull.into());
        };
        self.0 = space;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn full_disk_does_not_stop_the_device() {
    let (near, mut far) = ip_wire();
    let mut arena = arena(16);
    let near = Trace::new(near, FullDisk(10));
    let mut near = Capture::new(near, FullDisk(200), CaptureConfig::default()).unwrap();
    send(&mut near, &mut arena, numbered_frames(5));
    assert_eq!(receive_all(&mut far, &mut arena).len(), 5);
    assert_eq!((near.recorded(), near.omitted()), (2, 3));
    let (near, file) = near.into_parts();
    assert_eq!(file.err().unwrap().kind(), io::ErrorKind::StorageFull);
    assert_eq!(near.into_parts().1.err().unwrap().kind(), io::ErrorKind::StorageFull);
}

#[test]
fn capture_records_both_directions() {
    let (near, mut far) = ip_wire();
    let mut arena = arena(64);
    let config =
        CaptureConfig::default().snap_bytes(20).limit_bytes(24 + 3 * 36).clock(|| 1_000_000_007);
    let mut near = Capture::new(near, Vec::new(), config).unwrap();
    send(&mut near, &mut arena, numbered_frames(2));
    assert_eq!(receive_all(&mut far, &mut arena).len(), 2);
    send(&mut far, &mut arena, [vec![9; 30], vec![8; 30]]);
    assert_eq!(receive_all(&mut near, &mut arena).len(), 2);
    assert_eq!((near.recorded(), near.omitted()), (3, 1));
    let (_, file) = near.into_parts();
    let file = file.unwrap();
    assert!(file.len() as u64 <= config.limit_bytes);
    let mut reader = Reader::new(&file[..]).unwrap();
    assert_eq!(reader.medium(), Medium::Ip);
    for (data, original_bytes) in [
        (numbered_frames(2).next().unwrap()[..20].to_vec(), 64),
        (numbered_frames(2).nth(1).unwrap()[..20].to_vec(), 64),
        (vec![9; 20], 30),
    ] {
        let record = reader.next_record().unwrap().unwrap();
        assert_eq!(
            (record.time_ns, record.data, record.original_bytes),
            (1_000_000_007, &data[..], original_bytes)
        );
    }
    assert!(reader.next_record().unwrap().is_none());
}

#[test]
fn untransmitted_frames_are_not_recorded() {
    let (near, _far) = wire(&MemConfig::default().medium(Medium::Ip).capacity(4)).unwrap();
    let mut arena = arena(64);
    let capture = Capture::new(near, Vec::new(), CaptureConfig::default()).unwrap();
    let mut device = Trace::new(capture, Vec::new());
    let mut burst: Burst =
        numbered_frames(10).map(|bytes| arena.alloc_from(&bytes).unwrap()).collect();
    assert_eq!(device.transmit(&mut arena, &mut burst).unwrap(), 4);
    assert_eq!(burst.len(), 6);
    let (capture, lines) = device.into_parts();
    assert_eq!(capture.recorded(), 4);
    assert_eq!(lines.unwrap().iter().filter(|&&byte| byte == b'\n').count(), 4);
    for frame in burst.drain(..) {
        arena.free(frame);
    }
}
