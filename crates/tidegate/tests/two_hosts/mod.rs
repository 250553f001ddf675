//! Two hosts in one process, joined by an in-memory link.
#![allow(dead_code, reason = "each test uses some of it")]

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use tempfile::TempDir;
use tidegate::mem::{MemConfig, wire};
use tidegate::{AddressProbe, FrameSize, Net, NetConfig, OpenError};
use tidegate_service::Geometry;
use tidegate_service::daemon::{AttachConfig, Daemon, DaemonReport, StartOptions, UpgradeMode};

/// Addresses of the first and of the second host, in each family.
pub const FAMILIES: [[&str; 2]; 2] = [["192.0.2.1", "192.0.2.2"], ["2001:db8::1", "2001:db8::2"]];

/// Configurations of the hosts, with `frames` frames each.
fn configs(frames: u32) -> [NetConfig; 2] {
    let (a, b) = wire(&MemConfig::default()).unwrap();
    [(a, 0), (b, 1)].map(|(device, host)| {
        NetConfig::new(device)
            .address(format!("{}/24", FAMILIES[0][host]).parse().unwrap())
            .address(format!("{}/64", FAMILIES[1][host]).parse().unwrap())
            .frames(frames, FrameSize::K2)
            .hugepages(false)
            // Without it a host must run while others ask for its hardware address (RFC 4429).
            .address_probe(AddressProbe::Off)
            .seed([7; 16])
    })
}

/// Opens the hosts with `frames` frames each; `change` adds the test's own configuration.
pub fn open(frames: u32, change: impl Fn(NetConfig) -> NetConfig) -> [Net; 2] {
    try_open(frames, change).unwrap()
}

/// As [`open`], but returns errors.
pub fn try_open(
    frames: u32,
    change: impl Fn(NetConfig) -> NetConfig,
) -> Result<[Net; 2], OpenError> {
    let [a, b] = configs(frames).map(|config| Net::open(change(config)));
    Ok([a?, b?])
}

/// Host with a daemon, to which the first stack is attached, and a host with an embedded stack.
pub struct AttachedToEmbedded {
    pub nets: [Net; 2],
    _daemon: Daemon,
    _folder: TempDir,
}

/// Joins a host with a daemon to a host with an embedded stack.
pub fn attached_to_embedded(frames: u32) -> AttachedToEmbedded {
    let folder = tempfile::tempdir().unwrap();
    let [a, b] = configs(frames);
    let path = folder.path().join("a.sock");
    let daemon = Daemon::start_with(a, start_options(path.clone(), 1)).unwrap();
    let nets = [Net::attach(&path, "test").unwrap(), Net::open(b).unwrap()];
    AttachedToEmbedded { nets, _daemon: daemon, _folder: folder }
}

fn start_options(
    path: PathBuf,
    cores: usize,
) -> StartOptions<
    impl Fn(usize) -> io::Result<()> + Clone + Send + 'static,
    impl Fn() -> io::Result<()> + Clone + Send + 'static,
> {
    let attach =
        AttachConfig::new(path, Geometry { sockets: 512, tcp_bytes: 1 << 15, udp_bytes: 1 << 17 });
    StartOptions {
        attach,
        cores: cores..=cores,
        on_core_start: |_| Ok(()),
        drop_privileges: || Ok(()),
        upgrade: UpgradeMode::Refused("the tests do not upgrade it"),
        measure_rounds: false,
        log: Arc::new(|_: &str| {}),
    }
}

/// Two hosts with a daemon each; dropping this stops the daemons.
pub struct Daemons {
    daemons: [(Daemon, PathBuf); 2],
    _folder: TempDir,
}

/// Starts a daemon on each host, with `frames` frames and `cores` network cores.
pub fn daemons(frames: u32, cores: usize) -> Daemons {
    let folder = tempfile::tempdir().unwrap();
    let mut names = ["a.sock", "b.sock"].into_iter();
    let daemons = configs(frames).map(|config| {
        let path = folder.path().join(names.next().unwrap());
        let options = start_options(path.clone(), cores);
        (Daemon::start_with(config, options).unwrap(), path)
    });
    Daemons { daemons, _folder: folder }
}

impl Daemons {
    /// Report of the daemon on host 0 or 1.
    pub fn report(&self, host: usize) -> DaemonReport {
        self.daemons[host].0.report().unwrap()
    }

    /// Attaches an application to each daemon.
    pub fn attach(&self) -> [Net; 2] {
        [0, 1].map(|n| Net::attach(&self.daemons[n].1, "test").unwrap())
    }
}

/// Numbers of network cores to test a daemon with: one, and several, over which sockets are
/// sharded.
pub const CORES: [usize; 2] = [1, 3];

/// Runs `check` with embedded stacks, and with daemons for each number of [`CORES`].
pub fn in_both_forms(frames: u32, check: impl Fn([Net; 2])) {
    check(open(frames, |config| config));
    CORES.into_iter().for_each(|cores| check(daemons(frames, cores).attach()));
}
