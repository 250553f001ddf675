//! Queue entries and frames of datagrams of either address family.

use tidegate_memory::arena::FreeBatch;
use tidegate_memory::{Arena, Frame};

use super::Lookup;
use crate::fast_path::family::{Family, PortPair, V4, V6};

/// Entry of a socket's receive queue.
pub(crate) enum QueuedDatagram {
    /// Payload of a plain IPv4 datagram. The headroom in front of the payload holds the headers: UDP,
    /// IPv4 without options, and Ethernet. The source port is not zero.
    V4(Frame),
    /// Payload of a plain IPv6 datagram: as [`Self::V4`], with an IPv6 header without extensions.
    V6(Frame),
    /// Next datagram of the socket's `metadata_queue`.
    WithMetadata,
}

/// Address family of datagrams on the fast path.
pub(crate) trait DatagramFamily: Family {
    /// Queue entry of a payload whose frame still has the headers in front.
    fn queued(frame: Frame) -> QueuedDatagram;

    /// True if a queue entry is of this family.
    fn has_queued(entry: &QueuedDatagram) -> bool;

    /// Index of the socket for a datagram, or an index without a socket.
    fn find_socket(lookup: &Lookup, addresses: Self::AddressPair, ports: PortPair) -> u32;

    /// Headers in front of a payload.
    fn head<'a>(arena: &'a Arena, frame: &Frame) -> Option<&'a Self::UdpHead>;

    /// Headers in front of a payload, and the space for the payload.
    fn head_mut<'a>(
        buffers: &'a mut impl ReplyBuffers,
        frame: &'a mut Frame,
    ) -> Option<(&'a mut Self::UdpHead, &'a mut [u8])>;
}

impl DatagramFamily for V4 {
    #[inline(always)]
    fn queued(frame: Frame) -> QueuedDatagram {
        QueuedDatagram::V4(frame)
    }

    #[inline(always)]
    fn has_queued(entry: &QueuedDatagram) -> bool {
        matches!(entry, QueuedDatagram::V4(_))
    }

    #[inline(always)]
    fn find_socket(lookup: &Lookup, addresses: Self::AddressPair, ports: PortPair) -> u32 {
        let ((from, to), (source, destination)) = (V4::split(addresses), ports.split());
        lookup.find_plain_v4((to.octets(), destination), (from.octets(), source))
    }

    #[inline(always)]
    fn head<'a>(arena: &'a Arena, frame: &Frame) -> Option<&'a Self::UdpHead> {
        arena.headers(frame)
    }

    #[inline(always)]
    fn head_mut<'a>(
        buffers: &'a mut impl ReplyBuffers,
        frame: &'a mut Frame,
    ) -> Option<(&'a mut Self::UdpHead, &'a mut [u8])> {
        buffers.headers_mut(frame)
    }
}

impl DatagramFamily for V6 {
    #[inline(always)]
    fn queued(frame: Frame) -> QueuedDatagram {
        QueuedDatagram::V6(frame)
    }

    #[inline(always)]
    fn has_queued(entry: &QueuedDatagram) -> bool {
        matches!(entry, QueuedDatagram::V6(_))
    }

    #[inline(always)]
    fn find_socket(lookup: &Lookup, addresses: Self::AddressPair, ports: PortPair) -> u32 {
        let ((from, to), (source, destination)) = (V6::split(addresses), ports.split());
        lookup.find_plain_v6((to.octets(), destination), (from.octets(), source))
    }

    #[inline(always)]
    fn head<'a>(arena: &'a Arena, frame: &Frame) -> Option<&'a Self::UdpHead> {
        arena.headers(frame)
    }

    #[inline(always)]
    fn head_mut<'a>(
        buffers: &'a mut impl ReplyBuffers,
        frame: &'a mut Frame,
    ) -> Option<(&'a mut Self::UdpHead, &'a mut [u8])> {
        buffers.headers_mut(frame)
    }
}

/// Frame memory in which replies are written: the operations on the arena, in bursts or one by one.
pub(crate) trait ReplyBuffers {
    fn free(&mut self, frame: Frame);

    fn set_len(&self, frame: &mut Frame, len: usize) -> bool;

    fn headers_mut<const N: usize>(
        &mut self,
        frame: &mut Frame,
    ) -> Option<(&mut [u8; N], &mut [u8])>;
}

impl ReplyBuffers for &mut Arena {
    #[inline(always)]
    fn free(&mut self, frame: Frame) {
        Arena::free(self, frame);
    }

    #[inline(always)]
    fn set_len(&self, frame: &mut Frame, len: usize) -> bool {
        Arena::set_len(self, frame, len)
    }

    #[inline(always)]
    fn headers_mut<const N: usize>(
        &mut self,
        frame: &mut Frame,
    ) -> Option<(&mut [u8; N], &mut [u8])> {
        Arena::headers_mut(self, frame)
    }
}

impl ReplyBuffers for FreeBatch<'_> {
    #[inline(always)]
    fn free(&mut self, frame: Frame) {
        FreeBatch::free(self, frame);
    }

    #[inline(always)]
    fn set_len(&self, frame: &mut Frame, len: usize) -> bool {
        FreeBatch::set_len(self, frame, len)
    }

    #[inline(always)]
    fn headers_mut<const N: usize>(
        &mut self,
        frame: &mut Frame,
    ) -> Option<(&mut [u8; N], &mut [u8])> {
        FreeBatch::headers_mut(self, frame)
    }
}
