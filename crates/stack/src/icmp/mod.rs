//! ICMP of both families: echo replies, errors sent and received, multicast listener reports.

mod icmpv4;
mod icmpv6;
mod message;
mod mld;

pub(crate) use icmpv4::parse_quote_v4;
pub(crate) use icmpv6::parse_quote_v6;
pub(crate) use message::{PendingReply, QuotedPacket, ReceivedIcmpError};
pub(crate) use mld::MldReportState;
