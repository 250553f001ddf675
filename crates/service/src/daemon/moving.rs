//! How applications and sockets go from core to core.
//!
//! Frames for their ports wait meanwhile, so nothing is lost and nothing is
//! overtaken.

use std::collections::{HashMap, HashSet};
use std::io::{self, ErrorKind};
use std::sync::Arc;

use tidegate_stack::MovingSockets;

use super::core::Core;
use super::family::{Family, Groups, Kin, Names, Tie, Ties};
use super::names::{AppNumber, NOBODY, SocketId, SocketKey};
use super::passing::{Request, Search, answer, with_ticket};
use super::post::Message;
use super::socket::Socket;
use crate::contract::greeting::Passing;

/// The most rounds in which a core takes what came before frames had to wait: more
/// than there is room for on the way from the card.
const LAST_ROUNDS: usize = 1024;

/// A socket may be on the way from one core to the next: so many times around they
/// are asked for it.
const SOCKET_LAPS: usize = 8;

impl Core {
    /// All applications, in groups that can go elsewhere.
    pub(super) fn kins(&self) -> Vec<Kin> {
        let mut groups = Groups::new(self.apps.len());
        let (mut ties, mut ports) = (self.ties(), HashMap::new());
        for (_, socket) in self.host.sockets.entries() {
            let Some(first) = self.concerned(socket).next() else { continue };
            self.concerned(socket).for_each(|other| groups.join(first, other));
            if let Some(tie) = ties.of(socket) {
                groups.join(first, *ports.entry(tie).or_insert(first));
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
            let port = ties.of(socket).and_then(|tie| ports.get(&tie).copied());
            let first = self.concerned(socket).next().or(port);
            let kin = first.and_then(|first| kins.get_mut(&groups.of(first)));
            kin.into_iter().for_each(|kin| kin.sockets.push(key));
        }
        let mut seen = HashSet::new();
        for (tie, app) in ports {
            let (group, port) = (groups.of(app), tie.port());
            if seen.insert((group, port)) {
                kins.entry(group).and_modify(|kin| kin.ports.push(port));
            }
        }
        kins.into_values().collect()
    }

    /// All that must go with a socket.
    pub(super) fn kin_of(&self, key: SocketKey) -> Kin {
        let kin = self.kins().into_iter().find(|kin| kin.sockets.contains(&key));
        kin.unwrap_or_else(|| {
            // It is on its way, and nobody is on its port but others like it.
            let mut ties = self.ties();
            let own = self.host.sockets.get(key).and_then(|socket| ties.of(socket));
            let mut is_same = |&(other, socket): &(SocketKey, &Socket)| {
                other == key || own.is_some() && ties.of(socket) == own
            };
            let all = self.host.sockets.entries().filter(|it| is_same(it));
            let sockets = all.map(|(other, _)| other).collect();
            Kin { apps: Vec::new(), sockets, ports: own.map(Tie::port).into_iter().collect() }
        })
    }

    fn ties(&self) -> Ties<'_> {
        Ties::new(self.cores.crossing())
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

    /// Gives an application of a process to another core, with its kin.
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
        let to = cores.way_to(to);
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
        // The name of one that has ended may be that of another one there.
        self.host.release_closed();
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
        let all = self.host.sockets.entries().filter_map(|(_, socket)| socket.claim.as_ref());
        let staying: HashSet<_> = all.map(Arc::as_ptr).collect();
        let ending = self.host.claims.take_ending(|claim| {
            ports.contains(&claim.local_port()) && !staying.contains(&Arc::as_ptr(claim))
        });
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
        let claims = sockets.iter().filter_map(|(_, socket)| socket.claim.as_ref());
        let claims = claims.chain(ending.iter().map(|(_, claim)| claim));
        let claims: HashSet<_> = claims.map(|it| (Arc::as_ptr(it), it.local_port())).collect();
        let mut ports: HashMap<_, _> = ports.into_iter().map(|port| (port, 0)).collect();
        for (_, port) in claims {
            ports.entry(port).and_modify(|count| *count += 1);
        }
        let ports = ports.into_iter().collect();
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
        for (old, mut app) in apps {
            app.ask_again();
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
        crossing.set_used(self.number);
        crossing.hand(from, self.number, ports);
        for (id, claim) in ending {
            match names.connection(id) {
                Some(id) => self.host.claims.release_later(id, Some(claim)),
                None => self.host.release(Some(claim)),
            }
        }
        // Until now they counted there.
        cores.load(self.number).add_applications(numbers.len());
        cores.load(from).remove_applications(numbers.len());
        if refused {
            numbers.into_values().for_each(|number| self.let_go(number));
        }
        if cores.gathers() && !is_back {
            self.give_all(0)?;
        }
        self.host.engine.flush()
    }

    /// Gives everything to another core. Returns how many applications and sockets
    /// are still here: the other one may have no room for them, and give them back.
    pub(super) fn give_all(&mut self, to: usize) -> io::Result<usize> {
        let live = self.apps.iter().enumerate().filter(|(_, app)| app.is_some());
        let apps: Vec<_> = live.map(|(number, _)| number as AppNumber).collect();
        let sockets = self.host.sockets.keys();
        let claims = self.host.sockets.entries().filter_map(|(_, socket)| socket.claim.as_ref());
        let ports = claims.map(|claim| claim.local_port()).chain(self.host.claims.ending_ports());
        let ports: HashSet<_> = ports.collect();
        let ports: Vec<_> = ports.into_iter().collect();
        if !(apps.is_empty() && ports.is_empty()) {
            self.give(Kin { apps, sockets, ports }, to)?;
        }
        Ok(self.apps.iter().flatten().count() + self.host.sockets.keys().len())
    }
}

impl Core {
    /// Does what an application wants that has shown a descriptor, or lets the core
    /// do so that has the application. A socket that it takes comes to its core.
    pub(super) fn pass(&mut self, request: Request) -> io::Result<()> {
        let (count, own, hops) = (self.cores.count(), self.number, request.hops);
        let is_here = with_ticket(&mut self.apps, request.ticket).is_some();
        let is_take = matches!(request.passing, Passing::Take(_));
        let key = self.host.passages.key(request.shown());
        let next = (own + 1) % count;
        let (to, search, hops) = match request.search {
            _ if count == 1 || hops >= self.cores.most_hops() => return self.pass_here(request),
            Search::Application if !is_here => (next, Search::Application, hops + 1),
            Search::Application if is_take && key.is_none() => {
                (next, Search::Socket { to: own, asked: 1 }, hops + 1)
            }
            Search::Application => return self.pass_here(request),
            Search::Socket { to, asked } => match key {
                Some(key) if to != own => {
                    let kin = self.kin_of(key);
                    self.give(kin, to)?;
                    (to, Search::Application, hops + 1)
                }
                Some(_) => (to, Search::Application, hops + 1),
                None if asked < SOCKET_LAPS * count => {
                    (next, Search::Socket { to, asked: asked + 1 }, hops + 1)
                }
                None => {
                    answer(&request.connection, Err(ErrorKind::NotConnected.into()));
                    return Ok(());
                }
            },
        };
        let request = Request { search, hops, ..request };
        self.cores.post(to).send(Message::Pass(Box::new(request)))
    }

    fn pass_here(&mut self, request: Request) -> io::Result<()> {
        if let Some(key) = self.host.pass(&mut self.apps, request) {
            self.look(key);
        }
        self.forget_gone();
        Ok(())
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
    fn who_shares_a_port_by_agreement_goes_alone() {
        let mut site = Site::new(3);
        for app in &mut site.apps {
            let options = UdpOptions { reuse_port: true, ..UdpOptions::default() };
            app.bind_udp("192.0.2.1:53".parse().unwrap(), options).unwrap();
        }
        site.wait([3, 0, 0]);
        site.shed(0, 1, 0);
        site.wait([2, 1, 0]);
        site.shed(0, 2, 0);
        site.wait([1, 1, 1]);
        site.shed(1, 2, WHOLE);
        site.wait([1, 0, 2]);
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
}
