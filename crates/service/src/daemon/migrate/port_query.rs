//! Answers to the query of another core for a port.
//!
//! Closed connections on the port migrate to the core where the port is needed, unless the port
//! is to be shared.

use std::io;

use tidegate_device::sharded::FlowSteering;

use super::sets::MigrationSet;
use crate::daemon::core::message::PortQuery;
use crate::daemon::core::{NetworkCore, find_by_token};

impl NetworkCore {
    /// Handles the query of another core, or its own query when all cores have been asked.
    pub(in crate::daemon) fn on_port_query(&mut self, mut query: PortQuery) -> io::Result<()> {
        let Some(flow_steering) = self.cores.flow_steering() else { return Ok(()) };
        let port = query.port;
        query.is_resolved |= flow_steering.is_held_by(self.index, port);
        if query.asking_core == self.index {
            query.is_resolved |= flow_steering.can_claim(self.index, port, query.sharing);
            // The application may have migrated, and queries again on its new core.
            let Some((_, app)) = find_by_token(&mut self.apps, query.token) else { return Ok(()) };
            let (_, _, now_ns) = self.server.engine.parts();
            app.cpu_share.charge(now_ns, std::mem::take(&mut query.spent_ns));
            if query.is_resolved || query.laps_left == 0 {
                app.commands.on_port_query_done();
                return Ok(());
            }
            query.laps_left -= 1;
            return self.forward_query(query);
        }
        self.handle_events();
        self.server.release_closed();
        // The work so far was due in any case.
        let began_ns = self.server.engine.read_clock();
        let is_used = self.server.sockets.has_port(port);
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
        let spent_ns = self.server.engine.read_clock().saturating_sub(began_ns);
        query.spent_ns = query.spent_ns.saturating_add(spent_ns);
        self.forward_query(query)
    }
}
