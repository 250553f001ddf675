//! Selection of the applications that migrate: by load, by process, or all.

use std::collections::HashSet;
use std::io;

use super::sets::MigrationSet;
use crate::daemon::application::Application;
use crate::daemon::core::NetworkCore;
use crate::daemon::core::message::{CoreMessage, LeavingApp, NotMigrated};
use crate::daemon::ids::AppNumber;

impl NetworkCore {
    /// Moves applications to another core that cause up to `busy_permille` of this core's load;
    /// at least one group in any case.
    pub(in crate::daemon) fn move_load(&mut self, to: usize, busy_permille: u32) -> io::Result<()> {
        let work = |apps: &[AppNumber]| -> u64 {
            let apps = apps.iter().filter_map(|&app| self.apps.get(app as usize)?.as_ref());
            apps.map(|app| app.recent_work).sum::<u64>() + 1
        };
        let groups = self.migration_groups().into_iter();
        let mut groups: Vec<_> = groups.map(|apps| (work(&apps), apps)).collect();
        let total: u64 = groups.iter().map(|(work, _)| work).sum();
        let own = self.cores.load(self.index).last_report().busy_permille.max(1);
        let mut rest = total * u64::from(busy_permille) / u64::from(own);
        groups.sort_unstable_by_key(|(work, _)| std::cmp::Reverse(*work));
        let smallest = groups.last().map(|(_, apps)| apps.clone());
        let fits = |(work, apps): (u64, Vec<AppNumber>)| {
            rest = rest.checked_sub(work)?;
            Some(apps)
        };
        let mut leaving: Vec<_> = groups.into_iter().filter_map(fits).flatten().collect();
        if leaving.is_empty() {
            leaving = smallest.unwrap_or_default();
        }
        let leaving = self.with_tokens(leaving);
        self.move_next(to, &leaving)
    }

    /// Moves the first of these applications to another core, with those that share sockets or ports
    /// with them. The others follow once the first have arrived.
    pub(in crate::daemon) fn move_next(
        &mut self,
        to: usize,
        apps: &[LeavingApp],
    ) -> io::Result<()> {
        let is_here = |leaving: &&LeavingApp| {
            let app = self.application(leaving.number);
            app.is_some_and(|app| app.token.ct_eq(&leaving.token))
        };
        let leaving: HashSet<_> = apps.iter().filter(is_here).map(|app| app.number).collect();
        let mut groups = self.migration_groups();
        groups.retain(|group| group.iter().any(|app| leaving.contains(app)));
        let piece = self.take_piece(&mut groups);
        if piece.is_empty() {
            return Ok(());
        }
        let next = self.with_tokens(groups.into_iter().flatten());
        self.migrate_before(self.migration_set(piece), to, next).map(|_| ())
    }

    fn with_tokens(&self, apps: impl IntoIterator<Item = AppNumber>) -> Vec<LeavingApp> {
        let leaving = |number| Some(LeavingApp { number, token: self.application(number)?.token });
        apps.into_iter().filter_map(leaving).collect()
    }

    /// Migrates the application of a process to another core, with its migration set.
    pub(in crate::daemon) fn migrate_process(&mut self, pid: u32, to: usize) -> io::Result<()> {
        let is_it = |app: &Option<Box<_>>| {
            app.as_deref().is_some_and(|app: &Application| app.identity.pid == pid)
        };
        match self.apps.iter().position(is_it) {
            Some(app) => self.migrate(self.migration_set_with(app as AppNumber), to).map(|_| ()),
            None => Ok(()),
        }
    }

    /// Migrates everything to another core. Returns the number of applications and sockets still
    /// here: the other core may have no space for them, and send them back. Also returns the reason
    /// if they were not sent.
    pub(super) fn migrate_all(&mut self, to: usize) -> io::Result<(usize, Option<NotMigrated>)> {
        let (mut why, mut groups) = (None, self.migration_groups());
        while why.is_none() && !groups.is_empty() {
            let piece = self.take_piece(&mut groups);
            why = self.migrate(self.migration_set(piece), to)?;
        }
        // Sockets in transit, and closed connections.
        let live = self.apps.iter().enumerate().filter(|(_, app)| app.is_some());
        let apps: Vec<_> = live.map(|(number, _)| number as AppNumber).collect();
        let sockets = self.server.sockets.keys();
        let ports = self.server.sockets.ports().chain(self.server.claims.closing_ports());
        let ports: HashSet<_> = ports.collect();
        let ports: Vec<_> = ports.into_iter().collect();
        if why.is_none() && !(apps.is_empty() && ports.is_empty()) {
            why = self.migrate(MigrationSet { apps, sockets, ports }, to)?;
        }
        let unmoved = self.apps.iter().flatten().count() + self.server.sockets.len();
        Ok((unmoved, why))
    }

    /// Moves everything to the primary core.
    pub(in crate::daemon) fn move_all_to_primary(&mut self) -> io::Result<()> {
        let (unmoved, why) = self.migrate_all(0)?;
        self.cores.inbox(0).send(CoreMessage::Gathered { unmoved, why })
    }
}
