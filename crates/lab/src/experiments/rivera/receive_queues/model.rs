//! Rivera's model: producer threads push packets into a queue and reader threads pop them.
//!
//! The measured time runs from the start of the first thread to the end of the last thread.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use tidegate_queues::{
    Account, Packet, Producer, PushError, QueueEnds, QueueStatistics, Reader, Semaphore, Structure,
    wait_for_space,
};

/// A packet of the model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ModelPacket {
    number: u64,
}

/// Memory that one packet of the model accounts for: as the kernel counts a small datagram.
const MODEL_PACKET_BYTES: usize = 768;

impl Packet for ModelPacket {
    fn bytes(&self) -> usize {
        MODEL_PACKET_BYTES
    }
}

/// Parameters of one run of the model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ModelConfig {
    pub(crate) producers: usize,
    pub(crate) readers: usize,
    pub(crate) packets_per_reader: u64,
    /// Packets that are pushed and popped together.
    pub(crate) burst: usize,
    /// Pause of a reader between two reads.
    pub(crate) read_pause: Duration,
    /// Time limit of the run.
    pub(crate) time_limit: Duration,
}

/// Result of one run of the model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ModelOutcome {
    /// Elapsed time; `None` when the run was cut off.
    pub(crate) elapsed: Option<Duration>,
    /// Packets that were read.
    pub(crate) read: u64,
    /// True when every packet was read once, as far as count and sum of the numbers show.
    pub(crate) is_complete: bool,
    pub(crate) statistics: QueueStatistics,
}

/// Runs the model on a queue.
pub(crate) fn measure<S, A, B>(ends: QueueEnds<S, A, B>, run: &ModelConfig) -> ModelOutcome
where
    S: Structure<Packet = ModelPacket>,
    A: Account,
    B: Semaphore,
{
    let total = run.readers as u64 * run.packets_per_reader;
    let stop = AtomicBool::new(false);
    let (alive, all_dropped) = mpsc::channel::<()>();
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
        let spawn_reader = |end| {
            let alive = alive.clone();
            scope.spawn(move || {
                let result = read_all(end, run, stop);
                drop(alive);
                result
            })
        };
        let readers: Vec<_> = ends.readers.into_iter().map(spawn_reader).collect();
        drop(alive);
        // Nothing is sent on this channel: it closes when all threads have dropped their senders.
        let timed_out =
            all_dropped.recv_timeout(run.time_limit) == Err(mpsc::RecvTimeoutError::Timeout);
        let elapsed = start.elapsed();
        stop.store(true, Ordering::Relaxed);
        let mut totals = (0, 0, QueueStatistics::default());
        for reader in readers {
            // A reader that panicked has already printed its panic message.
            let Ok((read, sum, statistics)) = reader.join() else { continue };
            // The reader that finished last has the complete statistics.
            let acquisitions = |statistics: &QueueStatistics| {
                let locks = [statistics.structure, statistics.account].into_iter().flatten();
                locks.map(|lock| lock.acquisitions).sum::<u64>()
            };
            let last = if acquisitions(&statistics) > acquisitions(&totals.2) {
                statistics
            } else {
                totals.2
            };
            totals = (totals.0 + read, totals.1 + sum, last);
        }
        ((!timed_out).then_some(elapsed), totals.0, totals.1, totals.2)
    });
    let is_complete = read == total && sum == total * total.saturating_sub(1) / 2;
    ModelOutcome { elapsed, read, is_complete, statistics }
}

fn produce<S, A, B>(
    mut end: Producer<S, A, B>,
    mut numbers: std::ops::Range<u64>,
    burst: usize,
    stop: &AtomicBool,
) where
    S: Structure<Packet = ModelPacket>,
    A: Account,
    B: Semaphore,
{
    if burst == 1 {
        for number in numbers {
            let mut wait_round = 0;
            while let Err(PushError::Full(_)) = end.try_push(ModelPacket { number }) {
                if stop.load(Ordering::Relaxed) {
                    return;
                }
                wait_for_space(&mut wait_round);
            }
            // The run may be cut off while the queue is far from full.
            if number % 1024 == 0 && stop.load(Ordering::Relaxed) {
                return;
            }
        }
        return;
    }
    let mut wait_round = 0;
    while !numbers.is_empty() && !stop.load(Ordering::Relaxed) {
        let packets = numbers.clone().take(burst).map(|number| ModelPacket { number });
        let pushed = match end.push_each(packets) {
            Ok(pushed) => pushed,
            Err((pushed, _)) => {
                if pushed == 0 {
                    wait_for_space(&mut wait_round);
                    continue;
                }
                pushed
            }
        };
        wait_round = 0;
        numbers.start += pushed as u64;
    }
}

/// Reads until the queue ends; returns the number and the sum of the packets read.
fn read_all<S, A, B>(
    mut end: Reader<S, A, B>,
    run: &ModelConfig,
    stop: &AtomicBool,
) -> (u64, u64, QueueStatistics)
where
    S: Structure<Packet = ModelPacket>,
    A: Account,
    B: Semaphore,
{
    let (mut read, mut sum) = (0, 0);
    let mut packets = VecDeque::with_capacity(run.burst);
    loop {
        if run.burst == 1 {
            let Some(packet) = end.pop_wait() else { break };
            read += 1;
            sum += packet.number;
            spin_for(run.read_pause);
        } else {
            if end.pop_each_wait(run.burst, &mut packets) == 0 {
                break;
            }
            read += packets.len() as u64;
            sum += packets.drain(..).map(|token| token.number).sum::<u64>();
        }
        if stop.load(Ordering::Relaxed) {
            break;
        }
    }
    (read, sum, end.statistics())
}

/// Busy-waits for `duration`, since sleeping takes a hundred times as long as these pauses.
pub(crate) fn spin_for(duration: Duration) {
    if duration.is_zero() {
        return;
    }
    let start = Instant::now();
    while start.elapsed() < duration {
        std::hint::spin_loop();
    }
}
