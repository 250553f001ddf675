//! The answer to an application that shows the descriptor of a socket which is on
//! its way from another: whether it has the socket now, and the memory that the
//! socket is in.

use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use tidegate_memory::shared::Region;

use super::descriptors::{receive_with, send_with};
use super::layout::{Geometry, Memory};
use super::notice::{Granted, NOTICE_WORDS, Notice};

/// What a socket carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Carried {
    /// Datagrams.
    Datagrams,
    /// Nothing: it listens.
    Listener,
    /// The bytes of a connection.
    Stream,
}

const CARRIED: [Carried; 3] = [Carried::Datagrams, Carried::Listener, Carried::Stream];

/// A socket that came from another application.
pub struct Taken {
    /// Its name with who has taken it, and its addresses.
    pub granted: Granted,
    /// What it carries.
    pub carries: Carried,
    /// Who has taken it did not have it before.
    pub is_new: bool,
    /// How many sockets go with the descriptor.
    pub parts: u8,
    /// The place of its words and streams.
    pub place: u32,
    /// The memory that the place is in.
    pub memory: Memory,
}

/// A head of kind, place, parts and geometry, and the outcome as a notice.
const HEAD_WORDS: usize = 7;
const WORDS: usize = HEAD_WORDS + NOTICE_WORDS;

/// The daemon's answer: a socket with its memory, that something was done, or why
/// not.
///
/// # Errors
/// What the kernel says.
pub fn send_outcome(
    connection: BorrowedFd<'_>,
    outcome: Result<Option<Taken>, ErrorKind>,
) -> io::Result<()> {
    let mut words = [0; WORDS];
    let (head, notice) = words.split_at_mut(HEAD_WORDS);
    let told = match &outcome {
        Ok(Some(taken)) => {
            let Geometry { sockets, tcp_bytes, udp_bytes } = *taken.memory.geometry();
            let kind = CARRIED.iter().position(|&one| one == taken.carries).unwrap_or(0) as u64;
            let numbers = [sockets, tcp_bytes, udp_bytes].map(u64::from);
            let (place, is_new, parts) = (taken.place, taken.is_new, taken.parts);
            head[..4].copy_from_slice(&[kind + 1, place.into(), is_new.into(), parts.into()]);
            head[4..].copy_from_slice(&numbers);
            Some(Notice::Answer { tag: 0, outcome: Ok(taken.granted) })
        }
        Ok(None) => None,
        Err(kind) => Some(Notice::Answer { tag: 0, outcome: Err(*kind) }),
    };
    notice.copy_from_slice(&told.map_or([0; NOTICE_WORDS], Notice::to_words));
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
    let taken = outcome.as_ref().ok().and_then(Option::as_ref);
    let regions = taken.map(|taken| taken.memory.regions().map(AsFd::as_fd));
    send_with(connection, &bytes, regions.as_slice().as_flattened())
}

/// Reads the daemon's answer. `known` finds memory that is here already by one of
/// its pieces.
///
/// # Errors
/// What the daemon refuses with; [`io::ErrorKind::InvalidData`] when it answers
/// something else.
pub fn receive_outcome(
    connection: BorrowedFd<'_>,
    known: impl FnOnce(BorrowedFd<'_>) -> Option<Memory>,
) -> io::Result<Option<Taken>> {
    let mut message = [0; WORDS * 8];
    let (len, fds) = receive_with(connection, &mut message, 2)?;
    let invalid = || io::Error::from(ErrorKind::InvalidData);
    let mut words = [0; WORDS];
    let (pieces, _) = message.as_chunks::<8>();
    for (word, piece) in words.iter_mut().zip(pieces) {
        *word = u64::from_ne_bytes(*piece);
    }
    let (head, notice) = words.split_first_chunk::<HEAD_WORDS>().ok_or_else(invalid)?;
    let notice: [u64; NOTICE_WORDS] = notice.try_into().map_err(|_| invalid())?;
    if len != WORDS * 8 {
        return Err(invalid());
    }
    if notice[0] == 0 {
        return Ok(None);
    }
    let granted = match Notice::from_words(notice) {
        Some(Notice::Answer { outcome, .. }) => outcome.map_err(io::Error::from)?,
        _ => return Err(invalid()),
    };
    let number = |word: u64| u32::try_from(word).map_err(|_| invalid());
    let [kind, place, is_new, parts, sockets, tcp_bytes, udp_bytes] = *head;
    let kind = usize::try_from(kind).ok().and_then(|kind| kind.checked_sub(1));
    let carries = kind.and_then(|kind| CARRIED.get(kind)).ok_or_else(invalid)?;
    let geometry = Geometry {
        sockets: number(sockets)?,
        tcp_bytes: number(tcp_bytes)?,
        udp_bytes: number(udp_bytes)?,
    };
    let [control, data]: [OwnedFd; 2] = fds.try_into().map_err(|_| invalid())?;
    let memory = match known(control.as_fd()) {
        Some(memory) => memory,
        None if geometry.is_sound() => {
            let control = Region::open(control, geometry.control_words())?;
            let data = Region::open(data, geometry.data_words())?;
            Memory::new(geometry, control, data)?
        }
        None => return Err(invalid()),
    };
    let (carries, is_new, place) = (*carries, is_new != 0, number(place)?);
    let parts = u8::try_from(parts).map_err(|_| invalid())?;
    Ok(Some(Taken { granted, carries, is_new, parts, place, memory }))
}
