//! Runs a [`Responder`] on several threads, each with its own readers.

use std::io;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tidegate::{ReadersConfig, ServiceTimes, UdpReader, UdpReaders, UdpSocket, wait_readable};

use crate::kernel::{KernelError, KernelSocket, serve_kernel};
use crate::responder::unix_time_ns;
use crate::{Responder, ServeCounters, ServeState};

/// Interval at which an idle thread checks the stop flag.
const STOP_CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Serves `sockets` with one thread per responder until `state.stop` is set, which is noticed
/// within 100 ms, or until one of the threads fails. Each thread has one reader per socket, and `config`
/// decides how requests are distributed among readers. Replies leave from the address that the
/// request was sent to. Each thread first calls `on_thread_start` with its index, for example to
/// pin itself to a CPU.
///
/// # Errors
/// When the sockets' stack has no thread of its own, or its device fails for good.
pub fn serve_readers<R: Responder + Send>(
    sockets: &[UdpSocket],
    responders: Vec<R>,
    config: ReadersConfig,
    on_thread_start: impl Fn(usize) + Sync,
    state: ServeState<'_>,
) -> io::Result<()> {
    let groups = sockets.iter().map(|socket| socket.readers(config));
    let groups = groups.collect::<io::Result<Vec<_>>>()?;
    let add_readers = |_: &R| groups.iter().map(UdpReaders::add).collect::<io::Result<Vec<_>>>();
    // All readers exist before the first thread answers.
    let readers = responders.iter().map(add_readers).collect::<io::Result<Vec<_>>>()?;
    let jobs = responders.into_iter().zip(readers);
    run_threads(jobs, on_thread_start, state.stop, |(mut responder, mut readers)| {
        serve(&mut readers, &mut responder, state)
    })
}

/// Serving loop of one thread.
fn serve(
    readers: &mut [UdpReader],
    responder: &mut impl Responder,
    state: ServeState<'_>,
) -> io::Result<()> {
    let ServeState { stop, counters, durations } = state;
    readers.iter_mut().for_each(|reader| reader.set_nonblocking(true));
    let mut times: Vec<_> = readers.iter().map(|_| ServiceTimes::default()).collect();
    while !stop.load(Ordering::Relaxed) {
        responder.start_batch(&unix_time_ns);
        let mut served = false;
        for (reader, times) in readers.iter_mut().zip(&mut times) {
            let mut replies = 0;
            let respond = |request: &[u8], from, reply: &mut [u8]| {
                let len = responder.respond(request, from, reply);
                replies += u64::from(len.is_some());
                len
            };
            let taken = match durations {
                None => reader.exchange(respond),
                Some(durations) => {
                    let taken = reader.exchange_timed(times, respond);
                    durations.record_last(times);
                    taken
                }
            };
            match taken {
                Ok(requests) => {
                    ServeCounters::add(&counters.requests, requests as u64);
                    ServeCounters::add(&counters.replies, replies);
                    served = true;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
        if !served {
            responder.on_idle();
            wait_readable(readers, Some(STOP_CHECK_INTERVAL))?;
        }
    }
    Ok(())
}

/// Serves kernel sockets with one thread per responder. With one set in `sets` all threads read
/// the same sockets; otherwise each thread has its own set, opened with
/// [`KernelOptions::reuse_port`](crate::kernel::KernelOptions::reuse_port). `on_thread_start` is
/// as in [`serve_readers`].
///
/// # Errors
/// As [`serve_kernel`].
///
/// # Panics
/// When `sets` is empty.
pub fn serve_kernel_readers<R: Responder + Send>(
    sets: &[Vec<KernelSocket>],
    responders: Vec<R>,
    max_datagram_bytes: usize,
    on_thread_start: impl Fn(usize) + Sync,
    stop: &AtomicBool,
    counters: &ServeCounters,
) -> Result<(), KernelError> {
    let jobs = responders.into_iter().zip(sets.iter().cycle());
    run_threads(jobs, on_thread_start, stop, |(mut responder, sockets)| {
        serve_kernel(sockets, &mut responder, max_datagram_bytes, stop, counters)
    })
}

/// Runs one thread per job. When one thread fails, all stop.
fn run_threads<J: Send, E: Send>(
    jobs: impl Iterator<Item = J>,
    on_thread_start: impl Fn(usize) + Sync,
    stop: &AtomicBool,
    work: impl Fn(J) -> Result<(), E> + Sync,
) -> Result<(), E> {
    std::thread::scope(|scope| {
        let (on_thread_start, work) = (&on_thread_start, &work);
        let spawn = |(index, job)| {
            scope.spawn(move || {
                let stop_guard = StopOnFailure(stop);
                on_thread_start(index);
                let result = work(job);
                if result.is_ok() {
                    std::mem::forget(stop_guard);
                }
                result
            })
        };
        let threads: Vec<_> = jobs.enumerate().map(spawn).collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, _>| {
            thread.join().unwrap_or_else(|panic| resume_unwind(panic))
        };
        // All threads have ended before the first error is returned.
        let results: Vec<Result<(), E>> = threads.into_iter().map(join).collect();
        results.into_iter().collect()
    })
}

/// Stops the other threads when dropped, that is when this thread fails or panics.
struct StopOnFailure<'a>(&'a AtomicBool);

impl Drop for StopOnFailure<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
