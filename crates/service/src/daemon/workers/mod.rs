//! Worker threads for work that an application can delay.
//!
//! An application shares descriptors with the daemon: its connection, its memory, and sockets
//! that it sends along. Almost every system call on such a descriptor can wait for the
//! application. The close of a TCP socket waits for its peer (`SO_LINGER`), the close of a file on
//! FUSE waits for ever, and a call on a memory file waits for the lock of its inode. So a network
//! core makes no such call, except those that the kernel cannot delay: `epoll`, and the signal of an
//! event descriptor. A core passes all other work to the workers of the application's user, and
//! waits for none of them. An application delays only work for its user.

mod app_fd;
mod app_waker;
mod dispatcher;
mod port_releases;

pub(super) use self::app_fd::AppFd;
pub(super) use self::app_waker::AppWaker;
pub(super) use self::dispatcher::{JobDispatcher, NOBODY};
pub(super) use self::port_releases::PortReleases;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use tidegate_memory::shared::RegionReleaser;

/// Interval between checks for unfinished jobs.
const IDLE_CHECK_INTERVAL: Duration = Duration::from_millis(1);

/// Wakes the core of an application, wherever the application is then.
pub(super) type WakeCores = Arc<dyn Fn() + Send + Sync>;

/// Work on something that a user's applications share.
type Job = Box<dyn FnOnce() + Send>;

/// Job of a user, counted until it is done.
struct UserJob {
    uid: u32,
    job: Job,
    count: JobCount,
}

/// Handle to the workers of all users.
#[derive(Clone)]
pub(super) struct UserWorkers {
    jobs: mpsc::Sender<UserJob>,
    unfinished: Arc<AtomicUsize>,
}

impl UserWorkers {
    /// Creates the handle. Jobs wait until the dispatcher is started; without dispatcher they are
    /// dropped by the caller.
    pub(super) fn new() -> (Self, JobDispatcher) {
        let (jobs, queue) = mpsc::channel();
        (Self { jobs, unfinished: Arc::default() }, JobDispatcher::new(queue))
    }

    /// Runs a job on a worker of a user. Jobs of one user may run in any order, and at once.
    pub(super) fn run(&self, uid: u32, job: impl FnOnce() + Send + 'static) {
        let count = JobCount::new(&self.unfinished);
        // Without dispatcher the daemon has ended: nobody is left to wait for a close.
        let _ = self.jobs.send(UserJob { uid, job: Box::new(job), count });
    }

    /// Waits until all jobs are done, or until the time limit: a job may hang.
    pub(super) fn wait_until_idle(&self, timeout: Duration) {
        let until = Instant::now() + timeout;
        while self.unfinished() > 0 && Instant::now() < until {
            std::thread::sleep(IDLE_CHECK_INTERVAL);
        }
    }

    /// Number of jobs that are not done.
    pub(super) fn unfinished(&self) -> usize {
        self.unfinished.load(Ordering::Relaxed)
    }

    /// Blocks all workers of a user until the returned value is dropped.
    #[cfg(test)]
    pub(super) fn block(&self, uid: u32) -> Vec<mpsc::Sender<()>> {
        (0..dispatcher::MAX_THREADS_PER_USER).map(|_| self.block_one(uid)).collect()
    }

    /// Blocks a worker of a user until the returned value is dropped.
    #[cfg(test)]
    fn block_one(&self, uid: u32) -> mpsc::Sender<()> {
        let (release, released) = mpsc::channel::<()>();
        let (begin, begun) = mpsc::channel();
        self.run(uid, move || {
            begin.send(()).unwrap();
            // Ends when the sender is dropped.
            let _ = released.recv();
        });
        begun.recv().unwrap();
        release
    }

    /// Releaser of a region that a user's applications share.
    pub(super) fn region_releaser(&self, uid: u32) -> RegionReleaser {
        let workers = self.clone();
        Arc::new(move |region| workers.run(uid, move || drop(region)))
    }
}

/// Unit of a count of jobs, until it is dropped.
struct JobCount(Arc<AtomicUsize>);

impl JobCount {
    fn new(count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(count))
    }
}

impl Drop for JobCount {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
