//! The screen's own process.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, accept_with,
    bind, listen, recv, send, socket_with,
};

use super::message::{REQUESTS_MAX_BYTES, put_verdict, requests};
use super::{Rules, Verdict};

/// How often the stop flag is looked at while nothing comes.
const STOP_CHECK: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };

/// Why a screen could not be started.
#[derive(Debug, thiserror::Error)]
pub enum ScreenError {
    /// Another screen is there.
    #[error("a screen is already listening on {}: stop it, or choose another path", .0.display())]
    InUse(PathBuf),
    /// The socket could not be made.
    #[error("cannot listen on {}: {source}", path.display())]
    Listen {
        /// Where.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The connection failed in an unexpected way.
    #[error("the connection to the router failed: {0}")]
    Io(#[from] io::Error),
}

/// What a screen did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScreenReport {
    /// Packets that passed.
    pub passed: u64,
    /// Packets that did not.
    pub refused: u64,
    /// Routers that connected.
    pub connections: u64,
}

/// A screen that listens for a router. Its socket is removed when it is dropped.
pub struct Screener {
    listener: OwnedFd,
    path: PathBuf,
    rules: Rules,
    /// Verdicts of one message: see [`Screener::batch`].
    batch: usize,
    report: ScreenReport,
}

impl Screener {
    /// Listens at `path`. A socket that a dead screen left there is replaced.
    ///
    /// # Errors
    /// [`ScreenError`] says what is in the way.
    pub fn listen(path: impl Into<PathBuf>, rules: Rules) -> Result<Self, ScreenError> {
        let path = path.into();
        let fail = |source: io::Error| ScreenError::Listen { path: path.clone(), source };
        let listener = match listen_at(&path) {
            Err(Errno::ADDRINUSE) => {
                if is_alive(&path) {
                    return Err(ScreenError::InUse(path));
                }
                std::fs::remove_file(&path).map_err(fail)?;
                listen_at(&path).map_err(|errno| fail(errno.into()))?
            }
            other => other.map_err(|errno| fail(errno.into()))?,
        };
        Ok(Self { listener, path, rules, batch: 1, report: ScreenReport::default() })
    }

    /// Lets verdicts wait for up to `batch` of them, as long as there are more
    /// packets to judge. 1 is one system call for each.
    #[must_use]
    pub fn batch(mut self, batch: usize) -> Self {
        self.batch = batch.clamp(1, super::QUEUE_PACKETS);
        self
    }

    /// Judges packets until `stop` is set, for one router after the other.
    ///
    /// # Errors
    /// When the system refuses something unexpected.
    pub fn run(&mut self, stop: &AtomicBool) -> Result<ScreenReport, ScreenError> {
        while !stop.load(Ordering::Relaxed) {
            if !is_readable(&self.listener)? {
                continue;
            }
            match accept_with(&self.listener, SocketFlags::CLOEXEC) {
                Ok(router) => {
                    self.report.connections += 1;
                    self.serve(&router, stop)?;
                }
                Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => {}
                Err(errno) => return Err(io::Error::from(errno).into()),
            }
        }
        Ok(self.report)
    }

    /// Judges the packets of one router until it leaves.
    fn serve(&mut self, router: &OwnedFd, stop: &AtomicBool) -> Result<(), ScreenError> {
        let mut incoming = vec![0; REQUESTS_MAX_BYTES];
        let mut outgoing = Vec::new();
        let mut waiting = 0;
        while !stop.load(Ordering::Relaxed) {
            match recv(router, &mut incoming[..], RecvFlags::DONTWAIT) {
                Ok((0, _)) => return Ok(()),
                Ok((len, _)) => {
                    let message = incoming.get(..len).unwrap_or_default();
                    for (number, packet) in requests(message) {
                        let verdict = self.rules.judge(packet);
                        match verdict {
                            Verdict::Pass => self.report.passed += 1,
                            Verdict::Refuse => self.report.refused += 1,
                        }
                        put_verdict(&mut outgoing, number, verdict);
                        waiting += 1;
                    }
                    if waiting < self.batch {
                        continue;
                    }
                }
                Err(Errno::AGAIN) if outgoing.is_empty() => {
                    is_readable(router)?;
                    continue;
                }
                Err(Errno::AGAIN) => {}
                Err(Errno::INTR) => continue,
                // The router is gone; another may come.
                Err(_) => return Ok(()),
            }
            waiting = 0;
            if send(router, &outgoing, SendFlags::NOSIGNAL).is_err() {
                return Ok(());
            }
            outgoing.clear();
        }
        Ok(())
    }
}

impl Drop for Screener {
    fn drop(&mut self) {
        // Somebody may have removed it before us.
        let _ = std::fs::remove_file(&self.path);
    }
}

fn listen_at(path: &Path) -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    bind(&socket, &SocketAddrUnix::new(path)?)?;
    listen(&socket, 1)?;
    Ok(socket)
}

/// Whether somebody listens at this path.
fn is_alive(path: &Path) -> bool {
    let connected = || -> Result<(), Errno> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)
    };
    !matches!(connected(), Err(Errno::CONNREFUSED | Errno::NOENT))
}

fn is_readable(fd: impl AsFd) -> Result<bool, ScreenError> {
    match poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&STOP_CHECK)) {
        Ok(ready) => Ok(ready > 0),
        Err(Errno::INTR) => Ok(false),
        Err(errno) => Err(io::Error::from(errno).into()),
    }
}
