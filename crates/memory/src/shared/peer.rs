//! Process at the other end of a Unix socket.

use std::io;
use std::num::NonZeroU32;
use std::os::fd::{AsFd, AsRawFd};

/// Credentials of the process that connected a Unix socket, from the kernel (`SO_PEERCRED`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerCredentials {
    /// Process ID; `None` for a process that this one's PID namespace does not contain.
    pub pid: Option<NonZeroU32>,
    /// User ID.
    pub uid: u32,
}

/// Credentials of the process at the other end of a Unix socket.
///
/// # Errors
/// The kernel's error, for any other descriptor.
pub fn peer_credentials(socket: impl AsFd) -> io::Result<PeerCredentials> {
    // `rustix` has no value for process ID 0.
    let mut credentials = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    let fd = socket.as_fd().as_raw_fd();
    // SAFETY: the kernel writes at most `len` bytes, the size of the value, which outlives the
    // call; every bit pattern is a value of its fields.
    let result = unsafe {
        libc::getsockopt(
            fd,
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut credentials).cast(),
            &raw mut len,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    let pid = u32::try_from(credentials.pid).ok().and_then(NonZeroU32::new);
    Ok(PeerCredentials { pid, uid: credentials.uid })
}

#[cfg(all(test, not(miri)))]
mod tests {
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;
    use std::process::Command;

    use super::*;

    /// Set in the process of the test that runs in a PID namespace of its own.
    const INNER: &str = "TIDEGATE_TEST_IN_PID_NAMESPACE";

    #[test]
    fn process_outside_the_pid_namespace_has_no_id() {
        if std::env::var_os(INNER).is_some() {
            let credentials = peer_credentials(io::stdin()).unwrap();
            assert_eq!((credentials.pid, credentials.uid), (None, 0));
            return;
        }
        let (near, _far) = UnixStream::pair().unwrap();
        let own = peer_credentials(&near).unwrap();
        assert_eq!(own.pid, NonZeroU32::new(std::process::id()));
        if own.uid != 0 {
            return;
        }
        let this = "shared::peer::tests::process_outside_the_pid_namespace_has_no_id";
        let inner = Command::new("unshare")
            .args(["--pid", "--fork"])
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", this])
            .env(INNER, "1")
            .stdin(OwnedFd::from(near))
            .output()
            .unwrap();
        let output = String::from_utf8_lossy(&inner.stdout);
        assert!(inner.status.success() && output.contains("1 passed"), "{output}");
    }

    #[test]
    fn only_unix_sockets_have_peer_credentials() {
        assert!(peer_credentials(std::fs::File::open("/dev/null").unwrap()).is_err());
    }
}
