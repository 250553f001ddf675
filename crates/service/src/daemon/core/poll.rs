//! Polling of application sockets, and the notifications of their holders.

use super::NetworkCore;
use super::server::SocketServer;
use crate::daemon::application::{Application, ProtocolError};
use crate::daemon::ids::SocketKey;

impl NetworkCore {
    /// Polls the sockets that the stack has events for. Returns the number of events.
    pub(in crate::daemon) fn handle_events(&mut self) -> usize {
        let mut events = 0;
        while let Some(event) = self.server.engine.poll_event() {
            events += 1;
            if let Some(key) = self.server.socket_index.of_event(event) {
                self.poll_and_charge(key);
            }
        }
        events
    }

    /// Polls a socket, and notifies its holders.
    pub(in crate::daemon) fn poll_socket(&mut self, key: SocketKey) {
        let SocketServer { engine, sockets, .. } = &mut self.server;
        let Some(socket) = sockets.get_mut(key) else { return };
        let Ok(looked) = socket.poll(engine) else { return self.on_protocol_error(key) };
        self.has_more |= looked.has_more;
        let again = looked.device_full || looked.has_more;
        if again && !std::mem::replace(&mut socket.in_poll_queue, true) {
            self.poll_queue.push(key);
        }
        if looked.notify {
            self.notify_holders(key);
        }
        if looked.is_done {
            self.server.end_socket(key, false);
            self.free_ended_sockets();
        }
    }

    /// Polls the sockets in the queue, except those of applications that have used up their share
    /// of the core, unless the core is otherwise idle. Returns the number of sockets polled.
    pub(super) fn poll_queued(&mut self, is_idle: bool) -> usize {
        self.has_more = false;
        let (mut count, (_, _, now_ns)) = (0, self.server.engine.parts());
        for key in std::mem::take(&mut self.poll_queue) {
            let waits = !is_idle
                && self.limits_shares
                && self
                    .limited_holder(key)
                    .is_some_and(|app| app.cpu_share.paused_until(now_ns).is_some());
            if waits {
                self.poll_queue.push(key);
            } else if let Some(socket) = self.server.sockets.get_mut(key) {
                socket.in_poll_queue = false;
                count += 1;
                self.poll_and_charge(key);
            }
        }
        count
    }

    /// Polls a socket, and charges the time to its application if its share is limited.
    fn poll_and_charge(&mut self, key: SocketKey) {
        if !self.limits_shares {
            return self.poll_socket(key);
        }
        let began_ns = self.server.engine.read_clock();
        self.poll_socket(key);
        let now_ns = self.server.engine.read_clock();
        if let Some(app) = self.limited_holder(key) {
            app.cpu_share.charge(now_ns, now_ns.saturating_sub(began_ns));
        }
    }

    /// Application that holds a socket alone or first, if its share of the core is limited.
    fn limited_holder(&mut self, key: SocketKey) -> Option<&mut Application> {
        let holder = self.server.sockets.get(key)?.holders().first()?;
        let app = self.apps.get_mut(holder.app as usize)?.as_deref_mut()?;
        app.cpu_share.is_limited().then_some(app)
    }

    /// Notifies the holders of a socket of a change.
    fn notify_holders(&mut self, key: SocketKey) {
        let mut at = 0;
        while let Some(&holder) = self.server.sockets.get(key).and_then(|s| s.holders().get(at)) {
            let Some(Some(app)) = self.apps.get_mut(holder.app as usize) else {
                at += 1;
                continue;
            };
            app.recent_work += 1;
            match app.notify_changed(holder.slot) {
                Ok(()) => {
                    at += 1;
                    self.publish_later(holder.app);
                }
                // Eviction removes the application from the holders.
                Err(why) => self.evict(holder.app, why),
            }
        }
    }

    /// Handles streams with invalid indices: evicts their only holder, or aborts a shared socket.
    fn on_protocol_error(&mut self, key: SocketKey) {
        let SocketServer { engine, sockets, .. } = &mut self.server;
        let Some(socket) = sockets.get_mut(key) else { return };
        match socket.holders() {
            [holder] => {
                let app = holder.app;
                self.evict(app, ProtocolError::CorruptMemory);
            }
            // With several holders the offender is unknown.
            _ => {
                socket.abort(engine);
                self.notify_holders(key);
            }
        }
    }

    /// Frees the slots that ended sockets had at their holders.
    pub(in crate::daemon) fn free_ended_sockets(&mut self) {
        while let Some(gone) = self.server.ended.pop() {
            let is_dirty = gone.needs_discard();
            for holder in gone.holders() {
                if let Some(Some(app)) = self.apps.get_mut(holder.app as usize) {
                    let is_own = gone.slot.is_in(&app.memory);
                    app.payload_bytes.add(gone.payload_bytes());
                    app.slots.remove(holder.slot, is_own);
                }
            }
            // The origin may have exited before the other holders.
            if let Some(Some(app)) = self.apps.get_mut(gone.origin().app as usize)
                && gone.slot.is_in(&app.memory)
            {
                match is_dirty {
                    true => app.discard_slot(gone.origin().slot, self.cores.wake()),
                    false => app.slots.free(gone.origin().slot),
                }
            } else if is_dirty
                && let Some(holder) = gone.holders().first()
                && let Some(Some(app)) = self.apps.get(holder.app as usize)
            {
                app.connection().run(move |_| gone.slot.discard());
            }
        }
    }
}
