//! IPv4 packets on their way in (RFC 791, RFC 1122 section 3.2.1).

use std::net::IpAddr;

use tidegate_wire::{DropReason, Ipv4Header, Protocol};

use crate::Stack;
use crate::address::{Kind, can_be_source_v4};
use crate::ethernet::Arrival;
use crate::fragment::{Fragment, Key, Whole};
use crate::packet::{Complaint, Fate};
use crate::udp::IpInfo;

/// The least that the first fragment of a packet must hold: as much as the
/// ports and lengths take (RFC 1858 section 3).
const MIN_FIRST_FRAGMENT_BYTES: usize = 8;

impl Stack {
    /// Reads an IPv4 packet.
    #[inline]
    pub(crate) fn ipv4_input(
        &mut self,
        now_ns: u64,
        packet: &[u8],
        arrival: &Arrival,
    ) -> Result<Fate, DropReason> {
        let (header, payload) = Ipv4Header::parse(packet)?;
        let kind = self.addresses.kind_v4(header.destination);
        if !matches!(kind, Kind::Ours | Kind::Broadcast | Kind::Group) {
            return self.ipv4_transit(now_ns, packet, arrival, &header);
        }
        let is_fit = match self.addresses.kind_v4(header.source) {
            Kind::Other => can_be_source_v4(header.source),
            Kind::Ours => arrival.looped,
            Kind::Tentative | Kind::Broadcast | Kind::Group => false,
        };
        if !is_fit {
            return Err(DropReason::Ipv4SourceInvalid);
        }
        header.options(packet).check()?;
        if header.is_fragment() {
            return self.ipv4_fragment_input(now_ns, packet, arrival, &header, payload);
        }
        let result = match header.protocol {
            Protocol::UDP => {
                let info = IpInfo {
                    source: IpAddr::V4(header.source),
                    destination: IpAddr::V4(header.destination),
                    hop_limit: header.ttl,
                    traffic_class: header.dscp_ecn,
                    unicast: kind == Kind::Ours,
                };
                self.udp_input(info, arrival, payload, header.header_bytes.into())
            }
            Protocol::ICMPV4 => return self.icmpv4_input(now_ns, &header, payload, arrival),
            Protocol::TCP => {
                let info = IpInfo {
                    source: IpAddr::V4(header.source),
                    destination: IpAddr::V4(header.destination),
                    hop_limit: header.ttl,
                    traffic_class: header.dscp_ecn,
                    unicast: kind == Kind::Ours,
                };
                return self.tcp_input(now_ns, &info, arrival, payload);
            }
            _ => Err(DropReason::ProtocolUnknown),
        };
        match result {
            Err(DropReason::UdpNoSocket) => {
                self.complain_v4(now_ns, packet, arrival, Complaint::Port);
            }
            Err(DropReason::ProtocolUnknown) => {
                self.complain_v4(now_ns, packet, arrival, Complaint::Protocol(0));
            }
            _ => {}
        }
        result
    }

    fn ipv4_fragment_input(
        &mut self,
        now_ns: u64,
        packet: &[u8],
        arrival: &Arrival,
        header: &Ipv4Header,
        payload: &[u8],
    ) -> Result<Fate, DropReason> {
        if arrival.rebuilt {
            return Err(DropReason::FragmentInvalid);
        }
        if header.fragment_offset_bytes == 0 && payload.len() < MIN_FIRST_FRAGMENT_BYTES {
            return Err(DropReason::FragmentHeaderChain);
        }
        let key = Key {
            source: header.source.into(),
            destination: header.destination.into(),
            identification: header.identification.into(),
            protocol: header.protocol.0,
        };
        let header_bytes = usize::from(header.header_bytes);
        let fragment = Fragment {
            offset_bytes: header.fragment_offset_bytes.into(),
            more: header.more_fragments,
            protocol: header.protocol.0,
            hop_limit: header.ttl,
            traffic_class: header.dscp_ecn,
            headers: packet.get(..header_bytes).unwrap_or_default(),
            data: payload,
            limit_bytes: usize::from(u16::MAX) - header_bytes,
        };
        self.fragment_input(now_ns, key, &fragment)
    }
}

/// The packet that the fragments were cut from, without options: those were
/// checked with each fragment.
pub(crate) fn rebuild(whole: &Whole) -> Option<Vec<u8>> {
    let (IpAddr::V4(source), IpAddr::V4(destination)) = (whole.key.source, whole.key.destination)
    else {
        return None;
    };
    let protocol = Protocol(whole.protocol);
    let mut header = Ipv4Header::new(source, destination, protocol, whole.payload.len())?;
    header.ttl = whole.hop_limit;
    header.dscp_ecn = whole.traffic_class;
    header.identification = whole.key.identification as u16;
    header.dont_fragment = false;
    let mut packet = vec![0; Ipv4Header::BYTES + whole.payload.len()];
    header.emit(&mut packet)?.copy_from_slice(&whole.payload);
    Some(packet)
}
