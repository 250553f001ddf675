//! Neighbours: hosts on the link and their hardware addresses, by ARP (IPv4) and by neighbour
//! discovery (IPv6).

mod arp;
mod cache;
mod ndp;
mod resolve;
mod tentative;

pub(crate) use cache::{
    ClaimOutcome, NeighbourAction, NeighbourCache, NeighbourClaim, NeighbourTimeout, Resolution,
    UnreachableNeighbour,
};
pub(crate) use tentative::TentativeAddresses;
