//! Receive path of segments: from the IP layer to the connection.

use std::net::{IpAddr, SocketAddr};

use tidegate_memory::Checksum;
use tidegate_wire::{DropReason, TcpHeader, tcp};

use crate::ip::packet::IpInfo;
use crate::ip::packet::RxVerdict;
use crate::link::LinkMeta;
use crate::tcp::segment::{FourTuple, Segment};
use crate::{AddressOwnership, Stack};

impl Stack {
    /// Parses a segment, verifies the checksum and passes the segment to the connection. Sends
    /// nothing yet.
    pub(crate) fn tcp_input(
        &mut self,
        now_ns: u64,
        info: &IpInfo,
        arrival: &LinkMeta,
        bytes: &[u8],
    ) -> Result<RxVerdict, DropReason> {
        let (header, payload) = TcpHeader::parse(bytes)?;
        if arrival.checksum == Checksum::Unknown {
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
        if !info.is_unicast || arrival.is_group {
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
        let may_reset = self.ownership == AddressOwnership::Exclusive;
        self.tcp.on_segment(now_ns, tuple, &segment, may_reset)?;
        Ok(RxVerdict::Handled)
    }
}
