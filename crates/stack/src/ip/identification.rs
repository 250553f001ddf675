//! Identifications of fragmented packets.

use std::hash::BuildHasher;
use std::net::IpAddr;

use crate::random::{HashKey, SecretRng};

const COUNTERS: usize = 256;

/// Counters of packet identifications, selected by a keyed hash of the addresses: an identification
/// reveals nothing about the traffic with other hosts (RFC 7739 section 5.2).
pub(crate) struct Identifications {
    key: HashKey,
    counters: Box<[u32]>,
}

impl Identifications {
    pub(crate) fn new(rng: &mut SecretRng) -> Self {
        Self { key: rng.hash_key(), counters: (0..COUNTERS).map(|_| rng.next_u32()).collect() }
    }

    /// Returns an identification that these two hosts have not used for long.
    pub(crate) fn next(&mut self, source: IpAddr, destination: IpAddr) -> u32 {
        let at = self.key.hash_one((source, destination)) as usize;
        let counter = &mut self.counters[at % COUNTERS];
        *counter = counter.wrapping_add(1);
        *counter
    }
}
