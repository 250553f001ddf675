//! The table of all connections: which connection a segment belongs to, whose turn it is to send,
//! whose timer is due; input from and output to the IP layer.

mod icmp_error;
mod input;
mod memory;
mod migration;
mod output;
mod pending;
mod slots;
mod snapshot;
mod stalled;
mod table;
mod timer_wheel;

pub(crate) use migration::{ExtractedTcp, TcpMigrationMap};
pub(crate) use pending::Turn;
pub(crate) use snapshot::TcpSnapshot;
pub(crate) use table::TcpTable;
