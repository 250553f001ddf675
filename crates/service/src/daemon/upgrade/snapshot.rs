//! Snapshot of a daemon for a handover to the next one: plain data.
//!
//! File descriptors are sent beside it ([`crate::daemon::upgrade::protocol`]).

use std::io;
use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};
use tidegate_stack::StackSnapshot;

use crate::daemon::ids::{Holder, Identity, PayloadBytes, SocketKey};
use crate::daemon::transfer::table::FdCookie;
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
pub(in crate::daemon) struct InvalidSnapshot(pub(in crate::daemon) &'static str);

impl From<InvalidSnapshot> for io::Error {
    fn from(damaged: InvalidSnapshot) -> Self {
        Self::new(io::ErrorKind::InvalidData, damaged)
    }
}

/// Snapshot of a daemon, except its file descriptors.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(in crate::daemon) struct DaemonSnapshot {
    pub(in crate::daemon) stack: StackSnapshot,
    /// Hardware (MAC) address.
    pub(in crate::daemon) mac: [u8; 6],
    /// Shared memories, with two descriptors each.
    pub(in crate::daemon) memories: Vec<Geometry>,
    /// Applications by index, with a descriptor each.
    pub(in crate::daemon) applications: Vec<Option<ApplicationSnapshot>>,
    /// Sockets by key.
    pub(in crate::daemon) sockets: Vec<Option<SocketSnapshot>>,
    pub(in crate::daemon) transfers: Vec<TransferSnapshot>,
    /// Port claims taken from the kernel, with a descriptor for each kernel socket.
    pub(in crate::daemon) claims: Vec<ClaimSnapshot>,
    /// Closed connections that have not ended, with the indices of their claims.
    pub(in crate::daemon) closing: Vec<(u64, u32)>,
    /// Device to inherit, with a descriptor.
    pub(in crate::daemon) device: Option<DeviceSnapshot>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(in crate::daemon) struct ApplicationSnapshot {
    pub(in crate::daemon) identity: Identity,
    pub(in crate::daemon) token: [u8; TOKEN_BYTES],
    /// Index of its shared memory.
    pub(in crate::daemon) memory: u32,
    pub(in crate::daemon) entries: Vec<EntrySnapshot>,
    pub(in crate::daemon) generations: Vec<u32>,
    pub(in crate::daemon) free_slots: Vec<u32>,
    pub(in crate::daemon) queued_notifications: Vec<[u64; NOTIFICATION_WORDS]>,
    /// Command that was taken from the ring and not executed.
    pub(in crate::daemon) deferred_command: Option<[u64; COMMAND_WORDS]>,
    pub(in crate::daemon) commands_taken: u64,
    pub(in crate::daemon) payload_bytes: PayloadBytes,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(in crate::daemon) struct EntrySnapshot {
    pub(in crate::daemon) handle: Handle,
    pub(in crate::daemon) key: SocketKey,
    pub(in crate::daemon) is_notification_queued: bool,
}

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

/// Claim of a local port taken from the kernel.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(in crate::daemon) struct ClaimSnapshot {
    pub(in crate::daemon) protocol: ProtocolSnapshot,
    pub(in crate::daemon) local: SocketAddr,
    pub(in crate::daemon) addresses: Vec<IpAddr>,
    /// A kernel socket is kept with the claim.
    pub(in crate::daemon) has_kernel_socket: bool,
}

/// Kind of the device descriptor handed over.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(in crate::daemon) enum DeviceSnapshot {
    /// BPF link that keeps the XDP program attached, in the driver if `native`.
    XdpLink { native: bool },
    /// TAP or TUN device.
    Tap,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(in crate::daemon) enum ProtocolSnapshot {
    Udp,
    Tcp,
}

/// Kind of a socket, with its ID in the stack as a number.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(in crate::daemon) enum KindSnapshot {
    Udp { id: u64, pending: Option<DatagramSnapshot>, payload_bytes: PayloadBytes },
    Listener { id: u64 },
    Stream { id: u64, shutdown_pending: bool, is_closed: bool, payload_bytes: PayloadBytes },
}

/// Snapshot of a socket transfer.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(in crate::daemon) struct TransferSnapshot {
    pub(in crate::daemon) fd_cookie: FdCookie,
    pub(in crate::daemon) key: SocketKey,
    pub(in crate::daemon) uid: u32,
    pub(in crate::daemon) pending_receivers: u32,
    pub(in crate::daemon) is_shared: bool,
    pub(in crate::daemon) shards: u8,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(in crate::daemon) struct DatagramSnapshot {
    pub(in crate::daemon) remote: SocketAddr,
    pub(in crate::daemon) local: IpAddr,
    pub(in crate::daemon) bytes: Vec<u8>,
}

impl DaemonSnapshot {
    /// Serializes the snapshot.
    ///
    /// # Errors
    /// When there is no memory for the bytes.
    pub(in crate::daemon) fn encode(&self) -> io::Result<Vec<u8>> {
        postcard::to_extend(self, FORMAT.to_vec()).map_err(io::Error::other)
    }

    /// Parses untrusted bytes.
    ///
    /// # Errors
    /// [`InvalidSnapshot`] for another version, or for malformed or trailing bytes.
    pub(in crate::daemon) fn decode(bytes: &[u8]) -> Result<Self, InvalidSnapshot> {
        let rest = bytes.strip_prefix(&FORMAT);
        let rest = rest.ok_or(InvalidSnapshot("its version is not supported"))?;
        match postcard::take_from_bytes(rest) {
            Ok((state, [])) => Ok(state),
            _ => Err(InvalidSnapshot("it is malformed")),
        }
    }
}
