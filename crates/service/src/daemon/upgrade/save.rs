//! Snapshot of a network core for a handover.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use tidegate_device::HandoverState;
use tidegate_engine::Engine;
use tidegate_stack::StackSnapshot;

use super::claims::ClaimTable;
use super::snapshot::{DaemonSnapshot, DeviceSnapshot};
use crate::daemon::application::Application;
use crate::daemon::core::message::StateFds;
use crate::daemon::core::server::SocketServer;
use crate::ipc::layout::SharedMemory;

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
            let memory = memory_index(&mut fds.memories, socket.slot.memory());
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

/// Index of a memory, which is added if it is new.
fn memory_index(memories: &mut Vec<SharedMemory>, memory: &SharedMemory) -> u32 {
    let known = memories.iter().position(|known| known.is_same(memory));
    let number = known.unwrap_or_else(|| {
        memories.push(memory.clone());
        memories.len() - 1
    });
    number as u32
}
