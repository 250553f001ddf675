//! Privileges of a server once it is ready: a user without rights, no capability, and few system
//! calls.

mod neighbours;
mod syscalls;

use std::ffi::CString;
use std::io;
use std::path::Path;

use clap::Args;
use nix::unistd::{Gid, Uid, User};
use rustix::process::{Resource, Rlimit};
use rustix::thread::{CapabilitySet, CapabilitySets};
use tidegate::NetConfig;
use tidegate_device::netlink::Interface;

pub(crate) use self::neighbours::run as resolve_neighbours;
use crate::Failure;
use crate::host::HostOptions;

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
    /// DPDK]
    #[arg(long, value_name = "NAME")]
    user: Option<String>,
}

/// User that a process becomes; no user if the process stays as it is.
#[derive(Clone, Debug)]
pub(crate) struct Sandbox(Option<User>);

impl UserOption {
    /// Looks the user up, and checks that this process may become it. A driver of DPDK needs its
    /// privileges for as long as it runs.
    ///
    /// # Errors
    /// There is no such user, or this process may not change its user.
    pub(crate) fn sandbox(&self, has_dpdk: bool) -> Result<Sandbox, Failure> {
        if has_dpdk {
            return match self.user.as_deref() {
                None | Some("root") => Ok(Sandbox(None)),
                Some(name) => Err(format!(
                    "--user {name}: a driver of DPDK needs its privileges for as long as it runs: \
                     leave --user out, or choose another --io"
                )
                .into()),
            };
        }
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
        let user = match &self.user {
            // An ordinary user's namespace: its root has no rights outside.
            None if !has_ordinary_users() => return Ok(Sandbox(None)),
            Some(name) => find_user(name)?.ok_or_else(|| {
                format!(
                    "--user {name}: there is no such user: `useradd --system {name}` creates it, \
                     and `--user root` stays root"
                )
            })?,
            None => default_user()?,
        };
        if user.uid.is_root() {
            return Ok(Sandbox(None));
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
        Ok(net.wrap(Box::new(move |device| sandbox.drop_bounding_set().map(|()| device))))
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
