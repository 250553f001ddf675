//! Measures both receive modes of the `packet` device over veth, in its own network namespace: the
//! round trip of a single frame, and the processor time that a frame of a full burst costs its
//! sender and its receiver. (On veth the sender's core also delivers the frame.)
//!
//! `cargo run --release -p tidegate-device --example packet_receive_modes`

use std::process::Command;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::thread::UnshareFlags;
use rustix::time::ClockId;
use tidegate_device::packet::{PacketConfig, PacketDevice, ReceiveMode};
use tidegate_device::{Burst, Device};
use tidegate_memory::{Arena, ArenaConfig};

fn ip(arguments: &str) {
    assert!(Command::new("ip").args(arguments.split(' ')).status().unwrap().success());
}

fn open(name: &str, receive: ReceiveMode, arena: &mut Arena) -> PacketDevice {
    PacketDevice::open(&PacketConfig::new(name).receive(receive), arena).unwrap()
}

fn wait(device: &mut PacketDevice, arena: &mut Arena, burst: &mut Burst) {
    while device.receive(arena, burst, 64).unwrap() == 0 {
        if device.prepare_sleep().unwrap() {
            let fd = device.wake_fd().unwrap();
            let time = Duration::from_millis(100).try_into().unwrap();
            poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&time)).unwrap();
        }
    }
}

/// Processor time of this thread.
fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn main() {
    // SAFETY: only the network namespace of this thread changes.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }.unwrap();
    ip("link add tg0 type veth peer name tg1");
    ip("link set tg0 addrgenmode none up");
    ip("link set tg1 addrgenmode none up");
    for receive in [ReceiveMode::Syscalls, ReceiveMode::Ring] {
        let mut arena = Arena::new(ArenaConfig::default()).unwrap();
        let mut near = open("tg0", receive, &mut arena);
        let mut far = open("tg1", receive, &mut arena);
        let mut frame = [0; 64];
        frame[12..14].copy_from_slice(&[0x88, 0xb5]);
        let mut burst = Burst::new();
        let mut times = Vec::new();
        for _ in 0..300 {
            burst.extend(arena.alloc_from(&frame));
            let start = Instant::now();
            far.transmit(&mut arena, &mut burst).unwrap();
            wait(&mut near, &mut arena, &mut burst);
            near.transmit(&mut arena, &mut burst).unwrap();
            wait(&mut far, &mut arena, &mut burst);
            times.push(start.elapsed());
            burst.drain(..).for_each(|frame| arena.free(frame));
        }
        times.sort();
        println!("{receive:?}: round trip p50 {:?} p99 {:?}", times[150], times[297]);
        let (mut sending, mut receiving, mut count) = (Duration::ZERO, Duration::ZERO, 0);
        while count < 1_000_000 {
            for _ in 0..1024 {
                burst.extend(arena.alloc_from(&frame));
            }
            let start = cpu_time();
            while !burst.is_empty() {
                far.transmit(&mut arena, &mut burst).unwrap();
            }
            sending += cpu_time() - start;
            let mut got = 0;
            while got < 1024 {
                let start = cpu_time();
                let fresh = near.receive(&mut arena, &mut burst, 64).unwrap();
                if fresh > 0 {
                    receiving += cpu_time() - start;
                }
                got += fresh;
                burst.drain(..).for_each(|frame| arena.free(frame));
            }
            count += 1024;
        }
        println!(
            "{receive:?}: send {:?} receive {:?} per frame",
            sending / count,
            receiving / count
        );
    }
}
