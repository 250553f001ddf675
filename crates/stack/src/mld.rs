//! Telling routers and switches which groups we listen to (RFC 3810), so that
//! neighbour discovery gets through switches that look.

use std::net::{IpAddr, Ipv6Addr};

use tidegate_memory::Arena;
use tidegate_wire::ipv6_extension::router_alert_header;
use tidegate_wire::mld::{self, MldMessage, MldRecord, MldRecordKind, MldRecords};
use tidegate_wire::{DropReason, Icmpv6Message, MacAddr, Medium, Protocol};

use crate::address::is_link_local;
use crate::packet::{Fate, Packet};
use crate::{Ownership, SocketError, Stack};

const MILLISECOND_NS: u64 = 1_000_000;
/// RFC 3810 section 9.11: the time between the reports of a change.
const UNSOLICITED_INTERVAL_NS: u64 = 1_000 * MILLISECOND_NS;
/// How many groups one report tells of, so that it fits in 1280 bytes.
const GROUPS_PER_REPORT: usize = 60;

/// When the next reports are due, and how many.
#[derive(Clone, Copy, Default)]
pub(crate) struct Reports {
    pub(crate) due_ns: Option<u64>,
    /// Reports of a change, to be repeated (RFC 3810 section 9.1).
    pub(crate) changes: u8,
}

impl Stack {
    /// Whether we report at all.
    fn reports(&self) -> bool {
        self.medium == Medium::Ethernet
            && self.ownership == Ownership::Own
            && self.addresses.groups_v6().next().is_some()
    }

    /// Reports the groups soon, twice.
    pub(crate) fn report_groups(&mut self, now_ns: u64) {
        if self.reports() {
            self.mld = Reports { due_ns: Some(now_ns), changes: 2 };
        }
    }

    /// Listens to a group: datagrams to it reach sockets bound to the
    /// unspecified address and its port. IPv6 groups are reported to routers
    /// (RFC 3810); IPv4 groups are not, so they work within the link only.
    ///
    /// # Errors
    /// When the address is no group.
    pub fn join_group(&mut self, now_ns: u64, group: IpAddr) -> Result<(), SocketError> {
        if !group.is_multicast() {
            return Err(SocketError::AddressNotAvailable(group));
        }
        self.addresses.join(group);
        if group.is_ipv6() {
            self.report_groups(now_ns);
        }
        Ok(())
    }

    /// Stops listening to a group. Those that IPv6 itself needs stay.
    pub fn leave_group(&mut self, group: IpAddr) {
        self.addresses.leave(group);
    }

    /// A router asks. The answer comes at a random time within what it allows
    /// (RFC 3810 section 6.2); one answer serves all queries until then.
    pub(crate) fn mld_query_input(&mut self, now_ns: u64, code: u16) -> Result<Fate, DropReason> {
        if !self.reports() {
            return Err(DropReason::IcmpIgnored);
        }
        let delay_ns = response_delay_ms(code) * MILLISECOND_NS / (1 << 16)
            * u64::from(self.chance.below(1 << 16));
        let answer_ns = now_ns + delay_ns;
        self.mld.due_ns = Some(self.mld.due_ns.map_or(answer_ns, |due_ns| due_ns.min(answer_ns)));
        Ok(Fate::Handled)
    }

    /// Sends the reports that are due.
    pub(crate) fn send_reports(&mut self, now_ns: u64, arena: &mut Arena) {
        if self.mld.due_ns.is_none_or(|due_ns| due_ns > now_ns) {
            return;
        }
        let kind = match self.mld.changes {
            0 => MldRecordKind::ModeIsExclude,
            _ => MldRecordKind::ChangeToExclude,
        };
        self.mld.changes = self.mld.changes.saturating_sub(1);
        self.mld.due_ns = (self.mld.changes > 0).then_some(now_ns + UNSOLICITED_INTERVAL_NS);
        let mut groups: Vec<_> = self.addresses.groups_v6().collect();
        groups.sort_unstable();
        for some in groups.chunks(GROUPS_PER_REPORT) {
            let records: Vec<u8> =
                some.iter().flat_map(|&group| MldRecord::of_group(kind, group)).collect();
            if let Some(records) = MldRecords::parse(some.len() as u16, &records) {
                self.send_report(now_ns, arena, records);
            }
        }
    }

    fn send_report(&mut self, now_ns: u64, arena: &mut Arena, records: MldRecords<'_>) {
        // The source is link-local, or nobody while there is none (RFC 3810
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
        self.reply_v6(packet, &message);
        let alert = router_alert_header(Protocol::ICMPV6);
        self.reply.payload.splice(..0, alert);
        self.reply.mac = Some(MacAddr::of_ipv6_group(mld::ALL_ROUTERS));
        self.flush_reply(now_ns, arena);
    }
}

/// The time that an answer may take (RFC 3810 section 5.1.3).
fn response_delay_ms(code: u16) -> u64 {
    if code < 0x8000 {
        return code.into();
    }
    let (exponent, mantissa) = (u64::from(code >> 12 & 7), u64::from(code & 0xfff));
    (mantissa | 0x1000) << (exponent + 3)
}
