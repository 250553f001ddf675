//! Thread priorities on one core: interrupt, protocol work, applications, idle.

use std::io;

use crate::sys;

/// Scheduling class of a thread, in the order of the interrupt levels of 4.2BSD.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Priority {
    /// Above everything else: interrupt work (`SCHED_FIFO` 60).
    Interrupt,
    /// Above every application: protocol work (`SCHED_FIFO` 40).
    Protocol,
    /// Same as any application (`SCHED_OTHER`).
    Application,
    /// Only when no other thread wants to run (`SCHED_IDLE`).
    Idle,
}

impl Priority {
    /// Applies this priority to the calling thread.
    ///
    /// # Errors
    /// [`io::ErrorKind::PermissionDenied`] for [`Self::Interrupt`] and [`Self::Protocol`] without
    /// `CAP_SYS_NICE`; the message says what to do.
    pub fn apply(self) -> io::Result<()> {
        let (policy, priority) = match self {
            Self::Interrupt => (libc::SCHED_FIFO, 60),
            Self::Protocol => (libc::SCHED_FIFO, 40),
            Self::Application => (libc::SCHED_OTHER, 0),
            Self::Idle => (libc::SCHED_IDLE, 0),
        };
        sys::set_scheduler(policy, priority).map_err(|error| match error.kind() {
            io::ErrorKind::PermissionDenied => io::Error::new(
                error.kind(),
                "this mode needs real-time priorities: run as root, give the process \
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
    fn unprivileged_thread_can_lower_its_priority() {
        std::thread::spawn(|| {
            Priority::Application.apply().unwrap();
            Priority::Idle.apply().unwrap();
        })
        .join()
        .unwrap();
    }
}
