//! Snapshot of a daemon for a handover to the next one: plain data.
//!
//! File descriptors are sent beside it ([`super::protocol`]). The number of the format stands
//! before the data. It counts every change of the data, of the descriptors and their order, and of
//! the stack's snapshot, which has a number of its own.
//!
//! A new format keeps the types of the one before in a module of its own (`v8`): only those that
//! changed, and those that hold them. Their conversion sets what is new. `golden` has a state of
//! each format.

#[cfg(test)]
mod golden;
mod unreadable;
mod v8;

use std::io::{self, Write};
use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};
use tidegate_engine::InheritedKind;
use tidegate_stack::StackSnapshot;

use crate::daemon::application::snapshot::ApplicationSnapshot;
use crate::daemon::ids::ProtocolSnapshot;
use crate::daemon::snapshot_error::InvalidSnapshot;
use crate::daemon::socket::snapshot::SocketSnapshot;
use crate::daemon::transfer::table::TransferSnapshot;
use crate::ipc::layout::Geometry;

pub(in crate::daemon) use self::unreadable::{SnapshotError, UnreadableFormat};

/// Magic number; a byte with the format follows.
const MAGIC: [u8; 7] = *b"tidestt";

/// Format of a snapshot that this version writes. New since format 8: the library of each
/// application.
pub(in crate::daemon) const STATE_FORMAT: u8 = 9;
/// Oldest format that this version reads.
pub(in crate::daemon) const OLDEST_STATE_FORMAT: u8 = 8;

/// File descriptors of each shared memory.
pub(super) const FDS_PER_MEMORY: usize = 2;
/// Descriptors of one application beside its kernel sockets: its connection and its wake-ups.
const FDS_PER_APPLICATION: usize = 3;

/// Bytes that are written at once.
const BUFFER_BYTES: usize = 64 << 10;

/// Snapshot of a daemon, except its file descriptors.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(in crate::daemon) struct DaemonSnapshot<'a> {
    #[serde(borrow)]
    pub(super) stack: StackSnapshot<'a>,
    /// Hardware (MAC) address.
    pub(in crate::daemon) mac: [u8; 6],
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
    /// Number of descriptors that reserve own addresses.
    pub(super) reservations: u32,
}

/// Claim of a local port taken from the kernel.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct ClaimSnapshot {
    pub(in crate::daemon) protocol: ProtocolSnapshot,
    pub(in crate::daemon) local: SocketAddr,
    pub(in crate::daemon) addresses: Vec<IpAddr>,
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

impl From<InheritedKind> for DeviceSnapshot {
    fn from(kind: InheritedKind) -> Self {
        match kind {
            InheritedKind::XdpLink { native } => Self::XdpLink { native },
            InheritedKind::Tap => Self::Tap,
        }
    }
}

impl From<DeviceSnapshot> for InheritedKind {
    fn from(saved: DeviceSnapshot) -> Self {
        match saved {
            DeviceSnapshot::XdpLink { native } => Self::XdpLink { native },
            DeviceSnapshot::Tap => Self::Tap,
        }
    }
}

impl<'a> DaemonSnapshot<'a> {
    /// Serializes the snapshot to a writer, without a copy of all in between.
    ///
    /// # Errors
    /// The error of the writer.
    pub(super) fn encode(&self, mut to: impl Write) -> io::Result<()> {
        to.write_all(&MAGIC)?;
        to.write_all(&[STATE_FORMAT])?;
        let mut to = io::BufWriter::with_capacity(BUFFER_BYTES, to);
        postcard::to_io(self, &mut to).map_err(io::Error::other)?;
        to.flush()
    }

    /// Number of descriptors that belong to the snapshot.
    pub(super) fn count_descriptors(&self) -> usize {
        let apps = self.applications.iter().flatten();
        let held = self.claims.iter().filter(|claim| claim.has_kernel_socket).count();
        self.memories.len() * FDS_PER_MEMORY
            + apps.map(|app| FDS_PER_APPLICATION + app.kernel_sockets.len()).sum::<usize>()
            + held
            + usize::from(self.device.is_some())
            + self.reservations as usize
    }

    /// Parses untrusted bytes of this format or an older one. Data of the stack stays where it is.
    ///
    /// # Errors
    /// [`SnapshotError`] for a format that this version does not read, and for malformed or
    /// trailing bytes.
    pub(in crate::daemon) fn decode(bytes: &'a [u8]) -> Result<Self, SnapshotError> {
        let rest = bytes.strip_prefix(&MAGIC).and_then(|rest| rest.split_first());
        let (&format, rest) = rest.ok_or(InvalidSnapshot("it does not begin with its format"))?;
        UnreadableFormat::check(format)?;
        match format {
            8 => parse::<v8::DaemonSnapshot<'a>>(rest).map(Self::from),
            _ => parse(rest),
        }
    }
}

#[cfg(test)]
impl DaemonSnapshot<'_> {
    /// Bytes that a daemon of the format before writes.
    pub(super) fn to_format_8(&self) -> Vec<u8> {
        let head = [&MAGIC[..], &[8]].concat();
        postcard::to_extend(&v8::DaemonSnapshot::from(self.clone()), head).unwrap()
    }
}

/// Parses all of some bytes.
fn parse<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Result<T, SnapshotError> {
    match postcard::take_from_bytes(bytes) {
        Ok((state, [])) => Ok(state),
        _ => Err(InvalidSnapshot("it is malformed").into()),
    }
}
