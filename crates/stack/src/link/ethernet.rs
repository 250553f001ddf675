//! Link layer input and output.

use tidegate_memory::{Arena, Checksum, Frame};
use tidegate_wire::{DropReason, EtherType, EthernetHeader, MacAddr, Medium, VlanTag};

use crate::interface::Interface;
use crate::ip::path::Path;

/// Link-layer information about a received packet.
#[derive(Clone, Copy)]
pub(crate) struct LinkMeta {
    /// The frame was sent to a multicast or broadcast hardware address.
    pub(crate) is_group: bool,
    /// Hardware address of the sender.
    pub(crate) source_mac: MacAddr,
    /// The packet was reassembled from fragments.
    pub(crate) is_reassembled: bool,
    /// The packet was sent by this stack to itself. Only such packets may carry a local source
    /// address.
    pub(crate) is_loopback: bool,
    /// State of the transport checksum as reported by the device.
    pub(crate) checksum: Checksum,
}

impl LinkMeta {
    /// Metadata of a packet without link-layer information.
    pub(crate) fn new(checksum: Checksum) -> LinkMeta {
        LinkMeta {
            is_group: false,
            source_mac: MacAddr::UNSPECIFIED,
            is_reassembled: false,
            is_loopback: false,
            checksum,
        }
    }

    /// Determines EtherType and metadata of a frame without a link header.
    #[inline]
    pub(crate) fn of_ip_frame(
        packet: &[u8],
        frame: &Frame,
    ) -> Result<(EtherType, LinkMeta), DropReason> {
        let ethertype = match packet.first().ok_or(DropReason::Ipv4Truncated)? >> 4 {
            4 => EtherType::IPV4,
            6 => EtherType::IPV6,
            _ => return Err(DropReason::EtherTypeUnknown),
        };
        Ok((
            ethertype,
            LinkMeta { is_loopback: frame.is_loopback(), ..LinkMeta::new(frame.checksum()) },
        ))
    }
}

impl Interface {
    /// Checks VLAN, source and destination of a received frame.
    #[inline]
    pub(crate) fn handle_ethernet(
        &self,
        header: &EthernetHeader,
        frame: &Frame,
    ) -> Result<LinkMeta, DropReason> {
        if header.vlan.is_some() || self.vlan.is_some() {
            self.check_vlan(header.vlan)?;
        }
        if header.source.is_group() {
            return Err(DropReason::EthernetSourceInvalid);
        }
        let is_group = header.destination != self.mac;
        if is_group
            && !(header.destination.is_group() && self.addresses.listens_to(header.destination))
        {
            return Err(DropReason::EthernetNotForUs);
        }
        Ok(LinkMeta {
            is_group,
            source_mac: header.source,
            is_reassembled: false,
            is_loopback: frame.is_loopback(),
            checksum: frame.checksum(),
        })
    }

    /// Compares a tag with the interface's VLAN. Identifier 0 marks a priority tag only
    /// (IEEE 802.1Q), which counts as untagged.
    fn check_vlan(&self, tag: Option<VlanTag>) -> Result<(), DropReason> {
        let id = |tag: Option<VlanTag>| tag.map_or(0, VlanTag::id);
        if id(tag) == id(self.vlan) { Ok(()) } else { Err(DropReason::VlanNotForUs) }
    }

    /// Length of the link header of sent frames, in bytes.
    #[inline]
    pub(crate) fn link_header_bytes(&self) -> usize {
        match (self.medium, self.vlan) {
            (Medium::Ip, _) => 0,
            (Medium::Ethernet, None) => EthernetHeader::BYTES,
            (Medium::Ethernet, Some(_)) => EthernetHeader::BYTES + VlanTag::BYTES,
        }
    }

    /// Writes the link header to the front of a frame and returns the rest.
    #[inline]
    pub(crate) fn emit_link_header<'b>(
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

    /// Sends a frame that holds an IP packet to a hardware address.
    pub(crate) fn send_to_mac(
        &mut self,
        arena: &mut Arena,
        mac: MacAddr,
        is_v4: bool,
        mut frame: Frame,
    ) {
        frame.retreat(self.link_header_bytes());
        let ethertype = if is_v4 { EtherType::IPV4 } else { EtherType::IPV6 };
        let written = self.emit_link_header(mac, ethertype, arena.bytes_mut(&mut frame)).is_some();
        debug_assert!(written, "a frame to send has headroom");
        self.push_transmit(arena, frame);
    }

    /// Queues a complete frame: for transmission, or for loopback when the path leads to this host.
    #[inline]
    pub(crate) fn push_to_path(&mut self, arena: &mut Arena, path: &Path, frame: Frame) {
        if path.is_loopback {
            self.push_loopback(arena, frame);
        } else {
            self.push_transmit(arena, frame);
        }
    }

    #[cold]
    fn push_loopback(&mut self, arena: &mut Arena, mut frame: Frame) {
        if self.loopback.len() >= self.limits.transmit_frames {
            self.counters.count_transmit_drop(DropReason::TransmitQueueFull);
            return arena.free(frame);
        }
        frame.set_loopback();
        self.counters.transmitted += 1;
        self.loopback.push_back(frame);
    }

    /// Appends a complete frame to the transmit queue; drops on overflow.
    #[inline]
    pub(crate) fn push_transmit(&mut self, arena: &mut Arena, frame: Frame) {
        if self.transmit.len() >= self.limits.transmit_frames {
            self.counters.count_transmit_drop(DropReason::TransmitQueueFull);
            return arena.free(frame);
        }
        self.counters.transmitted += 1;
        self.transmit.push_back(frame);
    }
}
