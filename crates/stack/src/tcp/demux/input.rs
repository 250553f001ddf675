//! Receive path of segments: from the IP layer to the connection.

use std::net::{IpAddr, SocketAddr};

use tidegate_memory::Checksum;
use tidegate_wire::{DropReason, TcpHeader, tcp};

use super::table::TcpTable;
use crate::AddressOwnership;
use crate::interface::Interface;
use crate::ip::packet::{RxVerdict, TransportPacket};
use crate::link::LinkMeta;
use crate::tcp::segment::{FourTuple, Segment};

impl TcpTable {
    /// Parses a segment, verifies the checksum and passes the segment to the connection. Sends
    /// nothing yet.
    pub(crate) fn handle_packet(
        &mut self,
        interface: &Interface,
        now_ns: u64,
        packet: &TransportPacket<'_>,
        link_meta: &LinkMeta,
    ) -> Result<RxVerdict, DropReason> {
        let TransportPacket { info, bytes, .. } = packet;
        let (header, payload) = TcpHeader::parse(bytes)?;
        if link_meta.checksum == Checksum::Unknown {
            match (info.source, info.destination) {
                (IpAddr::V4(source), IpAddr::V4(destination)) => {
                    tcp::verify_v4(source, destination, bytes)?;
                }
                (IpAddr::V6(source), IpAddr::V6(destination)) => {
                    tcp::verify_v6(source, destination, bytes)?;
                }
                _ => debug_assert!(false, "a packet has two addresses of one family"),
            }
        }
        // RFC 9293 section 3.9.2.3: no connections with multicast or broadcast addresses.
        if !info.is_unicast || link_meta.is_group {
            return Err(DropReason::TcpGroup);
        }
        if header.destination_port == 0 || header.source_port == 0 {
            return Err(DropReason::TcpPortZero);
        }
        let segment = Segment::new(&header, bytes, payload, info.traffic_class)?;
        let tuple = FourTuple::new(
            SocketAddr::new(info.destination, header.destination_port),
            SocketAddr::new(info.source, header.source_port),
        );
        // On an address shared with the kernel, the connection may be the kernel's: no RST.
        let may_reset = interface.ownership == AddressOwnership::Exclusive;
        self.handle_segment(now_ns, tuple, &segment, may_reset)?;
        Ok(RxVerdict::Handled)
    }
}
