//! ARP, neighbour discovery, routing, fragment reassembly, ICMP, UDP and TCP as a pure state
//! machine.
//!
//! A [`Stack`] is one interface of one host. Received frames enter by [`Stack::ingest`]. Frames to
//! send wait in [`Stack::transmit_queue`]. Every call passes the current time, and
//! [`Stack::poll_event`] returns the events for the caller. The crate does no I/O and reads no
//! clock and no random numbers: the same calls with the same seed give the same packets.
//!
//! All input is treated as hostile. Every table has a limit ([`Limits`]). Every packet that is not
//! used is counted under a [`tidegate_wire::DropReason`], and [`Counters::balance`] shows that
//! every packet is accounted for.
#![forbid(unsafe_code)]

mod address;
mod arp;
mod config;
mod counters;
mod error;
mod ethernet;
mod event;
mod fast_path;
mod forward;
mod fragment;
mod icmp;
mod icmpv4;
mod icmpv6;
mod ipv4;
mod ipv6;
mod migration;
mod mld;
mod ndp;
mod neighbour;
mod output;
mod packet;
mod path;
mod path_mtu;
mod port_groups;
mod random;
mod rate_limit;
mod reserved_ports;
mod route;
mod router;
mod snapshot;
mod stack;
mod tcp;
mod udp;

pub use config::{AddressOwnership, Config, ConfigError, Limits, Route};
pub use counters::Counters;
pub use error::{SendError, SocketError};
pub use event::Event;
pub use forward::TransitPacket;
pub use migration::{
    ExtractedSockets, MigrationError, MigrationMap, MigrationRejected, SocketSelection,
};
pub use port_groups::PortGroups;
pub use reserved_ports::Transport;
pub use router::Router;
pub use snapshot::{RestoreError, STATE_VERSION, StackSnapshot};
pub use stack::Stack;
pub use tcp::{
    CongestionControl, Keepalive, Shutdown, TcpError, TcpId, TcpInfo, TcpListenerId, TcpOptions,
    TcpReadiness, TcpSecrets, TcpState,
};
pub use udp::{Datagram, InPlaceRequest, QUEUE_FILL_SCALE, UdpId, UdpOptions, UdpRequest};
