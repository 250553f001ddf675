//! What a daemon hands over to the one that goes on in its place: plain data.
//!
//! Descriptors go beside it ([`super::succession`]); here they are numbers.

use std::io;
use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};
use tidegate_stack::SavedStack;

use super::names::{Identity, Moved, Owner, SocketKey};
use super::passages::Shown;
use crate::contract::command::{COMMAND_WORDS, Handle};
use crate::contract::layout::Geometry;
use crate::contract::notice::NOTICE_WORDS;
use crate::contract::ticket::TICKET_BYTES;

/// What it is, and which version: another one is not taken up. The stack's own
/// part has a version of its own.
const FORMAT: [u8; 8] = *b"tidestt\x05";

/// What was handed over makes no sense.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("what the other daemon has handed over makes no sense: {0}; restart instead of upgrading")]
pub(super) struct Damaged(pub(super) &'static str);

impl From<Damaged> for io::Error {
    fn from(damaged: Damaged) -> Self {
        Self::new(io::ErrorKind::InvalidData, damaged)
    }
}

/// A daemon, all but its descriptors.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct State {
    pub(super) stack: SavedStack,
    /// The hardware address.
    pub(super) mac: [u8; 6],
    /// The memory that applications have, with two descriptors each.
    pub(super) memories: Vec<Geometry>,
    /// By their numbers, with a descriptor each.
    pub(super) applications: Vec<Option<SavedApplication>>,
    /// By their numbers.
    pub(super) sockets: Vec<Option<SavedSocket>>,
    pub(super) passages: Vec<SavedPassage>,
    /// What was taken from the kernel, with a descriptor for each that is held.
    pub(super) claims: Vec<SavedClaim>,
    /// Connections that were closed and have not ended, with their claims' numbers.
    pub(super) ending: Vec<(u64, u32)>,
    /// What is left of the port, with a descriptor.
    pub(super) port: Option<SavedPort>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct SavedApplication {
    pub(super) identity: Identity,
    pub(super) ticket: [u8; TICKET_BYTES],
    /// The number of its memory.
    pub(super) memory: u32,
    pub(super) entries: Vec<SavedEntry>,
    pub(super) generations: Vec<u32>,
    pub(super) free: Vec<u32>,
    pub(super) untold: Vec<[u64; NOTICE_WORDS]>,
    /// A command that was taken and not done.
    pub(super) held_back: Option<[u64; COMMAND_WORDS]>,
    pub(super) commands_taken: u64,
    pub(super) moved: Moved,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct SavedEntry {
    pub(super) handle: Handle,
    pub(super) key: SocketKey,
    pub(super) waits_to_tell: bool,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct SavedSocket {
    pub(super) handle: Handle,
    pub(super) kind: SavedKind,
    /// The number of the memory that its place is in.
    pub(super) memory: u32,
    pub(super) status: u64,
    pub(super) origin: Owner,
    pub(super) holders: Vec<Owner>,
    pub(super) is_broken: bool,
    /// The number of what was taken from the kernel for it.
    pub(super) claim: Option<u32>,
}

/// A local port that was taken from the kernel.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct SavedClaim {
    pub(super) protocol: SavedProtocol,
    pub(super) local: SocketAddr,
    pub(super) addresses: Vec<IpAddr>,
    /// A socket of the kernel's is held with it.
    pub(super) is_held: bool,
}

/// What the descriptor is that is left of a port.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) enum SavedPort {
    /// It keeps a program at the interface, in the driver or not.
    Link { native: bool },
    /// A TAP or TUN device.
    Tap,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) enum SavedProtocol {
    Udp,
    Tcp,
}

/// What it is in the stack: names of the stack's as numbers.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum SavedKind {
    Datagrams { id: u64, held: Option<SavedDatagram>, moved: Moved },
    Listener { id: u64 },
    Stream { id: u64, is_shut: bool, is_closed: bool, moved: Moved },
}

/// A socket that whoever shows its descriptor gets, as plain data.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct SavedPassage {
    pub(super) shown: Shown,
    pub(super) key: SocketKey,
    pub(super) uid: u32,
    pub(super) count: u32,
    pub(super) is_shared: bool,
    pub(super) parts: u8,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct SavedDatagram {
    pub(super) remote: SocketAddr,
    pub(super) local: IpAddr,
    pub(super) bytes: Vec<u8>,
}

impl State {
    /// As bytes.
    ///
    /// # Errors
    /// When there is no memory for them.
    pub(super) fn encode(&self) -> io::Result<Vec<u8>> {
        postcard::to_extend(self, FORMAT.to_vec()).map_err(io::Error::other)
    }

    /// From bytes that may be anything.
    ///
    /// # Errors
    /// [`Damaged`].
    pub(super) fn decode(bytes: &[u8]) -> Result<Self, Damaged> {
        let rest = bytes.strip_prefix(&FORMAT);
        let rest = rest.ok_or(Damaged("it is of a version that this program does not read"))?;
        match postcard::take_from_bytes(rest) {
            Ok((state, [])) => Ok(state),
            _ => Err(Damaged("it cannot be read")),
        }
    }
}
