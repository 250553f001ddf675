//! Tests with hostile applications: they may harm themselves, but no other application.

use std::io;
use std::net::SocketAddr;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tidegate_device::mem;
use tidegate_engine::NetConfig;
use tidegate_memory::shared::SharedWords;
use tidegate_stack::TcpOptions;

use crate::attachment::Attachment;
use crate::daemon::{AttachConfig, DEFAULT_COALESCING, Daemon, DaemonReport, Quota};
use crate::ipc::layout::Geometry;
use crate::ipc::takeover_token::TakeoverToken;

const GEOMETRY: Geometry = Geometry { sockets: 8, tcp_bytes: 4096, udp_bytes: 4096 };

/// Maximum duration of any step.
const TIMEOUT: Duration = Duration::from_secs(60);

struct DaemonTestbed {
    daemon: Daemon,
    path: PathBuf,
    _other_end: mem::MemDevice,
    _folder: tempfile::TempDir,
}

impl DaemonTestbed {
    fn new() -> Self {
        Self::with_quota(Quota::default())
    }

    fn with_quota(quota: Quota) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (port, other_end) = mem::wire(&mem::MemConfig::default()).unwrap();
        let net = NetConfig::new(port).address("192.0.2.1/24".parse().unwrap());
        let path = folder.path().join("daemon.sock");
        let attach = AttachConfig {
            path: path.clone(),
            mode: 0o600,
            group: None,
            geometry: GEOMETRY,
            coalescing: DEFAULT_COALESCING,
            quota,
        };
        let daemon = Daemon::start(net, attach, || Ok(()), Arc::new(|_: &str| {})).unwrap();
        Self { daemon, path, _other_end: other_end, _folder: folder }
    }

    fn attach(&self, name: &str) -> Attachment {
        Attachment::connect(&self.path, name).unwrap()
    }

    fn report(&self) -> DaemonReport {
        self.daemon.report().unwrap()
    }

    /// Waits until no application of this name is attached.
    fn wait_until_gone(&self, name: &str) {
        let began = Instant::now();
        while self.report().applications.iter().any(|app| app.identity.name == name) {
            assert!(began.elapsed() < TIMEOUT, "{name} is still attached");
            std::thread::yield_now();
        }
    }

    /// Waits until `frames` frames are free. Frames that wait for unresolved neighbours are
    /// freed when the resolution times out.
    fn wait_for_frames(&self, frames: usize) {
        let began = Instant::now();
        while self.report().frames_available < frames {
            assert!(
                began.elapsed() < TIMEOUT,
                "only {} of {frames} frames are free",
                self.report().frames_available
            );
            std::thread::yield_now();
        }
    }
}

fn local(port: u16) -> SocketAddr {
    SocketAddr::new("192.0.2.1".parse().unwrap(), port)
}

/// Uses a socket as a well-behaved application, and asserts that everything works.
fn assert_well_served(app: &mut Attachment) {
    let socket = app.bind_udp(local(53), Default::default()).unwrap();
    app.connect_udp(socket, Some("192.0.2.9:9".parse().unwrap())).unwrap();
    app.send_datagram(socket, b"hello", None, None).unwrap();
    app.close(socket, false);
}

/// Opens sockets of every type, some with pending work.
fn open_sockets(app: &mut Attachment) {
    let udp = app.bind_udp(local(1000), Default::default()).unwrap();
    app.send_datagram(udp, b"to whom", Some("192.0.2.7:7".parse().unwrap()), None).unwrap();
    app.listen(local(80), 8, TcpOptions::default()).unwrap();
    let peer = "192.0.2.8:80".parse().unwrap();
    app.connect_tcp(None, peer, TcpOptions::default()).unwrap();
}

#[test]
fn corrupting_shared_memory_harms_no_other_application() {
    let testbed = DaemonTestbed::new();
    let mut good = testbed.attach("good");
    let frames = testbed.report().frames_available;
    for seed in 0..50 {
        let mut rng = fastrand::Rng::with_seed(seed);
        let mut bad = testbed.attach("bad");
        open_sockets(&mut bad);
        let words = bad.memory.regions()[0].words();
        // First a few words, then more and more.
        for burst in 0..200 {
            for _ in 0..burst {
                let word = &words[rng.usize(..words.len())];
                let value = match rng.u8(..4) {
                    0 => u64::MAX,
                    1 => rng.u64(..16),
                    2 => word.load(Ordering::Relaxed).wrapping_add(rng.u64(..5)),
                    _ => rng.u64(..),
                };
                word.store(value, Ordering::Relaxed);
            }
            bad.wake_daemon();
        }
        assert_well_served(&mut good);
        drop(bad);
        testbed.wait_until_gone("bad");
    }
    testbed.wait_for_frames(frames);
}

#[test]
fn unread_notifications_block_no_other_application() {
    let testbed = DaemonTestbed::new();
    let mut good = testbed.attach("good");
    let mut silent = testbed.attach("deaf");
    // Far more replies than the notification ring holds.
    let mut tag = 0;
    let mut send_bind = |silent: &mut Attachment| {
        tag += 1;
        let command = crate::ipc::command::Command::Bind {
            tag,
            local: local(1),
            share_group: None,
            options: Default::default(),
        };
        let pushed = silent.commands.push(&command.to_words()).unwrap();
        silent.commands.publish();
        silent.wake_daemon();
        pushed
    };
    let began = Instant::now();
    let mut refused = 0;
    while refused < 100 {
        assert!(began.elapsed() < TIMEOUT);
        refused += u32::from(!send_bind(&mut silent));
    }
    assert_well_served(&mut good);
    assert_eq!(
        testbed.report().applications.len(),
        2,
        "unread notifications are no reason to evict"
    );
    drop(silent);
    testbed.wait_until_gone("deaf");
    assert_well_served(&mut good);
}

#[test]
fn evicts_application_with_unknown_command() {
    let testbed = DaemonTestbed::new();
    let mut good = testbed.attach("good");
    let mut hostile = testbed.attach("liar");
    // An unknown command.
    hostile.commands.push(&[0xff; crate::ipc::command::COMMAND_WORDS]).unwrap();
    hostile.commands.publish();
    hostile.wake_daemon();
    testbed.wait_until_gone("liar");
    let refused = hostile.bind_udp(local(7), Default::default()).unwrap_err();
    assert_eq!(refused.kind(), io::ErrorKind::ConnectionAborted);
    assert_well_served(&mut good);
}

#[test]
fn inheriting_requires_the_takeover_token() {
    let testbed = DaemonTestbed::new();
    let mut owner = testbed.attach("owner");
    open_sockets(&mut owner);
    let token = owner.token;
    let mut other = testbed.attach("stranger");
    // An application may inherit its own sockets, but not with a made-up token.
    drop(other.fork_child().unwrap());
    other.token = TakeoverToken::new().unwrap();
    let error = other.fork_child().unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::PermissionDenied, "{error}");
    assert!(error.to_string().contains("takeover token"), "{error}");
    assert!(testbed.report().applications.iter().all(|app| match app.identity.name.as_str() {
        "owner" => app.sockets.iter().all(|socket| socket.holders == 1),
        _ => app.sockets.is_empty(),
    }));
    drop(owner);
    testbed.wait_until_gone("owner");
    other.token = token;
    assert!(other.fork_child().is_err(), "the token ends with its application");
    assert_well_served(&mut testbed.attach("good"));
}

#[test]
fn request_wakes_daemon_that_is_going_to_sleep() {
    let testbed = DaemonTestbed::new();
    let mut rng = fastrand::Rng::with_seed(7);
    for _ in 0..3_000 {
        // Requests arrive at every moment of the daemon's way to sleep.
        let (began, wait_ns) = (Instant::now(), rng.u128(..150_000));
        while began.elapsed().as_nanos() < wait_ns {
            std::hint::spin_loop();
        }
        testbed.report();
    }
}

#[test]
fn corrupting_fork_children_harm_no_other_application() {
    let testbed = DaemonTestbed::new();
    let mut good = testbed.attach("good");
    let frames = testbed.report().frames_available;
    for seed in 0..50 {
        let mut rng = fastrand::Rng::with_seed(seed);
        let mut parent = testbed.attach("bad");
        open_sockets(&mut parent);
        let mut attachments = vec![parent.fork_child().unwrap(), parent.fork_child().unwrap()];
        attachments.push(parent);
        for burst in 0..100 {
            for app in &mut attachments {
                let words = app.memory.regions()[0].words();
                for _ in 0..burst {
                    words[rng.usize(..words.len())].store(rng.u64(..20), Ordering::Relaxed);
                }
                // The application may be evicted already.
                let _ = app.send_no_op();
            }
            if burst == 50 {
                attachments.swap_remove(rng.usize(..attachments.len()));
            }
        }
        drop(attachments);
        testbed.wait_until_gone("bad");
        assert_well_served(&mut good);
    }
    testbed.wait_for_frames(frames);
}

#[test]
fn enforces_port_quota() {
    let testbed = DaemonTestbed::with_quota(Quota { max_ports: 2, ..Quota::default() });
    let mut app = testbed.attach("greedy");
    let local = |port| SocketAddr::new("192.0.2.1".parse().unwrap(), port);
    let bound = app.bind_udp(local(1), Default::default()).unwrap();
    app.listen(local(1), 1, TcpOptions::default()).unwrap();
    let refused = app.bind_udp(local(2), Default::default()).unwrap_err();
    assert_eq!(refused.kind(), io::ErrorKind::QuotaExceeded);
    let refused = app.listen(local(2), 1, TcpOptions::default()).unwrap_err();
    assert_eq!(refused.kind(), io::ErrorKind::QuotaExceeded);
    // The local ports of outgoing connections do not count.
    app.connect_tcp(None, "192.0.2.9:80".parse().unwrap(), TcpOptions::default()).unwrap();
    app.close(bound, false);
    app.listen(local(2), 1, TcpOptions::default()).unwrap();
    // The quota of one application does not reduce the quota of another.
    let mut other = testbed.attach("other");
    other.bind_udp(local(3), Default::default()).unwrap();
}

#[test]
fn enforces_memory_quota() {
    // The memory of two of eight sockets, with one direction of each in use.
    let testbed = DaemonTestbed::with_quota(Quota { max_memory_bytes: 8192, ..Quota::default() });
    let mut app = testbed.attach("greedy");
    let peer = Some("192.0.2.9:9".parse().unwrap());
    // Memory of sent data is freed, however little.
    for port in 1..20 {
        let socket = app.bind_udp(local(port), Default::default()).unwrap();
        app.send_datagram(socket, b"little", peer, None).unwrap();
        app.close(socket, false);
    }
    let mut full = Vec::new();
    let refused = loop {
        match app.bind_udp(local(100 + full.len() as u16), Default::default()) {
            Ok(socket) => full.push(socket),
            Err(refused) => break refused,
        }
        app.send_datagram(full[full.len() - 1], &[0; 1400], peer, None).unwrap();
    };
    assert_eq!((refused.kind(), full.len()), (io::ErrorKind::QuotaExceeded, 2));
    let tcp = |app: &mut Attachment| app.listen(local(80), 1, TcpOptions::default());
    assert_eq!(tcp(&mut app).unwrap_err().kind(), io::ErrorKind::QuotaExceeded);
    assert!(testbed.report().applications[0].memory_bytes >= 8192);
    // The quota of one application does not reduce the quota of another.
    assert_well_served(&mut testbed.attach("other"));
    // Freed quota can be used again.
    app.close(full.remove(0), false);
    tcp(&mut app).unwrap();
}

#[test]
fn small_cpu_share_suffices_without_contention() {
    let testbed = DaemonTestbed::with_quota(Quota { cpu_share_percent: 1, ..Quota::default() });
    let mut apps = [testbed.attach("one"), testbed.attach("other")];
    let local = SocketAddr::new("192.0.2.1".parse().unwrap(), 0);
    for _ in 0..2000 {
        for app in &mut apps {
            let socket = app.bind_udp(local, Default::default()).unwrap();
            app.close(socket, false);
        }
    }
    for app in &mut apps {
        app.ping().unwrap();
    }
    let done = testbed.report().applications.iter().map(|app| app.commands).sum::<u64>();
    assert_eq!(done, 2 * (2 * 2000 + 1));
}

#[test]
fn silent_connections_delay_no_attachment() {
    let testbed = DaemonTestbed::new();
    let silent: Vec<_> = (0..100).map(|_| UnixStream::connect(&testbed.path).unwrap()).collect();
    let mut app = testbed.attach("app");
    app.ping().unwrap();
    drop(silent);
    assert_eq!(testbed.report().applications.len(), 1);
}
