//! Snapshot of a daemon for a handover to the next one: plain data.
//!
//! File descriptors are sent beside it ([`super::handover_protocol`]).

use std::io;
use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};
use tidegate_stack::StackSnapshot;

use super::ids::{Holder, Identity, PayloadBytes, SocketKey};
use super::transfer_table::FdCookie;
use crate::ipc::command::{COMMAND_WORDS, Handle};
use crate::ipc::layout::Geometry;
use crate::ipc::notification::NOTIFICATION_WORDS;
use crate::ipc::takeover_token::TOKEN_BYTES;

/// Magic number with the format version. Other versions are refused. The stack's snapshot
/// has a version of its own.
const FORMAT: [u8; 8] = *b"tidestt\x05";

/// Error when a snapshot is inconsistent or unreadable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the snapshot from the other daemon is invalid: {0}; restart the daemon instead")]
pub(super) struct InvalidSnapshot(pub(super) &'static str);

impl From<InvalidSnapshot> for io::Error {
    fn from(damaged: InvalidSnapshot) -> Self {
        Self::new(io::ErrorKind::InvalidData, damaged)
    }
}

/// Snapshot of a daemon, except its file descriptors.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct DaemonSnapshot {
    pub(super) stack: StackSnapshot,
    /// Hardware (MAC) address.
    pub(super) mac: [u8; 6],
    /// Shared memories, with two descriptors each.
    pub(super) memories: Vec<Geometry>,
    /// Applications by index, with a descriptor each.
    pub(super) applications: Vec<Option<ApplicationSnapshot>>,
    /// Sockets by key.
    pub(super) sockets: Vec<Option<SocketSnapshot>>,
    pub(super) transfers: Vec<TransferSnapshot>,
    /// Port claims taken from the kernel, with a descriptor for each kernel socket.
    pub(super) claims: Vec<ClaimSnapshot>,
    /// Closed connections that have not ended, with the indices of their claims.
    pub(super) closing: Vec<(u64, u32)>,
    /// Device to inherit, with a descriptor.
    pub(super) device: Option<DeviceSnapshot>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct ApplicationSnapshot {
    pub(super) identity: Identity,
    pub(super) token: [u8; TOKEN_BYTES],
    /// Index of its shared memory.
    pub(super) memory: u32,
    pub(super) entries: Vec<EntrySnapshot>,
    pub(super) generations: Vec<u32>,
    pub(super) free_slots: Vec<u32>,
    pub(super) queued_notifications: Vec<[u64; NOTIFICATION_WORDS]>,
    /// Command that was taken from the ring and not executed.
    pub(super) deferred_command: Option<[u64; COMMAND_WORDS]>,
    pub(super) commands_taken: u64,
    pub(super) payload_bytes: PayloadBytes,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct EntrySnapshot {
    pub(super) handle: Handle,
    pub(super) key: SocketKey,
    pub(super) is_notification_queued: bool,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct SocketSnapshot {
    pub(super) handle: Handle,
    pub(super) kind: KindSnapshot,
    /// Index of the shared memory that holds its slot.
    pub(super) memory: u32,
    pub(super) status: u64,
    pub(super) origin: Holder,
    pub(super) holders: Vec<Holder>,
    pub(super) is_corrupt: bool,
    /// Index of its port claim.
    pub(super) claim: Option<u32>,
}

/// Claim of a local port taken from the kernel.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct ClaimSnapshot {
    pub(super) protocol: ProtocolSnapshot,
    pub(super) local: SocketAddr,
    pub(super) addresses: Vec<IpAddr>,
    /// A kernel socket is kept with the claim.
    pub(super) has_kernel_socket: bool,
}

/// Kind of the device descriptor handed over.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) enum DeviceSnapshot {
    /// BPF link that keeps the XDP program attached, in the driver if `native`.
    XdpLink { native: bool },
    /// TAP or TUN device.
    Tap,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) enum ProtocolSnapshot {
    Udp,
    Tcp,
}

/// Kind of a socket, with its ID in the stack as a number.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum KindSnapshot {
    Udp { id: u64, pending: Option<DatagramSnapshot>, payload_bytes: PayloadBytes },
    Listener { id: u64 },
    Stream { id: u64, shutdown_pending: bool, is_closed: bool, payload_bytes: PayloadBytes },
}

/// Snapshot of a socket transfer.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct TransferSnapshot {
    pub(super) fd_cookie: FdCookie,
    pub(super) key: SocketKey,
    pub(super) uid: u32,
    pub(super) pending_receivers: u32,
    pub(super) is_shared: bool,
    pub(super) shards: u8,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct DatagramSnapshot {
    pub(super) remote: SocketAddr,
    pub(super) local: IpAddr,
    pub(super) bytes: Vec<u8>,
}

impl DaemonSnapshot {
    /// Serializes the snapshot.
    ///
    /// # Errors
    /// When there is no memory for the bytes.
    pub(super) fn encode(&self) -> io::Result<Vec<u8>> {
        postcard::to_extend(self, FORMAT.to_vec()).map_err(io::Error::other)
    }

    /// Parses untrusted bytes.
    ///
    /// # Errors
    /// [`InvalidSnapshot`] for another version, or for malformed or trailing bytes.
    pub(super) fn decode(bytes: &[u8]) -> Result<Self, InvalidSnapshot> {
        let rest = bytes.strip_prefix(&FORMAT);
        let rest = rest.ok_or(InvalidSnapshot("its version is not supported"))?;
        match postcard::take_from_bytes(rest) {
            Ok((state, [])) => Ok(state),
            _ => Err(InvalidSnapshot("it is malformed")),
        }
    }
}
