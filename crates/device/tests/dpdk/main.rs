//! The DPDK device on virtual devices: some need nothing of the system, and a TAP device has the
//! kernel at its other end.

#![cfg(feature = "dpdk")]

mod queues;
#[path = "../sandbox/mod.rs"]
mod sandbox;

use std::collections::HashSet;
use std::io::Read;
use std::net::{Ipv4Addr, Ipv6Addr, UdpSocket};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};
use std::time::{Duration, Instant};

use proptest::prelude::*;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use sandbox::{
    DEVICE_V4, DEVICE_V6, KERNEL_V4, KERNEL_V6, TIMEOUT, arena, has_tun, ip, is_udp_to, veth,
    wait_for_kernel_address,
};
use tempfile::TempDir;
use tidegate_device::dpdk::{DpdkConfig, DpdkError, open};
use tidegate_device::netlink::Monitor;
use tidegate_device::packet::{PacketConfig, PacketDevice};
use tidegate_device::{Burst, Device};
use tidegate_memory::{Arena, ArenaConfig, Checksum, FrameSize};
use tidegate_wire::{DropReason, MacAddr, Sum};

fn dpdk_config(text: &str) -> DpdkConfig {
    let Ok(config) = text.parse();
    config
}

/// Starts DPDK, then enters a namespace. Drivers of DPDK change the environment while it starts; a
/// program started at that moment could read what is no longer there (`EFAULT`).
fn enter_namespace() -> bool {
    static STARTED: Once = Once::new();
    STARTED.call_once(|| drop(open(&dpdk_config("net_null_first"), &mut arena(8)).unwrap()));
    sandbox::enter_namespace()
}

fn open_error(text: &str) -> DpdkError {
    open(&dpdk_config(text), &mut arena(8)).err().expect(text)
}

/// Frame of `len` bytes that begins with its number.
fn frame(number: usize, len: usize) -> Vec<u8> {
    let number = (number as u32).to_be_bytes();
    number.into_iter().chain((4..len).map(|at| (at * 7 + len) as u8)).collect()
}

/// `net_ring` delivers transmitted frames to its own receive side.
#[test]
fn ring_delivers_frames_intact_and_in_order() {
    let mut arena = arena(1024);
    let mut device = open(&dpdk_config("net_ring_whole"), &mut arena).unwrap();
    assert_eq!(device.capabilities().kind, "dpdk");
    assert_eq!(device.capabilities().mtu, 1500);
    let lengths = [60, 61, 64, 127, 128, 500, 1514];
    let sent: Vec<_> = (0..300).map(|at| frame(at, lengths[at % lengths.len()])).collect();
    let mut out: Burst = sent.iter().map(|bytes| arena.alloc_from(bytes).unwrap()).collect();
    let (mut back, mut burst) = (Vec::new(), Burst::new());
    while back.len() < sent.len() {
        device.transmit(&mut arena, &mut out).unwrap();
        // An odd quota: the rest of the driver's burst waits in the device.
        assert!(device.receive(&mut arena, &mut burst, 7).unwrap() <= 7);
        while let Some(frame) = burst.pop_front() {
            back.push(arena.bytes(&frame).to_vec());
            arena.free(frame);
        }
    }
    assert_eq!(back, sent);
    let counters = device.counters();
    assert_eq!((counters.received, counters.transmitted), (300, 300));
    assert_eq!(counters.received_bytes, counters.transmitted_bytes);
    assert_eq!(counters.drops.total(), 0);
    device.close_for_handover(&mut arena, false);
    assert_eq!(arena.available(), arena.capacity(), "no frame was lost");
}

/// Zero copy: the received frame is the transmitted buffer.
#[test]
fn ring_delivers_without_copy() {
    let mut arena = arena(64);
    let mut device = open(&dpdk_config("net_ring_same"), &mut arena).unwrap();
    let frame = arena.alloc_from(&frame(1, 100)).unwrap();
    let address = arena.bytes(&frame).as_ptr();
    let mut burst = Burst::new();
    burst.push_back(frame);
    assert_eq!(device.transmit(&mut arena, &mut burst).unwrap(), 1);
    assert_eq!(device.receive(&mut arena, &mut burst, 64).unwrap(), 1);
    assert_eq!(arena.bytes(&burst[0]).as_ptr(), address);
    burst.drain(..).for_each(|frame| arena.free(frame));
    device.close_for_handover(&mut arena, false);
    assert_eq!(arena.available(), arena.capacity());
}

#[test]
fn drops_frame_larger_than_a_buffer() {
    let _alone = lock_memif();
    let (_folder, [ours, theirs]) = memif_pair(60);
    let config = ArenaConfig { frames: 8, frame_size: FrameSize::K4, hugepages: false };
    let mut from = WireEnd::open_on(&ours, Arena::new(config).unwrap());
    let mut to = WireEnd::open(&theirs, 96);
    wait_until_up(&mut [&mut from, &mut to]);
    let mut out = Burst::new();
    out.push_back(from.arena.alloc_from(&frame(0, 3000)).unwrap());
    out.push_back(from.arena.alloc_from(&frame(1, 61)).unwrap());
    let (began, mut seen) = (Instant::now(), HashSet::new());
    while seen.is_empty() {
        assert!(began.elapsed() < TIMEOUT, "no frame arrived");
        from.device.transmit(&mut from.arena, &mut out).unwrap();
        to.receive(64, &mut seen);
    }
    assert_eq!(to.device.counters().drops.get(DropReason::FrameTooLong), 1);
    to.close();
    from.close();
}

#[test]
fn rejects_a_foreign_arena() {
    let (mut own, mut other) = (arena(8), arena(8));
    let mut device = open(&dpdk_config("net_ring_own"), &mut own).unwrap();
    let mut burst = Burst::new();
    burst.push_back(other.alloc_from(&frame(0, 60)).unwrap());
    assert!(device.transmit(&mut other, &mut burst).is_err());
    assert!(device.receive(&mut other, &mut burst, 64).is_err());
    assert_eq!(burst.len(), 1);
    burst.drain(..).for_each(|frame| other.free(frame));
}

#[test]
fn arena_may_be_dropped_before_its_device() {
    let mut arena = arena(64);
    let mut device = open(&dpdk_config("net_ring_after"), &mut arena).unwrap();
    let mut burst: Burst = (0..9).map(|at| arena.alloc_from(&frame(at, 60)).unwrap()).collect();
    assert_eq!(device.transmit(&mut arena, &mut burst).unwrap(), 9);
    drop(arena);
    assert!(!device.prepare_sleep().unwrap(), "frames wait");
}

/// As in a router.
#[test]
fn two_devices_share_one_arena() {
    let mut arena = arena(256);
    let mut left = open(&dpdk_config("net_ring_left"), &mut arena).unwrap();
    let mut right = open(&dpdk_config("net_ring_right"), &mut arena).unwrap();
    let mut burst: Burst = (0..20).map(|at| arena.alloc_from(&frame(at, 60)).unwrap()).collect();
    for _ in 0..10 {
        for device in [&mut left, &mut right] {
            assert_eq!(device.transmit(&mut arena, &mut burst).unwrap(), 20);
            assert_eq!(device.receive(&mut arena, &mut burst, 64).unwrap(), 20);
        }
    }
    for (at, held) in burst.iter().enumerate() {
        assert_eq!(arena.bytes(held), frame(at, 60));
    }
    left.close_for_handover(&mut arena, false);
    assert_eq!(right.transmit(&mut arena, &mut burst).unwrap(), 20);
    assert_eq!(right.receive(&mut arena, &mut burst, 64).unwrap(), 20);
    burst.drain(..).for_each(|frame| arena.free(frame));
    right.close_for_handover(&mut arena, false);
    assert_eq!(arena.available(), arena.capacity());
}

#[test]
fn device_reopens_on_the_same_arena() {
    let mut arena = arena(64);
    for _ in 0..3 {
        let mut device = open(&dpdk_config("net_ring_again"), &mut arena).unwrap();
        assert!(matches!(open_error("net_ring_again"), DpdkError::Busy { .. }));
        let mut burst: Burst = (0..9).map(|at| arena.alloc_from(&frame(at, 60)).unwrap()).collect();
        assert_eq!(device.transmit(&mut arena, &mut burst).unwrap(), 9);
        // Frames are in the ring, some of them already received by the device.
        assert_eq!(device.receive(&mut arena, &mut burst, 1).unwrap(), 1);
        burst.drain(..).for_each(|frame| arena.free(frame));
        device.close_for_handover(&mut arena, false);
        assert_eq!(arena.available(), arena.capacity());
    }
}

/// One end of a wire, with its arena and the frames that it holds.
struct WireEnd {
    arena: Arena,
    device: Box<dyn Device>,
    held: Burst,
}

impl WireEnd {
    fn open(text: &str, frames: u32) -> Self {
        Self::open_on(text, arena(frames))
    }

    fn open_on(text: &str, arena: Arena) -> Self {
        Self::open_config(&dpdk_config(text), arena)
    }

    fn open_config(config: &DpdkConfig, mut arena: Arena) -> Self {
        let device = open(config, &mut arena).unwrap();
        Self { arena, device, held: Burst::new() }
    }

    fn is_up(&mut self) -> bool {
        self.device.counters();
        self.device.capabilities().detail.contains("link up")
    }

    /// Sends up to `count` new frames, numbered from `next` on; returns the number of sent frames.
    fn send(&mut self, next: usize, count: usize) -> usize {
        let numbers = next..next + count;
        let mut out: Burst = numbers
            .map_while(|number| self.arena.alloc_from(&frame(number, 60 + number % 1400)))
            .collect();
        let sent = self.device.transmit(&mut self.arena, &mut out).unwrap();
        out.drain(..).for_each(|frame| self.arena.free(frame));
        sent
    }

    /// Receives frames, checks each, and holds on to them.
    fn receive(&mut self, quota: usize, seen: &mut HashSet<usize>) {
        let before = self.held.len();
        let count = self.device.receive(&mut self.arena, &mut self.held, quota).unwrap();
        assert!(count <= quota && self.held.len() == before + count);
        for held in self.held.iter().skip(before) {
            let bytes = self.arena.bytes(held);
            let number = u32::from_be_bytes(*bytes.first_chunk().unwrap()) as usize;
            assert_eq!(bytes, frame(number, 60 + number % 1400));
            assert!(seen.insert(number), "frame {number} arrived twice");
        }
    }

    fn free(&mut self, count: usize) {
        let count = count.min(self.held.len());
        self.held.drain(..count).for_each(|frame| self.arena.free(frame));
    }

    fn close(mut self) {
        self.device.close_for_handover(&mut self.arena, false);
        let held = self.held.len();
        assert_eq!(self.arena.available() + held, self.arena.capacity(), "{held} are held");
        self.held.drain(..).for_each(|frame| self.arena.free(frame));
    }
}

/// Lock for tests with memif. If memifs of several threads are created and closed at once, the
/// driver can wait for a message on a descriptor that meanwhile belongs to another memif.
fn lock_memif() -> MutexGuard<'static, ()> {
    static MEMIF_LOCK: Mutex<()> = Mutex::new(());
    MEMIF_LOCK.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Both ends of a memif, by number.
fn memif_pair(number: u32) -> (TempDir, [String; 2]) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("memif").display().to_string();
    let end = |letter, role| {
        let name = format!("net_memif{number}{letter}");
        format!("{name},role={role},id=0,socket-abstract=no,socket={path}")
    };
    (folder, [end('a', "server"), end('b', "client")])
}

/// Child process that echoes the frames of a device. It is killed on drop.
struct EchoProcess(Child);

/// Environment variables that give the child process its device name, and the number of queues.
const ECHO_DEVICE_VARIABLE: &str = "TIDEGATE_TEST_ECHO";
const ECHO_QUEUES_VARIABLE: &str = "TIDEGATE_TEST_ECHO_QUEUES";

impl EchoProcess {
    fn start_on(device: &str) -> Self {
        Self::start_with_queues(device, 1)
    }

    fn start_with_queues(device: &str, queues: u16) -> Self {
        let process = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "echo_child"])
            .env(ECHO_DEVICE_VARIABLE, device)
            .env(ECHO_QUEUES_VARIABLE, queues.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        Self(process)
    }

    /// Starts an echo process with a vhost-user device at this path.
    fn start_at(path: &Path) -> Self {
        let mut echo = Self::start_on(&format!("net_vhost0,iface={},queues=1", path.display()));
        let began = Instant::now();
        while !is_listening(path) {
            assert!(began.elapsed() < TIMEOUT, "the other process does not start");
            assert!(echo.0.try_wait().unwrap().is_none(), "the other process has ended");
        }
        echo
    }
}

impl Drop for EchoProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// True if a process accepts connections at this path, which exists a moment before.
fn is_listening(path: &Path) -> bool {
    const ACCEPTS: &str = "00010000";
    let sockets = std::fs::read_to_string("/proc/thread-self/net/unix").unwrap();
    sockets.lines().any(|line| {
        let mut words = line.split_whitespace();
        words.nth(3) == Some(ACCEPTS) && words.last() == path.to_str()
    })
}

/// Echoes frames, but only in a child process that [`Echo`] started.
#[test]
fn echo_child() {
    let Ok(text) = std::env::var(ECHO_DEVICE_VARIABLE) else { return };
    // The child must not outlive its parent.
    std::thread::spawn(|| {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        std::process::exit(0);
    });
    let queues = std::env::var(ECHO_QUEUES_VARIABLE).unwrap().parse().unwrap();
    let mut end = WireEnd::open_config(&dpdk_config(&text).queues(queues), arena(96));
    loop {
        end.device.receive(&mut end.arena, &mut end.held, 64).unwrap();
        end.device.transmit(&mut end.arena, &mut end.held).unwrap();
    }
}

fn wait_until_up(ends: &mut [&mut WireEnd]) {
    let began = Instant::now();
    while !ends.iter_mut().all(|end| end.is_up()) {
        let about = |end: &mut &mut WireEnd| end.device.capabilities().detail.clone();
        let details: Vec<_> = ends.iter_mut().map(about).collect();
        assert!(began.elapsed() < TIMEOUT, "a link stays down: {details:?}");
    }
}

fn receive_until(end: &mut WireEnd, count: usize, seen: &mut HashSet<usize>) {
    let began = Instant::now();
    while seen.len() < count {
        assert!(began.elapsed() < TIMEOUT, "{} of {count} frames arrived", seen.len());
        end.receive(64, seen);
    }
}

#[derive(Clone, Copy, Debug)]
enum WireOp {
    Send(usize),
    Receive(usize),
    Free(usize),
}

/// Random operations at either end.
fn steps() -> impl Strategy<Value = Vec<(bool, WireOp)>> {
    let step = prop_oneof![
        (1..80usize).prop_map(WireOp::Send),
        (1..100usize).prop_map(WireOp::Receive),
        (1..100usize).prop_map(WireOp::Free),
    ];
    proptest::collection::vec((any::<bool>(), step), 1..60)
}

/// Runs the operations. With `all_arrive`, each sent frame must arrive once. In any case, no
/// frame may be missing when the ends are closed.
fn check_all_frames_accounted_for<const N: usize>(
    mut ends: [WireEnd; N],
    steps: &[(bool, WireOp)],
    all_arrive: bool,
) {
    wait_until_up(&mut ends.each_mut());
    let (mut sent, mut seen) = (0, HashSet::new());
    for &(first, step) in steps {
        let end = &mut ends[usize::from(first) % N];
        match step {
            WireOp::Send(count) => sent += end.send(sent, count),
            WireOp::Receive(quota) => end.receive(quota, &mut seen),
            WireOp::Free(count) => end.free(count),
        }
    }
    let began = Instant::now();
    while all_arrive && seen.len() < sent {
        assert!(began.elapsed() < TIMEOUT, "{} of {sent} frames arrived", seen.len());
        for end in &mut ends {
            end.free(usize::MAX);
            end.receive(64, &mut seen);
        }
    }
    ends.into_iter().rev().for_each(WireEnd::close);
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 24,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn ring_delivers_each_frame_once(steps in steps(), all_arrive: bool) {
        check_all_frames_accounted_for([WireEnd::open("net_ring_any", 96)], &steps, all_arrive);
    }

    #[test]
    fn memif_delivers_each_frame_once(steps in steps(), all_arrive: bool) {
        let _alone = lock_memif();
        let (_folder, ends) = memif_pair(70);
        check_all_frames_accounted_for(ends.map(|end| WireEnd::open(&end, 96)), &steps, all_arrive);
    }

    /// `net_null` generates frames without end and drops transmitted frames.
    #[test]
    fn null_device_loses_no_buffer(steps in steps()) {
        let mut end = WireEnd::open("net_null_endless,size=60", 96);
        for &(_, step) in &steps {
            match step {
                WireOp::Send(count) => _ = end.send(0, count),
                WireOp::Receive(quota) => {
                    let free = end.arena.available();
                    let device = &mut end.device;
                    let count = device.receive(&mut end.arena, &mut end.held, quota).unwrap();
                    prop_assert!(count > 0 || free == 0, "{} are free", free);
                }
                WireOp::Free(count) => end.free(count),
            }
        }
        end.close();
    }
}

/// The rings are in shared memory that is unmapped when the peer exits.
#[test]
fn survives_death_of_memif_peer() {
    let _alone = lock_memif();
    let (_folder, [server, client]) = memif_pair(71);
    let mut end = WireEnd::open(&server, 96);
    for round in 0..6 {
        let mut peer = Some(EchoProcess::start_on(&client));
        wait_until_up(&mut [&mut end]);
        let (began, mut sent, mut seen) = (Instant::now(), 0, HashSet::new());
        while end.is_up() {
            assert!(began.elapsed() < TIMEOUT, "{} frames in round {round}", seen.len());
            for _ in 0..100 {
                sent += end.send(sent, 20);
                end.receive(64, &mut seen);
                end.free(usize::MAX);
            }
            if seen.len() > 1000 {
                // Frames are in flight: the process dies at an arbitrary point.
                drop(peer.take());
            }
        }
        // The device may hold frames from before the end of the link. They bear numbers that the
        // next round uses again.
        let mut before = usize::MAX;
        while before != seen.len() {
            before = seen.len();
            end.receive(64, &mut seen);
            end.free(usize::MAX);
        }
    }
    end.close();
}

/// A memif connects in about ten messages. DPDK's thread must look for messages after each of its
/// pauses, which are of 4 ms while the link is down.
#[test]
fn memif_server_answers_within_a_pause() {
    let _alone = lock_memif();
    let (folder, [server, _]) = memif_pair(72);
    let end = WireEnd::open(&server, 96);
    // The pauses are shorter for a while after a device is opened.
    std::thread::sleep(Duration::from_secs(1));
    let address = SocketAddrUnix::new(folder.path().join("memif")).unwrap();
    let mut waits: Vec<Duration> = (0..21)
        .map(|_| {
            let (family, flags) = (AddressFamily::UNIX, SocketFlags::CLOEXEC);
            let socket = socket_with(family, SocketType::SEQPACKET, flags, None).unwrap();
            let began = Instant::now();
            connect(&socket, &address).unwrap();
            let mut hello = [0; 256];
            assert_eq!(rustix::io::read(&socket, &mut hello).unwrap(), 128);
            // DPDK does not expect a client that disconnects at once.
            std::mem::forget(socket);
            began.elapsed()
        })
        .collect();
    waits.sort();
    let median = waits[waits.len() / 2];
    assert!(median < Duration::from_millis(15), "{waits:?}");
    end.close();
}

/// A virtio device needs its buffers in memory shared with the peer. So frames are copied, if a
/// buffer is free.
#[test]
fn copying_device_delivers_each_frame_once() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("v");
    let _echo = EchoProcess::start_at(&path);
    // A device with zero copy in the same process does not interfere.
    let other = WireEnd::open("net_ring_beside", 8);
    let mut end = WireEnd::open(&format!("net_virtio_user0,path={}", path.display()), 40);
    assert!(end.device.capabilities().detail.contains(", copy"));
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
        assert!(began.elapsed() < TIMEOUT, "{} of {sent} frames came back", seen.len());
        end.free(usize::MAX);
        end.receive(64, &mut seen);
    }
    end.close();
    other.close();
}

/// Value of a counter of the device; 0 if there is none with this name.
fn driver_counter(device: &mut dyn Device, name: &str) -> u64 {
    let counters = device.counters();
    counters.driver.iter().find(|one| &*one.0 == name).map_or(0, |one| one.1)
}

/// virtio counts short frames as "undersize", and delivers them.
#[test]
fn driver_counters_are_reported_and_are_not_drops() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("v");
    let _echo = EchoProcess::start_at(&path);
    let mut end = WireEnd::open(&format!("net_virtio_user1,path={}", path.display()), 40);
    wait_until_up(&mut [&mut end]);
    assert_eq!(driver_counter(&mut *end.device, "rx_q0_undersize_packets"), 0);
    let (mut seen, sent) = (HashSet::new(), end.send(0, 10));
    receive_until(&mut end, sent, &mut seen);
    let short = (0..sent).filter(|number| 60 + number % 1400 < 64).count() as u64;
    assert_eq!(driver_counter(&mut *end.device, "rx_q0_undersize_packets"), short);
    assert_eq!(driver_counter(&mut *end.device, "rx_good_packets"), sent as u64);
    assert_eq!(end.device.counters().drops.total(), 0);
    end.free(usize::MAX);
    end.close();
}

/// A TAP driver truncates a frame that is larger than a buffer, and counts an error.
#[test]
fn receive_errors_count_as_drops() {
    if !enter_namespace() || !has_tun() {
        return;
    }
    let mut monitor = Monitor::open().unwrap();
    let mut end = WireEnd::open("net_tap_errors,iface=tgerrors", 96);
    ip("link set tgerrors mtu 9000");
    ip(&format!("address add {KERNEL_V4}/24 dev tgerrors"));
    ip(&format!("address add {KERNEL_V6}/64 dev tgerrors nodad"));
    wait_for_kernel_address(&mut monitor);
    let mac = MacAddr(end.device.capabilities().mac);
    for (turn, (kernel, address)) in
        [(KERNEL_V4, DEVICE_V4), (KERNEL_V6, DEVICE_V6)].into_iter().enumerate()
    {
        ip(&format!("neigh add {address} lladdr {mac} dev tgerrors"));
        let socket = UdpSocket::bind((kernel, 0)).unwrap();
        socket.send_to(&[9; 8000], (address, 7)).unwrap();
        // A frame that fits follows.
        socket.send_to(&[9; 1400], (address, 7)).unwrap();
        let is_ours = |bytes: &[u8]| is_udp_to(bytes, true, 7) && bytes.ends_with(&[9; 1400]);
        let began = Instant::now();
        while !end.held.iter().any(|frame| is_ours(end.arena.bytes(frame))) {
            assert!(began.elapsed() < TIMEOUT, "no datagram arrived at {address}");
            end.device.receive(&mut end.arena, &mut end.held, 64).unwrap();
        }
        end.free(usize::MAX);
        let lost = turn as u64 + 1;
        let drops = end.device.counters().drops;
        assert_eq!(drops.get(DropReason::DeviceFrameDamaged), lost, "{drops:?}");
        assert_eq!(drops.total(), lost, "{drops:?}");
        assert_eq!(driver_counter(&mut *end.device, "rx_errors"), lost);
    }
    end.close();
}

const SEGMENT_BYTES: usize = 1400;

/// TCP segment to the kernel with payload `data`, and the offset of its TCP header. Checksums
/// are left to the device.
fn segment(is_v6: bool, data: &[u8]) -> (Vec<u8>, usize) {
    let mut frame = vec![2; 12];
    let tcp_bytes = 32;
    let bytes = (tcp_bytes + data.len()) as u16;
    if is_v6 {
        frame.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
        frame.extend(bytes.to_be_bytes());
        frame.extend([6, 64]);
        for address in [DEVICE_V6, KERNEL_V6] {
            frame.extend(address.parse::<Ipv6Addr>().unwrap().octets());
        }
    } else {
        frame.extend([0x08, 0x00, 0x45, 0]);
        frame.extend((bytes + 20).to_be_bytes());
        frame.extend([0, 0, 0x40, 0, 64, 6, 0, 0]);
        for address in [DEVICE_V4, KERNEL_V4] {
            frame.extend(address.parse::<Ipv4Addr>().unwrap().octets());
        }
    }
    let start = frame.len();
    // Port 7 to port 8, sequence number 1,000, 12 bytes of options, PSH.
    frame.extend([0, 7, 0, 8, 0, 0, 3, 0xe8, 0, 0, 0, 0, 8 << 4, 0x18, 1, 0, 0, 0, 0, 0]);
    frame.extend([1; 12]);
    frame.extend(data);
    (frame, start)
}

/// Relative sequence number, flags and payload of a segment made by [`segment`]; `None` for any
/// other frame. Checks the checksums.
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

/// `net_tap` announces segmentation for IPv6 too, but its driver does not do it: the kernel gets
/// the whole segment.
#[test]
fn device_segments_frames_of_several_buffers() {
    if !enter_namespace() || !has_tun() {
        return;
    }
    let large = || {
        let config = ArenaConfig { frames: 64, frame_size: FrameSize::K64, hugepages: false };
        Arena::new(config).unwrap()
    };
    let mut arena = large();
    let config = dpdk_config("net_tap_cut,iface=tgcut").segmentation(true);
    let device = open(&config, &mut arena).unwrap();
    assert!(device.capabilities().segmentation);
    let mut end = WireEnd { arena, device, held: Burst::new() };
    let mut kernel_arena = large();
    let mut kernel = PacketDevice::open(&PacketConfig::new("tgcut"), &mut kernel_arena).unwrap();
    for is_v6 in [false, true] {
        for data_bytes in [SEGMENT_BYTES + 1, 10 * SEGMENT_BYTES, 42 * SEGMENT_BYTES + 600] {
            let data: Vec<u8> = (0..data_bytes).map(|at| (at % 251) as u8).collect();
            let (bytes, start) = segment(is_v6, &data);
            // At this size, a frame takes several buffers more than once.
            for _ in 0..20 {
                let mut frame = end.arena.alloc_from(&bytes).unwrap();
                frame.set_checksum(Checksum::Partial { start: start as u16, offset: 16 });
                frame.set_segment_bytes(SEGMENT_BYTES as u16);
                let mut out = Burst::new();
                out.push_back(frame);
                while !out.is_empty() {
                    end.device.transmit(&mut end.arena, &mut out).unwrap();
                }
                let (began, mut arrived_bytes, mut frames) = (Instant::now(), 0, 0);
                let mut burst = Burst::new();
                while arrived_bytes < data.len() {
                    assert!(
                        began.elapsed() < TIMEOUT,
                        "{arrived_bytes} of {data_bytes} bytes arrived"
                    );
                    kernel.receive(&mut kernel_arena, &mut burst, 64).unwrap();
                    while let Some(frame) = burst.pop_front() {
                        let bytes = kernel_arena.bytes(&frame);
                        if let Some((number, flags, part)) = read_segment(bytes) {
                            assert_eq!(number, arrived_bytes);
                            assert!(part == data[arrived_bytes..arrived_bytes + part.len()]);
                            arrived_bytes += part.len();
                            frames += 1;
                            assert_eq!(
                                flags & 0x08 != 0,
                                arrived_bytes == data.len(),
                                "PSH is last"
                            );
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

/// A caller may request segmentation without asking for the capability first.
#[test]
fn requested_segmentation_is_off_if_unsupported() {
    let open_on = |frame_size| {
        let config = ArenaConfig { frames: 64, frame_size, hugepages: false };
        let mut arena = Arena::new(config).unwrap();
        let config = dpdk_config("net_ring_uncut").segmentation(true);
        open(&config, &mut arena).map(|device| device.capabilities().segmentation)
    };
    assert!(!open_on(FrameSize::K64).unwrap());
    assert!(matches!(open_on(FrameSize::K4), Err(DpdkError::FramesTooSmall)));
}

/// The driver of `net_af_packet` needs more space than a 2 KiB frame has.
#[test]
fn copies_frames_too_small_for_the_driver() {
    if !enter_namespace() {
        return;
    }
    veth();
    for (frame_size, copies) in [(FrameSize::K2, ", copy"), (FrameSize::K4, ", no copy")] {
        let config = ArenaConfig { frames: 256, frame_size, hugepages: false };
        let mut end =
            WireEnd::open_on("net_af_packet_small,iface=tg0", Arena::new(config).unwrap());
        assert!(end.device.capabilities().detail.contains(copies), "{frame_size:?}");
        for (kernel, address) in [(KERNEL_V4, DEVICE_V4), (KERNEL_V6, DEVICE_V6)] {
            let socket = UdpSocket::bind((kernel, 0)).unwrap();
            let began = Instant::now();
            let is_ours = |bytes: &[u8]| is_udp_to(bytes, true, 7) && bytes.ends_with(&[9; 1400]);
            while !end.held.iter().any(|frame| is_ours(end.arena.bytes(frame))) {
                assert!(began.elapsed() < TIMEOUT, "no datagram arrived at {address}");
                // On a busy machine the kernel drops some datagrams.
                socket.send_to(&[9; 1400], (address, 7)).unwrap();
                end.device.receive(&mut end.arena, &mut end.held, 64).unwrap();
            }
            end.free(usize::MAX);
        }
        end.close();
    }
}

#[test]
fn timer_wakes_a_sleeper() {
    let mut arena = arena(8);
    let mut device = open(&dpdk_config("net_ring_sleep"), &mut arena).unwrap();
    assert!(device.prepare_sleep().unwrap());
    let wake = device.wake_fd().unwrap();
    let mut events = [rustix::event::PollFd::new(&wake, rustix::event::PollFlags::IN)];
    assert_eq!(rustix::event::poll(&mut events, None).unwrap(), 1, "by the timer");
}

#[test]
fn errors_name_the_next_step() {
    let error_text = |text: &str| open_error(text).to_string();
    assert!(error_text("").contains("dpdk-devbind.py --status"));
    assert!(error_text("net_nonsense0").contains("begins with the name of its driver"));
    assert!(error_text("0000:ff:1f.7").contains("--bind=vfio-pci 0000:ff:1f.7"));
    assert!(error_text("net_af_packet_x,iface=nope0").contains("No such device"));
    let no_server = open_error("net_memif_x,id=9,socket=tidegate-nobody");
    assert!(matches!(no_server, DpdkError::NoServer { .. }), "{no_server}");
    let other = open_error("net_null_y --log-level=debug");
    assert!(matches!(other, DpdkError::AlreadyStarted), "{other}");
}
