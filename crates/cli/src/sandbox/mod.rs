//! Privileges of a server once it is ready: a user without rights, no capability, and few system
//! calls.

mod neighbours;
mod syscalls;

use std::ffi::CString;
use std::fmt;
use std::io;
use std::path::Path;

use clap::Args;
use nix::unistd::{Gid, Uid, User};
use rustix::fs::{Access, access};
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit};
use rustix::thread::{CapabilitySet, CapabilitySets};
use tidegate::NetConfig;
use tidegate::host::HostDevice;
use tidegate_device::netlink::Interface;

pub(crate) use self::neighbours::run as resolve_neighbours;
use crate::Failure;
use crate::host::{HostOptions, IoKind};

/// Users that a server becomes by default: the first that exists.
const DEFAULT_USERS: [&str; 2] = ["tidegate", "nobody"];

/// Users of a namespace that has those of an ordinary system: 65534 is `nobody`.
const MIN_USERS: u64 = 65_535;

/// Lowest nice value that threads may set without a capability, that of a network core beside
/// CPU-bound programs (-10), as the resource limit counts it.
const NICE_LIMIT: u64 = 30;

/// Option for the user of a server.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct UserOption {
    /// User that a process started by root becomes once it is ready, without any capability; `root`
    /// keeps root's privileges [default: tidegate, or nobody if there is no such user; root with
    /// DPDK and RDMA, and with XDP before Linux 5.19]
    #[arg(long, value_name = "NAME")]
    user: Option<String>,
}

/// Reason for which a process needs root's privileges for as long as it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Obstacle {
    /// The device is one of DPDK.
    Dpdk,
    /// The device is over an RDMA NIC.
    Rdma,
    /// The kernel lets no other process change the maps of an XDP program.
    BpfMaps,
}

impl Obstacle {
    /// Obstacle of a process with a device of this kind.
    pub(crate) fn of(device: &IoKind) -> Option<Self> {
        match device {
            IoKind::Device(HostDevice::Dpdk(_)) => Some(Self::Dpdk),
            IoKind::Device(HostDevice::Rdma(_)) => Some(Self::Rdma),
            IoKind::Device(HostDevice::Auto | HostDevice::Xdp) => Self::of_xdp(),
            IoKind::Device(HostDevice::Packet | HostDevice::Tap) | IoKind::Kernel => None,
        }
    }

    /// Obstacle of a process with an XDP program.
    pub(crate) fn of_xdp() -> Option<Self> {
        let setting = "/proc/sys/kernel/unprivileged_bpf_disabled";
        let is_restricted = std::fs::read_to_string(setting).is_ok_and(|text| text.trim() != "0");
        let release = rustix::system::uname().release().to_string_lossy().into_owned();
        (is_restricted && is_before_5_19(&release)).then_some(Self::BpfMaps)
    }
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Dpdk => "a driver of DPDK needs its privileges for as long as it runs",
            Self::Rdma => "a driver of RDMA needs its privileges for as long as it runs",
            Self::BpfMaps => {
                "before Linux 5.19 only root may change the maps of an XDP program, unless \
                 `sysctl kernel.unprivileged_bpf_disabled` is 0"
            }
        })
    }
}

/// True if a kernel release, as uname(2) writes it, is older than 5.19.
fn is_before_5_19(release: &str) -> bool {
    let mut numbers = release.split(['.', '-']).map(|part| part.parse::<u32>().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) < (5, 19)
}

/// User that a process becomes; no user if the process stays as it is.
#[derive(Clone, Debug)]
pub(crate) struct Sandbox(Option<User>);

impl UserOption {
    /// Looks the user up, and checks that this process may become it. With an `obstacle` a process
    /// without the option stays root.
    ///
    /// # Errors
    /// There is no such user, or this process may not change its user.
    pub(crate) fn sandbox(&self, obstacle: Option<Obstacle>) -> Result<Sandbox, Failure> {
        if !Uid::effective().is_root() {
            return match &self.user {
                None => Ok(Sandbox(None)),
                Some(name) => Err(format!(
                    "--user {name}: only root can become another user: start as root, or leave \
                     --user out"
                )
                .into()),
            };
        }
        let user = match (&self.user, obstacle) {
            // An ordinary user's namespace: its root has no rights outside.
            (None, _) if !has_ordinary_users() => return Ok(Sandbox(None)),
            (None, Some(obstacle)) => {
                tracing::info!("this process stays root: {obstacle}");
                return Ok(Sandbox(None));
            }
            (Some(name), _) => find_user(name)?.ok_or_else(|| {
                format!(
                    "--user {name}: there is no such user: `useradd --system {name}` creates it, \
                     and `--user root` stays root"
                )
            })?,
            (None, None) => default_user()?,
        };
        if user.uid.is_root() {
            return Ok(Sandbox(None));
        }
        if let Some(obstacle) = obstacle {
            return Err(format!(
                "cannot become user {}: {obstacle}; leave --user out to stay root",
                user.name
            )
            .into());
        }
        let required = CapabilitySet::SETUID | CapabilitySet::SETGID;
        let missing = required - rustix::thread::capabilities(None)?.effective;
        if !missing.is_empty() {
            let missing = tidegate_device::capabilities::names(missing);
            return Err(format!(
                "cannot become user {}: this process lacks {missing}; grant it, or give \
                 `--user root` to stay root",
                user.name
            )
            .into());
        }
        Ok(Sandbox(Some(user)))
    }
}

/// False in a user namespace without the users that servers become by default.
fn has_ordinary_users() -> bool {
    let map = std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    let users: u64 =
        map.lines().filter_map(|line| line.split_whitespace().nth(2)?.parse::<u64>().ok()).sum();
    users >= MIN_USERS
}

fn find_user(name: &str) -> Result<Option<User>, Failure> {
    User::from_name(name).map_err(|error| format!("--user {name}: {error}").into())
}

fn default_user() -> Result<User, Failure> {
    for name in DEFAULT_USERS {
        if let Some(user) = find_user(name)? {
            return Ok(user);
        }
    }
    Err("there is neither a user tidegate nor a user nobody to become: `useradd --system tidegate` \
         creates one, and `--user root` stays root"
        .into())
}

impl Sandbox {
    /// Sandbox of a process that stays as it is.
    pub(crate) fn none() -> Self {
        Self(None)
    }

    /// Prepares a stack for the loss of privileges. Once its device is open, and before any thread
    /// of the stack starts, the capability bounding set is dropped: each thread has a set of its
    /// own. On a shared address a process of its own resolves neighbours.
    ///
    /// # Errors
    /// That process does not start.
    pub(crate) fn confine(&self, net: NetConfig, host: &HostOptions) -> Result<NetConfig, Failure> {
        let Some(user) = &self.0 else { return Ok(net) };
        let shared = host.shared_interface().and_then(|name| Interface::by_name(name).ok());
        let net = match shared {
            // Opening the stack reports an interface that there is not.
            None => net,
            Some(interface) => {
                let resolver = neighbours::start(&interface, user);
                net.neighbour_resolver(resolver.map_err(|error| {
                    format!("the process that resolves neighbours does not start: {error}")
                })?)
            }
        };
        let sandbox = self.clone();
        Ok(net.once_open(Box::new(move || sandbox.drop_bounding_set())))
    }

    /// Empties the bounding set, and the inheritable and the ambient set, of the calling thread and
    /// of the threads that it starts. Afterwards no program that these threads start has a
    /// capability.
    pub(crate) fn drop_bounding_set(&self) -> io::Result<()> {
        if self.0.is_none() {
            return Ok(());
        }
        rustix::thread::clear_ambient_capability_set()?;
        let has = rustix::thread::capabilities(None)?;
        if has.effective.contains(CapabilitySet::SETPCAP) {
            drop_from_bounding_set(CapabilitySet::all())?;
        }
        let sets = CapabilitySets { inheritable: CapabilitySet::empty(), ..has };
        Ok(rustix::thread::set_capabilities(None, sets)?)
    }

    /// Becomes the user, in all threads, and restricts the system calls of all threads. There is
    /// no way back.
    ///
    /// # Errors
    /// The kernel refuses a step; the process must not continue then.
    pub(crate) fn enter(&self) -> Result<(), Failure> {
        let Some(user) = &self.0 else { return Ok(()) };
        allow_nice();
        self.drop_bounding_set()?;
        become_user(user).map_err(|error| {
            format!("cannot become user {}: {error}; `--user root` stays root", user.name)
        })?;
        if !rustix::thread::capabilities(None)?.permitted.is_empty() {
            return Err(format!(
                "user {} keeps capabilities here, by securebits (`capsh --print`): start the \
                 process without them, or give `--user root`",
                user.name
            )
            .into());
        }
        syscalls::restrict().map_err(|error| {
            format!("cannot restrict system calls: {error}; `--user root` does without")
        })?;
        Ok(())
    }

    /// Makes the user the owner of a Unix socket, so that other servers of the user may connect.
    pub(crate) fn give(&self, socket: &Path) -> Result<(), Failure> {
        let Some(user) = &self.0 else { return Ok(()) };
        std::os::unix::fs::lchown(socket, Some(user.uid.as_raw()), Some(user.gid.as_raw()))
            .map_err(|error| format!("{}: {error}", socket.display()).into())
    }

    /// Advice after a file was not accessible; empty if this process has not changed its user.
    pub(crate) fn file_advice(&self) -> String {
        match &self.0 {
            Some(user) => format!(
                "; the server runs as user {0}: make the file and its folders readable for {0}, \
                 or start the server with `--user root`",
                user.name
            ),
            None => String::new(),
        }
    }
}

/// Removes capabilities from the bounding set of the calling thread.
pub(crate) fn drop_from_bounding_set(dropped: CapabilitySet) -> io::Result<()> {
    for (_, capability) in dropped.iter_names() {
        // The kernel may know fewer capabilities than this program.
        let is_there = rustix::thread::capability_is_in_bounding_set(capability);
        if is_there.unwrap_or(false) {
            rustix::thread::remove_capability_from_bounding_set(capability)?;
        }
    }
    Ok(())
}

/// Warns of a folder to serve that the user of this process may not enter.
pub(crate) fn warn_unless_accessible(folder: &Path) {
    if access(folder, Access::EXEC_OK) == Err(Errno::ACCESS) {
        tracing::warn!(
            "{}: the server's user may not enter this folder: files may be missing, and SIGHUP \
             cannot open it again; let that user read it, or choose another user by --user",
            folder.display()
        );
    }
}

/// Takes the groups, the group and the user, in all threads: the C library sees to that.
fn become_user(user: &User) -> Result<(), nix::Error> {
    let name = CString::new(user.name.as_str()).map_err(|_| nix::Error::EINVAL)?;
    let (uid, gid): (Uid, Gid) = (user.uid, user.gid);
    nix::unistd::initgroups(&name, gid)?;
    nix::unistd::setresgid(gid, gid, gid)?;
    nix::unistd::setresuid(uid, uid, uid)
}

/// Lets threads raise their priority without a capability. Without CAP_SYS_RESOURCE they cannot.
fn allow_nice() {
    let limit = rustix::process::getrlimit(Resource::Nice);
    let raised = |old: Option<u64>| old.map(|old| old.max(NICE_LIMIT));
    let limit = Rlimit { current: raised(limit.current), maximum: raised(limit.maximum) };
    let _ = rustix::process::setrlimit(Resource::Nice, limit);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_releases_are_compared_by_number() {
        for old in ["4.19.0", "5.4.0-42-generic", "5.15.0-1031-aws", "5.18.19"] {
            assert!(is_before_5_19(old), "{old}");
        }
        for new in ["5.19.0", "5.19-rc1", "6.1.0-13-amd64", "6.18.44-fc", "10.0.0"] {
            assert!(!is_before_5_19(new), "{new}");
        }
    }
}
