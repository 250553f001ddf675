//! Rivera's model: threads that put packets into a queue, threads that take
//! them out, and the time from the start of the first to the end of the last.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use tidegate_memory::queues::{
    Account, Ends, Packet, Producer, PushError, QueueStatistics, Reader, Semaphore, Structure,
    wait_for_room,
};

/// A packet of the model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Token {
    number: u64,
}

/// What a packet of the model counts: a small datagram as the kernel counts it.
const TOKEN_BYTES: usize = 768;

impl Packet for Token {
    fn bytes(&self) -> usize {
        TOKEN_BYTES
    }
}

/// One run of the model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Run {
    pub(crate) producers: usize,
    pub(crate) readers: usize,
    pub(crate) packets_per_reader: u64,
    /// Packets that are put in and taken out together.
    pub(crate) burst: usize,
    /// How long a reader waits between two reads.
    pub(crate) pause: Duration,
    /// After this the run is ended.
    pub(crate) cut_off: Duration,
}

/// What came of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Outcome {
    /// Absent when it was cut off.
    pub(crate) elapsed: Option<Duration>,
    /// Packets that were read.
    pub(crate) read: u64,
    /// Whether every packet was read once, as far as their sum can tell.
    pub(crate) whole: bool,
    pub(crate) statistics: QueueStatistics,
}

/// Runs the model on a queue.
pub(crate) fn measure<S, A, B>(ends: Ends<S, A, B>, run: &Run) -> Outcome
where
    S: Structure<Packet = Token>,
    A: Account,
    B: Semaphore,
{
    let total = run.readers as u64 * run.packets_per_reader;
    let stop = AtomicBool::new(false);
    let (alive, all_ended) = mpsc::channel::<()>();
    let (elapsed, read, sum, statistics) = std::thread::scope(|scope| {
        let start = Instant::now();
        let stop = &stop;
        let mut first = 0;
        for (number, end) in ends.producers.into_iter().enumerate() {
            let last = total * (number as u64 + 1) / run.producers as u64;
            let (numbers, alive) = (first..last, alive.clone());
            first = last;
            scope.spawn(move || {
                produce(end, numbers, run.burst, stop);
                drop(alive);
            });
        }
        let reading = |end| {
            let alive = alive.clone();
            scope.spawn(move || {
                let result = read_all(end, run, stop);
                drop(alive);
                result
            })
        };
        let readers: Vec<_> = ends.readers.into_iter().map(reading).collect();
        drop(alive);
        // Nobody sends: it ends when all threads have dropped their ends.
        let cut = all_ended.recv_timeout(run.cut_off) == Err(mpsc::RecvTimeoutError::Timeout);
        let elapsed = start.elapsed();
        stop.store(true, Ordering::Relaxed);
        let mut all = (0, 0, QueueStatistics::default());
        for reader in readers {
            // A thread of ours that panicked has said so.
            let Ok((read, sum, statistics)) = reader.join() else { continue };
            // Who ended last has seen all there was.
            let uses = |of: &QueueStatistics| {
                let locks = [of.structure, of.account].into_iter().flatten();
                locks.map(|lock| lock.acquisitions).sum::<u64>()
            };
            let last = if uses(&statistics) > uses(&all.2) { statistics } else { all.2 };
            all = (all.0 + read, all.1 + sum, last);
        }
        ((!cut).then_some(elapsed), all.0, all.1, all.2)
    });
    let whole = read == total && sum == total * total.saturating_sub(1) / 2;
    Outcome { elapsed, read, whole, statistics }
}

fn produce<S, A, B>(
    mut end: Producer<S, A, B>,
    mut numbers: std::ops::Range<u64>,
    burst: usize,
    stop: &AtomicBool,
) where
    S: Structure<Packet = Token>,
    A: Account,
    B: Semaphore,
{
    if burst == 1 {
        for number in numbers {
            let mut turn = 0;
            while let Err(PushError::Full(_)) = end.try_push(Token { number }) {
                if stop.load(Ordering::Relaxed) {
                    return;
                }
                wait_for_room(&mut turn);
            }
            // It may be cut off with the queue far from full.
            if number % 1024 == 0 && stop.load(Ordering::Relaxed) {
                return;
            }
        }
        return;
    }
    let mut turn = 0;
    while !numbers.is_empty() && !stop.load(Ordering::Relaxed) {
        let tokens = numbers.clone().take(burst).map(|number| Token { number });
        let put = match end.push_each(tokens) {
            Ok(put) => put,
            Err((put, _)) => {
                if put == 0 {
                    wait_for_room(&mut turn);
                    continue;
                }
                put
            }
        };
        turn = 0;
        numbers.start += put as u64;
    }
}

/// Reads until the queue ends; gives the number and the sum of what was read.
fn read_all<S, A, B>(
    mut end: Reader<S, A, B>,
    run: &Run,
    stop: &AtomicBool,
) -> (u64, u64, QueueStatistics)
where
    S: Structure<Packet = Token>,
    A: Account,
    B: Semaphore,
{
    let (mut read, mut sum) = (0, 0);
    let mut tokens = VecDeque::with_capacity(run.burst);
    loop {
        if run.burst == 1 {
            let Some(token) = end.pop_wait() else { break };
            read += 1;
            sum += token.number;
            pause(run.pause);
        } else {
            if end.pop_each_wait(run.burst, &mut tokens) == 0 {
                break;
            }
            read += tokens.len() as u64;
            sum += tokens.drain(..).map(|token| token.number).sum::<u64>();
        }
        if stop.load(Ordering::Relaxed) {
            break;
        }
    }
    (read, sum, end.statistics())
}

/// Spins, since sleeping takes a hundred times as long as these pauses are.
pub(crate) fn pause(length: Duration) {
    if length.is_zero() {
        return;
    }
    let start = Instant::now();
    while start.elapsed() < length {
        std::hint::spin_loop();
    }
}
