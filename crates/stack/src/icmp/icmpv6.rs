//! ICMP for IPv6 (RFC 4443).

use std::net::IpAddr;

use tidegate_wire::icmpv6::{parameter_problem, time_exceeded, unreachable};
use tidegate_wire::ipv6_extension::{Extension, ExtensionWalk};
use tidegate_wire::{DropReason, Icmpv6Message, Ipv6Header, MldMessage, Protocol};

use crate::AddressOwnership;
use crate::icmp::{QuotedPacket, ReceivedIcmpError};
use crate::interface::Interface;
use crate::ip::address::AddressKind;
use crate::ip::packet::{ForwardError, IcmpErrorKind, IpInput, Packet, RxVerdict};
use crate::link::LinkMeta;

/// Maximum length of an ICMP error: the minimum MTU (RFC 4443 section 2.4 (c)).
const MAX_ERROR_BYTES: usize = 1280;

impl Interface {
    /// Processes a received message.
    pub(crate) fn handle_icmpv6<'p>(
        &mut self,
        now_ns: u64,
        header: &Ipv6Header,
        payload: &'p [u8],
        link_meta: &LinkMeta,
    ) -> Result<IpInput<'p>, DropReason> {
        let message = Icmpv6Message::parse(header, payload)?;
        // Only neighbour discovery and multicast listener messages may come from the unspecified
        // address. Only neighbour discovery may come from an own address, which another host claims
        // then, or be addressed to a tentative address.
        let is_ndp = matches!(message, Icmpv6Message::Ndp(_));
        let is_mld = matches!(message, Icmpv6Message::Mld(_));
        let is_own_source = self.addresses.is_own(header.source.into()) && !link_meta.is_loopback;
        if header.source.is_unspecified() && !is_ndp && !is_mld || is_own_source && !is_ndp {
            return Err(DropReason::Ipv6SourceInvalid);
        }
        if self.addresses.kind_v6(header.destination) == AddressKind::Tentative && !is_ndp {
            return Err(DropReason::Ipv6NotForUs);
        }
        let (error, quote) = match message {
            Icmpv6Message::Ndp(message) => {
                return self.handle_ndp(now_ns, header, link_meta, &message).map(IpInput::Verdict);
            }
            Icmpv6Message::Mld(MldMessage::Query { maximum_response_code, .. }) => {
                return self.handle_mld_query(now_ns, maximum_response_code).map(IpInput::Verdict);
            }
            Icmpv6Message::EchoRequest { identifier, sequence, data } => {
                let reply = Icmpv6Message::EchoReply { identifier, sequence, data };
                self.reply_to_echo_v6(now_ns, header, link_meta, &reply)?;
                return Ok(IpInput::Verdict(RxVerdict::Handled));
            }
            Icmpv6Message::PacketTooBig { mtu, quote } => {
                (ReceivedIcmpError::TooBig(mtu as usize), quote)
            }
            Icmpv6Message::DestinationUnreachable { code, quote } => match code {
                unreachable::PORT => (ReceivedIcmpError::PortUnreachable, quote),
                unreachable::NO_ROUTE => (ReceivedIcmpError::NetworkUnreachable, quote),
                unreachable::ADMINISTRATIVELY_PROHIBITED
                | unreachable::SOURCE_POLICY
                | unreachable::REJECT_ROUTE => (ReceivedIcmpError::HostProhibited, quote),
                _ => (ReceivedIcmpError::HostUnreachable, quote),
            },
            Icmpv6Message::ParameterProblem {
                code: parameter_problem::NEXT_HEADER, quote, ..
            } => (ReceivedIcmpError::ProtocolUnreachable, quote),
            Icmpv6Message::ParameterProblem { quote, .. } => {
                (ReceivedIcmpError::HostUnreachable, quote)
            }
            Icmpv6Message::TimeExceeded { quote, .. } => (ReceivedIcmpError::TimeExceeded, quote),
            Icmpv6Message::EchoReply { .. }
            | Icmpv6Message::Mld(_)
            | Icmpv6Message::Other { .. } => return Err(DropReason::IcmpIgnored),
        };
        Ok(IpInput::IcmpError(
            error,
            QuotedPacket::parse_v6(quote)?.with_origin(header.source, payload),
        ))
    }

    fn reply_to_echo_v6(
        &mut self,
        now_ns: u64,
        header: &Ipv6Header,
        link_meta: &LinkMeta,
        reply: &Icmpv6Message<'_>,
    ) -> Result<(), DropReason> {
        if self.ownership == AddressOwnership::Shared {
            return Err(DropReason::IcmpIgnored);
        }
        if link_meta.is_group || self.addresses.kind_v6(header.destination) != AddressKind::Local {
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
        self.prepare_icmpv6(packet, reply);
        Ok(())
    }

    /// Prepares an ICMP error about a packet, where RFC 4443 section 2.4 (e) allows an error.
    pub(crate) fn send_icmp_error_v6(
        &mut self,
        now_ns: u64,
        packet: &[u8],
        link_meta: &LinkMeta,
        kind: IcmpErrorKind,
    ) {
        let Ok((header, payload)) = Ipv6Header::parse_quoted(packet) else { return };
        let to_group = link_meta.is_group || header.destination.is_multicast();
        let allowed_for_group =
            matches!(kind, IcmpErrorKind::ParameterProblem(problem) if problem.allowed_for_group);
        let suppressed = self.ownership == AddressOwnership::Shared
            || header.source.is_unspecified()
            || header.source.is_multicast()
            || to_group && !allowed_for_group
            || is_icmp_error_or_redirect(&header, payload);
        if suppressed || !self.allow_icmp_error(now_ns, header.source.into()) {
            return;
        }
        let source = match self.addresses.kind_v6(header.destination) {
            AddressKind::Local => Some(IpAddr::V6(header.destination)),
            _ => self.addresses.source_for(header.source.into(), header.source.into()),
        };
        let Some(source) = source else { return };
        let quoted = packet.len().min(MAX_ERROR_BYTES - Ipv6Header::BYTES - Icmpv6Message::BYTES);
        let whole = Ipv6Header::BYTES + usize::from(header.payload_bytes);
        let quote = &packet[..quoted.min(whole)];
        let message = match kind {
            IcmpErrorKind::PortUnreachable => {
                Icmpv6Message::DestinationUnreachable { code: unreachable::PORT, quote }
            }
            IcmpErrorKind::ProtocolUnreachable(pointer) => Icmpv6Message::ParameterProblem {
                code: parameter_problem::NEXT_HEADER,
                pointer,
                quote,
            },
            IcmpErrorKind::ReassemblyTimeout => {
                Icmpv6Message::TimeExceeded { code: time_exceeded::REASSEMBLY, quote }
            }
            IcmpErrorKind::ParameterProblem(problem) => Icmpv6Message::ParameterProblem {
                code: problem.code,
                pointer: problem.pointer,
                quote,
            },
            IcmpErrorKind::NotForwarded(error) => {
                let unreachable = |code| Icmpv6Message::DestinationUnreachable { code, quote };
                match error {
                    ForwardError::HopLimitExceeded => {
                        Icmpv6Message::TimeExceeded { code: time_exceeded::IN_TRANSIT, quote }
                    }
                    ForwardError::NoRoute => unreachable(unreachable::NO_ROUTE),
                    ForwardError::BeyondScope => unreachable(unreachable::BEYOND_SCOPE),
                    ForwardError::HostUnreachable => unreachable(unreachable::ADDRESS),
                    ForwardError::TooBig { mtu } => {
                        Icmpv6Message::PacketTooBig { mtu: mtu.into(), quote }
                    }
                }
            }
        };
        let reply = Packet {
            source,
            destination: IpAddr::V6(header.source),
            protocol: Protocol::ICMPV6,
            hop_limit: self.hop_limit,
            traffic_class: 0,
        };
        self.prepare_icmpv6(reply, &message);
    }
}

/// True if the quoted part shows an ICMPv6 error or a redirect.
fn is_icmp_error_or_redirect(header: &Ipv6Header, payload: &[u8]) -> bool {
    let mut walk = ExtensionWalk::new(header.next_header, payload);
    for extension in &mut walk {
        match extension {
            // A later fragment: no header follows.
            Ok(Extension::Fragment(fragment)) if fragment.offset_bytes != 0 => return false,
            Ok(_) => {}
            Err(_) => return false,
        }
    }
    let rest = walk.remainder();
    rest.protocol == Protocol::ICMPV6 && matches!(rest.payload.first(), Some(0..=127 | 137))
}
