//! Zones and settings of a server, replaced as a whole while threads serve.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::chaos::ServerIdentity;
use super::cookie::CookieSecret;
use super::error::DnsError;
use super::lookup::CompiledZones;
use super::rate_limit::RateLimiter;
use super::{DnsConfig, MAX_UDP_BYTES_WITHOUT_EDNS, Warning};
use crate::requests::RequestPolicy;

/// Time after which a reload no longer waits for threads that still use the former zones, and
/// interval at which it looks.
const RELEASE_LIMIT: Duration = Duration::from_secs(10);
const RELEASE_INTERVAL: Duration = Duration::from_millis(20);

/// Zones and settings of a server.
pub(super) struct Served {
    pub zones: CompiledZones,
    pub max_udp_bytes: usize,
    pub limiter: Option<RateLimiter>,
    /// The first secret makes new cookies; empty without cookies.
    pub cookie_secrets: Vec<CookieSecret>,
    pub identity: ServerIdentity,
    pub requests: Option<RequestPolicy>,
}

impl Served {
    /// Loads the zone files and prepares all answers.
    pub(super) fn load(config: &DnsConfig) -> Result<Self, DnsError> {
        let largest = usize::from(u16::MAX);
        Ok(Served {
            zones: CompiledZones::load(config)?,
            max_udp_bytes: config.max_udp_bytes.clamp(MAX_UDP_BYTES_WITHOUT_EDNS, largest),
            limiter: config.rate_limit.map(|limit| RateLimiter::new(limit, config.hash_seed)),
            cookie_secrets: config.cookie_secrets.clone(),
            identity: config.identity.clone(),
            requests: config.requests.clone(),
        })
    }
}

/// Place from which all threads of a server take what they serve.
pub(super) struct Publication {
    version: AtomicU64,
    current: Mutex<Arc<Served>>,
}

impl Publication {
    pub(super) fn new(served: Arc<Served>) -> Self {
        Publication { version: AtomicU64::new(0), current: Mutex::new(served) }
    }

    /// Number of publications so far.
    #[inline]
    pub(super) fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    /// Zones and settings in force, with their version; `None` while these are being replaced.
    /// Never blocks.
    pub(super) fn try_get(&self) -> Option<(u64, Arc<Served>)> {
        let current = self.current.try_lock().ok()?;
        Some((self.version(), Arc::clone(&current)))
    }

    fn lock(&self) -> MutexGuard<'_, Arc<Served>> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Replaces the zones and settings in force; returns the former.
    fn publish(&self, served: Arc<Served>) -> Arc<Served> {
        let mut current = self.lock();
        self.version.fetch_add(1, Ordering::Release);
        std::mem::replace(&mut *current, served)
    }
}

/// Replaces the zones and settings of a running server.
#[derive(Clone)]
pub struct DnsReloader {
    publication: Arc<Publication>,
}

/// Zones that were loaded but are not yet served.
pub struct LoadedZones {
    served: Arc<Served>,
}

impl LoadedZones {
    /// Irregularities found in the zone files.
    pub fn warnings(&self) -> &[Warning] {
        &self.served.zones.warnings
    }

    /// Number of zones.
    pub fn zone_count(&self) -> usize {
        self.served.zones.zone_count
    }

    /// Number of names that can be queried, including empty non-terminals.
    pub fn name_count(&self) -> usize {
        self.served.zones.name_count()
    }
}

impl DnsReloader {
    pub(super) fn new(publication: Arc<Publication>) -> Self {
        DnsReloader { publication }
    }

    /// Loads zones without serving them.
    ///
    /// # Errors
    /// When a zone file cannot be read or is invalid. The error names file, line and what was
    /// expected.
    pub fn load(&self, config: &DnsConfig) -> Result<LoadedZones, DnsError> {
        Ok(LoadedZones { served: Arc::new(Served::load(config)?) })
    }

    /// Serves loaded zones in place of the present ones. Each query is answered from either the
    /// former or the new zones, as a whole. Waits until no thread uses the former zones, at most
    /// some seconds, because no serving thread is to free them.
    pub fn publish(&self, loaded: LoadedZones) {
        let former = self.publication.publish(loaded.served);
        let began = Instant::now();
        while Arc::strong_count(&former) > 1 && began.elapsed() < RELEASE_LIMIT {
            std::thread::sleep(RELEASE_INTERVAL);
        }
    }
}
