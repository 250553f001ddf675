//! An authoritative DNS server.
//!
//! Zone files are read by the crate `domain`. All answers are prepared while
//! the server starts: a query then costs one lookup in a hash table, a copy,
//! and a few patched bytes. Nothing is allocated for a query.
//!
//! What is served: every record type as data (unknown ones by RFC 3597),
//! wildcards (RFC 4592), delegations with glue, aliases followed through all
//! zones of the server, DNAME (RFC 6672), negative answers (RFC 2308), EDNS(0)
//! (RFC 6891). What is not: zone transfers, updates, TCP, classes other than
//! IN. Zones may be signed and their DNSSEC records can be asked for by type,
//! but signatures are not added to other answers.

mod answer;
mod catalog;
mod compare;
mod compile;
mod entries;
mod error;
mod lookup;
mod message;
mod name;
mod random;
mod server;
pub mod synthetic;
mod table;
mod zone;
mod zonefile;

use std::path::PathBuf;

pub use compare::{Difference, compare};
pub use error::{DnsError, Place, Warning};
pub use message::{Edns, PLAIN_UDP_BYTES, Query, Rcode, Rejection};
pub use name::{MAX_LABEL_BYTES, MAX_NAME_BYTES, Name};
pub use server::{DnsCounters, Server};

/// The largest answer over UDP unless told otherwise: what passes nearly every
/// path without fragments (the DNS flag day of 2020).
pub const DEFAULT_MAX_UDP_BYTES: usize = 1232;

/// One zone to serve.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ZoneSource {
    /// The name of the zone. When it is not given, it is the owner of the SOA
    /// record, and the file must begin with `$ORIGIN` if it has relative names.
    pub origin: Option<String>,
    /// The zone file.
    pub path: PathBuf,
}

/// What to serve and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DnsConfig {
    /// The zones.
    pub zones: Vec<ZoneSource>,
    /// The largest answer over UDP in bytes, also told to clients. Values
    /// under 512 count as 512.
    pub max_udp_bytes: usize,
    /// The secret of the hash function: random for every start, so that nobody
    /// can choose names that collide.
    pub hash_seed: u64,
}

impl Default for DnsConfig {
    fn default() -> Self {
        DnsConfig { zones: Vec::new(), max_udp_bytes: DEFAULT_MAX_UDP_BYTES, hash_seed: 0 }
    }
}
