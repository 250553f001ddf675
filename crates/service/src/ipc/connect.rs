//! Connection to the Unix socket of a daemon.

use std::io::{self, ErrorKind};
use std::os::unix::net::UnixStream;
use std::path::Path;

/// Connects to the Unix socket of the daemon.
///
/// # Errors
/// The error of the connection, with the path and a remedy.
pub fn connect_to_daemon(path: &Path) -> io::Result<UnixStream> {
    let connect = || loop {
        match UnixStream::connect(path) {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            connected => return connected,
        }
    };
    connect().map_err(|error| {
        let message = format!(
            "no network daemon at {}: {error}; start one with `tidegate daemon`, or set its path",
            path.display()
        );
        io::Error::new(error.kind(), message)
    })
}
