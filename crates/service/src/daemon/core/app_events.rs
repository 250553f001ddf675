//! Events of the applications' connections: wake-ups of the core, and exits.
//!
//! A byte on a connection wakes the core. The core does not receive the byte: descriptors sent
//! along would be closed by the thread that receives, and a close can wait for the application.
//! Edge-triggered `epoll` reports each byte once without that.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{Timespec, epoll};

use super::NetworkCore;
use crate::daemon::ids::AppNumber;

/// Events of one system call.
const MAX_EVENTS: usize = 64;

/// Edge-triggered `epoll` of the connections of a core's applications.
pub(super) struct AppEvents(OwnedFd);

impl AppEvents {
    /// Creates it without connections.
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
    /// Reports events of an application's connection from now on.
    pub(in crate::daemon) fn watch(&mut self, number: AppNumber) {
        let Some(Some(app)) = self.apps.get_mut(number as usize) else { return };
        let flags = epoll::EventFlags::IN | epoll::EventFlags::RDHUP | epoll::EventFlags::ET;
        let data = epoll::EventData::new_u64(number.into());
        self.limits_shares |= app.cpu_share.is_limited();
        // An application whose exit could not be found out is not served.
        if epoll::add(&self.app_events, app.connection(), data, flags).is_err() || app.has_exited {
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
            let _ = epoll::delete(&self.app_events, app.connection());
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
                let Some(Some(app)) = self.apps.get_mut(number as usize) else { continue };
                app.on_wake_up(self.cores.wake());
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
