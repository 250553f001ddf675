//! The User Datagram Protocol (RFC 768): sockets and their datagrams.

mod api;
mod bind_terms;
mod datagram;
mod error_report;
mod exchange;
mod family;
mod icmp_error;
mod id;
mod lookup;
mod migration;
mod port_groups;
mod queue_trim;
mod receive;
mod send;
mod snapshot;
mod socket;
mod table;

pub use api::QUEUE_FILL_SCALE;
pub(crate) use datagram::Payload;
pub use datagram::{Datagram, DatagramInfo};
pub use error_report::UdpErrorReport;
pub use exchange::{InPlaceRequest, UdpRequest};
pub(crate) use family::{DatagramFamily, QueuedDatagram};
pub use id::UdpId;
pub(crate) use lookup::Lookup;
pub(crate) use migration::ExtractedUdp;
pub(crate) use send::SendTarget;
pub use send::UdpSendOptions;
pub(crate) use snapshot::UdpSnapshot;
pub use socket::UdpOptions;
pub(crate) use table::UdpTable;
