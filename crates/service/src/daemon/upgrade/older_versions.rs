//! Upgrades between daemons of different versions, while programs of different versions are
//! attached. The state of the older daemon and the messages of the older program are those of the
//! golden files. The handover and the exchange of bytes are real.

#[path = "../../../tests/support/mod.rs"]
mod support;

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::thread::{self, JoinHandle};
use std::time::Instant;

use tidegate_memory::shared::SealedBytes;
use tidegate_stack::TcpOptions;

use self::support::upgrade::{UpgradeTestbed, bytes, receive_some, send_rest};
use self::support::{FAMILIES, TIMEOUT, address, wait_until, wait_until_connected};
use super::protocol::{Predecessor, ReceivedState, Successor};
use super::snapshot::{DaemonSnapshot, STATE_FORMAT};
use crate::attachment::Attachment;
use crate::daemon::DaemonReport;
use crate::ipc::command::Handle;
use crate::ipc::handshake::{Hello, receive_hello, send_hello};
use crate::ipc::version::ProtocolVersion;

const OLDEST: ProtocolVersion = ProtocolVersion::OLDEST;
const CURRENT: ProtocolVersion = ProtocolVersion::CURRENT;

/// Stands between the daemon at `old` and the next one, which connects to `path`. Changes the bytes
/// of the state.
fn relay(old: &Path, path: &Path, change: fn(&[u8]) -> Vec<u8>) -> JoinHandle<io::Result<()>> {
    let listener = UnixListener::bind(path).unwrap();
    let mut old = Successor::connect(old).unwrap();
    thread::spawn(move || {
        let (connection, _) = listener.accept()?;
        let (_, hello) = receive_hello(connection.as_fd())?;
        assert!(matches!(hello, Hello::Upgrade(STATE_FORMAT)), "{hello:?}");
        let ReceivedState { state, listener, descriptors, .. } = old.request_state()?;
        let changed = change(&state);
        let state = SealedBytes::create(|file| file.write_all(&changed))?;
        let fds: Vec<BorrowedFd<'_>> = descriptors.iter().map(AsFd::as_fd).collect();
        Predecessor::new(connection)?.hand_over(state.as_fd(), &listener, &fds)?;
        old.commit()
    })
}

/// State as a daemon of format 8 hands it over.
fn to_format_8(state: &[u8]) -> Vec<u8> {
    DaemonSnapshot::decode(state).unwrap().to_format_8()
}

fn to_next_format(state: &[u8]) -> Vec<u8> {
    let mut state = state.to_vec();
    state[7] = STATE_FORMAT + 1;
    state
}

/// Two attached programs with a connection.
struct Pair {
    peer: Attachment,
    app: Attachment,
    ours: Handle,
    theirs: Handle,
    listener: Handle,
}

impl Pair {
    fn new(testbed: &UpgradeTestbed, protocol: ProtocolVersion, family: [&str; 2]) -> Self {
        let mut peer = testbed.attach(0);
        let mut app = Attachment::connect_speaking(protocol, &testbed.path(), "older").unwrap();
        let to = address(1, family, 80);
        let listener = app.listen(to, 8, TcpOptions::default()).unwrap();
        let ours = peer.connect_tcp(None, to, TcpOptions::default()).unwrap();
        wait_until_connected(&mut peer, ours).unwrap();
        let (theirs, _) = wait_until(&mut app, |app| app.accept(listener)).unwrap();
        Self { peer, app, ours, theirs, listener }
    }

    /// Exchanges bytes in both directions; calls `meanwhile` once, while some are in flight.
    fn exchange(&mut self, mut meanwhile: impl FnMut()) {
        let data = bytes(1_000_000);
        let (mut sent, mut got) = ([0; 2], [Vec::new(), Vec::new()]);
        let began = Instant::now();
        let mut is_called = false;
        while got.iter().any(|got| got.len() < data.len()) {
            assert!(began.elapsed() < TIMEOUT, "{sent:?}");
            if got[1].len() > 100_000 && !is_called {
                is_called = true;
                meanwhile();
            }
            let Self { peer, app, ours, theirs, .. } = self;
            send_rest(peer, *ours, &data, &mut sent[0]);
            send_rest(app, *theirs, &data, &mut sent[1]);
            receive_some(peer, *ours, &mut got[0]);
            receive_some(app, *theirs, &mut got[1]);
            peer.poll().unwrap();
            app.poll().unwrap();
        }
        assert!(is_called && got[0] == data && got[1] == data);
    }
}

/// Protocols and releases of the attached programs, as the daemon reports them.
fn libraries(testbed: &UpgradeTestbed) -> Vec<(ProtocolVersion, String)> {
    let report = testbed.second.as_ref().unwrap().report().unwrap();
    let libraries = report.applications.into_iter().map(|app| app.identity.library);
    let mut libraries: Vec<_> =
        libraries.map(|library| (library.protocol, library.release)).collect();
    libraries.sort();
    libraries
}

#[test]
fn program_of_the_version_before_goes_on_across_upgrades() {
    for (family, cores) in FAMILIES.into_iter().zip([vec![1], vec![3, 1]]) {
        let mut testbed = UpgradeTestbed::new(cores);
        let mut pair = Pair::new(&testbed, OLDEST, family);
        let udp = pair.app.bind_udp(address(1, family, 7), Default::default()).unwrap();
        let from = pair.peer.bind_udp(address(0, family, 0), Default::default()).unwrap();
        let to = address(1, family, 7);
        pair.peer.send_datagram(from, b"unread", Some(to), None).unwrap();
        let older = [(OLDEST, String::new())];
        assert_eq!(libraries(&testbed), older);
        // From the format before to this one, and from this one to itself.
        let path = testbed.path().with_file_name("relay.sock");
        let relay = relay(&testbed.path(), &path, to_format_8);
        pair.exchange(|| testbed.upgrade_through(&path).unwrap());
        relay.join().unwrap().unwrap();
        pair.exchange(|| testbed.upgrade());
        assert_eq!(libraries(&testbed), older);
        let mut buf = [0; 16];
        let came = wait_until(&mut pair.app, |app| app.recv_datagram(udp, &mut buf, false));
        assert_eq!(&buf[..came.unwrap().len], b"unread");
        // Further attachments of both versions, and a fork child, beside the first one.
        let child = pair.app.fork_child().unwrap();
        let another = pair.app.connect_another().unwrap();
        let newer = testbed.attach(1);
        let own = (CURRENT, env!("CARGO_PKG_VERSION").to_owned());
        let all = [&older[..], &older, &older, &[own]].concat();
        assert_eq!(libraries(&testbed), all);
        testbed.upgrade();
        assert_eq!(libraries(&testbed), all);
        drop((child, another, newer));
        // The listener goes on, too.
        let to = address(1, family, 80);
        let late = pair.peer.connect_tcp(None, to, TcpOptions::default()).unwrap();
        wait_until_connected(&mut pair.peer, late).unwrap();
        let listener = pair.listener;
        wait_until(&mut pair.app, |app| app.accept(listener)).unwrap();
    }
}

#[test]
fn socket_passes_between_programs_of_different_versions() {
    for (family, protocols) in FAMILIES.into_iter().zip([[OLDEST, CURRENT], [CURRENT, OLDEST]]) {
        let testbed = UpgradeTestbed::new(vec![1]);
        let [sender, receiver] = protocols;
        let mut pair = Pair::new(&testbed, sender, family);
        let mut other = Attachment::connect_speaking(receiver, &testbed.path(), "other").unwrap();
        let fd = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        pair.app.send_socket(pair.theirs, crate::Shard::ONLY, fd.as_fd()).unwrap();
        let received = other.receive_socket(0, fd.as_fd()).unwrap().socket;
        pair.app.close(pair.theirs, false);
        pair.peer.send(pair.ours, b"passed").unwrap();
        let mut buf = [0; 16];
        let len = wait_until(&mut other, |app| app.recv(received, &mut buf, false)).unwrap();
        assert_eq!(&buf[..len], b"passed");
    }
}

#[test]
fn state_of_a_newer_daemon_is_refused_and_nothing_is_lost() {
    for family in FAMILIES {
        let mut testbed = UpgradeTestbed::new(vec![1]);
        let mut pair = Pair::new(&testbed, CURRENT, family);
        let path = testbed.path().with_file_name("relay.sock");
        let relay = relay(&testbed.path(), &path, to_next_format);
        pair.exchange(|| {
            let refused = testbed.upgrade_through(&path).unwrap_err().to_string();
            assert!(refused.contains(&format!("state format {}", STATE_FORMAT + 1)), "{refused}");
        });
        assert!(relay.join().unwrap().is_err());
        // The daemon goes on, and can still be upgraded.
        pair.exchange(|| testbed.upgrade());
    }
}

/// Answer of the daemon to a daemon that reads states up to `format`, and wants to take over.
fn answer(testbed: &UpgradeTestbed, format: u8) -> String {
    let mut connection = UnixStream::connect(testbed.path()).unwrap();
    send_hello(connection.as_fd(), CURRENT, &Hello::Upgrade(format)).unwrap();
    let mut answer = Vec::new();
    connection.read_to_end(&mut answer).unwrap();
    String::from_utf8_lossy(&answer).into_owned()
}

#[test]
fn older_daemon_is_refused_before_anything_stops() {
    for family in FAMILIES {
        let testbed = UpgradeTestbed::new(vec![1]);
        let mut pair = Pair::new(&testbed, OLDEST, family);
        let openings = testbed.shared_device.openings();
        // A daemon of state format 8 says nothing about formats.
        for format in [0, STATE_FORMAT - 1] {
            let refused = answer(&testbed, format);
            assert!(refused.contains(&format!("has state format {STATE_FORMAT},")), "{refused}");
        }
        assert_eq!(testbed.shared_device.openings(), openings, "the daemon closed its device");
        pair.exchange(|| ());
    }
}

#[test]
fn unserved_attach_protocols_are_refused_by_number() {
    let testbed = UpgradeTestbed::new(vec![1]);
    for (number, remedy) in [
        (OLDEST.number() - 1, "restart the program with the library of the daemon's release"),
        (CURRENT.number() + 1, "upgrade the daemon first, by `tidegate upgrade`"),
    ] {
        let mut connection = UnixStream::connect(testbed.path()).unwrap();
        // Attach, without a name.
        let hello = [&b"tidegat"[..], &[number, 1], &[0; 64]].concat();
        connection.write_all(&hello).unwrap();
        let mut answer = String::new();
        connection.read_to_string(&mut answer).unwrap();
        assert!(answer.contains(&format!("attach protocol {number},")), "{answer}");
        assert!(answer.contains(remedy), "{answer}");
    }
    testbed.attach(1).ping().unwrap();
}

#[test]
fn daemon_that_cannot_be_upgraded_is_known_by_its_report() {
    let testbed = UpgradeTestbed::new(vec![1]);
    let _app = Attachment::connect_speaking(OLDEST, &testbed.path(), "older").unwrap();
    let report = DaemonReport::query(&testbed.path()).unwrap();
    report.check_upgrade().unwrap();
    assert_eq!(report.older_applications().count(), 1);
    let check = |change: fn(&mut serde_json::Value)| {
        let mut report = serde_json::to_value(&report).unwrap();
        change(&mut report);
        let report: DaemonReport = serde_json::from_value(report).unwrap();
        report.check_upgrade().map_err(|error| error.to_string())
    };
    // A daemon of state format 8 reports neither versions nor libraries.
    let of_format_8 = check(|report| {
        report.as_object_mut().unwrap().remove("versions").unwrap();
        let app = report["applications"][0]["identity"].as_object_mut().unwrap();
        app.remove("library").unwrap();
    });
    assert_eq!(of_format_8, Ok(()));
    let newer = check(|report| report["versions"]["state_format"] = (STATE_FORMAT + 1).into());
    assert!(newer.unwrap_err().contains("newer version"));
    let older = check(|report| report["versions"]["state_format"] = 7.into());
    assert!(older.unwrap_err().contains("in between"));
    let program = check(|report| {
        report["applications"][0]["identity"]["library"]["protocol"] = 4.into();
    });
    let refused = program.unwrap_err();
    assert!(refused.starts_with("older (process"), "{refused}");
    assert!(refused.contains("attach protocol 4,"), "{refused}");
}
