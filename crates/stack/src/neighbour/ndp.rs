//! Neighbour discovery (RFC 4861).

use std::net::{IpAddr, Ipv6Addr};

use tidegate_memory::Arena;
use tidegate_wire::ndp::{self, solicited_node};
use tidegate_wire::{
    DropReason, Icmpv6Message, Ipv6Header, MacAddr, Medium, NdpMessage, NeighbourAdvertisement,
    Protocol,
};

use crate::AddressOwnership;
use crate::interface::Interface;
use crate::ip::address::{ALL_NODES, AddressKind};
use crate::ip::packet::{Packet, RxVerdict};
use crate::link::LinkMeta;
use crate::neighbour::NeighbourClaim;

impl Interface {
    /// Processes a received message.
    pub(crate) fn handle_ndp(
        &mut self,
        now_ns: u64,
        header: &Ipv6Header,
        link_meta: &LinkMeta,
        message: &NdpMessage<'_>,
    ) -> Result<RxVerdict, DropReason> {
        if self.medium == Medium::Ip || self.ownership == AddressOwnership::Shared {
            return Err(DropReason::NdpIgnored);
        }
        match *message {
            NdpMessage::NeighbourSolicitation { target, source_mac } => {
                self.handle_solicitation(now_ns, header, link_meta, target, source_mac)
            }
            NdpMessage::NeighbourAdvertisement(advertisement) => {
                self.handle_advertisement(now_ns, link_meta, &advertisement)
            }
            // This host is not a router, and its routes are configured: RFC 4861 sections 6.2.6
            // and 8.3 let a host ignore the other messages.
            _ => Err(DropReason::NdpIgnored),
        }
    }

    fn handle_solicitation(
        &mut self,
        now_ns: u64,
        header: &Ipv6Header,
        link_meta: &LinkMeta,
        target: Ipv6Addr,
        source_link: Option<MacAddr>,
    ) -> Result<RxVerdict, DropReason> {
        if source_link.is_some_and(|mac| !mac.is_valid_unicast()) {
            return Err(DropReason::NdpMalformed);
        }
        let is_own_source = self.addresses.is_own(header.source.into());
        if is_own_source && link_meta.source_mac != self.mac {
            let mac = link_meta.source_mac;
            return Err(self.on_address_claimed(now_ns, header.source.into(), mac));
        }
        let no_source = header.source.is_unspecified();
        // Another host probes the same address (RFC 4862 section 5.4.3).
        let is_probed = no_source && self.address_timers.is_probing(target.into());
        if is_probed && link_meta.source_mac != self.mac {
            return Err(self.on_address_claimed(now_ns, target.into(), link_meta.source_mac));
        }
        if is_probed || is_own_source || self.addresses.kind_v6(target) != AddressKind::Local {
            return Err(DropReason::NdpNotForUs);
        }
        let to = if no_source { ALL_NODES } else { header.source };
        let advertisement = NeighbourAdvertisement {
            router: self.forwarding.enabled,
            solicited: !no_source,
            // RFC 4429 section 3.3.
            overrides: !self.address_timers.is_probing(target.into()),
            target,
            target_mac: Some(self.mac),
        };
        self.reply_ndp(target, to, &NdpMessage::NeighbourAdvertisement(advertisement));
        let verdict = match source_link {
            // A solicitation must not create an entry for a host off the link (RFC 4861 section
            // 7.2.3, RFC 5942 section 4).
            Some(mac) if self.is_neighbour(header.source) => {
                RxVerdict::NeighbourSeen(IpAddr::V6(header.source), mac)
            }
            _ => RxVerdict::Handled,
        };
        self.reply.mac = Some(match source_link {
            Some(mac) if !no_source => mac,
            _ if no_source => MacAddr::from_ipv6_group(ALL_NODES),
            // A unicast probe has no link-layer address option: answer to the frame's source.
            _ => link_meta.source_mac,
        });
        Ok(verdict)
    }

    fn is_neighbour(&self, address: Ipv6Addr) -> bool {
        address.is_unicast_link_local() || self.routes.is_on_link(address.into())
    }

    fn handle_advertisement(
        &mut self,
        now_ns: u64,
        link_meta: &LinkMeta,
        advertisement: &NeighbourAdvertisement,
    ) -> Result<RxVerdict, DropReason> {
        let target = advertisement.target;
        if self.addresses.is_own(target.into()) {
            let mac = link_meta.source_mac;
            let is_other_host = mac != self.mac;
            return Err(match is_other_host {
                true => self.on_address_claimed(now_ns, target.into(), mac),
                false => DropReason::NdpNotForUs,
            });
        }
        if advertisement.target_mac.is_some_and(|mac| !mac.is_valid_unicast()) {
            return Err(DropReason::NdpMalformed);
        }
        Ok(RxVerdict::NeighbourClaim(NeighbourClaim {
            ip: IpAddr::V6(target),
            mac: advertisement.target_mac,
            solicited: advertisement.solicited,
            is_override: advertisement.overrides,
        }))
    }

    pub(super) fn reply_ndp(
        &mut self,
        source: Ipv6Addr,
        destination: Ipv6Addr,
        message: &NdpMessage<'_>,
    ) {
        let packet = Packet {
            source: IpAddr::V6(source),
            destination: IpAddr::V6(destination),
            protocol: Protocol::ICMPV6,
            hop_limit: ndp::HOP_LIMIT,
            traffic_class: 0,
        };
        self.prepare_icmpv6(packet, &Icmpv6Message::Ndp(*message));
    }

    /// Solicits a neighbour: by multicast, or by unicast to the hardware address `to`.
    pub(crate) fn send_solicitation(
        &mut self,
        now_ns: u64,
        arena: &mut Arena,
        target: Ipv6Addr,
        to: Option<MacAddr>,
    ) {
        let Some(IpAddr::V6(source)) = self.addresses.source_for(target.into(), target.into())
        else {
            return;
        };
        let group = solicited_node(target);
        let destination = if to.is_some() { target } else { group };
        // RFC 4429 section 3.2: a neighbour must not learn an address that is being probed.
        let source_mac = (!self.address_timers.is_probing(source.into())).then_some(self.mac);
        let message = NdpMessage::NeighbourSolicitation { target, source_mac };
        self.reply_ndp(source, destination, &message);
        self.reply.mac = Some(to.unwrap_or(MacAddr::from_ipv6_group(group)));
        self.flush_reply(now_ns, arena);
    }
}
