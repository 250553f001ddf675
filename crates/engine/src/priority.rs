//! The priorities of a core: interrupt, protocol work, programs, idle.

use std::io;

use crate::sys;

/// Before whom a thread runs. The order is that of 4.2BSD's levels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Priority {
    /// Before everything else: the work of an interrupt (`SCHED_FIFO` 60).
    Interrupt,
    /// Before every program: protocol work (`SCHED_FIFO` 40).
    Protocol,
    /// Like any program (`SCHED_OTHER`).
    Program,
    /// Only when nobody else wants to run (`SCHED_IDLE`).
    Idle,
}

impl Priority {
    /// Gives the calling thread this priority.
    ///
    /// # Errors
    /// [`io::ErrorKind::PermissionDenied`] for the first two without
    /// `CAP_SYS_NICE`; the message says what to do.
    pub fn take(self) -> io::Result<()> {
        let (policy, priority) = match self {
            Self::Interrupt => (libc::SCHED_FIFO, 60),
            Self::Protocol => (libc::SCHED_FIFO, 40),
            Self::Program => (libc::SCHED_OTHER, 0),
            Self::Idle => (libc::SCHED_IDLE, 0),
        };
        sys::set_scheduler(policy, priority).map_err(|error| match error.kind() {
            io::ErrorKind::PermissionDenied => io::Error::new(
                error.kind(),
                "this mode needs real-time priorities: run as root, give the program \
                 CAP_SYS_NICE, or choose mode polled",
            ),
            _ => error,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn anybody_may_step_down_and_back() {
        std::thread::spawn(|| {
            Priority::Program.take().unwrap();
            Priority::Idle.take().unwrap();
        })
        .join()
        .unwrap();
    }
}
