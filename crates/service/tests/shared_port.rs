//! Applications on several network cores that share one port.

mod support;

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::time::Instant;

use support::{
    CORES, DaemonPair, FAMILIES, TIMEOUT, address, testbeds, wait_until, wait_until_connected,
};
use tidegate_service::attachment::Attachment;
use tidegate_service::{Handle, ShareGroupId};
use tidegate_stack::{TcpOptions, UdpOptions};

const SHARED_TCP: fn() -> TcpOptions = || TcpOptions::default().reuse_port(true);

/// Echo server with a listener and a UDP socket on one port.
struct Server {
    app: Attachment,
    listener: Handle,
    datagrams: Handle,
    /// Accepted connections, with the data that is still to be echoed.
    streams: Vec<(Handle, Vec<u8>)>,
    accepted: usize,
    answered: usize,
}

impl Server {
    /// Opens both sockets as members of a share group, or with `SO_REUSEPORT`.
    fn new(mut app: Attachment, local: SocketAddr, share_group: Option<ShareGroupId>) -> Self {
        let reuse_port = share_group.is_none();
        let tcp = TcpOptions::default().reuse_port(reuse_port);
        let listener = app.listen_in_group(local, 16, share_group, tcp).unwrap();
        let udp = UdpOptions::default().reuse_port(reuse_port);
        let datagrams = app.bind_udp_in_group(local, share_group, udp).unwrap();
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

/// Client with connections, each of which sends different data.
struct Client {
    app: Attachment,
    streams: Vec<Exchange>,
    /// Bytes echoed on all connections.
    received: usize,
}

struct Exchange {
    stream: Handle,
    data: Vec<u8>,
    sent: usize,
    received: usize,
}

impl Client {
    fn new(app: Attachment) -> Self {
        Self { app, streams: Vec::new(), received: 0 }
    }

    /// Opens one more connection that echoes `len` bytes.
    fn open(&mut self, to: SocketAddr, len: usize) {
        let stream = self.app.connect_tcp(None, to, TcpOptions::default()).unwrap();
        let seed = self.received as u32 + self.streams.len() as u32;
        let byte = |n: u32| ((n + seed).wrapping_mul(0x9e37_79b9) >> 24) as u8;
        let data = (0..len as u32).map(byte).collect();
        self.streams.push(Exchange { stream, data, sent: 0, received: 0 });
    }

    /// Makes progress on all connections, and closes the completed ones.
    fn progress(&mut self) {
        let mut buf = [0; 4096];
        let app = &mut self.app;
        self.streams.retain_mut(|exchange| {
            match app.send(exchange.stream, &exchange.data[exchange.sent..]) {
                Ok(len) => exchange.sent += len,
                Err(error) => assert!(
                    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::NotConnected),
                    "{error}"
                ),
            }
            match app.recv(exchange.stream, &mut buf, false) {
                Ok(len) => {
                    assert!(len > 0, "the stream ended too early");
                    assert_eq!(
                        buf[..len],
                        exchange.data[exchange.received..exchange.received + len]
                    );
                    exchange.received += len;
                    self.received += len;
                }
                Err(error) => assert!(
                    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::NotConnected),
                    "{error}"
                ),
            }
            let goes_on = exchange.received < exchange.data.len();
            if !goes_on {
                app.close(exchange.stream, false);
            }
            goes_on
        });
        app.poll().unwrap();
    }
}

/// Cores of the applications with this name.
fn cores_with(testbed: &DaemonPair, name: &str) -> Vec<usize> {
    let report = testbed.report(1);
    let apps = report.applications.iter().filter(|app| app.identity.name == name);
    apps.map(|app| app.core).collect()
}

fn wait_for(testbed: &DaemonPair, condition: impl Fn(&DaemonPair) -> bool) {
    let began = Instant::now();
    while !condition(testbed) {
        assert!(began.elapsed() < TIMEOUT, "{:?}", testbed.report(1));
        std::thread::yield_now();
    }
}

fn servers(testbed: &DaemonPair, local: SocketAddr) -> Vec<Server> {
    servers_with(testbed, local, None)
}

fn servers_with(
    testbed: &DaemonPair,
    local: SocketAddr,
    share_group: Option<ShareGroupId>,
) -> Vec<Server> {
    let attach = |_| Attachment::connect(&testbed.paths[1], "server").unwrap();
    let apps: Vec<_> = (0..CORES).map(attach).collect();
    wait_for(testbed, |site| cores_with(site, "server").len() == CORES);
    apps.into_iter().map(|app| Server::new(app, local, share_group)).collect()
}

/// Makes progress until `max_open` connections are left; fails after the time limit.
fn run_until_at_most(client: &mut Client, servers: &mut [Server], max_open: usize, began: Instant) {
    while client.streams.len() > max_open {
        assert!(began.elapsed() < TIMEOUT, "{} connections are left", client.streams.len());
        servers.iter_mut().for_each(Server::serve);
        client.progress();
    }
}

/// Sends a datagram from a socket of its own, and waits for the reply.
fn exchange_datagram(client: &mut Client, servers: &mut [Server], to: SocketAddr, n: u32) {
    let any = SocketAddr::new(client_ip(to), 0);
    let socket = client.app.bind_udp(any, UdpOptions::default()).unwrap();
    client.app.send_datagram(socket, &n.to_be_bytes(), Some(to), None).unwrap();
    let mut buf = [0; 16];
    let began = Instant::now();
    loop {
        assert!(began.elapsed() < TIMEOUT, "no reply to datagram {n}");
        servers.iter_mut().for_each(Server::serve);
        client.progress();
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

/// Address of the first host in the same family.
fn client_ip(server: SocketAddr) -> std::net::IpAddr {
    let family = FAMILIES.iter().find(|family| address(1, **family, 0).ip() == server.ip());
    address(0, *family.unwrap(), 0).ip()
}

#[test]
fn every_core_serves_a_share_of_the_port() {
    let testbed = DaemonPair::with_cores(CORES..=CORES);
    let all = FAMILIES
        .into_iter()
        .flat_map(|family| [(family, None), (family, Some(ShareGroupId::new().unwrap()))]);
    for (family, share_group) in all {
        let to = address(1, family, 80);
        let mut servers = servers_with(&testbed, to, share_group);
        let cores: BTreeSet<_> = cores_with(&testbed, "server").into_iter().collect();
        assert_eq!(cores.len(), CORES, "each has a core of its own");
        let mut other = testbed.attach(1);
        let taken = other.listen(to, 1, TcpOptions::default()).unwrap_err();
        assert_eq!(taken.kind(), ErrorKind::AddrInUse, "the port is shared by others");
        let taken = other.bind_udp(to, UdpOptions::default()).unwrap_err();
        assert_eq!(taken.kind(), ErrorKind::AddrInUse, "the port is shared by others");
        if share_group.is_some() {
            let other_groups = [None, Some(ShareGroupId::new().unwrap())];
            for other_group in other_groups {
                let taken = other.listen_in_group(to, 1, other_group, SHARED_TCP()).unwrap_err();
                assert_eq!(taken.kind(), ErrorKind::AddrInUse, "not a member of the share group");
            }
        }

        let mut client = Client::new(testbed.attach(0));
        let began = Instant::now();
        for n in 0..60 {
            client.open(to, 3000);
            exchange_datagram(&mut client, &mut servers, to, n);
            run_until_at_most(&mut client, &mut servers, 8, began);
        }
        run_until_at_most(&mut client, &mut servers, 0, began);
        assert_eq!(client.received, 60 * 3000);
        for server in &servers {
            assert!(server.accepted > 0 && server.answered > 0, "each server has a share");
        }
        // The remaining servers serve all traffic.
        servers.pop();
        wait_for(&testbed, |site| cores_with(site, "server").len() == CORES - 1);
        for n in 0..20 {
            client.open(to, 10);
            exchange_datagram(&mut client, &mut servers, to, n);
        }
        run_until_at_most(&mut client, &mut servers, 0, began);
        drop((servers, other, client));
        wait_for(&testbed, |site| site.report(1).applications.is_empty());
    }
}

/// Members migrate from core to core all the time, each on its own. No data is lost, and no
/// connection is refused.
#[test]
fn shared_port_members_migrate_while_serving() {
    for (testbed, family) in testbeds() {
        let to = address(1, family, 80);
        let mut servers = servers(&testbed, to);
        let mut client = Client::new(testbed.attach(0));
        let began = Instant::now();
        let mut seen = BTreeSet::new();
        for n in 0..100 {
            client.open(to, if n % 10 == 0 { 300_000 } else { 2000 });
            exchange_datagram(&mut client, &mut servers, to, n);
            seen.insert(cores_with(&testbed, "server").into_iter().collect::<BTreeSet<_>>());
            run_until_at_most(&mut client, &mut servers, 8, began);
        }
        run_until_at_most(&mut client, &mut servers, 0, began);
        assert_eq!(client.received, 10 * 300_000 + 90 * 2000);
        if testbed.migrator.is_some() {
            assert!(
                seen.iter().any(|cores| cores.len() > 1),
                "the servers were never on different cores: {seen:?}"
            );
        }
    }
}

/// Connections close all the time while others of the same applications continue and migrate. A
/// handle refers to the same connection on every core.
#[test]
fn connections_close_while_others_migrate() {
    for (testbed, family) in testbeds() {
        let to = address(1, family, 80);
        let mut servers = servers(&testbed, to);
        let mut client = Client::new(testbed.attach(0));
        let began = Instant::now();
        for n in 0..600 {
            client.open(to, if n % 4 == 0 { 10_000 } else { 10 });
            run_until_at_most(&mut client, &mut servers, 6, began);
        }
        run_until_at_most(&mut client, &mut servers, 0, began);
    }
}

/// A connected socket receives the datagrams of its peer on whatever core it is. No other core
/// can connect a socket to the same peer.
#[test]
fn a_connected_socket_on_a_shared_port_keeps_its_peer() {
    for (testbed, family) in testbeds() {
        let to = address(1, family, 53);
        let mut servers = servers(&testbed, to);
        let mut client = testbed.attach(0);
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
                let got = wait_until(&mut server.app, |app| {
                    app.recv_datagram(server.datagrams, &mut buf, false)
                });
                assert_eq!((got.unwrap().len, buf[0]), (1, n));
            }
            let server = &mut servers[at];
            server.app.connect_udp(server.datagrams, None).unwrap();
        }
    }
}

/// An application that has exited is no member of the port, even if the port is bound again.
#[test]
fn exited_member_gets_no_connections() {
    for (testbed, family) in testbeds() {
        let to = address(1, family, 80);
        let mut client = testbed.attach(0);
        let mut before: Option<Attachment> = None;
        for _ in 0..10 {
            let mut app = testbed.attach(1);
            drop(before.take());
            let listener = app.listen(to, 4, SHARED_TCP()).unwrap();
            for _ in 0..4 {
                let ours = client.connect_tcp(None, to, TcpOptions::default()).unwrap();
                wait_until_connected(&mut client, ours).unwrap();
                let (theirs, _) = wait_until(&mut app, |app| app.accept(listener)).unwrap();
                client.close(ours, false);
                app.close(theirs, false);
            }
            before = Some(app);
        }
    }
}
