//! Notifications to an application: its ring, the notifications that found the ring full, and
//! the wake-ups.

use std::collections::VecDeque;

use tidegate_memory::shared::{PeerError, Sender, WakeFlag, WordRange};

use super::coalescing::WakeCoalescing;
use crate::daemon::workers::{AppFd, AppWaker};
use crate::ipc::notification::{NOTIFICATION_WORDS, Notification};

/// Notifications on their way to an application.
pub(super) struct Notifier {
    pub(super) ring: Sender<WordRange, NOTIFICATION_WORDS>,
    application_sleeps: WakeFlag<WordRange>,
    /// Notifications that found the ring full.
    pub(super) queued: VecDeque<Notification>,
    /// Notifications were written to the ring and are not published yet.
    has_unpublished: bool,
    /// Notifications were published since the last wake-up.
    pub(super) wake_pending: bool,
    /// Time of the last publication.
    published_ns: u64,
    /// Notifications since the last attempt to wake the application.
    since_last_wake: u32,
    /// Notifications that the application has been sent since it last slept.
    since_sleep: u32,
    coalescing: WakeCoalescing,
}

impl Notifier {
    pub(super) fn new(
        ring: Sender<WordRange, NOTIFICATION_WORDS>,
        application_sleeps: WakeFlag<WordRange>,
        coalescing: WakeCoalescing,
    ) -> Self {
        Self {
            ring,
            application_sleeps,
            queued: VecDeque::new(),
            has_unpublished: false,
            wake_pending: false,
            published_ns: 0,
            since_last_wake: 0,
            since_sleep: 0,
            coalescing,
        }
    }

    /// True while notifications wait for space in the ring.
    pub(super) fn has_queued(&self) -> bool {
        !self.queued.is_empty()
    }

    /// Writes a notification to the ring, or queues it behind those that found the ring full.
    /// Returns true if it was queued.
    pub(super) fn notify(&mut self, notice: Notification) -> Result<bool, PeerError> {
        let is_full = self.has_queued() || !self.try_push(notice)?;
        if is_full {
            self.queued.push_back(notice);
        }
        Ok(is_full)
    }

    fn try_push(&mut self, notice: Notification) -> Result<bool, PeerError> {
        let is_pushed = self.ring.push(&notice.to_words())?;
        if is_pushed {
            self.has_unpublished = true;
            self.since_last_wake += 1;
            self.coalescing.on_notified(match notice {
                Notification::Changed(handle) => Some(handle.slot),
                _ => None,
            });
        }
        Ok(is_pushed)
    }

    /// Writes the first queued notification to the ring; returns it if there was space.
    pub(super) fn retry_queued(&mut self) -> Result<Option<Notification>, PeerError> {
        let Some(&notice) = self.queued.front() else { return Ok(None) };
        if !self.try_push(notice)? {
            return Ok(None);
        }
        self.queued.pop_front();
        Ok(Some(notice))
    }

    /// Publishes the notifications, and wakes the application if it sleeps on `event_fd`. Returns true
    /// if the wake-up is coalesced to later.
    pub(super) fn publish(&mut self, now_ns: u64, waker: &mut AppWaker, event_fd: &AppFd) -> bool {
        if std::mem::take(&mut self.has_unpublished) {
            self.ring.publish();
            self.wake_pending = true;
            self.published_ns = now_ns;
        }
        let is_coalesced = self.wake_pending
            && self.coalescing.wake_at(now_ns) > now_ns
            && self.application_sleeps.is_requested();
        if self.wake_pending && !is_coalesced {
            self.wake(now_ns, waker, event_fd);
        }
        is_coalesced
    }

    /// Time of the last publication, in nanoseconds.
    pub(super) fn published_ns(&self) -> u64 {
        self.published_ns
    }

    /// Number of notifications that the application has been sent since it last slept.
    pub(super) fn since_sleep(&self) -> u32 {
        self.since_sleep
    }

    /// True while the application asks to be woken.
    pub(super) fn is_application_asleep(&self) -> bool {
        self.application_sleeps.is_requested()
    }

    /// Wakes the application, if it sleeps and has notifications, before the core sleeps: a
    /// wake-up that is coalesced to later would let both sleep.
    pub(super) fn wake_before_sleep(
        &mut self,
        now_ns: u64,
        waker: &mut AppWaker,
        event_fd: &AppFd,
    ) {
        if self.wake_pending {
            self.wake(now_ns, waker, event_fd);
        }
    }

    fn wake(&mut self, now_ns: u64, waker: &mut AppWaker, event_fd: &AppFd) {
        self.wake_pending = false;
        let notifications = std::mem::take(&mut self.since_last_wake);
        if !self.application_sleeps.take() {
            self.coalescing.on_awake();
        } else {
            self.coalescing.on_wake(now_ns);
            self.since_sleep = 0;
            waker.wake(event_fd);
        }
        self.since_sleep = self.since_sleep.saturating_add(notifications);
    }
}
