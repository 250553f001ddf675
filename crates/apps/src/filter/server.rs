//! Server side of a packet filter: the filter process.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, accept_with,
    bind, listen, recv, send, socket_with,
};

use super::message::{MAX_REQUESTS_BYTES, put_verdict, requests};
use super::{FilterRules, Verdict};

/// Interval at which the stop flag is checked while nothing arrives.
const STOP_CHECK_INTERVAL: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };

/// Errors of a packet filter.
#[derive(Debug, thiserror::Error)]
pub enum FilterError {
    /// Another filter listens on this path.
    #[error("another packet filter is already listening on {}: stop it, or choose another path", .0.display())]
    InUse(PathBuf),
    /// The socket could not be created.
    #[error("cannot listen on {}: {source}", path.display())]
    Listen {
        /// Path of the socket.
        path: PathBuf,
        /// Error of the system call.
        source: io::Error,
    },
    /// A system call failed unexpectedly.
    #[error("the connection to the router failed: {0}")]
    Io(#[from] io::Error),
}

/// Counters of a packet filter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FilterReport {
    /// Packets passed.
    pub passed: u64,
    /// Packets refused.
    pub refused: u64,
    /// Connections from routers.
    pub connections: u64,
}

/// Packet filter that listens for a router. Removes its socket when dropped.
pub struct FilterServer {
    listener: OwnedFd,
    path: PathBuf,
    rules: FilterRules,
    new_rules: (Sender<FilterRules>, Receiver<FilterRules>),
    /// Verdicts per message: see [`FilterServer::batch`].
    batch: usize,
    report: FilterReport,
}

/// Replaces the rules of a running [`FilterServer`].
#[derive(Clone, Debug)]
pub struct FilterReloader(Sender<FilterRules>);

impl FilterReloader {
    /// Replaces the rules from the next packets on.
    pub fn publish(&self, rules: FilterRules) {
        // A server that has ended needs no rules.
        let _ = self.0.send(rules);
    }
}

impl FilterServer {
    /// Listens at `path`. Replaces a stale socket that a terminated filter left there.
    ///
    /// # Errors
    /// [`FilterError`] says why the filter cannot listen.
    pub fn listen(path: impl Into<PathBuf>, rules: FilterRules) -> Result<Self, FilterError> {
        let path = path.into();
        let fail = |source: io::Error| FilterError::Listen { path: path.clone(), source };
        let listener = match listen_at(&path) {
            Err(Errno::ADDRINUSE) => {
                if is_listening(&path) {
                    return Err(FilterError::InUse(path));
                }
                std::fs::remove_file(&path).map_err(fail)?;
                listen_at(&path).map_err(|errno| fail(errno.into()))?
            }
            other => other.map_err(|errno| fail(errno.into()))?,
        };
        let (report, new_rules) = (FilterReport::default(), channel());
        Ok(Self { listener, path, rules, new_rules, batch: 1, report })
    }

    /// Batches up to `batch` verdicts in one message, as long as more packets wait. 1 means one
    /// system call for each verdict.
    #[must_use]
    pub fn batch(mut self, batch: usize) -> Self {
        self.batch = batch.clamp(1, super::QUEUE_PACKETS);
        self
    }

    /// Returns a handle that replaces the rules, also while the server runs.
    pub fn reloader(&self) -> FilterReloader {
        FilterReloader(self.new_rules.0.clone())
    }

    /// Serves routers, one after the other, until `stop` is set.
    ///
    /// # Errors
    /// When a system call fails unexpectedly.
    pub fn run(&mut self, stop: &AtomicBool) -> Result<FilterReport, FilterError> {
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

    /// Evaluates the packets of one router until the router disconnects.
    fn serve(&mut self, router: &OwnedFd, stop: &AtomicBool) -> Result<(), FilterError> {
        let mut incoming = vec![0; MAX_REQUESTS_BYTES];
        let mut outgoing = Vec::new();
        let mut queued_verdicts = 0;
        while !stop.load(Ordering::Relaxed) {
            match recv(router, &mut incoming[..], RecvFlags::DONTWAIT) {
                Ok((0, _)) => return Ok(()),
                Ok((len, _)) => {
                    if let Some(rules) = self.new_rules.1.try_iter().last() {
                        self.rules = rules;
                    }
                    let message = incoming.get(..len).unwrap_or_default();
                    for (number, packet) in requests(message) {
                        let verdict = self.rules.evaluate(packet);
                        match verdict {
                            Verdict::Pass => self.report.passed += 1,
                            Verdict::Refuse => self.report.refused += 1,
                        }
                        put_verdict(&mut outgoing, number, verdict);
                        queued_verdicts += 1;
                    }
                    if queued_verdicts < self.batch {
                        continue;
                    }
                }
                Err(Errno::AGAIN) if outgoing.is_empty() => {
                    is_readable(router)?;
                    continue;
                }
                Err(Errno::AGAIN) => {}
                Err(Errno::INTR) => continue,
                // The router has disconnected; another router may connect.
                Err(_) => return Ok(()),
            }
            queued_verdicts = 0;
            if send(router, &outgoing, SendFlags::NOSIGNAL).is_err() {
                return Ok(());
            }
            outgoing.clear();
        }
        Ok(())
    }
}

impl Drop for FilterServer {
    fn drop(&mut self) {
        // Another process may have removed the socket already.
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

/// True when a process listens at this path.
fn is_listening(path: &Path) -> bool {
    let connected = || -> Result<(), Errno> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)
    };
    !matches!(connected(), Err(Errno::CONNREFUSED | Errno::NOENT))
}

fn is_readable(fd: impl AsFd) -> Result<bool, FilterError> {
    match poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&STOP_CHECK_INTERVAL)) {
        Ok(ready) => Ok(ready > 0),
        Err(Errno::INTR) => Ok(false),
        Err(errno) => Err(io::Error::from(errno).into()),
    }
}
