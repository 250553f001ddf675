//! What DPDK's memif leaves to its users: a way back after either side has
//! ended.

use std::io::ErrorKind;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

/// The driver, and what devices of its begin with.
const NAME: &str = "net_memif";

/// How long to wait before the next try.
const RETRY_EVERY: Duration = Duration::from_millis(100);

/// How long a server that was found may take to bring the link up. DPDK ends the
/// process of one whose client goes meanwhile.
const GREETING_LIMIT: Duration = Duration::from_secs(2);

/// The client's end of a memif, which does not connect again by itself.
pub struct Client {
    /// When the link was last looked at.
    looked: Instant,
    /// It was down then.
    was_down: bool,
    /// When the server was found, as long as the link has not been up since.
    found: Option<Instant>,
}

impl Client {
    /// A device that was just opened; `None` when it is something else.
    pub fn of(device: &str) -> Option<Self> {
        let is_client = device.starts_with(NAME) && argument(device, "role") != Some("server");
        let now = Instant::now();
        is_client.then_some(Self { looked: now, was_down: false, found: Some(now) })
    }

    /// The server has been found, and may not have brought the link up.
    pub fn is_greeting(&self) -> bool {
        self.found.is_some_and(|found| found.elapsed() < GREETING_LIMIT)
    }

    /// It was looked for the server again, which was found or not.
    pub fn on_restart(&mut self, is_found: bool) {
        self.found = is_found.then(Instant::now);
    }

    /// Whether it is time to see whether the server is there again. Not at once
    /// when the link goes down: a thread of DPDK's is still busy with that.
    pub fn is_due(&mut self, link_is_up: impl FnOnce() -> bool) -> bool {
        if self.looked.elapsed() < RETRY_EVERY {
            return false;
        }
        self.looked = Instant::now();
        let was_down = std::mem::replace(&mut self.was_down, !link_is_up());
        if !self.was_down {
            self.found = None;
        }
        was_down && self.was_down && !self.is_greeting()
    }
}

/// Removes the socket of a server that was killed, where nobody listens any
/// more.
pub fn remove_stale_socket(device: &str) {
    let is_server = device.starts_with(NAME) && argument(device, "role") == Some("server");
    // An abstract socket ends with its process.
    if !is_server || argument(device, "socket-abstract") != Some("no") {
        return;
    }
    let Some(path) = argument(device, "socket").map(Path::new) else { return };
    let is_socket = path.metadata().is_ok_and(|file| file.file_type().is_socket());
    if is_socket && nobody_listens(path) {
        // If it cannot be removed DPDK says that it is in use.
        let _ = std::fs::remove_file(path);
    }
}

/// Asks with a socket of another kind than memif's, which is told whether the
/// path is anybody's but never connected: DPDK ends the process of a server
/// whose client goes at once.
fn nobody_listens(path: &Path) -> bool {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None);
    let (Ok(socket), Ok(address)) = (socket, SocketAddrUnix::new(path)) else { return false };
    connect(&socket, &address)
        .is_err_and(|error: Errno| error.kind() == ErrorKind::ConnectionRefused)
}

/// The value of an argument of a device: of `id` in `net_memif0,id=1`.
fn argument<'d>(device: &'d str, name: &str) -> Option<&'d str> {
    let mut arguments = device.split(',').skip(1).filter_map(|one| one.split_once('='));
    arguments.find_map(|(key, value)| (key == name).then_some(value))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{bind, listen};

    #[test]
    fn only_a_socket_that_nobody_listens_on_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("memif");
        let device = format!("net_memif0,role=server,socket-abstract=no,socket={}", path.display());
        let socket =
            socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .unwrap();
        bind(&socket, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        listen(&socket, 1).unwrap();
        remove_stale_socket(&device);
        assert!(path.exists(), "somebody listens");
        drop(socket);
        remove_stale_socket(&device.replace("server", "client"));
        remove_stale_socket(&device.replace("net_memif0", "net_tap0"));
        assert!(path.exists(), "it is not ours");
        remove_stale_socket(&device);
        assert!(!path.exists());
        std::fs::write(&path, "a file").unwrap();
        remove_stale_socket(&device);
        assert!(path.exists(), "no socket");
    }

    #[test]
    fn a_client_is_known_by_its_role() {
        assert!(Client::of("net_memif0").is_some(), "DPDK's default");
        assert!(Client::of("net_memif0,role=client,id=1").is_some());
        assert!(Client::of("net_memif0,id=1,role=server").is_none());
        assert!(Client::of("net_tap0").is_none());
    }

    #[test]
    fn a_link_that_has_just_gone_down_is_left_alone() {
        let mut client = Client::of("net_memif0").unwrap();
        client.on_restart(false);
        let mut look = |link_is_up| {
            client.looked -= RETRY_EVERY;
            client.is_due(|| link_is_up)
        };
        assert!(!look(true) && !look(false) && look(false) && look(false));
        assert!(!look(true) && !look(false));
        assert!(!client.is_due(|| panic!("it is not time yet")));
    }

    #[test]
    fn a_server_that_was_found_is_given_time() {
        let mut client = Client::of("net_memif0").unwrap();
        let look = |client: &mut Client, link_is_up| {
            client.looked -= RETRY_EVERY;
            client.is_due(|| link_is_up)
        };
        let later = |client: &mut Client| client.found = client.found.map(|at| at - GREETING_LIMIT);
        assert!(!look(&mut client, false) && !look(&mut client, false), "it was just opened");
        assert!(client.is_greeting());
        later(&mut client);
        assert!(!client.is_greeting());
        assert!(look(&mut client, false));
        client.on_restart(true);
        assert!(!look(&mut client, false));
        assert!(!look(&mut client, true) && !look(&mut client, false), "it was there, and ended");
        assert!(look(&mut client, false));
        client.on_restart(false);
        assert!(look(&mut client, false));
    }
}
