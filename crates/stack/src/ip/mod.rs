//! IPv4 and IPv6: addresses, routes and paths, input and output, reassembly, forwarding.

pub(crate) mod address;
pub(crate) mod forward;
mod fragments;
pub(crate) mod identification;
pub(crate) mod ipv4;
pub(crate) mod ipv6;
pub(crate) mod output;
pub(crate) mod packet;
pub(crate) mod path;
pub(crate) mod path_mtu;
pub(crate) mod reassembly;
pub(crate) mod route;
pub(crate) mod transit;
pub(crate) mod version;
