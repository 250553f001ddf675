//! Turns of the applications: their commands, and the end of applications that have exited or
//! break the protocol.

use super::NetworkCore;
use crate::daemon::application::ProtocolError;
use crate::daemon::ids::AppNumber;
use crate::ipc::layout::COMMAND_RING_SLOTS;

/// Interval between checks for exited applications while the core is busy.
const CHECK_INTERVAL_NS: u64 = 10_000_000;

impl NetworkCore {
    /// Gives each application its turn. Applications that have used up their share of the core
    /// wait until the core is otherwise idle. Returns the number of commands executed.
    pub(super) fn serve_applications(&mut self, is_idle: bool) -> usize {
        let turns = self.active.begin_turns(self.first_turn);
        let (mut total, mut waits) = (0, false);
        for &number in &turns {
            let (_, _, now_ns) = self.server.engine.parts();
            let Some(Some(app)) = self.apps.get_mut(number as usize) else { continue };
            if app.cpu_share.paused_until(now_ns).is_some() {
                waits = true;
            } else {
                total += self.serve_or_evict(number);
            }
        }
        if waits && is_idle && total == 0 {
            total += turns.iter().map(|&number| self.serve_or_evict(number)).sum::<usize>();
        }
        self.active.end_turns(turns);
        self.let_idle_sleep();
        let count = self.active.polled();
        self.first_turn =
            self.first_turn.checked_add(1).filter(|&first| first < count).unwrap_or(0);
        total
    }

    fn serve_or_evict(&mut self, number: AppNumber) -> usize {
        self.serve(number).unwrap_or_else(|why| {
            self.evict(number, why);
            0
        })
    }

    /// Executes commands of one application, up to a quota. Returns their number.
    fn serve(&mut self, number: AppNumber) -> Result<usize, ProtocolError> {
        let quota = self.server.engine.gate().settings().config().application_quota.packets();
        let quota = (quota as usize).min(COMMAND_RING_SLOTS);
        let (_, _, began_ns) = self.server.engine.parts();
        let mut done = 0;
        loop {
            let Some(Some(app)) = self.apps.get_mut(number as usize) else { return Ok(done) };
            let command = if done < quota { app.next_command()? } else { None };
            let Some(command) = command else {
                if done > 0 {
                    app.commands.release();
                    app.recent_work += done as u64;
                    app.turn.last_command_ns = began_ns;
                    if app.cpu_share.is_limited() {
                        let now_ns = self.server.engine.read_clock();
                        app.cpu_share.charge(now_ns, now_ns.saturating_sub(began_ns));
                    }
                    // The commands were answered.
                    self.publish_later(number);
                }
                return Ok(done);
            };
            done += 1;
            if command.requested_port().is_some() && !self.is_reaping {
                // A restarted server finds its port free.
                self.reap_except(Some(number));
                if self.wait_for_endings(number, command) || self.query_port(number, command) {
                    continue;
                }
            }
            let Some(Some(app)) = self.apps.get_mut(number as usize) else { return Ok(done) };
            let waits = !self.is_reaping
                && (command.opens_socket() && !app.check_space(self.cores.wake())
                    || command.awaits_closed() && app.is_releasing_ports());
            if waits {
                app.commands.defer_to_later_round(command);
                continue;
            }
            let key = self.server.execute(number, app, command)?;
            self.free_ended_sockets();
            if let Some(key) = key {
                self.poll_socket(key);
            }
        }
    }

    /// Evicts an application that breaks the protocol.
    pub(super) fn evict(&mut self, number: AppNumber, why: ProtocolError) {
        if let Some(Some(app)) = self.apps.get(number as usize) {
            (self.log)(&format!("{} was evicted: {why}", app.identity));
        }
        self.detach(number);
    }

    /// Reaps an exited application: executes its remaining commands, then detaches it.
    fn reap(&mut self, number: AppNumber) {
        self.is_reaping = true;
        if let Some(Some(app)) = self.apps.get_mut(number as usize) {
            app.commands.cancel_deferred();
        }
        // A child that shares the rings could go on writing commands.
        let mut left = COMMAND_RING_SLOTS;
        while let Ok(done @ 1..) = self.serve(number)
            && left > done
        {
            left -= done;
        }
        self.is_reaping = false;
        self.detach(number);
    }

    /// Checks the applications at every [`CHECK_INTERVAL_NS`].
    pub(super) fn check_periodically(&mut self) {
        let (_, _, now_ns) = self.server.engine.parts();
        if now_ns >= self.next_check_ns {
            self.next_check_ns = now_ns + CHECK_INTERVAL_NS;
            self.boost.check(now_ns);
            self.check_applications();
        }
    }

    pub(super) fn check_applications(&mut self) {
        let (_, _, now_ns) = self.server.engine.parts();
        for key in self.server.expire_transfers(now_ns) {
            self.poll_socket(key);
        }
        self.free_ended_sockets();
        self.reap_except(None);
        self.update_activity();
    }

    pub(super) fn reap_if_exited(&mut self, number: AppNumber) {
        let Some(Some(app)) = self.apps.get(number as usize) else { return };
        if app.has_exited {
            (self.log)(&format!("{} has exited", app.identity));
            self.reap(number);
        }
    }
}
