//! Descriptor that an application shares with the daemon.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, OnceLock};

use tidegate_engine::HeldSocket;

use super::port_releases::PortRelease;
use super::{PortReleases, UserWorkers, WakeCores};

/// Descriptor that an application shares with the daemon. Whoever drops the last reference, a
/// worker of the user closes it.
#[derive(Clone)]
pub(in crate::daemon) struct AppFd(Arc<SharedFd>);

struct SharedFd {
    /// Taken only when this is dropped.
    fd: Option<OwnedFd>,
    uid: u32,
    workers: UserWorkers,
    /// Count in which releases of its port take part.
    releases: OnceLock<(PortReleases, WakeCores)>,
}

impl SharedFd {
    fn begin_release(&self) -> Option<PortRelease> {
        self.releases.get().map(|(releases, wake)| releases.begin(wake))
    }
}

impl Drop for SharedFd {
    fn drop(&mut self) {
        let release = self.begin_release();
        let fd = self.fd.take();
        self.workers.run(self.uid, move || {
            drop(fd);
            drop(release);
        });
    }
}

impl AppFd {
    /// Takes over a descriptor that applications of a user share.
    pub(in crate::daemon) fn new(fd: OwnedFd, uid: u32, workers: &UserWorkers) -> Self {
        let releases = OnceLock::new();
        Self(Arc::new(SharedFd { fd: Some(fd), uid, workers: workers.clone(), releases }))
    }

    /// Counts releases of the port that this descriptor is bound to. The first call counts.
    pub(in crate::daemon) fn count_releases(&self, releases: &PortReleases, wake: &WakeCores) {
        let _ = self.0.releases.set((releases.clone(), Arc::clone(wake)));
    }

    /// User whose workers make system calls on the descriptor.
    pub(in crate::daemon) fn uid(&self) -> u32 {
        self.0.uid
    }

    /// Runs `job` with this descriptor on a worker of the user.
    pub(in crate::daemon) fn run(&self, job: impl FnOnce(&Self) + Send + 'static) {
        let own = self.clone();
        self.0.workers.run(self.0.uid, move || job(&own));
    }
}

impl AsFd for AppFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.fd.as_ref().expect("the descriptor is there until it is dropped").as_fd()
    }
}

impl HeldSocket for AppFd {
    fn stop_listening(&self) {
        let release = self.0.begin_release();
        self.run(|socket| {
            // Fails on a socket that does not listen.
            let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Both);
            drop(release);
        });
    }
}

impl fmt::Debug for AppFd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AppFd").field("uid", &self.0.uid).finish_non_exhaustive()
    }
}
