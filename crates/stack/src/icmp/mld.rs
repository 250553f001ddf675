//! Multicast listener reports to routers and switches (RFC 3810), so that neighbour discovery
//! passes through switches with MLD snooping.

use std::net::{IpAddr, Ipv6Addr};

use tidegate_memory::Arena;
use tidegate_wire::ipv6_extension::router_alert_header;
use tidegate_wire::mld::{self, MldMessage, MldRecord, MldRecords};
use tidegate_wire::{DropReason, Icmpv6Message, MacAddr, Medium, Protocol};

use crate::interface::Interface;
use crate::ip::address::is_link_local;
use crate::ip::packet::{Packet, RxVerdict};
use crate::{AddressOwnership, SocketError};

const MILLISECOND_NS: u64 = 1_000_000;
/// Groups per report, so that a report fits in 1280 bytes.
const MAX_GROUPS_PER_REPORT: usize = 60;

impl Interface {
    /// True if the interface sends MLD reports.
    fn sends_mld_reports(&self) -> bool {
        self.medium == Medium::Ethernet
            && self.ownership == AddressOwnership::Exclusive
            && self.addresses.groups_v6().next().is_some()
    }

    /// Schedules two reports of the joined groups, the first one now.
    pub(crate) fn schedule_mld_reports(&mut self, now_ns: u64) {
        if self.sends_mld_reports() {
            self.mld.report_change(now_ns);
        }
    }

    /// Implements [`crate::Stack::join_group`].
    pub(crate) fn join_group(&mut self, now_ns: u64, group: IpAddr) -> Result<(), SocketError> {
        if !group.is_multicast() {
            return Err(SocketError::AddressNotAvailable(group));
        }
        self.addresses.join(group);
        if group.is_ipv6() {
            self.schedule_mld_reports(now_ns);
        }
        Ok(())
    }

    /// Processes a router's query. The report follows after a random delay within the maximum that
    /// the query sets (RFC 3810 section 6.2); one report answers all queries until then.
    pub(crate) fn handle_mld_query(
        &mut self,
        now_ns: u64,
        code: u16,
    ) -> Result<RxVerdict, DropReason> {
        if !self.sends_mld_reports() {
            return Err(DropReason::IcmpIgnored);
        }
        let delay_ns = response_delay_ms(code) * MILLISECOND_NS / (1 << 16)
            * u64::from(self.rng.below(1 << 16));
        self.mld.answer_query(now_ns + delay_ns);
        Ok(RxVerdict::Handled)
    }

    /// Sends the reports that are due.
    pub(crate) fn send_mld_reports(&mut self, now_ns: u64, arena: &mut Arena) {
        let Some(kind) = self.mld.poll_due(now_ns) else { return };
        let mut groups: Vec<_> = self.addresses.groups_v6().collect();
        groups.sort_unstable();
        for chunk in groups.chunks(MAX_GROUPS_PER_REPORT) {
            let records: Vec<u8> = chunk
                .iter()
                .flat_map(|&group| MldRecord::emit_without_sources(kind, group))
                .collect();
            if let Some(records) = MldRecords::parse(chunk.len() as u16, &records) {
                self.send_mld_report(now_ns, arena, records);
            }
        }
    }

    fn send_mld_report(&mut self, now_ns: u64, arena: &mut Arena, records: MldRecords<'_>) {
        // The source is a link-local address, or unspecified while there is none (RFC 3810
        // section 5.2.13).
        let source = self.addresses.source_for(mld::ALL_ROUTERS.into(), mld::ALL_ROUTERS.into());
        let source = match source {
            Some(IpAddr::V6(v6)) if is_link_local(v6.into()) => v6,
            _ => Ipv6Addr::UNSPECIFIED,
        };
        let packet = Packet {
            source: IpAddr::V6(source),
            destination: IpAddr::V6(mld::ALL_ROUTERS),
            protocol: Protocol::HOP_BY_HOP,
            hop_limit: mld::HOP_LIMIT,
            traffic_class: 0,
        };
        let message = Icmpv6Message::Mld(MldMessage::Report(records));
        self.prepare_icmpv6(packet, &message);
        let alert = router_alert_header(Protocol::ICMPV6);
        self.reply.payload.splice(..0, alert);
        self.reply.mac = Some(MacAddr::from_ipv6_group(mld::ALL_ROUTERS));
        self.flush_reply(now_ns, arena);
    }
}

/// Maximum response delay in milliseconds (RFC 3810 section 5.1.3).
fn response_delay_ms(code: u16) -> u64 {
    if code < 0x8000 {
        return code.into();
    }
    let (exponent, mantissa) = (u64::from(code >> 12 & 7), u64::from(code & 0xfff));
    (mantissa | 0x1000) << (exponent + 3)
}
