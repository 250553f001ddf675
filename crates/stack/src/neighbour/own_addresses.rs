//! Uniqueness of own addresses: probes before and while they are used, announcements, and what
//! happens when another host claims one (RFC 5227, RFC 4862 section 5.4, RFC 4429).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use tidegate_memory::Arena;
use tidegate_wire::ndp::solicited_node;
use tidegate_wire::{
    ArpOperation, DropReason, MacAddr, Medium, NdpMessage, NeighbourAdvertisement,
};

use crate::interface::Interface;
use crate::ip::address::ALL_NODES;
use crate::neighbour::address_timers::AddressStep;
use crate::{AddressConflict, AddressOwnership, AddressProbe, Event, OwnAddresses};

impl Interface {
    /// Returns whether the own addresses are unique.
    pub(crate) fn own_addresses(&self) -> OwnAddresses {
        match self.taken {
            Some(conflict) => OwnAddresses::Taken(conflict),
            None if self.address_timers.is_probing_any() => OwnAddresses::Probing,
            None => OwnAddresses::Unique,
        }
    }

    /// Probes and announces all addresses, and announces those that nobody claims. Shared addresses
    /// are the kernel's to probe.
    pub(crate) fn claim_addresses(&mut self, now_ns: u64, probe: AddressProbe) {
        if self.ownership != AddressOwnership::Exclusive || self.medium != Medium::Ethernet {
            return;
        }
        let addresses: Vec<_> = self.addresses.ready().collect();
        for address in addresses {
            if probe == AddressProbe::Rfc {
                self.addresses.set_ready(address, false);
            }
            self.address_timers.add_probes(now_ns, address, probe, &mut self.rng);
        }
        self.paths.invalidate();
    }

    /// Handles a claim of the host `mac` to an own address: gives the address up while it is being
    /// probed, and defends it afterwards. Two packets of a liar in ten seconds must not silence a
    /// server, so it never gives up an address in use (RFC 5227 section 2.4 (c)).
    pub(super) fn on_address_claimed(
        &mut self,
        now_ns: u64,
        address: IpAddr,
        mac: MacAddr,
    ) -> DropReason {
        if self.address_timers.is_probing(address) {
            self.address_timers.remove(address);
            self.addresses.remove(address);
            self.paths.invalidate();
            self.taken.get_or_insert(AddressConflict { address, mac });
        } else {
            self.address_timers.add_defence(now_ns, address);
        }
        self.queue_event_once(Event::AddressConflict(address));
        match address {
            IpAddr::V4(_) => DropReason::ArpConflict,
            IpAddr::V6(_) => DropReason::NdpConflict,
        }
    }

    /// Does the steps of own addresses that are due.
    pub(crate) fn handle_address_timers(&mut self, now_ns: u64, arena: &mut Arena) {
        while let Some(step) = self.address_timers.poll_due(now_ns, &mut self.rng) {
            match step {
                AddressStep::Probe(IpAddr::V4(address)) => {
                    let (none, all) = (Ipv4Addr::UNSPECIFIED, MacAddr::BROADCAST);
                    self.send_arp(arena, ArpOperation::Request, none, all, address);
                }
                AddressStep::Probe(IpAddr::V6(address)) => self.probe_v6(now_ns, arena, address),
                AddressStep::Confirm(address) => {
                    self.addresses.set_ready(address, true);
                    self.paths.invalidate();
                }
                AddressStep::Announce(IpAddr::V4(address)) => {
                    let (request, all) = (ArpOperation::Request, MacAddr::BROADCAST);
                    self.send_arp(arena, request, address, all, address);
                }
                AddressStep::Announce(IpAddr::V6(address)) => {
                    self.advertise(now_ns, arena, address);
                }
            }
        }
    }

    /// Solicits other hosts with this address, from the unspecified address.
    fn probe_v6(&mut self, now_ns: u64, arena: &mut Arena, target: Ipv6Addr) {
        let group = solicited_node(target);
        let message = NdpMessage::NeighbourSolicitation { target, source_mac: None };
        self.reply_ndp(Ipv6Addr::UNSPECIFIED, group, &message);
        self.reply.mac = Some(MacAddr::from_ipv6_group(group));
        self.flush_reply(now_ns, arena);
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
