//! Neighbours: hosts on the link and their hardware addresses, by ARP (IPv4) and by neighbour
//! discovery (IPv6).

mod address_timers;
mod arp;
mod cache;
mod ndp;
mod own_addresses;
mod resolve;

pub(crate) use address_timers::AddressTimers;
pub(crate) use cache::{
    ClaimOutcome, NeighbourAction, NeighbourCache, NeighbourClaim, NeighbourTimeout, Resolution,
    UnreachableNeighbour,
};
