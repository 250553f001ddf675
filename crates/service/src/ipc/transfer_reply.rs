//! Reply to a transfer request. An application that has received a kernel descriptor learns
//! whether it now holds the socket, and in which memory the socket is.

use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use tidegate_memory::shared::Region;

use super::fd_passing::{receive_with_fds, send_with_fds};
use super::layout::{Geometry, SharedMemory};
use super::notification::{NOTIFICATION_WORDS, Notification, OpenedSocket};

/// Type of a transferred socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransferredType {
    /// UDP socket.
    Udp,
    /// Listener, which has no streams.
    Listener,
    /// TCP connection.
    Stream,
}

const TRANSFERRED_TYPES: [TransferredType; 3] =
    [TransferredType::Udp, TransferredType::Listener, TransferredType::Stream];

/// Socket received from another application.
pub struct TransferReply {
    /// Handle at the receiving application, and the addresses.
    pub socket: OpenedSocket,
    /// Type of the socket.
    pub socket_type: TransferredType,
    /// False if the receiving application held the socket before.
    pub is_new: bool,
    /// Number of shards that belong to the descriptor.
    pub shards: u8,
    /// Slot of the socket's words and streams in `memory`.
    pub slot: u32,
    /// Memory that holds the slot.
    pub memory: SharedMemory,
}

/// Words of the header: type, slot, new flag, shards, geometry. A notification follows.
const HEADER_WORDS: usize = 7;
const WORDS: usize = HEADER_WORDS + NOTIFICATION_WORDS;

/// Sends the daemon's reply: a socket with its memory, success without a socket, or an error.
///
/// # Errors
/// Errors of `sendmsg`.
pub fn send_outcome(
    connection: BorrowedFd<'_>,
    outcome: Result<Option<TransferReply>, ErrorKind>,
) -> io::Result<()> {
    let mut words = [0; WORDS];
    let (header, notification_words) = words.split_at_mut(HEADER_WORDS);
    let notification = match &outcome {
        Ok(Some(reply)) => {
            let Geometry { sockets, tcp_bytes, udp_bytes } = *reply.memory.geometry();
            let kind =
                TRANSFERRED_TYPES.iter().position(|&one| one == reply.socket_type).unwrap_or(0)
                    as u64;
            let numbers = [sockets, tcp_bytes, udp_bytes].map(u64::from);
            let (slot, is_new, shards) = (reply.slot, reply.is_new, reply.shards);
            header[..4].copy_from_slice(&[kind + 1, slot.into(), is_new.into(), shards.into()]);
            header[4..].copy_from_slice(&numbers);
            Some(Notification::Reply { tag: 0, outcome: Ok(reply.socket) })
        }
        Ok(None) => None,
        Err(kind) => Some(Notification::Reply { tag: 0, outcome: Err(*kind) }),
    };
    notification_words
        .copy_from_slice(&notification.map_or([0; NOTIFICATION_WORDS], Notification::to_words));
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
    let reply = outcome.as_ref().ok().and_then(Option::as_ref);
    let regions = reply.map(|taken| taken.memory.regions().map(AsFd::as_fd));
    send_with_fds(connection, &bytes, regions.as_slice().as_flattened())
}

/// Receives the daemon's reply. `find_known` returns memory that is already mapped, by the
/// descriptor of its control region.
///
/// # Errors
/// The error with which the daemon refuses; [`io::ErrorKind::InvalidData`] if the reply is not
/// valid.
pub fn receive_outcome(
    connection: BorrowedFd<'_>,
    find_known: impl FnOnce(BorrowedFd<'_>) -> Option<SharedMemory>,
) -> io::Result<Option<TransferReply>> {
    let mut message = [0; WORDS * 8];
    let (len, fds) = receive_with_fds(connection, &mut message, 2)?;
    let invalid = || io::Error::from(ErrorKind::InvalidData);
    let mut words = [0; WORDS];
    let (pieces, _) = message.as_chunks::<8>();
    for (word, piece) in words.iter_mut().zip(pieces) {
        *word = u64::from_ne_bytes(*piece);
    }
    let (header, notification) = words.split_first_chunk::<HEADER_WORDS>().ok_or_else(invalid)?;
    let notification: [u64; NOTIFICATION_WORDS] = notification.try_into().map_err(|_| invalid())?;
    if len != WORDS * 8 {
        return Err(invalid());
    }
    if notification[0] == 0 {
        return Ok(None);
    }
    let socket = match Notification::from_words(notification) {
        Some(Notification::Reply { outcome, .. }) => outcome.map_err(io::Error::from)?,
        _ => return Err(invalid()),
    };
    let number = |word: u64| u32::try_from(word).map_err(|_| invalid());
    let [kind, slot, is_new, shards, sockets, tcp_bytes, udp_bytes] = *header;
    let kind = usize::try_from(kind).ok().and_then(|kind| kind.checked_sub(1));
    let socket_type = kind.and_then(|kind| TRANSFERRED_TYPES.get(kind)).ok_or_else(invalid)?;
    let geometry = Geometry {
        sockets: number(sockets)?,
        tcp_bytes: number(tcp_bytes)?,
        udp_bytes: number(udp_bytes)?,
    };
    let [control, data]: [OwnedFd; 2] = fds.try_into().map_err(|_| invalid())?;
    let memory = match find_known(control.as_fd()) {
        Some(memory) => memory,
        None if geometry.is_valid() => {
            let control = Region::open(control, geometry.control_words())?;
            let data = Region::open(data, geometry.data_words())?;
            SharedMemory::new(geometry, control, data)?
        }
        None => return Err(invalid()),
    };
    let (socket_type, is_new, slot) = (*socket_type, is_new != 0, number(slot)?);
    let shards = u8::try_from(shards).map_err(|_| invalid())?;
    Ok(Some(TransferReply { socket, socket_type, is_new, shards, slot, memory }))
}
