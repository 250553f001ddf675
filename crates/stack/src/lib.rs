//! ARP, neighbour discovery, routing, fragment reassembly, ICMP, UDP and TCP as a pure state
//! machine.
//!
//! A [`Stack`] is one interface of one host. Received frames enter by [`Stack::handle_frame`].
//! Frames to send wait in [`Stack::transmit_queue`]. Every call passes the current time, and
//! [`Stack::poll_event`] returns the events for the caller. The crate does no I/O and reads no
//! clock and no random numbers: the same calls with the same seed give the same packets.
//!
//! All input is treated as hostile. Every table has a limit ([`Limits`]). Every packet that is not
//! used is counted under a [`tidegate_wire::DropReason`], and [`Counters::balance`] shows that
//! every packet is accounted for.
#![forbid(unsafe_code)]

mod address_probe;
mod config;
mod counters;
mod error;
mod event;
mod fast_path;
mod icmp;
mod interface;
mod ip;
mod link;
mod neighbour;
mod ports;
mod random;
mod rate_limit;
mod router;
mod siphash;
mod snapshot;
mod stack;
mod tcp;
mod transmit;
mod udp;

pub use address_probe::{AddressConflict, AddressProbe, OwnAddresses, UnknownAddressProbe};
pub use config::{AddressOwnership, Config, ConfigError, Limits, Route};
pub use counters::Counters;
pub use error::{SendError, SocketError};
pub use event::Event;
pub use ip::transit::TransitPacket;
pub use ports::{PortGroups, Transport};
pub use router::Router;
pub use siphash::siphash;
pub use snapshot::{
    ExtractedSockets, MigrationError, MigrationMap, MigrationRejected, RestoreError, STATE_VERSION,
    SocketSelection, StackSnapshot,
};
pub use stack::Stack;
pub use tcp::{
    CongestionControl, Keepalive, RecoveryPhase, Shutdown, TcpError, TcpId, TcpInfo, TcpListenerId,
    TcpOptions, TcpReadiness, TcpSecrets, TcpState, TcpTraffic, UnreachableReason,
};
pub use udp::{
    Datagram, DatagramInfo, InPlaceRequest, QUEUE_FILL_SCALE, UdpErrorReport, UdpId, UdpOptions,
    UdpRequest, UdpSendOptions,
};
