//! Idle network core: busy-polls, pauses or sleeps until there is work.

use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tidegate_engine::{IdleStep, SleepPlan, pause};

use super::NetworkCore;
use super::round_timer::RoundTimer;
use super::server::SocketServer;

/// Time to wait for a device whose transmit ring is full.
const DEVICE_RETRY_INTERVAL: Duration = Duration::from_micros(100);

/// Longest sleep while an application may have written commands without a wake-up.
const MAX_DEFERRED_SLEEP: Duration = Duration::from_millis(1);

impl NetworkCore {
    /// Waits for work: busy-polls, pauses or sleeps, as the engine decides.
    pub(super) fn wait_for_work(&mut self) -> io::Result<()> {
        // Applications at work on this processor are what the core waits for.
        let step = match self.server.engine.idle_step() {
            IdleStep::Spin if self.leaves_processor() => IdleStep::Pause,
            step => step,
        };
        match step {
            IdleStep::Spin => self.check_periodically(),
            IdleStep::Pause => {
                self.check_periodically();
                self.rounds.iter_mut().for_each(RoundTimer::end);
                self.contention = pause();
            }
            IdleStep::Sleep => {
                self.update_activity();
                self.inbox.bell.arm();
                self.request_wake_ups();
                // The sender may have found the bell unarmed.
                self.early_message = self.inbox.messages.try_recv().ok();
                let slept = if self.early_message.is_none() { self.sleep() } else { Ok(false) };
                self.clear_wake_ups();
                self.inbox.bell.disarm();
                match slept? {
                    true => self.check_applications(),
                    false => self.check_periodically(),
                }
            }
        }
        Ok(())
    }

    /// Marks this core as inactive once it serves nothing: other cores' frames no longer wake it. An
    /// application that arrives later marks it as active again.
    pub(super) fn update_activity(&mut self) {
        let Some(flow_steering) = self.cores.flow_steering() else { return };
        let SocketServer { engine, sockets, .. } = &self.server;
        let stack = engine.stack();
        let has_traffic = stack.tcp_connections() > 0 || stack.awaits_neighbours();
        if !self.has_applications() && sockets.len() == 0 && !has_traffic {
            flow_steering.set_inactive(self.index);
        }
    }

    /// Sleeps until there is work. Returns true if an application's connection has an event, or a
    /// time has come.
    fn sleep(&mut self) -> io::Result<bool> {
        if self.has_app_work() {
            return Ok(false);
        }
        if self.server.engine.stack().has_events() {
            return Ok(false);
        }
        let Some(sleep) = self.server.engine.prepare_sleep()? else { return Ok(false) };
        let retry = (!self.poll_queue.is_empty()).then_some(DEVICE_RETRY_INTERVAL);
        let SleepPlan { timeout_ns, receive_paused } = sleep;
        let (_, _, now_ns) = self.server.engine.parts();
        match self.server.engine.is_beside_cpu_bound() {
            true => self.boost.raise(now_ns),
            false => self.boost.lower(),
        }
        self.wake_coalesced();
        let expiry_ns = self.server.transfers.next_expiry_ns();
        let wake_ns = expiry_ns.map(|expiry_ns| expiry_ns.saturating_sub(now_ns));
        let timeout = timeout_ns.into_iter().chain(wake_ns).map(Duration::from_nanos);
        let slow_app = self.may_defer_wake_up().then_some(MAX_DEFERRED_SLEEP);
        let timeout = timeout.chain(retry).chain(slow_app).min();
        let timeout = timeout.map(|timeout| Timespec {
            tv_sec: timeout.as_secs().min(i32::MAX as u64) as i64,
            tv_nsec: i64::from(timeout.subsec_nanos()),
        });
        // While receiving is held back, frames stay in the device.
        let device = if receive_paused { &self.wake_fds.paused } else { &self.wake_fds.device };
        let own = device
            .as_ref()
            .map(AsFd::as_fd)
            .into_iter()
            .chain(self.wake_fds.neighbours.as_ref().map(AsFd::as_fd));
        let mut fds: Vec<PollFd<'_>> = own
            .chain([self.inbox.bell.as_fd(), self.app_events.as_fd()])
            .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
            .collect();
        self.rounds.iter_mut().for_each(RoundTimer::end);
        let polled = poll(&mut fds, timeout.as_ref());
        self.rounds.iter_mut().for_each(RoundTimer::begin);
        match polled {
            Ok(0) | Err(rustix::io::Errno::INTR) => Ok(true),
            Ok(_) => Ok(fds.last().is_some_and(|app_events| !app_events.revents().is_empty())),
            Err(error) => Err(error.into()),
        }
    }
}
