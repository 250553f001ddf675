//! A daemon goes on in another one's place, under applications that are attached.

mod support;

use std::io::{self, ErrorKind};
use std::iter::Cycle;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::vec::IntoIter;

use support::{FAMILIES, GEOMETRY, LIMIT, address, connected, until};
use tidegate_engine::{NetConfig, PortConfig};
use tidegate_memory::Arena;
use tidegate_port::mem::{self, MemPort};
use tidegate_port::{Burst, Capabilities, Port, PortCounters};
use tidegate_service::attachment::Attachment;
use tidegate_service::daemon::{
    Again, DEFAULT_COALESCING, Daemon, DoorConfig, Quota, Start, StartError, Upgrade,
};
use tidegate_service::{Handle, Part};
use tidegate_stack::{Shutdown, TcpOptions};

/// An end of a wire, which only one can have at a time, as an interface.
#[derive(Clone)]
struct Socket(Arc<(Mutex<Option<MemPort>>, Condvar)>);

impl Socket {
    fn new(port: MemPort) -> Self {
        Self(Arc::new((Mutex::new(Some(port)), Condvar::new())))
    }

    /// Waits until nobody has it, and takes it.
    fn plug(&self) -> Plug {
        let (port, given_back) = &*self.0;
        let port = port.lock().unwrap();
        let (mut port, _) =
            given_back.wait_timeout_while(port, LIMIT, |port| port.is_none()).unwrap();
        Plug { port: Some(port.take().expect("somebody keeps the wire")), socket: self.clone() }
    }
}

struct Plug {
    port: Option<MemPort>,
    socket: Socket,
}

impl Plug {
    fn port(&mut self) -> &mut MemPort {
        self.port.as_mut().unwrap()
    }
}

impl Drop for Plug {
    fn drop(&mut self) {
        let (port, given_back) = &*self.socket.0;
        *port.lock().unwrap() = self.port.take();
        given_back.notify_all();
    }
}

impl Port for Plug {
    fn capabilities(&self) -> &Capabilities {
        self.port.as_ref().unwrap().capabilities()
    }
    fn receive(&mut self, arena: &mut Arena, burst: &mut Burst, quota: usize) -> io::Result<usize> {
        self.port().receive(arena, burst, quota)
    }
    fn transmit(&mut self, arena: &mut Arena, burst: &mut Burst) -> io::Result<usize> {
        self.port().transmit(arena, burst)
    }
    fn prepare_sleep(&mut self) -> io::Result<bool> {
        self.port().prepare_sleep()
    }
    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        self.port.as_ref().unwrap().wake_fd()
    }
    fn counters(&mut self) -> PortCounters {
        self.port().counters()
    }
}

/// Two hosts on a wire; the second one's daemon is replaced.
struct Site {
    socket: Socket,
    first: Daemon,
    second: Option<Daemon>,
    /// How many cores its daemons have, in turn.
    cores: Cycle<IntoIter<usize>>,
    folder: tempfile::TempDir,
}

fn net(port: impl Into<PortConfig>, side: usize) -> NetConfig {
    FAMILIES.iter().zip([24, 64]).fold(NetConfig::new(port), |net, (family, len)| {
        net.address(format!("{}/{len}", family[side]).parse().unwrap())
    })
}

fn custom(socket: &Socket) -> NetConfig {
    let socket = socket.clone();
    net(PortConfig::Custom(Box::new(move |_| Ok(Box::new(socket.plug()) as Box<dyn Port>))), 1)
}

type Settle = fn() -> io::Result<()>;

fn start(
    path: &Path,
    cores: usize,
    again: Again,
    settle: Settle,
) -> Start<impl Fn(usize) -> io::Result<()> + Clone + Send + 'static, Settle> {
    let door = DoorConfig {
        path: path.to_owned(),
        mode: 0o600,
        group: None,
        geometry: GEOMETRY,
        coalescing: DEFAULT_COALESCING,
        quota: Quota::default(),
    };
    let upgrade = Upgrade::Anew(again);
    let log = Arc::new(|_: &str| {});
    Start { door, cores: cores..=cores, begin: |_| Ok(()), settle, upgrade, log }
}

impl Site {
    /// With one core, with several, and with now one and now several.
    fn all() -> impl Iterator<Item = (Self, [&'static str; 2])> {
        let all = [vec![1], vec![3], vec![3, 1, 2]].into_iter();
        all.flat_map(|cores| FAMILIES.map(|family| (Self::new(cores.clone()), family)))
    }

    fn new(cores: Vec<usize>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (a, b) = mem::wire(&mem::MemConfig::default()).unwrap();
        let paths = ["a.sock", "b.sock"].map(|name| folder.path().join(name));
        let again: Again = Box::new(|| Err(ErrorKind::Unsupported.into()));
        let first = Daemon::start_with(net(a, 0), start(&paths[0], 1, again, || Ok(()))).unwrap();
        let socket = Socket::new(b);
        let cores = cores.into_iter().cycle();
        let mut site = Self { socket, first, second: None, cores, folder };
        let start = start(&paths[1], site.cores.next().unwrap(), site.again(), || Ok(()));
        site.second = Some(Daemon::start_with(custom(&site.socket), start).unwrap());
        site
    }

    fn again(&self) -> Again {
        let socket = self.socket.clone();
        Box::new(move || Ok(custom(&socket)))
    }

    fn attach(&self, side: usize) -> Attachment {
        let name = ["a.sock", "b.sock"][side];
        Attachment::connect(&self.folder.path().join(name), "test").unwrap()
    }

    /// Another daemon that is to go on in the second one's place.
    fn next(&mut self, net: NetConfig, settle: Settle) -> Result<Daemon, StartError> {
        let path = self.folder.path().join("b.sock");
        let start = start(&path, self.cores.next().unwrap(), self.again(), settle);
        Daemon::take_over(net, start).map(|(daemon, _)| daemon)
    }

    /// Applications are on any cores, and on their way to others.
    fn scatter(&self) {
        let daemon = self.second.as_ref().unwrap();
        for core in 0..daemon.report().unwrap().cores.len() {
            daemon.controls().move_application(std::process::id(), core).unwrap();
        }
    }

    fn upgrade(&mut self) {
        self.scatter();
        let next = self.next(custom(&self.socket), || Ok(())).unwrap();
        let old = self.second.replace(next).unwrap();
        assert_eq!(old.stop().unwrap(), Some(std::process::id()));
    }
}

fn bytes(len: usize) -> Vec<u8> {
    (0..len).map(|n| (n as u32).wrapping_mul(0x9e37_79b9) as u8).collect()
}

/// Sends from where it was, until everything was taken.
fn send_rest(app: &mut Attachment, socket: Handle, data: &[u8], sent: &mut usize) {
    while *sent < data.len() {
        match app.send(socket, &data[*sent..]) {
            Ok(len) => *sent += len,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return,
            Err(error) => panic!("{error}"),
        }
    }
}

fn receive_some(app: &mut Attachment, socket: Handle, to: &mut Vec<u8>) {
    let mut buf = [0; 4096];
    match app.recv(socket, &mut buf, false) {
        Ok(len) => to.extend_from_slice(&buf[..len]),
        Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
    }
}

#[test]
fn everything_goes_on_under_the_next_daemon() {
    Site::all().for_each(go_on);
}

fn go_on((mut site, family): (Site, [&str; 2])) {
    let mut peer = site.attach(0);
    let mut app = site.attach(1);
    // A UDP socket with datagrams that nobody has read.
    let udp = app.bind_udp(address(1, family, 7), Default::default()).unwrap();
    let from = peer.bind_udp(address(0, family, 0), Default::default()).unwrap();
    let own = peer.local_addr(from).unwrap();
    for n in 0..3 {
        peer.send_datagram(from, &[n; 100], Some(address(1, family, 7)), None).unwrap();
    }
    // A listener with a connection that nobody has accepted.
    let listener = app.listen(address(1, family, 80), 8, TcpOptions::default()).unwrap();
    let to = address(1, family, 80);
    let connect = |peer: &mut Attachment| {
        let socket = peer.connect_tcp(None, to, TcpOptions::default()).unwrap();
        connected(peer, socket).unwrap();
        socket
    };
    let ours = connect(&mut peer);
    let (theirs, _) = until(&mut app, |app| app.accept(listener)).unwrap();
    let waiting = connect(&mut peer);
    // A connection with more under way each way than fits anywhere.
    let data = bytes(400_000);
    let (mut sent, mut got) = ([0; 2], [Vec::new(), Vec::new()]);
    for _ in 0..100 {
        send_rest(&mut peer, ours, &data, &mut sent[0]);
        send_rest(&mut app, theirs, &data, &mut sent[1]);
        peer.poll().unwrap();
        app.poll().unwrap();
    }
    assert!(sent.iter().all(|&sent| sent < data.len()), "all of it went: {sent:?}");
    let began = std::time::Instant::now();
    while got.iter().any(|got| got.len() < data.len()) {
        assert!(began.elapsed() < LIMIT, "{sent:?}");
        // Three times in the middle of it.
        if [0, 100_000, 250_000].iter().any(|at| (*at..at + 4096).contains(&got[1].len())) {
            site.upgrade();
        }
        send_rest(&mut peer, ours, &data, &mut sent[0]);
        send_rest(&mut app, theirs, &data, &mut sent[1]);
        receive_some(&mut peer, ours, &mut got[0]);
        receive_some(&mut app, theirs, &mut got[1]);
        peer.poll().unwrap();
        app.poll().unwrap();
    }
    assert!(got[0] == data && got[1] == data);
    let mut buf = [0; 200];
    for n in 0..3 {
        let came = until(&mut app, |app| app.recv_datagram(udp, &mut buf, false)).unwrap();
        assert_eq!((came.len, came.from, buf[0]), (100, own, n));
    }
    app.send_datagram(udp, b"back", Some(own), None).unwrap();
    let came = until(&mut peer, |peer| peer.recv_datagram(from, &mut buf, false)).unwrap();
    assert_eq!(&buf[..came.len], b"back");
    // The one that waited, and new ones.
    let late = connect(&mut peer);
    for socket in [waiting, late] {
        let (accepted, _) = until(&mut app, |app| app.accept(listener)).unwrap();
        app.send(accepted, b"hello").unwrap();
        app.shutdown(accepted, Shutdown::Write).unwrap();
        site.upgrade();
        let len = until(&mut peer, |peer| peer.recv(socket, &mut buf, false)).unwrap();
        assert_eq!(&buf[..len], b"hello");
        assert_eq!(until(&mut peer, |peer| peer.recv(socket, &mut buf, false)).unwrap(), 0);
    }
    // Names are as good as they were.
    let taken = app.bind_udp(address(1, family, 7), Default::default()).unwrap_err();
    assert_eq!(taken.kind(), ErrorKind::AddrInUse);
    app.close(udp, false);
    app.ping().unwrap();
    app.bind_udp(address(1, family, 7), Default::default()).unwrap();
    drop((peer, app));
    // The last daemon knows when they have gone, and has everything back.
    let began = std::time::Instant::now();
    for daemon in [&site.first, site.second.as_ref().unwrap()] {
        while !daemon.report().unwrap().applications.is_empty() {
            assert!(began.elapsed() < LIMIT);
            std::thread::yield_now();
        }
    }
}

#[test]
fn those_on_a_shared_port_go_on() {
    Site::all().for_each(share_port);
}

/// Applications on one port come together for the next daemon, and part again.
fn share_port((mut site, family): (Site, [&str; 2])) {
    let to = address(1, family, 80);
    let options = TcpOptions { reuse_port: true, ..TcpOptions::default() };
    let listen = |mut app: Attachment| {
        let listener = app.listen(to, 8, options).unwrap();
        (app, listener)
    };
    let mut servers: Vec<_> = (0..3).map(|_| listen(site.attach(1))).collect();
    let mut peer = site.attach(0);
    let mut open: Vec<(Handle, usize, Handle)> = Vec::new();
    let mut buf = [0; 16];
    for round in 0..6_u8 {
        let ours = peer.connect_tcp(None, to, TcpOptions::default()).unwrap();
        connected(&mut peer, ours).unwrap();
        let began = std::time::Instant::now();
        let (at, theirs) = loop {
            let accept = |(at, (app, listener)): (usize, &mut (Attachment, Handle))| {
                Some((at, app.accept(*listener).ok()?.0))
            };
            if let Some(accepted) = servers.iter_mut().enumerate().find_map(accept) {
                break accepted;
            }
            assert!(began.elapsed() < LIMIT, "nobody accepts it");
        };
        open.push((ours, at, theirs));
        for &(ours, at, theirs) in &open {
            peer.send(ours, &[round]).unwrap();
            let app = &mut servers[at].0;
            assert_eq!(until(app, |app| app.recv(theirs, &mut buf, false)).unwrap(), 1);
            assert_eq!(buf[0], round);
        }
        site.upgrade();
        site.scatter();
    }
}

#[test]
fn what_was_closed_still_goes_out() {
    Site::all().for_each(close_and_upgrade);
}

fn close_and_upgrade((mut site, family): (Site, [&str; 2])) {
    let (mut peer, mut app) = (site.attach(0), site.attach(1));
    let to = address(0, family, 80);
    let listener = peer.listen(to, 8, TcpOptions::default()).unwrap();
    let ours = app.connect_tcp(None, to, TcpOptions::default()).unwrap();
    let (theirs, _) = until(&mut peer, |peer| peer.accept(listener)).unwrap();
    connected(&mut app, ours).unwrap();
    let data = bytes(300_000);
    let mut sent = 0;
    for _ in 0..100 {
        send_rest(&mut app, ours, &data, &mut sent);
        app.poll().unwrap();
    }
    app.close(ours, false);
    site.upgrade();
    let mut got = Vec::new();
    let mut buf = [0; 4096];
    loop {
        match until(&mut peer, |peer| peer.recv(theirs, &mut buf, false)).unwrap() {
            0 => break,
            len => got.extend_from_slice(&buf[..len]),
        }
    }
    assert!(got == data[..sent], "{} of {sent}", got.len());
}

#[test]
fn parents_and_heirs_keep_what_they_share() {
    Site::all().for_each(share_with_heirs);
}

fn share_with_heirs((mut site, family): (Site, [&str; 2])) {
    let (mut peer, mut parent) = (site.attach(0), site.attach(1));
    let to = address(1, family, 80);
    let listener = parent.listen(to, 8, TcpOptions::default()).unwrap();
    let ours = peer.connect_tcp(None, to, TcpOptions::default()).unwrap();
    let (theirs, _) = until(&mut parent, |app| app.accept(listener)).unwrap();
    let mut heir = parent.heir().unwrap();
    site.upgrade();
    // The ticket is good under the next daemon too.
    let mut second = heir.heir().unwrap();
    drop(parent);
    site.upgrade();
    let mut buf = [0; 16];
    for app in [&mut heir, &mut second] {
        peer.send(ours, b"who").unwrap();
        let len = until(app, |app| app.recv(theirs, &mut buf, false)).unwrap();
        assert_eq!(&buf[..len], b"who");
        app.send(theirs, b"me").unwrap();
        let len = until(&mut peer, |peer| peer.recv(ours, &mut buf, false)).unwrap();
        assert_eq!(&buf[..len], b"me");
    }
    drop(heir);
    site.upgrade();
    second.close(theirs, false);
    assert_eq!(until(&mut peer, |peer| peer.recv(ours, &mut buf, false)).unwrap(), 0);
}

#[test]
fn what_is_handed_on_arrives_under_the_next_daemon() {
    Site::all().for_each(hand_on);
}

fn hand_on((mut site, family): (Site, [&str; 2])) {
    let (mut peer, mut sender, mut taker) = (site.attach(0), site.attach(1), site.attach(1));
    let to = address(1, family, 80);
    let listener = sender.listen(to, 8, TcpOptions::default()).unwrap();
    let ours = peer.connect_tcp(None, to, TcpOptions::default()).unwrap();
    let (theirs, _) = until(&mut sender, |app| app.accept(listener)).unwrap();
    // The taker's name of it is another one.
    let own = taker.listen(address(1, family, 81), 8, TcpOptions::default()).unwrap();
    let shown = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    sender.offer(theirs, Part::ONLY, shown.as_fd()).unwrap();
    sender.close(theirs, false);
    site.upgrade();
    let taken = taker.take(0, shown.as_fd()).unwrap().socket;
    assert_ne!(taken, own);
    site.upgrade();
    drop(sender);
    peer.send(ours, b"who").unwrap();
    let mut buf = [0; 16];
    let len = until(&mut taker, |app| app.recv(taken, &mut buf, false)).unwrap();
    assert_eq!(&buf[..len], b"who");
    taker.close(taken, false);
    assert_eq!(until(&mut peer, |peer| peer.recv(ours, &mut buf, false)).unwrap(), 0);
}

#[test]
fn whoever_waits_for_an_answer_gets_one() {
    Site::all().for_each(wait_for_answers);
}

fn wait_for_answers((mut site, family): (Site, [&str; 2])) {
    let mut owner = site.attach(1);
    let port = address(1, family, 53);
    owner.bind_udp(port, Default::default()).unwrap();
    let mut others = [site.attach(1), site.attach(1)];
    let is_over = &AtomicBool::new(false);
    std::thread::scope(|scope| {
        for app in &mut others {
            scope.spawn(move || {
                while !is_over.load(Ordering::Relaxed) {
                    // Another core has it, if there are several.
                    let taken = app.bind_udp(port, Default::default()).unwrap_err();
                    assert_eq!(taken.kind(), ErrorKind::AddrInUse);
                }
            });
        }
        let _over = Ends(is_over);
        (0..8).for_each(|_| site.upgrade());
    });
}

/// Ends what waits for it, however the test ends.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn a_daemon_that_fails_changes_nothing() {
    Site::all().for_each(fail);
}

fn fail((mut site, family): (Site, [&str; 2])) {
    let (mut peer, mut app) = (site.attach(0), site.attach(1));
    let to = address(1, family, 80);
    let listener = app.listen(to, 8, TcpOptions::default()).unwrap();
    let ours = peer.connect_tcp(None, to, TcpOptions::default()).unwrap();
    let (theirs, _) = until(&mut app, |app| app.accept(listener)).unwrap();
    connected(&mut peer, ours).unwrap();
    let no_port = PortConfig::Custom(Box::new(|_| Err(io::Error::other("no such port"))));
    let other_address = {
        let socket = site.socket.clone();
        let port =
            PortConfig::Custom(Box::new(move |_| Ok(Box::new(socket.plug()) as Box<dyn Port>)));
        NetConfig::new(port).address("198.51.100.1/24".parse().unwrap())
    };
    let late: Settle = || Err(io::Error::other("too late"));
    let failures: [(NetConfig, Settle, &str); 3] = [
        (net(no_port, 1), || Ok(()), "no such port"),
        (other_address, || Ok(()), "cannot be taken up"),
        (custom(&site.socket), late, "too late"),
    ];
    for (net, settle, expected) in failures {
        site.scatter();
        let said = site.next(net, settle).map(|_| ()).unwrap_err().to_string();
        assert!(said.contains(expected), "{said}");
        let mut buf = [0; 16];
        peer.send(ours, b"still").unwrap();
        let len = until(&mut app, |app| app.recv(theirs, &mut buf, false)).unwrap();
        assert_eq!(&buf[..len], b"still");
        app.send(theirs, b"here").unwrap();
        let len = until(&mut peer, |peer| peer.recv(ours, &mut buf, false)).unwrap();
        assert_eq!(&buf[..len], b"here");
        // Also for those who come.
        let mut late = site.attach(1);
        late.bind_udp(address(1, family, 9), Default::default()).unwrap();
    }
}

#[test]
fn one_that_was_not_started_to_be_replaced_says_so() {
    let site = support::Site::new();
    let (port, _other) = mem::wire(&mem::MemConfig::default()).unwrap();
    let again: Again = Box::new(|| Err(ErrorKind::Unsupported.into()));
    let taken = Daemon::take_over(net(port, 1), start(&site.paths[1], 1, again, || Ok(())));
    let said = taken.map(|_| ()).unwrap_err().to_string();
    assert!(said.contains("not started to be replaced"), "{said}");
    site.attach(1).ping().unwrap();
}
