//! Query for a port that an application wants and another core has.
//!
//! The holder of the port may have just exited, or only closed connections may still use it: on
//! a single core the port would be free then. So before the command fails, the cores that have the
//! port are queried one after another, and the command waits meanwhile. A port that may be shared
//! stays where it is, too. The time that the other cores spend is the application's.

use std::io;

use super::NetworkCore;
use super::message::{CoreMessage, PortQuery};
use crate::daemon::ids::AppNumber;
use crate::ipc::command::Command;

/// Times that all cores are queried: the holder of the port may be migrating.
const QUERY_LAPS: u32 = 64;

impl NetworkCore {
    /// Queries the other cores for a command's port that one of them has, unless that was done.
    /// Returns true if the command waits for the answer.
    pub(super) fn query_port(&mut self, number: AppNumber, command: Command) -> bool {
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
            spent_ns: 0,
        };
        let sent = self.forward_query(query).is_ok();
        if let Some(Some(app)) = self.apps.get_mut(number as usize)
            && sent
        {
            app.commands.defer_for_port_query(command);
        }
        sent
    }

    /// Sends a query to the next core that has the port, or back to the core that asks. While the
    /// port is migrating, every core may have it soon.
    pub(in crate::daemon) fn forward_query(&self, query: PortQuery) -> io::Result<()> {
        let flow_steering = self.cores.flow_steering();
        let holders = flow_steering.and_then(|steering| steering.holders(query.port));
        let is_asked = |core: &usize| {
            *core == query.asking_core || holders.is_none_or(|holders| holders & 1 << core != 0)
        };
        let count = self.cores.count();
        let mut others = (1..=count).map(|step| (self.index + step) % count);
        let next = others.find(is_asked).unwrap_or(query.asking_core);
        self.cores.inbox(next).send(CoreMessage::PortQuery(query))
    }
}
