//! Snapshot of a network core for a handover, and its restoration.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use tidegate_device::HandoverState;
use tidegate_device::xdp::XdpLink;
use tidegate_engine::{Engine, InheritedDevice};
use tidegate_memory::shared::Region;
use tidegate_stack::{StackSnapshot, TcpId};

use super::claims::{ClaimTable, RestoredClaims};
use super::snapshot::{ClaimSnapshot, DaemonSnapshot, DeviceSnapshot};
use crate::daemon::application::Application;
use crate::daemon::core::commands::SocketServer;
use crate::daemon::ids::{AppNumber, Holder, SocketKey};
use crate::daemon::quota::AppSettings;
use crate::daemon::snapshot_error::InvalidSnapshot;
use crate::daemon::socket::AppSocket;
use crate::daemon::socket::table::SocketTable;
use crate::daemon::transfer::table::TransferSnapshot;
#[cfg(doc)]
use crate::daemon::transfer::table::TransferTable;
use crate::ipc::layout::{Geometry, SharedMemory};

/// File descriptors that belong to a [`DaemonSnapshot`].
#[derive(Default)]
pub(in crate::daemon) struct StateFds {
    memories: Vec<SharedMemory>,
    connections: Vec<Arc<OwnedFd>>,
    /// Kernel sockets of the port claims, then the descriptor left of the device.
    claims_and_device: Vec<OwnedFd>,
}

/// File descriptors of each shared memory.
const FDS_PER_MEMORY: usize = 2;

impl StateFds {
    /// All descriptors, in the order in which [`restore`] takes them.
    pub(in crate::daemon) fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        let memories = self.memories.iter().flat_map(SharedMemory::regions).map(AsFd::as_fd);
        let connections = self.connections.iter().map(AsFd::as_fd);
        memories.chain(connections).chain(self.claims_and_device.iter().map(AsFd::as_fd)).collect()
    }

    /// Index of a memory, which is added if it is new.
    fn memory_index(&mut self, memory: &SharedMemory) -> u32 {
        let known = self.memories.iter().position(|known| known.is_same(memory));
        let number = known.unwrap_or_else(|| {
            self.memories.push(memory.clone());
            self.memories.len() - 1
        });
        number as u32
    }
}

/// Takes a snapshot of all applications and their sockets.
///
/// # Errors
/// When no file descriptor is left in the process.
pub(in crate::daemon) fn save(
    stack: StackSnapshot,
    host: &mut SocketServer,
    apps: &mut [Option<Box<Application>>],
) -> io::Result<(DaemonSnapshot, StateFds)> {
    let mut fds = StateFds::default();
    let applications = apps
        .iter_mut()
        .map(|app| {
            let app = app.as_deref_mut()?;
            // Every application has a memory of its own.
            fds.memories.push(app.memory.clone());
            fds.connections.push(app.connection());
            Some(app.save(fds.memories.len() as u32 - 1))
        })
        .collect();
    let SocketServer { engine, claims: own, sockets, transfers, .. } = host;
    let transfers = transfers.save();
    let mut claims = ClaimTable::default();
    // Claims among cores are made again from the sockets.
    let is_shared = own.shares_kernel_addresses();
    let ending = own.closing().filter(|_| is_shared);
    let closing = ending.map(|(id, claim)| (id.to_bits(), claims.index_of(claim))).collect();
    let sockets = sockets
        .all()
        .map(|socket| {
            let socket = socket?;
            // The memory of an exited application stays as long as a socket in it.
            let memory = fds.memory_index(socket.slot.memory());
            let claim = socket.claim.as_ref().filter(|_| is_shared);
            Some(socket.save(memory, claim.map(|claim| claims.index_of(claim)), engine))
        })
        .collect();
    let memories = fds.memories.iter().map(|memory| *memory.geometry()).collect();
    let (claims, held): (_, Vec<_>) = claims.save()?.into_iter().unzip();
    fds.claims_and_device.extend(held.into_iter().flatten());
    let device = match device_handover(engine) {
        Some((port, fd)) => {
            fds.claims_and_device.push(fd.try_clone_to_owned()?);
            Some(port)
        }
        None => None,
    };
    let mac = engine.stack().mac().0;
    let state = DaemonSnapshot {
        stack,
        mac,
        memories,
        applications,
        sockets,
        transfers,
        claims,
        closing,
        device,
    };
    Ok((state, fds))
}

/// State of the device that the next daemon needs, with its descriptor.
fn device_handover(engine: &Engine) -> Option<(DeviceSnapshot, BorrowedFd<'_>)> {
    match engine.handover_state()? {
        HandoverState::Xdp(loaded) => {
            let link = loaded.link()?;
            Some((DeviceSnapshot::XdpLink { native: link.native() }, link.as_fd()))
        }
        HandoverState::Tap(device) => Some((DeviceSnapshot::Tap, device.as_fd())),
    }
}

/// Restored parts of a core besides its engine.
pub(in crate::daemon) struct RestoredCore {
    pub(in crate::daemon) apps: Vec<Option<Box<Application>>>,
    pub(in crate::daemon) sockets: SocketTable,
    pub(in crate::daemon) transfers: Vec<TransferSnapshot>,
    pub(in crate::daemon) claims: RestoredClaims,
}

/// Restores a core from a snapshot of another daemon. Also returns the snapshot of the stack,
/// and the device to inherit.
///
/// # Errors
/// [`InvalidSnapshot`], and errors of the kernel when it maps the memory.
pub(in crate::daemon) fn restore(
    state: DaemonSnapshot,
    descriptors: Vec<OwnedFd>,
    settings: AppSettings,
) -> io::Result<(StackSnapshot, RestoredCore, Option<InheritedDevice>)> {
    let DaemonSnapshot {
        stack,
        memories,
        applications,
        sockets,
        transfers,
        claims,
        closing,
        device,
        ..
    } = state;
    let held = claims.iter().filter(|claim| claim.has_kernel_socket).count();
    let count = memories.len() * FDS_PER_MEMORY
        + applications.iter().flatten().count()
        + held
        + usize::from(device.is_some());
    if descriptors.len() != count {
        return Err(InvalidSnapshot("the number of descriptors is wrong").into());
    }
    let mut descriptors = descriptors.into_iter();
    let memories: Vec<SharedMemory> = memories
        .into_iter()
        .map(|of| map_memory(of, &mut descriptors))
        .collect::<io::Result<_>>()?;
    let memory = |number: u32| {
        memories.get(number as usize).ok_or(InvalidSnapshot("a shared memory does not exist"))
    };
    let apps: Vec<_> = applications
        .into_iter()
        .map(|saved| {
            let Some(saved) = saved else { return Ok(None) };
            let connection =
                descriptors.next().ok_or(InvalidSnapshot("a connection is missing"))?;
            let memory = memory(saved.memory)?.clone();
            let app = Application::restore(saved, memory, connection, settings)?;
            Ok(Some(Box::new(app)))
        })
        .collect::<io::Result<_>>()?;
    let with_claims = (0..).zip(&sockets);
    let with_claims = with_claims.filter_map(|(key, saved)| Some((key, saved.as_ref()?.claim?)));
    let with_claims: Vec<_> = with_claims.collect();
    let sockets: Vec<_> = sockets
        .into_iter()
        .map(|saved| {
            let Some(saved) = saved else { return Ok(None) };
            let memory = memory(saved.memory)?;
            AppSocket::restore(saved, memory).map(Some)
        })
        .collect::<io::Result<_>>()?;
    let in_transit = transfers.iter().filter(|transfer| transfer.pending_receivers > 0).count();
    check_holders(&apps, &sockets, in_transit)?;
    let mut held =
        |claim: &ClaimSnapshot| if claim.has_kernel_socket { descriptors.next() } else { None };
    let claims = claims.into_iter().map(|claim| (held(&claim), claim)).collect();
    let ending = closing.into_iter().map(|(id, claim)| (TcpId::from_bits(id), claim)).collect();
    let claims = RestoredClaims::new(claims, with_claims, ending)?;
    let inherited = device.and_then(|port| {
        let fd = descriptors.next()?;
        Some(match port {
            DeviceSnapshot::XdpLink { native } => {
                InheritedDevice::Link(XdpLink::inherited(fd, native))
            }
            DeviceSnapshot::Tap => InheritedDevice::Tap(fd),
        })
    });
    let restored = RestoredCore { apps, sockets: SocketTable::restore(sockets), transfers, claims };
    Ok((stack, restored, inherited))
}

fn map_memory(
    geometry: Geometry,
    descriptors: &mut impl Iterator<Item = OwnedFd>,
) -> io::Result<SharedMemory> {
    if !geometry.is_valid() {
        return Err(InvalidSnapshot("a shared memory's size is out of range").into());
    }
    let mut region = |words| {
        let fd = descriptors.next().ok_or(InvalidSnapshot("a shared memory is missing"))?;
        Region::open(fd, words)
    };
    let (control, data) = (region(geometry.control_words())?, region(geometry.data_words())?);
    SharedMemory::new(geometry, control, data)
}

/// Checks that applications and sockets agree on the holders. [`TransferTable::restore`] checks
/// the sockets in transit more closely.
fn check_holders(
    apps: &[Option<Box<Application>>],
    sockets: &[Option<AppSocket>],
    in_transit: usize,
) -> Result<(), InvalidSnapshot> {
    let mut expected = in_transit;
    for (number, app) in apps.iter().enumerate() {
        for (handle, key) in app.iter().flat_map(|app| app.sockets()) {
            expected += 1;
            let holder = Holder { app: number as AppNumber, slot: handle.slot };
            let socket = sockets.get(key as usize).and_then(Option::as_ref);
            let holds = |socket: &AppSocket| socket.holders.contains(&holder);
            if !socket.is_some_and(holds) {
                return Err(InvalidSnapshot("an application has a socket that it does not hold"));
            }
        }
    }
    let held: usize = sockets.iter().flatten().map(|socket| socket.holders.len()).sum();
    if held != expected || sockets.len() > SocketKey::MAX as usize {
        return Err(InvalidSnapshot("a socket has a holder that does not list it"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::os::unix::net::UnixStream;
    use std::path::{Path, PathBuf};

    use tidegate_memory::{Arena, ArenaConfig, FrameSize};
    use tidegate_stack::{Config, Stack};
    use tidegate_wire::MacAddr;

    use super::*;
    use crate::daemon::application::snapshot::{ApplicationSnapshot, EntrySnapshot};
    use crate::daemon::fuzz;
    use crate::daemon::ids::{Identity, PayloadBytes};
    use crate::daemon::socket::pending_datagram::DatagramSnapshot;
    use crate::daemon::socket::snapshot::{KindSnapshot, SocketSnapshot};
    use crate::daemon::transfer::table::{FdCookie, IN_TRANSIT, SocketTransfer, TransferTable};
    use crate::daemon::upgrade::snapshot::ProtocolSnapshot;
    use crate::ipc::command::{COMMAND_WORDS, Command, Handle};
    use crate::ipc::status::{SocketState, Status};

    const GEOMETRY: Geometry = Geometry { sockets: 4, tcp_bytes: 4096, udp_bytes: 4096 };

    /// Snapshot of one application with a socket of each kind.
    fn sample_snapshot() -> DaemonSnapshot {
        let arena = ArenaConfig { frames: 64, frame_size: FrameSize::K2, hugepages: false };
        let arena = Arena::new(arena).unwrap();
        let config = Config {
            addresses: vec!["192.0.2.1/24".parse().unwrap()],
            ..Config::ethernet(MacAddr([2, 0, 0, 0, 0, 1]), [7; 16])
        };
        let stack = Stack::new(config, 0).unwrap().save(0, &arena);
        let handle = |slot| Handle { slot, generation: 1 };
        let held = DatagramSnapshot {
            remote: "192.0.2.2:53".parse().unwrap(),
            local: "192.0.2.1".parse().unwrap(),
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
            identity: Identity { pid: 1, uid: 2, name: "test".to_owned() },
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

        fn restore(&self, state: DaemonSnapshot) -> io::Result<RestoredCore> {
            // Any descriptor can stand for the kernel's ones.
            let others = [self.connection.as_fd(); 3];
            let fds = self.regions.iter().map(AsFd::as_fd).chain(others);
            let fds = fds.map(|fd| fd.try_clone_to_owned().unwrap()).collect();
            restore(state, fds, AppSettings::default()).map(|(_, restored, _)| restored)
        }
    }

    #[test]
    fn snapshot_round_trips() {
        let kit = TestFds::new();
        let state = sample_snapshot();
        let bytes = state.encode().unwrap();
        let read = DaemonSnapshot::decode(&bytes).unwrap();
        assert_eq!(read.encode().unwrap(), bytes);
        let mut restored = kit.restore(read).unwrap();
        let app = restored.apps[0].as_mut().unwrap();
        assert_eq!(app.sockets().count(), 3);
        assert_eq!(app.slots.reserve().unwrap(), Handle { slot: 3, generation: 1 });
        assert!(!app.has_space());
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
            again(|saved| (saved.pending_receivers, saved.is_shared) = (0, true), |_| true)
                .unwrap();
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
        let refused = |change: fn(&mut DaemonSnapshot)| {
            let mut state = sample_snapshot();
            change(&mut state);
            kit.restore(state).map(|_| ()).unwrap_err().to_string()
        };
        fn app(state: &mut DaemonSnapshot) -> &mut ApplicationSnapshot {
            state.applications[0].as_mut().unwrap()
        }
        fn socket(state: &mut DaemonSnapshot) -> &mut SocketSnapshot {
            state.sockets[0].as_mut().unwrap()
        }
        let corruptions: [fn(&mut DaemonSnapshot); 20] = [
            |state| state.memories.clear(),
            |state| state.memories[0].tcp_bytes = 5,
            |state| state.memories[0].sockets = 1 << 19,
            |state| state.applications.push(state.applications[0].clone()),
            |state| app(state).memory = 1,
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
        let bytes = sample_snapshot().encode().unwrap();
        let mut reached = BTreeSet::new();
        for at in 0..bytes.len() {
            for flip in [1, 0x40, 0x80, 0xff] {
                let mut damaged = bytes.clone();
                damaged[at] ^= flip;
                reached.insert(fuzz::check(&damaged));
            }
        }
        assert_eq!(reached.len(), 3, "{reached:?}");
    }

    fn corpus() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/daemon_state")
    }

    /// The name of each seed tells the expected outcome.
    #[test]
    fn corpus_of_daemon_state() {
        let mut reached = BTreeSet::new();
        for entry in std::fs::read_dir(corpus()).expect("the corpus is in the repository") {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            let expected = match name.split('_').next() {
                Some("good") => fuzz::Outcome::Accepted,
                Some("refused") => fuzz::Outcome::Refused,
                _ => fuzz::Outcome::Unreadable,
            };
            let outcome = fuzz::check(&std::fs::read(path).unwrap());
            assert_eq!(outcome, expected, "{name}: has the format changed?");
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
        let mut inconsistent = sample_snapshot();
        inconsistent.applications[0].as_mut().unwrap().entries[0].key = 9;
        let whole = sample_snapshot().encode().unwrap();
        let may_write = std::env::var_os("TIDEGATE_GOLDEN").is_some_and(|value| value == "write");
        for (name, bytes) in [
            ("good_one_application", whole.clone()),
            ("good_nobody", empty.encode().unwrap()),
            ("refused_another_s_socket", inconsistent.encode().unwrap()),
            ("unreadable_cut", whole[..whole.len() / 2].to_vec()),
        ] {
            let path = corpus().join(name);
            if may_write {
                std::fs::write(&path, &bytes).unwrap();
            }
            assert!(std::fs::read(path).unwrap() == bytes, "{name}: the format has changed");
        }
    }
}
