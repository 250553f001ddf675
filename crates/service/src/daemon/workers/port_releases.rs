//! Count of the kernel sockets whose ports workers are about to release.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::WakeCores;

/// Ports of an application's kernel sockets that workers are about to release. An application that
/// binds one of these ports at the kernel again waits until the count is 0.
#[derive(Clone, Default)]
pub(in crate::daemon) struct PortReleases(Arc<AtomicUsize>);

/// Release of a port that has not ended; the core is woken when it is dropped.
pub(super) struct PortRelease {
    releases: PortReleases,
    wake: WakeCores,
}

impl PortReleases {
    /// True while a worker is about to release a port.
    pub(in crate::daemon) fn are_pending(&self) -> bool {
        self.0.load(Ordering::Acquire) > 0
    }

    /// Counts a release until the returned value is dropped.
    pub(super) fn begin(&self, wake: &WakeCores) -> PortRelease {
        self.0.fetch_add(1, Ordering::Relaxed);
        PortRelease { releases: self.clone(), wake: Arc::clone(wake) }
    }
}

impl Drop for PortRelease {
    fn drop(&mut self) {
        self.releases.0.fetch_sub(1, Ordering::Release);
        (self.wake)();
    }
}
