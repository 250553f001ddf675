//! Snapshot of a network core for a handover.

use std::collections::HashMap;
use std::io;

use tidegate_stack::StackSnapshot;

use super::claims::ClaimTable;
use super::snapshot::DaemonSnapshot;
use crate::daemon::application::Application;
use crate::daemon::core::message::StateFds;
use crate::daemon::core::server::SocketServer;
use crate::daemon::workers::AppFd;

/// Takes a snapshot of all applications and their sockets.
///
/// # Errors
/// When no file descriptor is left in the process.
pub(in crate::daemon) fn save(
    stack: StackSnapshot<'static>,
    host: &mut SocketServer,
    apps: &mut [Option<Box<Application>>],
) -> io::Result<(DaemonSnapshot<'static>, StateFds)> {
    let mut fds = StateFds::default();
    let applications = apps
        .iter_mut()
        .map(|app| {
            let app = app.as_deref_mut()?;
            // Every application has a memory of its own.
            fds.memories.push(app.memory.clone());
            fds.connections.push(app.connection().clone());
            fds.connections.extend(app.event_fds.in_order().map(AppFd::clone));
            fds.kernel_sockets.extend(app.kernel_sockets.descriptors().cloned());
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
    let indices = (0..).zip(&fds.memories).map(|(index, memory)| (memory.id(), index));
    let mut indices: HashMap<usize, u32> = indices.collect();
    let sockets = sockets
        .all()
        .map(|socket| {
            let socket = socket?;
            // The memory of an exited application stays as long as a socket in it.
            let memory = socket.slot.memory();
            let memory = *indices.entry(memory.id()).or_insert_with(|| {
                fds.memories.push(memory.clone());
                fds.memories.len() as u32 - 1
            });
            let claim = socket.claim().filter(|_| is_shared);
            Some(socket.save(memory, claim.map(|claim| claims.index_of(claim)), engine))
        })
        .collect();
    let memories = fds.memories.iter().map(|memory| *memory.geometry()).collect();
    let (claims, held): (_, Vec<_>) = claims.save().into_iter().unzip();
    fds.claims.extend(held.into_iter().flatten());
    let mut device = None;
    if let Some((kind, fd)) = engine.inheritable() {
        fds.device = Some(fd.try_clone_to_owned()?);
        device = Some(kind.into());
    }
    let reservations = engine.reservations().sockets().map(|fd| fd.try_clone_to_owned());
    fds.reservations = reservations.collect::<io::Result<_>>()?;
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
        reservations: fds.reservations.len() as u32,
    };
    Ok((state, fds))
}
