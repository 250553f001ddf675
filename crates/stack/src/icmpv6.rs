//! ICMP for IPv6 (RFC 4443).

use std::net::IpAddr;

use tidegate_wire::icmpv6::{parameter_problem, time_exceeded, unreachable};
use tidegate_wire::ipv6_extension::{Extension, ExtensionWalk};
use tidegate_wire::{DropReason, Icmpv6Message, Ipv6Header, MldMessage, Protocol};

use crate::address::Kind;
use crate::ethernet::Arrival;
use crate::icmp::{Quote, Report};
use crate::packet::{Complaint, Fate, Packet, Refusal};
use crate::{Ownership, Stack};

/// Errors are no longer than the minimum MTU (RFC 4443 section 2.4 c).
const MAX_ERROR_BYTES: usize = 1280;

impl Stack {
    pub(crate) fn icmpv6_input(
        &mut self,
        now_ns: u64,
        header: &Ipv6Header,
        payload: &[u8],
        arrival: &Arrival,
    ) -> Result<Fate, DropReason> {
        let message = Icmpv6Message::parse(header, payload)?;
        // Only neighbour discovery and listener reports come from nobody, and
        // only the first is for an address that is not known to be unique.
        let is_ndp = matches!(message, Icmpv6Message::Ndp(_));
        let is_mld = matches!(message, Icmpv6Message::Mld(_));
        if header.source.is_unspecified() && !is_ndp && !is_mld {
            return Err(DropReason::Ipv6SourceInvalid);
        }
        if self.addresses.kind_v6(header.destination) == Kind::Tentative && !is_ndp {
            return Err(DropReason::Ipv6NotForUs);
        }
        let report = match message {
            Icmpv6Message::Ndp(message) => return self.ndp_input(header, arrival, &message),
            Icmpv6Message::Mld(MldMessage::Query { maximum_response_code, .. }) => {
                return self.mld_query_input(now_ns, maximum_response_code);
            }
            Icmpv6Message::EchoRequest { identifier, sequence, data } => {
                let reply = Icmpv6Message::EchoReply { identifier, sequence, data };
                self.answer_echo_v6(now_ns, header, arrival, &reply)?;
                return Ok(Fate::Handled);
            }
            Icmpv6Message::PacketTooBig { mtu, quote } => (Report::TooBig(mtu as usize), quote),
            Icmpv6Message::DestinationUnreachable { code, quote } => match code {
                unreachable::PORT => (Report::Refused, quote),
                unreachable::NO_ROUTE => (Report::Network, quote),
                _ => (Report::Host, quote),
            },
            Icmpv6Message::ParameterProblem {
                code: parameter_problem::NEXT_HEADER, quote, ..
            } => (Report::Refused, quote),
            Icmpv6Message::ParameterProblem { quote, .. }
            | Icmpv6Message::TimeExceeded { quote, .. } => (Report::Host, quote),
            Icmpv6Message::EchoReply { .. }
            | Icmpv6Message::Mld(_)
            | Icmpv6Message::Other { .. } => return Err(DropReason::IcmpIgnored),
        };
        let quote = quote_v6(report.1)?;
        self.report(now_ns, report.0, &quote)?;
        Ok(Fate::Handled)
    }

    fn answer_echo_v6(
        &mut self,
        now_ns: u64,
        header: &Ipv6Header,
        arrival: &Arrival,
        reply: &Icmpv6Message<'_>,
    ) -> Result<(), DropReason> {
        if self.ownership == Ownership::Shared {
            return Err(DropReason::IcmpIgnored);
        }
        if arrival.group || self.addresses.kind_v6(header.destination) != Kind::Ours {
            return Err(DropReason::IcmpBroadcast);
        }
        if !self.echo_limit.take(now_ns) {
            return Err(DropReason::IcmpRateLimited);
        }
        let packet = Packet {
            source: IpAddr::V6(header.destination),
            destination: IpAddr::V6(header.source),
            protocol: Protocol::ICMPV6,
            hop_limit: self.hop_limit,
            traffic_class: header.traffic_class & !3,
        };
        self.reply_v6(packet, reply);
        Ok(())
    }

    /// Makes an ICMPv6 answer ready.
    pub(crate) fn reply_v6(&mut self, packet: Packet, message: &Icmpv6Message<'_>) {
        let (IpAddr::V6(source), IpAddr::V6(destination)) = (packet.source, packet.destination)
        else {
            debug_assert!(false, "ICMPv6 goes between IPv6 addresses");
            return;
        };
        self.reply.payload.resize(message.message_bytes(), 0);
        let written = message.emit(source, destination, &mut self.reply.payload).is_some();
        debug_assert!(written, "the buffer has the length of the message");
        self.reply.packet = Some(packet);
        self.reply.mac = None;
    }

    /// Makes an error about a packet ready, where RFC 4443 section 2.4 e allows
    /// one.
    pub(crate) fn complain_v6(
        &mut self,
        now_ns: u64,
        packet: &[u8],
        arrival: &Arrival,
        complaint: Complaint,
    ) {
        let Ok((header, payload)) = Ipv6Header::parse_quoted(packet) else { return };
        let to_group = arrival.group || header.destination.is_multicast();
        let even_for_group =
            matches!(complaint, Complaint::Parameter(problem) if problem.even_for_group);
        let unfit = self.ownership == Ownership::Shared
            || header.source.is_unspecified()
            || header.source.is_multicast()
            || to_group && !even_for_group
            || must_not_be_complained_about(&header, payload);
        if unfit || !self.allow_error(now_ns, header.source.into()) {
            return;
        }
        let source = match self.addresses.kind_v6(header.destination) {
            Kind::Ours => Some(IpAddr::V6(header.destination)),
            _ => self.addresses.source_for(header.source.into(), header.source.into()),
        };
        let Some(source) = source else { return };
        let quoted = packet.len().min(MAX_ERROR_BYTES - Ipv6Header::BYTES - Icmpv6Message::BYTES);
        let whole = Ipv6Header::BYTES + usize::from(header.payload_bytes);
        let quote = &packet[..quoted.min(whole)];
        let message = match complaint {
            Complaint::Port => {
                Icmpv6Message::DestinationUnreachable { code: unreachable::PORT, quote }
            }
            Complaint::Protocol(pointer) => Icmpv6Message::ParameterProblem {
                code: parameter_problem::NEXT_HEADER,
                pointer,
                quote,
            },
            Complaint::Reassembly => {
                Icmpv6Message::TimeExceeded { code: time_exceeded::REASSEMBLY, quote }
            }
            Complaint::Parameter(problem) => Icmpv6Message::ParameterProblem {
                code: problem.code,
                pointer: problem.pointer,
                quote,
            },
            Complaint::Transit(refusal) => {
                let unreachable = |code| Icmpv6Message::DestinationUnreachable { code, quote };
                match refusal {
                    Refusal::HopLimit => {
                        Icmpv6Message::TimeExceeded { code: time_exceeded::IN_TRANSIT, quote }
                    }
                    Refusal::NoRoute => unreachable(unreachable::NO_ROUTE),
                    Refusal::Scope => unreachable(unreachable::BEYOND_SCOPE),
                    Refusal::Host => unreachable(unreachable::ADDRESS),
                    Refusal::TooBig { mtu } => {
                        Icmpv6Message::PacketTooBig { mtu: mtu.into(), quote }
                    }
                }
            }
        };
        let answer = Packet {
            source,
            destination: IpAddr::V6(header.source),
            protocol: Protocol::ICMPV6,
            hop_limit: self.hop_limit,
            traffic_class: 0,
        };
        self.reply_v6(answer, &message);
    }
}

/// Whether a packet is an ICMPv6 error or a redirect, as far as it shows.
fn must_not_be_complained_about(header: &Ipv6Header, payload: &[u8]) -> bool {
    let mut walk = ExtensionWalk::new(header.next_header, payload);
    for extension in &mut walk {
        match extension {
            // What stands behind it is no header.
            Ok(Extension::Fragment(fragment)) if fragment.offset_bytes != 0 => return false,
            Ok(_) => {}
            Err(_) => return false,
        }
    }
    let rest = walk.remainder();
    rest.protocol == Protocol::ICMPV6 && matches!(rest.payload.first(), Some(0..=127 | 137))
}

/// Reads a quoted IPv6 packet.
pub(crate) fn quote_v6(quote: &[u8]) -> Result<Quote<'_>, DropReason> {
    let (header, payload) = Ipv6Header::parse_quoted(quote).map_err(|_| DropReason::IcmpQuote)?;
    let mut walk = ExtensionWalk::new(header.next_header, payload);
    for extension in &mut walk {
        match extension.map_err(|_| DropReason::IcmpQuote)? {
            Extension::Fragment(fragment) if fragment.offset_bytes != 0 => {
                return Err(DropReason::IcmpQuote);
            }
            _ => {}
        }
    }
    let rest = walk.remainder();
    Ok(Quote {
        source: IpAddr::V6(header.source),
        destination: IpAddr::V6(header.destination),
        protocol: rest.protocol,
        packet_bytes: Ipv6Header::BYTES + usize::from(header.payload_bytes),
        payload: rest.payload,
    })
}
