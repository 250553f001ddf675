//! Migration of applications and sockets between network cores.
//!
//! Frames for their ports are parked meanwhile, so nothing is lost or reordered.

pub(super) mod balancer;
mod port_query;
pub(super) mod sets;

use std::collections::{HashMap, HashSet};
use std::io::{self, ErrorKind};
use std::sync::Arc;

use tidegate_stack::SocketSelection;

use self::sets::{AppGroups, Constraint, Constraints, MigrationBatch, MigrationSet, SocketIdMap};
use crate::daemon::core::NetworkCore;
use crate::daemon::core::inbox::CoreMessage;
use crate::daemon::ids::{AppNumber, NO_APP, SocketKey, StackSocketId};
use crate::daemon::socket::AppSocket;
use crate::daemon::transfer::request::{SearchTarget, TransferRequest, answer, find_by_token};
use crate::ipc::handshake::TransferOperation;

/// Maximum rounds in which a core processes frames received before its ports were parked: more
/// than the rings from the primary core hold.
const MAX_DRAIN_ROUNDS: usize = 1024;

/// Times that all cores are searched for a socket, which may be migrating.
const SOCKET_SEARCH_LAPS: usize = 8;

impl NetworkCore {
    /// Sets of applications that can migrate independently, with all sockets.
    pub(in crate::daemon) fn migration_sets(&self) -> Vec<MigrationSet> {
        let mut groups = AppGroups::new(self.apps.len());
        let (mut ties, mut ports) = (self.constraints(), HashMap::new());
        for (_, socket) in self.server.sockets.entries() {
            let Some(first) = self.involved_applications(socket).next() else { continue };
            self.involved_applications(socket).for_each(|other| groups.merge(first, other));
            if let Some(tie) = ties.of(socket) {
                groups.merge(first, *ports.entry(tie).or_insert(first));
            }
        }
        let mut sets: HashMap<AppNumber, MigrationSet> = HashMap::new();
        let live = self.apps.iter().enumerate().filter(|(_, app)| app.is_some());
        for (number, _) in live {
            let number = number as AppNumber;
            sets.entry(groups.group_of(number)).or_default().apps.push(number);
        }
        for (key, socket) in self.server.sockets.entries() {
            // A socket in transit may share its port with other applications only.
            let port = ties.of(socket).and_then(|tie| ports.get(&tie).copied());
            let first = self.involved_applications(socket).next().or(port);
            let set = first.and_then(|first| sets.get_mut(&groups.group_of(first)));
            set.into_iter().for_each(|set| set.sockets.push(key));
        }
        let mut seen = HashSet::new();
        for (tie, app) in ports {
            let (group, port) = (groups.group_of(app), tie.port());
            if seen.insert((group, port)) {
                sets.entry(group).and_modify(|set| set.ports.push(port));
            }
        }
        sets.into_values().collect()
    }

    /// Migration set of a socket.
    pub(in crate::daemon) fn migration_set_of(&self, key: SocketKey) -> MigrationSet {
        let set = self.migration_sets().into_iter().find(|set| set.sockets.contains(&key));
        set.unwrap_or_else(|| {
            // The socket is in transit, and its port has no other sockets than such.
            let mut ties = self.constraints();
            let own = self.server.sockets.get(key).and_then(|socket| ties.of(socket));
            let mut is_same = |&(other, socket): &(SocketKey, &AppSocket)| {
                other == key || own.is_some() && ties.of(socket) == own
            };
            let all = self.server.sockets.entries().filter(|it| is_same(it));
            let sockets = all.map(|(other, _)| other).collect();
            MigrationSet {
                apps: Vec::new(),
                sockets,
                ports: own.map(Constraint::port).into_iter().collect(),
            }
        })
    }

    fn constraints(&self) -> Constraints<'_> {
        Constraints::new(self.cores.flow_steering())
    }

    /// Holders and origin of a socket, as far as they are on this core.
    fn involved_applications<'a>(
        &'a self,
        socket: &'a AppSocket,
    ) -> impl Iterator<Item = AppNumber> + 'a {
        let all = socket.holders.iter().chain([&socket.origin]).map(|owner| owner.app);
        all.filter(|&app| matches!(self.apps.get(app as usize), Some(Some(_))))
    }

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

    /// Migrates a set of applications to another core.
    pub(in crate::daemon) fn migrate(&mut self, set: MigrationSet, to: usize) -> io::Result<()> {
        let cores = Arc::clone(&self.cores);
        let Some(flow_steering) = cores.flow_steering() else { return Ok(()) };
        let to = cores.migration_target(to);
        if to == self.index || to >= cores.count() {
            return Ok(());
        }
        let MigrationSet { apps, sockets, ports } = set;
        if flow_steering.park(self.index, &ports).is_err() {
            // `Daemon::stop` reports what is wrong with the primary core.
            return Ok(());
        }
        for _ in 0..MAX_DRAIN_ROUNDS {
            if self.server.engine.poll()? == 0 {
                break;
            }
        }
        self.handle_events();
        self.notify_applications();
        // The ID of an ended connection may be in use on the other core.
        self.server.release_closed();
        let mut sockets: Vec<_> = sockets
            .into_iter()
            .filter_map(|key| Some((key, self.server.sockets.remove(key)?)))
            .collect();
        let mut moving = SocketSelection::default();
        for (_, socket) in &mut sockets {
            socket.copy_pending(&mut self.server.engine);
            match socket.id() {
                StackSocketId::Udp(id) => moving.udp.push(id),
                StackSocketId::Listener(id) => moving.listeners.push(id),
                StackSocketId::Stream(id) => moving.connections.push(id),
            }
            self.server.socket_index.remove(socket.id());
        }
        let keys: Vec<SocketKey> = sockets.iter().map(|(key, _)| *key).collect();
        let transfers = self.server.transfers.extract(&keys);
        let all = self.server.sockets.entries().filter_map(|(_, socket)| socket.claim.as_ref());
        let staying: HashSet<_> = all.map(Arc::as_ptr).collect();
        let closing = self.server.claims.take_closing(|claim| {
            ports.contains(&claim.local_port()) && !staying.contains(&Arc::as_ptr(claim))
        });
        moving.connections.extend(closing.iter().map(|(id, _)| *id));
        let (stack, arena, now_ns) = self.server.engine.parts();
        let stack = stack.extract_sockets(now_ns, arena, &moving);
        self.server.engine.flush()?;
        moving.udp.iter().for_each(|&id| self.server.engine.report_level(id));
        // A primary core that hangs is found out by `Daemon::is_running`.
        let _ = flow_steering.wait_until_sent(self.index);
        // The last events may have ended an application.
        let mut leave = |number: AppNumber| {
            let app = self.apps.get_mut(number as usize)?.take()?;
            Some((number, app))
        };
        let apps: Vec<_> = apps.into_iter().filter_map(&mut leave).collect();
        for (_, app) in &apps {
            (self.log)(&format!("{} moves to network core {to}", app.identity));
        }
        let claims = sockets.iter().filter_map(|(_, socket)| socket.claim.as_ref());
        let claims = claims.chain(closing.iter().map(|(_, claim)| claim));
        let claims: HashSet<_> = claims.map(|it| (Arc::as_ptr(it), it.local_port())).collect();
        let mut ports: HashMap<_, _> = ports.into_iter().map(|port| (port, 0)).collect();
        for (_, port) in claims {
            ports.entry(port).and_modify(|count| *count += 1);
        }
        let ports = ports.into_iter().collect();
        let from_core = self.index;
        let is_returned = false;
        let batch = MigrationBatch {
            apps,
            sockets,
            stack,
            ports,
            closing,
            transfers,
            from_core,
            is_returned,
        };
        cores.inbox(to).send(CoreMessage::InsertBatch(Box::new(batch)))
    }

    /// Inserts a batch of applications from another core.
    pub(in crate::daemon) fn insert_batch(&mut self, batch: MigrationBatch) -> io::Result<()> {
        let cores = Arc::clone(&self.cores);
        let Some(flow_steering) = cores.flow_steering() else { return Ok(()) };
        let MigrationBatch {
            apps,
            sockets,
            stack,
            ports,
            closing,
            transfers,
            from_core,
            is_returned,
        } = batch;
        // The clock value of the other core may be later than this core's last one.
        self.server.engine.read_clock();
        let (own, arena, now_ns) = self.server.engine.parts();
        let (names, refused) = match own.insert_sockets(now_ns, arena, stack) {
            Ok(moved) => (SocketIdMap::new(moved), false),
            Err(not_moved) if !is_returned => {
                (self.log)(&format!("network core {}: {not_moved}", self.index));
                let stack = not_moved.sockets;
                // The previous core takes them back as its own.
                let is_returned = true;
                let batch = MigrationBatch {
                    apps,
                    sockets,
                    stack,
                    ports,
                    closing,
                    transfers,
                    from_core,
                    is_returned,
                };
                return cores.inbox(from_core).send(CoreMessage::InsertBatch(Box::new(batch)));
            }
            // A returned batch must fit: should the insertion fail, its applications are detached.
            Err(_) => (SocketIdMap::default(), true),
        };
        let mut numbers = HashMap::new();
        for (old, mut app) in apps {
            app.commands.reset_port_query();
            numbers.insert(old, self.insert_application(app));
        }
        let mut keys = HashMap::new();
        for (old, mut socket) in sockets {
            let id = socket.id();
            socket.set_id(names.get(id).unwrap_or(id));
            socket.origin.app = numbers.get(&socket.origin.app).copied().unwrap_or(NO_APP);
            for holder in &mut socket.holders {
                holder.app = numbers.get(&holder.app).copied().unwrap_or(NO_APP);
            }
            // Events during the migration are found by polling every socket.
            socket.in_poll_queue = true;
            let id = socket.id();
            let key = self.server.sockets.insert_boxed(socket);
            self.server.socket_index.insert(id, key);
            self.poll_queue.push(key);
            keys.insert(old, key);
        }
        for &number in numbers.values() {
            if let Some(Some(app)) = self.apps.get_mut(number as usize) {
                app.slots.update_keys(&keys);
            }
        }
        self.server.transfers.insert_all(transfers, &keys);
        flow_steering.set_active(self.index);
        flow_steering.hand_over(from_core, self.index, ports);
        for (id, claim) in closing {
            match names.connection(id) {
                Some(id) => self.server.claims.release_after_close(id, Some(claim)),
                None => self.server.release_claim(Some(claim)),
            }
        }
        // So far they counted on the previous core.
        cores.load(self.index).add_applications(numbers.len());
        cores.load(from_core).remove_applications(numbers.len());
        if refused {
            numbers.into_values().for_each(|number| self.detach(number));
        }
        if cores.is_gathering() && !is_returned {
            self.migrate_all(0)?;
        }
        self.server.engine.flush()
    }

    /// Migrates everything to another core. Returns the number of applications and sockets still
    /// here: the other core may have no space for them, and send them back.
    pub(in crate::daemon) fn migrate_all(&mut self, to: usize) -> io::Result<usize> {
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
}

impl NetworkCore {
    /// Handles a transfer request here, or forwards it to the core of its application. A socket
    /// to be received migrates to the application's core first.
    pub(in crate::daemon) fn handle_transfer(
        &mut self,
        request: TransferRequest,
    ) -> io::Result<()> {
        let (count, own, hops) = (self.cores.count(), self.index, request.hops);
        let is_here = find_by_token(&mut self.apps, request.token).is_some();
        let is_take = matches!(request.operation, TransferOperation::Receive(_));
        let key = self.server.transfers.key(request.fd_cookie());
        let next = (own + 1) % count;
        let (to, search, hops) = match request.search {
            _ if count == 1 || hops >= self.cores.max_hops() => return self.transfer_here(request),
            SearchTarget::Application if !is_here => (next, SearchTarget::Application, hops + 1),
            SearchTarget::Application if is_take && key.is_none() => {
                (next, SearchTarget::Socket { target_core: own, asked_cores: 1 }, hops + 1)
            }
            SearchTarget::Application => return self.transfer_here(request),
            SearchTarget::Socket { target_core, asked_cores } => match key {
                Some(key) if target_core != own => {
                    let set = self.migration_set_of(key);
                    self.migrate(set, target_core)?;
                    (target_core, SearchTarget::Application, hops + 1)
                }
                Some(_) => (target_core, SearchTarget::Application, hops + 1),
                None if asked_cores < SOCKET_SEARCH_LAPS * count => (
                    next,
                    SearchTarget::Socket { target_core, asked_cores: asked_cores + 1 },
                    hops + 1,
                ),
                None => {
                    answer(&request.connection, Err(ErrorKind::NotConnected.into()));
                    return Ok(());
                }
            },
        };
        let request = TransferRequest { search, hops, ..request };
        self.cores.inbox(to).send(CoreMessage::Transfer(Box::new(request)))
    }

    fn transfer_here(&mut self, request: TransferRequest) -> io::Result<()> {
        if let Some(key) = self.server.handle_transfer(&mut self.apps, request) {
            self.poll_socket(key);
        }
        self.free_ended_sockets();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use tidegate_device::mem::{MemConfig, wire};
    use tidegate_engine::NetConfig;
    use tidegate_stack::UdpOptions;

    use super::*;
    use crate::attachment::Attachment;
    use crate::daemon::core::load::FULL_PERMILLE;
    use crate::daemon::{
        AttachConfig, DEFAULT_COALESCING, Daemon, DaemonReport, Quota, StartOptions, UpgradeMode,
    };
    use crate::ipc::layout::Geometry;

    /// Time limit of each wait.
    const LIMIT: Duration = Duration::from_secs(60);

    struct Testbed {
        daemon: Daemon,
        apps: Vec<Attachment>,
        _folder: tempfile::TempDir,
    }

    impl Testbed {
        /// Starts three cores, one of them in use, with this many applications.
        fn new(apps: usize) -> Self {
            let folder = tempfile::tempdir().unwrap();
            let (port, _) = wire(&MemConfig::default()).unwrap();
            let addresses = ["192.0.2.1/24", "192.0.2.3/24"].map(|text| text.parse().unwrap());
            let net = addresses.into_iter().fold(NetConfig::new(port), NetConfig::address);
            let path = folder.path().join("daemon.sock");
            let attach = AttachConfig {
                path: path.clone(),
                mode: 0o600,
                group: None,
                geometry: Geometry { sockets: 8, tcp_bytes: 4096, udp_bytes: 4096 },
                coalescing: DEFAULT_COALESCING,
                quota: Quota::default(),
            };
            let start = StartOptions {
                attach,
                cores: 1..=3,
                on_core_start: |_| Ok(()),
                drop_privileges: || Ok(()),
                upgrade: UpgradeMode::Refused("not used in this test"),
                log: Arc::new(|_: &str| {}),
            };
            let daemon = Daemon::start_with(net, start).unwrap();
            let attach = |_| Attachment::connect(&path, "test").unwrap();
            Self { daemon, apps: (0..apps).map(attach).collect(), _folder: folder }
        }

        fn bind(&mut self, app: usize, port: u16) {
            let local = format!("192.0.2.1:{port}").parse().unwrap();
            self.apps[app].bind_udp(local, UdpOptions::default()).unwrap();
        }

        fn move_load(&self, from: usize, to: usize, busy_permille: u32) {
            self.daemon
                .cores
                .inbox(from)
                .send(CoreMessage::MoveLoad { to, busy_permille })
                .unwrap();
        }

        /// Waits until each core has the expected number of applications.
        fn wait_for_counts(&self, expected: [usize; 3]) {
            let counts =
                |report: DaemonReport| report.cores.iter().map(|core| core.applications).collect();
            let began = Instant::now();
            loop {
                let now: Vec<usize> = counts(self.daemon.report().unwrap());
                if now == expected {
                    return;
                }
                assert!(began.elapsed() < LIMIT, "{now:?} instead of {expected:?}");
                std::thread::yield_now();
            }
        }
    }

    #[test]
    fn moves_some_or_all_applications_to_another_core() {
        let mut testbed = Testbed::new(3);
        (0..3).for_each(|app| testbed.bind(app, 1000 + app as u16));
        testbed.wait_for_counts([3, 0, 0]);
        testbed.move_load(0, 1, 0);
        testbed.wait_for_counts([2, 1, 0]);
        testbed.move_load(0, 2, FULL_PERMILLE);
        testbed.wait_for_counts([0, 1, 2]);
        testbed.move_load(1, 1, FULL_PERMILLE);
        testbed.move_load(2, 3, FULL_PERMILLE);
        testbed.move_load(2, 1, FULL_PERMILLE);
        testbed.wait_for_counts([0, 3, 0]);
        (0..3).for_each(|app| testbed.bind(app, 2000 + app as u16));
    }

    #[test]
    fn reuse_port_sockets_migrate_separately() {
        let mut testbed = Testbed::new(3);
        for app in &mut testbed.apps {
            let options = UdpOptions { reuse_port: true, ..UdpOptions::default() };
            app.bind_udp("192.0.2.1:53".parse().unwrap(), options).unwrap();
        }
        testbed.wait_for_counts([3, 0, 0]);
        testbed.move_load(0, 1, 0);
        testbed.wait_for_counts([2, 1, 0]);
        testbed.move_load(0, 2, 0);
        testbed.wait_for_counts([1, 1, 1]);
        testbed.move_load(1, 2, FULL_PERMILLE);
        testbed.wait_for_counts([1, 0, 2]);
    }

    #[test]
    fn sharers_of_a_port_or_socket_migrate_together() {
        let mut testbed = Testbed::new(3);
        // Two applications have one port, on different addresses.
        for (app, local) in testbed.apps.iter_mut().zip(["192.0.2.1:53", "192.0.2.3:53"]) {
            app.bind_udp(local.parse().unwrap(), UdpOptions::default()).unwrap();
        }
        testbed.bind(2, 54);
        let child = testbed.apps[2].fork_child().unwrap();
        testbed.apps.push(child);
        testbed.wait_for_counts([4, 0, 0]);
        testbed.move_load(0, 1, 0);
        testbed.wait_for_counts([2, 2, 0]);
        testbed.move_load(0, 1, 0);
        testbed.wait_for_counts([0, 4, 0]);
        // The exit of one application leaves its set together.
        testbed.apps.pop();
        testbed.wait_for_counts([0, 3, 0]);
        testbed.move_load(1, 2, FULL_PERMILLE);
        testbed.wait_for_counts([0, 0, 3]);
    }
}
