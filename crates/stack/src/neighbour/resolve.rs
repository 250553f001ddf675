//! Resolution of next hops: solicitations to send, and frames that wait for an answer.

use std::net::IpAddr;

use tidegate_memory::Arena;
use tidegate_wire::{DropReason, MacAddr, Medium};

use super::{ClaimOutcome, NeighbourAction, Resolution};
use crate::interface::Interface;
use crate::ip::address::AddressKind;
use crate::{AddressOwnership, Event, SendError};

impl Interface {
    /// Hardware address of a next hop, if known, and the time in nanoseconds until which it is
    /// valid. An unknown address is solicited.
    pub(crate) fn resolve(
        &mut self,
        now_ns: u64,
        arena: &mut Arena,
        next_hop: IpAddr,
    ) -> Result<(Option<MacAddr>, u64), SendError> {
        let group = match next_hop {
            _ if self.medium == Medium::Ip => Some(MacAddr::UNSPECIFIED),
            IpAddr::V4(v4) if v4.is_multicast() => Some(MacAddr::from_ipv4_group(v4)),
            IpAddr::V6(v6) if v6.is_multicast() => Some(MacAddr::from_ipv6_group(v6)),
            _ if self.addresses.kind(next_hop) == AddressKind::Broadcast => {
                Some(MacAddr::BROADCAST)
            }
            _ => None,
        };
        if group.is_some() {
            return Ok((group, u64::MAX));
        }
        match self.neighbours.resolve(now_ns, next_hop) {
            Ok(Resolution::Known(mac, until_ns)) => Ok((Some(mac), until_ns)),
            Ok(Resolution::Wait(action)) => {
                if let Some(action) = action {
                    self.solicit_neighbour(now_ns, arena, action);
                }
                Ok((None, 0))
            }
            Err(reason) => {
                self.counters.count_transmit_drop(reason);
                Err(SendError::WouldBlock)
            }
        }
    }

    /// Solicits a neighbour, or asks the caller to resolve it.
    pub(crate) fn solicit_neighbour(
        &mut self,
        now_ns: u64,
        arena: &mut Arena,
        action: NeighbourAction,
    ) {
        let (ip, mac) = match action {
            NeighbourAction::Solicit(ip) => (ip, None),
            NeighbourAction::Probe(ip, mac) => (ip, Some(mac)),
        };
        match ip {
            _ if self.ownership == AddressOwnership::Shared => {
                self.queue_event_once(Event::NeighbourUnresolved(ip));
            }
            IpAddr::V4(v4) => {
                self.send_arp_request(arena, v4, mac.unwrap_or(MacAddr::BROADCAST));
            }
            IpAddr::V6(v6) => self.send_solicitation(now_ns, arena, v6, mac),
        }
    }

    /// Acts on the result of a neighbour claim.
    pub(crate) fn apply_claim_outcome(
        &mut self,
        now_ns: u64,
        arena: &mut Arena,
        ip: IpAddr,
        outcome: ClaimOutcome,
    ) -> Result<(), DropReason> {
        match outcome {
            ClaimOutcome::Unchanged => {}
            ClaimOutcome::Changed => self.paths.invalidate(),
            ClaimOutcome::Verify(action) => self.solicit_neighbour(now_ns, arena, action),
            ClaimOutcome::Resolved(mac, waiting) => {
                for frame in waiting {
                    self.send_to_mac(arena, mac, ip.is_ipv4(), frame);
                }
            }
            ClaimOutcome::Unsolicited if ip.is_ipv4() => return Err(DropReason::ArpUnsolicited),
            ClaimOutcome::Unsolicited => return Err(DropReason::NdpUnsolicited),
        }
        Ok(())
    }
}
