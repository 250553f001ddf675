//! Notifications of changed interfaces, addresses, routes and neighbours.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use rustix::io::Errno;
use tidegate_wire::IpCidr;

use super::message::Message;
use super::socket::Socket;
use super::{Interface, Neighbour, NetlinkError, Route, address_from, neighbour_from, routes_from};

// Multicast groups of linux/rtnetlink.h.
const RTMGRP_LINK: u32 = 0x1;
const RTMGRP_NEIGH: u32 = 0x4;
const RTMGRP_IPV4_IFADDR: u32 = 0x10;
const RTMGRP_IPV4_ROUTE: u32 = 0x40;
const RTMGRP_IPV6_IFADDR: u32 = 0x100;
const RTMGRP_IPV6_ROUTE: u32 = 0x400;

/// A change of the kernel's network configuration. Every change but [`Change::Lost`] names the
/// index of its interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// An interface appeared or changed: up, down, carrier, MTU, name.
    Link(Interface),
    /// An interface was removed.
    LinkRemoved(u32),
    /// An address was added.
    Address(u32, IpCidr),
    /// An address was removed.
    AddressRemoved(u32, IpCidr),
    /// A route was added.
    Route(u32, Route),
    /// A route was removed.
    RouteRemoved(u32, Route),
    /// A neighbour appeared or changed.
    Neighbour(u32, Neighbour),
    /// A neighbour was removed.
    NeighbourRemoved(u32, Neighbour),
    /// Notifications were lost because the socket buffer overflowed, or could not be read: read all
    /// tables again.
    Lost,
}

/// Receives notifications of changes; the descriptor becomes readable when the kernel's network
/// configuration changes.
pub struct Monitor {
    socket: Socket,
    pending: VecDeque<Change>,
}

impl Monitor {
    /// Subscribes to changes. Open the monitor first and read the tables afterwards, so that no
    /// change is missed in between.
    ///
    /// # Errors
    /// When netlink is not available.
    pub fn open() -> Result<Self, NetlinkError> {
        let groups = RTMGRP_LINK
            | RTMGRP_NEIGH
            | RTMGRP_IPV4_IFADDR
            | RTMGRP_IPV4_ROUTE
            | RTMGRP_IPV6_IFADDR
            | RTMGRP_IPV6_ROUTE;
        Ok(Self { socket: Socket::open(groups)?, pending: VecDeque::new() })
    }

    /// Number of messages that were skipped since they could not be parsed.
    pub fn unreadable(&self) -> u64 {
        self.socket.unreadable()
    }

    /// Returns the next change; `None` when no change is pending. Never blocks.
    ///
    /// # Errors
    /// When the socket is unusable.
    pub fn poll_change(&mut self) -> io::Result<Option<Change>> {
        loop {
            if let Some(change) = self.pending.pop_front() {
                return Ok(Some(change));
            }
            let pending = &mut self.pending;
            match self.socket.notifications(|message| collect_changes(&message, pending)) {
                Ok(true) => {}
                Ok(false) => return Ok(None),
                Err(error)
                    if error.raw_os_error() == Some(Errno::NOBUFS.raw_os_error())
                        || error.kind() == io::ErrorKind::InvalidData =>
                {
                    return Ok(Some(Change::Lost));
                }
                Err(error) => return Err(error),
            }
        }
    }
}

impl AsFd for Monitor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn collect_changes(message: &Message, out: &mut VecDeque<Change>) {
    match message {
        Message::NewLink(link) => out.extend(Interface::from_link(link).map(Change::Link)),
        Message::DelLink(link) => {
            out.extend(Interface::from_link(link).map(|gone| Change::LinkRemoved(gone.index)));
        }
        Message::NewAddress(address) => {
            out.extend(address_from(address).map(|(index, cidr)| Change::Address(index, cidr)));
        }
        Message::DelAddress(address) => out
            .extend(address_from(address).map(|(index, cidr)| Change::AddressRemoved(index, cidr))),
        Message::NewRoute(route) => out.extend(
            routes_from(route).into_iter().map(|(index, route)| Change::Route(index, route)),
        ),
        Message::DelRoute(route) => out.extend(
            routes_from(route).into_iter().map(|(index, route)| Change::RouteRemoved(index, route)),
        ),
        Message::NewNeighbour(neighbour) => out
            .extend(neighbour_from(neighbour).map(|(index, host)| Change::Neighbour(index, host))),
        Message::DelNeighbour(neighbour) => out.extend(
            neighbour_from(neighbour).map(|(index, host)| Change::NeighbourRemoved(index, host)),
        ),
        _ => {}
    }
}
