//! Sets of applications that migrate from one core to another, with all they hold.
//!
//! Applications that share a socket migrate together, and so do applications that share a
//! local port, unless the port may be on several cores.

use std::collections::HashMap;

use tidegate_device::sharded::LocalPort;

use crate::daemon::application::Application;
use crate::daemon::core::NetworkCore;
use crate::daemon::ids::{AppNumber, SocketKey};
use crate::daemon::socket::groups::AppGroups;

/// Sockets of the applications that leave a core together, unless one group has more. The frames
/// for their ports wait meanwhile, of which only a limited number can, and both cores have other
/// work.
const MAX_PIECE_SOCKETS: usize = 256;

/// Applications that leave a core together, and what they hold.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct MigrationSet {
    pub(in crate::daemon) apps: Vec<AppNumber>,
    pub(in crate::daemon) sockets: Vec<SocketKey>,
    pub(in crate::daemon) ports: Vec<LocalPort>,
}

impl NetworkCore {
    /// Number of groups of applications that can migrate independently.
    pub(in crate::daemon) fn count_migration_sets(&self) -> usize {
        let mut groups = self.app_groups();
        self.live_applications().filter(|&(app, _)| groups.group_of(app) == app).count()
    }

    /// Groups of applications that can migrate independently.
    pub(super) fn migration_groups(&self) -> Vec<Vec<AppNumber>> {
        let mut groups = self.app_groups();
        let mut by_group: HashMap<AppNumber, Vec<AppNumber>> = HashMap::new();
        for (app, _) in self.live_applications() {
            by_group.entry(groups.group_of(app)).or_default().push(app);
        }
        by_group.into_values().collect()
    }

    /// Takes groups of applications that leave together: as many as [`MAX_PIECE_SOCKETS`] permits.
    /// An application counts as a socket, too.
    pub(super) fn take_piece(&self, groups: &mut Vec<Vec<AppNumber>>) -> Vec<AppNumber> {
        let (mut piece, mut count) = (Vec::new(), 0);
        while let Some(group) = groups.pop() {
            let live = group.iter().filter_map(|&app| self.application(app));
            let sockets = live.flat_map(Application::sockets);
            count += group.len() + sockets.take(MAX_PIECE_SOCKETS).count();
            if count > MAX_PIECE_SOCKETS && !piece.is_empty() {
                groups.push(group);
                break;
            }
            piece.extend(group);
        }
        piece
    }

    /// Migration set of a whole number of groups.
    pub(super) fn migration_set(&self, apps: Vec<AppNumber>) -> MigrationSet {
        let live = apps.iter().filter_map(|&app| self.application(app));
        let held = live.flat_map(|app| app.sockets().map(|(_, key)| key));
        let (sockets, ports) =
            self.server.sockets.leaving_with(&apps, held, |port| self.can_be_shared(port));
        MigrationSet { apps, sockets, ports }
    }

    /// Migration set of an application.
    pub(super) fn migration_set_with(&self, app: AppNumber) -> MigrationSet {
        let mut groups = self.app_groups();
        let group = groups.group_of(app);
        let live = self.live_applications().map(|(number, _)| number);
        self.migration_set(live.filter(|&number| groups.group_of(number) == group).collect())
    }

    /// Migration set of a socket.
    pub(super) fn migration_set_of(&self, key: SocketKey) -> MigrationSet {
        let sockets = &self.server.sockets;
        let apps = sockets.applications_of(key, |port| self.can_be_shared(port));
        match apps.into_iter().find(|&app| self.application(app).is_some()) {
            Some(app) => self.migration_set_with(app),
            // The socket is in transit, and its port has no other sockets than such.
            None => {
                let held = sockets.get(key).map(|_| key).into_iter();
                let (sockets, ports) =
                    sockets.leaving_with(&[], held, |port| self.can_be_shared(port));
                MigrationSet { apps: Vec::new(), sockets, ports }
            }
        }
    }

    fn app_groups(&self) -> AppGroups {
        let is_live = |app| self.application(app).is_some();
        self.server.sockets.app_groups(self.apps.len(), is_live, |port| self.can_be_shared(port))
    }

    fn live_applications(&self) -> impl Iterator<Item = (AppNumber, &Application)> {
        let all = self.apps.iter().enumerate();
        all.filter_map(|(number, app)| Some((number as AppNumber, app.as_deref()?)))
    }

    pub(super) fn application(&self, number: AppNumber) -> Option<&Application> {
        self.apps.get(number as usize)?.as_deref()
    }

    /// True if sockets on several cores may have the port.
    fn can_be_shared(&self, port: LocalPort) -> bool {
        self.cores.flow_steering().is_some_and(|flow_steering| flow_steering.can_be_shared(port))
    }
}
