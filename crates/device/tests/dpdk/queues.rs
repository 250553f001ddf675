//! Several queues: polled in turn by one core, or shared out among cores.

use std::collections::VecDeque;
use std::num::NonZeroU16;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use super::*;

/// Number of the first frame of a core; further frames follow.
const fn first_number(core: usize) -> usize {
    core << 24
}

fn queues(queues: u16) -> NonZeroU16 {
    NonZeroU16::new(queues).unwrap()
}

/// Opens a device for several cores, with an arena each.
fn open_for_cores(config: &DpdkConfig, frames: u32) -> Vec<WireEnd> {
    let mut ends = vec![WireEnd::open_config(config, arena(frames))];
    for open in ends[0].device.offer_queues() {
        let mut arena = arena(frames);
        let device = open(&mut arena).unwrap();
        ends.push(WireEnd { arena, device, held: Burst::new() });
    }
    ends
}

/// The kernel spreads its frames over the queues of the device, and so over the cores.
#[test]
fn receives_from_every_queue() {
    if !enter_namespace() || !has_tun() {
        return;
    }
    for (cores, of_each) in [(1, vec![4]), (2, vec![2, 2]), (3, vec![2, 1, 1])] {
        let mut monitor = Monitor::open().unwrap();
        let device = format!("net_tap_queues{cores},iface=tgqueues{cores}");
        let config = dpdk_config(&device).queues(queues(4)).cores(cores);
        let mut ends = open_for_cores(&config, 1024);
        let counts: Vec<_> = ends.iter().map(|end| end.device.capabilities().queues).collect();
        assert_eq!(counts, of_each);
        ip(&format!("address add {KERNEL_V4}/24 dev tgqueues{cores}"));
        ip(&format!("address add {KERNEL_V6}/64 dev tgqueues{cores} nodad"));
        wait_for_kernel_address(&mut monitor);
        let mac = MacAddr(ends[0].device.capabilities().mac);
        for (kernel, address) in [(KERNEL_V4, DEVICE_V4), (KERNEL_V6, DEVICE_V6)] {
            ip(&format!("neigh add {address} lladdr {mac} dev tgqueues{cores}"));
            let sockets: Vec<_> = (0..64).map(|_| UdpSocket::bind((kernel, 0)).unwrap()).collect();
            for socket in &sockets {
                socket.send_to(b"tide", (address, 7)).unwrap();
            }
            let (began, mut arrived) = (Instant::now(), vec![0; ends.len()]);
            while arrived.iter().sum::<usize>() < sockets.len() {
                assert!(began.elapsed() < TIMEOUT, "{arrived:?} of {} arrived", sockets.len());
                for (end, arrived) in ends.iter_mut().zip(&mut arrived) {
                    end.device.receive(&mut end.arena, &mut end.held, 16).unwrap();
                    while let Some(frame) = end.held.pop_front() {
                        *arrived += usize::from(is_udp_to(end.arena.bytes(&frame), true, 7));
                        end.arena.free(frame);
                    }
                }
            }
            assert!(!arrived.contains(&0), "each core has flows: {arrived:?}");
        }
        ends.into_iter().rev().for_each(WireEnd::close);
    }
}

#[test]
fn rejects_too_many_queues() {
    let config = dpdk_config("net_ring_many").queues(queues(u16::MAX));
    let error = open(&config, &mut arena(8)).err().unwrap().to_string();
    assert!(error.contains("at most") && error.contains("not 65535"), "{error}");
}

#[test]
fn a_driver_with_fewer_queues_than_cores_offers_these() {
    let mut first = WireEnd::open_config(&dpdk_config("net_ring_few").cores(40), arena(8));
    assert_eq!(first.device.offer_queues().len(), 15, "a ring has 16 queues");
    assert!(first.device.offer_queues().is_empty(), "offered once");
    let _alone = lock_memif();
    let (_folder, [ours, _]) = memif_pair(80);
    let mut memif = WireEnd::open_config(&dpdk_config(&ours).cores(4), arena(8));
    assert!(memif.device.offer_queues().is_empty(), "as many as --queues says");
    memif.close();
    first.close();
}

#[test]
fn starts_when_every_core_has_opened_its_queues() {
    let mut first = WireEnd::open_config(&dpdk_config("net_ring_start").cores(2), arena(64));
    let open_second = first.device.offer_queues().pop().unwrap();
    assert!(first.device.capabilities().detail.contains("not started"));
    assert!(!first.device.prepare_sleep().unwrap(), "nothing would wake it");
    let mut burst: Burst = [first.arena.alloc_from(&frame(3, 60)).unwrap()].into();
    let WireEnd { arena: first_arena, device, .. } = &mut first;
    assert_eq!(device.transmit(first_arena, &mut burst).unwrap(), 0);
    assert_eq!((burst.len(), device.counters().drops.total()), (1, 0), "the frame waits");

    let mut second_arena = arena(64);
    let second = open_second(&mut second_arena).unwrap();
    assert_eq!(device.transmit(first_arena, &mut burst).unwrap(), 1);
    assert_eq!(device.receive(first_arena, &mut burst, 8).unwrap(), 1);
    assert_eq!(first_arena.bytes(&burst[0]), frame(3, 60));
    assert!(device.prepare_sleep().unwrap());
    assert!(device.capabilities().detail.contains("timed sleep"));
    burst.drain(..).for_each(|frame| first_arena.free(frame));
    WireEnd { arena: second_arena, device: second, held: Burst::new() }.close();
    first.close();
}

#[test]
fn a_core_that_fails_to_open_its_queues_ends_the_device() {
    let mut first = WireEnd::open_config(&dpdk_config("net_ring_unequal").cores(2), arena(64));
    let open_second = first.device.offer_queues().pop().unwrap();
    let config = ArenaConfig { frames: 64, frame_size: FrameSize::K4, hugepages: false };
    let mut second_arena = Arena::new(config).unwrap();
    let error = open_second(&mut second_arena).err().unwrap().to_string();
    assert!(error.contains("arenas of different frame sizes"), "{error}");
    assert_eq!(second_arena.available(), second_arena.capacity());
    first.close();
    WireEnd::open("net_ring_unequal", 64).close();
}

/// Sends numbered frames and receives them, until they have come back `count` times, in order and
/// without a copy. Stops early, with frames on the way, when `is_ended` is set.
fn send_around(end: &mut WireEnd, core: usize, count: usize, is_ended: &AtomicBool) -> usize {
    let mut waiting = VecDeque::new();
    let (mut next, mut arrived) = (first_number(core), 0);
    let began = Instant::now();
    while arrived < count && !is_ended.load(Ordering::SeqCst) {
        assert!(began.elapsed() < TIMEOUT, "core {core}: {arrived} of {count}");
        if waiting.len() < 32 {
            let mut burst: Burst = (0..4).map_while(|_| end.arena.alloc()).collect();
            for (at, held) in burst.iter_mut().enumerate() {
                assert!(end.arena.set_len(held, 60));
                end.arena.bytes_mut(held).copy_from_slice(&frame(next + at, 60));
                waiting.push_back((next + at, end.arena.bytes(held).as_ptr()));
            }
            next += burst.len();
            while !burst.is_empty() && !is_ended.load(Ordering::SeqCst) {
                end.device.transmit(&mut end.arena, &mut burst).unwrap();
            }
            burst.drain(..).for_each(|frame| end.arena.free(frame));
        }
        end.device.receive(&mut end.arena, &mut end.held, 16).unwrap();
        while let Some(held) = end.held.pop_front() {
            let (number, address) = waiting.pop_front().unwrap();
            assert_eq!(end.arena.bytes(&held), frame(number, 60));
            assert_eq!(end.arena.bytes(&held).as_ptr(), address, "no copy");
            end.arena.free(held);
            arrived += 1;
        }
    }
    arrived
}

/// On a ring, what a queue sends arrives at the queue of the same number.
#[test]
fn cores_use_their_queues_at_once() {
    const COUNT: usize = 20_000;
    let mut ends = open_for_cores(&dpdk_config("net_ring_cores").cores(3), 256);
    assert_eq!(ends.len(), 3);
    thread::scope(|scope| {
        for (core, end) in ends.iter_mut().enumerate() {
            scope.spawn(move || send_around(end, core, COUNT, &AtomicBool::new(false)));
        }
    });
    for end in &mut ends {
        let counters = end.device.counters();
        assert!(counters.received >= COUNT as u64 && counters.drops.total() == 0);
    }
    ends.into_iter().rev().for_each(WireEnd::close);
}

/// A thread may be in a burst at that moment, or have received frames of its queues.
#[test]
fn a_core_that_closes_its_queues_closes_the_device_for_all() {
    for _ in 0..20 {
        let mut ends = open_for_cores(&dpdk_config("net_ring_end").cores(3), 256);
        let (is_ended, arrived) = (&AtomicBool::new(false), &AtomicUsize::new(0));
        let last = ends.pop().unwrap();
        thread::scope(|scope| {
            for (core, mut end) in ends.into_iter().enumerate() {
                scope.spawn(move || {
                    while !is_ended.load(Ordering::SeqCst) {
                        let count = send_around(&mut end, core, 64, is_ended);
                        arrived.fetch_add(count, Ordering::SeqCst);
                    }
                    assert_eq!(end.device.receive(&mut end.arena, &mut end.held, 16).unwrap(), 0);
                    end.device.counters();
                    end.close();
                });
            }
            while arrived.load(Ordering::SeqCst) < 100 {
                thread::yield_now();
            }
            let mut last = last;
            assert!(matches!(open_error("net_ring_end"), DpdkError::Busy { .. }));
            last.device.counters();
            // The others notice that nothing arrives any more only by this flag.
            let WireEnd { mut arena, device, .. } = last;
            device.close_for_handover(&mut arena, false);
            is_ended.store(true, Ordering::SeqCst);
            assert_eq!(arena.available(), arena.capacity());
        });
        WireEnd::open("net_ring_end", 64).close();
    }
}

/// Both ends of a memif have two queues and two cores, each with a thread.
#[test]
fn memif_carries_the_frames_of_each_core() {
    const COUNT: usize = 2_000;
    let _alone = lock_memif();
    let (_folder, ends) = memif_pair(81);
    let [mut server, mut client] = ends.map(|end| {
        let ends = open_for_cores(&dpdk_config(&end).queues(queues(2)).cores(2), 256);
        assert_eq!(ends.len(), 2);
        ends
    });
    wait_until_up(&mut server.iter_mut().chain(&mut client).collect::<Vec<_>>());
    thread::scope(|scope| {
        for (core, end) in client.iter_mut().enumerate() {
            scope.spawn(move || {
                let mut sent = 0;
                while sent < COUNT {
                    sent += end.send(first_number(core) + sent, 16.min(COUNT - sent));
                }
            });
        }
        for (core, end) in server.iter_mut().enumerate() {
            scope.spawn(move || {
                let (began, mut seen) = (Instant::now(), HashSet::new());
                while seen.len() < COUNT {
                    assert!(began.elapsed() < TIMEOUT, "core {core}: {} arrived", seen.len());
                    end.receive(64, &mut seen);
                    end.free(usize::MAX);
                }
                let all = first_number(core)..first_number(core) + COUNT;
                assert!(seen.into_iter().all(|number| all.contains(&number)));
            });
        }
    });
    client.into_iter().rev().chain(server.into_iter().rev()).for_each(WireEnd::close);
}

/// Its rings are unmapped while the other core may be in a burst, and mapped again when the first
/// core finds the next server.
#[test]
fn survives_death_of_memif_peer_on_two_cores() {
    const ROUNDS: usize = 4;
    let _alone = lock_memif();
    let (_folder, [server, client]) = memif_pair(82);
    let mut peer = Some(EchoProcess::start_with_queues(&server, 2));
    let path = server.rsplit_once('=').unwrap().1;
    while !Path::new(path).exists() {
        thread::yield_now();
    }
    let config = dpdk_config(&client).queues(queues(2)).cores(2);
    let mut ends = open_for_cores(&config, 256);
    let (second, is_ended) = (ends.pop().unwrap(), &AtomicBool::new(false));
    let mut first = ends.pop().unwrap();
    thread::scope(|scope| {
        scope.spawn(move || {
            let (mut second, mut next) = (second, first_number(1));
            while !is_ended.load(Ordering::SeqCst) {
                next += second.send(next, 8);
                // The peer sends by one queue, so nothing comes here.
                second.receive(64, &mut HashSet::new());
                second.device.prepare_sleep().unwrap();
            }
            second.close();
        });
        let mut next = first_number(0);
        for round in 0..ROUNDS {
            let (began, mut seen) = (Instant::now(), [0; 2]);
            // Frames of both cores come back after each start of the peer.
            while seen.iter().any(|&count| count < 500) {
                assert!(began.elapsed() < TIMEOUT, "round {round}: {seen:?}");
                next += first.send(next, 8);
                first.device.receive(&mut first.arena, &mut first.held, 64).unwrap();
                for held in first.held.iter() {
                    seen[usize::from(first.arena.bytes(held)[0])] += 1;
                }
                first.free(usize::MAX);
                // Looks for the server while the link is down.
                first.device.prepare_sleep().unwrap();
            }
            drop(peer.take());
            while first.is_up() {
                assert!(began.elapsed() < 2 * TIMEOUT, "the link stays up");
                thread::yield_now();
            }
            if round + 1 < ROUNDS {
                peer = Some(EchoProcess::start_with_queues(&server, 2));
            }
        }
        is_ended.store(true, Ordering::SeqCst);
    });
    first.close();
}
