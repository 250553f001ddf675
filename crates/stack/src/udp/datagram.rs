//! A datagram that arrived.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use serde::{Deserialize, Serialize};
use serde_bytes::ByteBuf;
use tidegate_memory::{Arena, Frame};
use tidegate_wire::{Ipv4Header, Ipv6Header, UdpHeader};

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

/// A datagram in the queue of a socket.
pub(crate) enum Waiting {
    /// A payload with a UDP header and an IPv4 header without options in front
    /// of it in the headroom, from a port that can be answered.
    V4(Frame),
    /// The same with an IPv6 header without extension headers.
    V6(Frame),
    /// The next of those that are described by themselves.
    Described,
}

/// The headers in front of a payload that waits.
pub(crate) const PLAIN_V4_BYTES: usize = Ipv4Header::BYTES + UdpHeader::BYTES;
pub(crate) const PLAIN_V6_BYTES: usize = Ipv6Header::BYTES + UdpHeader::BYTES;

/// Who sent a datagram with these headers, and the address it was sent to.
#[inline]
pub(crate) fn ends_v4(head: &[u8; PLAIN_V4_BYTES]) -> (SocketAddr, IpAddr) {
    let address = |at| Ipv4Addr::from(array_at::<4, PLAIN_V4_BYTES>(head, at));
    let port = u16::from_be_bytes(array_at(head, 20));
    (SocketAddr::new(address(12).into(), port), address(16).into())
}

/// As [`ends_v4`].
#[inline]
pub(crate) fn ends_v6(head: &[u8; PLAIN_V6_BYTES]) -> (SocketAddr, IpAddr) {
    let address = |at| Ipv6Addr::from(array_at::<16, PLAIN_V6_BYTES>(head, at));
    let port = u16::from_be_bytes(array_at(head, 40));
    (SocketAddr::new(address(8).into(), port), address(24).into())
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
    /// The datagram that waits as [`Waiting::V4`].
    #[inline]
    pub(crate) fn plain_v4(frame: Frame, arena: &Arena) -> Self {
        let Some(head) = arena.headers::<PLAIN_V4_BYTES>(&frame) else {
            debug_assert!(false, "a datagram lost its headers");
            return Self::unknown(frame);
        };
        let (remote, local) = ends_v4(head);
        Self {
            remote,
            local,
            hop_limit: head[8],
            traffic_class: head[1],
            payload: Payload::Frame(frame),
        }
    }

    /// The datagram that waits as [`Waiting::V6`].
    #[inline]
    pub(crate) fn plain_v6(frame: Frame, arena: &Arena) -> Self {
        let Some(head) = arena.headers::<PLAIN_V6_BYTES>(&frame) else {
            debug_assert!(false, "a datagram lost its headers");
            return Self::unknown(frame);
        };
        let (remote, local) = ends_v6(head);
        Self {
            remote,
            local,
            hop_limit: head[7],
            traffic_class: head[0] << 4 | head[1] >> 4,
            payload: Payload::Frame(frame),
        }
    }

    #[cold]
    fn unknown(frame: Frame) -> Self {
        let nowhere = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
        Self {
            payload: Payload::Frame(frame),
            remote: SocketAddr::new(nowhere, 0),
            local: nowhere,
            hop_limit: 0,
            traffic_class: 0,
        }
    }

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

/// The `M` bytes at `at`.
#[inline(always)]
pub(crate) fn array_at<const M: usize, const N: usize>(bytes: &[u8; N], at: usize) -> [u8; M] {
    let mut part = [0; M];
    part.copy_from_slice(&bytes[at..at + M]);
    part
}

impl fmt::Debug for Datagram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes from {} to {}", self.len(), self.remote, self.local)
    }
}

/// A datagram that waits, as plain data.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct SavedDatagram {
    pub(crate) remote: SocketAddr,
    pub(crate) local: IpAddr,
    pub(crate) hop_limit: u8,
    pub(crate) traffic_class: u8,
    pub(crate) data: ByteBuf,
}
