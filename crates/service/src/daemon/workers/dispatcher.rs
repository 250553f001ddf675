//! Dispatcher: passes each job to the workers of its user.

use std::collections::HashMap;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};

use super::{Job, JobCount, UserJob};

/// Maximum number of worker threads of one user. A job that hangs takes one of them.
pub(super) const MAX_THREADS_PER_USER: usize = 4;
/// Maximum number of users with workers of their own at a time; further users share the workers
/// of nobody.
const MAX_USERS: usize = 64;

/// Nice value of the workers: a tenth of the weight of a network core on the same processor. Most jobs
/// are long system calls for a user, so a core would wait for milliseconds.
const WORKER_NICE: i32 = 10;

/// User of the workers that all users beyond [`MAX_USERS`] share.
pub(in crate::daemon) const NOBODY: u32 = u32::MAX;

/// Thread that passes each job to the workers of its user.
pub(in crate::daemon) struct JobDispatcher {
    queue: mpsc::Receiver<UserJob>,
}

impl JobDispatcher {
    pub(super) fn new(queue: mpsc::Receiver<UserJob>) -> Self {
        Self { queue }
    }

    /// Starts the thread, with the privileges of the calling thread. The thread ends with the last
    /// handle to the workers. Nobody joins the thread or a worker: a job may never end.
    ///
    /// # Errors
    /// When no thread can be started.
    pub(in crate::daemon) fn start(self) -> io::Result<()> {
        let mut crew = Crew::new()?;
        let run = move || self.queue.into_iter().for_each(|job| crew.assign(job));
        std::thread::Builder::new().name("tidegate-jobs".into()).spawn(run)?;
        Ok(())
    }

    /// Runs all queued jobs on this thread.
    #[cfg(any(test, fuzzing))]
    pub(in crate::daemon) fn run_queued(&self) {
        self.queue.try_iter().for_each(|queued| (queued.job)());
    }
}

/// Workers of all users.
struct Crew {
    users: HashMap<u32, UserQueue>,
}

/// Job with its units in the counts of the user and of all users.
type CountedJob = (Job, [JobCount; 2]);

/// Jobs of a user. The threads take them from one queue, so no job waits for a thread that hangs
/// while another is idle. The threads end when this is dropped and the queue is empty.
struct UserQueue {
    sender: mpsc::Sender<CountedJob>,
    jobs: Arc<Mutex<mpsc::Receiver<CountedJob>>>,
    unfinished: Arc<AtomicUsize>,
    threads: Arc<AtomicUsize>,
}

impl UserQueue {
    fn new() -> Self {
        let (sender, jobs) = mpsc::channel();
        let jobs = Arc::new(Mutex::new(jobs));
        Self { sender, jobs, unfinished: Arc::default(), threads: Arc::default() }
    }

    fn unfinished(&self) -> usize {
        self.unfinished.load(Ordering::Relaxed)
    }

    /// Starts a thread if there may be more jobs than threads. Returns false if there is no thread.
    fn has_thread_for_one_more(&self) -> bool {
        let threads = self.threads.load(Ordering::Relaxed);
        let is_enough = threads > self.unfinished() || threads == MAX_THREADS_PER_USER;
        is_enough || self.start_thread().is_ok() || threads > 0
    }

    fn start_thread(&self) -> io::Result<()> {
        let (jobs, own) = (Arc::clone(&self.jobs), JobCount::new(&self.threads));
        let run = move || {
            let _own = own;
            // A higher nice value needs no permission.
            let _ = rustix::process::setpriority_process(None, WORKER_NICE);
            let next = || jobs.lock().unwrap_or_else(PoisonError::into_inner).recv();
            while let Ok((job, counts)) = next() {
                // A panic is reported by its hook; the thread has other jobs.
                let _ = catch_unwind(AssertUnwindSafe(job));
                drop(counts);
            }
        };
        std::thread::Builder::new().name("tidegate-worker".into()).spawn(run)?;
        Ok(())
    }

    fn push(&self, job: Job, count: JobCount) {
        let own = JobCount::new(&self.unfinished);
        // The receiver is there as long as this.
        let _ = self.sender.send((job, [own, count]));
    }
}

impl Crew {
    /// # Errors
    /// When no thread can be started.
    fn new() -> io::Result<Self> {
        let nobody = UserQueue::new();
        nobody.start_thread()?;
        Ok(Self { users: HashMap::from([(NOBODY, nobody)]) })
    }

    /// Passes a job to the workers of its user; to those of nobody, if no thread can be started.
    fn assign(&mut self, UserJob { uid, job, count }: UserJob) {
        let uid = self.admit(uid);
        let own = self.users.entry(uid).or_insert_with(UserQueue::new);
        if own.has_thread_for_one_more() {
            own.push(job, count);
        } else if let Some(nobody) = self.users.get(&NOBODY) {
            nobody.push(job, count);
        }
    }

    /// User whose workers get the jobs of `uid`.
    fn admit(&mut self, uid: u32) -> u32 {
        if !self.users.contains_key(&uid) && self.users.len() > MAX_USERS {
            self.users.retain(|&uid, jobs| uid == NOBODY || jobs.unfinished() > 0);
        }
        match self.users.len() > MAX_USERS && !self.users.contains_key(&uid) {
            true => NOBODY,
            false => uid,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::UserWorkers;
    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(60);

    fn run_one(workers: &UserWorkers, uid: u32) -> Result<(), mpsc::RecvTimeoutError> {
        let (done, is_done) = mpsc::channel();
        workers.run(uid, move || done.send(()).unwrap());
        is_done.recv_timeout(TIMEOUT)
    }

    #[test]
    fn hanging_jobs_delay_no_other_user() {
        let (workers, dispatcher) = UserWorkers::new();
        dispatcher.start().unwrap();
        let mut hanging = workers.block(1000);
        hanging.pop();
        run_one(&workers, 1000).unwrap();
        hanging.push(workers.block_one(1000));
        run_one(&workers, 1001).unwrap();
        let (done, is_done) = mpsc::channel();
        workers.run(1000, move || done.send(()).unwrap());
        run_one(&workers, 0).unwrap();
        assert!(is_done.try_recv().is_err(), "all workers of the user hang");
        drop(hanging);
        is_done.recv_timeout(TIMEOUT).unwrap();
    }

    #[test]
    fn jobs_leave_the_processor_to_the_cores() {
        let nice = || rustix::process::getpriority_process(None).unwrap();
        let (workers, dispatcher) = UserWorkers::new();
        dispatcher.start().unwrap();
        for uid in [0, NOBODY] {
            let (sender, found) = mpsc::channel();
            workers.run(uid, move || sender.send(nice()).unwrap());
            assert!(found.recv_timeout(TIMEOUT).unwrap() >= WORKER_NICE);
        }
        assert!(nice() < WORKER_NICE, "the thread that queues jobs keeps its own");
    }

    #[test]
    fn number_of_threads_is_limited() {
        let mut crew = Crew::new().unwrap();
        let (unblock, blocked) = mpsc::channel::<()>();
        let blocked = Arc::new(Mutex::new(blocked));
        let unfinished = Arc::default();
        for job in 0..4 * MAX_USERS as u32 * MAX_THREADS_PER_USER as u32 {
            let blocked = Arc::clone(&blocked);
            let wait = move || assert!(blocked.lock().unwrap().recv().is_err());
            let count = JobCount::new(&unfinished);
            crew.assign(UserJob { uid: job / 8, job: Box::new(wait), count });
        }
        assert_eq!(crew.users.len(), MAX_USERS + 1);
        let has_few =
            |user: &UserQueue| user.threads.load(Ordering::Relaxed) <= MAX_THREADS_PER_USER;
        assert!(crew.users.values().all(has_few));
        drop(unblock);
        while unfinished.load(Ordering::Relaxed) > 0 {
            std::thread::yield_now();
        }
        // Users whose workers are idle make room.
        crew.assign(UserJob { uid: 9999, job: Box::new(|| ()), count: JobCount::new(&unfinished) });
        assert!(crew.users.contains_key(&9999));
    }

    #[test]
    fn panicking_job_ends_no_worker() {
        let (workers, dispatcher) = UserWorkers::new();
        dispatcher.start().unwrap();
        workers.run(7, || std::panic::resume_unwind(Box::new("test")));
        while workers.unfinished() > 0 {
            std::thread::yield_now();
        }
        for _ in 0..10 {
            run_one(&workers, 7).unwrap();
        }
    }

    #[test]
    fn jobs_without_dispatcher_are_dropped() {
        let (workers, dispatcher) = UserWorkers::new();
        drop(dispatcher);
        assert!(run_one(&workers, 1).is_err());
        assert_eq!(workers.unfinished(), 0);
    }
}
