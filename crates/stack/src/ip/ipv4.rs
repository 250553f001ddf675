//! IPv4 input (RFC 791, RFC 1122 section 3.2.1).

use std::net::IpAddr;

use tidegate_wire::{DropReason, Ipv4Header, Protocol};

use crate::interface::Interface;
use crate::ip::address::{AddressKind, can_be_source_v4};
use crate::ip::packet::{IcmpErrorKind, IpInfo, IpInput, RxVerdict, TransportPacket};
use crate::ip::reassembly::{Fragment, FragmentKey, ReassembledPacket};
use crate::link::LinkMeta;

/// Minimum data in a first fragment: enough for ports and lengths of the transport header
/// (RFC 1858 section 3).
const MIN_FIRST_FRAGMENT_BYTES: usize = 8;

impl Interface {
    /// Processes a received IPv4 packet.
    #[inline]
    pub(crate) fn handle_ipv4<'p>(
        &mut self,
        now_ns: u64,
        packet: &'p [u8],
        link_meta: &LinkMeta,
    ) -> Result<IpInput<'p>, DropReason> {
        let (header, payload) = Ipv4Header::parse(packet)?;
        let kind = self.addresses.kind_v4(header.destination);
        if !matches!(kind, AddressKind::Local | AddressKind::Broadcast | AddressKind::JoinedGroup) {
            return self
                .handle_transit_v4(now_ns, packet, link_meta, &header)
                .map(IpInput::Verdict);
        }
        let is_valid_source = match self.addresses.kind_v4(header.source) {
            AddressKind::Other => can_be_source_v4(header.source),
            AddressKind::Local => link_meta.is_loopback,
            AddressKind::Tentative | AddressKind::Broadcast | AddressKind::JoinedGroup => false,
        };
        if !is_valid_source {
            return Err(DropReason::Ipv4SourceInvalid);
        }
        header.options(packet).check()?;
        if header.is_fragment() {
            return self
                .handle_fragment_v4(now_ns, packet, link_meta, &header, payload)
                .map(IpInput::Verdict);
        }
        let info = IpInfo {
            source: IpAddr::V4(header.source),
            destination: IpAddr::V4(header.destination),
            hop_limit: header.ttl,
            traffic_class: header.dscp_ecn,
            is_unicast: kind == AddressKind::Local,
        };
        match header.protocol {
            protocol @ (Protocol::UDP | Protocol::TCP) => {
                let offset = header.header_bytes.into();
                Ok(IpInput::Transport(TransportPacket { info, protocol, bytes: payload, offset }))
            }
            Protocol::ICMPV4 => self.handle_icmpv4(now_ns, &header, payload, link_meta),
            _ => {
                let error = IcmpErrorKind::ProtocolUnreachable(0);
                self.send_icmp_error_v4(now_ns, packet, link_meta, error);
                Err(DropReason::ProtocolUnknown)
            }
        }
    }

    fn handle_fragment_v4(
        &mut self,
        now_ns: u64,
        packet: &[u8],
        link_meta: &LinkMeta,
        header: &Ipv4Header,
        payload: &[u8],
    ) -> Result<RxVerdict, DropReason> {
        if link_meta.is_reassembled {
            return Err(DropReason::FragmentInvalid);
        }
        if header.fragment_offset_bytes == 0 && payload.len() < MIN_FIRST_FRAGMENT_BYTES {
            return Err(DropReason::FragmentHeaderChain);
        }
        let key = FragmentKey {
            source: header.source.into(),
            destination: header.destination.into(),
            identification: header.identification.into(),
            protocol: header.protocol.0,
        };
        let header_bytes = usize::from(header.header_bytes);
        let fragment = Fragment {
            offset_bytes: header.fragment_offset_bytes.into(),
            more_fragments: header.more_fragments,
            protocol: header.protocol.0,
            hop_limit: header.ttl,
            traffic_class: header.dscp_ecn,
            headers: packet.get(..header_bytes).unwrap_or_default(),
            data: payload,
            max_packet_payload_bytes: usize::from(u16::MAX) - header_bytes,
        };
        self.handle_fragment(now_ns, key, &fragment)
    }
}

/// Builds the reassembled packet, without options: they were checked with each fragment.
pub(crate) fn build_reassembled(whole: &ReassembledPacket) -> Option<Vec<u8>> {
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
