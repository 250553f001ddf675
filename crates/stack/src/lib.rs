//! Neighbours, routes, fragments, ICMP, UDP and TCP, as a pure state machine.
//!
//! A [`Stack`] is one interface of one host. Frames go in by
//! [`Stack::ingest`], frames for the wire wait in [`Stack::transmit_queue`],
//! time comes in with every call, and what the outside should know comes out
//! of [`Stack::poll_event`]. There is no I/O, no clock and no source of
//! randomness in here: the same calls with the same seed give the same
//! packets.
//!
//! Everything that arrives is hostile until proven otherwise. Every table has
//! a limit ([`Limits`]), every packet that is not used is counted under a
//! [`tidegate_wire::DropReason`], and [`Counters::balance`] shows that none
//! was lost.
#![forbid(unsafe_code)]

mod address;
mod arp;
mod chance;
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
mod mld;
mod moving;
mod ndp;
mod neighbour;
mod output;
mod packet;
mod path;
mod path_mtu;
mod port_groups;
mod rate;
mod reserved;
mod route;
mod router;
mod saved;
mod stack;
mod tcp;
mod udp;

pub use config::{Config, ConfigError, Limits, Ownership, Route};
pub use counters::Counters;
pub use error::{SendError, SocketError};
pub use event::Event;
pub use forward::Transit;
pub use moving::{MoveError, Moved, MovingSockets, NotMoved, TakenSockets};
pub use port_groups::PortGroups;
pub use reserved::Transport;
pub use router::Router;
pub use saved::{RestoreError, STATE_VERSION, SavedStack};
pub use stack::Stack;
pub use tcp::{
    CongestionControl, Keepalive, Shutdown, TcpError, TcpId, TcpInfo, TcpListenerId, TcpOptions,
    TcpReadiness, TcpSecrets, TcpState,
};
pub use udp::{Datagram, FULL, InPlace, Request, UdpId, UdpOptions};
