//! Wake-ups of applications by their event descriptors.

use tidegate_memory::shared::EventSignal;

use super::AppFd;

/// Wakes applications without waiting for them, whatever they do to their event descriptors.
pub(in crate::daemon) struct AppWaker(Option<EventSignal>);

impl AppWaker {
    /// Wakes by signals of the kernel, or by workers where it has none.
    pub(in crate::daemon) fn new() -> Self {
        Self(EventSignal::new().ok())
    }

    /// Ends the sleep of the application that sleeps on `event_fd`.
    pub(in crate::daemon) fn wake(&mut self, event_fd: &AppFd) {
        let signal = self.0.as_mut();
        if signal.is_some_and(|signal| signal.signal(event_fd).is_ok()) {
            return;
        }
        // The write may wait for the application.
        event_fd.run(|event_fd| {
            // Fails when the counter is full: then the application is awake.
            let _ = rustix::io::write(event_fd, &1_u64.to_ne_bytes());
        });
    }

    /// Wakes by workers alone.
    #[cfg(test)]
    pub(in crate::daemon) fn by_workers() -> Self {
        Self(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::daemon::workers::UserWorkers;
    use crate::ipc::event_fds::EventFds;

    #[test]
    fn application_is_woken_with_and_without_signals_of_the_kernel() {
        let (workers, jobs) = UserWorkers::new();
        for mut waker in [AppWaker::new(), AppWaker::by_workers()] {
            let event_fd = EventFds::new().unwrap().application;
            let own = event_fd.try_clone().unwrap();
            waker.wake(&AppFd::new(event_fd, 1000, &workers));
            jobs.run_queued();
            assert!(rustix::io::read(&own, &mut [0; 8]).is_ok());
        }
    }
}
