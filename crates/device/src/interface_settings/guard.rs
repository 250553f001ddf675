//! A change of settings, for as long as a device needs it.

use std::io::{self, Read};
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags};

use super::access::{InterfaceId, Settings, SettingsAccess};
use super::change::SettingsChange;
use super::channel::{Channel, RestorerRole};
use super::record::{self, RecordFolder, SettingsRecord};
use super::requests::Requests;
use super::{left_behind, sys};

/// Subcommand of the program of [`set_restorer`].
const SUBCOMMAND: &str = "restore-settings";

/// Maximum time until a restorer is ready, and until it has ended.
const START_TIMEOUT: Duration = Duration::from_secs(10);
const END_TIMEOUT: Duration = Duration::from_secs(1);

static PROGRAM: OnceLock<PathBuf> = OnceLock::new();

/// Sets the program that this process starts as restorer when a device changes settings of an
/// interface: `tidegate`, or any program that passes the second argument of its command line,
/// after `restore-settings`, to [`run_restorer`](super::run_restorer). Only the first call has an
/// effect.
pub fn set_restorer(program: impl Into<PathBuf>) {
    let _ = PROGRAM.set(program.into());
}

/// Progress of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// The values are in force.
    Made,
    /// The restorer was asked for the change: [`SettingsGuard::poll_request`] tells the result.
    Requested,
}

/// Changed settings of an interface, restored on drop.
pub(crate) struct SettingsGuard {
    change: SettingsChange,
    access: SettingsAccess,
    /// Values that this process has set.
    changed: Settings,
    text: String,
    folder: Option<RecordFolder>,
    record_path: Option<PathBuf>,
    record: Option<SettingsRecord>,
    restorer: Option<RestorerLink>,
    /// True once the kernel has refused a change of this process, which has dropped its
    /// privileges: the restorer makes the changes.
    is_unprivileged: bool,
    /// Process that made the change. A forked child has a copy of this value.
    process: Pid,
}

impl SettingsGuard {
    /// Changes settings to those that `changed` makes of the current ones. `None` if `changed` is.
    ///
    /// Settings that a killed process left changed are restored first.
    ///
    /// # Errors
    /// [`io::ErrorKind::ResourceBusy`] if another process has changed the settings, and the errors
    /// of the kernel and of starting the restorer. Nothing is changed then.
    pub(crate) fn begin(
        interface: InterfaceId,
        mut access: SettingsAccess,
        changed: impl FnOnce(&Settings) -> Option<Settings>,
    ) -> io::Result<Option<Self>> {
        let folder = RecordFolder::open();
        let lock = folder.as_ref().map(RecordFolder::lock).transpose()?;
        let mut original = access.read(&interface)?;
        // Kernels without the cookie are too old for AF_XDP: no record is kept.
        let record_path = match (&folder, sys::namespace_cookie()) {
            (Some(folder), Ok(namespace)) => {
                let own = folder.record_path(namespace, interface.index, &original);
                let others = folder.records_of_others(namespace, interface.index, &original);
                for path in others.iter().chain([&own]) {
                    if let Some(text) = record::left_behind(path)? {
                        left_behind::restore(&text);
                        original = access.read(&interface)?;
                    }
                }
                Some(own)
            }
            _ => None,
        };
        let Some(changed) = changed(&original) else { return Ok(None) };
        let change = SettingsChange { interface, original, changed_mark: changed.mark() };
        let text = format!("change {:016x}\n{change}", fastrand::u64(..));
        let record = record_path.clone().and_then(|path| SettingsRecord::create(path, &text).ok());
        drop(lock);
        let process = rustix::process::getpid();
        let mut guard = Self {
            change,
            access,
            changed,
            text,
            folder,
            record_path,
            record,
            restorer: None,
            is_unprivileged: false,
            process,
        };
        // From here on, dropping the guard undoes everything.
        if let Some(program) = PROGRAM.get() {
            guard.restorer = Some(RestorerLink::start(program, &guard.text)?);
        }
        guard.apply()?;
        Ok(Some(guard))
    }

    /// Changed settings of a process without privileges, and the restorer's end of the socket. The
    /// settings are those of no interface, but of the file.
    #[cfg(test)]
    pub(crate) fn of_unprivileged(file: std::fs::File, changed: Settings) -> (Self, UnixStream) {
        let (socket, theirs) = UnixStream::pair().unwrap();
        let interface = InterfaceId { index: 1, mac: [0; 6] };
        let changed_mark = changed.mark();
        let channel = Channel::create("").unwrap();
        let guard = Self {
            change: SettingsChange { interface, original: changed.clone(), changed_mark },
            access: SettingsAccess::Sysfs {
                defer_irqs: file.try_clone().unwrap(),
                flush_timeout: file,
            },
            changed,
            text: String::new(),
            folder: None,
            record_path: None,
            record: None,
            restorer: Some(RestorerLink { channel, socket, requests: Requests::default() }),
            is_unprivileged: true,
            process: rustix::process::getpid(),
        };
        (guard, theirs)
    }

    /// True if the settings are those of the interface, not of its NAPI instances.
    #[cfg(all(feature = "packet", feature = "xdp"))]
    pub(crate) fn is_of_interface(&self) -> bool {
        !matches!(self.changed, Settings::Napis(_))
    }

    /// Values before the change.
    #[cfg(test)]
    pub(crate) fn original(&self) -> &Settings {
        &self.change.original
    }

    /// Writes the changed values.
    ///
    /// # Errors
    /// The kernel refuses, and there is no restorer, or it did not answer a short time ago.
    pub(crate) fn apply(&mut self) -> io::Result<Progress> {
        let flush_timeout_ns = self.changed.flush_timeout_ns();
        self.write_or_request(flush_timeout_ns, |guard| {
            guard.access.write(&guard.change.interface, &guard.changed)
        })
    }

    /// Writes another flush timeout.
    ///
    /// # Errors
    /// As [`SettingsGuard::apply`].
    pub(crate) fn write_flush_timeout(&mut self, flush_timeout_ns: u64) -> io::Result<Progress> {
        self.write_or_request(flush_timeout_ns, |guard| {
            guard.access.write_flush_timeout(&guard.change.original, flush_timeout_ns)
        })
    }

    /// Calls `write`. In a process that has dropped its privileges, the restorer is asked for the
    /// change instead.
    fn write_or_request(
        &mut self,
        flush_timeout_ns: u64,
        write: impl FnOnce(&mut Self) -> io::Result<()>,
    ) -> io::Result<Progress> {
        if !self.is_unprivileged {
            let Err(error) = write(self) else { return Ok(Progress::Made) };
            self.is_unprivileged = error.kind() == io::ErrorKind::PermissionDenied;
            if self.restorer.is_none() {
                return Err(error);
            }
        }
        let restorer = self.restorer.as_mut().ok_or(io::ErrorKind::PermissionDenied)?;
        // Refused by the kernel for another reason, the restorer fails, too.
        restorer.requests.send(&restorer.socket, flush_timeout_ns, Instant::now())?;
        Ok(Progress::Requested)
    }

    /// True while the restorer has a request to answer.
    #[inline]
    pub(crate) fn is_pending(&self) -> bool {
        self.restorer.as_ref().is_some_and(|restorer| restorer.requests.is_pending())
    }

    /// Result of the change that the restorer was last asked for; `None` until it is known, and
    /// without a request. The call does not wait.
    ///
    /// # Errors
    /// The restorer refuses, is gone, or does not answer in time.
    pub(crate) fn poll_request(&mut self) -> Option<io::Result<()>> {
        let RestorerLink { requests, socket, .. } = self.restorer.as_mut()?;
        requests.is_pending().then(|| requests.poll(socket, Instant::now()))?
    }

    /// Descriptor that becomes readable with an answer of the restorer, and when the restorer is
    /// gone.
    pub(crate) fn answer_fd(&self) -> Option<BorrowedFd<'_>> {
        self.restorer.as_ref().map(|restorer| restorer.socket.as_fd())
    }

    /// Number of times that the restorer has restored the settings, because this process was
    /// stopped.
    #[inline]
    pub(crate) fn restorations(&self) -> u64 {
        self.restorer.as_ref().map_or(0, |restorer| restorer.channel.restorations())
    }
}

impl Drop for SettingsGuard {
    fn drop(&mut self) {
        if rustix::process::getpid() != self.process {
            return;
        }
        record::finish(
            self.folder.as_ref(),
            self.record_path.as_deref().filter(|_| self.record.is_some()),
            &self.text,
            &self.change,
            &mut self.access,
        );
        if let Some(restorer) = self.restorer.take() {
            restorer.end();
        }
    }
}

/// The restorer of a change.
struct RestorerLink {
    channel: Channel,
    socket: UnixStream,
    requests: Requests,
}

impl RestorerLink {
    /// Starts a restorer with its standby, and waits until the leader is ready. The processes are
    /// no children of this process.
    fn start(program: &PathBuf, text: &str) -> io::Result<Self> {
        let channel = Channel::create(text)?;
        let (mut socket, theirs) = UnixStream::pair()?;
        let process = rustix::process::pidfd_open(rustix::process::getpid(), PidfdFlags::empty())?;
        let mut launcher =
            command(program, RestorerRole::Launcher, theirs.into(), &channel, process)?.spawn()?;
        // Fails in a program that ignores the ends of its children.
        let _ = launcher.wait();
        socket.set_read_timeout(Some(START_TIMEOUT))?;
        let mut ready = [0];
        socket.read_exact(&mut ready).map_err(|error| {
            io::Error::new(error.kind(), format!("the restorer of settings cannot start: {error}"))
        })?;
        Ok(Self { channel, socket, requests: Requests::default() })
    }

    /// Ends the restorer, and waits until it has ended.
    fn end(mut self) {
        self.channel.end();
        // Errors mean that the restorer is gone.
        let _ = self.socket.shutdown(Shutdown::Write);
        let _ = self.socket.set_read_timeout(Some(END_TIMEOUT));
        // Answers that nobody has taken come first.
        while self.socket.read(&mut [0; 64]).is_ok_and(|count| count > 0) {}
    }
}

/// Command that starts a restorer in this role. Its standard streams are its socket, the memory of
/// the channel and the descriptor of the changing process.
pub(super) fn command(
    program: impl AsRef<std::ffi::OsStr>,
    role: RestorerRole,
    socket: OwnedFd,
    channel: &Channel,
    process: OwnedFd,
) -> io::Result<Command> {
    let mut command = Command::new(program);
    command.args([SUBCOMMAND, &role.argument()]).env_clear().current_dir("/");
    command.stdin(Stdio::from(socket));
    command.stdout(Stdio::from(channel.as_fd().try_clone_to_owned()?));
    command.stderr(Stdio::from(process));
    Ok(command)
}
