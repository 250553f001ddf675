//! The Transmission Control Protocol (RFC 9293): connections and listeners.
//!
//! A [`connection::Connection`] is a state machine without clock or I/O, of four parts: `send`,
//! `receive`, `recovery` (with `congestion`) and `timers`. `demux` holds all connections, finds
//! the one of a segment, and joins TCP to the IP layer. `listener` opens connections for peers.
//! `buffers` is the memory of their data, `identity` what peers see of this host: sequence
//! numbers and time stamps. `api` are the calls of sockets.
//!
//! A received segment only changes state. Output is sent at the end of a burst, so that one
//! acknowledgement covers the burst.

mod api;
mod buffers;
mod congestion;
mod connection;
mod demux;
mod flags;
mod identity;
mod listener;
mod options;
mod receive;
mod recovery;
mod segment;
mod send;
mod seq;
mod socket;
mod timers;

pub(crate) use buffers::TcpShared;
pub use congestion::CongestionControl;
pub(crate) use connection::Connection;
pub(crate) use demux::{ExtractedTcp, TcpMigrationMap, TcpSnapshot, TcpTable};
pub use identity::TcpSecrets;
pub(crate) use segment::{DataHeader, FourTuple, OutSegment, Segment, TupleAddresses};
pub use socket::{
    Keepalive, RecoveryPhase, Shutdown, TcpError, TcpId, TcpInfo, TcpListenerId, TcpOptions,
    TcpReadiness, TcpState, TcpTraffic, UnreachableReason,
};
