//! The dpdk port on virtual devices that need nothing of the system.

#![cfg(feature = "dpdk")]

use tidegate_memory::{Arena, ArenaConfig, FrameSize};
use tidegate_port::dpdk::{DpdkConfig, DpdkError, open};
use tidegate_port::{Burst, Port};
use tidegate_wire::DropReason;

fn arena(frames: u32) -> Arena {
    Arena::new(ArenaConfig { frames, frame_size: FrameSize::K2, hugepages: false }).unwrap()
}

fn device(text: &str) -> DpdkConfig {
    let Ok(config) = text.parse();
    config
}

fn refused(text: &str) -> DpdkError {
    open(&device(text), &arena(8)).err().expect(text)
}

/// A frame of `len` bytes with its number in front.
fn frame(number: usize, len: usize) -> Vec<u8> {
    let number = (number as u32).to_be_bytes();
    number.into_iter().chain((4..len).map(|at| (at * 7 + len) as u8)).collect()
}

/// A ring is a wire whose end is its beginning.
#[test]
fn frames_go_round_a_ring_whole_and_in_order() {
    let mut arena = arena(1024);
    let mut port = open(&device("net_ring_whole"), &arena).unwrap();
    assert_eq!(port.capabilities().kind, "dpdk");
    assert_eq!(port.capabilities().mtu, 1500);
    let lengths = [60, 61, 64, 127, 128, 500, 1514];
    let sent: Vec<_> = (0..300).map(|at| frame(at, lengths[at % lengths.len()])).collect();
    let mut out: Burst = sent.iter().map(|bytes| arena.alloc_from(bytes).unwrap()).collect();
    let (mut back, mut burst) = (Vec::new(), Burst::new());
    while back.len() < sent.len() {
        port.transmit(&mut arena, &mut out).unwrap();
        // An odd quota: the rest of what the device gave waits in the port.
        assert!(port.receive(&mut arena, &mut burst, 7).unwrap() <= 7);
        while let Some(frame) = burst.pop_front() {
            back.push(arena.bytes(&frame).to_vec());
            arena.free(frame);
        }
    }
    assert_eq!(back, sent);
    assert_eq!(arena.available(), arena.capacity(), "no frame was lost");
    let counters = port.counters();
    assert_eq!((counters.received, counters.transmitted), (300, 300));
    assert_eq!(counters.received_bytes, counters.transmitted_bytes);
    assert_eq!(counters.drops.total(), 0);
}

#[test]
fn frames_without_a_buffer_wait_and_long_ones_are_dropped() {
    let (mut large, mut small) = (
        Arena::new(ArenaConfig { frames: 8, frame_size: FrameSize::K4, hugepages: false }).unwrap(),
        arena(2),
    );
    let mut port = open(&device("net_ring_long"), &large).unwrap();
    let lengths = [3000, 60, 61, 62];
    let mut out: Burst =
        lengths.iter().map(|&len| large.alloc_from(&frame(0, len)).unwrap()).collect();
    assert_eq!(port.transmit(&mut large, &mut out).unwrap(), 4);
    // Handed over with the next look.
    port.transmit(&mut large, &mut out).unwrap();
    let mut burst = Burst::new();
    assert_eq!(port.receive(&mut small, &mut burst, 64).unwrap(), 2);
    assert_eq!(port.receive(&mut small, &mut burst, 64).unwrap(), 0, "no buffer is free");
    burst.drain(..).for_each(|frame| small.free(frame));
    assert_eq!(port.receive(&mut small, &mut burst, 64).unwrap(), 1);
    assert_eq!(burst[0].len(), 62);
    burst.drain(..).for_each(|frame| small.free(frame));
    assert_eq!(port.counters().drops.get(DropReason::FrameTooLong), 1);
}

#[test]
fn a_device_can_be_had_again_after_its_port_is_dropped() {
    let arena = arena(8);
    for _ in 0..3 {
        let port = open(&device("net_null_again"), &arena).unwrap();
        assert!(matches!(refused("net_null_again"), DpdkError::Busy { .. }));
        drop(port);
    }
}

#[test]
fn a_sleeper_is_woken() {
    let arena = arena(8);
    let mut port = open(&device("net_ring_sleep"), &arena).unwrap();
    assert!(port.prepare_sleep().unwrap());
    let wake = port.wake_fd().unwrap();
    let mut events = [rustix::event::PollFd::new(&wake, rustix::event::PollFlags::IN)];
    assert_eq!(rustix::event::poll(&mut events, None).unwrap(), 1, "by the timer");
}

#[test]
fn what_is_wrong_is_told_with_the_next_step() {
    let error = |text: &str| refused(text).to_string();
    assert!(error("").contains("dpdk-devbind.py --status"));
    assert!(error("net_nonsense0").contains("begins with the name of its driver"));
    assert!(error("0000:ff:1f.7").contains("--bind=vfio-pci 0000:ff:1f.7"));
    assert!(error("net_af_packet_x,iface=nope0").contains("No such device"));
    let no_server = refused("net_memif_x,id=9,socket=tidegate-nobody");
    assert!(matches!(no_server, DpdkError::NoServer { .. }), "{no_server}");
    let other = refused("net_null_y --log-level=debug");
    assert!(matches!(other, DpdkError::Started), "{other}");
}
