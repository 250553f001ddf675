//! Restoration of a network core from the snapshot of another daemon.

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use tidegate_engine::InheritedDevice;
use tidegate_memory::shared::{Region, RegionReleaser};
use tidegate_stack::{StackSnapshot, TcpId};

use super::claims::RestoredClaims;
use super::snapshot::{ClaimSnapshot, DaemonSnapshot, DeviceSnapshot};
use crate::daemon::application::Application;
use crate::daemon::application::kernel_sockets::{KernelSocketSnapshot, KernelSockets};
use crate::daemon::application::snapshot::ApplicationSnapshot;
use crate::daemon::core::server::SocketServer;
use crate::daemon::core::{CoreSlot, NetworkCore};
use crate::daemon::ids::{AppNumber, Holder, NO_APP, SocketKey};
use crate::daemon::log::Log;
use crate::daemon::quota::AppSettings;
use crate::daemon::snapshot_error::InvalidSnapshot;
use crate::daemon::socket::snapshot::SocketSnapshot;
use crate::daemon::socket::table::SocketTable;
use crate::daemon::socket::{AppSocket, SocketKind};
use crate::daemon::transfer::table::{IN_TRANSIT, SocketTransfer, TransferSnapshot, TransferTable};
use crate::daemon::workers::{AppFd, NOBODY, UserWorkers};
use crate::ipc::event_fds::EventFds;
use crate::ipc::layout::{Geometry, SharedMemory};

/// Restored parts of a core besides its engine.
pub(in crate::daemon) struct RestoredCore {
    pub(super) apps: Vec<Option<Box<Application>>>,
    pub(super) sockets: SocketTable,
    pub(super) transfers: Vec<TransferSnapshot>,
    claims: RestoredClaims,
}

impl RestoredCore {
    /// Makes a network core of the restored parts.
    ///
    /// # Errors
    /// [`InvalidSnapshot`] for a transfer that does not match its socket, and errors when a port
    /// cannot be claimed again.
    pub(in crate::daemon) fn into_core(
        self,
        slot: CoreSlot,
        mut server: SocketServer,
        log: Log,
    ) -> io::Result<NetworkCore> {
        server.sockets = self.sockets;
        let fits = |transfer: &SocketTransfer| {
            let Some(socket) = server.sockets.get(transfer.key) else { return false };
            let may_be_shared =
                !transfer.is_shared || matches!(socket.kind, SocketKind::Listener(_));
            socket.holders().contains(&IN_TRANSIT) == transfer.is_in_transit() && may_be_shared
        };
        let now_ns = server.engine.read_clock();
        server.transfers = TransferTable::restore(self.transfers, now_ns, fits)?;
        let keys = server.sockets.keys();
        for &key in &keys {
            let SocketServer { engine, sockets, socket_index, .. } = &mut server;
            let Some(socket) = sockets.get_mut(key) else { continue };
            socket_index.insert(socket.id(), key);
            socket.abort_if_corrupt(engine);
            // Events during the handover are found by polling every socket.
            socket.in_poll_queue = true;
        }
        server.restore_claims(self.claims)?;
        server.claim_all_among_cores()?;
        let mut core = NetworkCore::new(slot, server, log)?;
        core.cores.load(core.index).add_applications(self.apps.iter().flatten().count());
        core.apps = self.apps;
        (0..core.apps.len()).for_each(|number| core.watch(number as AppNumber));
        core.apps.iter().flatten().for_each(|app| app.count_releases(core.cores.wake()));
        core.set_port_programs(keys.iter().copied());
        core.poll_queue = keys;
        Ok(core)
    }
}

/// Kernel objects that an engine inherits from the engine of another daemon.
pub(in crate::daemon) struct InheritedByEngine {
    pub(in crate::daemon) device: Option<InheritedDevice>,
    /// Sockets that reserve the own addresses.
    pub(in crate::daemon) reservations: Vec<OwnedFd>,
}

impl InheritedByEngine {
    /// Takes the last descriptors of a snapshot.
    fn new(device: Option<DeviceSnapshot>, mut descriptors: impl Iterator<Item = OwnedFd>) -> Self {
        let inherit =
            |kind: DeviceSnapshot| Some(InheritedDevice::new(kind.into(), descriptors.next()?));
        Self { device: device.and_then(inherit), reservations: descriptors.collect() }
    }
}

/// Restores a core from a snapshot of another daemon. Also returns the snapshot of the stack,
/// and what its engine inherits.
///
/// # Errors
/// [`InvalidSnapshot`], and errors of the kernel when it maps the memory.
pub(in crate::daemon) fn restore<'a>(
    state: DaemonSnapshot<'a>,
    descriptors: Vec<OwnedFd>,
    settings: AppSettings,
    workers: &UserWorkers,
) -> io::Result<(StackSnapshot<'a>, RestoredCore, InheritedByEngine)> {
    if descriptors.len() != state.count_descriptors() {
        return Err(InvalidSnapshot("the number of descriptors is wrong").into());
    }
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
    let mut descriptors = descriptors.into_iter();
    let owners = applications.iter().flatten().map(|app| (app.memory, app.identity.uid));
    let owners: HashMap<u32, u32> = owners.collect();
    let memories: Vec<SharedMemory> = (0..)
        .zip(memories)
        .map(|(index, geometry)| {
            let uid = owners.get(&index).copied().unwrap_or(NOBODY);
            map_memory(geometry, &mut descriptors, &workers.region_releaser(uid))
        })
        .collect::<io::Result<_>>()?;
    let memory = |number: u32| {
        memories.get(number as usize).ok_or(InvalidSnapshot("a shared memory does not exist"))
    };
    let mut kernel_sockets = Vec::new();
    let mut apps: Vec<_> = applications
        .into_iter()
        .map(|saved| {
            let Some(mut saved) = saved else { return Ok(None) };
            kernel_sockets.push(std::mem::take(&mut saved.kernel_sockets));
            let memory = memory(saved.memory)?.clone();
            let app = restore_application(saved, memory, &mut descriptors, &settings, workers)?;
            Ok(Some(Box::new(app)))
        })
        .collect::<io::Result<_>>()?;
    for (app, saved) in apps.iter_mut().flatten().zip(kernel_sockets) {
        restore_kernel_sockets(app, saved, &mut descriptors, workers)?;
    }
    let claim_of = |(key, saved): (_, &Option<SocketSnapshot>)| Some((key, saved.as_ref()?.claim?));
    let with_claims: Vec<_> = (0..).zip(&sockets).filter_map(claim_of).collect();
    let sockets: Vec<_> = sockets
        .into_iter()
        .map(|saved| {
            let Some(mut saved) = saved else { return Ok(None) };
            let memory = memory(saved.memory)?;
            // The origin may have ended; its number is free then.
            let is_live = |app: AppNumber| matches!(apps.get(app as usize), Some(Some(_)));
            if !is_live(saved.origin.app) {
                saved.origin.app = NO_APP;
            }
            AppSocket::restore(saved, memory).map(Some)
        })
        .collect::<io::Result<_>>()?;
    let in_transit = transfers.iter().filter(|transfer| transfer.pending_receivers > 0).count();
    check_holders(&apps, &sockets, in_transit)?;
    // The users of the kernel sockets are not known any more.
    let mut held = |claim: &ClaimSnapshot| {
        let fd = if claim.has_kernel_socket { descriptors.next() } else { None };
        fd.map(|fd| AppFd::new(fd, NOBODY, workers))
    };
    let claims = claims.into_iter().map(|claim| (held(&claim), claim)).collect();
    let ending = closing.into_iter().map(|(id, claim)| (TcpId::from_bits(id), claim)).collect();
    let claims = RestoredClaims::new(claims, with_claims, ending)?;
    let inherited = InheritedByEngine::new(device, descriptors);
    let restored = RestoredCore { apps, sockets: SocketTable::restore(sockets), transfers, claims };
    Ok((stack, restored, inherited))
}

/// Restores an application with its connection and its event descriptors.
fn restore_application(
    saved: ApplicationSnapshot,
    memory: SharedMemory,
    descriptors: &mut impl Iterator<Item = OwnedFd>,
    settings: &AppSettings,
    workers: &UserWorkers,
) -> io::Result<Application> {
    let uid = saved.identity.uid;
    let mut next = || {
        let fd = descriptors.next().ok_or(InvalidSnapshot("a connection is missing"))?;
        io::Result::Ok(AppFd::new(fd, uid, workers))
    };
    let connection = next()?;
    let event_fds = EventFds { daemon: next()?, application: next()? };
    Application::restore(saved, memory, connection, event_fds, settings)
}

/// Gives an application the kernel sockets that it had registered.
fn restore_kernel_sockets(
    app: &mut Application,
    saved: Vec<KernelSocketSnapshot>,
    descriptors: &mut impl Iterator<Item = OwnedFd>,
    workers: &UserWorkers,
) -> Result<(), InvalidSnapshot> {
    let uid = app.identity.uid;
    let fds = descriptors.take(saved.len()).map(|fd| AppFd::new(fd, uid, workers));
    let fds: Vec<_> = fds.collect();
    if fds.len() < saved.len() {
        return Err(InvalidSnapshot("a kernel socket is missing"));
    }
    app.kernel_sockets = KernelSockets::restore(saved.into_iter().zip(fds))?;
    Ok(())
}

fn map_memory(
    geometry: Geometry,
    descriptors: &mut impl Iterator<Item = OwnedFd>,
    releaser: &RegionReleaser,
) -> io::Result<SharedMemory> {
    if !geometry.is_valid() {
        return Err(InvalidSnapshot("a shared memory's size is out of range").into());
    }
    let mut region = |words| -> io::Result<Region> {
        let fd = descriptors.next().ok_or(InvalidSnapshot("a shared memory is missing"))?;
        Ok(Region::open(fd, words)?.released_by(Arc::clone(releaser)))
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
            let holds = |socket: &AppSocket| socket.holders().contains(&holder);
            if !socket.is_some_and(holds) {
                return Err(InvalidSnapshot("an application has a socket that it does not hold"));
            }
        }
    }
    let held: usize = sockets.iter().flatten().map(|socket| socket.holders().len()).sum();
    if held != expected || sockets.len() > SocketKey::MAX as usize {
        return Err(InvalidSnapshot("a socket has a holder that does not list it"));
    }
    Ok(())
}
