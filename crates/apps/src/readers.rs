//! Runs a [`Responder`] on several threads, each of which reads for itself.

use std::io;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tidegate::{ReadersConfig, UdpReader, UdpReaders, UdpSocket, wait_readable};

use crate::kernel::{KernelError, KernelSocket, serve_kernel};
use crate::{Responder, ServeCounters};

/// How often an idle thread looks at the stop flag.
const STOP_CHECK: Duration = Duration::from_millis(100);

/// Serves `sockets` with a thread for each of `responders` until `stop` is set,
/// which is noticed within a tenth of a second, or until one of the threads
/// cannot go on. Each thread has a reader of each socket, so that requests are
/// spread as `config` says. Replies leave from the address that was asked.
/// `begin` is the first that each thread calls, with its number: to choose its
/// processor, say.
///
/// # Errors
/// When the sockets' stack has no thread of its own, or its port is of no
/// further use.
pub fn serve_readers<R: Responder + Send>(
    sockets: &[UdpSocket],
    responders: Vec<R>,
    config: ReadersConfig,
    begin: impl Fn(usize) + Sync,
    stop: &AtomicBool,
    counters: &ServeCounters,
) -> io::Result<()> {
    let groups = sockets.iter().map(|socket| socket.readers(config));
    let groups = groups.collect::<io::Result<Vec<_>>>()?;
    let own = |_: &R| groups.iter().map(UdpReaders::add).collect::<io::Result<Vec<_>>>();
    // All readers are there before the first one answers.
    let readers = responders.iter().map(own).collect::<io::Result<Vec<_>>>()?;
    let jobs = responders.into_iter().zip(readers);
    on_threads(jobs, begin, stop, |(mut responder, mut readers)| {
        serve(&mut readers, &mut responder, stop, counters)
    })
}

/// One thread's part.
fn serve(
    readers: &mut [UdpReader],
    responder: &mut impl Responder,
    stop: &AtomicBool,
    counters: &ServeCounters,
) -> io::Result<()> {
    readers.iter_mut().for_each(|reader| reader.set_nonblocking(true));
    while !stop.load(Ordering::Relaxed) {
        let mut served = false;
        for reader in &mut *readers {
            let mut answers = 0;
            let taken = reader.exchange(|request, from, reply| {
                let len = responder.respond(request, from, reply);
                answers += u64::from(len.is_some());
                len
            });
            match taken {
                Ok(requests) => {
                    ServeCounters::add(&counters.requests, requests as u64);
                    ServeCounters::add(&counters.answers, answers);
                    served = true;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
        if !served {
            wait_readable(readers, Some(STOP_CHECK))?;
        }
    }
    Ok(())
}

/// Serves kernel sockets with a thread for each of `responders`: all threads
/// read the same sockets when there is one set of them, else each its own, made
/// with [`KernelOptions::reuse_port`](crate::kernel::KernelOptions::reuse_port).
/// `begin` is as in [`serve_readers`].
///
/// # Errors
/// As [`serve_kernel`].
///
/// # Panics
/// Without sockets.
pub fn serve_kernel_readers<R: Responder + Send>(
    sets: &[Vec<KernelSocket>],
    responders: Vec<R>,
    max_datagram_bytes: usize,
    begin: impl Fn(usize) + Sync,
    stop: &AtomicBool,
    counters: &ServeCounters,
) -> Result<(), KernelError> {
    let jobs = responders.into_iter().zip(sets.iter().cycle());
    on_threads(jobs, begin, stop, |(mut responder, sockets)| {
        serve_kernel(sockets, &mut responder, max_datagram_bytes, stop, counters)
    })
}

/// A thread for each job. When one cannot go on, all end.
fn on_threads<J: Send, E: Send>(
    jobs: impl Iterator<Item = J>,
    begin: impl Fn(usize) + Sync,
    stop: &AtomicBool,
    work: impl Fn(J) -> Result<(), E> + Sync,
) -> Result<(), E> {
    std::thread::scope(|scope| {
        let (begin, work) = (&begin, &work);
        let start = |(number, job)| {
            scope.spawn(move || {
                let end = StopAll(stop);
                begin(number);
                let worked = work(job);
                if worked.is_ok() {
                    std::mem::forget(end);
                }
                worked
            })
        };
        let threads: Vec<_> = jobs.enumerate().map(start).collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, _>| {
            thread.join().unwrap_or_else(|panic| resume_unwind(panic))
        };
        // All have ended before the first error is told.
        let ended: Vec<Result<(), E>> = threads.into_iter().map(join).collect();
        ended.into_iter().collect()
    })
}

/// Stops the others when a thread fails or panics.
struct StopAll<'a>(&'a AtomicBool);

impl Drop for StopAll<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
