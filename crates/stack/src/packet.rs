//! What the parts of the stack tell each other about a packet: what became of
//! one that came in, and what one shall say that goes out.

use std::net::IpAddr;

use tidegate_wire::{ArpPacket, MacAddr, Protocol};

use crate::forward::Onward;
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
