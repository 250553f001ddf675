//! Unix socket of the daemon, bound to its path.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::daemon::DEFAULT_COALESCING;
use crate::daemon::attachment_counts::AttachmentCounts;
use crate::daemon::quota::Quota;
use crate::ipc::layout::Geometry;

/// Configuration of the attach listener, and the resources of each application.
#[derive(Clone, Debug)]
pub struct AttachConfig {
    /// Path of the Unix socket.
    pub path: PathBuf,
    /// File mode of the socket: the users who may connect.
    pub mode: u32,
    /// Group of the socket file; `None` leaves the process's group.
    pub group: Option<String>,
    /// Sizes of each application's shared memory.
    pub geometry: Geometry,
    /// Wake-up coalescing: minimum time between two wake-ups of an application with several peers.
    pub coalescing: Duration,
    /// Resource limits of each application.
    pub quota: Quota,
}

impl AttachConfig {
    /// Listener at `path` for processes of the daemon's own user, with the default wake-up coalescing
    /// and limits.
    pub fn new(path: impl Into<PathBuf>, geometry: Geometry) -> Self {
        let (coalescing, quota) = (DEFAULT_COALESCING, Quota::default());
        Self { path: path.into(), mode: 0o600, group: None, geometry, coalescing, quota }
    }
}

/// Bound Unix socket on which no connection is accepted yet.
pub(in crate::daemon) struct BoundSocket {
    pub(super) listener: UnixListener,
    pub(super) config: AttachConfig,
    /// Counts of the attachments, also of those taken over.
    pub(super) attachments: AttachmentCounts,
    /// The socket file is removed when this is dropped.
    pub(super) removes_on_drop: bool,
}

impl BoundSocket {
    /// Binds the socket.
    pub(in crate::daemon) fn bind(config: AttachConfig) -> io::Result<Self> {
        let listener = listen(&config)?;
        listener.set_nonblocking(true)?;
        let attachments = AttachmentCounts::default();
        Ok(Self { listener, config, attachments, removes_on_drop: true })
    }

    /// Socket inherited from another daemon, which still owns the file.
    pub(in crate::daemon) fn inherit(
        config: AttachConfig,
        listener: UnixListener,
        attachments: AttachmentCounts,
    ) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        Ok(Self { listener, config, attachments, removes_on_drop: false })
    }
}

impl Drop for BoundSocket {
    fn drop(&mut self) {
        if self.removes_on_drop {
            // The file may have been removed already.
            let _ = fs::remove_file(&self.config.path);
        }
    }
}

/// Binds and listens at a path; replaces the socket file of a daemon that has ended.
fn listen(config: &AttachConfig) -> io::Result<UnixListener> {
    let AttachConfig { path, mode, group, .. } = config;
    let annotate = |what: &str, error: io::Error| {
        io::Error::new(error.kind(), format!("{}: {what}: {error}", path.display()))
    };
    if is_socket(path) {
        if UnixStream::connect(path).is_ok() {
            let message = format!(
                "{}: another daemon listens there: end it, or choose another path",
                path.display()
            );
            return Err(io::Error::new(io::ErrorKind::AddrInUse, message));
        }
        fs::remove_file(path).map_err(|error| annotate("cannot remove the old socket", error))?;
    }
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)
            .map_err(|error| annotate("cannot create its directory", error))?;
    }
    let listener = UnixListener::bind(path).map_err(|error| annotate("cannot listen", error))?;
    if let Some(name) = group {
        let id = group_id(name).map_err(|error| annotate("--socket-group", error))?;
        std::os::unix::fs::chown(path, None, Some(id))
            .map_err(|error| annotate("cannot set its group", error))?;
    }
    fs::set_permissions(path, fs::Permissions::from_mode(*mode))
        .map_err(|error| annotate("cannot set its permissions", error))?;
    Ok(listener)
}

/// Group ID, from a number or by name from `/etc/group`.
fn group_id(name: &str) -> io::Result<u32> {
    if let Ok(id) = name.parse() {
        return Ok(id);
    }
    let groups = fs::read_to_string("/etc/group")?;
    let mut lines = groups.lines().map(|line| line.split(':'));
    let found = lines.find_map(|mut fields| {
        (fields.next() == Some(name)).then(|| fields.nth(1).and_then(|id| id.parse().ok()))?
    });
    found.ok_or_else(|| {
        io::Error::new(
            io::ErrorKind::NotFound,
            format!("there is no group {name}: create it, or choose another group"),
        )
    })
}

fn is_socket(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket())
}
