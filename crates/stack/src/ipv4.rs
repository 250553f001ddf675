//! IPv4 packets on their way in (RFC 791, RFC 1122 section 3.2.1).

use std::net::IpAddr;

use tidegate_wire::{DropReason, Ipv4Header, Protocol};

use crate::Stack;
use crate::address::{Kind, can_be_source_v4};
use crate::ethernet::Arrival;
use crate::stack::Fate;
use crate::udp::IpInfo;

impl Stack {
    /// Reads an IPv4 packet.
    #[inline]
    pub(crate) fn ipv4_input(
        &mut self,
        now_ns: u64,
        packet: &[u8],
        arrival: &Arrival,
    ) -> Result<Fate, DropReason> {
        let _ = now_ns;
        let (header, payload) = Ipv4Header::parse(packet)?;
        let kind = self.addresses.kind_v4(header.destination);
        if !matches!(kind, Kind::Ours | Kind::Broadcast | Kind::Group) {
            return Err(DropReason::Ipv4NotForUs);
        }
        let source_kind = self.addresses.kind_v4(header.source);
        if !can_be_source_v4(header.source) || source_kind != Kind::Other {
            return Err(DropReason::Ipv4SourceInvalid);
        }
        header.options(packet).check()?;
        if header.more_fragments || header.fragment_offset_bytes != 0 {
            return Err(DropReason::FragmentMemory);
        }
        let info = IpInfo {
            source: IpAddr::V4(header.source),
            destination: IpAddr::V4(header.destination),
            hop_limit: header.ttl,
            traffic_class: header.dscp_ecn,
            unicast: kind == Kind::Ours,
        };
        match header.protocol {
            Protocol::UDP => self.udp_input(info, arrival, payload, header.header_bytes.into()),
            _ => Err(DropReason::ProtocolUnknown),
        }
    }
}
