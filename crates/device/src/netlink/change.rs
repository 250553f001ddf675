//! Configures interfaces that Tidegate created itself: TAP devices, and those of tests.

use std::net::IpAddr;

use netlink_packet_route::AddressFamily;
use netlink_packet_route::address::{AddressAttribute, AddressFlags, AddressMessage};
use netlink_packet_route::link::{LinkFlags, LinkHeader};
use tidegate_wire::IpCidr;

use super::NetlinkError;
use super::message::{LinkSetting, Request};
use super::socket::Socket;

/// Sets an interface up.
///
/// # Errors
/// Without CAP_NET_ADMIN, or when the interface is gone.
pub fn set_up(index: u32) -> Result<(), NetlinkError> {
    set_flags(index, LinkFlags::Up, "set the interface up")
}

/// Sets an interface down.
///
/// # Errors
/// As [`set_up`].
pub fn set_down(index: u32) -> Result<(), NetlinkError> {
    set_flags(index, LinkFlags::empty(), "set the interface down")
}

fn set_flags(index: u32, flags: LinkFlags, step: &'static str) -> Result<(), NetlinkError> {
    let header = LinkHeader { index, flags, change_mask: LinkFlags::Up, ..LinkHeader::default() };
    Socket::open(0)?.command(step, Request::SetLink(header, Vec::new()))
}

/// Sets the MTU of an interface in bytes.
///
/// # Errors
/// Without CAP_NET_ADMIN, when the interface is gone or does not take the MTU.
pub fn set_mtu(index: u32, mtu: u32) -> Result<(), NetlinkError> {
    let header = LinkHeader { index, ..LinkHeader::default() };
    let request = Request::SetLink(header, vec![LinkSetting::Mtu(mtu)]);
    Socket::open(0)?.command("set the MTU", request)
}

/// Adds a kernel address to an interface that is up. IPv6 addresses skip
/// duplicate address detection. The kernel accepts packets to a new IPv6 address only a moment
/// later, when a [`Monitor`](super::Monitor) reports the address.
///
/// # Errors
/// Without CAP_NET_ADMIN, or when the interface is gone.
pub fn add_address(index: u32, address: IpCidr) -> Result<(), NetlinkError> {
    let mut message = AddressMessage::default();
    message.header.index = index;
    message.header.prefix_len = address.prefix_bits();
    message.header.family = match address.address() {
        IpAddr::V4(_) => AddressFamily::Inet,
        IpAddr::V6(_) => AddressFamily::Inet6,
    };
    message.attributes.push(AddressAttribute::Local(address.address()));
    message.attributes.push(AddressAttribute::Address(address.address()));
    if address.address().is_ipv6() {
        message.attributes.push(AddressAttribute::Flags(AddressFlags::Nodad));
    }
    Socket::open(0)?.command("add an address", Request::NewAddress(message))
}
