//! Neighbour discovery (RFC 4861) and duplicate address detection (RFC 4862).

use std::net::{IpAddr, Ipv6Addr};

use tidegate_memory::Arena;
use tidegate_wire::ndp::{self, solicited_node};
use tidegate_wire::{
    DropReason, Icmpv6Message, Ipv6Header, MacAddr, Medium, NdpMessage, NeighbourAdvertisement,
    Protocol,
};

use crate::address::{ALL_NODES, Kind};
use crate::ethernet::Arrival;
use crate::neighbour::Claim;
use crate::packet::{Fate, Packet};
use crate::{Event, Ownership, Stack};

const SECOND_NS: u64 = 1_000_000_000;

/// An address that is not known to be unique yet.
#[derive(Clone, Copy)]
pub(crate) struct Tentative {
    pub(crate) address: Ipv6Addr,
    /// When its time is up.
    pub(crate) until_ns: u64,
    /// Whether others were asked.
    pub(crate) asked: bool,
}

impl Stack {
    pub(crate) fn ndp_input(
        &mut self,
        header: &Ipv6Header,
        arrival: &Arrival,
        message: &NdpMessage<'_>,
    ) -> Result<Fate, DropReason> {
        if self.medium == Medium::Ip || self.ownership == Ownership::Shared {
            return Err(DropReason::NdpIgnored);
        }
        match *message {
            NdpMessage::NeighbourSolicitation { target, source_link } => {
                self.solicitation_input(header, arrival, target, source_link)
            }
            NdpMessage::NeighbourAdvertisement(advertisement) => {
                self.advertisement_input(&advertisement)
            }
            // We are no router, and routes are configured: RFC 4861 section
            // 6.2.6 and 8.3 let a host ignore the rest.
            _ => Err(DropReason::NdpIgnored),
        }
    }

    fn solicitation_input(
        &mut self,
        header: &Ipv6Header,
        arrival: &Arrival,
        target: Ipv6Addr,
        source_link: Option<MacAddr>,
    ) -> Result<Fate, DropReason> {
        if source_link.is_some_and(|mac| !mac.is_station()) {
            return Err(DropReason::NdpMalformed);
        }
        let from_nobody = header.source.is_unspecified();
        match self.addresses.kind_v6(target) {
            Kind::Ours => {}
            // RFC 4862 section 5.4.3: another host wants the same address.
            Kind::Tentative if from_nobody => return self.duplicate_address(target),
            _ => return Err(DropReason::NdpNotForUs),
        }
        let to = if from_nobody { ALL_NODES } else { header.source };
        let answer = NeighbourAdvertisement {
            router: self.forwarding.enabled,
            solicited: !from_nobody,
            overrides: true,
            target,
            target_link: Some(self.mac),
        };
        self.reply_ndp(target, to, &NdpMessage::NeighbourAdvertisement(answer));
        let heard = match source_link {
            // A solicitation must not make an entry for a host off the link
            // (RFC 4861 section 7.2.3, RFC 5942 section 4).
            Some(mac) if self.is_neighbour(header.source) => {
                Fate::Heard(IpAddr::V6(header.source), mac)
            }
            _ => Fate::Handled,
        };
        self.reply.mac = Some(match source_link {
            Some(mac) if !from_nobody => mac,
            _ if from_nobody => MacAddr::of_ipv6_group(ALL_NODES),
            // A unicast probe comes without an option: answer where it came
            // from.
            _ => arrival.source_mac,
        });
        Ok(heard)
    }

    fn is_neighbour(&self, address: Ipv6Addr) -> bool {
        address.is_unicast_link_local() || self.routes.is_on_link(address.into())
    }

    fn advertisement_input(
        &mut self,
        advertisement: &NeighbourAdvertisement,
    ) -> Result<Fate, DropReason> {
        let target = advertisement.target;
        match self.addresses.kind_v6(target) {
            Kind::Tentative => return self.duplicate_address(target),
            Kind::Ours => {
                self.tell_once(Event::AddressConflict(target.into()));
                return Err(DropReason::NdpConflict);
            }
            _ => {}
        }
        if advertisement.target_link.is_some_and(|mac| !mac.is_station()) {
            return Err(DropReason::NdpMalformed);
        }
        Ok(Fate::Claim(Claim {
            ip: IpAddr::V6(target),
            mac: advertisement.target_link,
            solicited: advertisement.solicited,
            overrides: advertisement.overrides,
        }))
    }

    /// Gives a tentative address up.
    fn duplicate_address(&mut self, address: Ipv6Addr) -> Result<Fate, DropReason> {
        self.tentative.retain(|tentative| tentative.address != address);
        self.addresses.remove(address.into());
        self.paths.forget();
        self.tell_once(Event::AddressConflict(address.into()));
        Err(DropReason::NdpConflict)
    }

    fn reply_ndp(&mut self, source: Ipv6Addr, destination: Ipv6Addr, message: &NdpMessage<'_>) {
        let packet = Packet {
            source: IpAddr::V6(source),
            destination: IpAddr::V6(destination),
            protocol: Protocol::ICMPV6,
            hop_limit: ndp::HOP_LIMIT,
            traffic_class: 0,
        };
        self.reply_v6(packet, &Icmpv6Message::Ndp(*message));
    }

    /// Asks for a neighbour: everybody, or only the one that had the address.
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
        let source_link = Some(self.mac);
        let message = NdpMessage::NeighbourSolicitation { target, source_link };
        self.reply_ndp(source, destination, &message);
        self.reply.mac = Some(to.unwrap_or(MacAddr::of_ipv6_group(group)));
        self.flush_reply(now_ns, arena);
    }

    /// Asks whether anybody has our new addresses, and takes those that nobody
    /// claimed in time (RFC 4862 section 5.4).
    pub(crate) fn detect_duplicates(&mut self, now_ns: u64, arena: &mut Arena) {
        for at in (0..self.tentative.len()).rev() {
            let Tentative { address, until_ns, asked } = self.tentative[at];
            if until_ns > now_ns {
                continue;
            }
            if asked {
                self.tentative.swap_remove(at);
                self.addresses.confirm(address.into());
                self.paths.forget();
                continue;
            }
            let tentative = &mut self.tentative[at];
            (tentative.asked, tentative.until_ns) = (true, now_ns + SECOND_NS);
            let group = solicited_node(address);
            let message = NdpMessage::NeighbourSolicitation { target: address, source_link: None };
            self.reply_ndp(Ipv6Addr::UNSPECIFIED, group, &message);
            self.reply.mac = Some(MacAddr::of_ipv6_group(group));
            self.flush_reply(now_ns, arena);
        }
    }
}
