//! ICMP for IPv4 (RFC 792, RFC 1122 section 3.2.2).

use std::net::IpAddr;

use tidegate_wire::icmpv4::{time_exceeded, unreachable};
use tidegate_wire::{DropReason, Icmpv4Message, Ipv4Header, Protocol};

use crate::AddressOwnership;
use crate::icmp::{QuotedPacket, ReceivedIcmpError};
use crate::interface::Interface;
use crate::ip::address::AddressKind;
use crate::ip::packet::{ForwardError, IcmpErrorKind, IpInput, Packet, RxVerdict};
use crate::link::LinkMeta;

/// Maximum length of an ICMP error, which every host can receive (RFC 1812 section 4.3.2.3).
const MAX_ERROR_BYTES: usize = 576;

impl Interface {
    /// Processes a received message.
    pub(crate) fn handle_icmpv4<'p>(
        &mut self,
        now_ns: u64,
        header: &Ipv4Header,
        payload: &'p [u8],
        link_meta: &LinkMeta,
    ) -> Result<IpInput<'p>, DropReason> {
        let (error, quote) = match Icmpv4Message::parse(payload)? {
            Icmpv4Message::EchoRequest { identifier, sequence, data } => {
                let reply = Icmpv4Message::EchoReply { identifier, sequence, data };
                self.reply_to_echo_v4(now_ns, header, link_meta, &reply)?;
                return Ok(IpInput::Verdict(RxVerdict::Handled));
            }
            Icmpv4Message::DestinationUnreachable { code, next_hop_mtu, quote } => match code {
                unreachable::FRAGMENTATION_NEEDED => {
                    (ReceivedIcmpError::TooBig(next_hop_mtu.into()), quote)
                }
                unreachable::PORT => (ReceivedIcmpError::PortUnreachable, quote),
                unreachable::PROTOCOL => (ReceivedIcmpError::ProtocolUnreachable, quote),
                unreachable::SOURCE_ROUTE_FAILED => (ReceivedIcmpError::SourceRouteFailed, quote),
                unreachable::HOST_UNKNOWN => (ReceivedIcmpError::HostUnknown, quote),
                unreachable::SOURCE_HOST_ISOLATED => (ReceivedIcmpError::SourceHostIsolated, quote),
                unreachable::NETWORK | 6 | 11 => (ReceivedIcmpError::NetworkUnreachable, quote),
                unreachable::NETWORK_PROHIBITED => (ReceivedIcmpError::NetworkProhibited, quote),
                unreachable::HOST_PROHIBITED | unreachable::ADMINISTRATIVELY_PROHIBITED => {
                    (ReceivedIcmpError::HostProhibited, quote)
                }
                _ => (ReceivedIcmpError::HostUnreachable, quote),
            },
            Icmpv4Message::TimeExceeded { quote, .. } => (ReceivedIcmpError::TimeExceeded, quote),
            Icmpv4Message::ParameterProblem { quote, .. } => {
                (ReceivedIcmpError::HostUnreachable, quote)
            }
            // Ignores source quench (RFC 6633), redirects, timestamps and all other types.
            Icmpv4Message::EchoReply { .. } | Icmpv4Message::Other { .. } => {
                return Err(DropReason::IcmpIgnored);
            }
        };
        Ok(IpInput::IcmpError(
            error,
            QuotedPacket::parse_v4(quote)?.with_origin(header.source, payload),
        ))
    }

    fn reply_to_echo_v4(
        &mut self,
        now_ns: u64,
        header: &Ipv4Header,
        link_meta: &LinkMeta,
        reply: &Icmpv4Message<'_>,
    ) -> Result<(), DropReason> {
        if self.ownership == AddressOwnership::Shared {
            return Err(DropReason::IcmpIgnored);
        }
        if link_meta.is_group || self.addresses.kind_v4(header.destination) != AddressKind::Local {
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
        self.prepare_icmpv4(packet, reply);
        Ok(())
    }

    /// Prepares an ICMP error about a packet, where RFC 1122 section 3.2.2 allows an error: not
    /// about ICMP errors, multicasts, broadcasts or later fragments.
    pub(crate) fn send_icmp_error_v4(
        &mut self,
        now_ns: u64,
        packet: &[u8],
        link_meta: &LinkMeta,
        kind: IcmpErrorKind,
    ) {
        let Ok((header, payload)) = Ipv4Header::parse_quoted(packet) else { return };
        let is_error = header.protocol == Protocol::ICMPV4
            && !matches!(payload.first(), Some(0 | 8 | 13..=18));
        let is_local = self.addresses.kind_v4(header.destination) == AddressKind::Local;
        let suppressed = self.ownership == AddressOwnership::Shared
            || link_meta.is_group
            || is_error
            || header.fragment_offset_bytes != 0
            || !(is_local || matches!(kind, IcmpErrorKind::NotForwarded(_)));
        if suppressed || !self.allow_icmp_error(now_ns, header.source.into()) {
            return;
        }
        let sender = IpAddr::V4(header.source);
        let source = match is_local {
            true => Some(IpAddr::V4(header.destination)),
            false => self.addresses.source_for(sender, sender),
        };
        let Some(source) = source else { return };
        let quoted = packet.len().min(MAX_ERROR_BYTES - Ipv4Header::BYTES - Icmpv4Message::BYTES);
        let quote = &packet[..quoted.min(header.total_bytes.into())];
        let unreachable =
            |code| Icmpv4Message::DestinationUnreachable { code, next_hop_mtu: 0, quote };
        let message = match kind {
            IcmpErrorKind::PortUnreachable => unreachable(unreachable::PORT),
            IcmpErrorKind::ProtocolUnreachable(_) => unreachable(unreachable::PROTOCOL),
            IcmpErrorKind::ReassemblyTimeout => {
                Icmpv4Message::TimeExceeded { code: time_exceeded::REASSEMBLY, quote }
            }
            IcmpErrorKind::ParameterProblem(problem) => {
                let pointer = problem.pointer as u8;
                Icmpv4Message::ParameterProblem { code: 0, pointer, quote }
            }
            IcmpErrorKind::NotForwarded(error) => match error {
                ForwardError::HopLimitExceeded => {
                    Icmpv4Message::TimeExceeded { code: time_exceeded::IN_TRANSIT, quote }
                }
                ForwardError::NoRoute | ForwardError::BeyondScope => {
                    unreachable(unreachable::NETWORK)
                }
                ForwardError::HostUnreachable => unreachable(unreachable::HOST),
                ForwardError::TooBig { mtu } => Icmpv4Message::DestinationUnreachable {
                    code: unreachable::FRAGMENTATION_NEEDED,
                    next_hop_mtu: mtu,
                    quote,
                },
            },
        };
        let reply = Packet {
            source,
            destination: sender,
            protocol: Protocol::ICMPV4,
            hop_limit: self.hop_limit,
            traffic_class: 0,
        };
        self.prepare_icmpv4(reply, &message);
    }
}
