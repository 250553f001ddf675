//! Limit on the frames that the kernel coalesces on receive (GRO).

use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{LinkAttribute, LinkMessage};

use super::NetlinkError;
use super::socket::Socket;

/// Limits the bytes that an interface coalesces into one frame, until this value is dropped. Of
/// several limits on one interface, the first dropped restores the size that it found.
pub struct GroLimit {
    /// Bound to the network namespace of the interface, whatever thread drops this value.
    socket: Socket,
    index: u32,
    original: GroMaxSizes,
}

/// Largest IP packets that GRO makes (`gro_max_size`, `gro_ipv4_max_size`), in bytes.
#[derive(Clone, Copy)]
struct GroMaxSizes {
    v6: u32,
    v4: u32,
}

impl GroMaxSizes {
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
        // Before Linux 6.3 one size applies to both families.
        Ok(v6.map(|v6| Self { v6, v4: v4.unwrap_or(v6) }))
    }

    fn set(self, socket: &mut Socket, index: u32) -> Result<(), NetlinkError> {
        let mut message = LinkMessage::default();
        message.header.index = index;
        // Setting the first attribute also sets the second, hence this order.
        message.attributes.push(LinkAttribute::GroMaxSize(self.v6));
        message.attributes.push(LinkAttribute::GroIpv4MaxSize(self.v4));
        socket.command("limit GRO (gro_max_size)", RouteNetlinkMessage::SetLink(message))
    }
}

impl GroLimit {
    /// Sets the limit for IP packets in bytes; `None` when the kernel already coalesces no larger
    /// packets, or has no such setting (before Linux 5.19).
    ///
    /// # Errors
    /// Without CAP_NET_ADMIN, or when the interface is gone.
    pub fn set(index: u32, bytes: u32) -> Result<Option<Self>, NetlinkError> {
        let mut socket = Socket::open(0)?;
        let Some(original) = GroMaxSizes::of(&mut socket, index)? else { return Ok(None) };
        if original.v6 <= bytes && original.v4 <= bytes {
            return Ok(None);
        }
        let limited = GroMaxSizes { v6: original.v6.min(bytes), v4: original.v4.min(bytes) };
        limited.set(&mut socket, index)?;
        Ok(Some(Self { socket, index, original }))
    }
}

impl Drop for GroLimit {
    fn drop(&mut self) {
        // The interface may be gone.
        let _ = self.original.set(&mut self.socket, self.index);
    }
}
