//! Packet header parsing and serialization, Internet checksums, and the table of drop reasons.
//!
//! Every header is a plain value with two main functions:
//!
//! * `parse` takes untrusted bytes and checks all lengths once. On success it returns the value
//!   and the payload, cut to the length field of the header. On failure it returns the
//!   [`DropReason`] under which the packet is counted.
//! * `emit` writes the value to the front of a buffer and returns the rest of the buffer, or
//!   `None` when the header does not fit.
//!
//! No function panics, allocates or loops without bound, whatever the input bytes.
//!
//! # Examples
//!
//! ```
//! use core::net::Ipv4Addr;
//! use tidegate_wire::{Ipv4Header, Protocol, UdpHeader, checksum, udp};
//!
//! let (source, destination) = (Ipv4Addr::new(192, 0, 2, 1), Ipv4Addr::new(192, 0, 2, 2));
//! let mut packet = [0; 33];
//!
//! let ip = Ipv4Header::new(source, destination, Protocol::UDP, 13).unwrap();
//! let datagram = ip.emit(&mut packet).unwrap();
//! let payload = UdpHeader::new(4000, 53, 5).unwrap().emit(datagram).unwrap();
//! payload.copy_from_slice(b"hello");
//! let pseudo = checksum::pseudo_header_v4(source, destination, Protocol::UDP, 13);
//! udp::fill_checksum(pseudo, datagram);
//!
//! let (ip, datagram) = Ipv4Header::parse(&packet)?;
//! let (udp_header, payload) = UdpHeader::parse(datagram)?;
//! udp::verify_v4(ip.source, ip.destination, datagram)?;
//! assert_eq!((udp_header.destination_port, payload), (53, b"hello".as_slice()));
//! # Ok::<(), tidegate_wire::DropReason>(())
//! ```
#![no_std]
#![forbid(unsafe_code)]

mod arp;
pub mod checksum;
mod cidr;
mod drops;
mod ethernet;
mod field;
mod icmp;
pub mod icmpv4;
pub mod icmpv6;
mod ipv4;
mod ipv6;
pub mod ipv6_extension;
mod mac;
pub mod mld;
pub mod ndp;
mod protocol;
pub mod tcp;
pub mod udp;

pub use arp::{ArpOperation, ArpPacket};
pub use checksum::Sum;
pub use cidr::{IpCidr, ParseIpCidrError};
pub use drops::{DropCounters, DropReason, Severity};
pub use ethernet::{EthernetHeader, VlanTag};
pub use icmpv4::Icmpv4Message;
pub use icmpv6::Icmpv6Message;
pub use ipv4::{Ipv4Header, Ipv4Option, Ipv4Options, Ipv4Route};
pub use ipv6::Ipv6Header;
pub use ipv6_extension::{ExtensionError, ExtensionWalk, FragmentHeader, UpperLayer, upper_layer};
pub use mac::{MacAddr, ParseMacAddrError};
pub use mld::MldMessage;
pub use ndp::{NdpMessage, NdpOption, NdpOptions, NeighbourAdvertisement};
pub use protocol::{EtherType, Protocol};
pub use tcp::{TcpFlags, TcpHeader, TcpOption, TcpOptions};
pub use udp::UdpHeader;

/// First header of every frame on an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Medium {
    /// An Ethernet header.
    Ethernet,
    /// An IPv4 or IPv6 header: a TUN device, or an in-memory link between two stacks.
    Ip,
}
