//! Reconnection of memif devices after either peer has exited, which DPDK leaves to its users.

use std::io::ErrorKind;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

/// Driver name, with which the names of its devices begin.
const DRIVER_NAME: &str = "net_memif";

/// Interval between link checks, and so between attempts to reconnect.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// Time limit for a server that accepted the connection to bring the link up. DPDK ends the
/// server's process if the client disconnects during that time.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// True if the device is a memif.
pub fn is_memif(device: &str) -> bool {
    device.starts_with(DRIVER_NAME)
}

/// Client side of a memif; DPDK does not reconnect it.
pub struct MemifClient {
    /// Time of the last link check.
    last_check: Instant,
    /// The link was down at the last check.
    was_down: bool,
    /// Time of the connection to the server; `None` once the link has been up.
    server_found: Option<Instant>,
}

impl MemifClient {
    /// Client state of a device that was just opened; `None` if the device is no memif client.
    pub fn for_device(device: &str) -> Option<Self> {
        let is_client = is_memif(device) && argument(device, "role") != Some("server");
        let now = Instant::now();
        is_client.then_some(Self { last_check: now, was_down: false, server_found: Some(now) })
    }

    /// True while the server was found but may not have brought the link up yet.
    pub fn is_connecting(&self) -> bool {
        self.server_found.is_some_and(|found| found.elapsed() < CONNECT_TIMEOUT)
    }

    /// Records the result of a restart: `is_found` if the server accepted the connection.
    pub fn on_restart(&mut self, is_found: bool) {
        self.server_found = is_found.then(Instant::now);
    }

    /// True if the connection to the server should be retried. A link that has just gone down
    /// is not retried at once: a DPDK thread is still closing the old connection.
    pub fn is_retry_due(&mut self, link_is_up: impl FnOnce() -> bool) -> bool {
        if self.last_check.elapsed() < RETRY_INTERVAL {
            return false;
        }
        self.last_check = Instant::now();
        let was_down = std::mem::replace(&mut self.was_down, !link_is_up());
        if !self.was_down {
            self.server_found = None;
        }
        was_down && self.was_down && !self.is_connecting()
    }
}

/// Removes the socket file of a killed server if no process listens on it.
pub fn remove_stale_socket(device: &str) {
    let is_server = is_memif(device) && argument(device, "role") == Some("server");
    // An abstract socket disappears with its process.
    if !is_server || argument(device, "socket-abstract") != Some("no") {
        return;
    }
    let Some(path) = argument(device, "socket").map(Path::new) else { return };
    let is_socket = path.metadata().is_ok_and(|file| file.file_type().is_socket());
    if is_socket && has_no_listener(path) {
        // If the removal fails, DPDK reports that the path is in use.
        let _ = std::fs::remove_file(path);
    }
}

/// Probes the path with a stream socket, a type that memif does not use. The kernel reports
/// whether the path has a listener, but never connects the socket: DPDK ends the process of
/// a server whose client disconnects at once.
fn has_no_listener(path: &Path) -> bool {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None);
    let (Ok(socket), Ok(address)) = (socket, SocketAddrUnix::new(path)) else { return false };
    connect(&socket, &address)
        .is_err_and(|error: Errno| error.kind() == ErrorKind::ConnectionRefused)
}

/// Value of an argument of a device: `1` for `id` in `net_memif0,id=1`.
fn argument<'d>(device: &'d str, name: &str) -> Option<&'d str> {
    let mut arguments = device.split(',').skip(1).filter_map(|one| one.split_once('='));
    arguments.find_map(|(key, value)| (key == name).then_some(value))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{bind, listen};

    #[test]
    fn removes_only_sockets_without_a_listener() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("memif");
        let device = format!("net_memif0,role=server,socket-abstract=no,socket={}", path.display());
        let socket =
            socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .unwrap();
        bind(&socket, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        listen(&socket, 1).unwrap();
        remove_stale_socket(&device);
        assert!(path.exists(), "the socket has a listener");
        drop(socket);
        remove_stale_socket(&device.replace("server", "client"));
        remove_stale_socket(&device.replace("net_memif0", "net_tap0"));
        assert!(path.exists(), "not a memif server's socket");
        remove_stale_socket(&device);
        assert!(!path.exists());
        std::fs::write(&path, "a file").unwrap();
        remove_stale_socket(&device);
        assert!(path.exists(), "not a socket");
    }

    #[test]
    fn recognizes_clients_by_role() {
        assert!(MemifClient::for_device("net_memif0").is_some(), "DPDK's default");
        assert!(MemifClient::for_device("net_memif0,role=client,id=1").is_some());
        assert!(MemifClient::for_device("net_memif0,id=1,role=server").is_none());
        assert!(MemifClient::for_device("net_tap0").is_none());
    }

    #[test]
    fn waits_before_reconnecting_after_link_down() {
        let mut client = MemifClient::for_device("net_memif0").unwrap();
        client.on_restart(false);
        let mut check = |link_is_up| {
            client.last_check -= RETRY_INTERVAL;
            client.is_retry_due(|| link_is_up)
        };
        assert!(!check(true) && !check(false) && check(false) && check(false));
        assert!(!check(true) && !check(false));
        assert!(!client.is_retry_due(|| panic!("the interval has not passed")));
    }

    #[test]
    fn gives_a_found_server_time_to_connect() {
        let mut client = MemifClient::for_device("net_memif0").unwrap();
        let check = |client: &mut MemifClient, link_is_up| {
            client.last_check -= RETRY_INTERVAL;
            client.is_retry_due(|| link_is_up)
        };
        let expire = |client: &mut MemifClient| {
            client.server_found = client.server_found.map(|at| at - CONNECT_TIMEOUT);
        };
        assert!(!check(&mut client, false) && !check(&mut client, false), "just opened");
        assert!(client.is_connecting());
        expire(&mut client);
        assert!(!client.is_connecting());
        assert!(check(&mut client, false));
        client.on_restart(true);
        assert!(!check(&mut client, false));
        assert!(
            !check(&mut client, true) && !check(&mut client, false),
            "the server exited after connecting"
        );
        assert!(check(&mut client, false));
        client.on_restart(false);
        assert!(check(&mut client, false));
    }
}
