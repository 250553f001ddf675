//! Tells when the processor has nothing else to do.
//!
//! Mogul and Ramakrishnan let the idle thread switch input on again before the
//! period of the CPU share ends (section 7). Here that thread is one of our
//! own that runs only when nobody else wants the core.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::{PollFd, PollFlags, poll};
use tidegate_memory::Doorbell;

use crate::Priority;

/// A thread at idle priority on the processors of the one that made it.
#[derive(Debug)]
pub struct IdleWatch {
    shared: Arc<Watch>,
}

#[derive(Debug)]
struct Watch {
    /// Somebody wants to know.
    wanted: Doorbell,
    /// The core was idle since then.
    idle: Doorbell,
    asked: AtomicBool,
    stop: AtomicBool,
}

impl IdleWatch {
    /// Starts the thread. It sleeps until it is asked.
    ///
    /// # Errors
    /// When the process may not have another thread or descriptor.
    pub fn start() -> io::Result<Self> {
        let watch = Watch {
            wanted: Doorbell::new()?,
            idle: Doorbell::new()?,
            asked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
        };
        watch.wanted.arm();
        let shared = Arc::new(watch);
        let watch = Arc::clone(&shared);
        std::thread::Builder::new().name("idle-watch".to_owned()).spawn(move || watch.run())?;
        Ok(Self { shared })
    }

    /// Asks to be told when the core falls idle: then [`IdleWatch::idle_fd`]
    /// becomes readable, until [`IdleWatch::done`].
    pub fn ask(&self) {
        self.shared.idle.arm();
        self.shared.asked.store(true, Ordering::Release);
        self.shared.wanted.ring();
    }

    /// Readable when the core was idle after [`IdleWatch::ask`].
    pub fn idle_fd(&self) -> BorrowedFd<'_> {
        self.shared.idle.as_fd()
    }

    /// The sleep is over. Returns whether the core was idle meanwhile.
    pub fn done(&self) -> bool {
        let unanswered = self.shared.asked.swap(false, Ordering::AcqRel);
        self.shared.idle.disarm();
        !unanswered
    }
}

impl Watch {
    fn run(&self) {
        // Without this class there is no telling; the share is then kept on an
        // idle core as well, which is slower but right.
        if Priority::Idle.take().is_err() {
            return;
        }
        while !self.stop.load(Ordering::Acquire) {
            if self.asked.swap(false, Ordering::AcqRel) {
                self.idle.ring();
            }
            self.wanted.arm();
            if self.asked.load(Ordering::Acquire) || self.stop.load(Ordering::Acquire) {
                continue;
            }
            // A failed wait only means another look.
            let _ = poll(&mut [PollFd::new(&self.wanted, PollFlags::IN)], None);
            self.wanted.disarm();
        }
    }
}

impl Drop for IdleWatch {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        // The thread is not waited for: on a core that is never idle it ends
        // late.
        self.shared.wanted.ring();
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::Timespec;

    use super::*;

    #[test]
    fn it_answers_once_for_each_question() {
        let watch = IdleWatch::start().unwrap();
        for _ in 0..3 {
            watch.ask();
            let limit = Timespec { tv_sec: 30, tv_nsec: 0 };
            let ready = poll(&mut [PollFd::new(&watch.idle_fd(), PollFlags::IN)], Some(&limit));
            assert_eq!(ready.unwrap(), 1, "this machine was busy for 30 s");
            assert!(watch.done());
        }
    }
}
