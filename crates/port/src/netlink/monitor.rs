//! Changes of interfaces, addresses, routes and neighbours, as they happen.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use netlink_packet_route::RouteNetlinkMessage;
use rustix::io::Errno;
use tidegate_wire::IpCidr;

use super::socket::Socket;
use super::{Interface, Neighbour, NetlinkError, Route, address_from, neighbour_from, routes_from};

// RTMGRP_* of linux/rtnetlink.h.
const LINK: u32 = 0x1;
const NEIGHBOUR: u32 = 0x4;
const IPV4_ADDRESS: u32 = 0x10;
const IPV4_ROUTE: u32 = 0x40;
const IPV6_ADDRESS: u32 = 0x100;
const IPV6_ROUTE: u32 = 0x400;

/// Something changed. Every change but [`Change::Lost`] names the index of its
/// interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// An interface appeared or is not as it was: up, down, carrier, MTU, name.
    Link(Interface),
    /// An interface is gone.
    LinkRemoved(u32),
    /// The kernel got an address.
    Address(u32, IpCidr),
    /// The kernel lost an address.
    AddressRemoved(u32, IpCidr),
    /// A route appeared.
    Route(u32, Route),
    /// A route is gone.
    RouteRemoved(u32, Route),
    /// A neighbour appeared or is not as it was.
    Neighbour(u32, Neighbour),
    /// A neighbour was forgotten.
    NeighbourRemoved(u32, Neighbour),
    /// More changed than the socket could hold: read everything again.
    Lost,
}

/// A descriptor that becomes readable when the kernel's network configuration
/// changes.
pub struct Monitor {
    socket: Socket,
    waiting: VecDeque<Change>,
}

impl Monitor {
    /// Begins to listen. Open it first and read the tables afterwards, so that
    /// nothing is missed in between.
    ///
    /// # Errors
    /// When netlink does not work here.
    pub fn open() -> Result<Self, NetlinkError> {
        let groups = LINK | NEIGHBOUR | IPV4_ADDRESS | IPV4_ROUTE | IPV6_ADDRESS | IPV6_ROUTE;
        Ok(Self { socket: Socket::open(groups)?, waiting: VecDeque::new() })
    }

    /// The next change; `None` when there is none now. Never blocks.
    ///
    /// # Errors
    /// When the socket is of no further use.
    pub fn poll_change(&mut self) -> io::Result<Option<Change>> {
        loop {
            if let Some(change) = self.waiting.pop_front() {
                return Ok(Some(change));
            }
            let waiting = &mut self.waiting;
            match self.socket.notifications(|message| read(&message, waiting)) {
                Ok(true) => {}
                Ok(false) => return Ok(None),
                Err(error) if error.raw_os_error() == Some(Errno::NOBUFS.raw_os_error()) => {
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

fn read(message: &RouteNetlinkMessage, out: &mut VecDeque<Change>) {
    use RouteNetlinkMessage as Message;
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
