//! Multicast listener reports to routers and switches (RFC 3810), so that neighbour discovery
//! passes through switches with MLD snooping.

use std::net::{IpAddr, Ipv6Addr};

use tidegate_memory::Arena;
use tidegate_wire::ipv6_extension::router_alert_header;
use tidegate_wire::mld::{self, MldMessage, MldRecord, MldRecordKind, MldRecords};
use tidegate_wire::{DropReason, Icmpv6Message, MacAddr, Medium, Protocol};

use crate::ip::address::is_link_local;
use crate::ip::packet::{Packet, RxVerdict};
use crate::{AddressOwnership, SocketError, Stack};

const MILLISECOND_NS: u64 = 1_000_000;
/// Interval between the reports of a change (RFC 3810 section 9.11).
const UNSOLICITED_REPORT_INTERVAL_NS: u64 = 1_000 * MILLISECOND_NS;
/// Groups per report, so that a report fits in 1280 bytes.
const MAX_GROUPS_PER_REPORT: usize = 60;

/// Schedule of the next reports.
#[derive(Clone, Copy, Default)]
pub(crate) struct MldReportState {
    pub(crate) due_ns: Option<u64>,
    /// Remaining repetitions of the report of a change (RFC 3810 section 9.1).
    pub(crate) pending_change_reports: u8,
}

impl Stack {
    /// True if the interface sends MLD reports.
    fn sends_mld_reports(&self) -> bool {
        self.medium == Medium::Ethernet
            && self.ownership == AddressOwnership::Exclusive
            && self.addresses.groups_v6().next().is_some()
    }

    /// Schedules two reports of the joined groups, the first one now.
    pub(crate) fn schedule_mld_reports(&mut self, now_ns: u64) {
        if self.sends_mld_reports() {
            self.mld = MldReportState { due_ns: Some(now_ns), pending_change_reports: 2 };
        }
    }

    /// Joins a multicast group: datagrams to the group reach sockets bound to the unspecified
    /// address and the destination port. IPv6 groups are reported to routers (RFC 3810). IPv4
    /// groups are not, so they work only within the link.
    ///
    /// # Errors
    /// [`SocketError::AddressNotAvailable`] when the address is not multicast.
    pub fn join_group(&mut self, now_ns: u64, group: IpAddr) -> Result<(), SocketError> {
        if !group.is_multicast() {
            return Err(SocketError::AddressNotAvailable(group));
        }
        self.addresses.join(group);
        if group.is_ipv6() {
            self.schedule_mld_reports(now_ns);
        }
        Ok(())
    }

    /// Leaves a group, unless IPv6 itself requires the group.
    pub fn leave_group(&mut self, group: IpAddr) {
        self.addresses.leave(group);
    }

    /// Processes a router's query. The report follows after a random delay within the maximum that
    /// the query sets (RFC 3810 section 6.2); one report answers all queries until then.
    pub(crate) fn mld_query_input(
        &mut self,
        now_ns: u64,
        code: u16,
    ) -> Result<RxVerdict, DropReason> {
        if !self.sends_mld_reports() {
            return Err(DropReason::IcmpIgnored);
        }
        let delay_ns = response_delay_ms(code) * MILLISECOND_NS / (1 << 16)
            * u64::from(self.rng.below(1 << 16));
        let report_ns = now_ns + delay_ns;
        self.mld.due_ns = Some(self.mld.due_ns.map_or(report_ns, |due_ns| due_ns.min(report_ns)));
        Ok(RxVerdict::Handled)
    }

    /// Sends the reports that are due.
    pub(crate) fn send_mld_reports(&mut self, now_ns: u64, arena: &mut Arena) {
        if self.mld.due_ns.is_none_or(|due_ns| due_ns > now_ns) {
            return;
        }
        let kind = match self.mld.pending_change_reports {
            0 => MldRecordKind::ModeIsExclude,
            _ => MldRecordKind::ChangeToExclude,
        };
        self.mld.pending_change_reports = self.mld.pending_change_reports.saturating_sub(1);
        self.mld.due_ns = (self.mld.pending_change_reports > 0)
            .then_some(now_ns + UNSOLICITED_REPORT_INTERVAL_NS);
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
