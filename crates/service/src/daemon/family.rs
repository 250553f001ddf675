//! Applications that go from one core to another.
//!
//! Those that share a socket or a local port go together. Frames for their ports
//! wait meanwhile, so nothing is lost and nothing is overtaken.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;

use tidegate_engine::Claim;
use tidegate_port::spread::LocalPort;
use tidegate_stack::{Moved, MovingSockets, TakenSockets, TcpId};

use super::application::Application;
use super::core::{Core, Message};
use super::names::{AppNumber, NOBODY, SocketId, SocketKey};
use super::passing::Passage;
use super::socket::Socket;

/// The most rounds in which a core takes what came before frames had to wait: more
/// than there is room for on the way from the card.
const LAST_ROUNDS: usize = 1024;

/// Applications on their way, with all that they have.
pub(super) struct Family {
    /// By the numbers that they had.
    apps: Vec<(AppNumber, Box<Application>)>,
    /// By the numbers that they had.
    sockets: Vec<(SocketKey, Box<Socket>)>,
    stack: TakenSockets,
    ports: Vec<LocalPort>,
    /// Closed connections that have not ended yet.
    ending: Vec<(TcpId, Arc<Claim>)>,
    /// Sockets of theirs that are on their way to somebody.
    passages: Vec<(u64, Passage)>,
    /// The core that they came from.
    from: usize,
    /// They were sent back.
    is_back: bool,
}

/// Applications that must be on one core, and what they have.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Kin {
    apps: Vec<AppNumber>,
    sockets: Vec<SocketKey>,
    ports: Vec<LocalPort>,
}

impl Core {
    /// All applications, in groups that can go elsewhere.
    pub(super) fn kins(&self) -> Vec<Kin> {
        let mut groups = Groups::new(self.apps.len());
        let mut ports = HashMap::new();
        for (_, socket) in self.host.sockets.entries() {
            let Some(first) = self.concerned(socket).next() else { continue };
            self.concerned(socket).for_each(|other| groups.join(first, other));
            if let Some(claim) = &socket.claim {
                groups.join(first, *ports.entry(claim.local_port()).or_insert(first));
            }
        }
        let mut kins: HashMap<AppNumber, Kin> = HashMap::new();
        let live = self.apps.iter().enumerate().filter(|(_, app)| app.is_some());
        for (number, _) in live {
            let number = number as AppNumber;
            kins.entry(groups.of(number)).or_default().apps.push(number);
        }
        for (key, socket) in self.host.sockets.entries() {
            // One that is on its way may have nobody but others on its port.
            let port = || ports.get(&socket.claim.as_ref()?.local_port()).copied();
            let first = self.concerned(socket).next().or_else(port);
            let kin = first.and_then(|first| kins.get_mut(&groups.of(first)));
            kin.into_iter().for_each(|kin| kin.sockets.push(key));
        }
        for (port, app) in ports {
            kins.entry(groups.of(app)).and_modify(|kin| kin.ports.push(port));
        }
        kins.into_values().collect()
    }

    /// All that must go with a socket.
    pub(super) fn kin_of(&self, key: SocketKey) -> Kin {
        let kin = self.kins().into_iter().find(|kin| kin.sockets.contains(&key));
        kin.unwrap_or_else(|| {
            // It is on its way, and nobody is on its port but others like it.
            let port =
                |key: SocketKey| Some(self.host.sockets.get(key)?.claim.as_ref()?.local_port());
            let own = port(key);
            let all = self.host.sockets.entries().map(|(other, _)| other);
            let is_same = |&other: &SocketKey| other == key || own.is_some() && port(other) == own;
            let sockets = all.filter(is_same).collect();
            Kin { apps: Vec::new(), sockets, ports: own.into_iter().collect() }
        })
    }

    /// Those who have a socket, and whose memory it is in.
    fn concerned<'a>(&'a self, socket: &'a Socket) -> impl Iterator<Item = AppNumber> + 'a {
        let all = socket.holders.iter().chain([&socket.origin]).map(|owner| owner.app);
        all.filter(|&app| matches!(self.apps.get(app as usize), Some(Some(_))))
    }

    /// Gives applications to another core that have so much of this one to do at
    /// most, but some in any case.
    pub(super) fn shed(&mut self, to: usize, busy: u32) -> io::Result<()> {
        let work = |core: &Self, kin: &Kin| -> u64 {
            let apps = kin.apps.iter().filter_map(|&app| core.apps.get(app as usize)?.as_ref());
            apps.map(|app| app.work).sum::<u64>() + 1
        };
        let mut kins: Vec<(u64, Kin)> =
            self.kins().into_iter().map(|kin| (work(self, &kin), kin)).collect();
        let total: u64 = kins.iter().map(|(work, _)| work).sum();
        let own = self.cores.load(self.number).said().busy.max(1);
        let mut rest = total * u64::from(busy) / u64::from(own);
        kins.sort_unstable_by_key(|(work, _)| std::cmp::Reverse(*work));
        let last = kins.last().map(|(_, kin)| kin.clone());
        let mut gave = false;
        for (work, kin) in kins {
            if work <= rest {
                rest -= work;
                gave = true;
                self.give(kin, to)?;
            }
        }
        match last {
            Some(kin) if !gave => self.give(kin, to),
            _ => Ok(()),
        }
    }

    /// Gives the application of a process to another core, with its kin.
    pub(super) fn give_process(&mut self, pid: u32, to: usize) -> io::Result<()> {
        let is_it = |&app: &AppNumber| {
            let app = self.apps.get(app as usize).and_then(Option::as_ref);
            app.is_some_and(|app| app.identity.pid == pid)
        };
        match self.kins().into_iter().find(|kin| kin.apps.iter().any(is_it)) {
            Some(kin) => self.give(kin, to),
            None => Ok(()),
        }
    }

    /// Gives applications to another core.
    pub(super) fn give(&mut self, kin: Kin, to: usize) -> io::Result<()> {
        let cores = Arc::clone(&self.cores);
        let Some(crossing) = cores.crossing() else { return Ok(()) };
        if to == self.number || to >= cores.count() {
            return Ok(());
        }
        let Kin { apps, sockets, ports } = kin;
        if crossing.park(self.number, &ports).is_err() {
            // Whoever watches the core with the card says what is wrong with it.
            return Ok(());
        }
        for _ in 0..LAST_ROUNDS {
            if self.host.engine.poll()? == 0 {
                break;
            }
        }
        self.take_events();
        self.tell_applications();
        let mut sockets: Vec<_> = sockets
            .into_iter()
            .filter_map(|key| Some((key, self.host.sockets.remove(key)?)))
            .collect();
        let mut moving = MovingSockets::default();
        for (_, socket) in &mut sockets {
            socket.copy_held(&mut self.host.engine);
            match socket.id() {
                SocketId::Udp(id) => moving.udp.push(id),
                SocketId::Listener(id) => moving.listeners.push(id),
                SocketId::Stream(id) => moving.connections.push(id),
            }
            self.host.owners.remove(socket.id());
        }
        let keys: Vec<SocketKey> = sockets.iter().map(|(key, _)| *key).collect();
        let passages = self.host.passages.take_out(&keys);
        let ending = self.host.claims.take_ending(&ports);
        moving.connections.extend(ending.iter().map(|(id, _)| *id));
        let (stack, arena, now_ns) = self.host.engine.parts();
        let stack = stack.take_out(now_ns, arena, &moving);
        self.host.engine.flush()?;
        moving.udp.iter().for_each(|&id| self.host.engine.tell_level(id));
        // One that hangs is found out by whoever watches it.
        let _ = crossing.wait_until_sent(self.number);
        // What happened just now may have ended one of them.
        let mut leave = |number: AppNumber| {
            let app = self.apps.get_mut(number as usize)?.take()?;
            Some((number, app))
        };
        let apps: Vec<_> = apps.into_iter().filter_map(&mut leave).collect();
        for (_, app) in &apps {
            (self.log)(&format!("{} goes to network core {to}", app.identity));
        }
        let from = self.number;
        let is_back = false;
        let family = Family { apps, sockets, stack, ports, ending, passages, from, is_back };
        cores.post(to).send(Message::Adopt(Box::new(family)))
    }

    /// Takes applications from another core.
    pub(super) fn adopt(&mut self, family: Family) -> io::Result<()> {
        let cores = Arc::clone(&self.cores);
        let Some(crossing) = cores.crossing() else { return Ok(()) };
        let Family { apps, sockets, stack, ports, ending, passages, from, is_back } = family;
        // The other core may have read it after this one.
        self.host.engine.read_clock();
        let (own, arena, now_ns) = self.host.engine.parts();
        let (names, refused) = match own.put_in(now_ns, arena, stack) {
            Ok(moved) => (Names::new(moved), false),
            Err(not_moved) if !is_back => {
                (self.log)(&format!("network core {}: {not_moved}", self.number));
                let stack = not_moved.sockets;
                // To the one that sent them they are its own.
                let is_back = true;
                let family =
                    Family { apps, sockets, stack, ports, ending, passages, from, is_back };
                return cores.post(from).send(Message::Adopt(Box::new(family)));
            }
            // They came from here: this cannot be, and has to end well.
            Err(_) => (Names::default(), true),
        };
        let mut numbers = HashMap::new();
        for (old, app) in apps {
            numbers.insert(old, self.seat(app));
        }
        let mut keys = HashMap::new();
        for (old, mut socket) in sockets {
            let id = socket.id();
            socket.set_id(names.of(id).unwrap_or(id));
            socket.origin.app = numbers.get(&socket.origin.app).copied().unwrap_or(NOBODY);
            for holder in &mut socket.holders {
                holder.app = numbers.get(&holder.app).copied().unwrap_or(NOBODY);
            }
            // What happened meanwhile is found out by a look at all of them.
            socket.waits_for_port = true;
            let id = socket.id();
            let key = self.host.sockets.insert_boxed(socket);
            self.host.owners.insert(id, key);
            self.again.push(key);
            keys.insert(old, key);
        }
        for &number in numbers.values() {
            if let Some(Some(app)) = self.apps.get_mut(number as usize) {
                app.rename(&keys);
            }
        }
        self.host.passages.put_in(passages, &keys);
        for (id, claim) in ending {
            self.host.claims.release_later(names.connection(id).unwrap_or(id), Some(claim));
        }
        crossing.set_used(self.number);
        crossing.hand(self.number, &ports);
        // Until now they counted there.
        cores.load(self.number).add_applications(numbers.len());
        cores.load(from).remove_applications(numbers.len());
        if refused {
            numbers.into_values().for_each(|number| self.let_go(number));
        }
        self.host.engine.flush()
    }
}

/// Who goes with whom.
struct Groups(Vec<AppNumber>);

impl Groups {
    fn new(apps: usize) -> Self {
        Self((0..apps as AppNumber).collect())
    }

    /// The number of the group of an application.
    fn of(&self, app: AppNumber) -> AppNumber {
        let mut at = app;
        while self.0[at as usize] != at {
            at = self.0[at as usize];
        }
        at
    }

    fn join(&mut self, one: AppNumber, other: AppNumber) {
        let (one, other) = (self.of(one), self.of(other));
        self.0[one.max(other) as usize] = one.min(other);
    }
}

/// What the stack's sockets are called in the other stack.
#[derive(Default)]
struct Names(HashMap<SocketId, SocketId>);

impl Names {
    fn new(moved: Moved) -> Self {
        let udp = moved.udp.into_iter().map(|(a, b)| (SocketId::Udp(a), SocketId::Udp(b)));
        let listeners = moved.listeners.into_iter();
        let listeners = listeners.map(|(a, b)| (SocketId::Listener(a), SocketId::Listener(b)));
        let streams = moved.connections.into_iter();
        let streams = streams.map(|(a, b)| (SocketId::Stream(a), SocketId::Stream(b)));
        Self(udp.chain(listeners).chain(streams).collect())
    }

    fn of(&self, id: SocketId) -> Option<SocketId> {
        self.0.get(&id).copied()
    }

    fn connection(&self, id: TcpId) -> Option<TcpId> {
        match self.of(SocketId::Stream(id))? {
            SocketId::Stream(id) => Some(id),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use tidegate_engine::NetConfig;
    use tidegate_port::mem::{MemConfig, wire};
    use tidegate_stack::UdpOptions;

    use super::*;
    use crate::attachment::Attachment;
    use crate::contract::layout::Geometry;
    use crate::daemon::load::WHOLE;
    use crate::daemon::{DEFAULT_COALESCING, Daemon, DoorConfig, Quota, Report, Start, Upgrade};

    /// How long anything may take.
    const LIMIT: Duration = Duration::from_secs(60);

    struct Site {
        daemon: Daemon,
        apps: Vec<Attachment>,
        _folder: tempfile::TempDir,
    }

    impl Site {
        /// One core of three in use, with so many applications.
        fn new(apps: usize) -> Self {
            let folder = tempfile::tempdir().unwrap();
            let (port, _) = wire(&MemConfig::default()).unwrap();
            let addresses = ["192.0.2.1/24", "192.0.2.3/24"].map(|text| text.parse().unwrap());
            let net = addresses.into_iter().fold(NetConfig::new(port), NetConfig::address);
            let path = folder.path().join("daemon.sock");
            let door = DoorConfig {
                path: path.clone(),
                mode: 0o600,
                group: None,
                geometry: Geometry { sockets: 8, tcp_bytes: 4096, udp_bytes: 4096 },
                coalescing: DEFAULT_COALESCING,
                quota: Quota::default(),
            };
            let start = Start {
                door,
                cores: 1..=3,
                begin: |_| Ok(()),
                settle: || Ok(()),
                upgrade: Upgrade::Refused("it is not asked"),
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

        fn shed(&self, from: usize, to: usize, busy: u32) {
            self.daemon.cores.post(from).send(Message::Shed { to, busy }).unwrap();
        }

        /// Waits until each core has so many applications.
        fn wait(&self, expected: [usize; 3]) {
            let counts =
                |report: Report| report.cores.iter().map(|core| core.applications).collect();
            let began = Instant::now();
            loop {
                let now: Vec<usize> = counts(self.daemon.report().unwrap());
                if now == expected {
                    return;
                }
                assert!(began.elapsed() < LIMIT, "{now:?} and not {expected:?}");
                std::thread::yield_now();
            }
        }
    }

    #[test]
    fn a_core_gives_some_or_all_away() {
        let mut site = Site::new(3);
        (0..3).for_each(|app| site.bind(app, 1000 + app as u16));
        site.wait([3, 0, 0]);
        site.shed(0, 1, 0);
        site.wait([2, 1, 0]);
        site.shed(0, 2, WHOLE);
        site.wait([0, 1, 2]);
        site.shed(1, 1, WHOLE);
        site.shed(2, 3, WHOLE);
        site.shed(2, 1, WHOLE);
        site.wait([0, 3, 0]);
        (0..3).for_each(|app| site.bind(app, 2000 + app as u16));
    }

    #[test]
    fn who_shares_a_port_or_a_socket_goes_together() {
        let mut site = Site::new(3);
        // Two have one port, on different addresses.
        for (app, local) in site.apps.iter_mut().zip(["192.0.2.1:53", "192.0.2.3:53"]) {
            app.bind_udp(local.parse().unwrap(), UdpOptions::default()).unwrap();
        }
        site.bind(2, 54);
        let heir = site.apps[2].heir().unwrap();
        site.apps.push(heir);
        site.wait([4, 0, 0]);
        site.shed(0, 1, 0);
        site.wait([2, 2, 0]);
        site.shed(0, 1, 0);
        site.wait([0, 4, 0]);
        // One that ends takes nobody with it.
        site.apps.pop();
        site.wait([0, 3, 0]);
        site.shed(1, 2, WHOLE);
        site.wait([0, 0, 3]);
    }

    #[test]
    fn groups_are_joined_whoever_comes_first() {
        let mut groups = Groups::new(5);
        groups.join(4, 3);
        groups.join(1, 2);
        groups.join(2, 4);
        let names: Vec<_> = (0..5).map(|app| groups.of(app)).collect();
        assert_eq!(names, [0, 1, 1, 1, 1]);
    }
}
