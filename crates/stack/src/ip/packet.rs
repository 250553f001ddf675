//! Types that the protocol modules exchange about a packet: verdict on a received packet, ICMP
//! error to report, header fields of a packet to send.

use std::net::IpAddr;

use tidegate_wire::ipv6_extension::ParameterProblem;
use tidegate_wire::{ArpPacket, DropReason, MacAddr, Protocol};

use crate::icmp::{QuotedPacket, ReceivedIcmpError};
use crate::neighbour::NeighbourClaim;

/// Result of the IP layer for a received packet.
pub(crate) enum IpInput<'p> {
    /// Payload for UDP or TCP.
    Transport(TransportPacket<'p>),
    /// ICMP error about a packet of a socket.
    IcmpError(ReceivedIcmpError, QuotedPacket<'p>),
    /// No transport protocol is involved.
    Verdict(RxVerdict),
}

/// Datagram or segment in a received packet.
pub(crate) struct TransportPacket<'p> {
    pub(crate) info: IpInfo,
    /// UDP or TCP.
    pub(crate) protocol: Protocol,
    /// Transport header and payload.
    pub(crate) bytes: &'p [u8],
    /// Offset of `bytes` in the packet, in bytes.
    pub(crate) offset: usize,
}

/// Verdict on a received packet.
pub(crate) enum RxVerdict {
    /// Deliver to a UDP socket.
    Deliver(Delivery),
    /// Addressed to another host: possibly forward.
    Forward(ForwardMeta),
    /// Consumed by the stack itself.
    Handled,
    /// ARP packet, still to be processed.
    Arp(ArpPacket),
    /// Solicitation that reveals the sender's hardware address.
    NeighbourSeen(IpAddr, MacAddr),
    /// Neighbour advertisement.
    NeighbourClaim(NeighbourClaim),
    /// Fragment, stored until its packet is complete.
    FragmentHeld,
    /// Packet completed by this last missing fragment.
    Reassembled(Vec<u8>),
}

/// IP header fields of a packet to send.
#[derive(Clone, Copy)]
pub(crate) struct Packet {
    pub(crate) source: IpAddr,
    pub(crate) destination: IpAddr,
    pub(crate) protocol: Protocol,
    pub(crate) hop_limit: u8,
    pub(crate) traffic_class: u8,
}

/// IP header fields that forwarding needs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ForwardMeta {
    pub(crate) destination: IpAddr,
    /// Length of the IP packet in bytes, without padding.
    pub(crate) packet_bytes: usize,
}

/// ICMP error to send about a received packet.
#[derive(Clone, Copy)]
pub(crate) enum IcmpErrorKind {
    /// No socket listens on the port.
    PortUnreachable,
    /// Unsupported protocol; for IPv6, the offset of the "next header" field in bytes.
    ProtocolUnreachable(u32),
    /// Reassembly timeout.
    ReassemblyTimeout,
    /// Invalid header field.
    ParameterProblem(ParameterProblem),
    /// The packet is not forwarded.
    NotForwarded(ForwardError),
}

/// Reason for not forwarding a packet that its sender may learn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ForwardError {
    /// Time to live or hop limit exceeded.
    HopLimitExceeded,
    /// No route to the destination.
    NoRoute,
    /// The destination is beyond the scope of the source address.
    BeyondScope,
    /// The next hop does not answer.
    HostUnreachable,
    /// The packet exceeds the MTU of the next link and must not be fragmented.
    TooBig {
        /// MTU of that link in bytes.
        mtu: u16,
    },
}

impl ForwardError {
    pub(crate) fn drop_reason(self) -> DropReason {
        match self {
            Self::HopLimitExceeded => DropReason::HopLimitExceeded,
            Self::NoRoute => DropReason::NoRoute,
            Self::BeyondScope => DropReason::ForwardScope,
            Self::HostUnreachable => DropReason::NeighbourUnreachable,
            Self::TooBig { .. } => DropReason::PacketTooBig,
        }
    }
}

/// Fields of the IP header that transport protocols need.
#[derive(Clone, Copy)]
pub(crate) struct IpInfo {
    pub(crate) source: IpAddr,
    pub(crate) destination: IpAddr,
    pub(crate) hop_limit: u8,
    pub(crate) traffic_class: u8,
    /// Sent to a single local address, not to a group or broadcast address.
    pub(crate) is_unicast: bool,
}

/// Destination socket of a datagram and position of its payload in the packet.
pub(crate) struct Delivery {
    pub(crate) info: IpInfo,
    pub(crate) source_port: u16,
    pub(crate) destination_port: u16,
    /// Slot index of the socket; `None` delivers a copy to every socket of the group.
    pub(crate) socket: Option<u32>,
    /// Offset of the payload in the packet, in bytes.
    pub(crate) payload_offset: usize,
    pub(crate) payload_len: usize,
}
