//! End of applications: their sockets end some at a time, so that an application with many sockets
//! does not hold up the others.

use std::collections::VecDeque;

use super::NetworkCore;
use super::server::SocketServer;
use crate::daemon::application::Application;
use crate::daemon::ids::{AppNumber, SocketKey};
use crate::ipc::command::Command;

/// Maximum number of sockets that end in one round.
const SOCKETS_PER_ROUND: usize = 32;

/// Detached applications whose sockets have not all ended.
#[derive(Default)]
pub(super) struct EndingApps(VecDeque<EndingApp>);

struct EndingApp {
    number: AppNumber,
    app: Box<Application>,
    /// Sockets that are left.
    sockets: Vec<SocketKey>,
}

impl EndingApps {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl NetworkCore {
    /// Detaches an application and ends its sockets, many of them in later rounds. Data of sockets
    /// that the application has closed before still goes out, as far as the stack has space for it.
    pub(in crate::daemon) fn detach(&mut self, number: AppNumber) {
        self.unwatch(number);
        let Some(app) = self.apps.get_mut(number as usize).and_then(Option::take) else { return };
        let sockets = app.sockets().map(|(_, key)| key).collect();
        self.ending.0.push_back(EndingApp { number, app, sockets });
        // The first of several goes on in the next round.
        if self.ending.0.len() == 1 {
            self.end_sockets();
        }
    }

    /// Ends sockets of detached applications, as many as one round may.
    pub(super) fn end_sockets(&mut self) {
        for _ in 0..SOCKETS_PER_ROUND {
            let Some(ending) = self.ending.0.front_mut() else { return };
            match ending.sockets.pop() {
                Some(key) => self.end_next_socket(key),
                None => self.finish_ending(),
            }
        }
        // An application without sockets left has ended.
        while self.ending.0.front().is_some_and(|ending| ending.sockets.is_empty()) {
            self.finish_ending();
        }
    }

    /// Ends all sockets of detached applications at once.
    pub(in crate::daemon) fn end_all_sockets(&mut self) {
        while !self.ending.is_empty() {
            self.end_sockets();
        }
    }

    /// Defers a command that requests a port while detached applications have sockets: the port
    /// may be theirs. Returns true if the command waits.
    pub(super) fn wait_for_endings(&mut self, number: AppNumber, command: Command) -> bool {
        let waits = !self.ending.is_empty();
        if waits && let Some(Some(app)) = self.apps.get_mut(number as usize) {
            app.commands.defer_to_later_round(command);
        }
        waits
    }

    /// Ends a socket of the first detached application.
    fn end_next_socket(&mut self, key: SocketKey) {
        let Some(EndingApp { number, app, .. }) = self.ending.0.front_mut() else { return };
        let SocketServer { engine, sockets, .. } = &mut self.server;
        let Some(socket) = sockets.get_mut(key) else { return };
        if socket.holders().len() > 1 {
            self.server.leave_socket(*number, app, key);
            // The application may have written data without a notification.
            self.poll_socket(key);
            return;
        }
        let is_done = socket.poll_finally(engine);
        self.server.end_socket(key, !is_done);
        self.free_ended_sockets();
    }

    fn finish_ending(&mut self) {
        self.ending.0.pop_front();
        self.cores.load(self.index).remove_applications(1);
        self.cores.detach_bell().ring();
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use tidegate_stack::UdpOptions;

    use super::*;
    use crate::daemon::Quota;
    use crate::daemon::core::testbed::{Program, Testbed};
    use crate::ipc::layout::Geometry;
    use crate::ipc::notification::Notification;

    const GEOMETRY: Geometry = Geometry { sockets: 256, tcp_bytes: 4096, udp_bytes: 4096 };

    fn bind(app: &mut Program, port: u16) {
        let local = SocketAddr::new("192.0.2.1".parse().unwrap(), port);
        let (share_group, options) = (None, UdpOptions::default());
        app.push(&Command::Bind { tag: 7, local, share_group, options }.to_words());
    }

    #[test]
    fn sockets_of_an_application_end_some_in_each_round() {
        let mut testbed = Testbed::new(GEOMETRY, Quota::default());
        let (mut app, mut other) = (testbed.attach(), testbed.attach());
        for port in 1..=GEOMETRY.sockets as u16 {
            bind(&mut app, port);
            testbed.run_round();
        }
        let sockets = |testbed: &Testbed| testbed.core.server.sockets.len();
        assert_eq!(sockets(&testbed), GEOMETRY.sockets as usize);
        drop(app.connection);
        // Another application wants a port meanwhile: it is free when the command is executed.
        bind(&mut other, 1);
        let mut rounds = 0;
        let answer = loop {
            let before = sockets(&testbed);
            testbed.run_round();
            // The round that detaches the application may end sockets twice.
            let ended = before.saturating_sub(sockets(&testbed));
            assert!(ended <= 2 * SOCKETS_PER_ROUND, "{ended} sockets ended in a round");
            rounds += 1;
            if let Some(answer) = other.next_notification() {
                break answer;
            }
        };
        assert!(rounds >= GEOMETRY.sockets as usize / SOCKETS_PER_ROUND / 2);
        assert!(matches!(answer, Notification::Reply { tag: 7, outcome: Ok(_) }), "{answer:?}");
        assert_eq!(sockets(&testbed), 1);
    }
}
