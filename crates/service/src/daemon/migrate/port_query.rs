//! Query for a port that an application wants and another core has.
//!
//! The holder of the port may have just exited, or only closed connections may still use it: on
//! a single core the port would be free then. So before the command fails, the other cores are
//! queried one after another, and the command waits meanwhile. A port that may be shared stays
//! where it is, too.

use std::io;

use tidegate_device::sharded::FlowSteering;

use super::sets::MigrationSet;
use crate::daemon::core::NetworkCore;
use crate::daemon::core::inbox::{CoreMessage, PortQuery};
use crate::daemon::ids::AppNumber;
use crate::daemon::transfer::request::find_by_token;
use crate::ipc::command::Command;

/// Times that all cores are queried: the holder of the port may be migrating.
const QUERY_LAPS: u32 = 64;

impl NetworkCore {
    /// Queries the other cores for a command's port that one of them has, unless that was done.
    /// Returns true if the command waits for the answer.
    pub(in crate::daemon) fn query_port(&mut self, number: AppNumber, command: Command) -> bool {
        let (Some(port), Some(flow_steering)) =
            (command.requested_port(), self.cores.flow_steering())
        else {
            return false;
        };
        let Some(Some(app)) = self.apps.get_mut(number as usize) else { return false };
        if !flow_steering.is_claimed_elsewhere(self.index, port) || app.commands.has_queried_port()
        {
            return false;
        }
        let (token, asking_core) = (app.token, self.index);
        let sharing = command.sharing(app.identity.uid);
        let query = PortQuery {
            port,
            sharing,
            asking_core,
            token,
            is_resolved: false,
            laps_left: QUERY_LAPS,
        };
        let sent = self.forward_query(query).is_ok();
        if let Some(Some(app)) = self.apps.get_mut(number as usize)
            && sent
        {
            app.commands.defer(command);
        }
        sent
    }

    fn forward_query(&self, query: PortQuery) -> io::Result<()> {
        let next = (self.index + 1) % self.cores.count();
        self.cores.inbox(next).send(CoreMessage::PortQuery(query))
    }

    /// Handles the query of another core, or its own query when all cores have been asked.
    pub(in crate::daemon) fn on_port_query(&mut self, mut query: PortQuery) -> io::Result<()> {
        let Some(flow_steering) = self.cores.flow_steering() else { return Ok(()) };
        let port = query.port;
        query.is_resolved |= flow_steering.is_held_by(self.index, port);
        if query.asking_core == self.index {
            query.is_resolved |= flow_steering.can_claim(self.index, port, query.sharing);
            // The application may have migrated, and queries again on its new core.
            let Some((_, app)) = find_by_token(&mut self.apps, query.token) else { return Ok(()) };
            if query.is_resolved || query.laps_left == 0 {
                app.commands.on_port_query_done();
                return Ok(());
            }
            query.laps_left -= 1;
            return self.forward_query(query);
        }
        self.reap_except(None);
        self.server.release_closed();
        let claims = self.server.sockets.entries().filter_map(|(_, socket)| socket.claim.as_ref());
        let is_used = claims.map(|claim| claim.local_port()).any(|used| used == port);
        let is_open = |flow_steering: &FlowSteering| {
            flow_steering.can_claim(query.asking_core, port, query.sharing)
        };
        let may_stay = self.cores.flow_steering().is_some_and(is_open);
        if !is_used && !may_stay && self.server.claims.has_closing(port) {
            let ports = vec![port];
            self.migrate(
                MigrationSet { apps: Vec::new(), sockets: Vec::new(), ports },
                query.asking_core,
            )?;
        }
        self.forward_query(query)
    }
}
