//! Process that has the kernel resolve neighbours for a server on a shared address, which has
//! dropped its privileges.
//!
//! A request is an IPv4 or IPv6 address, 4 or 16 bytes. The interface is fixed at the start. The
//! process runs as the server's user, with CAP_NET_ADMIN only, and ends with the server.

use std::io;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::process::{Command, Stdio};
use std::sync::Arc;

use nix::unistd::User;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair,
};
use rustix::thread::{CapabilitySet, CapabilitySets};
use tidegate_device::affinity::run_on_every_processor;
use tidegate_device::netlink::{self, Interface};
use tidegate_engine::NeighbourResolver;

use super::{become_user, drop_from_bounding_set, find_user};
use crate::{Failure, OWN_PROGRAM};

/// Subcommand that [`run`] is.
const SUBCOMMAND: &str = "resolve-neighbours";

/// Starts the process for an interface.
///
/// # Errors
/// The program does not start.
pub(super) fn start(interface: &Interface, user: &User) -> io::Result<NeighbourResolver> {
    let (ours, theirs) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    let mut command = Command::new(OWN_PROGRAM);
    command.args([SUBCOMMAND, &interface.index.to_string(), &user.name]);
    command.env_clear().current_dir("/").stdin(Stdio::from(theirs));
    // The process ends with the socket, so with this process: nobody waits for it.
    command.stdout(Stdio::null()).spawn()?;
    Ok(Arc::new(move |address| request(&ours, address)))
}

/// Sends a request. The stack repeats lost ones.
fn request(socket: &OwnedFd, address: IpAddr) {
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    let _ = match address {
        IpAddr::V4(v4) => send(socket, &v4.octets(), flags),
        IpAddr::V6(v6) => send(socket, &v6.octets(), flags),
    };
}

/// Serves requests on standard input until the server ends.
///
/// # Errors
/// The user cannot be changed, or the socket fails.
pub(crate) fn run(interface: u32, user: &str) -> Result<(), Failure> {
    // Signals to the server's process group and terminal do not reach this process.
    let _ = rustix::process::setsid();
    let _ = rustix::thread::set_name(c"tg-neighbours");
    run_on_every_processor();
    keep_net_admin(user)?;
    let mut buffer = [0; 16];
    loop {
        let len = match recv(rustix::stdio::stdin(), &mut buffer, RecvFlags::empty()) {
            Ok((0, _)) => return Ok(()),
            Err(Errno::INTR) => continue,
            other => other?.0,
        };
        if let Some(address) = parse_request(&buffer[..len]) {
            // The stack's queue times out if the kernel cannot resolve the address.
            let _ = netlink::resolve(interface, address);
        }
    }
}

/// Address of a request; `None` for one that is no neighbour's.
fn parse_request(bytes: &[u8]) -> Option<IpAddr> {
    let address = match bytes.len() {
        4 => IpAddr::from(<[u8; 4]>::try_from(bytes).ok()?),
        16 => IpAddr::from(<[u8; 16]>::try_from(bytes).ok()?),
        _ => return None,
    };
    let is_other = address.is_unspecified() || address.is_multicast() || address.is_loopback();
    (!is_other).then_some(address)
}

/// Becomes the user, with CAP_NET_ADMIN and no other capability.
fn keep_net_admin(user: &str) -> Result<(), Failure> {
    let user = find_user(user)?.ok_or("the user of the server is gone")?;
    rustix::thread::set_no_new_privs(true)?;
    rustix::thread::set_keep_capabilities(true)?;
    drop_from_bounding_set(CapabilitySet::all())?;
    become_user(&user)?;
    let kept = CapabilitySet::NET_ADMIN & rustix::thread::capabilities(None)?.permitted;
    let inheritable = CapabilitySet::empty();
    let sets = CapabilitySets { effective: kept, permitted: kept, inheritable };
    Ok(rustix::thread::set_capabilities(None, sets)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_is_the_address_of_a_neighbour() {
        for text in ["192.0.2.1", "2001:db8::1", "fe80::1"] {
            let address: IpAddr = text.parse().unwrap();
            let parsed = match address {
                IpAddr::V4(v4) => parse_request(&v4.octets()),
                IpAddr::V6(v6) => parse_request(&v6.octets()),
            };
            assert_eq!(parsed, Some(address));
        }
        let refused: [&[u8]; 6] = [&[0; 4], &[0; 16], &[224, 0, 0, 1], &[127, 0, 0, 1], &[1], &[]];
        for refused in refused {
            assert_eq!(parse_request(refused), None, "{refused:?}");
        }
    }
}
