//! What a port is told to take away from the kernel.

use std::net::IpAddr;

/// A transport protocol with ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Protocol {
    /// The User Datagram Protocol.
    Udp,
    /// The Transmission Control Protocol.
    Tcp,
}

/// One thing to take.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rule {
    /// All packets to this address, fragments included, and the ARP and
    /// neighbour discovery messages about it. For an address that the kernel
    /// does not have itself.
    Address(IpAddr),
    /// Packets to this port, of one address or of any. Everything else to the
    /// address stays with the kernel, and so do fragments, which have no ports.
    Port {
        /// The protocol of the port.
        protocol: Protocol,
        /// The destination address; `None` is any, IPv4 or IPv6.
        address: Option<IpAddr>,
        /// The destination port.
        port: u16,
    },
    /// Every frame, whatever it holds. For an interface that belongs to
    /// Tidegate alone.
    Everything,
}
