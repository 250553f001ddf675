//! The Address Resolution Protocol (RFC 826, RFC 5227).

use std::net::{IpAddr, Ipv4Addr};

use tidegate_memory::Arena;
use tidegate_wire::{ArpOperation, ArpPacket, DropReason, EtherType, MacAddr};

use crate::address::{Kind, can_be_source_v4};
use crate::neighbour::Claim;
use crate::{Event, Ownership, Stack};

impl Stack {
    pub(crate) fn arp_input(
        &mut self,
        now_ns: u64,
        arena: &mut Arena,
        packet: &ArpPacket,
    ) -> Result<(), DropReason> {
        let ArpPacket { operation, sender_mac, sender_ip, target_ip, .. } = *packet;
        if self.ownership == Ownership::Shared {
            // The kernel sees it too and answers.
            return Err(DropReason::ArpNotForUs);
        }
        // A probe has no sender address yet (RFC 5227 section 1.1).
        let is_probe = operation == ArpOperation::Request && sender_ip.is_unspecified();
        if !sender_mac.is_station() || !(is_probe || can_be_source_v4(sender_ip)) {
            return Err(DropReason::ArpSenderInvalid);
        }
        match self.addresses.kind_v4(sender_ip) {
            Kind::Ours if sender_mac != self.mac => {
                self.tell_once(Event::AddressConflict(sender_ip.into()));
                return Err(DropReason::ArpConflict);
            }
            Kind::Broadcast => return Err(DropReason::ArpSenderInvalid),
            _ => {}
        }
        let for_us = self.addresses.kind_v4(target_ip) == Kind::Ours;
        match operation {
            ArpOperation::Reply => self.arp_reply_input(now_ns, arena, sender_ip, sender_mac),
            ArpOperation::Request if for_us => {
                if !is_probe && self.routes.is_on_link(sender_ip.into()) {
                    let heard = self.neighbours.heard(now_ns, sender_ip.into(), sender_mac);
                    self.neighbour_claimed(now_ns, arena, sender_ip.into(), heard)?;
                }
                self.send_arp(arena, ArpOperation::Reply, target_ip, sender_mac, sender_ip);
                Ok(())
            }
            // An announcement (RFC 5227 section 3) is news only about a
            // neighbour that we know.
            ArpOperation::Request if sender_ip == target_ip => {
                self.arp_reply_input(now_ns, arena, sender_ip, sender_mac)
            }
            ArpOperation::Request => Err(DropReason::ArpNotForUs),
        }
    }

    fn arp_reply_input(
        &mut self,
        now_ns: u64,
        arena: &mut Arena,
        ip: Ipv4Addr,
        mac: MacAddr,
    ) -> Result<(), DropReason> {
        let asked = self.neighbours.is_asked(ip.into());
        let claim = Claim { ip: ip.into(), mac: Some(mac), solicited: asked, overrides: asked };
        let claimed = self.neighbours.claim(now_ns, &mut self.chance, claim);
        self.neighbour_claimed(now_ns, arena, ip.into(), claimed)
    }

    /// Asks for a neighbour's hardware address.
    pub(crate) fn send_arp_request(&mut self, arena: &mut Arena, ip: Ipv4Addr, to: MacAddr) {
        let ours = self.addresses.source_for(ip.into(), ip.into());
        if let Some(IpAddr::V4(ours)) = ours {
            self.send_arp(arena, ArpOperation::Request, ours, to, ip);
        }
    }

    fn send_arp(
        &mut self,
        arena: &mut Arena,
        operation: ArpOperation,
        ours: Ipv4Addr,
        to: MacAddr,
        target_ip: Ipv4Addr,
    ) {
        let asks = operation == ArpOperation::Request;
        let packet = ArpPacket {
            operation,
            sender_mac: self.mac,
            sender_ip: ours,
            target_mac: if asks { MacAddr::UNSPECIFIED } else { to },
            target_ip,
        };
        let Some(mut frame) = arena.alloc() else {
            self.counters.transmit_drops.count(DropReason::NoBuffer);
            return;
        };
        let fits = arena.set_len(&mut frame, self.link_bytes() + ArpPacket::BYTES);
        let written = self
            .emit_link(to, EtherType::ARP, arena.bytes_mut(&mut frame))
            .and_then(|rest| packet.emit(rest))
            .is_some();
        debug_assert!(fits && written, "a frame has room for an ARP packet");
        self.push_transmit(arena, frame);
    }
}
