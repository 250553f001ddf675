//! Snapshots of a daemon: round trips, and snapshots that are inconsistent or damaged.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use tidegate_device::steering::TransportProtocol;
use tidegate_memory::shared::Region;
use tidegate_memory::{Arena, ArenaConfig, FrameSize};
use tidegate_stack::{Config, Stack};
use tidegate_wire::MacAddr;

use super::fuzz as daemon_state;
use super::restore::{RestoredCore, restore};
use super::snapshot::{ClaimSnapshot, DaemonSnapshot, DeviceSnapshot};
use crate::daemon::application::kernel_sockets::KernelSocketSnapshot;
use crate::daemon::application::snapshot::{ApplicationSnapshot, EntrySnapshot};
use crate::daemon::ids::{Holder, Identity, PayloadBytes, ProtocolSnapshot};
use crate::daemon::quota::AppSettings;
use crate::daemon::socket::pending_datagram::DatagramSnapshot;
use crate::daemon::socket::snapshot::{KindSnapshot, SocketSnapshot};
use crate::daemon::transfer::table::{
    FdCookie, IN_TRANSIT, SocketTransfer, TransferSnapshot, TransferTable,
};
use crate::daemon::workers::UserWorkers;
use crate::ipc::command::{COMMAND_WORDS, Command, Handle};
use crate::ipc::handshake::Shard;
use crate::ipc::layout::Geometry;
use crate::ipc::status::{SocketState, Status};
use crate::ipc::version::Library;

const GEOMETRY: Geometry = Geometry { sockets: 4, tcp_bytes: 4096, udp_bytes: 4096 };

/// Snapshot of one application with a socket of each kind.
fn sample_snapshot() -> DaemonSnapshot<'static> {
    let arena = ArenaConfig { frames: 64, frame_size: FrameSize::K2, hugepages: false };
    let arena = Arena::new(arena).unwrap();
    let config = Config::ethernet(MacAddr([2, 0, 0, 0, 0, 1]), [7; 16])
        .addresses(vec!["192.0.2.1/24".parse().unwrap()]);
    let stack = Stack::new(config, 0).unwrap().save(0, &arena);
    let handle = |slot| Handle { slot, generation: 1 };
    let held = DatagramSnapshot {
        remote: "192.0.2.2:53".parse().unwrap(),
        local: "192.0.2.1".parse().unwrap(),
        hop_limit: 63,
        traffic_class: 0,
        bytes: vec![7; 20],
    };
    let payload_bytes = PayloadBytes { to_app: 1, from_app: 2 };
    let kinds = [
        KindSnapshot::Udp { id: 1, pending: Some(held), payload_bytes },
        KindSnapshot::Listener { id: 1 << 32 },
        KindSnapshot::Stream { id: 3, shutdown_pending: false, is_closed: true, payload_bytes },
    ];
    let phase = Status { state: SocketState::Connected, ..Status::default() };
    let socket = |(place, kind)| {
        let slot = place as u32;
        Some(SocketSnapshot {
            handle: handle(slot),
            kind,
            memory: 0,
            status: phase.to_word(),
            origin: Holder { app: 0, slot },
            holders: match slot {
                1 => vec![Holder { app: 0, slot }, IN_TRANSIT],
                _ => vec![Holder { app: 0, slot }],
            },
            is_corrupt: false,
            claim: (slot == 1).then_some(0),
        })
    };
    let entry =
        |slot| EntrySnapshot { handle: handle(slot), key: slot, is_notification_queued: false };
    let application = ApplicationSnapshot {
        identity: Identity { pid: 1, uid: 2, name: "test".to_owned(), library: Library::default() },
        token: [9; 16],
        memory: 0,
        entries: (0..3).map(entry).collect(),
        generations: vec![1; 3],
        free_slots: vec![3],
        queued_notifications: vec![[1, 0, 0, 0, 0, 0, 0, 0]],
        deferred_command: Some(
            Command::Close { socket: handle(2), reset_on_close: true }.to_words(),
        ),
        commands_taken: 5,
        payload_bytes,
        kernel_sockets: vec![KernelSocketSnapshot {
            protocol: ProtocolSnapshot::Udp,
            local: "192.0.2.1:53".parse().unwrap(),
            is_dual_stack: false,
            namespace: Some(3),
            cookie: 4,
            shard: (1, 2),
        }],
    };
    DaemonSnapshot {
        stack,
        mac: [2, 0, 0, 0, 0, 1],
        memories: vec![GEOMETRY],
        applications: vec![Some(application), None],
        sockets: kinds.into_iter().enumerate().map(socket).collect(),
        transfers: vec![TransferSnapshot {
            fd_cookie: FdCookie { cookie: 7, shard: 1 },
            key: 1,
            uid: 2,
            pending_receivers: 1,
            is_shared: false,
            shards: 2,
        }],
        claims: vec![ClaimSnapshot {
            protocol: ProtocolSnapshot::Tcp,
            local: "192.0.2.1:80".parse().unwrap(),
            addresses: vec!["192.0.2.1".parse().unwrap()],
            has_kernel_socket: true,
        }],
        closing: vec![(9, 0)],
        device: Some(DeviceSnapshot::XdpLink { native: true }),
        reservations: 1,
    }
}

impl DaemonSnapshot<'_> {
    fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        self.encode(&mut bytes).unwrap();
        bytes
    }
}

struct TestFds {
    regions: [Region; 2],
    connection: UnixStream,
}

impl TestFds {
    fn new() -> Self {
        let region = |words| Region::reserve(words).unwrap();
        let regions = [region(GEOMETRY.control_words()), region(GEOMETRY.data_words())];
        Self { regions, connection: UnixStream::pair().unwrap().0 }
    }

    fn restore(&self, state: DaemonSnapshot<'_>) -> io::Result<RestoredCore> {
        // Any descriptor can stand for the kernel's ones.
        let others = [self.connection.as_fd(); 7];
        let fds = self.regions.iter().map(AsFd::as_fd).chain(others);
        let fds = fds.map(|fd| fd.try_clone_to_owned().unwrap()).collect();
        let (workers, _) = UserWorkers::new();
        restore(state, fds, AppSettings::default(), &workers).map(|(_, restored, _)| restored)
    }
}

#[test]
fn snapshot_round_trips() {
    let kit = TestFds::new();
    let state = sample_snapshot();
    let bytes = state.to_bytes();
    let read = DaemonSnapshot::decode(&bytes).unwrap();
    assert_eq!(read.to_bytes(), bytes);
    let mut restored = kit.restore(read).unwrap();
    let app = restored.apps[0].as_mut().unwrap();
    assert_eq!(app.sockets().count(), 3);
    assert_eq!(app.slots.reserve().unwrap(), Handle { slot: 3, generation: 1 });
    assert!(!app.has_space());
    assert_eq!(app.save(0).kernel_sockets.len(), 1);
    let local = "192.0.2.1:53".parse().unwrap();
    let kernel_socket = app.kernel_sockets.take(TransportProtocol::Udp, local, false).unwrap();
    assert_eq!((kernel_socket.cookie, kernel_socket.shard), (4, Shard { index: 1, count: 2 }));
    assert!(app.kernel_sockets.take(TransportProtocol::Udp, local, false).is_none());
    assert_eq!(restored.sockets.keys(), [0, 1, 2]);
    let again = |change: fn(&mut TransferSnapshot), fits: fn(&SocketTransfer) -> bool| {
        let mut saved = restored.transfers.clone();
        change(&mut saved[0]);
        TransferTable::restore(saved, 5, fits)
    };
    let transfers = again(|_| (), |transfer| transfer.key == 1).unwrap();
    assert_eq!(transfers.next_expiry_ns(), Some(60_000_000_005));
    assert!(again(|_| (), |_| false).is_err());
    assert!(
        again(|saved| saved.pending_receivers = 0, |_| true).is_err(),
        "no application can receive it"
    );
    let shared =
        again(|saved| (saved.pending_receivers, saved.is_shared) = (0, true), |_| true).unwrap();
    assert_eq!(
        (shared.next_expiry_ns(), shared.key(FdCookie { cookie: 7, shard: 1 })),
        (None, Some(1))
    );
    assert!(restored.sockets.get(2).unwrap().is_closed());
    assert!(DaemonSnapshot::decode(&bytes[..bytes.len() - 1]).is_err(), "truncated");
    assert!(DaemonSnapshot::decode(&[&bytes[..], &[0]].concat()).is_err(), "trailing bytes");
    assert!(DaemonSnapshot::decode(b"tidestt\x01").is_err(), "another version");
}

#[test]
fn rejects_inconsistent_snapshots() {
    let kit = TestFds::new();
    let refused = |change: fn(&mut DaemonSnapshot<'static>)| {
        let mut state = sample_snapshot();
        change(&mut state);
        kit.restore(state).map(|_| ()).unwrap_err().to_string()
    };
    fn app<'s>(state: &'s mut DaemonSnapshot<'_>) -> &'s mut ApplicationSnapshot {
        state.applications[0].as_mut().unwrap()
    }
    fn socket<'s>(state: &'s mut DaemonSnapshot<'_>) -> &'s mut SocketSnapshot {
        state.sockets[0].as_mut().unwrap()
    }
    let corruptions: [fn(&mut DaemonSnapshot<'static>); 22] = [
        |state| state.memories.clear(),
        |state| state.memories[0].tcp_bytes = 5,
        |state| state.memories[0].sockets = 1 << 19,
        |state| state.applications.push(state.applications[0].clone()),
        |state| app(state).memory = 1,
        |state| app(state).kernel_sockets.clear(),
        |state| app(state).kernel_sockets = vec![app(state).kernel_sockets[0]; 65],
        |state| app(state).generations = vec![1; 5],
        |state| app(state).free_slots = vec![4],
        |state| app(state).entries[0].handle.slot = 7,
        |state| app(state).entries[1].handle.slot = 0,
        |state| app(state).entries[0].key = 9,
        |state| app(state).queued_notifications[0] = [99; 8],
        |state| socket(state).memory = u32::MAX,
        |state| socket(state).holders.push(Holder { app: 1, slot: 0 }),
        |state| socket(state).handle.slot = 4,
        |state| state.transfers.clear(),
        |state| app(state).deferred_command = Some([99; COMMAND_WORDS]),
        |state| socket(state).claim = Some(1),
        |state| state.closing[0].1 = u32::MAX,
        |state| state.claims[0].has_kernel_socket = false,
        |state| state.device = None,
    ];
    for (number, corruption) in corruptions.into_iter().enumerate() {
        assert!(!refused(corruption).is_empty(), "{number}");
    }
}

#[test]
fn damaged_snapshots_never_panic() {
    let bytes = sample_snapshot().to_bytes();
    let mut reached = BTreeSet::new();
    for at in 0..bytes.len() {
        for flip in [1, 0x40, 0x80, 0xff] {
            let mut damaged = bytes.clone();
            damaged[at] ^= flip;
            reached.insert(daemon_state::check(&damaged));
        }
    }
    assert_eq!(reached.len(), 3, "{reached:?}");
}

fn corpus() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/daemon_state")
}

/// The name of each seed tells the expected outcome; those that a fuzzer found have the hash of
/// their content.
#[test]
fn corpus_of_daemon_state() {
    let mut reached = BTreeSet::new();
    for entry in std::fs::read_dir(corpus()).expect("the corpus is in the repository") {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let expected = match name.split('_').next() {
            Some("good") => daemon_state::Outcome::Accepted,
            Some("refused") => daemon_state::Outcome::Refused,
            _ => daemon_state::Outcome::Unreadable,
        };
        let outcome = daemon_state::check(&std::fs::read(path).unwrap());
        let is_found = name.len() == 40;
        assert!(is_found || outcome == expected, "{name} is {outcome:?}: has the format changed?");
        reached.insert(outcome);
    }
    assert_eq!(reached.len(), 3, "{reached:?}");
}

/// After a change of the format, `TIDEGATE_GOLDEN=write cargo test -p tidegate-service` writes
/// the seeds anew.
#[test]
fn corpus_seeds_match_the_snapshot_format() {
    let mut empty = sample_snapshot();
    (empty.memories, empty.applications, empty.sockets) = Default::default();
    empty.transfers.clear();
    (empty.claims, empty.closing, empty.device) = Default::default();
    empty.reservations = 0;
    let mut inconsistent = sample_snapshot();
    inconsistent.applications[0].as_mut().unwrap().entries[0].key = 9;
    let whole = sample_snapshot().to_bytes();
    let may_write = std::env::var_os("TIDEGATE_GOLDEN").is_some_and(|value| value == "write");
    for (name, bytes) in [
        ("good_one_application", whole.clone()),
        ("good_nobody", empty.to_bytes()),
        ("refused_another_s_socket", inconsistent.to_bytes()),
        ("unreadable_cut", whole[..whole.len() / 2].to_vec()),
    ] {
        let path = corpus().join(name);
        if may_write {
            std::fs::write(&path, &bytes).unwrap();
        }
        assert!(std::fs::read(path).unwrap() == bytes, "{name}: the format has changed");
    }
}
