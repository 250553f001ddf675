//! The restorer: a process that restores settings when the process that changed them cannot.

use std::fs;
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::Child;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags};
use rustix::thread::{CapabilitySet, CapabilitySets};

use super::access::SettingsAccess;
use super::change::SettingsChange;
use super::channel::{Channel, RestorerRole};
use super::guard::command;
use super::record::{self, RecordFolder};
use super::{requests, sys};
use crate::affinity::run_on_every_processor;

/// This process's own executable file, which may have been replaced since it was started.
const OWN_PROGRAM: &str = "/proc/self/exe";

/// Interval between two checks of the changing process. A process that is stopped at two checks
/// in a row counts as stopped: a tracer stops a process for shorter times.
const CHECK_INTERVAL: Duration = Duration::from_millis(150);
const STOPPED_CHECKS: u32 = 2;

/// Minimum time between two starts of a standby.
const STANDBY_INTERVAL: Duration = Duration::from_millis(50);

/// Runs this process as a restorer until the change has ended. The standard streams are those that
/// [`set_restorer`](super::set_restorer) describes.
///
/// # Errors
/// The standard streams are others, or CAP_NET_ADMIN is missing.
pub fn run_restorer(role: RestorerRole) -> io::Result<()> {
    sys::block_signals();
    sys::pass_on_standard_streams_only();
    // Signals of the changing process's terminal and process group do not reach this process.
    let _ = rustix::process::setsid();
    let socket = UnixStream::from(rustix::stdio::stdin().try_clone_to_owned()?);
    let channel = Channel::open(rustix::stdio::stdout().try_clone_to_owned()?)?;
    let process = rustix::stdio::stderr().try_clone_to_owned()?;
    if role == RestorerRole::Launcher {
        let leader = RestorerRole::Leader;
        return command(OWN_PROGRAM, leader, socket.into(), &channel, process)?.spawn().map(drop);
    }
    become_independent();
    Restorer::new(role, socket, channel, process)?.run(role);
    Ok(())
}

/// Gives up what was inherited from the changing process. Errors are ignored.
fn become_independent() {
    let _ = rustix::thread::set_name(c"tg-restorer");
    sys::use_ordinary_scheduling();
    run_on_every_processor();
    keep_net_admin();
}

/// Drops all capabilities but CAP_NET_ADMIN, which standbys inherit.
fn keep_net_admin() {
    let Ok(has) = rustix::thread::capabilities(None) else { return };
    let kept = CapabilitySet::NET_ADMIN & has.permitted;
    let sets = CapabilitySets { effective: kept, permitted: kept, inheritable: kept };
    let _ = rustix::thread::clear_ambient_capability_set();
    let _ = rustix::thread::set_capabilities(None, sets);
    let _ = rustix::thread::configure_capability_in_ambient_set(CapabilitySet::NET_ADMIN, true);
}

/// The other restorer: the standby of the leader, or the leader of the standby.
struct Partner {
    process: OwnedFd,
    /// A child is reaped when it has died.
    child: Option<Child>,
}

struct Restorer {
    change: SettingsChange,
    access: SettingsAccess,
    text: String,
    channel: Channel,
    /// Carries the requests of the changing process, and ends when it ends the change. The leader
    /// reads it.
    socket: UnixStream,
    is_socket_open: bool,
    /// The changing process, and its process ID if `/proc` shows the process.
    process: OwnedFd,
    process_id: Option<u32>,
    is_leader: bool,
    partner: Option<Partner>,
    last_standby: Option<Instant>,
    /// Consecutive checks at which the changing process was stopped.
    stopped_checks: u32,
    /// True if the original values may be in force, because the changing process was stopped.
    is_restored: bool,
}

impl Restorer {
    fn new(
        role: RestorerRole,
        socket: UnixStream,
        channel: Channel,
        process: OwnedFd,
    ) -> io::Result<Self> {
        let text = channel.text();
        let malformed = |_| io::Error::from(io::ErrorKind::InvalidData);
        let change: SettingsChange = text.parse().map_err(malformed)?;
        let access = SettingsAccess::to(&change.original, &change.interface)?;
        // Without its leader a standby is the leader.
        let partner = match role {
            RestorerRole::Standby { leader } => Partner::leader(leader),
            _ => None,
        };
        let process_id = process_id(&process);
        Ok(Self {
            change,
            access,
            text,
            channel,
            socket,
            is_socket_open: true,
            process,
            process_id,
            is_leader: partner.is_none(),
            partner,
            last_standby: None,
            stopped_checks: 0,
            is_restored: false,
        })
    }

    fn run(mut self, role: RestorerRole) {
        if role == RestorerRole::Leader {
            // Nothing is changed yet: writing the original values shows that it is permitted.
            let original = self.change.original.clone();
            let written = self.access.write(&self.change.interface, &original);
            // A change that cannot be undone is not begun, without the byte.
            if written.is_err() || self.socket.write_all(&[1]).is_err() {
                return;
            }
        }
        loop {
            if self.is_leader {
                self.ensure_standby();
                self.check_stopped();
            }
            if self.wait() {
                break;
            }
        }
        let folder = RecordFolder::open();
        let namespace = sys::namespace_cookie();
        let path = match (&folder, namespace) {
            (Some(folder), Ok(namespace)) => {
                let index = self.change.interface.index;
                Some(folder.record_path(namespace, index, &self.change.original))
            }
            _ => None,
        };
        let (change, access) = (&self.change, &mut self.access);
        record::finish(folder.as_ref(), path.as_deref(), &self.text, change, access);
    }

    /// Waits for an event. Returns true once the change has ended or its process has died.
    fn wait(&mut self) -> bool {
        let mut fds = vec![PollFd::new(&self.process, PollFlags::IN)];
        let partner = self.partner.as_ref().map(|partner| {
            fds.push(PollFd::new(&partner.process, PollFlags::IN));
            fds.len() - 1
        });
        let socket = (self.is_leader && self.is_socket_open).then(|| {
            fds.push(PollFd::new(&self.socket, PollFlags::IN));
            fds.len() - 1
        });
        let timeout = self.is_leader.then(|| Timespec::try_from(CHECK_INTERVAL).ok()).flatten();
        if poll(&mut fds, timeout.as_ref()).is_err() {
            return false;
        }
        let is_ready = |index: Option<usize>| index.is_some_and(|at| !fds[at].revents().is_empty());
        let (is_dead, has_socket_event) = (is_ready(Some(0)), is_ready(socket));
        let is_partner_dead = is_ready(partner);
        if is_dead || self.channel.is_over() {
            return true;
        }
        if has_socket_event {
            self.serve_request();
        }
        if is_partner_dead {
            if let Some(mut child) = self.partner.take().and_then(|partner| partner.child) {
                let _ = child.wait();
            }
            self.is_leader = true;
            // The former leader may have restored the settings.
            self.is_restored = true;
        }
        false
    }

    /// Serves a request of the changing process.
    fn serve_request(&mut self) {
        match requests::receive(&self.socket) {
            Ok(Some(flush_timeout_ns)) => {
                let changed = self.change_again(flush_timeout_ns);
                let answer = changed.map_or(requests::REFUSED, |()| flush_timeout_ns);
                requests::answer(&self.socket, answer);
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            // The program has closed the socket unknowingly, and goes on; or what it sends is no
            // request.
            Ok(None) | Err(_) => self.is_socket_open = false,
        }
    }

    /// Sets the changed values with this flush timeout.
    fn change_again(&mut self, flush_timeout_ns: u64) -> io::Result<()> {
        if flush_timeout_ns > requests::MAX_FLUSH_TIMEOUT_NS {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        if !self.is_restored {
            return self.access.write_flush_timeout(&self.change.original, flush_timeout_ns);
        }
        let changed = self.change.changed(flush_timeout_ns);
        self.access.write(&self.change.interface, &changed)?;
        self.is_restored = false;
        Ok(())
    }

    /// Starts a standby if there is none. If that fails, the next round tries again.
    fn ensure_standby(&mut self) {
        let is_early = self.last_standby.is_some_and(|last| last.elapsed() < STANDBY_INTERVAL);
        if self.partner.is_some() || is_early {
            return;
        }
        self.last_standby = Some(Instant::now());
        self.partner = self.start_standby().ok();
    }

    fn start_standby(&self) -> io::Result<Partner> {
        let role = RestorerRole::Standby { leader: std::process::id() };
        let socket = self.socket.as_fd().try_clone_to_owned()?;
        let process = self.process.try_clone()?;
        let child = command(OWN_PROGRAM, role, socket, &self.channel, process)?.spawn()?;
        let process = rustix::process::pidfd_open(Pid::from_child(&child), PidfdFlags::empty())?;
        Ok(Partner { process, child: Some(child) })
    }

    /// Restores the settings while the changing process is stopped.
    fn check_stopped(&mut self) {
        let is_stopped = self.process_id.is_some_and(is_stopped);
        self.stopped_checks = if is_stopped { self.stopped_checks.saturating_add(1) } else { 0 };
        // Counted after the restoration: a process that continues in between applies its settings
        // again.
        if self.stopped_checks >= STOPPED_CHECKS
            && self.change.restore(&mut self.access).unwrap_or(false)
        {
            self.is_restored = true;
            self.channel.count_restoration();
        }
    }
}

impl Partner {
    /// The leader that has started this process; `None` if the leader has died.
    fn leader(process_id: u32) -> Option<Self> {
        let leader = Pid::from_raw(i32::try_from(process_id).ok()?)?;
        let process = rustix::process::pidfd_open(leader, PidfdFlags::empty()).ok()?;
        // The ID of a leader that has died may be another process's, which is not the parent.
        (rustix::process::getppid() == Some(leader)).then_some(Self { process, child: None })
    }
}

/// Process ID of a descriptor of pidfd_open(2), as this process's `/proc` shows it.
fn process_id(process: &OwnedFd) -> Option<u32> {
    let text = fs::read_to_string(format!("/proc/self/fdinfo/{}", process.as_raw_fd())).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("Pid:"))?;
    line.trim().parse().ok().filter(|&id| id > 0)
}

/// True if a process is stopped, by a signal or by a tracer.
fn is_stopped(process_id: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{process_id}/stat")).unwrap_or_default();
    let state = stat.rsplit_once(')').and_then(|(_, rest)| rest.trim_start().chars().next());
    matches!(state, Some('T' | 't'))
}
