//! Sizes of the frames that the kernel coalesces on receive (GRO).

use netlink_packet_route::link::LinkHeader;

use super::NetlinkError;
use super::message::{LinkAttribute, LinkSetting, Message, Request};
use super::socket::Socket;

/// Largest IP packets that GRO makes (`gro_max_size`, `gro_ipv4_max_size`), in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GroMaxSizes {
    pub(crate) v6: u32,
    pub(crate) v4: u32,
}

impl GroMaxSizes {
    /// Sizes of an interface; `None` when the kernel has no such setting (before Linux 5.19).
    ///
    /// # Errors
    /// When netlink is not available.
    pub(crate) fn of(socket: &mut Socket, index: u32) -> Result<Option<Self>, NetlinkError> {
        let links = socket.dump("list the interfaces", Request::GetLinks)?;
        let link = links.into_iter().find_map(|message| match message {
            Message::NewLink(link) if link.header.index == index => Some(link),
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

    /// Sets the sizes of an interface.
    ///
    /// # Errors
    /// Without CAP_NET_ADMIN, or when the interface is gone.
    pub(crate) fn set(self, socket: &mut Socket, index: u32) -> Result<(), NetlinkError> {
        let header = LinkHeader { index, ..LinkHeader::default() };
        // Setting the first attribute also sets the second, hence this order.
        let sizes = vec![LinkSetting::GroMaxSize(self.v6), LinkSetting::GroIpv4MaxSize(self.v4)];
        socket.command("limit GRO (gro_max_size)", Request::SetLink(header, sizes))
    }

    /// Sizes no larger than `bytes`.
    pub(crate) fn limited_to(self, bytes: u32) -> Self {
        Self { v6: self.v6.min(bytes), v4: self.v4.min(bytes) }
    }
}
