//! The dpdk port on virtual devices: those that need nothing of the system, and
//! a TAP device with the kernel at its other end.

#![cfg(feature = "dpdk")]

mod sandbox;

use std::collections::HashSet;
use std::io::Read;
use std::net::{Ipv4Addr, Ipv6Addr, UdpSocket};
use std::num::NonZeroU16;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use proptest::prelude::*;
use sandbox::{
    KERNEL_V4, KERNEL_V6, PATIENCE, PORT_V4, PORT_V6, arena, enter_namespace, has_tun, ip,
    is_udp_to, veth, wait_for_kernel_address,
};
use tempfile::TempDir;
use tidegate_memory::{Arena, ArenaConfig, Checksum, FrameSize};
use tidegate_port::dpdk::{DpdkConfig, DpdkError, open};
use tidegate_port::netlink::Monitor;
use tidegate_port::packet::{PacketConfig, PacketPort};
use tidegate_port::{Burst, Port};
use tidegate_wire::{DropReason, MacAddr, Sum};

fn device(text: &str) -> DpdkConfig {
    let Ok(config) = text.parse();
    config
}

fn refused(text: &str) -> DpdkError {
    open(&device(text), &mut arena(8)).err().expect(text)
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
    let mut port = open(&device("net_ring_whole"), &mut arena).unwrap();
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
    let counters = port.counters();
    assert_eq!((counters.received, counters.transmitted), (300, 300));
    assert_eq!(counters.received_bytes, counters.transmitted_bytes);
    assert_eq!(counters.drops.total(), 0);
    port.close_for_now(&mut arena, false);
    assert_eq!(arena.available(), arena.capacity(), "no frame was lost");
}

/// The frame that is received is the one that was sent, not a copy of it.
#[test]
fn nothing_is_copied() {
    let mut arena = arena(64);
    let mut port = open(&device("net_ring_same"), &mut arena).unwrap();
    let frame = arena.alloc_from(&frame(1, 100)).unwrap();
    let place = arena.bytes(&frame).as_ptr();
    let mut burst = Burst::new();
    burst.push_back(frame);
    assert_eq!(port.transmit(&mut arena, &mut burst).unwrap(), 1);
    assert_eq!(port.receive(&mut arena, &mut burst, 64).unwrap(), 1);
    assert_eq!(arena.bytes(&burst[0]).as_ptr(), place);
    burst.drain(..).for_each(|frame| arena.free(frame));
    port.close_for_now(&mut arena, false);
    assert_eq!(arena.available(), arena.capacity());
}

#[test]
fn a_frame_that_no_buffer_holds_is_dropped() {
    let _alone = memifs();
    let (_folder, [ours, theirs]) = memif(60);
    let config = ArenaConfig { frames: 8, frame_size: FrameSize::K4, hugepages: false };
    let mut from = End::open_on(&ours, Arena::new(config).unwrap());
    let mut to = End::open(&theirs, 96);
    wait_until_up(&mut [&mut from, &mut to]);
    let mut out = Burst::new();
    out.push_back(from.arena.alloc_from(&frame(0, 3000)).unwrap());
    out.push_back(from.arena.alloc_from(&frame(1, 61)).unwrap());
    let (began, mut seen) = (Instant::now(), HashSet::new());
    while seen.is_empty() {
        assert!(began.elapsed() < PATIENCE, "nothing came");
        from.port.transmit(&mut from.arena, &mut out).unwrap();
        to.receive(64, &mut seen);
    }
    assert_eq!(to.port.counters().drops.get(DropReason::FrameTooLong), 1);
    to.close();
    from.close();
}

#[test]
fn another_arena_than_its_own_is_refused() {
    let (mut own, mut other) = (arena(8), arena(8));
    let mut port = open(&device("net_ring_own"), &mut own).unwrap();
    let mut burst = Burst::new();
    burst.push_back(other.alloc_from(&frame(0, 60)).unwrap());
    assert!(port.transmit(&mut other, &mut burst).is_err());
    assert!(port.receive(&mut other, &mut burst, 64).is_err());
    assert_eq!(burst.len(), 1);
    burst.drain(..).for_each(|frame| other.free(frame));
}

#[test]
fn an_arena_may_end_before_its_port() {
    let mut arena = arena(64);
    let mut port = open(&device("net_ring_after"), &mut arena).unwrap();
    let mut burst: Burst = (0..9).map(|at| arena.alloc_from(&frame(at, 60)).unwrap()).collect();
    assert_eq!(port.transmit(&mut arena, &mut burst).unwrap(), 9);
    drop(arena);
    assert!(!port.prepare_sleep().unwrap(), "frames wait");
}

/// As a router has it.
#[test]
fn two_ports_live_in_one_arena() {
    let mut arena = arena(256);
    let mut left = open(&device("net_ring_left"), &mut arena).unwrap();
    let mut right = open(&device("net_ring_right"), &mut arena).unwrap();
    let mut burst: Burst = (0..20).map(|at| arena.alloc_from(&frame(at, 60)).unwrap()).collect();
    for _ in 0..10 {
        for port in [&mut left, &mut right] {
            assert_eq!(port.transmit(&mut arena, &mut burst).unwrap(), 20);
            assert_eq!(port.receive(&mut arena, &mut burst, 64).unwrap(), 20);
        }
    }
    for (at, held) in burst.iter().enumerate() {
        assert_eq!(arena.bytes(held), frame(at, 60));
    }
    left.close_for_now(&mut arena, false);
    assert_eq!(right.transmit(&mut arena, &mut burst).unwrap(), 20);
    assert_eq!(right.receive(&mut arena, &mut burst, 64).unwrap(), 20);
    burst.drain(..).for_each(|frame| arena.free(frame));
    right.close_for_now(&mut arena, false);
    assert_eq!(arena.available(), arena.capacity());
}

#[test]
fn a_device_can_be_had_again_on_the_same_arena() {
    let mut arena = arena(64);
    for _ in 0..3 {
        let mut port = open(&device("net_ring_again"), &mut arena).unwrap();
        assert!(matches!(refused("net_ring_again"), DpdkError::Busy { .. }));
        let mut burst: Burst = (0..9).map(|at| arena.alloc_from(&frame(at, 60)).unwrap()).collect();
        assert_eq!(port.transmit(&mut arena, &mut burst).unwrap(), 9);
        // With frames inside, of which some are with the port already.
        assert_eq!(port.receive(&mut arena, &mut burst, 1).unwrap(), 1);
        burst.drain(..).for_each(|frame| arena.free(frame));
        port.close_for_now(&mut arena, false);
        assert_eq!(arena.available(), arena.capacity());
    }
}

/// One end of a wire, with what it needs to be judged.
struct End {
    arena: Arena,
    port: Box<dyn Port>,
    held: Burst,
}

impl End {
    fn open(text: &str, frames: u32) -> Self {
        Self::open_on(text, arena(frames))
    }

    fn open_on(text: &str, mut arena: Arena) -> Self {
        let port = open(&device(text), &mut arena).unwrap();
        Self { arena, port, held: Burst::new() }
    }

    fn is_up(&mut self) -> bool {
        self.port.counters();
        self.port.capabilities().detail.contains("link up")
    }

    /// Sends up to `count` new frames, numbered from `next` on; returns how many
    /// were sent.
    fn send(&mut self, next: usize, count: usize) -> usize {
        let numbers = next..next + count;
        let mut out: Burst = numbers
            .map_while(|number| self.arena.alloc_from(&frame(number, 60 + number % 1400)))
            .collect();
        let sent = self.port.transmit(&mut self.arena, &mut out).unwrap();
        out.drain(..).for_each(|frame| self.arena.free(frame));
        sent
    }

    /// Receives frames, looks at each, and holds on to them.
    fn receive(&mut self, quota: usize, seen: &mut HashSet<usize>) {
        let before = self.held.len();
        let count = self.port.receive(&mut self.arena, &mut self.held, quota).unwrap();
        assert!(count <= quota && self.held.len() == before + count);
        for held in self.held.iter().skip(before) {
            let bytes = self.arena.bytes(held);
            let number = u32::from_be_bytes(*bytes.first_chunk().unwrap()) as usize;
            assert_eq!(bytes, frame(number, 60 + number % 1400));
            assert!(seen.insert(number), "frame {number} came twice");
        }
    }

    fn free(&mut self, count: usize) {
        let count = count.min(self.held.len());
        self.held.drain(..count).for_each(|frame| self.arena.free(frame));
    }

    fn close(mut self) {
        self.port.close_for_now(&mut self.arena, false);
        let held = self.held.len();
        assert_eq!(self.arena.available() + held, self.arena.capacity(), "{held} are held");
        self.held.drain(..).for_each(|frame| self.arena.free(frame));
    }
}

/// Held by tests with memifs. Where memifs of several threads come and go at once
/// their driver can wait for a message on a descriptor that was another one's.
fn memifs() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Both ends of a memif, by number.
fn memif(number: u32) -> (TempDir, [String; 2]) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("memif").display().to_string();
    let end = |letter, role| {
        let name = format!("net_memif{number}{letter}");
        format!("{name},role={role},id=0,socket-abstract=no,socket={path}")
    };
    (folder, [end('a', "server"), end('b', "client")])
}

/// Another process, which has a device and sends back what comes. It is killed on
/// drop.
struct Echo(Child);

/// Where the other process finds the device's name.
const ECHO_DEVICE: &str = "TIDEGATE_TEST_ECHO";

impl Echo {
    fn start_on(device: &str) -> Self {
        let process = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "echo"])
            .env(ECHO_DEVICE, device)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        Self(process)
    }

    /// Starts one with a vhost-user device at this path.
    fn start_at(path: &Path) -> Self {
        let mut echo = Self::start_on(&format!("net_vhost0,iface={},queues=1", path.display()));
        let began = Instant::now();
        while !path.exists() {
            assert!(began.elapsed() < PATIENCE, "the other process does not start");
            assert!(echo.0.try_wait().unwrap().is_none(), "the other process has ended");
        }
        echo
    }
}

impl Drop for Echo {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Sends back what comes. Does something only as a process that [`Echo`] has started.
#[test]
fn echo() {
    let Ok(text) = std::env::var(ECHO_DEVICE) else { return };
    // It must not outlive who has started it.
    std::thread::spawn(|| {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        std::process::exit(0);
    });
    let mut end = End::open(&text, 96);
    loop {
        end.port.receive(&mut end.arena, &mut end.held, 64).unwrap();
        end.port.transmit(&mut end.arena, &mut end.held).unwrap();
    }
}

fn wait_until_up(ends: &mut [&mut End]) {
    let began = Instant::now();
    while !ends.iter_mut().all(|end| end.is_up()) {
        let about = |end: &mut &mut End| end.port.capabilities().detail.clone();
        let details: Vec<_> = ends.iter_mut().map(about).collect();
        assert!(began.elapsed() < PATIENCE, "a link stays down: {details:?}");
    }
}

fn receive_until(end: &mut End, count: usize, seen: &mut HashSet<usize>) {
    let began = Instant::now();
    while seen.len() < count {
        assert!(began.elapsed() < PATIENCE, "{} of {count} frames came", seen.len());
        end.receive(64, seen);
    }
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Send(usize),
    Receive(usize),
    Free(usize),
}

/// Steps at either end.
fn steps() -> impl Strategy<Value = Vec<(bool, Step)>> {
    let step = prop_oneof![
        (1..80usize).prop_map(Step::Send),
        (1..100usize).prop_map(Step::Receive),
        (1..100usize).prop_map(Step::Free),
    ];
    proptest::collection::vec((any::<bool>(), step), 1..60)
}

/// Does the steps; what was sent has to arrive once, or be there when the ends
/// are closed.
fn every_frame_is_accounted_for<const N: usize>(
    mut ends: [End; N],
    steps: &[(bool, Step)],
    all_arrive: bool,
) {
    wait_until_up(&mut ends.each_mut());
    let (mut sent, mut seen) = (0, HashSet::new());
    for &(first, step) in steps {
        let end = &mut ends[usize::from(first) % N];
        match step {
            Step::Send(count) => sent += end.send(sent, count),
            Step::Receive(quota) => end.receive(quota, &mut seen),
            Step::Free(count) => end.free(count),
        }
    }
    let began = Instant::now();
    while all_arrive && seen.len() < sent {
        assert!(began.elapsed() < PATIENCE, "{} of {sent} frames came", seen.len());
        for end in &mut ends {
            end.free(usize::MAX);
            end.receive(64, &mut seen);
        }
    }
    ends.into_iter().rev().for_each(End::close);
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 24,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn no_frame_is_lost_or_doubled_on_a_ring(steps in steps(), all_arrive: bool) {
        every_frame_is_accounted_for([End::open("net_ring_any", 96)], &steps, all_arrive);
    }

    #[test]
    fn no_frame_is_lost_or_doubled_on_a_memif(steps in steps(), all_arrive: bool) {
        let _alone = memifs();
        let (_folder, ends) = memif(70);
        every_frame_is_accounted_for(ends.map(|end| End::open(&end, 96)), &steps, all_arrive);
    }

    /// It makes frames without end, and drops what it is sent.
    #[test]
    fn no_frame_is_lost_on_a_device_without_a_wire(steps in steps()) {
        let mut end = End::open("net_null_endless,size=60", 96);
        for &(_, step) in &steps {
            match step {
                Step::Send(count) => _ = end.send(0, count),
                Step::Receive(quota) => {
                    let free = end.arena.available();
                    let port = &mut end.port;
                    let count = port.receive(&mut end.arena, &mut end.held, quota).unwrap();
                    prop_assert!(count > 0 || free == 0, "{} are free", free);
                }
                Step::Free(count) => end.free(count),
            }
        }
        end.close();
    }
}

/// The rings lie in memory that is unmapped when the other side has ended.
#[test]
fn a_memif_peer_may_die_while_its_frames_are_looked_at() {
    let _alone = memifs();
    let (_folder, [server, client]) = memif(71);
    let mut end = End::open(&server, 96);
    for round in 0..6 {
        let mut peer = Some(Echo::start_on(&client));
        wait_until_up(&mut [&mut end]);
        let (began, mut sent, mut seen) = (Instant::now(), 0, HashSet::new());
        while end.is_up() {
            assert!(began.elapsed() < PATIENCE, "{} frames in round {round}", seen.len());
            for _ in 0..100 {
                sent += end.send(sent, 20);
                end.receive(64, &mut seen);
                end.free(usize::MAX);
            }
            if seen.len() > 1000 {
                // With frames on their way, at whatever it just does.
                drop(peer.take());
            }
        }
    }
    end.close();
}

/// A virtio device wants its buffers in memory that it can show to the other
/// side, so frames are copied, when there is a buffer for them.
#[test]
fn no_frame_is_lost_or_doubled_when_frames_are_copied() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("v");
    let _echo = Echo::start_at(&path);
    // One whose frames lie in an arena does not hinder it.
    let other = End::open("net_ring_beside", 8);
    let mut end = End::open(&format!("net_virtio_user0,path={}", path.display()), 40);
    assert!(end.port.capabilities().detail.contains(", copy"));
    let mut seen = HashSet::new();
    let mut sent = end.send(0, 30);
    sent += end.send(sent, 30);
    assert_eq!(sent, 60);
    receive_until(&mut end, 40, &mut seen);
    end.receive(64, &mut seen);
    assert_eq!((seen.len(), end.arena.available()), (40, 0), "the others wait for a buffer");
    end.free(40);
    receive_until(&mut end, 60, &mut seen);
    end.free(20);
    let mut random = fastrand::Rng::with_seed(7);
    for _ in 0..500 {
        match random.u8(..3) {
            0 => sent += end.send(sent, random.usize(1..40)),
            1 => end.receive(random.usize(1..40), &mut seen),
            _ => end.free(random.usize(1..20)),
        }
    }
    let began = Instant::now();
    while seen.len() < sent {
        assert!(began.elapsed() < PATIENCE, "{} of {sent} frames came back", seen.len());
        end.free(usize::MAX);
        end.receive(64, &mut seen);
    }
    end.close();
    other.close();
}

/// What the device counts by this name; 0 if it does not.
fn counted(port: &mut dyn Port, name: &str) -> u64 {
    let counters = port.counters();
    counters.device.iter().find(|one| &*one.0 == name).map_or(0, |one| one.1)
}

/// Short frames are "undersize" to virtio, which delivers them.
#[test]
fn what_a_device_counts_is_told_and_is_no_loss() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("v");
    let _echo = Echo::start_at(&path);
    let mut end = End::open(&format!("net_virtio_user1,path={}", path.display()), 40);
    wait_until_up(&mut [&mut end]);
    assert_eq!(counted(&mut *end.port, "rx_q0_undersize_packets"), 0);
    let (mut seen, sent) = (HashSet::new(), end.send(0, 10));
    receive_until(&mut end, sent, &mut seen);
    let short = (0..sent).filter(|number| 60 + number % 1400 < 64).count() as u64;
    assert_eq!(counted(&mut *end.port, "rx_q0_undersize_packets"), short);
    assert_eq!(counted(&mut *end.port, "rx_good_packets"), sent as u64);
    assert_eq!(end.port.counters().drops.total(), 0);
    end.free(usize::MAX);
    end.close();
}

/// A TAP device gives what fits into a buffer, and its driver takes that for an error.
#[test]
fn frames_with_errors_are_in_the_table() {
    if !enter_namespace() || !has_tun() {
        return;
    }
    let mut monitor = Monitor::open().unwrap();
    let mut end = End::open("net_tap_errors,iface=tgerrors", 96);
    ip("link set tgerrors mtu 9000");
    ip(&format!("address add {KERNEL_V4}/24 dev tgerrors"));
    ip(&format!("address add {KERNEL_V6}/64 dev tgerrors nodad"));
    wait_for_kernel_address(&mut monitor);
    let mac = MacAddr(end.port.capabilities().mac);
    for (turn, (kernel, address)) in
        [(KERNEL_V4, PORT_V4), (KERNEL_V6, PORT_V6)].into_iter().enumerate()
    {
        ip(&format!("neigh add {address} lladdr {mac} dev tgerrors"));
        let socket = UdpSocket::bind((kernel, 0)).unwrap();
        socket.send_to(&[9; 8000], (address, 7)).unwrap();
        // Behind it comes one that fits.
        socket.send_to(&[9; 1400], (address, 7)).unwrap();
        let is_ours = |bytes: &[u8]| is_udp_to(bytes, true, 7) && bytes.ends_with(&[9; 1400]);
        let began = Instant::now();
        while !end.held.iter().any(|frame| is_ours(end.arena.bytes(frame))) {
            assert!(began.elapsed() < PATIENCE, "nothing came to {address}");
            end.port.receive(&mut end.arena, &mut end.held, 64).unwrap();
        }
        end.free(usize::MAX);
        let lost = turn as u64 + 1;
        let drops = end.port.counters().drops;
        assert_eq!(drops.get(DropReason::PortFrameDamaged), lost, "{drops:?}");
        assert_eq!(drops.total(), lost, "{drops:?}");
        assert_eq!(counted(&mut *end.port, "rx_errors"), lost);
    }
    end.close();
}

const SEGMENT_BYTES: usize = 1400;

/// A TCP segment with so much data for the kernel, and where its TCP header is. Sums are
/// left to the device.
fn segment(is_v6: bool, data: &[u8]) -> (Vec<u8>, usize) {
    let mut frame = vec![2; 12];
    let tcp_bytes = 32;
    let bytes = (tcp_bytes + data.len()) as u16;
    if is_v6 {
        frame.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
        frame.extend(bytes.to_be_bytes());
        frame.extend([6, 64]);
        for address in [PORT_V6, KERNEL_V6] {
            frame.extend(address.parse::<Ipv6Addr>().unwrap().octets());
        }
    } else {
        frame.extend([0x08, 0x00, 0x45, 0]);
        frame.extend((bytes + 20).to_be_bytes());
        frame.extend([0, 0, 0x40, 0, 64, 6, 0, 0]);
        for address in [PORT_V4, KERNEL_V4] {
            frame.extend(address.parse::<Ipv4Addr>().unwrap().octets());
        }
    }
    let start = frame.len();
    // From port 7 to port 8, number 1,000, with twelve bytes of options and a push.
    frame.extend([0, 7, 0, 8, 0, 0, 3, 0xe8, 0, 0, 0, 0, 8 << 4, 0x18, 1, 0, 0, 0, 0, 0]);
    frame.extend([1; 12]);
    frame.extend(data);
    (frame, start)
}

/// The number, the flags and the data of a segment of [`segment`]'s; `None` of any other
/// frame. Its sums must be right.
fn read_segment(bytes: &[u8]) -> Option<(usize, u8, Vec<u8>)> {
    let is_v6 = bytes.get(12..14)? == [0x86, 0xdd];
    let start = 14 + if is_v6 { 40 } else { 20 };
    let (protocol, tcp) = (*bytes.get(if is_v6 { 20 } else { 23 })?, bytes.get(start..)?);
    if protocol != 6 || tcp.get(..4)? != [0, 7, 0, 8] {
        return None;
    }
    let addresses = if is_v6 { 22..54 } else { 26..34 };
    let length = (tcp.len() as u32).to_be_bytes();
    let sum = Sum::of(&bytes[addresses]).with(&[0, 6]).with(&length).with(tcp);
    assert!(sum.is_valid(), "the checksum of TCP");
    assert!(is_v6 || Sum::of(&bytes[14..start]).is_valid(), "the checksum of IPv4");
    let number = u32::from_be_bytes(tcp[4..8].try_into().unwrap()) as usize - 1000;
    assert_eq!(tcp[20..32], [1; 12]);
    Some((number, tcp[13], tcp[32..].to_vec()))
}

/// Of `net_tap` the kernel is told what to cut on IPv6, too, but its driver does not:
/// there the kernel gets all in one.
#[test]
fn a_device_cuts_what_is_in_several_pieces() {
    if !enter_namespace() || !has_tun() {
        return;
    }
    let large = || {
        let config = ArenaConfig { frames: 64, frame_size: FrameSize::K64, hugepages: false };
        Arena::new(config).unwrap()
    };
    let mut arena = large();
    let config = DpdkConfig { segmentation: true, ..device("net_tap_cut,iface=tgcut") };
    let port = open(&config, &mut arena).unwrap();
    assert!(port.capabilities().segmentation);
    let mut end = End { arena, port, held: Burst::new() };
    let mut kernel_arena = large();
    let mut kernel = PacketPort::open(&PacketConfig::new("tgcut"), &mut kernel_arena).unwrap();
    for is_v6 in [false, true] {
        for data_bytes in [SEGMENT_BYTES + 1, 10 * SEGMENT_BYTES, 42 * SEGMENT_BYTES + 600] {
            let data: Vec<u8> = (0..data_bytes).map(|at| (at % 251) as u8).collect();
            let (bytes, start) = segment(is_v6, &data);
            // Of that length every frame takes several pieces more than once.
            for _ in 0..20 {
                let mut frame = end.arena.alloc_from(&bytes).unwrap();
                frame.set_checksum(Checksum::Partial { start: start as u16, offset: 16 });
                frame.set_segment_bytes(SEGMENT_BYTES as u16);
                let mut out = Burst::new();
                out.push_back(frame);
                while !out.is_empty() {
                    end.port.transmit(&mut end.arena, &mut out).unwrap();
                }
                let (began, mut came, mut frames) = (Instant::now(), 0, 0);
                let mut burst = Burst::new();
                while came < data.len() {
                    assert!(began.elapsed() < PATIENCE, "{came} of {data_bytes} bytes came");
                    kernel.receive(&mut kernel_arena, &mut burst, 64).unwrap();
                    while let Some(frame) = burst.pop_front() {
                        let bytes = kernel_arena.bytes(&frame);
                        if let Some((number, flags, part)) = read_segment(bytes) {
                            assert_eq!(number, came);
                            assert!(part == data[came..came + part.len()]);
                            came += part.len();
                            frames += 1;
                            assert_eq!(flags & 0x08 != 0, came == data.len(), "the push is last");
                        }
                        kernel_arena.free(frame);
                    }
                }
                let cut = if is_v6 { 1 } else { data_bytes.div_ceil(SEGMENT_BYTES) };
                assert_eq!(frames, cut, "{data_bytes} bytes");
            }
        }
    }
    end.close();
}

/// Nobody has to ask what a device can do before asking for it.
#[test]
fn a_device_that_cannot_cut_is_given_whole_frames() {
    let open_on = |frame_size| {
        let config = ArenaConfig { frames: 64, frame_size, hugepages: false };
        let mut arena = Arena::new(config).unwrap();
        let config = DpdkConfig { segmentation: true, ..device("net_ring_uncut") };
        open(&config, &mut arena).map(|port| port.capabilities().segmentation)
    };
    assert!(!open_on(FrameSize::K64).unwrap());
    assert!(matches!(open_on(FrameSize::K4), Err(DpdkError::SmallFrames)));
}

/// The kernel spreads what it sends over the queues of the device.
#[test]
fn every_queue_is_received_from() {
    if !enter_namespace() || !has_tun() {
        return;
    }
    let mut arena = arena(1024);
    let mut monitor = Monitor::open().unwrap();
    let config = DpdkConfig {
        queues: NonZeroU16::new(4).unwrap(),
        ..device("net_tap_queues,iface=tgqueues")
    };
    let mut port = open(&config, &mut arena).unwrap();
    assert_eq!(port.capabilities().queues, 4);
    ip(&format!("address add {KERNEL_V4}/24 dev tgqueues"));
    ip(&format!("address add {KERNEL_V6}/64 dev tgqueues nodad"));
    wait_for_kernel_address(&mut monitor);
    let mac = MacAddr(port.capabilities().mac);
    for (kernel, address) in [(KERNEL_V4, PORT_V4), (KERNEL_V6, PORT_V6)] {
        ip(&format!("neigh add {address} lladdr {mac} dev tgqueues"));
        let sockets: Vec<_> = (0..64).map(|_| UdpSocket::bind((kernel, 0)).unwrap()).collect();
        for socket in &sockets {
            socket.send_to(b"tide", (address, 7)).unwrap();
        }
        let (began, mut burst, mut came) = (Instant::now(), Burst::new(), 0);
        while came < sockets.len() {
            assert!(began.elapsed() < PATIENCE, "{came} of {} came", sockets.len());
            port.receive(&mut arena, &mut burst, 16).unwrap();
            while let Some(frame) = burst.pop_front() {
                came += usize::from(is_udp_to(arena.bytes(&frame), true, 7));
                arena.free(frame);
            }
        }
    }
    port.close_for_now(&mut arena, false);
    assert_eq!(arena.available(), arena.capacity());
}

/// Its driver wants more room than a frame of 2 KiB has.
#[test]
fn frames_that_are_too_small_for_a_driver_are_copied() {
    if !enter_namespace() {
        return;
    }
    veth();
    for (frame_size, copies) in [(FrameSize::K2, ", copy"), (FrameSize::K4, ", no copy")] {
        let config = ArenaConfig { frames: 256, frame_size, hugepages: false };
        let mut end = End::open_on("net_af_packet_small,iface=tg0", Arena::new(config).unwrap());
        assert!(end.port.capabilities().detail.contains(copies), "{frame_size:?}");
        for (kernel, address) in [(KERNEL_V4, PORT_V4), (KERNEL_V6, PORT_V6)] {
            let socket = UdpSocket::bind((kernel, 0)).unwrap();
            let began = Instant::now();
            let is_ours = |bytes: &[u8]| is_udp_to(bytes, true, 7) && bytes.ends_with(&[9; 1400]);
            while !end.held.iter().any(|frame| is_ours(end.arena.bytes(frame))) {
                assert!(began.elapsed() < PATIENCE, "nothing came to {address}");
                // On a busy machine the kernel loses some.
                socket.send_to(&[9; 1400], (address, 7)).unwrap();
                end.port.receive(&mut end.arena, &mut end.held, 64).unwrap();
            }
            end.free(usize::MAX);
        }
        end.close();
    }
}

#[test]
fn more_queues_than_there_are_are_refused() {
    let config = DpdkConfig { queues: NonZeroU16::MAX, ..device("net_ring_many") };
    let error = open(&config, &mut arena(8)).err().unwrap().to_string();
    assert!(error.contains("at most") && error.contains("not 65535"), "{error}");
}

#[test]
fn a_sleeper_is_woken() {
    let mut arena = arena(8);
    let mut port = open(&device("net_ring_sleep"), &mut arena).unwrap();
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
