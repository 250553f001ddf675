//! Choice of the stack that an application runs on.

use std::ffi::OsStr;
use std::path::Path;

/// Place of the stack, and the reason for it.
pub(super) struct Placement {
    pub(super) stack: StackPlace,
    reason: String,
}

/// Place of the stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StackPlace {
    /// In the application.
    Embedded,
    /// In the daemon, to which the application attaches.
    Attached,
    /// In a daemon that starts for the application and ends with it.
    OwnDaemon,
}

/// Statements about the stack in the command line and the configuration file.
#[derive(Clone, Copy)]
pub(super) struct Request<'a> {
    pub(super) is_embedded: bool,
    pub(super) owns_daemon: bool,
    pub(super) program: &'a Path,
    /// Socket of the daemon, if one is named.
    pub(super) socket: Option<&'a Path>,
    /// A device or its addresses are named.
    pub(super) has_device: bool,
    /// Socket of the daemon if none is named.
    pub(super) default_socket: &'a Path,
}

/// Servers that serve from children, by the name of the program without its version.
const SERVE_FROM_CHILDREN: [&str; 17] = [
    "apache",
    "dnsmasq",
    "dovecot",
    "exim",
    "gunicorn",
    "httpd",
    "master",
    "nginx",
    "nsd",
    "php-fpm",
    "postgres",
    "pure-ftpd",
    "rsync",
    "unicorn",
    "uwsgi",
    "varnishd",
    "xinetd",
];

fn serves_from_children(program: &Path) -> bool {
    let name = program.file_name().and_then(OsStr::to_str).unwrap_or_default();
    let name = name.trim_end_matches(|digit: char| digit.is_ascii_digit() || digit == '.');
    SERVE_FROM_CHILDREN.contains(&name)
}

impl Placement {
    /// Chooses the place. A device that is named is free for the application: a stack inside the
    /// application then answers sooner than a daemon's. A daemon has the device otherwise.
    pub(super) fn choose(request: Request<'_>) -> Self {
        let (stack, reason) = match request {
            Request { is_embedded: true, .. } => {
                (StackPlace::Embedded, "--embedded is given".to_owned())
            }
            Request { owns_daemon: true, .. } => {
                (StackPlace::OwnDaemon, "--own-daemon is given".to_owned())
            }
            Request { socket: Some(socket), .. } => {
                (StackPlace::Attached, format!("--socket names the daemon at {}", socket.display()))
            }
            Request { has_device: true, program, .. } if serves_from_children(program) => (
                StackPlace::OwnDaemon,
                format!(
                    "{} serves from children, which cannot use a stack in the memory of their \
                     parent",
                    program.display()
                ),
            ),
            Request { has_device: true, .. } => (
                StackPlace::Embedded,
                "a device or its addresses are given, and no daemon: the application's own calls \
                 run the stack, without another process in between"
                    .to_owned(),
            ),
            Request { default_socket, .. } => (
                StackPlace::Attached,
                format!("no device is given: the daemon at {} has it", default_socket.display()),
            ),
        };
        Self { stack, reason }
    }

    /// One line: the place, the reason, and what the place requires of the application.
    pub(super) fn explain(&self) -> String {
        let reason = &self.reason;
        match self.stack {
            StackPlace::Embedded => format!(
                "embedded: the stack runs inside the application, since {reason}. The application \
                 opens the device with its own privileges when it uses its first socket; one that \
                 gives them up before attaches to a daemon"
            ),
            StackPlace::Attached => {
                format!("attached: the stack runs in the daemon, since {reason}")
            }
            StackPlace::OwnDaemon => format!(
                "attached: the stack runs in a daemon of the application's own, since {reason}. The \
                 daemon ends after the last process of the application"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn named_device_without_a_daemon_is_the_applications() {
        let nothing = Request {
            is_embedded: false,
            owns_daemon: false,
            program: Path::new("/usr/bin/redis-server"),
            socket: None,
            has_device: false,
            default_socket: Path::new("/run/d.sock"),
        };
        let socket = Some(Path::new("/tmp/other.sock"));
        let program = Path::new("/usr/sbin/php-fpm8.2");
        for (request, stack, reason) in [
            (nothing, StackPlace::Attached, "/run/d.sock"),
            (Request { has_device: true, ..nothing }, StackPlace::Embedded, "a device"),
            (Request { socket, ..nothing }, StackPlace::Attached, "/tmp/other.sock"),
            (Request { has_device: true, socket, ..nothing }, StackPlace::Attached, "--socket"),
            (Request { is_embedded: true, ..nothing }, StackPlace::Embedded, "--embedded"),
            (Request { owns_daemon: true, ..nothing }, StackPlace::OwnDaemon, "--own-daemon"),
            (Request { has_device: true, program, ..nothing }, StackPlace::OwnDaemon, "children"),
            (Request { program, ..nothing }, StackPlace::Attached, "/run/d.sock"),
        ] {
            let placement = Placement::choose(request);
            assert_eq!(placement.stack, stack, "{}", placement.explain());
            assert!(placement.explain().contains(reason), "{}", placement.explain());
        }
    }
}
