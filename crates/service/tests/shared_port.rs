//! Applications on one port that they share, on several network cores.

mod support;

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::time::Instant;

use support::{CORES, FAMILIES, LIMIT, Site, address, connected, places, until};
use tidegate_service::attachment::Attachment;
use tidegate_service::{Handle, Together};
use tidegate_stack::{TcpOptions, UdpOptions};

const SHARED_TCP: fn() -> TcpOptions = || TcpOptions { reuse_port: true, ..TcpOptions::default() };

/// A server with both kinds of sockets on one port, which says what it hears.
struct Server {
    app: Attachment,
    listener: Handle,
    datagrams: Handle,
    /// Those accepted, with what is still to be said.
    streams: Vec<(Handle, Vec<u8>)>,
    accepted: usize,
    answered: usize,
}

impl Server {
    /// On a port that it has together with others, or shares with them.
    fn new(mut app: Attachment, local: SocketAddr, together: Option<Together>) -> Self {
        let reuse_port = together.is_none();
        let tcp = TcpOptions { reuse_port, ..TcpOptions::default() };
        let listener = app.listen_with(local, 16, together, tcp).unwrap();
        let udp = UdpOptions { reuse_port, ..UdpOptions::default() };
        let datagrams = app.bind_udp_with(local, together, udp).unwrap();
        Self { app, listener, datagrams, streams: Vec::new(), accepted: 0, answered: 0 }
    }

    fn serve(&mut self) {
        let mut buf = [0; 4096];
        match self.app.accept(self.listener) {
            Ok((stream, _)) => {
                self.accepted += 1;
                self.streams.push((stream, Vec::new()));
            }
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
        }
        let mut ended = Vec::new();
        for (stream, rest) in &mut self.streams {
            match self.app.recv(*stream, &mut buf, false) {
                Ok(0) => ended.push(*stream),
                Ok(len) => rest.extend_from_slice(&buf[..len]),
                Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
            }
            match self.app.send(*stream, rest) {
                Ok(len) => drop(rest.drain(..len)),
                Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
            }
        }
        self.streams.retain(|(stream, _)| !ended.contains(stream));
        ended.into_iter().for_each(|stream| self.app.close(stream, false));
        match self.app.recv_datagram(self.datagrams, &mut buf, false) {
            Ok(got) => {
                let to = Some(got.from);
                self.app.send_datagram(self.datagrams, &buf[..got.len], to, None).unwrap();
                self.answered += 1;
            }
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
        }
        self.app.poll().unwrap();
    }
}

/// A client with connections, each of which says something else.
struct Client {
    app: Attachment,
    streams: Vec<Talk>,
    /// How many bytes came back in all.
    heard: usize,
}

struct Talk {
    stream: Handle,
    said: Vec<u8>,
    sent: usize,
    heard: usize,
}

impl Client {
    fn new(app: Attachment) -> Self {
        Self { app, streams: Vec::new(), heard: 0 }
    }

    /// One more connection, on which so many bytes go both ways.
    fn say(&mut self, to: SocketAddr, len: usize) {
        let stream = self.app.connect_tcp(None, to, TcpOptions::default()).unwrap();
        let seed = self.heard as u32 + self.streams.len() as u32;
        let byte = |n: u32| ((n + seed).wrapping_mul(0x9e37_79b9) >> 24) as u8;
        let said = (0..len as u32).map(byte).collect();
        self.streams.push(Talk { stream, said, sent: 0, heard: 0 });
    }

    /// Goes on with all of them, and closes those that have heard everything.
    fn go_on(&mut self) {
        let mut buf = [0; 4096];
        let app = &mut self.app;
        self.streams.retain_mut(|talk| {
            match app.send(talk.stream, &talk.said[talk.sent..]) {
                Ok(len) => talk.sent += len,
                Err(error) => assert!(
                    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::NotConnected),
                    "{error}"
                ),
            }
            match app.recv(talk.stream, &mut buf, false) {
                Ok(len) => {
                    assert!(len > 0, "it ends too early");
                    assert_eq!(buf[..len], talk.said[talk.heard..talk.heard + len]);
                    talk.heard += len;
                    self.heard += len;
                }
                Err(error) => assert!(
                    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::NotConnected),
                    "{error}"
                ),
            }
            let goes_on = talk.heard < talk.said.len();
            if !goes_on {
                app.close(talk.stream, false);
            }
            goes_on
        });
        app.poll().unwrap();
    }
}

/// The cores that applications of a name are on.
fn cores_of(site: &Site, name: &str) -> Vec<usize> {
    let report = site.report(1);
    let apps = report.applications.iter().filter(|app| app.identity.name == name);
    apps.map(|app| app.core).collect()
}

fn wait_for(site: &Site, what: impl Fn(&Site) -> bool) {
    let began = Instant::now();
    while !what(site) {
        assert!(began.elapsed() < LIMIT, "{:?}", site.report(1));
        std::thread::yield_now();
    }
}

fn servers(site: &Site, local: SocketAddr) -> Vec<Server> {
    servers_with(site, local, None)
}

fn servers_with(site: &Site, local: SocketAddr, together: Option<Together>) -> Vec<Server> {
    let attach = |_| Attachment::connect(&site.paths[1], "server").unwrap();
    let apps: Vec<_> = (0..CORES).map(attach).collect();
    wait_for(site, |site| cores_of(site, "server").len() == CORES);
    apps.into_iter().map(|app| Server::new(app, local, together)).collect()
}

/// Goes on until so many of the client's streams are left, in what is left of the time.
fn finish(client: &mut Client, servers: &mut [Server], left: usize, began: Instant) {
    while client.streams.len() > left {
        assert!(began.elapsed() < LIMIT, "{} are left", client.streams.len());
        servers.iter_mut().for_each(Server::serve);
        client.go_on();
    }
}

/// Asks by a datagram of its own, and waits for the answer.
fn ask(client: &mut Client, servers: &mut [Server], to: SocketAddr, n: u32) {
    let any = SocketAddr::new(client_ip(to), 0);
    let socket = client.app.bind_udp(any, UdpOptions::default()).unwrap();
    client.app.send_datagram(socket, &n.to_be_bytes(), Some(to), None).unwrap();
    let mut buf = [0; 16];
    let began = Instant::now();
    loop {
        assert!(began.elapsed() < LIMIT, "datagram {n} is not answered");
        servers.iter_mut().for_each(Server::serve);
        client.go_on();
        match client.app.recv_datagram(socket, &mut buf, false) {
            Ok(got) => {
                assert_eq!((&buf[..got.len], got.from), (&n.to_be_bytes()[..], to));
                break;
            }
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
        }
    }
    client.app.close(socket, false);
}

/// The first host's address of the same family.
fn client_ip(server: SocketAddr) -> std::net::IpAddr {
    let family = FAMILIES.iter().find(|family| address(1, **family, 0).ip() == server.ip());
    address(0, *family.unwrap(), 0).ip()
}

#[test]
fn every_core_serves_its_part_of_a_shared_port() {
    let site = Site::still(CORES..=CORES);
    let all = FAMILIES
        .into_iter()
        .flat_map(|family| [(family, None), (family, Some(Together::new().unwrap()))]);
    for (family, together) in all {
        let to = address(1, family, 80);
        let mut servers = servers_with(&site, to, together);
        let cores: BTreeSet<_> = cores_of(&site, "server").into_iter().collect();
        assert_eq!(cores.len(), CORES, "each has a core of its own");
        let mut other = site.attach(1);
        let taken = other.listen(to, 1, TcpOptions::default()).unwrap_err();
        assert_eq!(taken.kind(), ErrorKind::AddrInUse, "it does not share");
        let taken = other.bind_udp(to, UdpOptions::default()).unwrap_err();
        assert_eq!(taken.kind(), ErrorKind::AddrInUse, "it does not share");
        if together.is_some() {
            let strangers = [None, Some(Together::new().unwrap())];
            for stranger in strangers {
                let taken = other.listen_with(to, 1, stranger, SHARED_TCP()).unwrap_err();
                assert_eq!(taken.kind(), ErrorKind::AddrInUse, "it is none of them");
            }
        }

        let mut client = Client::new(site.attach(0));
        let began = Instant::now();
        for n in 0..60 {
            client.say(to, 3000);
            ask(&mut client, &mut servers, to, n);
            finish(&mut client, &mut servers, 8, began);
        }
        finish(&mut client, &mut servers, 0, began);
        assert_eq!(client.heard, 60 * 3000);
        for server in &servers {
            assert!(server.accepted > 0 && server.answered > 0, "each has its part");
        }
        // Those that stay serve all.
        servers.pop();
        wait_for(&site, |site| cores_of(site, "server").len() == CORES - 1);
        for n in 0..20 {
            client.say(to, 10);
            ask(&mut client, &mut servers, to, n);
        }
        finish(&mut client, &mut servers, 0, began);
        drop((servers, other, client));
        wait_for(&site, |site| site.report(1).applications.is_empty());
    }
}

/// Members go from core to core all the time, each by itself: nothing is lost, and
/// nobody is refused.
#[test]
fn those_on_a_shared_port_move_while_they_serve() {
    for (site, family) in places() {
        let to = address(1, family, 80);
        let mut servers = servers(&site, to);
        let mut client = Client::new(site.attach(0));
        let began = Instant::now();
        let mut seen = BTreeSet::new();
        for n in 0..100 {
            client.say(to, if n % 10 == 0 { 300_000 } else { 2000 });
            ask(&mut client, &mut servers, to, n);
            seen.insert(cores_of(&site, "server").into_iter().collect::<BTreeSet<_>>());
            finish(&mut client, &mut servers, 8, began);
        }
        finish(&mut client, &mut servers, 0, began);
        assert_eq!(client.heard, 10 * 300_000 + 90 * 2000);
        if site.mover.is_some() {
            assert!(seen.iter().any(|cores| cores.len() > 1), "they were never apart: {seen:?}");
        }
    }
}

/// Connections end all the time while others of the same programs go on, and move:
/// each name means the same connection on every core.
#[test]
fn connections_end_while_others_move() {
    for (site, family) in places() {
        let to = address(1, family, 80);
        let mut servers = servers(&site, to);
        let mut client = Client::new(site.attach(0));
        let began = Instant::now();
        for n in 0..600 {
            client.say(to, if n % 4 == 0 { 10_000 } else { 10 });
            finish(&mut client, &mut servers, 6, began);
        }
        finish(&mut client, &mut servers, 0, began);
    }
}

/// What a connected socket hears is its peer's, on whatever core it is, and no other
/// core has one like it.
#[test]
fn a_connected_socket_on_a_shared_port_keeps_its_peer() {
    for (site, family) in places() {
        let to = address(1, family, 53);
        let mut servers = servers(&site, to);
        let mut client = site.attach(0);
        let socket = client.bind_udp(address(0, family, 0), UdpOptions::default()).unwrap();
        let peer = client.local_addr(socket).unwrap();
        for at in 0..CORES {
            let server = &mut servers[at];
            server.app.connect_udp(server.datagrams, Some(peer)).unwrap();
            let other = &mut servers[(at + 1) % CORES];
            let taken = other.app.connect_udp(other.datagrams, Some(peer)).unwrap_err();
            assert_eq!(taken.kind(), ErrorKind::AddrInUse);
            for n in 0..50_u8 {
                client.send_datagram(socket, &[n], Some(to), None).unwrap();
                let mut buf = [0; 8];
                let server = &mut servers[at];
                let got = until(&mut server.app, |app| {
                    app.recv_datagram(server.datagrams, &mut buf, false)
                });
                assert_eq!((got.unwrap().len, buf[0]), (1, n));
            }
            let server = &mut servers[at];
            server.app.connect_udp(server.datagrams, None).unwrap();
        }
    }
}

/// One that has ended is no member of the port any more, for whoever comes next.
#[test]
fn who_has_ended_gets_no_more_connections() {
    for (site, family) in places() {
        let to = address(1, family, 80);
        let mut client = site.attach(0);
        let mut before: Option<Attachment> = None;
        for _ in 0..10 {
            let mut app = site.attach(1);
            drop(before.take());
            let listener = app.listen(to, 4, SHARED_TCP()).unwrap();
            for _ in 0..4 {
                let ours = client.connect_tcp(None, to, TcpOptions::default()).unwrap();
                connected(&mut client, ours).unwrap();
                let (theirs, _) = until(&mut app, |app| app.accept(listener)).unwrap();
                client.close(ours, false);
                app.close(theirs, false);
            }
            before = Some(app);
        }
    }
}
