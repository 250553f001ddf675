//! Authoritative DNS server.
//!
//! The crate `domain` parses the zone files. The server prepares all answers at startup. A query
//! then costs one hash table lookup, one copy and a few patched bytes; nothing is allocated.
//!
//! Served over UDP and TCP: every record type as data (unknown types as in RFC 3597), wildcards
//! (RFC 4592), delegations with glue, CNAME chains through all zones of the server, DNAME
//! (RFC 6672), negative answers (RFC 2308), EDNS(0) (RFC 6891), DNS cookies (RFC 7873, RFC 9018),
//! NSID (RFC 5001), version and identity in class CH (RFC 4892). Responses over UDP can be
//! rate-limited.
//!
//! Not served: zone transfers, dynamic updates, classes other than IN. Zones may be signed, and
//! DNSSEC records are answered when queried by type. Signatures are not added to other answers.

mod admission;
mod answer_store;
mod catalog;
mod chaos;
mod compare;
mod cookie;
mod entries;
mod error;
mod lookup;
mod message;
mod name;
mod query_log;
mod rate_limit;
mod rdata;
mod reply;
mod served;
mod server;
mod splitmix64;
pub mod synthetic;
mod table;
mod zone;
mod zonefile;

use std::path::PathBuf;

pub use chaos::ServerIdentity;
pub use compare::{Difference, compare};
pub use cookie::CookieSecret;
pub use error::{DnsError, Warning, ZoneFileLocation};
pub use message::{Edns, MAX_UDP_BYTES_WITHOUT_EDNS, Query, Rcode, Rejection};
pub use name::{MAX_LABEL_BYTES, MAX_NAME_BYTES, Name};
pub use query_log::QueryLog;
pub use rate_limit::RateLimit;
pub use served::{DnsReloader, LoadedZones};
pub use server::{DnsCounters, DnsServer};

use crate::requests::RequestPolicy;

/// Default largest reply over UDP, in bytes. Replies of this size pass nearly every path without
/// fragmentation (DNS flag day 2020).
pub const DEFAULT_MAX_UDP_BYTES: usize = 1232;

/// Zone to serve.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ZoneSource {
    /// Name of the zone. When absent, the owner of the SOA record is the zone's name, and a file
    /// with relative names must begin with `$ORIGIN`.
    pub origin: Option<String>,
    /// Path of the zone file.
    pub path: PathBuf,
}

/// Configuration of the DNS server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DnsConfig {
    /// Zones to serve.
    pub zones: Vec<ZoneSource>,
    /// Largest reply over UDP in bytes, also advertised to clients (EDNS). Values below 512 count
    /// as 512.
    pub max_udp_bytes: usize,
    /// Secret seed of the hash function: random at every start, so that no attacker can choose
    /// names that collide.
    pub hash_seed: u64,
    /// Limit of responses over UDP; `None` for no limit. The responder needs a clock for it:
    /// [`crate::Responder::start_batch`].
    pub rate_limit: Option<RateLimit>,
    /// Secrets of DNS cookies: the first makes new cookies, all are accepted. Empty for no cookies.
    pub cookie_secrets: Vec<CookieSecret>,
    /// Version and identity that the server tells.
    pub identity: ServerIdentity,
    /// Classes of queries, of which some are refused under overload; `None` answers all. It needs a
    /// clock as the rate limit does.
    pub requests: Option<RequestPolicy>,
}

impl Default for DnsConfig {
    fn default() -> Self {
        DnsConfig {
            zones: Vec::new(),
            max_udp_bytes: DEFAULT_MAX_UDP_BYTES,
            hash_seed: 0,
            rate_limit: None,
            cookie_secrets: Vec::new(),
            identity: ServerIdentity::default(),
            requests: None,
        }
    }
}
