//! Applications that a round looks at: those with work, not all that are attached.
//!
//! A few applications are polled in every round. Further ones go to sleep when they have had no
//! command for a while: like before a sleep of the core, their sleep flag asks them for a wake-up.
//! So the time of a round does not grow with the applications that are attached.

use super::NetworkCore;
use crate::daemon::application::{Application, Turn};
use crate::daemon::ids::AppNumber;

/// Number of applications that are polled in every round although they may have no command.
const MAX_POLLED_APPS: usize = 16;
/// Time without a command after which an application beyond [`MAX_POLLED_APPS`] goes to sleep.
const SLEEP_AFTER_NS: u64 = 1_000_000;

/// Lists of applications, each without duplicates.
#[derive(Default)]
pub(super) struct ActiveApps {
    /// Applications whose commands are polled.
    polled: Vec<AppNumber>,
    /// Number of attached applications that sleep.
    sleeping: usize,
    /// Applications with notifications to publish.
    notified: Vec<AppNumber>,
    /// Applications that have exited.
    exited: Vec<AppNumber>,
    /// Memory for the turns of one round.
    turns: Vec<AppNumber>,
}

impl ActiveApps {
    /// Polled applications, beginning with the one at position `first`. The list is returned by
    /// [`ActiveApps::end_turns`].
    pub(super) fn begin_turns(&mut self, first: usize) -> Vec<AppNumber> {
        let mut turns = std::mem::take(&mut self.turns);
        let (before, after) = self.polled.split_at(first.min(self.polled.len()));
        turns.clear();
        turns.extend_from_slice(after);
        turns.extend_from_slice(before);
        turns
    }

    pub(super) fn end_turns(&mut self, turns: Vec<AppNumber>) {
        self.turns = turns;
    }

    /// Number of applications that are polled.
    pub(super) fn polled(&self) -> usize {
        self.polled.len()
    }

    /// Number of applications that are attached.
    pub(super) fn attached(&self) -> usize {
        self.polled.len() + self.sleeping
    }
}

impl NetworkCore {
    /// Polls the commands of an application from now on.
    pub(in crate::daemon) fn activate(&mut self, number: AppNumber) {
        let Some(Some(app)) = self.apps.get_mut(number as usize) else { return };
        if app.turn.is_asleep {
            self.active.sleeping -= 1;
            app.daemon_sleeps.clear();
        }
        let (_, _, now_ns) = self.server.engine.parts();
        app.turn.last_command_ns = now_ns;
        if !std::mem::replace(&mut app.turn.is_polled, true) {
            self.active.polled.push(number);
        }
        app.turn.is_asleep = false;
    }

    /// Lets applications sleep that have been without commands for a while, as long as more than
    /// [`MAX_POLLED_APPS`] are polled.
    pub(super) fn let_idle_sleep(&mut self) {
        let (_, _, now_ns) = self.server.engine.parts();
        let mut position = self.active.polled.len();
        while position > 0 && self.active.polled.len() > MAX_POLLED_APPS {
            position -= 1;
            let number = self.active.polled[position];
            let Some(Some(app)) = self.apps.get_mut(number as usize) else { continue };
            if app.has_deferred() || now_ns < app.turn.last_command_ns + SLEEP_AFTER_NS {
                continue;
            }
            app.daemon_sleeps.request();
            // The application may have written a command before it saw the request.
            if app.has_work() {
                app.daemon_sleeps.clear();
                continue;
            }
            (app.turn.is_polled, app.turn.is_asleep) = (false, true);
            self.active.sleeping += 1;
            self.active.polled.swap_remove(position);
        }
    }

    /// Asks the polled applications for a wake-up with their next command, while this core sleeps.
    pub(super) fn request_wake_ups(&self) {
        self.polled_apps().for_each(|app| app.daemon_sleeps.request());
    }

    /// Withdraws [`NetworkCore::request_wake_ups`].
    pub(super) fn clear_wake_ups(&self) {
        self.polled_apps().for_each(|app| app.daemon_sleeps.clear());
    }

    /// True if an application that ran on this processor last is at work, unless this core owns the
    /// processor.
    pub(super) fn has_app_at_work(&mut self) -> bool {
        if self.server.engine.is_dedicated() {
            return false;
        }
        let (_, _, now_ns) = self.server.engine.parts();
        let processor = rustix::thread::sched_getcpu();
        self.polled_apps().any(|app| app.note_processor(processor) && app.is_at_work(now_ns))
    }

    /// Leaves the processor to applications that ran on it last: wakes those with notifications.
    /// Returns true if one of them is at work, unless this core owns the processor.
    pub(super) fn leaves_processor(&mut self) -> bool {
        let (_, _, now_ns) = self.server.engine.parts();
        let processor = rustix::thread::sched_getcpu();
        let Self { active, apps, waker, .. } = self;
        for &number in &active.polled {
            if let Some(Some(app)) = apps.get_mut(number as usize)
                && app.note_processor(processor)
            {
                // Coalescing saves time of a processor that has other work.
                app.wake_before_sleep(now_ns, waker);
            }
        }
        self.has_app_at_work()
    }

    /// True if a polled application, at work on several notifications, may have deferred the
    /// wake-up for its commands.
    pub(super) fn may_defer_wake_up(&mut self) -> bool {
        let (_, _, now_ns) = self.server.engine.parts();
        let may_defer =
            |app: &Application| app.notifications_since_sleep() > 1 && app.is_at_work(now_ns);
        self.polled_apps().any(may_defer)
    }

    fn polled_apps(&self) -> impl Iterator<Item = &Application> {
        let apps = &self.apps;
        let polled = self.active.polled.iter();
        polled.filter_map(|&number| apps.get(number as usize)?.as_deref())
    }

    /// True if a polled application has work, or an exit must be handled.
    pub(super) fn has_app_work(&mut self) -> bool {
        let Self { active, apps, .. } = self;
        let mut polled = active.polled.iter();
        !active.exited.is_empty()
            || polled.any(|&number| {
                let app = apps.get_mut(number as usize).and_then(Option::as_deref_mut);
                app.is_some_and(Application::has_work)
            })
    }

    /// Removes an application from the lists, before it leaves this core.
    pub(super) fn deactivate(&mut self, number: AppNumber) {
        let Some(Some(app)) = self.apps.get_mut(number as usize) else { return };
        self.active.sleeping -= usize::from(app.turn.is_asleep);
        app.daemon_sleeps.clear();
        app.turn = Turn::default();
        let others = |&other: &AppNumber| other != number;
        self.active.polled.retain(others);
        self.active.notified.retain(others);
        self.active.exited.retain(others);
    }

    /// True if an application is attached.
    pub(super) fn has_applications(&self) -> bool {
        self.active.attached() > 0
    }

    /// True if the wake-ups of sleeping applications must be collected in every round.
    pub(super) fn has_sleeping_apps(&self) -> bool {
        self.active.sleeping > 0
    }

    /// Publishes the notifications of an application at the end of the round.
    pub(in crate::daemon) fn publish_later(&mut self, number: AppNumber) {
        let Some(Some(app)) = self.apps.get_mut(number as usize) else { return };
        if !std::mem::replace(&mut app.turn.is_notified, true) {
            self.active.notified.push(number);
        }
    }

    /// Publishes the notifications of all applications that have any.
    pub(in crate::daemon) fn notify_applications(&mut self) {
        let (_, _, now_ns) = self.server.engine.parts();
        let mut position = 0;
        while let Some(&number) = self.active.notified.get(position) {
            let Some(Some(app)) = self.apps.get_mut(number as usize) else {
                self.active.notified.swap_remove(position);
                continue;
            };
            match app.publish_notifications(now_ns, &mut self.waker) {
                Ok(is_coalesced) => {
                    // What found no space, or is coalesced, has its turn in a later round.
                    if is_coalesced || app.has_queued_notifications() {
                        position += 1;
                    } else {
                        app.turn.is_notified = false;
                        self.active.notified.swap_remove(position);
                    }
                }
                // Eviction removes the application from the list.
                Err(why) => self.evict(number, why),
            }
        }
    }

    /// Wakes the applications whose wake-up is coalesced to later, before this core sleeps.
    pub(super) fn wake_coalesced(&mut self) {
        let (_, _, now_ns) = self.server.engine.parts();
        let Self { active, apps, waker, .. } = self;
        for &number in &active.notified {
            if let Some(Some(app)) = apps.get_mut(number as usize) {
                app.wake_before_sleep(now_ns, waker);
            }
        }
    }

    /// Records that an application has exited.
    pub(super) fn note_exit(&mut self, number: AppNumber) {
        let Some(Some(app)) = self.apps.get_mut(number as usize) else { return };
        app.has_exited = true;
        if !std::mem::replace(&mut app.turn.is_exit_noted, true) {
            self.active.exited.push(number);
        }
    }

    /// Reaps exited applications, so that their ports are free; `exempt` stays.
    pub(in crate::daemon) fn reap_except(&mut self, exempt: Option<AppNumber>) {
        self.collect_app_events();
        let exited: Vec<_> =
            self.active.exited.iter().copied().filter(|&number| Some(number) != exempt).collect();
        exited.into_iter().for_each(|number| self.reap_if_exited(number));
    }
}

#[cfg(test)]
mod tests {
    use crate::daemon::Quota;
    use crate::daemon::core::testbed::Testbed;
    use crate::ipc::command::Command;
    use crate::ipc::layout::Geometry;

    #[test]
    fn application_on_the_processor_of_its_core_is_at_work_until_it_sleeps() {
        let geometry = Geometry { sockets: 1, tcp_bytes: 4096, udp_bytes: 4096 };
        let mut testbed = Testbed::new(geometry, Quota::default());
        let mut app = testbed.attach();
        // The thread must not move to another processor meanwhile.
        let processor = rustix::thread::sched_getcpu();
        let mut set = rustix::thread::CpuSet::new();
        set.set(processor);
        rustix::thread::sched_setaffinity(None, &set).unwrap();
        app.push(&Command::Ping { tag: None }.to_words());
        testbed.run_round();
        let own = app.memory.application_processor().unwrap();
        own.publish(processor + 1);
        assert!(!testbed.core.has_app_at_work());
        own.publish(processor);
        assert!(testbed.core.has_app_at_work());
        assert!(app.memory.daemon_processor().unwrap().is(processor));
        app.memory.application_sleeps().unwrap().request();
        assert!(!testbed.core.has_app_at_work());
    }

    #[test]
    fn application_may_defer_wake_ups_after_several_notifications() {
        let geometry = Geometry { sockets: 1, tcp_bytes: 4096, udp_bytes: 4096 };
        let mut testbed = Testbed::new(geometry, Quota::default());
        let mut app = testbed.attach();
        for (pings, may_defer) in [(1, false), (2, true)] {
            app.memory.application_sleeps().unwrap().request();
            for _ in 0..pings {
                app.push(&Command::Ping { tag: Some(7) }.to_words());
            }
            testbed.run_round();
            assert_eq!(testbed.core.may_defer_wake_up(), may_defer, "{pings} answers");
        }
    }
}
