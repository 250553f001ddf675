//! Two daemons on one wire.

// Each test program uses a part of this.
#![allow(dead_code)]

use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tidegate_engine::NetConfig;
use tidegate_port::mem;
use tidegate_service::attachment::Attachment;
use tidegate_service::daemon::{DEFAULT_COALESCING, Daemon, DoorConfig};
use tidegate_service::{Geometry, Handle, Phase};
use tidegate_stack::TcpOptions;

/// How long anything may take.
pub const LIMIT: Duration = Duration::from_secs(60);

pub const FAMILIES: [[&str; 2]; 2] = [["192.0.2.1", "192.0.2.2"], ["2001:db8::1", "2001:db8::2"]];

pub const GEOMETRY: Geometry = Geometry { sockets: 16, tcp_bytes: 1 << 14, udp_bytes: 1 << 17 };

pub struct Site {
    pub daemons: [Daemon; 2],
    pub paths: [PathBuf; 2],
    pub _folder: tempfile::TempDir,
}

impl Site {
    pub fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (a, b) = mem::wire(&mem::MemConfig::default()).unwrap();
        let paths = ["a.sock", "b.sock"].map(|name| folder.path().join(name));
        let [first, second] = [(a, 0), (b, 1)].map(|(port, n)| {
            let net =
                FAMILIES.iter().zip([24, 64]).fold(NetConfig::new(port), |net, (family, len)| {
                    net.address(format!("{}/{len}", family[n]).parse().unwrap())
                });
            let door = DoorConfig {
                path: paths[n].clone(),
                mode: 0o600,
                group: None,
                geometry: GEOMETRY,
                coalescing: DEFAULT_COALESCING,
            };
            Daemon::start(net, door, || Ok(()), Arc::new(|_: &str| {})).unwrap()
        });
        Self { daemons: [first, second], paths, _folder: folder }
    }

    pub fn attach(&self, side: usize) -> Attachment {
        Attachment::connect(&self.paths[side], "test").unwrap()
    }

    pub fn report(&self, side: usize) -> tidegate_service::daemon::Report {
        self.daemons[side].report().unwrap()
    }
}

pub fn address(side: usize, family: [&str; 2], port: u16) -> SocketAddr {
    SocketAddr::new(family[side].parse().unwrap(), port)
}

/// Waits until a call gives something else than that it would block.
pub fn until<R>(
    app: &mut Attachment,
    mut call: impl FnMut(&mut Attachment) -> io::Result<R>,
) -> io::Result<R> {
    let began = Instant::now();
    loop {
        match call(app) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            result => return result,
        }
        assert!(began.elapsed() < LIMIT, "it never happens");
        if app.prepare_sleep()? {
            let limit = Timespec { tv_sec: 60, tv_nsec: 0 };
            poll(&mut [PollFd::from_borrowed_fd(app.as_fd(), PollFlags::IN)], Some(&limit))?;
        }
        app.end_sleep()?;
        while app.next_changed().is_some() {}
    }
}

pub fn connected(app: &mut Attachment, socket: Handle) -> io::Result<()> {
    until(app, |app| match app.phase(socket)? {
        Phase::Connecting => Err(ErrorKind::WouldBlock.into()),
        Phase::Connected => Ok(()),
        _ => Err(app.take_error(socket)?.unwrap_or(ErrorKind::Other).into()),
    })
}

/// A connection from the first host to the second.
pub fn pair(apps: &mut [Attachment; 2], to: SocketAddr) -> [Handle; 2] {
    let [client, server] = apps;
    let listener = server.listen(to, 8, TcpOptions::default()).unwrap();
    let ours = client.connect_tcp(None, to, TcpOptions::default()).unwrap();
    let (theirs, peer) = until(server, |server| server.accept(listener)).unwrap();
    connected(client, ours).unwrap();
    assert_eq!(client.local_addr(ours).unwrap(), peer);
    assert_eq!(client.peer_addr(ours).unwrap(), to);
    assert_eq!(server.local_addr(theirs).unwrap(), to);
    server.close(listener, false);
    [ours, theirs]
}
