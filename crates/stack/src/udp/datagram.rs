//! Received datagrams.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use tidegate_memory::{Arena, Frame};

use super::family::DatagramFamily;
use crate::fast_path::family::RawTuple;
use crate::snapshot::SnapshotBytes;

/// Bytes of a packet: in the frame that the device received, or in an allocation of their own
/// after reassembly.
pub(crate) enum Payload {
    /// Received frame.
    Frame(Frame),
    /// Separate allocation.
    Owned(Box<[u8]>),
}

impl Payload {
    /// Drops the first `n` bytes, and keeps at most `len` of the rest.
    #[inline]
    pub(crate) fn narrow(&mut self, n: usize, len: usize) {
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

/// Header fields of a received datagram, as in [`Datagram`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DatagramInfo {
    /// Sender.
    pub remote: SocketAddr,
    /// Destination address.
    pub local: IpAddr,
    /// Remaining hop limit or time to live.
    pub hop_limit: u8,
    /// Traffic class byte.
    pub traffic_class: u8,
}

impl DatagramInfo {
    /// Reads the headers in front of the payload of a plain datagram.
    #[inline]
    pub(crate) fn of_plain<F: DatagramFamily>(frame: &Frame, arena: &Arena) -> Option<Self> {
        let head = F::head(arena, frame)?.as_ref();
        let (remote, local) = RawTuple::<F>::from_head(head).app_addresses(false);
        let (hop_limit, traffic_class) = (F::hop_limit(head), F::traffic_class(head));
        Some(Self { remote, local, hop_limit, traffic_class })
    }
}

/// Received datagram.
///
/// The caller must free the datagram with [`Datagram::release`]: most datagrams hold the frame
/// in which they arrived, and a frame that is not freed is lost.
#[must_use = "a datagram that is not released keeps its frame"]
pub struct Datagram {
    pub(crate) payload: Payload,
    /// Sender.
    pub remote: SocketAddr,
    /// Destination address: a local address, a multicast group or a broadcast address.
    pub local: IpAddr,
    /// Remaining hop limit (IPv6) or time to live (IPv4).
    pub hop_limit: u8,
    /// Differentiated services code point and ECN bits, as one byte (RFC 2474, RFC 3168).
    pub traffic_class: u8,
}

impl Datagram {
    /// Makes a datagram of the entry of a plain datagram.
    #[inline]
    pub(crate) fn from_plain<F: DatagramFamily>(frame: Frame, arena: &Arena) -> Self {
        let Some(fields) = DatagramInfo::of_plain::<F>(&frame, arena) else {
            debug_assert!(false, "a queued datagram has no headers in its headroom");
            return Self::unknown(frame);
        };
        let DatagramInfo { remote, local, hop_limit, traffic_class } = fields;
        Self { payload: Payload::Frame(frame), remote, local, hop_limit, traffic_class }
    }

    #[cold]
    fn unknown(frame: Frame) -> Self {
        let unspecified = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
        Self {
            payload: Payload::Frame(frame),
            remote: SocketAddr::new(unspecified, 0),
            local: unspecified,
            hop_limit: 0,
            traffic_class: 0,
        }
    }

    /// Header fields.
    #[inline]
    pub fn info(&self) -> DatagramInfo {
        let Self { remote, local, hop_limit, traffic_class, .. } = *self;
        DatagramInfo { remote, local, hop_limit, traffic_class }
    }

    /// Payload.
    #[inline]
    pub fn bytes<'a>(&'a self, arena: &'a Arena) -> &'a [u8] {
        self.payload.bytes(arena)
    }

    /// Payload length in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.payload.len()
    }

    /// True if the payload is empty.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Passes the payload and the data of the frame `reply` to `f`. Both lie in the arena; nothing
    /// is copied.
    #[inline]
    pub fn with_reply<R>(
        &self,
        arena: &mut Arena,
        reply: &mut Frame,
        f: impl FnOnce(&[u8], &mut [u8]) -> R,
    ) -> R {
        match &self.payload {
            Payload::Frame(frame) => {
                let (request, reply) = arena.read_and_write(frame, reply);
                f(request, reply)
            }
            Payload::Owned(bytes) => f(bytes, arena.bytes_mut(reply)),
        }
    }

    /// Converts the datagram into its frame, with the payload as data, to be edited and sent back
    /// without a copy.
    ///
    /// # Errors
    /// Returns the datagram itself when it was reassembled from fragments and has no frame.
    pub fn into_frame(self) -> Result<Frame, Datagram> {
        match self.payload {
            Payload::Frame(frame) => Ok(frame),
            Payload::Owned(..) => Err(self),
        }
    }

    /// Frees the memory of the datagram.
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

/// Queued datagram as plain data.
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub(crate) struct DatagramSnapshot<'a> {
    pub(crate) remote: SocketAddr,
    pub(crate) local: IpAddr,
    pub(crate) hop_limit: u8,
    pub(crate) traffic_class: u8,
    #[cfg_attr(feature = "serde", serde(borrow))]
    pub(crate) data: SnapshotBytes<'a>,
}
