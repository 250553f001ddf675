//! Neighbour discovery (RFC 4861) and duplicate address detection (RFC 4862).

use std::net::{IpAddr, Ipv6Addr};

use tidegate_memory::Arena;
use tidegate_wire::ndp::{self, solicited_node};
use tidegate_wire::{
    DropReason, Icmpv6Message, Ipv6Header, MacAddr, Medium, NdpMessage, NeighbourAdvertisement,
    Protocol,
};

use crate::interface::Interface;
use crate::ip::address::{ALL_NODES, AddressKind};
use crate::ip::packet::{Packet, RxVerdict};
use crate::link::LinkMeta;
use crate::neighbour::NeighbourClaim;
use crate::neighbour::address_timers::AddressStep;
use crate::{AddressOwnership, Event};

impl Interface {
    /// Processes a received message.
    pub(crate) fn handle_ndp(
        &mut self,
        header: &Ipv6Header,
        link_meta: &LinkMeta,
        message: &NdpMessage<'_>,
    ) -> Result<RxVerdict, DropReason> {
        if self.medium == Medium::Ip || self.ownership == AddressOwnership::Shared {
            return Err(DropReason::NdpIgnored);
        }
        match *message {
            NdpMessage::NeighbourSolicitation { target, source_mac } => {
                self.handle_solicitation(header, link_meta, target, source_mac)
            }
            NdpMessage::NeighbourAdvertisement(advertisement) => {
                self.handle_advertisement(&advertisement)
            }
            // This host is not a router, and its routes are configured: RFC 4861 sections 6.2.6
            // and 8.3 let a host ignore the other messages.
            _ => Err(DropReason::NdpIgnored),
        }
    }

    fn handle_solicitation(
        &mut self,
        header: &Ipv6Header,
        link_meta: &LinkMeta,
        target: Ipv6Addr,
        source_link: Option<MacAddr>,
    ) -> Result<RxVerdict, DropReason> {
        if source_link.is_some_and(|mac| !mac.is_valid_unicast()) {
            return Err(DropReason::NdpMalformed);
        }
        let no_source = header.source.is_unspecified();
        match self.addresses.kind_v6(target) {
            AddressKind::Local => {}
            // RFC 4862 section 5.4.3: another host is checking the same address.
            AddressKind::Tentative if no_source => return self.duplicate_address(target),
            _ => return Err(DropReason::NdpNotForUs),
        }
        let to = if no_source { ALL_NODES } else { header.source };
        let advertisement = NeighbourAdvertisement {
            router: self.forwarding.enabled,
            solicited: !no_source,
            overrides: true,
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
        advertisement: &NeighbourAdvertisement,
    ) -> Result<RxVerdict, DropReason> {
        let target = advertisement.target;
        match self.addresses.kind_v6(target) {
            AddressKind::Tentative => return self.duplicate_address(target),
            AddressKind::Local => {
                self.queue_event_once(Event::AddressConflict(target.into()));
                return Err(DropReason::NdpConflict);
            }
            _ => {}
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

    /// Removes a tentative address that another host uses.
    fn duplicate_address(&mut self, address: Ipv6Addr) -> Result<RxVerdict, DropReason> {
        self.address_timers.remove(address.into());
        self.addresses.remove(address.into());
        self.paths.invalidate();
        self.queue_event_once(Event::AddressConflict(address.into()));
        Err(DropReason::NdpConflict)
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
        let source_mac = Some(self.mac);
        let message = NdpMessage::NeighbourSolicitation { target, source_mac };
        self.reply_ndp(source, destination, &message);
        self.reply.mac = Some(to.unwrap_or(MacAddr::from_ipv6_group(group)));
        self.flush_reply(now_ns, arena);
    }

    /// Does the steps of own addresses that are due. Duplicate address detection solicits new
    /// addresses, and confirms the addresses that no host claimed in time (RFC 4862 section 5.4).
    pub(crate) fn handle_address_timers(&mut self, now_ns: u64, arena: &mut Arena) {
        while let Some(step) = self.address_timers.poll_due(now_ns) {
            let target = match step {
                AddressStep::Solicit(address) => address,
                AddressStep::Announce(address) => {
                    self.announce(now_ns, arena, address);
                    continue;
                }
                AddressStep::Confirm(address) => {
                    self.addresses.confirm(address.into());
                    self.paths.invalidate();
                    continue;
                }
            };
            let group = solicited_node(target);
            let message = NdpMessage::NeighbourSolicitation { target, source_mac: None };
            self.reply_ndp(Ipv6Addr::UNSPECIFIED, group, &message);
            self.reply.mac = Some(MacAddr::from_ipv6_group(group));
            self.flush_reply(now_ns, arena);
        }
    }
}
