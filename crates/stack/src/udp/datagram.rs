//! A datagram that arrived.

use std::fmt;
use std::net::{IpAddr, SocketAddr};

use tidegate_memory::{Arena, Frame};

/// The bytes of a packet: in the frame it came in, or in memory of its own
/// when it was put together from fragments.
pub(crate) enum Payload {
    /// The frame it came in.
    Frame(Frame),
    /// Memory of its own.
    Owned(Box<[u8]>),
}

impl Payload {
    /// Drops `n` bytes from the front and all behind the next `len`.
    #[inline]
    pub(crate) fn cut(&mut self, n: usize, len: usize) {
        match self {
            Payload::Frame(frame) => {
                frame.advance(n);
                frame.truncate(len);
            }
            Payload::Owned(bytes) => {
                let rest = bytes.get(n..).unwrap_or_default();
                *bytes = rest.get(..len).unwrap_or(rest).into();
            }
        }
    }

    #[inline]
    pub(crate) fn len(&self) -> usize {
        match self {
            Payload::Frame(frame) => frame.len(),
            Payload::Owned(bytes) => bytes.len(),
        }
    }

    #[inline]
    pub(crate) fn bytes<'a>(&'a self, arena: &'a Arena) -> &'a [u8] {
        match self {
            Payload::Frame(frame) => arena.bytes(frame),
            Payload::Owned(bytes) => bytes,
        }
    }

    #[inline]
    pub(crate) fn release(self, arena: &mut Arena) {
        if let Payload::Frame(frame) = self {
            arena.free(frame);
        }
    }
}

/// A datagram that arrived.
///
/// Give it back with [`Datagram::release`]: most datagrams lie in the frame
/// that they came in, and a frame that is not given back is lost.
#[must_use = "a datagram that is not released keeps its frame"]
pub struct Datagram {
    pub(crate) payload: Payload,
    /// Who sent it.
    pub remote: SocketAddr,
    /// The address that it was sent to: one of ours, a group or broadcast.
    pub local: IpAddr,
    /// How many more routers could have passed it on.
    pub hop_limit: u8,
    /// Differentiated services code point and congestion notification, as one
    /// byte (RFC 2474, RFC 3168).
    pub traffic_class: u8,
}

impl Datagram {
    /// The bytes that were sent.
    #[inline]
    pub fn bytes<'a>(&'a self, arena: &'a Arena) -> &'a [u8] {
        self.payload.bytes(arena)
    }

    /// How many bytes were sent.
    #[inline]
    pub fn len(&self) -> usize {
        self.payload.len()
    }

    /// Whether nothing but a header was sent.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Hands the bytes that were sent, and the data of the frame for the reply,
    /// to `f`: both lie in the arena, and nothing is copied.
    #[inline]
    pub fn with_reply<R>(
        &self,
        arena: &mut Arena,
        reply: &mut Frame,
        f: impl FnOnce(&[u8], &mut [u8]) -> R,
    ) -> R {
        match &self.payload {
            Payload::Frame(frame) => {
                let (request, reply) = arena.pair(frame, reply);
                f(request, reply)
            }
            Payload::Owned(bytes) => f(bytes, arena.bytes_mut(reply)),
        }
    }

    /// The frame that the datagram lies in, with its bytes as data, to be
    /// changed and sent back without a copy. `Err` gives back a datagram that
    /// was put together from fragments and has no frame.
    ///
    /// # Errors
    /// The datagram itself, when it has no frame.
    pub fn into_frame(self) -> Result<Frame, Datagram> {
        match self.payload {
            Payload::Frame(frame) => Ok(frame),
            Payload::Owned(..) => Err(self),
        }
    }

    /// Gives its memory back.
    #[inline]
    pub fn release(self, arena: &mut Arena) {
        self.payload.release(arena);
    }
}

impl fmt::Debug for Datagram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes from {} to {}", self.len(), self.remote, self.local)
    }
}
