//! ICMP of both families: echo replies, errors sent and received, multicast listener reports.

mod icmpv4;
mod icmpv6;
mod mld;
mod output;
mod received;
mod reply;
mod report_schedule;

pub(crate) use received::{IcmpOrigin, QuotedPacket, ReceivedIcmpError};
pub(crate) use reply::PendingReply;
pub(crate) use report_schedule::ReportSchedule;
