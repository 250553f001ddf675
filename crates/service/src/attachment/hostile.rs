//! Applications that lie: they may harm themselves and nobody else.

use std::io;
use std::net::SocketAddr;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tidegate_engine::NetConfig;
use tidegate_memory::shared::Words;
use tidegate_port::mem;
use tidegate_stack::TcpOptions;

use crate::attachment::Attachment;
use crate::contract::layout::Geometry;
use crate::contract::ticket::Ticket;
use crate::daemon::{DEFAULT_COALESCING, Daemon, DoorConfig, Quota, Report};

const GEOMETRY: Geometry = Geometry { sockets: 8, tcp_bytes: 4096, udp_bytes: 4096 };

/// How long anything may take.
const LIMIT: Duration = Duration::from_secs(60);

struct Site {
    daemon: Daemon,
    path: PathBuf,
    _other_end: mem::MemPort,
    _folder: tempfile::TempDir,
}

impl Site {
    fn new() -> Self {
        Self::with_quota(Quota::default())
    }

    fn with_quota(quota: Quota) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (port, other_end) = mem::wire(&mem::MemConfig::default()).unwrap();
        let net = NetConfig::new(port).address("192.0.2.1/24".parse().unwrap());
        let path = folder.path().join("daemon.sock");
        let door = DoorConfig {
            path: path.clone(),
            mode: 0o600,
            group: None,
            geometry: GEOMETRY,
            coalescing: DEFAULT_COALESCING,
            quota,
        };
        let daemon = Daemon::start(net, door, || Ok(()), Arc::new(|_: &str| {})).unwrap();
        Self { daemon, path, _other_end: other_end, _folder: folder }
    }

    fn attach(&self, name: &str) -> Attachment {
        Attachment::connect(&self.path, name).unwrap()
    }

    fn report(&self) -> Report {
        self.daemon.report().unwrap()
    }

    /// Waits until no application of this name is attached.
    fn wait_until_gone(&self, name: &str) {
        let began = Instant::now();
        while self.report().applications.iter().any(|app| app.identity.name == name) {
            assert!(began.elapsed() < LIMIT, "{name} is still there");
            std::thread::yield_now();
        }
    }

    /// Frames that wait for neighbours who do not answer come back in the end.
    fn wait_for_frames(&self, frames: usize) {
        let began = Instant::now();
        while self.report().frames_available < frames {
            assert!(began.elapsed() < LIMIT, "{} of {frames}", self.report().frames_available);
            std::thread::yield_now();
        }
    }
}

fn own(port: u16) -> SocketAddr {
    SocketAddr::new("192.0.2.1".parse().unwrap(), port)
}

/// Somebody who behaves: all that a socket needs works.
fn behaves(app: &mut Attachment) {
    let socket = app.bind_udp(own(53), Default::default()).unwrap();
    app.connect_udp(socket, Some("192.0.2.9:9".parse().unwrap())).unwrap();
    app.send_datagram(socket, b"hello", None, None).unwrap();
    app.close(socket, false);
}

/// Sockets of every kind, some of them with something under way.
fn open_some(app: &mut Attachment) {
    let udp = app.bind_udp(own(1000), Default::default()).unwrap();
    app.send_datagram(udp, b"to whom", Some("192.0.2.7:7".parse().unwrap()), None).unwrap();
    app.listen(own(80), 8, TcpOptions::default()).unwrap();
    let peer = "192.0.2.8:80".parse().unwrap();
    app.connect_tcp(None, peer, TcpOptions::default()).unwrap();
}

#[test]
fn scribbling_over_all_that_is_shared_harms_nobody_else() {
    let site = Site::new();
    let mut good = site.attach("good");
    let frames = site.report().frames_available;
    for seed in 0..50 {
        let mut chance = fastrand::Rng::with_seed(seed);
        let mut bad = site.attach("bad");
        open_some(&mut bad);
        let words = bad.memory.regions()[0].words();
        // First a few words, then more and more of them.
        for burst in 0..200 {
            for _ in 0..burst {
                let word = &words[chance.usize(..words.len())];
                let value = match chance.u8(..4) {
                    0 => u64::MAX,
                    1 => chance.u64(..16),
                    2 => word.load(Ordering::Relaxed).wrapping_add(chance.u64(..5)),
                    _ => chance.u64(..),
                };
                word.store(value, Ordering::Relaxed);
            }
            bad.wake_daemon();
        }
        behaves(&mut good);
        drop(bad);
        site.wait_until_gone("bad");
    }
    site.wait_for_frames(frames);
}

#[test]
fn who_asks_and_never_listens_stops_nobody() {
    let site = Site::new();
    let mut good = site.attach("good");
    let mut deaf = site.attach("deaf");
    // Far more than the ring of notices holds answers for.
    let mut tag = 0;
    let mut ask = |deaf: &mut Attachment| {
        tag += 1;
        let command = crate::contract::command::Command::Bind {
            tag,
            local: own(1),
            together: None,
            options: Default::default(),
        };
        let pushed = deaf.commands.push(&command.to_words()).unwrap();
        deaf.commands.publish();
        deaf.wake_daemon();
        pushed
    };
    let began = Instant::now();
    let mut refused = 0;
    while refused < 100 {
        assert!(began.elapsed() < LIMIT);
        refused += u32::from(!ask(&mut deaf));
    }
    behaves(&mut good);
    assert_eq!(site.report().applications.len(), 2, "it is no reason to let it go");
    drop(deaf);
    site.wait_until_gone("deaf");
    behaves(&mut good);
}

#[test]
fn who_lies_is_let_go_at_once() {
    let site = Site::new();
    let mut good = site.attach("good");
    let mut liar = site.attach("liar");
    // A command that there is not.
    liar.commands.push(&[0xff; crate::contract::command::COMMAND_WORDS]).unwrap();
    liar.commands.publish();
    liar.wake_daemon();
    site.wait_until_gone("liar");
    let refused = liar.bind_udp(own(7), Default::default()).unwrap_err();
    assert_eq!(refused.kind(), io::ErrorKind::ConnectionAborted);
    behaves(&mut good);
}

#[test]
fn nobody_inherits_without_the_ticket() {
    let site = Site::new();
    let mut owner = site.attach("owner");
    open_some(&mut owner);
    let ticket = owner.ticket;
    let mut stranger = site.attach("stranger");
    // It may have its own, and neither a number of its own making nor zeroes.
    drop(stranger.heir().unwrap());
    stranger.ticket = Ticket::new().unwrap();
    let error = stranger.heir().unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::PermissionDenied, "{error}");
    assert!(error.to_string().contains("ticket"), "{error}");
    assert!(site.report().applications.iter().all(|app| match app.identity.name.as_str() {
        "owner" => app.sockets.iter().all(|socket| socket.holders == 1),
        _ => app.sockets.is_empty(),
    }));
    drop(owner);
    site.wait_until_gone("owner");
    stranger.ticket = ticket;
    assert!(stranger.heir().is_err(), "it ends with who it was given to");
    behaves(&mut site.attach("good"));
}

#[test]
fn whoever_asks_while_the_daemon_falls_asleep_is_heard() {
    let site = Site::new();
    let mut chance = fastrand::Rng::with_seed(7);
    for _ in 0..3_000 {
        // It is asked at every moment on its way to sleep.
        let (began, wait_ns) = (Instant::now(), chance.u128(..150_000));
        while began.elapsed().as_nanos() < wait_ns {
            std::hint::spin_loop();
        }
        site.report();
    }
}

#[test]
fn heirs_that_lie_harm_none_but_their_own() {
    let site = Site::new();
    let mut good = site.attach("good");
    let frames = site.report().frames_available;
    for seed in 0..50 {
        let mut chance = fastrand::Rng::with_seed(seed);
        let mut parent = site.attach("bad");
        open_some(&mut parent);
        let mut heirs = vec![parent.heir().unwrap(), parent.heir().unwrap()];
        heirs.push(parent);
        for burst in 0..100 {
            for app in &mut heirs {
                let words = app.memory.regions()[0].words();
                for _ in 0..burst {
                    words[chance.usize(..words.len())].store(chance.u64(..20), Ordering::Relaxed);
                }
                // It may be gone already.
                let _ = app.nudge();
            }
            if burst == 50 {
                heirs.swap_remove(chance.usize(..heirs.len()));
            }
        }
        drop(heirs);
        site.wait_until_gone("bad");
        behaves(&mut good);
    }
    site.wait_for_frames(frames);
}

#[test]
fn whoever_has_all_its_ports_gets_no_more() {
    let site = Site::with_quota(Quota { ports: 2, ..Quota::default() });
    let mut app = site.attach("greedy");
    let local = |port| SocketAddr::new("192.0.2.1".parse().unwrap(), port);
    let bound = app.bind_udp(local(1), Default::default()).unwrap();
    app.listen(local(1), 1, TcpOptions::default()).unwrap();
    let refused = app.bind_udp(local(2), Default::default()).unwrap_err();
    assert_eq!(refused.kind(), io::ErrorKind::QuotaExceeded);
    let refused = app.listen(local(2), 1, TcpOptions::default()).unwrap_err();
    assert_eq!(refused.kind(), io::ErrorKind::QuotaExceeded);
    // Connections are no ports of its own.
    app.connect_tcp(None, "192.0.2.9:80".parse().unwrap(), TcpOptions::default()).unwrap();
    app.close(bound, false);
    app.listen(local(2), 1, TcpOptions::default()).unwrap();
    // What one has is not taken from others.
    let mut other = site.attach("other");
    other.bind_udp(local(3), Default::default()).unwrap();
}

#[test]
fn whoever_has_all_its_memory_gets_no_more_sockets() {
    // Two sockets of eight, with one way of each in use.
    let site = Site::with_quota(Quota { memory_bytes: 8192, ..Quota::default() });
    let mut app = site.attach("greedy");
    let peer = Some("192.0.2.9:9".parse().unwrap());
    // What has gone through before is given back, be it ever so little.
    for port in 1..20 {
        let socket = app.bind_udp(own(port), Default::default()).unwrap();
        app.send_datagram(socket, b"little", peer, None).unwrap();
        app.close(socket, false);
    }
    let mut full = Vec::new();
    let refused = loop {
        match app.bind_udp(own(100 + full.len() as u16), Default::default()) {
            Ok(socket) => full.push(socket),
            Err(refused) => break refused,
        }
        app.send_datagram(full[full.len() - 1], &[0; 1400], peer, None).unwrap();
    };
    assert_eq!((refused.kind(), full.len()), (io::ErrorKind::QuotaExceeded, 2));
    let tcp = |app: &mut Attachment| app.listen(own(80), 1, TcpOptions::default());
    assert_eq!(tcp(&mut app).unwrap_err().kind(), io::ErrorKind::QuotaExceeded);
    assert!(site.report().applications[0].memory_bytes >= 8192);
    // What one has is not taken from others, ...
    behaves(&mut site.attach("other"));
    // ... and what it gives up it may have again.
    app.close(full.remove(0), false);
    tcp(&mut app).unwrap();
}

#[test]
fn a_small_share_is_enough_when_nobody_else_wants_anything() {
    let site = Site::with_quota(Quota { cpu_share_percent: 1, ..Quota::default() });
    let mut apps = [site.attach("one"), site.attach("other")];
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
    let done = site.report().applications.iter().map(|app| app.commands).sum::<u64>();
    assert_eq!(done, 2 * (2 * 2000 + 1));
}

#[test]
fn who_says_nothing_at_the_door_keeps_nobody_waiting() {
    let site = Site::new();
    let silent: Vec<_> = (0..100).map(|_| UnixStream::connect(&site.path).unwrap()).collect();
    let mut app = site.attach("app");
    app.ping().unwrap();
    drop(silent);
    assert_eq!(site.report().applications.len(), 1);
}
