//! IPv6 input (RFC 8200).

use std::net::IpAddr;

use tidegate_wire::icmpv6::parameter_problem;
use tidegate_wire::ipv6_extension::{ParameterProblem, UpperLayer, upper_layer};
use tidegate_wire::{DropReason, Ipv6Header, Protocol};

use crate::interface::Interface;
use crate::ip::address::{AddressKind, can_be_source_v6};
use crate::ip::packet::{IcmpErrorKind, IpInfo, IpInput, RxVerdict, TransportPacket};
use crate::ip::reassembly::{Fragment, FragmentKey, ReassembledPacket};
use crate::link::LinkMeta;

/// Offset of the payload length in the header.
const PAYLOAD_LENGTH_OFFSET_BYTES: usize = 4;

impl Interface {
    /// Processes a received IPv6 packet.
    #[inline]
    pub(crate) fn handle_ipv6<'p>(
        &mut self,
        now_ns: u64,
        packet: &'p [u8],
        link_meta: &LinkMeta,
    ) -> Result<IpInput<'p>, DropReason> {
        let (header, payload) = Ipv6Header::parse(packet)?;
        let kind = self.addresses.kind_v6(header.destination);
        if kind == AddressKind::Other {
            return self
                .handle_transit_v6(now_ns, packet, link_meta, &header)
                .map(IpInput::Verdict);
        }
        let is_own_source = self.addresses.is_own(header.source.into()) && !link_meta.is_loopback;
        let may_claim_address = header.next_header == Protocol::ICMPV6;
        if !can_be_source_v6(header.source) || is_own_source && !may_claim_address {
            return Err(DropReason::Ipv6SourceInvalid);
        }
        let upper = match upper_layer(header.next_header, payload) {
            Ok(upper) => upper,
            Err(fault) => {
                if let Some(problem) = fault.icmp_error {
                    self.send_icmp_error_v6(
                        now_ns,
                        packet,
                        link_meta,
                        IcmpErrorKind::ParameterProblem(problem),
                    );
                }
                return Err(fault.reason);
            }
        };
        if upper.fragment.is_some() {
            return self
                .handle_fragment_v6(now_ns, packet, link_meta, &header, &upper)
                .map(IpInput::Verdict);
        }
        if upper.protocol == Protocol::ICMPV6 {
            return self.handle_icmpv6(now_ns, &header, upper.payload, link_meta);
        }
        if kind == AddressKind::Tentative {
            return Err(DropReason::Ipv6NotForUs);
        }
        if header.source.is_unspecified() {
            return Err(DropReason::Ipv6SourceInvalid);
        }
        let info = IpInfo {
            source: IpAddr::V6(header.source),
            destination: IpAddr::V6(header.destination),
            hop_limit: header.hop_limit,
            traffic_class: header.traffic_class,
            is_unicast: kind == AddressKind::Local,
        };
        match upper.protocol {
            protocol @ (Protocol::UDP | Protocol::TCP) => {
                let (bytes, offset) = (upper.payload, upper.offset_bytes);
                Ok(IpInput::Transport(TransportPacket { info, protocol, bytes, offset }))
            }
            Protocol::NO_NEXT_HEADER => Ok(IpInput::Verdict(RxVerdict::Handled)),
            _ => {
                let pointer = upper.next_header_offset_bytes as u32;
                let error = IcmpErrorKind::ProtocolUnreachable(pointer);
                self.send_icmp_error_v6(now_ns, packet, link_meta, error);
                Err(DropReason::Ipv6NextHeaderUnknown)
            }
        }
    }

    fn handle_fragment_v6(
        &mut self,
        now_ns: u64,
        packet: &[u8],
        link_meta: &LinkMeta,
        header: &Ipv6Header,
        upper: &UpperLayer<'_>,
    ) -> Result<RxVerdict, DropReason> {
        // No genuine sender nests fragments.
        let Some(fragment_header) = upper.fragment.filter(|_| !link_meta.is_reassembled) else {
            return Err(DropReason::FragmentInvalid);
        };
        let key = FragmentKey {
            source: header.source.into(),
            destination: header.destination.into(),
            identification: fragment_header.identification,
            protocol: 0,
        };
        let fragment = Fragment {
            offset_bytes: fragment_header.offset_bytes.into(),
            more_fragments: fragment_header.more_fragments,
            protocol: upper.protocol.0,
            hop_limit: header.hop_limit,
            traffic_class: header.traffic_class,
            headers: packet.get(..upper.offset_bytes).unwrap_or_default(),
            data: upper.payload,
            max_packet_payload_bytes: u16::MAX.into(),
        };
        let result = self.handle_fragment(now_ns, key, &fragment);
        // RFC 8200 section 4.5: report a fragment whose length is no multiple of 8, and a packet
        // that would exceed the maximum length.
        let pointer = match result {
            Err(DropReason::FragmentInvalid)
                if fragment.more_fragments && !fragment.data.len().is_multiple_of(8) =>
            {
                Some(PAYLOAD_LENGTH_OFFSET_BYTES)
            }
            Err(DropReason::FragmentTooBig) => Some(upper.offset_bytes - 6),
            _ => None,
        };
        if let Some(pointer) = pointer {
            let problem = ParameterProblem {
                code: parameter_problem::HEADER_FIELD,
                pointer: pointer as u32,
                allowed_for_group: false,
            };
            self.send_icmp_error_v6(
                now_ns,
                packet,
                link_meta,
                IcmpErrorKind::ParameterProblem(problem),
            );
        }
        result
    }
}

/// Builds the reassembled packet, without extension headers: they were processed with each
/// fragment.
pub(crate) fn build_reassembled(whole: &ReassembledPacket) -> Option<Vec<u8>> {
    let (IpAddr::V6(source), IpAddr::V6(destination)) = (whole.key.source, whole.key.destination)
    else {
        return None;
    };
    let protocol = Protocol(whole.protocol);
    let mut header = Ipv6Header::new(source, destination, protocol, whole.payload.len())?;
    header.hop_limit = whole.hop_limit;
    header.traffic_class = whole.traffic_class;
    let mut packet = vec![0; Ipv6Header::BYTES + whole.payload.len()];
    header.emit(&mut packet)?.copy_from_slice(&whole.payload);
    Some(packet)
}
