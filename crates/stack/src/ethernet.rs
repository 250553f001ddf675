//! The link: what came on it, and what is put on it.

use tidegate_memory::{Arena, Checksum, Frame};
use tidegate_wire::{DropReason, EtherType, EthernetHeader, MacAddr, Medium, VlanTag};

use crate::Stack;
use crate::path::Path;

/// What the link says about a packet.
#[derive(Clone, Copy)]
pub(crate) struct Arrival {
    /// It was sent to a group or to everybody on the link.
    pub(crate) group: bool,
    /// Who sent it, on the link.
    pub(crate) source_mac: MacAddr,
    /// It was put together from fragments.
    pub(crate) rebuilt: bool,
    /// We sent it to ourselves: it may come from an address of ours, as nothing
    /// from the wire may.
    pub(crate) looped: bool,
    /// What the port knows about its transport checksum.
    pub(crate) checksum: Checksum,
}

impl Arrival {
    /// For a packet of which the link says nothing.
    pub(crate) fn plain(checksum: Checksum) -> Arrival {
        Arrival {
            group: false,
            source_mac: MacAddr::UNSPECIFIED,
            rebuilt: false,
            looped: false,
            checksum,
        }
    }

    /// For a packet that has no link header, in this frame.
    #[inline]
    pub(crate) fn without_link(
        packet: &[u8],
        frame: &Frame,
    ) -> Result<(EtherType, Arrival), DropReason> {
        let ethertype = match packet.first().ok_or(DropReason::Ipv4Truncated)? >> 4 {
            4 => EtherType::IPV4,
            6 => EtherType::IPV6,
            _ => return Err(DropReason::EtherTypeUnknown),
        };
        Ok((ethertype, Arrival { looped: frame.is_looped(), ..Arrival::plain(frame.checksum()) }))
    }
}

impl Stack {
    /// Decides whether a frame is for us.
    #[inline]
    pub(crate) fn ethernet_input(
        &self,
        header: &EthernetHeader,
        frame: &Frame,
    ) -> Result<Arrival, DropReason> {
        if header.vlan.is_some() || self.vlan.is_some() {
            self.check_vlan(header.vlan)?;
        }
        if header.source.is_group() {
            return Err(DropReason::EthernetSourceInvalid);
        }
        let group = header.destination != self.mac;
        if group
            && !(header.destination.is_group() && self.addresses.listens_to(header.destination))
        {
            return Err(DropReason::EthernetNotForUs);
        }
        Ok(Arrival {
            group,
            source_mac: header.source,
            rebuilt: false,
            looped: frame.is_looped(),
            checksum: frame.checksum(),
        })
    }

    /// A tag with number 0 only tells a priority (IEEE 802.1Q).
    fn check_vlan(&self, tag: Option<VlanTag>) -> Result<(), DropReason> {
        let id = |tag: Option<VlanTag>| tag.map_or(0, VlanTag::id);
        if id(tag) == id(self.vlan) { Ok(()) } else { Err(DropReason::VlanNotForUs) }
    }

    /// Bytes of the link header of what we send.
    #[inline]
    pub(crate) fn link_bytes(&self) -> usize {
        match (self.medium, self.vlan) {
            (Medium::Ip, _) => 0,
            (Medium::Ethernet, None) => EthernetHeader::BYTES,
            (Medium::Ethernet, Some(_)) => EthernetHeader::BYTES + VlanTag::BYTES,
        }
    }

    /// Writes the link header to the front of a frame.
    #[inline]
    pub(crate) fn emit_link<'b>(
        &self,
        destination: MacAddr,
        ethertype: EtherType,
        bytes: &'b mut [u8],
    ) -> Option<&'b mut [u8]> {
        if self.medium == Medium::Ip {
            return Some(bytes);
        }
        EthernetHeader { destination, source: self.mac, vlan: self.vlan, ethertype }.emit(bytes)
    }

    /// Sends a frame that holds an IP packet to a station.
    pub(crate) fn send_to(
        &mut self,
        arena: &mut Arena,
        mac: MacAddr,
        is_v4: bool,
        mut frame: Frame,
    ) {
        frame.retreat(self.link_bytes());
        let ethertype = if is_v4 { EtherType::IPV4 } else { EtherType::IPV6 };
        let written = self.emit_link(mac, ethertype, arena.bytes_mut(&mut frame)).is_some();
        debug_assert!(written, "a frame for sending has headroom");
        self.push_transmit(arena, frame);
    }

    /// Puts a frame that is ready where the path leads: into the transmit queue,
    /// or among those that come back in.
    #[inline]
    pub(crate) fn push_on(&mut self, arena: &mut Arena, path: &Path, frame: Frame) {
        if path.loops { self.push_looped(arena, frame) } else { self.push_transmit(arena, frame) }
    }

    #[cold]
    fn push_looped(&mut self, arena: &mut Arena, mut frame: Frame) {
        if self.looped.len() >= self.limits.transmit_frames {
            self.counters.transmit_drops.count(DropReason::TransmitQueueFull);
            return arena.free(frame);
        }
        frame.set_looped();
        self.counters.transmitted += 1;
        self.looped.push_back(frame);
    }

    /// Puts a frame that is ready into the transmit queue.
    #[inline]
    pub(crate) fn push_transmit(&mut self, arena: &mut Arena, frame: Frame) {
        if self.transmit.len() >= self.limits.transmit_frames {
            self.counters.transmit_drops.count(DropReason::TransmitQueueFull);
            return arena.free(frame);
        }
        self.counters.transmitted += 1;
        self.transmit.push_back(frame);
    }
}
