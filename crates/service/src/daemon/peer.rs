//! Process at the other end of a connection.

use std::io;
use std::num::NonZeroU32;
use std::os::fd::AsFd;

use tidegate_memory::shared::{PeerCredentials, peer_credentials};

/// Process that has connected, from the kernel (`SO_PEERCRED`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::daemon) struct Peer {
    pub(in crate::daemon) pid: NonZeroU32,
    pub(in crate::daemon) uid: u32,
}

impl Peer {
    /// Process that has connected a Unix socket.
    ///
    /// # Errors
    /// [`io::ErrorKind::PermissionDenied`] for a process without a process ID here.
    pub(in crate::daemon) fn of(connection: impl AsFd) -> io::Result<Self> {
        Self::new(peer_credentials(connection)?)
    }

    fn new(PeerCredentials { pid, uid }: PeerCredentials) -> io::Result<Self> {
        let why = "the process is in a PID namespace that the daemon cannot see: run the daemon in \
                   that namespace or in one around it";
        let invisible = || io::Error::new(io::ErrorKind::PermissionDenied, why);
        Ok(Self { pid: pid.ok_or_else(invisible)?, uid })
    }

    /// True if this user may see and do everything: root, and the daemon's own user.
    pub(in crate::daemon) fn is_privileged(uid: u32) -> bool {
        uid == 0 || uid == rustix::process::geteuid().as_raw()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refuses_process_without_a_process_id() {
        let refused = Peer::new(PeerCredentials { pid: None, uid: 0 }).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
        assert!(refused.to_string().contains("PID namespace"), "{refused}");
    }
}
