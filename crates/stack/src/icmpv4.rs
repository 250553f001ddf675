//! ICMP for IPv4 (RFC 792, RFC 1122 section 3.2.2).

use std::net::IpAddr;

use tidegate_wire::icmpv4::{time_exceeded, unreachable};
use tidegate_wire::{DropReason, Icmpv4Message, Ipv4Header, Protocol};

use crate::address::Kind;
use crate::ethernet::Arrival;
use crate::icmp::{Quote, Report};
use crate::packet::{Complaint, Fate, Packet, Refusal};
use crate::{Ownership, Stack};

/// Errors are no longer than what every host can take (RFC 1812 section
/// 4.3.2.3).
const MAX_ERROR_BYTES: usize = 576;

impl Stack {
    pub(crate) fn icmpv4_input(
        &mut self,
        now_ns: u64,
        header: &Ipv4Header,
        payload: &[u8],
        arrival: &Arrival,
    ) -> Result<Fate, DropReason> {
        let report = match Icmpv4Message::parse(payload)? {
            Icmpv4Message::EchoRequest { identifier, sequence, data } => {
                let reply = Icmpv4Message::EchoReply { identifier, sequence, data };
                self.answer_echo_v4(now_ns, header, arrival, &reply)?;
                return Ok(Fate::Handled);
            }
            Icmpv4Message::DestinationUnreachable { code, next_hop_mtu, quote } => match code {
                unreachable::FRAGMENTATION_NEEDED => (Report::TooBig(next_hop_mtu.into()), quote),
                unreachable::PROTOCOL | unreachable::PORT => (Report::Refused, quote),
                unreachable::NETWORK | 6 | 9 | 11 => (Report::Network, quote),
                _ => (Report::Host, quote),
            },
            Icmpv4Message::TimeExceeded { quote, .. } => (Report::Host, quote),
            Icmpv4Message::ParameterProblem { quote, .. } => (Report::Host, quote),
            // Source quench (RFC 6633), redirects, timestamps and the rest.
            Icmpv4Message::EchoReply { .. } | Icmpv4Message::Other { .. } => {
                return Err(DropReason::IcmpIgnored);
            }
        };
        let quote = quote_v4(report.1)?;
        self.report(now_ns, report.0, &quote)?;
        Ok(Fate::Handled)
    }

    fn answer_echo_v4(
        &mut self,
        now_ns: u64,
        header: &Ipv4Header,
        arrival: &Arrival,
        reply: &Icmpv4Message<'_>,
    ) -> Result<(), DropReason> {
        if self.ownership == Ownership::Shared {
            return Err(DropReason::IcmpIgnored);
        }
        if arrival.group || self.addresses.kind_v4(header.destination) != Kind::Ours {
            return Err(DropReason::IcmpBroadcast);
        }
        if !self.echo_limit.take(now_ns) {
            return Err(DropReason::IcmpRateLimited);
        }
        let packet = Packet {
            source: IpAddr::V4(header.destination),
            destination: IpAddr::V4(header.source),
            protocol: Protocol::ICMPV4,
            hop_limit: self.hop_limit,
            traffic_class: header.dscp_ecn & !3,
        };
        self.reply_v4(packet, reply);
        Ok(())
    }

    /// Makes an error about a packet ready, where RFC 1122 section 3.2.2 allows
    /// one: not about errors, groups, broadcasts or later fragments.
    pub(crate) fn complain_v4(
        &mut self,
        now_ns: u64,
        packet: &[u8],
        arrival: &Arrival,
        complaint: Complaint,
    ) {
        let Ok((header, payload)) = Ipv4Header::parse_quoted(packet) else { return };
        let is_error = header.protocol == Protocol::ICMPV4
            && !matches!(payload.first(), Some(0 | 8 | 13..=18));
        let ours = self.addresses.kind_v4(header.destination) == Kind::Ours;
        let unfit = self.ownership == Ownership::Shared
            || arrival.group
            || is_error
            || header.fragment_offset_bytes != 0
            || !(ours || matches!(complaint, Complaint::Transit(_)));
        if unfit || !self.allow_error(now_ns, header.source.into()) {
            return;
        }
        let sender = IpAddr::V4(header.source);
        let source = match ours {
            true => Some(IpAddr::V4(header.destination)),
            false => self.addresses.source_for(sender, sender),
        };
        let Some(source) = source else { return };
        let quoted = packet.len().min(MAX_ERROR_BYTES - Ipv4Header::BYTES - Icmpv4Message::BYTES);
        let quote = &packet[..quoted.min(header.total_bytes.into())];
        let unreachable =
            |code| Icmpv4Message::DestinationUnreachable { code, next_hop_mtu: 0, quote };
        let message = match complaint {
            Complaint::Port => unreachable(unreachable::PORT),
            Complaint::Protocol(_) => unreachable(unreachable::PROTOCOL),
            Complaint::Reassembly => {
                Icmpv4Message::TimeExceeded { code: time_exceeded::REASSEMBLY, quote }
            }
            Complaint::Parameter(problem) => {
                let pointer = problem.pointer as u8;
                Icmpv4Message::ParameterProblem { code: 0, pointer, quote }
            }
            Complaint::Transit(refusal) => match refusal {
                Refusal::HopLimit => {
                    Icmpv4Message::TimeExceeded { code: time_exceeded::IN_TRANSIT, quote }
                }
                Refusal::NoRoute | Refusal::Scope => unreachable(unreachable::NETWORK),
                Refusal::Host => unreachable(unreachable::HOST),
                Refusal::TooBig { mtu } => Icmpv4Message::DestinationUnreachable {
                    code: unreachable::FRAGMENTATION_NEEDED,
                    next_hop_mtu: mtu,
                    quote,
                },
            },
        };
        let answer = Packet {
            source,
            destination: sender,
            protocol: Protocol::ICMPV4,
            hop_limit: self.hop_limit,
            traffic_class: 0,
        };
        self.reply_v4(answer, &message);
    }
}

/// Reads a quoted IPv4 packet.
pub(crate) fn quote_v4(quote: &[u8]) -> Result<Quote<'_>, DropReason> {
    let (header, payload) = Ipv4Header::parse_quoted(quote).map_err(|_| DropReason::IcmpQuote)?;
    if header.fragment_offset_bytes != 0 {
        return Err(DropReason::IcmpQuote);
    }
    Ok(Quote {
        source: IpAddr::V4(header.source),
        destination: IpAddr::V4(header.destination),
        protocol: header.protocol,
        packet_bytes: header.total_bytes.into(),
        payload,
    })
}
