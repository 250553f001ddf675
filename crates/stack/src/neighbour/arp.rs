//! Address Resolution Protocol (RFC 826, RFC 5227).

use std::net::{IpAddr, Ipv4Addr};

use tidegate_memory::Arena;
use tidegate_wire::{ArpOperation, ArpPacket, DropReason, EtherType, MacAddr};

use crate::AddressOwnership;
use crate::interface::Interface;
use crate::ip::address::{AddressKind, can_be_source_v4};
use crate::neighbour::NeighbourClaim;

impl Interface {
    /// Processes a received packet.
    pub(crate) fn handle_arp(
        &mut self,
        now_ns: u64,
        arena: &mut Arena,
        packet: &ArpPacket,
    ) -> Result<(), DropReason> {
        let ArpPacket { operation, sender_mac, sender_ip, target_ip, .. } = *packet;
        if self.ownership == AddressOwnership::Shared {
            // The kernel receives the same request and answers.
            return Err(DropReason::ArpNotForUs);
        }
        // A probe does not carry a sender address (RFC 5227 section 1.1).
        let is_probe = operation == ArpOperation::Request && sender_ip.is_unspecified();
        if !sender_mac.is_valid_unicast() || !(is_probe || can_be_source_v4(sender_ip)) {
            return Err(DropReason::ArpSenderInvalid);
        }
        let is_other_host = sender_mac != self.mac;
        match self.addresses.kind_v4(sender_ip) {
            AddressKind::Local | AddressKind::Tentative if is_other_host => {
                return Err(self.on_address_claimed(now_ns, sender_ip.into(), sender_mac));
            }
            AddressKind::Broadcast => return Err(DropReason::ArpSenderInvalid),
            _ => {}
        }
        // Both hosts probe, so neither may use the address (RFC 5227 section 2.1.1).
        if is_probe && is_other_host && self.address_timers.is_probing(target_ip.into()) {
            return Err(self.on_address_claimed(now_ns, target_ip.into(), sender_mac));
        }
        let for_us = self.addresses.kind_v4(target_ip) == AddressKind::Local;
        match operation {
            ArpOperation::Reply => self.handle_arp_reply(now_ns, arena, sender_ip, sender_mac),
            ArpOperation::Request if for_us => {
                if !is_probe && self.routes.is_on_link(sender_ip.into()) {
                    let outcome = self.neighbours.learn(now_ns, sender_ip.into(), sender_mac);
                    self.apply_claim_outcome(now_ns, arena, sender_ip.into(), outcome)?;
                }
                self.send_arp(arena, ArpOperation::Reply, target_ip, sender_mac, sender_ip);
                Ok(())
            }
            // An announcement (RFC 5227 section 3) only updates existing entries.
            ArpOperation::Request if sender_ip == target_ip => {
                self.handle_arp_reply(now_ns, arena, sender_ip, sender_mac)
            }
            ArpOperation::Request => Err(DropReason::ArpNotForUs),
        }
    }

    fn handle_arp_reply(
        &mut self,
        now_ns: u64,
        arena: &mut Arena,
        ip: Ipv4Addr,
        mac: MacAddr,
    ) -> Result<(), DropReason> {
        let solicited = self.neighbours.awaits_reply(ip.into());
        let claim =
            NeighbourClaim { ip: ip.into(), mac: Some(mac), solicited, is_override: solicited };
        let outcome = self.neighbours.apply_claim(now_ns, &mut self.rng, claim);
        self.apply_claim_outcome(now_ns, arena, ip.into(), outcome)
    }

    /// Sends an ARP request for the hardware address of `ip` to the hardware address `to`.
    pub(crate) fn send_arp_request(&mut self, arena: &mut Arena, ip: Ipv4Addr, to: MacAddr) {
        let local = self.addresses.source_for(ip.into(), ip.into());
        if let Some(IpAddr::V4(ours)) = local {
            self.send_arp(arena, ArpOperation::Request, ours, to, ip);
        }
    }

    pub(super) fn send_arp(
        &mut self,
        arena: &mut Arena,
        operation: ArpOperation,
        local: Ipv4Addr,
        to: MacAddr,
        target_ip: Ipv4Addr,
    ) {
        let is_request = operation == ArpOperation::Request;
        let packet = ArpPacket {
            operation,
            sender_mac: self.mac,
            sender_ip: local,
            target_mac: if is_request { MacAddr::UNSPECIFIED } else { to },
            target_ip,
        };
        let Some(mut frame) = arena.alloc() else {
            self.counters.count_transmit_drop(DropReason::NoBuffer);
            return;
        };
        let fits = arena.set_len(&mut frame, self.link_header_bytes() + ArpPacket::BYTES);
        let written = self
            .emit_link_header(to, EtherType::ARP, arena.bytes_mut(&mut frame))
            .and_then(|rest| packet.emit(rest))
            .is_some();
        debug_assert!(fits && written, "a frame has space for an ARP packet");
        self.push_transmit(arena, frame);
    }
}
