//! How much of what arrives the kernel merges into one frame (GRO).

use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{LinkAttribute, LinkMessage};

use super::NetlinkError;
use super::socket::Socket;

/// Keeps an interface from merging packets into more than so many bytes, until
/// it is dropped. Of several on one interface, the one that goes first takes
/// its limit with it.
pub struct MergeLimit {
    /// Bound to the network namespace of the interface, whoever drops it.
    socket: Socket,
    index: u32,
    before: Sizes,
}

/// The longest IP packets that merging makes: of IPv6, and of IPv4.
#[derive(Clone, Copy)]
struct Sizes {
    v6: u32,
    v4: u32,
}

impl Sizes {
    fn of(socket: &mut Socket, index: u32) -> Result<Option<Self>, NetlinkError> {
        let request = RouteNetlinkMessage::GetLink(LinkMessage::default());
        let links = socket.dump("list the interfaces", request)?;
        let link = links.into_iter().find_map(|message| match message {
            RouteNetlinkMessage::NewLink(link) if link.header.index == index => Some(link),
            _ => None,
        });
        let (mut v6, mut v4) = (None, None);
        for attribute in link.iter().flat_map(|link| &link.attributes) {
            match attribute {
                LinkAttribute::GroMaxSize(bytes) => v6 = Some(*bytes),
                LinkAttribute::GroIpv4MaxSize(bytes) => v4 = Some(*bytes),
                _ => {}
            }
        }
        // Before Linux 6.3 one number is for both.
        Ok(v6.map(|v6| Self { v6, v4: v4.unwrap_or(v6) }))
    }

    fn set(self, socket: &mut Socket, index: u32) -> Result<(), NetlinkError> {
        let mut message = LinkMessage::default();
        message.header.index = index;
        // The first sets the second too, so this is the order.
        message.attributes.push(LinkAttribute::GroMaxSize(self.v6));
        message.attributes.push(LinkAttribute::GroIpv4MaxSize(self.v4));
        socket.command("limit what is merged", RouteNetlinkMessage::SetLink(message))
    }
}

impl MergeLimit {
    /// Sets a limit for IP packets, in bytes; `None` when the kernel merges no
    /// longer ones anyway, or has no such setting (before Linux 5.19).
    ///
    /// # Errors
    /// Without CAP_NET_ADMIN, or when the interface is gone.
    pub fn set(index: u32, bytes: u32) -> Result<Option<Self>, NetlinkError> {
        let mut socket = Socket::open(0)?;
        let Some(before) = Sizes::of(&mut socket, index)? else { return Ok(None) };
        if before.v6 <= bytes && before.v4 <= bytes {
            return Ok(None);
        }
        let limited = Sizes { v6: before.v6.min(bytes), v4: before.v4.min(bytes) };
        limited.set(&mut socket, index)?;
        Ok(Some(Self { socket, index, before }))
    }
}

impl Drop for MergeLimit {
    fn drop(&mut self) {
        // The interface may be gone.
        let _ = self.before.set(&mut self.socket, self.index);
    }
}
