//! TCP listeners of the kernel.

use std::io;
use std::net::{SocketAddr, TcpListener};

use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, listen, socket_with, sockopt};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 4096;

/// Opens a non-blocking listener for the address's family only, so that the other family can
/// have its own listener on the same port.
///
/// # Errors
/// When the address cannot be bound or listened on.
pub(crate) fn listen_on(address: SocketAddr) -> io::Result<TcpListener> {
    try_listen_on(address).map_err(|error| {
        let hint = match error.kind() {
            io::ErrorKind::AddrInUse => ": another program listens there; `ss -tlnp` shows it",
            io::ErrorKind::AddrNotAvailable => ": the kernel does not have this address",
            io::ErrorKind::PermissionDenied => ": a port below 1024 needs CAP_NET_BIND_SERVICE",
            _ => "",
        };
        io::Error::new(error.kind(), format!("cannot listen on {address}: {error}{hint}"))
    })
}

fn try_listen_on(address: SocketAddr) -> io::Result<TcpListener> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = socket_with(family, SocketType::STREAM, flags, None)?;
    sockopt::set_socket_reuseaddr(&socket, true)?;
    if address.is_ipv6() {
        sockopt::set_ipv6_v6only(&socket, true)?;
    }
    bind(&socket, &address)?;
    listen(&socket, BACKLOG)?;
    Ok(socket.into())
}

/// Opens listeners on `addresses` for a server of very many connections. Each connection needs a
/// file descriptor, so the process's soft limit is raised to its hard limit.
///
/// # Errors
/// As [`listen_on`].
pub(crate) fn listen_with_max_descriptors(
    addresses: &[SocketAddr],
) -> io::Result<Vec<TcpListener>> {
    raise_descriptor_limit()?;
    addresses.iter().map(|&address| listen_on(address)).collect()
}

/// Raises the process's soft limit of file descriptors to its hard limit. Returns the limit.
///
/// # Errors
/// When the kernel does not permit the hard limit.
pub(crate) fn raise_descriptor_limit() -> io::Result<u64> {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })?;
    Ok(maximum.unwrap_or(u64::MAX))
}
