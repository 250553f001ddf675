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
        let shown = path.display();
        let message = match error.kind() {
            ErrorKind::PermissionDenied => format!("{}: {error}; {}", shown, remedy(path)),
            _ => format!(
                "no network daemon at {shown}: {error}; start one with `tidegate daemon`, or set \
                 its path"
            ),
        };
        io::Error::new(error.kind(), message)
    })
}

/// Change that is needed so that this user may connect.
fn remedy(path: &Path) -> String {
    let (user, group) = (rustix::process::geteuid(), rustix::process::getegid());
    let subject = format!("this program runs as user {user} with group {group} and may not");
    match path.symlink_metadata() {
        Ok(_) => format!(
            "{subject} attach to the network daemon: start the daemon with `--socket-group \
             {group}`, or for all users with `--socket-mode 666`"
        ),
        Err(_) => format!(
            "{subject} enter the folder of the network daemon's socket: choose another folder with \
             `--socket`, for the daemon and for `tidegate run`"
        ),
    }
}
