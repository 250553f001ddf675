//! Polling of application sockets, and the notifications of their holders.

use super::NetworkCore;
use super::round_shares::MAX_ROUND_BYTES;
use super::server::SocketServer;
use crate::daemon::application::{Application, ProtocolError};
use crate::daemon::ids::SocketKey;
use crate::daemon::socket::table::SocketTable;

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
        let Self { apps, server, shares, .. } = self;
        let app = first_holder(apps, &server.sockets, key);
        let left = app.as_ref().map_or(MAX_ROUND_BYTES, |app| shares.left_for(&app.turn));
        if left == 0 {
            self.has_more = true;
            return self.poll_later(key);
        }
        let Some(socket) = server.sockets.get_mut(key) else { return };
        let Ok(looked) = socket.poll(&mut server.engine, left) else {
            return self.on_protocol_error(key);
        };
        if let Some(app) = app {
            shares.note_taken(&mut app.turn, looked.taken_bytes);
        }
        self.has_more |= looked.has_more;
        if looked.device_full || looked.has_more {
            self.poll_later(key);
        }
        if looked.notify {
            self.notify_holders(key);
        }
        if looked.is_done {
            self.server.end_socket(key, false);
            self.free_ended_sockets();
        }
    }

    fn poll_later(&mut self, key: SocketKey) {
        let Some(socket) = self.server.sockets.get_mut(key) else { return };
        if !std::mem::replace(&mut socket.in_poll_queue, true) {
            self.poll_queue.push(key);
        }
    }

    /// True if the application of a socket has had its share of this round.
    fn has_taken_share(&mut self, key: SocketKey) -> bool {
        let app = first_holder(&mut self.apps, &self.server.sockets, key);
        app.is_some_and(|app| self.shares.left_for(&app.turn) == 0)
    }

    /// Polls the sockets in the queue, except those of applications that have used up their share
    /// of the core, unless the core is otherwise idle. Returns the number of sockets polled.
    pub(super) fn poll_queued(&mut self, is_idle: bool) -> usize {
        self.has_more = false;
        let (mut count, (_, _, now_ns)) = (0, self.server.engine.parts());
        let mut queue = std::mem::take(&mut self.poll_queue);
        // Keeps the sockets that wait.
        queue.retain(|&key| {
            let is_paused = !is_idle
                && self.limits_shares
                && self
                    .limited_holder(key)
                    .is_some_and(|app| app.cpu_share.paused_until(now_ns).is_some());
            if is_paused {
                return true;
            }
            if self.has_taken_share(key) {
                self.has_more = true;
                return true;
            }
            if let Some(socket) = self.server.sockets.get_mut(key) {
                socket.in_poll_queue = false;
                count += 1;
                self.poll_and_charge(key);
            }
            false
        });
        // Sockets that had no turn come before those that want another.
        queue.append(&mut self.poll_queue);
        self.poll_queue = queue;
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
        first_holder(&mut self.apps, &self.server.sockets, key)
            .filter(|app| app.cpu_share.is_limited())
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

/// Application that holds a socket alone or first.
fn first_holder<'a>(
    apps: &'a mut [Option<Box<Application>>],
    sockets: &SocketTable,
    key: SocketKey,
) -> Option<&'a mut Application> {
    let holder = sockets.get(key)?.holders().first()?;
    apps.get_mut(holder.app as usize)?.as_deref_mut()
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use tidegate_stack::UdpOptions;

    use super::*;
    use crate::daemon::Quota;
    use crate::daemon::core::testbed::{Program, Testbed};
    use crate::ipc::command::{Command, Handle};
    use crate::ipc::datagram::{DatagramHeader, record_bytes};
    use crate::ipc::layout::{Geometry, StreamKind, StreamOut};
    use crate::ipc::notification::Notification;

    const GEOMETRY: Geometry = Geometry { sockets: 64, tcp_bytes: 4096, udp_bytes: 512 << 10 };
    /// Datagrams that are written to each socket at once.
    const DATAGRAMS: usize = 50;
    const DATAGRAM_BYTES: usize = 1000;
    /// Own addresses, of both families, to which the datagrams go.
    const FAMILIES: [&str; 2] = ["192.0.2.1", "2001:db8::1"];

    /// Datagram to an own address, as in the stream to the daemon.
    fn record(family: &str) -> Vec<u8> {
        let remote = Some(SocketAddr::new(family.parse().unwrap(), 9));
        let header = DatagramHeader::to_send(DATAGRAM_BYTES, remote, None);
        let mut record = header.to_bytes().to_vec();
        record.resize(record_bytes(DATAGRAM_BYTES), 7);
        record
    }

    /// Sockets of an application, with the ends that it writes to.
    struct Sockets(Vec<(Handle, StreamOut)>);

    impl Sockets {
        fn bind(testbed: &mut Testbed, app: &mut Program, family: &str) -> Self {
            let mut sockets = Vec::new();
            for port in 0..GEOMETRY.sockets as u16 {
                let local = SocketAddr::new(family.parse().unwrap(), 1000 + port);
                let (share_group, options) = (None, UdpOptions::default());
                app.push(&Command::Bind { tag: 1, local, share_group, options }.to_words());
                testbed.run_round();
                let Some(Notification::Reply { outcome: Ok(opened), .. }) = app.next_notification()
                else {
                    panic!("no socket was bound")
                };
                let slot = app.memory.slot(opened.handle.slot).unwrap();
                sockets.push((
                    opened.handle,
                    slot.application_streams(StreamKind::Datagrams).unwrap().1,
                ));
            }
            Self(sockets)
        }

        /// Writes datagrams to all sockets.
        fn write(&mut self, app: &mut Program, family: &str) {
            let record = record(family);
            for (handle, writer) in &mut self.0 {
                for _ in 0..DATAGRAMS {
                    assert_eq!(writer.write(&record).unwrap(), record.len());
                }
                writer.publish();
                app.push(&Command::Poll(*handle).to_words());
            }
        }

        /// Bytes that the daemon has not taken.
        fn unread(&mut self) -> Vec<usize> {
            self.0.iter_mut().map(|(_, writer)| writer.unread().unwrap()).collect()
        }
    }

    #[test]
    fn one_round_takes_a_limited_amount_from_all_sockets_of_an_application() {
        for family in FAMILIES {
            let mut testbed = Testbed::new(GEOMETRY, Quota::default());
            let mut app = testbed.attach();
            // A lone application gets more.
            let _other = testbed.attach();
            let mut sockets = Sockets::bind(&mut testbed, &mut app, family);
            sockets.write(&mut app, family);
            let mut left: usize = sockets.unread().iter().sum();
            let mut rounds = 0;
            while left > 0 {
                testbed.run_round();
                let now: usize = sockets.unread().iter().sum();
                let taken = left - now;
                assert!(taken <= MAX_ROUND_BYTES, "a round took {taken} bytes");
                assert!(taken > 0);
                (left, rounds) = (now, rounds + 1);
            }
            assert!(rounds >= 10);
        }
    }

    #[test]
    fn sockets_of_an_application_get_equal_shares_of_the_rounds() {
        let mut testbed = Testbed::new(GEOMETRY, Quota::default());
        let mut app = testbed.attach();
        let mut sockets = Sockets::bind(&mut testbed, &mut app, FAMILIES[0]);
        sockets.write(&mut app, FAMILIES[0]);
        // The first sockets go on writing, without a command.
        let whole = DATAGRAMS * record_bytes(DATAGRAM_BYTES);
        for _ in 0..1000 {
            testbed.run_round();
            let record = record(FAMILIES[0]);
            for (_, writer) in sockets.0.iter_mut().take(8) {
                while writer.space().unwrap() >= record.len() {
                    writer.write(&record).unwrap();
                }
                writer.publish();
            }
        }
        assert!(sockets.unread()[8..].iter().all(|&left| left < whole), "a socket had no turn");
    }
}
