//! State format 8: applications without their library.

use serde::Deserialize;
use tidegate_stack::StackSnapshot;

use super::{ClaimSnapshot, DeviceSnapshot};
use crate::daemon::application::kernel_sockets::KernelSocketSnapshot;
use crate::daemon::application::snapshot::{
    ApplicationSnapshot as CurrentApplication, EntrySnapshot,
};
use crate::daemon::ids::{Identity as CurrentIdentity, PayloadBytes};
use crate::daemon::socket::snapshot::SocketSnapshot;
use crate::daemon::transfer::table::TransferSnapshot;
use crate::ipc::command::COMMAND_WORDS;
use crate::ipc::layout::Geometry;
use crate::ipc::notification::NOTIFICATION_WORDS;
use crate::ipc::takeover_token::TOKEN_BYTES;
use crate::ipc::version::Library;

#[derive(Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
pub(super) struct DaemonSnapshot<'a> {
    #[serde(borrow)]
    stack: StackSnapshot<'a>,
    mac: [u8; 6],
    memories: Vec<Geometry>,
    applications: Vec<Option<ApplicationSnapshot>>,
    sockets: Vec<Option<SocketSnapshot>>,
    transfers: Vec<TransferSnapshot>,
    claims: Vec<ClaimSnapshot>,
    closing: Vec<(u64, u32)>,
    device: Option<DeviceSnapshot>,
    reservations: u32,
}

#[derive(Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
struct ApplicationSnapshot {
    identity: Identity,
    token: [u8; TOKEN_BYTES],
    memory: u32,
    entries: Vec<EntrySnapshot>,
    generations: Vec<u32>,
    free_slots: Vec<u32>,
    queued_notifications: Vec<[u64; NOTIFICATION_WORDS]>,
    deferred_command: Option<[u64; COMMAND_WORDS]>,
    commands_taken: u64,
    payload_bytes: PayloadBytes,
    kernel_sockets: Vec<KernelSocketSnapshot>,
}

#[derive(Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
struct Identity {
    pid: u32,
    uid: u32,
    name: String,
}

impl<'a> From<DaemonSnapshot<'a>> for super::DaemonSnapshot<'a> {
    fn from(old: DaemonSnapshot<'a>) -> Self {
        let applications = old.applications.into_iter().map(|app| app.map(Into::into)).collect();
        Self {
            stack: old.stack,
            mac: old.mac,
            memories: old.memories,
            applications,
            sockets: old.sockets,
            transfers: old.transfers,
            claims: old.claims,
            closing: old.closing,
            device: old.device,
            reservations: old.reservations,
        }
    }
}

/// State as a daemon of this format writes it.
#[cfg(test)]
impl<'a> From<super::DaemonSnapshot<'a>> for DaemonSnapshot<'a> {
    fn from(state: super::DaemonSnapshot<'a>) -> Self {
        let application = |app: CurrentApplication| ApplicationSnapshot {
            identity: Identity {
                pid: app.identity.pid,
                uid: app.identity.uid,
                name: app.identity.name,
            },
            token: app.token,
            memory: app.memory,
            entries: app.entries,
            generations: app.generations,
            free_slots: app.free_slots,
            queued_notifications: app.queued_notifications,
            deferred_command: app.deferred_command,
            commands_taken: app.commands_taken,
            payload_bytes: app.payload_bytes,
            kernel_sockets: app.kernel_sockets,
        };
        Self {
            stack: state.stack,
            mac: state.mac,
            memories: state.memories,
            applications: state.applications.into_iter().map(|app| app.map(application)).collect(),
            sockets: state.sockets,
            transfers: state.transfers,
            claims: state.claims,
            closing: state.closing,
            device: state.device,
            reservations: state.reservations,
        }
    }
}

impl From<ApplicationSnapshot> for CurrentApplication {
    fn from(old: ApplicationSnapshot) -> Self {
        let Identity { pid, uid, name } = old.identity;
        Self {
            identity: CurrentIdentity { pid, uid, name, library: Library::default() },
            token: old.token,
            memory: old.memory,
            entries: old.entries,
            generations: old.generations,
            free_slots: old.free_slots,
            queued_notifications: old.queued_notifications,
            deferred_command: old.deferred_command,
            commands_taken: old.commands_taken,
            payload_bytes: old.payload_bytes,
            kernel_sockets: old.kernel_sockets,
        }
    }
}
