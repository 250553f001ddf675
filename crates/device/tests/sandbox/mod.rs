//! A network namespace for the thread of one test, and frames to send in it.
//!
//! Needs no named namespaces, so it works inside `unshare -rn` too.

// Every test file is a crate of its own and uses only a part of this module.
#![allow(dead_code)]

use std::fs::File;
use std::io;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::thread::{CapabilitySet, CapabilitySets, UnshareFlags};
use tidegate_device::netlink::{Change, Monitor};
use tidegate_device::{Burst, Device};
use tidegate_memory::{Arena, ArenaConfig, FrameSize};

/// Time after which a waiting test fails.
pub const TIMEOUT: Duration = Duration::from_secs(20);

/// Moves this thread, and the processes that it starts, into a new network namespace, which ends
/// with them. Prints a message and returns false if that is not permitted.
pub fn enter_namespace() -> bool {
    // SAFETY: only the network namespace of this thread changes; descriptors stay shared.
    match unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) } {
        Ok(()) => {
            ip("link set lo up");
            true
        }
        Err(error) => {
            tidegate_needs::skip("root", format!("or run inside `unshare -rn` ({error})"));
            false
        }
    }
}

/// Runs `ip` with these arguments.
pub fn ip(arguments: &str) {
    let output = Command::new("ip").args(arguments.split_whitespace()).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "ip {arguments}: {stderr}");
}

/// True if TUN and TAP devices can be created here; prints a message if not.
pub fn has_tun() -> bool {
    let file = File::options().read(true).write(true).open("/dev/net/tun");
    if let Err(error) = &file {
        tidegate_needs::skip("tun", format!("/dev/net/tun cannot be opened ({error})"));
    }
    file.is_ok()
}

/// Drops every capability of this thread; other tests keep theirs.
pub fn drop_capabilities() {
    let none = CapabilitySets {
        effective: CapabilitySet::empty(),
        permitted: CapabilitySet::empty(),
        inheritable: CapabilitySet::empty(),
    };
    rustix::thread::set_capabilities(None, none).unwrap();
}

/// Hardware address of `tg0`, the device's end of [`veth`].
pub const DEVICE_MAC: [u8; 6] = [2, 0, 0, 0, 0, 0xa];
/// Hardware address of `tg1`, the kernel's end of [`veth`].
pub const KERNEL_MAC: [u8; 6] = [2, 0, 0, 0, 0, 0xb];
/// IPv4 address of the device, which the kernel has as a neighbour but not as its own.
pub const DEVICE_V4: &str = "10.9.0.2";
/// IPv4 address of the kernel.
pub const KERNEL_V4: &str = "10.9.0.1";
/// IPv6 address of the device, as [`PORT_V4`].
pub const DEVICE_V6: &str = "fd09::2";
/// IPv6 address of the kernel.
pub const KERNEL_V6: &str = "fd09::1";

/// Creates a veth pair in this namespace: `tg0` without addresses for a device, `tg1` with the
/// kernel's addresses. Both are up. The kernel has the device as a permanent neighbour, so tests
/// need not answer address resolution.
pub fn veth() {
    ip("link add tg0 address 02:00:00:00:00:0a type veth peer name tg1 address 02:00:00:00:00:0b");
    // Without link-local addresses the kernel sends no packets of its own.
    ip("link set tg0 addrgenmode none");
    ip("link set tg1 addrgenmode none");
    ip("link set tg0 up");
    ip("link set tg1 up");
    let mut monitor = Monitor::open().unwrap();
    ip(&format!("addr add {KERNEL_V4}/24 dev tg1"));
    ip(&format!("addr add {KERNEL_V6}/64 dev tg1 nodad"));
    wait_for_kernel_address(&mut monitor);
    ip(&format!("neigh add {DEVICE_V4} lladdr 02:00:00:00:00:0a dev tg1"));
    ip(&format!("neigh add {DEVICE_V6} lladdr 02:00:00:00:00:0a dev tg1"));
}

/// Waits for the first change for which `wanted` returns `Some`.
pub fn wait_for<T>(monitor: &mut Monitor, mut wanted: impl FnMut(Change) -> Option<T>) -> T {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        while let Some(change) = monitor.poll_change().unwrap() {
            if let Some(found) = wanted(change) {
                return found;
            }
        }
        assert!(Instant::now() < deadline, "the change was never reported");
        let second = Duration::from_secs(1).try_into().unwrap();
        poll(&mut [PollFd::new(&monitor.as_fd(), PollFlags::IN)], Some(&second)).unwrap();
    }
}

/// Waits until the kernel accepts packets for [`KERNEL_V6`]. The kernel reports that a moment
/// after the address was added.
pub fn wait_for_kernel_address(monitor: &mut Monitor) {
    let address: IpAddr = KERNEL_V6.parse().unwrap();
    wait_for(monitor, |change| match change {
        Change::Address(_, cidr) => (cidr.address() == address).then_some(()),
        _ => None,
    });
}

/// Arena of 2 KiB frames.
pub fn arena(frames: u32) -> Arena {
    Arena::new(ArenaConfig { frames, frame_size: FrameSize::K2, hugepages: false }).unwrap()
}

/// Receives until `count` frames match `wanted`, and frees the others. Sleeps on the descriptor
/// of the device in between. Panics after [`PATIENCE`].
pub fn receive_matching(
    device: &mut impl Device,
    arena: &mut Arena,
    count: usize,
    mut wanted: impl FnMut(&[u8]) -> bool,
) -> Burst {
    let deadline = Instant::now() + TIMEOUT;
    let (mut burst, mut kept) = (Burst::new(), Burst::new());
    loop {
        device.receive(arena, &mut burst, 64).unwrap();
        for frame in burst.drain(..) {
            if wanted(arena.bytes(&frame)) {
                kept.push_back(frame);
            } else {
                arena.free(frame);
            }
        }
        if kept.len() >= count {
            return kept;
        }
        assert!(Instant::now() < deadline, "only {} of {count} frames arrived", kept.len());
        sleep_on(device);
    }
}

/// Sleeps until a frame may be waiting, for one second at most.
pub fn sleep_on(device: &mut impl Device) {
    if device.prepare_sleep().unwrap()
        && let Some(fd) = device.wake_fd()
    {
        let second = Duration::from_secs(1).try_into().unwrap();
        poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&second)).unwrap();
    }
}

/// Receives until the device fails; returns its error.
pub fn receive_until_error(device: &mut impl Device, arena: &mut Arena) -> io::Error {
    let deadline = Instant::now() + TIMEOUT;
    let mut burst = Burst::new();
    loop {
        if let Err(error) = device.receive(arena, &mut burst, 64) {
            return error;
        }
        if let Err(error) = device.prepare_sleep() {
            return error;
        }
        free_all(arena, &mut burst);
        assert!(Instant::now() < deadline, "the device never failed");
    }
}

/// Returns every frame of `burst` to the arena.
pub fn free_all(arena: &mut Arena, burst: &mut Burst) {
    for frame in burst.drain(..) {
        arena.free(frame);
    }
}

/// Transmits a whole burst. Panics after [`PATIENCE`].
pub fn transmit_all(device: &mut impl Device, arena: &mut Arena, burst: &mut Burst) {
    let deadline = Instant::now() + TIMEOUT;
    while !burst.is_empty() {
        device.transmit(arena, burst).unwrap();
        assert!(Instant::now() < deadline, "{} frames were never transmitted", burst.len());
    }
}

/// Ethernet frame from `tg1` to `tg0` with a number at the front of its payload. No kernel
/// answers its EtherType.
pub fn numbered_frame(number: u32, len: usize) -> Vec<u8> {
    let mut frame = vec![0; len.max(18)];
    frame[..6].copy_from_slice(&DEVICE_MAC);
    frame[6..12].copy_from_slice(&KERNEL_MAC);
    // EtherType for local experiments (IEEE 802).
    frame[12..14].copy_from_slice(&0x88b5u16.to_be_bytes());
    frame[14..18].copy_from_slice(&number.to_be_bytes());
    frame
}

/// True for a frame made by [`numbered_frame`], with or without a VLAN tag.
pub fn is_numbered(frame: &[u8]) -> bool {
    frame[12..14] == [0x88, 0xb5] || frame[12..14] == [0x81, 0x00]
}

fn ip_offset(ethernet: bool) -> usize {
    if ethernet { 14 } else { 0 }
}

/// True for a UDP frame to this port, over IPv4 without options or IPv6.
pub fn is_udp_to(frame: &[u8], ethernet: bool, port: u16) -> bool {
    let packet = &frame[ip_offset(ethernet)..];
    let udp = match packet[0] >> 4 {
        4 if packet[9] == 17 => 20,
        6 if packet[6] == 17 => 40,
        _ => return false,
    };
    packet[udp + 2..udp + 4] == port.to_be_bytes()
}

/// Turns a UDP frame into its own reply: swaps hardware addresses, IP addresses and ports. Every
/// checksum stays valid.
pub fn reflect(frame: &mut [u8], ethernet: bool) {
    let (link, packet) = frame.split_at_mut(ip_offset(ethernet));
    if ethernet {
        let (to, from) = link.split_at_mut(6);
        to.swap_with_slice(&mut from[..6]);
    }
    let (addresses, address_bytes, udp) = match packet[0] >> 4 {
        4 => (12, 4, 20),
        _ => (8, 16, 40),
    };
    let (source, destination) = packet[addresses..].split_at_mut(address_bytes);
    source.swap_with_slice(&mut destination[..address_bytes]);
    let (source, destination) = packet[udp..].split_at_mut(2);
    source.swap_with_slice(&mut destination[..2]);
}
