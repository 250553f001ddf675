//! Selection of the applications that migrate: by load, by process, or all.

use std::collections::HashSet;
use std::io;

use super::sets::MigrationSet;
use crate::daemon::core::NetworkCore;
use crate::daemon::core::message::CoreMessage;
use crate::daemon::ids::AppNumber;

impl NetworkCore {
    /// Moves applications to another core that cause up to `busy_permille` of this core's load;
    /// at least one migration set in any case.
    pub(in crate::daemon) fn move_load(&mut self, to: usize, busy_permille: u32) -> io::Result<()> {
        let work = |core: &Self, set: &MigrationSet| -> u64 {
            let apps = set.apps.iter().filter_map(|&app| core.apps.get(app as usize)?.as_ref());
            apps.map(|app| app.recent_work).sum::<u64>() + 1
        };
        let mut sets: Vec<(u64, MigrationSet)> =
            self.migration_sets().into_iter().map(|set| (work(self, &set), set)).collect();
        let total: u64 = sets.iter().map(|(work, _)| work).sum();
        let own = self.cores.load(self.index).last_report().busy_permille.max(1);
        let mut rest = total * u64::from(busy_permille) / u64::from(own);
        sets.sort_unstable_by_key(|(work, _)| std::cmp::Reverse(*work));
        let last = sets.last().map(|(_, set)| set.clone());
        let mut moved_any = false;
        for (work, set) in sets {
            if work <= rest {
                rest -= work;
                moved_any = true;
                self.migrate(set, to)?;
            }
        }
        match last {
            Some(set) if !moved_any => self.migrate(set, to),
            _ => Ok(()),
        }
    }

    /// Migrates the application of a process to another core, with its migration set.
    pub(in crate::daemon) fn migrate_process(&mut self, pid: u32, to: usize) -> io::Result<()> {
        let is_it = |&app: &AppNumber| {
            let app = self.apps.get(app as usize).and_then(Option::as_ref);
            app.is_some_and(|app| app.identity.pid == pid)
        };
        match self.migration_sets().into_iter().find(|set| set.apps.iter().any(is_it)) {
            Some(set) => self.migrate(set, to),
            None => Ok(()),
        }
    }

    /// Migrates everything to another core. Returns the number of applications and sockets still
    /// here: the other core may have no space for them, and send them back.
    pub(super) fn migrate_all(&mut self, to: usize) -> io::Result<usize> {
        let live = self.apps.iter().enumerate().filter(|(_, app)| app.is_some());
        let apps: Vec<_> = live.map(|(number, _)| number as AppNumber).collect();
        let sockets = self.server.sockets.keys();
        let claims = self.server.sockets.entries().filter_map(|(_, socket)| socket.claim.as_ref());
        let ports =
            claims.map(|claim| claim.local_port()).chain(self.server.claims.closing_ports());
        let ports: HashSet<_> = ports.collect();
        let ports: Vec<_> = ports.into_iter().collect();
        if !(apps.is_empty() && ports.is_empty()) {
            self.migrate(MigrationSet { apps, sockets, ports }, to)?;
        }
        Ok(self.apps.iter().flatten().count() + self.server.sockets.keys().len())
    }

    /// Moves everything to the primary core.
    pub(in crate::daemon) fn move_all_to_primary(&mut self) -> io::Result<()> {
        let unmoved = self.migrate_all(0)?;
        self.cores.inbox(0).send(CoreMessage::Gathered { unmoved })
    }
}
