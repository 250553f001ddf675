//! What the parts of the stack tell each other about a packet: what became of
//! one that came in, what is wrong with it, and what one shall say that goes out.

use std::net::IpAddr;

use tidegate_wire::ipv6_extension::ParameterProblem;
use tidegate_wire::{ArpPacket, DropReason, MacAddr, Protocol};

use crate::neighbour::Claim;
use crate::udp::Delivery;

/// What is to become of a received packet.
pub(crate) enum Fate {
    /// It goes to a socket.
    Deliver(Delivery),
    /// It is for somebody else, and may be forwarded.
    Forward(Onward),
    /// It was for the stack itself, and all is done.
    Handled,
    /// It is an ARP packet.
    Arp(ArpPacket),
    /// A neighbour spoke to us and told its hardware address.
    Heard(IpAddr, MacAddr),
    /// A neighbour advertises.
    Claim(Claim),
    /// It is a fragment of a packet that is not complete yet.
    Held,
    /// It was the last fragment that was missing of this packet.
    Rebuilt(Vec<u8>),
}

/// What the header of a packet to send shall say.
#[derive(Clone, Copy)]
pub(crate) struct Packet {
    pub(crate) source: IpAddr,
    pub(crate) destination: IpAddr,
    pub(crate) protocol: Protocol,
    pub(crate) hop_limit: u8,
    pub(crate) traffic_class: u8,
}

/// What the header of a packet for others says.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Onward {
    pub(crate) destination: IpAddr,
    /// The length of the packet; behind it there may be padding.
    pub(crate) packet_bytes: usize,
}

/// What we have to say about a packet.
#[derive(Clone, Copy)]
pub(crate) enum Complaint {
    /// Nobody listens on the port.
    Port,
    /// Nothing here speaks the protocol; IPv6 tells where it was named.
    Protocol(u32),
    /// Fragments were missing when the time was up.
    Reassembly,
    /// A header is wrong.
    Parameter(ParameterProblem),
    /// We do not forward the packet.
    Transit(Refusal),
}

/// Why a packet is not forwarded, as far as its sender is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// Its time to live ran out.
    HopLimit,
    /// Nothing leads there.
    NoRoute,
    /// Its source has no meaning where it wants to go.
    Scope,
    /// The next hop does not answer.
    Host,
    /// It is longer than the next link carries, and must not be cut.
    TooBig {
        /// What that link carries, in bytes.
        mtu: u16,
    },
}

impl Refusal {
    pub(crate) fn reason(self) -> DropReason {
        match self {
            Self::HopLimit => DropReason::HopLimitExceeded,
            Self::NoRoute => DropReason::NoRoute,
            Self::Scope => DropReason::ForwardScope,
            Self::Host => DropReason::NeighbourUnreachable,
            Self::TooBig { .. } => DropReason::PacketTooBig,
        }
    }
}
