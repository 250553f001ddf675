//! Two daemons on one wire.

// Each test program uses a part of this.
#![allow(dead_code)]

use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tidegate_engine::NetConfig;
use tidegate_port::mem;
use tidegate_service::attachment::Attachment;
use tidegate_service::daemon::{DEFAULT_COALESCING, Daemon, DoorConfig, Quota, Start, Upgrade};
use tidegate_service::{Geometry, Handle, Phase};
use tidegate_stack::TcpOptions;

/// How long anything may take.
pub const LIMIT: Duration = Duration::from_secs(60);

pub const FAMILIES: [[&str; 2]; 2] = [["192.0.2.1", "192.0.2.2"], ["2001:db8::1", "2001:db8::2"]];

pub const GEOMETRY: Geometry = Geometry { sockets: 16, tcp_bytes: 1 << 14, udp_bytes: 1 << 17 };

pub struct Site {
    pub mover: Option<Mover>,
    pub daemons: Arc<[Daemon; 2]>,
    pub paths: [PathBuf; 2],
    pub _folder: tempfile::TempDir,
}

/// Has applications go from core to core all the time.
pub struct Mover {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<usize>>,
}

impl Mover {
    fn start(daemons: Arc<[Daemon; 2]>) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let run = move || {
            let mut moves = 0;
            while !stopped.load(Ordering::Relaxed) {
                for daemon in &*daemons {
                    daemon.controls().move_application(std::process::id(), moves % CORES).unwrap();
                    // It has been done when this is answered.
                    daemon.report().unwrap();
                }
                moves += 1;
            }
            moves
        };
        Self { stop, thread: Some(std::thread::spawn(run)) }
    }
}

impl Drop for Mover {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let moves = self.thread.take().unwrap().join();
        if !std::thread::panicking() {
            assert!(moves.unwrap() > 0, "nobody has moved");
        }
    }
}

/// Cores of a daemon that has several.
pub const CORES: usize = 3;

impl Site {
    /// With one core each.
    pub fn new() -> Self {
        Self::still(1..=1)
    }

    /// With several cores, between which applications move all the time.
    fn restless() -> Self {
        let site = Self::still(CORES..=CORES);
        Self { mover: Some(Mover::start(Arc::clone(&site.daemons))), ..site }
    }

    /// With so many cores each.
    pub fn still(cores: RangeInclusive<usize>) -> Self {
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
                quota: Quota::default(),
            };
            let start = Start {
                door,
                cores: cores.clone(),
                begin: |_| Ok(()),
                settle: || Ok(()),
                upgrade: Upgrade::Refused("it was not started to be replaced"),
                log: Arc::new(|_: &str| {}),
            };
            Daemon::start_with(net, start).unwrap()
        });
        let daemons = Arc::new([first, second]);
        Self { mover: None, daemons, paths, _folder: folder }
    }

    pub fn attach(&self, side: usize) -> Attachment {
        Attachment::connect(&self.paths[side], "test").unwrap()
    }

    pub fn report(&self, side: usize) -> tidegate_service::daemon::Report {
        self.daemons[side].report().unwrap()
    }
}

/// Sites with one core for each daemon, and with several between which applications
/// move all the time; each for both families of addresses.
pub fn places() -> impl Iterator<Item = (Site, [&'static str; 2])> {
    let sites = [Site::new, Site::restless];
    sites.into_iter().flat_map(|site| FAMILIES.map(|family| (site(), family)))
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
