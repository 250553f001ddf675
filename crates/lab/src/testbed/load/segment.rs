//! Prebuilt TCP segments.

use std::net::SocketAddrV4;

use tidegate_wire::checksum::pseudo_header_v4;
use tidegate_wire::tcp::fill_checksum;
use tidegate_wire::{
    EtherType, EthernetHeader, Ipv4Header, MacAddr, Protocol, TcpFlags, TcpHeader, TcpOption,
};

/// Length of the maximum segment size option in a SYN; other segments have no options.
const SYN_OPTION_BYTES: usize = 4;

/// TCP segment over IPv4 and Ethernet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Segment<'p> {
    /// Sender: hardware address, address and port.
    pub(crate) source: (MacAddr, SocketAddrV4),
    /// Receiver: hardware address, address and port.
    pub(crate) target: (MacAddr, SocketAddrV4),
    pub(crate) sequence: u32,
    pub(crate) acknowledgement: u32,
    pub(crate) flags: TcpFlags,
    pub(crate) payload: &'p [u8],
}

impl Segment<'_> {
    /// Builds the Ethernet frame; `None` when the segment is too long for IPv4.
    pub(crate) fn frame(&self) -> Option<Vec<u8>> {
        let ((source_mac, source), (target_mac, target)) = (self.source, self.target);
        let is_syn = self.flags.contains(TcpFlags::SYN);
        let header_bytes = TcpHeader::BYTES + if is_syn { SYN_OPTION_BYTES } else { 0 };
        let segment_bytes = header_bytes + self.payload.len();
        let mut frame = vec![0; EthernetHeader::BYTES + Ipv4Header::BYTES + segment_bytes];
        let ethernet = EthernetHeader {
            destination: target_mac,
            source: source_mac,
            vlan: None,
            ethertype: EtherType::IPV4,
        };
        let packet = ethernet.emit(&mut frame)?;
        let ip = Ipv4Header::new(*source.ip(), *target.ip(), Protocol::TCP, segment_bytes)?;
        let segment = ip.emit(packet)?;
        if is_syn {
            TcpOption::MaximumSegmentSize(1460).emit(segment.get_mut(TcpHeader::BYTES..)?)?;
        }
        segment.get_mut(header_bytes..)?.copy_from_slice(self.payload);
        let header = TcpHeader {
            source_port: source.port(),
            destination_port: target.port(),
            sequence: self.sequence,
            acknowledgement: self.acknowledgement,
            header_bytes: header_bytes as u8,
            flags: self.flags,
            window: 65_535,
            checksum: 0,
            urgent_pointer: 0,
        };
        header.emit(segment)?;
        let bytes = segment_bytes as u16;
        let pseudo = pseudo_header_v4(*source.ip(), *target.ip(), Protocol::TCP, bytes);
        fill_checksum(pseudo, segment);
        Some(frame)
    }
}
