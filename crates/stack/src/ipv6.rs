//! IPv6 packets on their way in (RFC 8200).

use std::net::IpAddr;

use tidegate_wire::icmpv6::parameter_problem;
use tidegate_wire::ipv6_extension::{ParameterProblem, UpperLayer, upper_layer};
use tidegate_wire::{DropReason, Ipv6Header, Protocol};

use crate::Stack;
use crate::address::{Kind, can_be_source_v6};
use crate::ethernet::Arrival;
use crate::fragment::{Fragment, Key, Whole};
use crate::packet::{Complaint, Fate};
use crate::udp::IpInfo;

/// Where the payload length stands in the header.
const PAYLOAD_LENGTH_OFFSET_BYTES: usize = 4;

impl Stack {
    /// Reads an IPv6 packet.
    #[inline]
    pub(crate) fn ipv6_input(
        &mut self,
        now_ns: u64,
        packet: &[u8],
        arrival: &Arrival,
    ) -> Result<Fate, DropReason> {
        let (header, payload) = Ipv6Header::parse(packet)?;
        let kind = self.addresses.kind_v6(header.destination);
        if kind == Kind::Other {
            return self.ipv6_transit(now_ns, packet, arrival, &header);
        }
        let is_ours = self.addresses.kind_v6(header.source) == Kind::Ours;
        if !can_be_source_v6(header.source) || is_ours && !arrival.looped {
            return Err(DropReason::Ipv6SourceInvalid);
        }
        let upper = match upper_layer(header.next_header, payload) {
            Ok(upper) => upper,
            Err(fault) => {
                if let Some(problem) = fault.answer {
                    self.complain_v6(now_ns, packet, arrival, Complaint::Parameter(problem));
                }
                return Err(fault.reason);
            }
        };
        if upper.fragment.is_some() {
            return self.ipv6_fragment_input(now_ns, packet, arrival, &header, &upper);
        }
        if upper.protocol == Protocol::ICMPV6 {
            return self.icmpv6_input(now_ns, &header, upper.payload, arrival);
        }
        if kind == Kind::Tentative {
            return Err(DropReason::Ipv6NotForUs);
        }
        if header.source.is_unspecified() {
            return Err(DropReason::Ipv6SourceInvalid);
        }
        let result = self.ipv6_transport_input(now_ns, &header, kind, arrival, &upper);
        match result {
            Err(DropReason::UdpNoSocket) => {
                self.complain_v6(now_ns, packet, arrival, Complaint::Port);
            }
            Err(DropReason::Ipv6NextHeaderUnknown) => {
                let pointer = upper.next_header_offset_bytes as u32;
                self.complain_v6(now_ns, packet, arrival, Complaint::Protocol(pointer));
            }
            _ => {}
        }
        result
    }

    #[inline]
    fn ipv6_transport_input(
        &mut self,
        now_ns: u64,
        header: &Ipv6Header,
        kind: Kind,
        arrival: &Arrival,
        upper: &UpperLayer<'_>,
    ) -> Result<Fate, DropReason> {
        let info = IpInfo {
            source: IpAddr::V6(header.source),
            destination: IpAddr::V6(header.destination),
            hop_limit: header.hop_limit,
            traffic_class: header.traffic_class,
            unicast: kind == Kind::Ours,
        };
        match upper.protocol {
            Protocol::UDP => self.udp_input(info, arrival, upper.payload, upper.offset_bytes),
            Protocol::TCP => self.tcp_input(now_ns, &info, arrival, upper.payload),
            Protocol::NO_NEXT_HEADER => Ok(Fate::Handled),
            _ => Err(DropReason::Ipv6NextHeaderUnknown),
        }
    }

    fn ipv6_fragment_input(
        &mut self,
        now_ns: u64,
        packet: &[u8],
        arrival: &Arrival,
        header: &Ipv6Header,
        upper: &UpperLayer<'_>,
    ) -> Result<Fate, DropReason> {
        // A packet whose fragments hold fragments is nothing that any sender
        // makes in earnest.
        let Some(fragment_header) = upper.fragment.filter(|_| !arrival.rebuilt) else {
            return Err(DropReason::FragmentInvalid);
        };
        let key = Key {
            source: header.source.into(),
            destination: header.destination.into(),
            identification: fragment_header.identification,
            protocol: 0,
        };
        let fragment = Fragment {
            offset_bytes: fragment_header.offset_bytes.into(),
            more: fragment_header.more_fragments,
            protocol: upper.protocol.0,
            hop_limit: header.hop_limit,
            traffic_class: header.traffic_class,
            headers: packet.get(..upper.offset_bytes).unwrap_or_default(),
            data: upper.payload,
            limit_bytes: u16::MAX.into(),
        };
        let result = self.fragment_input(now_ns, key, &fragment);
        // RFC 8200 section 4.5: the sender is told of a length that is no
        // multiple of 8, and of a packet that would be too long.
        let pointer = match result {
            Err(DropReason::FragmentInvalid)
                if fragment.more && !fragment.data.len().is_multiple_of(8) =>
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
                even_for_group: false,
            };
            self.complain_v6(now_ns, packet, arrival, Complaint::Parameter(problem));
        }
        result
    }
}

/// The packet that the fragments were cut from, without extension headers:
/// those were obeyed with each fragment.
pub(crate) fn rebuild(whole: &Whole) -> Option<Vec<u8>> {
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
