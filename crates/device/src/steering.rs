//! Steering rules: the packets that a device redirects from the kernel.

use std::io;
use std::net::IpAddr;

/// A transport protocol with port numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TransportProtocol {
    /// The User Datagram Protocol.
    Udp,
    /// The Transmission Control Protocol.
    Tcp,
}

/// A set of packets to redirect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SteeringRule {
    /// All packets to this address, fragments included, and its ARP and neighbour discovery
    /// messages. For an address that the kernel does not have.
    Address(IpAddr),
    /// Packets to this port, of one address or of any. All other packets to the address stay with
    /// the kernel, as do fragments, which have no port numbers.
    Port {
        /// Protocol of the port.
        protocol: TransportProtocol,
        /// Destination address; `None` matches any, IPv4 or IPv6.
        address: Option<IpAddr>,
        /// Destination port.
        port: u16,
    },
    /// Every frame, regardless of its content. For an interface that only Tidegate uses.
    Everything,
}

/// Steering rules of a device, for the threads of all cores that share it.
pub trait SharedRules: Send + Sync {
    /// As [`Device::set_steering`](crate::Device::set_steering).
    ///
    /// # Errors
    /// Those of [`Device::set_steering`](crate::Device::set_steering).
    fn set(&self, rule: &SteeringRule, take: bool) -> io::Result<()>;
}
