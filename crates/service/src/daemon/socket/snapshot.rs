//! Snapshot of an application socket for the next daemon.

use std::io;

use serde::{Deserialize, Serialize};
use tidegate_engine::Engine;
use tidegate_stack::{TcpId, TcpListenerId, UdpId};

use super::pending_datagram::{DatagramSnapshot, PendingDatagram};
use super::{AppSocket, SocketKind, TcpEndpoint, UdpEndpoint};
use crate::daemon::ids::{Holder, PayloadBytes};
use crate::daemon::snapshot_error::InvalidSnapshot;
use crate::ipc::command::Handle;
use crate::ipc::layout::{SharedMemory, StreamKind};
use crate::ipc::status::Status;

/// Socket as plain data.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(in crate::daemon) struct SocketSnapshot {
    pub(in crate::daemon) handle: Handle,
    pub(in crate::daemon) kind: KindSnapshot,
    /// Index of the shared memory that holds its slot.
    pub(in crate::daemon) memory: u32,
    pub(in crate::daemon) status: u64,
    pub(in crate::daemon) origin: Holder,
    pub(in crate::daemon) holders: Vec<Holder>,
    pub(in crate::daemon) is_corrupt: bool,
    /// Index of its port claim.
    pub(in crate::daemon) claim: Option<u32>,
}

/// Kind of a socket, with its ID in the stack as a number.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(in crate::daemon) enum KindSnapshot {
    Udp { id: u64, pending: Option<DatagramSnapshot>, payload_bytes: PayloadBytes },
    Listener { id: u64 },
    Stream { id: u64, shutdown_pending: bool, is_closed: bool, payload_bytes: PayloadBytes },
}

impl AppSocket {
    /// Snapshot for the next daemon, in which its memory has index `memory`.
    pub(in crate::daemon) fn save(
        &self,
        memory: u32,
        claim: Option<u32>,
        engine: &mut Engine,
    ) -> SocketSnapshot {
        let kind = match &self.kind {
            SocketKind::Udp(UdpEndpoint { id, pending, payload_bytes, .. }) => KindSnapshot::Udp {
                id: id.to_bits(),
                pending: pending.as_ref().map(|held| held.save(engine)),
                payload_bytes: *payload_bytes,
            },
            SocketKind::Listener(id) => KindSnapshot::Listener { id: id.to_bits() },
            SocketKind::Stream(TcpEndpoint {
                id,
                shutdown_pending,
                is_closed,
                payload_bytes,
                ..
            }) => KindSnapshot::Stream {
                id: id.to_bits(),
                shutdown_pending: *shutdown_pending,
                is_closed: *is_closed,
                payload_bytes: *payload_bytes,
            },
        };
        SocketSnapshot {
            handle: self.handle,
            kind,
            memory,
            status: self.status.to_word(),
            origin: self.origin,
            holders: self.holders.clone(),
            is_corrupt: self.is_corrupt,
            claim,
        }
    }

    /// Restores a socket that another daemon saved, in the memory where it was.
    pub(in crate::daemon) fn restore(
        saved: SocketSnapshot,
        memory: &SharedMemory,
    ) -> io::Result<Self> {
        let SocketSnapshot { handle, kind, status, origin, holders, is_corrupt, .. } = saved;
        let slot = memory.slot(handle.slot)?;
        let mut is_spoilt = is_corrupt;
        let mut ends = |carries| {
            let (mut from_app, mut to_app) = slot.daemon_streams(carries)?;
            is_spoilt |= from_app.resume().is_err() || to_app.resume().is_err();
            io::Result::Ok((from_app, to_app))
        };
        let kind = match kind {
            KindSnapshot::Udp { id, pending, payload_bytes } => {
                let (from_app, to_app) = ends(StreamKind::Datagrams)?;
                let pending = pending.map(PendingDatagram::Copy);
                let id = UdpId::from_bits(id);
                SocketKind::Udp(UdpEndpoint { id, from_app, to_app, pending, payload_bytes })
            }
            KindSnapshot::Listener { id } => SocketKind::Listener(
                TcpListenerId::from_bits(id)
                    .ok_or(InvalidSnapshot("a listener's ID is invalid"))?,
            ),
            KindSnapshot::Stream { id, shutdown_pending, is_closed, payload_bytes } => {
                let (from_app, to_app) = ends(StreamKind::Bytes)?;
                let id = TcpId::from_bits(id);
                SocketKind::Stream(TcpEndpoint {
                    id,
                    from_app,
                    to_app,
                    shutdown_pending,
                    is_closed,
                    payload_bytes,
                })
            }
        };
        let status = Status::from_word(status);
        let mut socket = Self {
            handle,
            kind,
            slot,
            status: Status { generation: handle.generation, ..status },
            claim: None,
            origin,
            holders,
            is_corrupt: is_spoilt,
            in_poll_queue: false,
        };
        socket.slot.poll_on_write.request();
        socket.write_status();
        Ok(socket)
    }
}
