//! Two hosts in one process, joined by a wire in memory.
#![allow(dead_code, reason = "each test uses some of it")]

use std::sync::Arc;

use tempfile::TempDir;
use tidegate::mem::{MemConfig, wire};
use tidegate::{FrameSize, Net, NetConfig, OpenError};
use tidegate_service::Geometry;
use tidegate_service::daemon::{
    DEFAULT_COALESCING, Daemon, DoorConfig, Quota, Report, Start, Upgrade,
};

/// The addresses of the first and of the second host, in each family.
pub const FAMILIES: [[&str; 2]; 2] = [["192.0.2.1", "192.0.2.2"], ["2001:db8::1", "2001:db8::2"]];

/// The configurations of the hosts, each with so many frames.
fn configs(frames: u32) -> [NetConfig; 2] {
    let (a, b) = wire(&MemConfig::default()).unwrap();
    [(a, 0), (b, 1)].map(|(port, host)| {
        NetConfig::new(port)
            .address(format!("{}/24", FAMILIES[0][host]).parse().unwrap())
            .address(format!("{}/64", FAMILIES[1][host]).parse().unwrap())
            .frames(frames, FrameSize::K2)
            .hugepages(false)
            .seed([7; 16])
    })
}

/// The hosts, each with so many frames; `change` sets what else a test needs.
pub fn open(frames: u32, change: impl Fn(NetConfig) -> NetConfig) -> [Net; 2] {
    try_open(frames, change).unwrap()
}

/// As [`open`], where that may fail.
pub fn try_open(
    frames: u32,
    change: impl Fn(NetConfig) -> NetConfig,
) -> Result<[Net; 2], OpenError> {
    let [a, b] = configs(frames).map(|config| Net::open(change(config)));
    Ok([a?, b?])
}

/// Hosts whose stacks are in daemons, which end with this.
pub struct Daemons {
    daemons: [(Daemon, std::path::PathBuf); 2],
    _folder: TempDir,
}

/// Starts them, each with so many frames and on so many network cores.
pub fn daemons(frames: u32, cores: usize) -> Daemons {
    let folder = tempfile::tempdir().unwrap();
    let mut names = ["a.sock", "b.sock"].into_iter();
    let daemons = configs(frames).map(|config| {
        let path = folder.path().join(names.next().unwrap());
        let door = DoorConfig {
            path: path.clone(),
            mode: 0o600,
            group: None,
            geometry: Geometry { sockets: 512, tcp_bytes: 1 << 15, udp_bytes: 1 << 17 },
            coalescing: DEFAULT_COALESCING,
            quota: Quota::default(),
        };
        let start = Start {
            door,
            cores: cores..=cores,
            begin: |_| Ok(()),
            settle: || Ok(()),
            upgrade: Upgrade::Refused("it is not asked"),
            log: Arc::new(|_: &str| {}),
        };
        (Daemon::start_with(config, start).unwrap(), path)
    });
    Daemons { daemons, _folder: folder }
}

impl Daemons {
    /// How it stands with one of them.
    pub fn report(&self, host: usize) -> Report {
        self.daemons[host].0.report().unwrap()
    }

    /// A program on each.
    pub fn attach(&self) -> [Net; 2] {
        [0, 1].map(|n| Net::attach(&self.daemons[n].1, "test").unwrap())
    }
}

/// Network cores of a daemon: one, and several, on all of which its programs have what
/// can be divided.
pub const CORES: [usize; 2] = [1, 3];

/// Runs `check` with stacks in this program, and with stacks in daemons.
pub fn in_both_forms(frames: u32, check: impl Fn([Net; 2])) {
    check(open(frames, |config| config));
    CORES.into_iter().for_each(|cores| check(daemons(frames, cores).attach()));
}
