//! Migrations between the cores of a running daemon.

use std::time::{Duration, Instant};

use tidegate_device::mem::{MemConfig, wire};
use tidegate_engine::NetConfig;
use tidegate_stack::UdpOptions;

use crate::attachment::Attachment;
use crate::daemon::core::load::FULL_PERMILLE;
use crate::daemon::core::message::CoreMessage;
use crate::daemon::{AttachConfig, Daemon, DaemonReport, StartOptions, UpgradeMode};
use crate::ipc::layout::Geometry;
use std::sync::Arc;

/// Time limit of each wait.
const LIMIT: Duration = Duration::from_secs(60);

struct Testbed {
    daemon: Daemon,
    apps: Vec<Attachment>,
    _folder: tempfile::TempDir,
}

impl Testbed {
    /// Starts three cores, one of them in use, with this many applications.
    fn new(apps: usize) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (port, _) = wire(&MemConfig::default()).unwrap();
        let addresses = ["192.0.2.1/24", "192.0.2.3/24"].map(|text| text.parse().unwrap());
        let net = addresses.into_iter().fold(NetConfig::new(port), NetConfig::address);
        let path = folder.path().join("daemon.sock");
        let attach = AttachConfig::new(
            path.clone(),
            Geometry { sockets: 8, tcp_bytes: 4096, udp_bytes: 4096 },
        );
        let start = StartOptions {
            attach,
            cores: 1..=3,
            on_core_start: |_| Ok(()),
            drop_privileges: || Ok(()),
            upgrade: UpgradeMode::Refused("not used in this test"),
            measure_rounds: false,
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

    fn move_load(&self, from: usize, to: usize, busy_permille: u32) {
        self.daemon.cores.inbox(from).send(CoreMessage::MoveLoad { to, busy_permille }).unwrap();
    }

    /// Waits until these cores receive the frames for all cores.
    fn wait_for_active_cores(&self, expected: u64) {
        let began = Instant::now();
        loop {
            let now = self.daemon.cores.flow_steering().unwrap().active_cores();
            if now == expected {
                return;
            }
            assert!(began.elapsed() < LIMIT, "{now:b} instead of {expected:b}");
            std::thread::yield_now();
        }
    }

    /// Waits until each core has the expected number of applications.
    fn wait_for_counts(&self, expected: [usize; 3]) {
        let counts =
            |report: DaemonReport| report.cores.iter().map(|core| core.applications).collect();
        let began = Instant::now();
        loop {
            let now: Vec<usize> = counts(self.daemon.report().unwrap());
            if now == expected {
                return;
            }
            assert!(began.elapsed() < LIMIT, "{now:?} instead of {expected:?}");
            std::thread::yield_now();
        }
    }
}

#[test]
fn moves_some_or_all_applications_to_another_core() {
    let mut testbed = Testbed::new(3);
    (0..3).for_each(|app| testbed.bind(app, 1000 + app as u16));
    testbed.wait_for_counts([3, 0, 0]);
    testbed.move_load(0, 1, 0);
    testbed.wait_for_counts([2, 1, 0]);
    testbed.move_load(0, 2, FULL_PERMILLE);
    testbed.wait_for_counts([0, 1, 2]);
    testbed.move_load(1, 1, FULL_PERMILLE);
    testbed.move_load(2, 3, FULL_PERMILLE);
    testbed.move_load(2, 1, FULL_PERMILLE);
    testbed.wait_for_counts([0, 3, 0]);
    (0..3).for_each(|app| testbed.bind(app, 2000 + app as u16));
}

#[test]
fn cores_without_applications_become_inactive() {
    let mut testbed = Testbed::new(2);
    (0..2).for_each(|app| testbed.bind(app, 1000 + app as u16));
    testbed.move_load(0, 1, 0);
    testbed.wait_for_active_cores(0b011);
    testbed.move_load(0, 2, FULL_PERMILLE);
    testbed.wait_for_active_cores(0b111);
    testbed.move_load(1, 2, FULL_PERMILLE);
    testbed.wait_for_active_cores(0b101);
    testbed.apps.clear();
    testbed.wait_for_active_cores(0b001);
}

#[test]
fn reuse_port_sockets_migrate_separately() {
    let mut testbed = Testbed::new(3);
    for app in &mut testbed.apps {
        let options = UdpOptions::default().reuse_port(true);
        app.bind_udp("192.0.2.1:53".parse().unwrap(), options).unwrap();
    }
    testbed.wait_for_counts([3, 0, 0]);
    testbed.move_load(0, 1, 0);
    testbed.wait_for_counts([2, 1, 0]);
    testbed.move_load(0, 2, 0);
    testbed.wait_for_counts([1, 1, 1]);
    testbed.move_load(1, 2, FULL_PERMILLE);
    testbed.wait_for_counts([1, 0, 2]);
}

#[test]
fn sharers_of_a_port_or_socket_migrate_together() {
    let mut testbed = Testbed::new(3);
    // Two applications have one port, on different addresses.
    for (app, local) in testbed.apps.iter_mut().zip(["192.0.2.1:53", "192.0.2.3:53"]) {
        app.bind_udp(local.parse().unwrap(), UdpOptions::default()).unwrap();
    }
    testbed.bind(2, 54);
    let child = testbed.apps[2].fork_child().unwrap();
    testbed.apps.push(child);
    testbed.wait_for_counts([4, 0, 0]);
    testbed.move_load(0, 1, 0);
    testbed.wait_for_counts([2, 2, 0]);
    testbed.move_load(0, 1, 0);
    testbed.wait_for_counts([0, 4, 0]);
    // The exit of one application leaves its set together.
    testbed.apps.pop();
    testbed.wait_for_counts([0, 3, 0]);
    testbed.move_load(1, 2, FULL_PERMILLE);
    testbed.wait_for_counts([0, 0, 3]);
}
