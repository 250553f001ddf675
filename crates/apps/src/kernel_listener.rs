//! Listeners of the kernel's.

use std::io;
use std::net::{SocketAddr, TcpListener};

use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, listen, socket_with, sockopt};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 4096;

/// A listener that does not block, for one family only: the other may have one
/// of its own on the same port.
///
/// # Errors
/// When the address cannot be listened on.
pub(crate) fn listen_on(address: SocketAddr) -> io::Result<TcpListener> {
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

/// Listeners on these addresses, for a server of very many connections: each is a
/// descriptor, so it may have as many as the process can.
///
/// # Errors
/// As [`listen_on`].
pub(crate) fn listen_for_many(addresses: &[SocketAddr]) -> io::Result<Vec<TcpListener>> {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })?;
    addresses.iter().map(|&address| listen_on(address)).collect()
}
