//! Segments on their way in: from the IP layer to their connection.

use std::net::{IpAddr, SocketAddr};

use tidegate_memory::Checksum;
use tidegate_wire::{DropReason, TcpHeader, tcp};

use super::segment::{Ends, Segment};
use crate::ethernet::Arrival;
use crate::packet::Fate;
use crate::udp::IpInfo;
use crate::{Ownership, Stack};

impl Stack {
    /// Reads a segment and lets its connection have it. Nothing is sent yet.
    pub(crate) fn tcp_input(
        &mut self,
        now_ns: u64,
        info: &IpInfo,
        arrival: &Arrival,
        bytes: &[u8],
    ) -> Result<Fate, DropReason> {
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
        // RFC 9293 section 3.9.2.3: groups and broadcasts have no connections.
        if !info.unicast || arrival.group {
            return Err(DropReason::TcpGroup);
        }
        if header.destination_port == 0 || header.source_port == 0 {
            return Err(DropReason::TcpPortZero);
        }
        let segment = Segment::new(&header, bytes, payload, info.traffic_class)?;
        let ends = Ends::new(
            SocketAddr::new(info.destination, header.destination_port),
            SocketAddr::new(info.source, header.source_port),
        );
        // On a shared address the kernel may have the connection.
        let may_reset = self.ownership == Ownership::Own;
        self.tcp.arrival(now_ns, ends, &segment, may_reset)?;
        Ok(Fate::Handled)
    }
}
