//! Departure of applications from a network core.

use std::collections::{HashMap, HashSet};
use std::io;
use std::sync::Arc;

use tidegate_device::sharded::LocalPort;
use tidegate_engine::PortClaim;
use tidegate_stack::{SocketSelection, TcpId};

use super::sets::MigrationSet;
use crate::daemon::application::Application;
use crate::daemon::core::NetworkCore;
use crate::daemon::core::message::{CoreMessage, LeavingApp, MigrationBatch, NotMigrated};
use crate::daemon::core::server::SocketServer;
use crate::daemon::ids::{AppNumber, SocketKey, StackSocketId};
use crate::daemon::socket::AppSocket;

impl NetworkCore {
    /// Migrates a set of applications to another core. Returns the reason if the set stays here; the
    /// log has it, too.
    pub(super) fn migrate(
        &mut self,
        set: MigrationSet,
        to: usize,
    ) -> io::Result<Option<NotMigrated>> {
        self.migrate_before(set, to, Vec::new())
    }

    /// As [`NetworkCore::migrate`]. The `next` applications follow once the set has arrived.
    pub(super) fn migrate_before(
        &mut self,
        set: MigrationSet,
        to: usize,
        next: Vec<LeavingApp>,
    ) -> io::Result<Option<NotMigrated>> {
        let outcome = self.try_migrate(set, to, next)?;
        if let Some(why) = outcome {
            (self.log)(&format!("sockets stay on network core {}: {why}", self.index));
        }
        Ok(outcome)
    }

    fn try_migrate(
        &mut self,
        set: MigrationSet,
        to: usize,
        next: Vec<LeavingApp>,
    ) -> io::Result<Option<NotMigrated>> {
        let cores = Arc::clone(&self.cores);
        let Some(flow_steering) = cores.flow_steering() else { return Ok(None) };
        let to = cores.migration_target(to);
        if to == self.index || to >= cores.count() {
            return Ok(None);
        }
        let MigrationSet { apps, sockets, ports } = set;
        if flow_steering.park(self.index, &ports).is_err() {
            return Ok(Some(NotMigrated::CoreHangs));
        }
        if !self.drain_parked()? {
            // The stack has no memory for frames that would find their sockets gone: RST.
            flow_steering.hand_over(
                self.index,
                self.index,
                ports.into_iter().map(|port| (port, 0)),
            );
            return Ok(Some(NotMigrated::NoFreeFrame));
        }
        let (sockets, mut selection) = self.remove_sockets(sockets);
        let keys: Vec<SocketKey> = sockets.iter().map(|(key, _)| *key).collect();
        let transfers = self.server.transfers.extract(&keys);
        let closing = self.take_closing(&ports);
        selection.connections.extend(closing.iter().map(|(id, _)| *id));
        let (stack, arena, now_ns) = self.server.engine.parts();
        let stack = stack.extract_sockets(now_ns, arena, &selection);
        self.server.engine.flush()?;
        selection.udp.iter().for_each(|&id| self.server.engine.report_level(id));
        // A primary core that hangs is found out by `Daemon::is_running`.
        let _ = flow_steering.wait_until_sent(self.index);
        let apps = self.remove_applications(apps);
        for (_, app) in &apps {
            (self.log)(&format!("{} moves to network core {to}", app.identity));
        }
        let ports = count_claims(ports, &sockets, &closing);
        let batch = MigrationBatch {
            apps,
            sockets,
            stack,
            ports,
            closing,
            transfers,
            from_core: self.index,
            is_returned: false,
            next,
        };
        cores.inbox(to).send(CoreMessage::InsertBatch(Box::new(batch)))?;
        Ok(None)
    }

    /// Processes the frames that were received before their ports were parked. Returns false if
    /// that is not possible now.
    fn drain_parked(&mut self) -> io::Result<bool> {
        let is_drained = self.server.engine.drain_passed_frames()?;
        self.handle_events();
        self.notify_applications();
        // The ID of an ended connection may be in use on the other core.
        self.server.release_closed();
        Ok(is_drained)
    }

    /// Removes sockets from this core. Also returns their IDs in the stack.
    fn remove_sockets(
        &mut self,
        keys: Vec<SocketKey>,
    ) -> (Vec<(SocketKey, Box<AppSocket>)>, SocketSelection) {
        let mut sockets: Vec<_> = keys
            .into_iter()
            .filter_map(|key| Some((key, self.server.sockets.remove(key)?)))
            .collect();
        let mut selection = SocketSelection::default();
        for (_, socket) in &mut sockets {
            socket.copy_pending(&mut self.server.engine);
            match socket.id() {
                StackSocketId::Udp(id) => selection.udp.push(id),
                StackSocketId::Listener(id) => selection.listeners.push(id),
                StackSocketId::Stream(id) => selection.connections.push(id),
            }
            self.server.socket_index.remove(socket.id());
        }
        (sockets, selection)
    }

    /// Removes the closed connections on `ports`, except those with the claim of a socket that
    /// stays.
    fn take_closing(&mut self, ports: &[LocalPort]) -> Vec<(TcpId, Arc<PortClaim>)> {
        let SocketServer { claims, sockets, .. } = &mut self.server;
        claims.take_closing(ports, |claim| !sockets.has_claim(claim))
    }

    /// Removes applications from this core, as far as they have not ended.
    fn remove_applications(
        &mut self,
        numbers: Vec<AppNumber>,
    ) -> Vec<(AppNumber, Box<Application>)> {
        let mut remove = |number: AppNumber| {
            self.unwatch(number);
            let app = self.apps.get_mut(number as usize)?.take()?;
            Some((number, app))
        };
        numbers.into_iter().filter_map(&mut remove).collect()
    }
}

/// Local ports, with the number of claims that sockets and closed connections have on each.
fn count_claims(
    ports: Vec<LocalPort>,
    sockets: &[(SocketKey, Box<AppSocket>)],
    closing: &[(TcpId, Arc<PortClaim>)],
) -> Vec<(LocalPort, u32)> {
    let claims = sockets.iter().filter_map(|(_, socket)| socket.claim());
    let claims = claims.chain(closing.iter().map(|(_, claim)| claim));
    let claims: HashSet<_> = claims.map(|claim| (Arc::as_ptr(claim), claim.local_port())).collect();
    let mut counts: HashMap<_, _> = ports.into_iter().map(|port| (port, 0)).collect();
    for (_, port) in claims {
        counts.entry(port).and_modify(|count| *count += 1);
    }
    counts.into_iter().collect()
}
