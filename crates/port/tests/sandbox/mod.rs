//! A network namespace for the thread of one test, and frames to send in it.
//!
//! Needs no names in the file system, so it works inside `unshare -rn` too.

// Every test file is a crate of its own and uses only a part of this.
#![allow(dead_code)]

use std::fs::File;
use std::io;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::thread::{CapabilitySet, CapabilitySets, UnshareFlags};
use tidegate_memory::{Arena, ArenaConfig, FrameSize};
use tidegate_port::netlink::{Change, Monitor};
use tidegate_port::{Burst, Port};

/// A test that waits this long has failed.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// Puts this thread, and the programs that it starts, into a network namespace
/// of its own, which ends with them. Returns false, and says so, when that is
/// not allowed.
pub fn enter_namespace() -> bool {
    // SAFETY: only the network namespace of this thread changes; descriptors
    // stay shared.
    match unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) } {
        Ok(()) => {
            ip("link set lo up");
            true
        }
        Err(error) => {
            eprintln!("skipped: needs root, or to run inside `unshare -rn` ({error})");
            false
        }
    }
}

/// Runs `ip` with these arguments.
pub fn ip(arguments: &str) {
    let output = Command::new("ip").args(arguments.split_whitespace()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "ip {arguments}: {said}");
}

/// Whether TUN and TAP devices can be made here; says so when they cannot.
pub fn has_tun() -> bool {
    let file = File::options().read(true).write(true).open("/dev/net/tun");
    if let Err(error) = &file {
        eprintln!("skipped: /dev/net/tun cannot be opened ({error})");
    }
    file.is_ok()
}

/// Takes every capability from this thread; other tests keep theirs.
pub fn drop_capabilities() {
    let none = CapabilitySets {
        effective: CapabilitySet::empty(),
        permitted: CapabilitySet::empty(),
        inheritable: CapabilitySet::empty(),
    };
    rustix::thread::set_capabilities(None, none).unwrap();
}

/// The hardware address of `tg0`, the port's end of [`veth`].
pub const PORT_MAC: [u8; 6] = [2, 0, 0, 0, 0, 0xa];
/// The hardware address of `tg1`, the kernel's end of [`veth`].
pub const KERNEL_MAC: [u8; 6] = [2, 0, 0, 0, 0, 0xb];
/// The port's address, which the kernel has as a neighbour but not as its own.
pub const PORT_V4: &str = "10.9.0.2";
/// The kernel's address.
pub const KERNEL_V4: &str = "10.9.0.1";
/// The port's address, as [`PORT_V4`].
pub const PORT_V6: &str = "fd09::2";
/// The kernel's address.
pub const KERNEL_V6: &str = "fd09::1";

/// Makes a veth pair in this namespace: `tg0` without addresses for a port,
/// `tg1` with the kernel's. Both are up. The kernel knows the port's hardware
/// address, so that tests need not answer for it.
pub fn veth() {
    ip("link add tg0 address 02:00:00:00:00:0a type veth peer name tg1 address 02:00:00:00:00:0b");
    // Without link-local addresses the kernel sends nothing of its own.
    ip("link set tg0 addrgenmode none");
    ip("link set tg1 addrgenmode none");
    ip("link set tg0 up");
    ip("link set tg1 up");
    let mut monitor = Monitor::open().unwrap();
    ip(&format!("addr add {KERNEL_V4}/24 dev tg1"));
    ip(&format!("addr add {KERNEL_V6}/64 dev tg1 nodad"));
    wait_for_kernel_address(&mut monitor);
    ip(&format!("neigh add {PORT_V4} lladdr 02:00:00:00:00:0a dev tg1"));
    ip(&format!("neigh add {PORT_V6} lladdr 02:00:00:00:00:0a dev tg1"));
}

/// Waits for the first change for which `wanted` has something.
pub fn wait_for<T>(monitor: &mut Monitor, mut wanted: impl FnMut(Change) -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        while let Some(change) = monitor.poll_change().unwrap() {
            if let Some(found) = wanted(change) {
                return found;
            }
        }
        assert!(Instant::now() < deadline, "the change was never told");
        let second = Duration::from_secs(1).try_into().unwrap();
        poll(&mut [PollFd::new(&monitor.as_fd(), PollFlags::IN)], Some(&second)).unwrap();
    }
}

/// Waits until the kernel takes packets for [`KERNEL_V6`]: it tells so, a
/// moment after the address was added.
pub fn wait_for_kernel_address(monitor: &mut Monitor) {
    let address: IpAddr = KERNEL_V6.parse().unwrap();
    wait_for(monitor, |change| match change {
        Change::Address(_, cidr) => (cidr.address() == address).then_some(()),
        _ => None,
    });
}

/// An arena of 2 KiB frames.
pub fn arena(frames: u32) -> Arena {
    Arena::new(ArenaConfig { frames, frame_size: FrameSize::K2, hugepages: false }).unwrap()
}

/// Receives until `count` frames have come that are `wanted`, sleeping on the
/// port's descriptor in between; frees the others. Panics when that takes too
/// long.
pub fn receive_wanted(
    port: &mut impl Port,
    arena: &mut Arena,
    count: usize,
    mut wanted: impl FnMut(&[u8]) -> bool,
) -> Burst {
    let deadline = Instant::now() + PATIENCE;
    let (mut burst, mut kept) = (Burst::new(), Burst::new());
    loop {
        port.receive(arena, &mut burst, 64).unwrap();
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
        assert!(Instant::now() < deadline, "only {} of {count} frames came", kept.len());
        sleep_on(port);
    }
}

/// Sleeps until a frame may be waiting; a second at most.
pub fn sleep_on(port: &mut impl Port) {
    if port.prepare_sleep().unwrap()
        && let Some(fd) = port.wake_fd()
    {
        let second = Duration::from_secs(1).try_into().unwrap();
        poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&second)).unwrap();
    }
}

/// Receives until the port says that it is of no further use.
pub fn receive_until_error(port: &mut impl Port, arena: &mut Arena) -> io::Error {
    let deadline = Instant::now() + PATIENCE;
    let mut burst = Burst::new();
    loop {
        if let Err(error) = port.receive(arena, &mut burst, 64) {
            return error;
        }
        if let Err(error) = port.prepare_sleep() {
            return error;
        }
        free_all(arena, &mut burst);
        assert!(Instant::now() < deadline, "the port never failed");
    }
}

/// Gives every frame back.
pub fn free_all(arena: &mut Arena, burst: &mut Burst) {
    for frame in burst.drain(..) {
        arena.free(frame);
    }
}

/// Transmits a whole burst. Panics when that takes too long.
pub fn transmit_all(port: &mut impl Port, arena: &mut Arena, burst: &mut Burst) {
    let deadline = Instant::now() + PATIENCE;
    while !burst.is_empty() {
        port.transmit(arena, burst).unwrap();
        assert!(Instant::now() < deadline, "{} frames were never taken", burst.len());
    }
}

/// An Ethernet frame from `tg1` to `tg0` of a type that no kernel answers,
/// with a number at the front of its payload.
pub fn numbered_frame(number: u32, len: usize) -> Vec<u8> {
    let mut frame = vec![0; len.max(18)];
    frame[..6].copy_from_slice(&PORT_MAC);
    frame[6..12].copy_from_slice(&KERNEL_MAC);
    // EtherType for local experiments (IEEE 802).
    frame[12..14].copy_from_slice(&0x88b5u16.to_be_bytes());
    frame[14..18].copy_from_slice(&number.to_be_bytes());
    frame
}

/// Whether it is one of [`numbered_frame`], with a VLAN tag or without.
pub fn is_numbered(frame: &[u8]) -> bool {
    frame[12..14] == [0x88, 0xb5] || frame[12..14] == [0x81, 0x00]
}

fn ip_offset(ethernet: bool) -> usize {
    if ethernet { 14 } else { 0 }
}

/// Whether the frame is UDP to this port, over IPv4 without options or IPv6.
pub fn is_udp_to(frame: &[u8], ethernet: bool, port: u16) -> bool {
    let packet = &frame[ip_offset(ethernet)..];
    let udp = match packet[0] >> 4 {
        4 if packet[9] == 17 => 20,
        6 if packet[6] == 17 => 40,
        _ => return false,
    };
    packet[udp + 2..udp + 4] == port.to_be_bytes()
}

/// Turns a UDP frame round: swaps hardware and IP addresses and ports, which
/// leaves every checksum as it is.
pub fn turn_round(frame: &mut [u8], ethernet: bool) {
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
