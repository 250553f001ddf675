//! Announcements of own addresses, so that neighbours replace the hardware address of a former
//! owner at once (RFC 5227 section 2.3, RFC 4861 section 7.2.6).

use std::net::{IpAddr, Ipv6Addr};

use tidegate_memory::Arena;
use tidegate_wire::{ArpOperation, MacAddr, Medium, NdpMessage, NeighbourAdvertisement};

use crate::AddressOwnership;
use crate::interface::Interface;
use crate::ip::address::ALL_NODES;

impl Interface {
    /// Schedules announcements of all addresses that are ready for use. Shared addresses are the
    /// kernel's to announce.
    pub(crate) fn announce_addresses(&mut self, now_ns: u64) {
        if self.ownership == AddressOwnership::Exclusive && self.medium == Medium::Ethernet {
            for address in self.addresses.ready() {
                self.address_timers.add_announcements(now_ns, address);
            }
        }
    }

    /// Announces an address to all neighbours.
    pub(super) fn announce(&mut self, now_ns: u64, arena: &mut Arena, address: IpAddr) {
        match address {
            IpAddr::V4(v4) => {
                self.send_arp(arena, ArpOperation::Request, v4, MacAddr::BROADCAST, v4);
            }
            IpAddr::V6(v6) => self.advertise(now_ns, arena, v6),
        }
    }

    /// Sends an unsolicited advertisement to all nodes.
    fn advertise(&mut self, now_ns: u64, arena: &mut Arena, address: Ipv6Addr) {
        let message = NdpMessage::NeighbourAdvertisement(NeighbourAdvertisement {
            router: self.forwarding.enabled,
            solicited: false,
            overrides: true,
            target: address,
            target_mac: Some(self.mac),
        });
        self.reply_ndp(address, ALL_NODES, &message);
        self.reply.mac = Some(MacAddr::from_ipv6_group(ALL_NODES));
        self.flush_reply(now_ns, arena);
    }
}
