//! Test support: two daemons on one in-memory link.

// Each test binary uses a part of this module.
#![allow(dead_code)]

pub mod upgrade;

use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tidegate_device::mem;
use tidegate_engine::NetConfig;
use tidegate_service::attachment::Attachment;
use tidegate_service::daemon::{
    AttachConfig, DEFAULT_COALESCING, Daemon, StartOptions, UpgradeMode,
};
use tidegate_service::{Geometry, Handle, SocketState};
use tidegate_stack::TcpOptions;

/// Maximum duration of any step.
pub const TIMEOUT: Duration = Duration::from_secs(60);

pub const FAMILIES: [[&str; 2]; 2] = [["192.0.2.1", "192.0.2.2"], ["2001:db8::1", "2001:db8::2"]];

pub const GEOMETRY: Geometry = Geometry { sockets: 16, tcp_bytes: 1 << 14, udp_bytes: 1 << 17 };

pub struct DaemonPair {
    pub migrator: Option<Migrator>,
    pub daemons: Arc<[Daemon; 2]>,
    pub paths: [PathBuf; 2],
    pub _folder: tempfile::TempDir,
}

/// Thread that migrates all applications from core to core all the time.
pub struct Migrator {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<usize>>,
}

impl Migrator {
    fn start(daemons: Arc<[Daemon; 2]>) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let run = move || {
            let mut rounds = 0;
            while !stopped.load(Ordering::Relaxed) {
                for daemon in &*daemons {
                    daemon.controls().move_application(std::process::id(), rounds % CORES).unwrap();
                    // The migration is done when the report is answered.
                    daemon.report().unwrap();
                }
                rounds += 1;
            }
            rounds
        };
        Self { stop, thread: Some(std::thread::spawn(run)) }
    }
}

impl Drop for Migrator {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let rounds = self.thread.take().unwrap().join();
        if !std::thread::panicking() {
            assert!(rounds.unwrap() > 0, "no application has migrated");
        }
    }
}

/// Network cores of a daemon with several cores.
pub const CORES: usize = 3;

impl DaemonPair {
    /// Two daemons with one core each.
    pub fn new() -> Self {
        Self::with_cores(1..=1)
    }

    /// Two daemons with several cores, between which applications migrate all the time.
    fn migrating() -> Self {
        let testbed = Self::with_cores(CORES..=CORES);
        Self { migrator: Some(Migrator::start(Arc::clone(&testbed.daemons))), ..testbed }
    }

    /// True if applications migrate all the time.
    pub fn migrates(&self) -> bool {
        self.migrator.is_some()
    }

    /// Two daemons with this range of cores each.
    pub fn with_cores(cores: RangeInclusive<usize>) -> Self {
        Self::start(cores, DEFAULT_COALESCING)
    }

    /// Two daemons with one core each and this time between two wake-ups of an application.
    pub fn with_coalescing(coalescing: Duration) -> Self {
        Self::start(1..=1, coalescing)
    }

    fn start(cores: RangeInclusive<usize>, coalescing: Duration) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (a, b) = mem::wire(&mem::MemConfig::default()).unwrap();
        let paths = ["a.sock", "b.sock"].map(|name| folder.path().join(name));
        let [first, second] = [(a, 0), (b, 1)].map(|(port, n)| {
            let net =
                FAMILIES.iter().zip([24, 64]).fold(NetConfig::new(port), |net, (family, len)| {
                    net.address(format!("{}/{len}", family[n]).parse().unwrap())
                });
            let attach =
                AttachConfig { coalescing, ..AttachConfig::new(paths[n].clone(), GEOMETRY) };
            let start = StartOptions {
                attach,
                cores: cores.clone(),
                on_core_start: |_| Ok(()),
                drop_privileges: || Ok(()),
                upgrade: UpgradeMode::Refused("this daemon does not support upgrades"),
                measure_rounds: false,
                log: Arc::new(|_: &str| {}),
            };
            Daemon::start_with(net, start).unwrap()
        });
        let daemons = Arc::new([first, second]);
        Self { migrator: None, daemons, paths, _folder: folder }
    }

    pub fn attach(&self, side: usize) -> Attachment {
        Attachment::connect(&self.paths[side], "test").unwrap()
    }

    pub fn report(&self, side: usize) -> tidegate_service::daemon::DaemonReport {
        self.daemons[side].report().unwrap()
    }
}

/// Daemon pairs with one core each, and with several cores between which applications migrate
/// all the time; each for both address families.
pub fn testbeds() -> impl Iterator<Item = (DaemonPair, [&'static str; 2])> {
    let constructors = [DaemonPair::new, DaemonPair::migrating];
    constructors.into_iter().flat_map(|new_testbed| FAMILIES.map(|family| (new_testbed(), family)))
}

pub fn address(side: usize, family: [&str; 2], port: u16) -> SocketAddr {
    SocketAddr::new(family[side].parse().unwrap(), port)
}

/// Repeats a call until it no longer returns `WouldBlock`.
pub fn wait_until<R>(
    app: &mut Attachment,
    mut call: impl FnMut(&mut Attachment) -> io::Result<R>,
) -> io::Result<R> {
    let began = Instant::now();
    loop {
        match call(app) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            result => return result,
        }
        assert!(began.elapsed() < TIMEOUT, "timed out");
        app.sleep(TIMEOUT)?;
        while app.next_changed().is_some() {}
    }
}

pub fn wait_until_connected(app: &mut Attachment, socket: Handle) -> io::Result<()> {
    wait_until(app, |app| match app.state(socket)? {
        SocketState::Connecting => Err(ErrorKind::WouldBlock.into()),
        SocketState::Connected => Ok(()),
        _ => Err(app.take_error(socket)?.unwrap_or(ErrorKind::Other).into()),
    })
}

/// Opens a connection from the first host to the second.
pub fn connection_pair(apps: &mut [Attachment; 2], to: SocketAddr) -> [Handle; 2] {
    let [client, server] = apps;
    let listener = server.listen(to, 8, TcpOptions::default()).unwrap();
    let ours = client.connect_tcp(None, to, TcpOptions::default()).unwrap();
    let (theirs, peer) = wait_until(server, |server| server.accept(listener)).unwrap();
    wait_until_connected(client, ours).unwrap();
    assert_eq!(client.local_addr(ours).unwrap(), peer);
    assert_eq!(client.peer_addr(ours).unwrap(), to);
    assert_eq!(server.local_addr(theirs).unwrap(), to);
    server.close(listener, false);
    [ours, theirs]
}
