//! Tests that every structure, account and semaphore has to pass.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicIsize, AtomicUsize, Ordering};

use proptest::prelude::*;

use super::*;
use crate::lock::{Mcs, Metered, Sleeping, Spin, Ticket};

/// A packet with its producer and sequence number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Numbered {
    producer: usize,
    number: usize,
    bytes: usize,
}

impl Packet for Numbered {
    fn bytes(&self) -> usize {
        self.bytes
    }
}

/// A semaphore that Miri can observe.
struct CondvarSemaphore(std::sync::Mutex<u32>, std::sync::Condvar);

impl Semaphore for CondvarSemaphore {
    const NAME: &'static str = "visible";
    const MAX_SPIN_PAUSES: u32 = 2;
    const SINGLE_SEARCHER: bool = true;

    fn new() -> std::io::Result<Self> {
        Ok(Self(std::sync::Mutex::new(0), std::sync::Condvar::new()))
    }

    fn post(&self, count: u32) {
        *self.0.lock().unwrap() += count;
        self.1.notify_all();
    }

    fn wait(&self) {
        let mut count = self.1.wait_while(self.0.lock().unwrap(), |count| *count == 0).unwrap();
        *count -= 1;
    }
}

/// Calls a generic function for every structure: `each_structure!(f::<A, B>(x))`.
macro_rules! each_structure {
    ($check:ident, $account:ty, $semaphore:ty, $($argument:expr),*) => {{
        $check::<SingleList<Numbered, Spin>, $account, $semaphore>($($argument),*)?;
        $check::<SingleList<Numbered, Sleeping>, $account, $semaphore>($($argument),*)?;
        $check::<MultiList<Numbered, Spin>, $account, $semaphore>($($argument),*)?;
        $check::<MultiList<Numbered, Sleeping>, $account, $semaphore>($($argument),*)?;
        $check::<MultiList<Numbered, Metered<Spin>>, $account, $semaphore>($($argument),*)?;
        $check::<SingleList<Numbered, Ticket>, $account, $semaphore>($($argument),*)?;
        $check::<SingleList<Numbered, Mcs>, $account, $semaphore>($($argument),*)?;
        $check::<MpmcRing<Numbered>, $account, $semaphore>($($argument),*)?;
        $check::<WorkStealing<Numbered>, $account, $semaphore>($($argument),*)?;
        $check::<RingMatrix<Numbered>, $account, $semaphore>($($argument),*)?;
    }};
}

type Checked = Result<(), TestCaseError>;

/// One step of one user of a queue.
#[derive(Clone, Copy, Debug)]
enum Step {
    /// Producer, bytes.
    Push(usize, usize),
    /// Producer, number of packets, bytes each.
    PushEach(usize, usize, usize),
    /// Reader.
    Pop(usize),
    /// Reader, number of packets.
    PopEach(usize, usize),
}

fn any_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (0usize..4, 0usize..100).prop_map(|(p, b)| Step::Push(p, b)),
        (0usize..4, 0usize..70, 0usize..30).prop_map(|(p, n, b)| Step::PushEach(p, n, b)),
        (0usize..4).prop_map(Step::Pop),
        (0usize..4, 0usize..70).prop_map(|(r, n)| Step::PopEach(r, n)),
    ]
}

/// Expected content of a queue, and the packets that each reader has seen.
struct Model {
    limits: (usize, usize),
    held: Vec<Numbered>,
    next: Vec<usize>,
    /// By reader and producer: the last sequence number seen.
    seen: Vec<Vec<Option<usize>>>,
    keeps_order: bool,
}

impl Model {
    fn next_packet(&mut self, producer: usize, bytes: usize) -> Numbered {
        Numbered { producer, number: self.next[producer], bytes }
    }

    fn fits(&self, packet: Numbered) -> bool {
        let bytes: usize = self.held.iter().map(|held| held.bytes).sum();
        self.held.len() < self.limits.0 && bytes + packet.bytes <= self.limits.1
    }

    fn record_put(&mut self, packet: Numbered) {
        self.next[packet.producer] += 1;
        self.held.push(packet);
    }

    fn record_taken(&mut self, reader: usize, packet: Numbered) -> Checked {
        let at = self.held.iter().position(|&held| held == packet);
        prop_assert!(at.is_some(), "{packet:?} was not in the queue");
        self.held.remove(at.unwrap());
        let seen = &mut self.seen[reader][packet.producer];
        if self.keeps_order {
            prop_assert!(*seen < Some(packet.number), "{packet:?} after {seen:?}");
        }
        *seen = Some(packet.number);
        Ok(())
    }
}

/// Compares with a plain list: no packet lost, none twice, limits exact.
fn agrees_with_the_model<S: Structure<Packet = Numbered>, A: Account, B: Semaphore>(
    (producers, readers): (usize, usize),
    (packets, bytes): (u32, u64),
    steps: &[Step],
) -> Checked {
    let shape = QueueShape { producers, readers, capacity: packets as usize };
    let mut ends = open::<S, A, B>(&shape, QueueLimits::new(packets, bytes).unwrap()).unwrap();
    let mut model = Model {
        limits: (packets as usize, bytes as usize),
        held: Vec::new(),
        next: vec![0; producers],
        seen: vec![vec![None; producers]; readers],
        keeps_order: S::KEEPS_ORDER,
    };
    for &step in steps {
        match step {
            Step::Push(producer, bytes) => {
                let producer = producer % producers;
                let packet = model.next_packet(producer, bytes);
                let fits = model.fits(packet);
                let put = ends.producers[producer].try_push(packet);
                prop_assert_eq!(put, if fits { Ok(()) } else { Err(PushError::Full(packet)) });
                if fits {
                    model.record_put(packet);
                }
            }
            Step::PushEach(producer, count, bytes) => {
                let producer = producer % producers;
                let first = model.next_packet(producer, bytes);
                let burst = (0..count).map(|n| Numbered { number: first.number + n, ..first });
                let put = ends.producers[producer].push_each(burst.clone());
                let mut fitting = 0;
                for packet in burst {
                    if !model.fits(packet) {
                        prop_assert_eq!(put, Err((fitting, PushError::Full(packet))));
                        break;
                    }
                    model.record_put(packet);
                    fitting += 1;
                }
                prop_assert!(fitting < count || put == Ok(count));
            }
            Step::Pop(reader) => {
                let reader = reader % readers;
                let packet = ends.readers[reader].pop();
                prop_assert!(packet.is_some() || model.held.is_empty() || S::PARKER_PER_READER);
                packet.map_or(Ok(()), |packet| model.record_taken(reader, packet))?;
            }
            Step::PopEach(reader, count) => {
                let reader = reader % readers;
                let mut taken = VecDeque::new();
                let took = ends.readers[reader].pop_each(count, &mut taken);
                prop_assert!(took == taken.len() && took <= count);
                let nothing = count == 0 || model.held.is_empty() || S::PARKER_PER_READER;
                prop_assert!(took > 0 || nothing);
                taken.into_iter().try_for_each(|packet| model.record_taken(reader, packet))?;
            }
        }
    }
    // The remaining packets come out, and then the end.
    ends.producers.clear();
    for (number, reader) in ends.readers.iter_mut().enumerate() {
        while let Some(packet) = reader.pop_wait() {
            model.record_taken(number, packet)?;
        }
    }
    prop_assert!(model.held.is_empty(), "lost: {:?}", model.held);
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: if cfg!(miri) { 2 } else { 100 },
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn every_structure_is_a_queue_with_exact_limits(
        users in (1usize..4, 1usize..4),
        limits in (1u32..80, 0u64..2_000),
        steps in prop::collection::vec(any_step(), 0..if cfg!(miri) { 15 } else { 80 }),
    ) {
        each_structure!(agrees_with_the_model, PooledAccount, CondvarSemaphore, users, limits, &steps);
        each_structure!(agrees_with_the_model, LockedAccount<Spin>, CondvarSemaphore, users, limits, &steps);
    }
}

/// Most packets that a reader takes at once.
const READ_BURST: usize = 7;

/// Threads on both sides: no packet lost, none twice, order where promised, never more packets
/// than the limit, and every reader reaches the end.
fn survives_threads<S, A, B>(users: (usize, usize), each: usize, limit: u32) -> Checked
where
    S: Structure<Packet = Numbered>,
    A: Account,
    B: Semaphore,
{
    let (producers, readers) = users;
    let shape = QueueShape { producers, readers, capacity: limit as usize };
    let limits = QueueLimits::new(limit, u64::from(limit) * 10).unwrap();
    let ends = open::<S, A, B>(&shape, limits).unwrap();
    // Packets put in less packets taken out, as counted so far: readers may have taken packets
    // and not counted them yet.
    let (level, highest) = (AtomicIsize::new(0), AtomicIsize::new(0));
    let put = |count: usize| {
        let now = level.fetch_add(count as isize, Ordering::Relaxed) + count as isize;
        highest.fetch_max(now, Ordering::Relaxed);
    };
    let taken: Vec<Vec<Numbered>> = std::thread::scope(|scope| {
        let (level, put) = (&level, &put);
        for (producer, mut end) in ends.producers.into_iter().enumerate() {
            scope.spawn(move || produce(&mut end, producer, each, put));
        }
        let reading = |(number, mut end): (usize, Reader<S, A, B>)| {
            scope.spawn(move || {
                let mut taken = VecDeque::new();
                loop {
                    let before = taken.len();
                    // Every second reader takes bursts.
                    if number % 2 == 0 {
                        taken.extend(end.pop_wait());
                    } else {
                        end.pop_each_wait(READ_BURST, &mut taken);
                    }
                    let count = taken.len() - before;
                    level.fetch_sub(count as isize, Ordering::Relaxed);
                    if count == 0 {
                        return Vec::from(taken);
                    }
                }
            })
        };
        let threads: Vec<_> = ends.readers.into_iter().enumerate().map(reading).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let max_held = limit as usize + readers * READ_BURST;
    let limited = A::NAME != Unlimited::NAME;
    prop_assert!(!limited || highest.into_inner() <= max_held as isize, "more than the limit");
    for seen in taken.iter().filter(|_| S::KEEPS_ORDER) {
        for producer in 0..producers {
            let of_it = seen.iter().filter(|packet| packet.producer == producer);
            prop_assert!(of_it.map(|packet| packet.number).is_sorted());
        }
    }
    let mut all: Vec<Numbered> = taken.into_iter().flatten().collect();
    all.sort_unstable();
    let expected = (0..producers)
        .flat_map(|producer| (0..each).map(move |number| Numbered { producer, number, bytes: 10 }));
    prop_assert!(all.into_iter().eq(expected), "lost or taken twice");
    Ok(())
}

/// Puts `each` packets in, one by one and in bursts, and reports their number to `put`.
fn produce<S, A, B>(
    end: &mut Producer<S, A, B>,
    producer: usize,
    each: usize,
    put: &(impl Fn(usize) + Sync),
) where
    S: Structure<Packet = Numbered>,
    A: Account,
    B: Semaphore,
{
    let packet = |number| Numbered { producer, number, bytes: 10 };
    let (mut number, mut attempt) = (0, 0);
    while number < each {
        if number % 3 == 0 {
            end.push(packet(number)).unwrap();
            number += 1;
            put(1);
            continue;
        }
        let burst = (number..each.min(number + 50)).map(packet);
        let count = match end.push_each(burst) {
            Ok(count) => count,
            Err((count, _)) => {
                wait_for_space(&mut attempt);
                count
            }
        };
        number += count;
        put(count);
    }
}

#[test]
fn every_structure_survives_threads() {
    let check = || -> Checked {
        // Miri runs about a million times slower.
        let (each, rounds) = if cfg!(miri) { (9, 1) } else { (3_000, 3) };
        for users in [(2, 2), (1, 3), (3, 1)].into_iter().take(rounds) {
            each_structure!(survives_threads, PooledAccount, CondvarSemaphore, users, each, 16);
            each_structure!(
                survives_threads,
                LockedAccount<Sleeping>,
                CondvarSemaphore,
                users,
                each,
                16
            );
        }
        Ok(())
    };
    check().unwrap();
}

/// Same as above with the system's sleep primitives, which Miri does not support.
#[cfg(not(miri))]
#[test]
fn every_structure_survives_threads_that_sleep() {
    let check = || -> Checked {
        for users in [(1, 1), (1, 4), (4, 1), (4, 4)] {
            each_structure!(survives_threads, PooledAccount, Futex, users, 5_000, 64);
            each_structure!(survives_threads, Unlimited, Eventfd, users, 5_000, 64);
            each_structure!(survives_threads, Unlimited, Futex, users, 5_000, 1024);
        }
        Ok(())
    };
    check().unwrap();
}

/// Every reader sleeps, or is about to, when the queue is closed.
fn closing_wakes<S, A, B>(readers: usize) -> Checked
where
    S: Structure<Packet = Numbered>,
    A: Account,
    B: Semaphore,
{
    let shape = QueueShape { producers: 1, readers, capacity: 4 };
    let mut ends = open::<S, A, B>(&shape, QueueLimits::new(4, 100).unwrap()).unwrap();
    let waiting = AtomicUsize::new(0);
    let ended = std::thread::scope(|scope| {
        let wait = |mut end: Reader<S, A, B>| {
            let waiting = &waiting;
            scope.spawn(move || {
                waiting.fetch_add(1, Ordering::Relaxed);
                end.pop_wait().is_none()
            })
        };
        let threads: Vec<_> = ends.readers.drain(..).map(wait).collect();
        while waiting.load(Ordering::Relaxed) < readers {
            std::thread::yield_now();
        }
        ends.producers[0].close();
        threads.into_iter().all(|thread| thread.join().unwrap())
    });
    prop_assert!(ended);
    let packet = Numbered { producer: 0, number: 0, bytes: 1 };
    prop_assert_eq!(ends.producers[0].try_push(packet), Err(PushError::Closed(packet)));
    prop_assert_eq!(ends.producers[0].push(packet), Err(packet));
    Ok(())
}

#[test]
fn closing_wakes_every_reader() {
    let check = || -> Checked {
        each_structure!(closing_wakes, PooledAccount, CondvarSemaphore, 3);
        #[cfg(not(miri))]
        {
            each_structure!(closing_wakes, PooledAccount, Futex, 3);
            each_structure!(closing_wakes, Unlimited, Eventfd, 3);
        }
        Ok(())
    };
    check().unwrap();
}

/// A reader that never reads and a dropped reader do not slow the others.
fn others_go_on<S, A, B>() -> Checked
where
    S: Structure<Packet = Numbered>,
    A: Account,
    B: Semaphore,
{
    let shape = QueueShape { producers: 1, readers: 3, capacity: 8 };
    let mut ends = open::<S, A, B>(&shape, QueueLimits::new(24, 1_000).unwrap()).unwrap();
    let _never_reads = ends.readers.pop().unwrap();
    drop(ends.readers.pop());
    let (mut read, rounds) = (0, if cfg!(miri) { 40 } else { 200 });
    for number in 0..rounds {
        let packet = Numbered { producer: 0, number, bytes: 1 };
        if ends.producers[0].try_push(packet).is_ok() && ends.readers[0].pop().is_some() {
            read += 1;
        }
    }
    prop_assert!(read >= rounds * 9 / 20, "{read} of {rounds}");
    drop(ends.readers);
    drop(_never_reads);
    prop_assert!(ends.producers[0].is_closed());
    Ok(())
}

#[test]
fn idle_reader_does_not_block_others() {
    let check = || -> Checked {
        each_structure!(others_go_on, PooledAccount, CondvarSemaphore,);
        Ok(())
    };
    check().unwrap();
}

#[test]
fn metered_locks_report_statistics() {
    let shape = QueueShape { producers: 1, readers: 2, capacity: 8 };
    let limits = QueueLimits::new(8, 100).unwrap();
    let mut ends =
        open::<MultiList<Numbered, Metered<Spin>>, LockedAccount<Metered<Spin>>, CondvarSemaphore>(
            &shape, limits,
        )
        .unwrap();
    let packet = Numbered { producer: 0, number: 0, bytes: 1 };
    ends.producers[0].try_push(packet).unwrap();
    assert_eq!(ends.readers[0].pop(), Some(packet));
    let counted = ends.readers[0].statistics();
    assert_eq!(counted.structure.unwrap().acquisitions, 2);
    assert_eq!(counted.account.unwrap().acquisitions, 2);
    let plain =
        open::<MpmcRing<Numbered>, PooledAccount, CondvarSemaphore>(&shape, limits).unwrap();
    assert_eq!(plain.producers[0].statistics(), QueueStatistics::default());
}
