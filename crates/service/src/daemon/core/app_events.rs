//! Events of the applications: wake-ups of the core, and exits.
//!
//! An application wakes the core by its event descriptor, which edge-triggered `epoll` reports
//! without a read. What it sends on its connection is not received: descriptors sent along would be
//! closed by the thread that receives, and a close can wait for the application.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{Timespec, epoll};

use super::NetworkCore;
use crate::daemon::ids::AppNumber;

/// Events of one system call.
const MAX_EVENTS: usize = 64;

/// Edge-triggered `epoll` of the connections and wake-ups of a core's applications.
pub(super) struct AppEvents(OwnedFd);

impl AppEvents {
    /// Creates it without applications.
    ///
    /// # Errors
    /// When no file descriptor is left in the process.
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self(epoll::create(epoll::CreateFlags::CLOEXEC)?))
    }
}

impl AsFd for AppEvents {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl NetworkCore {
    /// Reports events of an application from now on.
    pub(in crate::daemon) fn watch(&mut self, number: AppNumber) {
        let Some(Some(app)) = self.apps.get_mut(number as usize) else { return };
        let data = epoll::EventData::new_u64(number.into());
        let add = |fd, event| epoll::add(&self.app_events, fd, data, event | epoll::EventFlags::ET);
        let added = add(app.connection(), epoll::EventFlags::RDHUP)
            .and_then(|()| add(&app.event_fds.daemon, epoll::EventFlags::IN));
        self.limits_shares |= app.cpu_share.is_limited();
        // An application whose exit or wake-ups could not be found out is not served.
        if added.is_err() || app.has_exited {
            self.note_exit(number);
        }
        self.activate(number);
        self.publish_later(number);
    }

    /// Reports no more events of an application that leaves this core.
    pub(in crate::daemon) fn unwatch(&mut self, number: AppNumber) {
        self.deactivate(number);
        if let Some(Some(app)) = self.apps.get(number as usize) {
            // Fails for an application that could not be watched.
            for fd in [app.connection(), &app.event_fds.daemon] {
                let _ = epoll::delete(&self.app_events, fd);
            }
        }
    }

    /// Finds out which applications have woken this core, and which have exited.
    pub(super) fn collect_app_events(&mut self) {
        let ended = epoll::EventFlags::RDHUP | epoll::EventFlags::HUP | epoll::EventFlags::ERR;
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut buffer = [const { MaybeUninit::<epoll::Event>::uninit() }; MAX_EVENTS];
        // An application that goes on sending must not hold the core here.
        for _ in 0..=self.apps.len() / MAX_EVENTS {
            let received = epoll::wait(&self.app_events, &mut buffer[..], Some(&now));
            // Interrupted at most: the next check receives the events.
            let Ok((events, _)) = received else { return };
            for event in events.iter() {
                let (flags, data) = (event.flags, event.data);
                let number = data.u64() as AppNumber;
                self.activate(number);
                if flags.intersects(ended) {
                    self.note_exit(number);
                }
            }
            if events.len() < MAX_EVENTS {
                return;
            }
        }
    }
}
