//! Arrival of applications at a network core.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;

use super::id_map::SocketIdMap;
use crate::daemon::application::Application;
use crate::daemon::core::NetworkCore;
use crate::daemon::core::message::{CoreMessage, MigrationBatch};
use crate::daemon::ids::{AppNumber, NO_APP, SocketKey};
use crate::daemon::socket::AppSocket;

/// Application numbers on the previous core, mapped to the numbers on this core.
type AppNumberMap = HashMap<AppNumber, AppNumber>;

impl NetworkCore {
    /// Inserts a batch of applications from another core.
    pub(in crate::daemon) fn insert_batch(&mut self, mut batch: MigrationBatch) -> io::Result<()> {
        let cores = Arc::clone(&self.cores);
        let Some(flow_steering) = cores.flow_steering() else { return Ok(()) };
        // The clock value of the other core may be later than this core's last one.
        self.server.engine.read_clock();
        let (own, arena, now_ns) = self.server.engine.parts();
        let inserted = match batch.is_returned {
            false => own.insert_sockets(now_ns, arena, batch.stack),
            true => own.insert_returned_sockets(now_ns, arena, batch.stack),
        };
        let (ids, refused) = match inserted {
            Ok(moved) => (SocketIdMap::new(moved), false),
            Err(not_moved) if !batch.is_returned => {
                (self.log)(&format!("network core {}: {not_moved}", self.index));
                // The previous core takes them back as its own.
                (batch.stack, batch.is_returned) = (not_moved.sockets, true);
                // Those that would follow stay with them.
                batch.next = Vec::new();
                let from_core = batch.from_core;
                return cores.inbox(from_core).send(CoreMessage::InsertBatch(Box::new(batch)));
            }
            // A parked port takes no other sockets, so that those of a returned batch have their
            // addresses. Should the insertion fail, its applications are detached.
            Err(_) => (SocketIdMap::default(), true),
        };
        let MigrationBatch { apps, sockets, ports, closing, transfers, from_core, next, .. } =
            batch;
        let numbers = self.insert_applications(apps);
        let keys = self.insert_sockets(sockets, &numbers, &ids);
        for &number in numbers.values() {
            if let Some(Some(app)) = self.apps.get_mut(number as usize) {
                app.slots.update_keys(&keys);
            }
        }
        self.set_port_programs(keys.values().copied());
        self.server.transfers.insert_all(transfers, &keys);
        flow_steering.set_active(self.index);
        flow_steering.hand_over(from_core, self.index, ports);
        for (id, claim) in closing {
            match ids.connection(id) {
                Some(id) => {
                    let (stack, _, _) = self.server.engine.parts();
                    self.server.claims.release_after_close(stack, id, Some(claim));
                }
                None => self.server.release_claim(Some(claim)),
            }
        }
        // So far they counted on the previous core.
        cores.load(self.index).add_applications(numbers.len());
        cores.load(from_core).remove_applications(numbers.len());
        if !next.is_empty() {
            let to = self.index;
            cores.inbox(from_core).send(CoreMessage::MoveNext { to, apps: next })?;
        }
        if refused {
            numbers.into_values().for_each(|number| self.detach(number));
        }
        if cores.is_gathering() && !batch.is_returned {
            self.migrate_all(0)?;
        }
        self.server.engine.flush()
    }

    fn insert_applications(&mut self, apps: Vec<(AppNumber, Box<Application>)>) -> AppNumberMap {
        let insert = |(old, mut app): (AppNumber, Box<Application>)| {
            app.commands.reset_port_query();
            (old, self.insert_application(app))
        };
        apps.into_iter().map(insert).collect()
    }

    /// Inserts sockets. Returns their keys on the previous core, mapped to the keys on this core.
    fn insert_sockets(
        &mut self,
        sockets: Vec<(SocketKey, Box<AppSocket>)>,
        numbers: &AppNumberMap,
        ids: &SocketIdMap,
    ) -> HashMap<SocketKey, SocketKey> {
        let number_of = |old| numbers.get(&old).copied().unwrap_or(NO_APP);
        let insert = |(old, socket): (SocketKey, Box<AppSocket>)| {
            let mut socket = socket.renumbered(number_of);
            socket.set_id(ids.get(socket.id()).unwrap_or(socket.id()));
            // Events during the migration are found by polling every socket.
            socket.in_poll_queue = true;
            let id = socket.id();
            let key = self.server.sockets.insert_boxed(socket);
            self.server.socket_index.insert(id, key);
            self.poll_queue.push(key);
            (old, key)
        };
        sockets.into_iter().map(insert).collect()
    }
}
