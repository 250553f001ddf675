//! Tests with hostile applications: they may harm themselves, but no other application.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
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
use crate::daemon::{AttachConfig, Daemon, DaemonReport, Quota};
use crate::ipc::command::Command;
use crate::ipc::fd_passing::send_with_fds;
use crate::ipc::handshake::{Hello, Shard, TransferOperation, send_hello};
use crate::ipc::layout::Geometry;
use crate::ipc::takeover_token::TakeoverToken;
use crate::ipc::version::ProtocolVersion;

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
        let attach = AttachConfig { quota, ..AttachConfig::new(path.clone(), GEOMETRY) };
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
        let command =
            Command::Bind { tag, local: local(1), share_group: None, options: Default::default() };
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

#[test]
fn attachments_are_limited() {
    let testbed = DaemonTestbed::with_quota(Quota { max_attachments: 3, ..Quota::default() });
    let mut apps: Vec<_> = ["a", "b", "c"].map(|name| testbed.attach(name)).into();
    let refused = Attachment::connect(&testbed.path, "d").err().unwrap();
    assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
    assert!(refused.to_string().contains("--max-attachments"), "{refused}");
    for app in &mut apps {
        app.ping().unwrap();
    }
    apps.pop();
    testbed.wait_until_gone("c");
    testbed.attach("d").ping().unwrap();
}

#[test]
fn sleeping_applications_are_served_when_they_wake_the_core() {
    let testbed = DaemonTestbed::new();
    let mut apps: Vec<_> = (0..40).map(|n| testbed.attach(&format!("app{n}"))).collect();
    for round in 0..20 {
        // Meanwhile the others have no command.
        for _ in 0..500 {
            apps[round].ping().unwrap();
        }
        for app in apps.iter_mut().rev() {
            app.ping().unwrap();
        }
    }
    // The exit of an application that sleeps is noticed, too.
    drop(apps.split_off(20));
    testbed.wait_until_gone("app39");
    assert_well_served(&mut apps[0]);
    drop(apps);
    testbed.wait_until_gone("app0");
}

/// Kernel socket whose last close blocks until its peer, which is returned too, receives or
/// closes.
fn lingering_socket() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (far, _) = listener.accept().unwrap();
    near.set_nonblocking(true).unwrap();
    while near.write(&[0; 1 << 16]).is_ok() {}
    rustix::net::sockopt::set_socket_linger(&near, Some(Duration::from_secs(600))).unwrap();
    (near, far)
}

/// Closes a lingering socket. The daemon may have closed its descriptor already; then this close
/// waits for the other end, on a thread of its own.
fn close_lingering(socket: impl Send + 'static) {
    std::thread::spawn(move || drop(socket));
}

/// Receives everything until the last holder of the other end has closed it.
fn wait_until_closed(mut far: TcpStream) {
    far.set_read_timeout(Some(TIMEOUT)).unwrap();
    let mut bytes = vec![0; 1 << 16];
    while far.read(&mut bytes).unwrap() > 0 {}
}

/// Wakes the daemon again and again, as an application with commands does.
fn wake_often(app: &mut Attachment) {
    for _ in 0..200 {
        app.wake_daemon();
        app.ping().unwrap();
    }
}

#[test]
fn descriptor_on_a_connection_delays_no_other_application() {
    let testbed = DaemonTestbed::new();
    let mut good = testbed.attach("good");
    let mut hostile = testbed.attach("bad");
    let (near, far) = lingering_socket();
    send_with_fds(hostile.connection.as_fd(), &[0], &[near.as_fd()]).unwrap();
    drop(near);
    wake_often(&mut hostile);
    assert_well_served(&mut good);
    // A worker closes the connection, and so the descriptor that waits there.
    drop(hostile);
    testbed.wait_until_gone("bad");
    assert_well_served(&mut good);
    wait_until_closed(far);
}

#[test]
fn descriptors_of_first_messages_delay_no_other_application() {
    let testbed = DaemonTestbed::new();
    let token = testbed.attach("bad").token;
    let mut peers = Vec::new();
    for receive in [true, false] {
        let (near, far) = lingering_socket();
        let connection = UnixStream::connect(&testbed.path).unwrap();
        if receive {
            // A request with this descriptor, which fails.
            let transfer = TransferOperation::Receive(0);
            let hello = Hello::Transfer(token, transfer, near.into());
            send_hello(connection.as_fd(), ProtocolVersion::CURRENT, &hello).unwrap();
            close_lingering(hello);
        } else {
            send_with_fds(connection.as_fd(), b"no message", &[near.as_fd()]).unwrap();
            close_lingering(near);
        }
        peers.push((connection, far));
    }
    let mut good = testbed.attach("good");
    assert_well_served(&mut good);
    for (connection, far) in peers {
        drop(connection);
        wait_until_closed(far);
    }
}

#[test]
fn kernel_socket_of_an_exited_application_delays_no_other_application() {
    let testbed = DaemonTestbed::new();
    let mut good = testbed.attach("good");
    let mut hostile = testbed.attach("bad");
    let (near, far) = lingering_socket();
    // A connection gives no right to its port, and a worker closes it.
    let error = hostile.reserve_port(Shard::ONLY, near.as_fd()).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
    close_lingering(near);
    drop(hostile);
    testbed.wait_until_gone("bad");
    assert_well_served(&mut good);
    wait_until_closed(far);
}

#[test]
fn full_event_descriptor_that_blocks_delays_no_other_application() {
    let testbed = DaemonTestbed::new();
    let mut good = testbed.attach("good");
    let mut hostile = testbed.attach("bad");
    for event_fd in hostile.event_fds.in_order() {
        rustix::io::write(event_fd, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        rustix::fs::fcntl_setfl(event_fd, rustix::fs::OFlags::empty()).unwrap();
    }
    // Each answer wakes an application that asks for it.
    for _ in 0..100 {
        hostile.application_sleeps.request();
        hostile.commands.push(&Command::Ping { tag: Some(1) }.to_words()).unwrap();
        hostile.commands.publish();
        assert_well_served(&mut good);
    }
}

#[test]
fn daemon_is_woken_any_number_of_times() {
    let testbed = DaemonTestbed::new();
    let mut app = testbed.attach("app");
    // Each while the daemon may be asleep.
    for _ in 0..2000 {
        app.wake_daemon();
        app.ping().unwrap();
    }
}

#[test]
fn core_leaves_the_memory_file_of_an_application_to_workers() {
    let testbed = DaemonTestbed::new();
    let mut app = testbed.attach("app");
    let peer = Some("192.0.2.9:9".parse().unwrap());
    let hold = testbed.daemon.block_workers(rustix::process::geteuid().as_raw());
    let mut sockets: Vec<_> = (1..=u16::try_from(GEOMETRY.sockets).unwrap())
        .map(|port| app.bind_udp(local(port), Default::default()).unwrap())
        .collect();
    let used = sockets.pop().unwrap();
    // Beyond the threshold from which memory is discarded.
    for _ in 0..20 {
        let mut sent = app.send_datagram(used, &[1; 1400], peer, None);
        while sent.is_err() {
            app.ping().unwrap();
            sent = app.send_datagram(used, &[1; 1400], peer, None);
        }
    }
    app.ping().unwrap();
    app.close(used, false);
    app.ping().unwrap();
    let memory = app.memory.clone();
    let allocated = memory.allocated_bytes().unwrap();
    assert!(allocated > 0, "the core has discarded the memory");
    // The slot is free once its memory is discarded: until then the command waits.
    let bound = std::thread::scope(|scope| {
        let binding = scope.spawn(|| app.bind_udp(local(100), Default::default()));
        drop(hold);
        binding.join().unwrap()
    });
    bound.unwrap();
    assert!(memory.allocated_bytes().unwrap() < allocated);
}
