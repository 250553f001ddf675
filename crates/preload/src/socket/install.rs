//! Placing sockets in the descriptor table.

use std::net::SocketAddr;
use std::sync::Arc;

use super::{Socket, options};
use crate::fd_table::{self, Entry, InUse};
use crate::signals::SignalGuard;
use crate::{duplicates, epoll, runtime};

/// Result of a call that may move a socket.
pub(crate) enum MoveOutcome {
    /// The socket stays at the kernel, which serves the call.
    Kernel,
    /// The socket is Tidegate's now.
    Tidegate(InUse<Arc<Socket>>),
}

/// Makes `socket` the object of the descriptor.
pub(super) fn install(fd: i32, socket: Socket) -> MoveOutcome {
    let _signal_guard = SignalGuard::enter();
    let socket = Arc::new(socket);
    options::copy_from_kernel(fd, &socket);
    if !fd_table::insert(fd, Entry::Socket(Arc::clone(&socket))) {
        return MoveOutcome::Kernel;
    }
    epoll::on_moved(fd, &socket);
    for other in duplicates::others(fd) {
        fd_table::insert(other, Entry::Socket(Arc::clone(&socket)));
        epoll::on_moved(other, &socket);
    }
    MoveOutcome::Tidegate(InUse::new(socket))
}

/// Makes an accepted connection the object of its kernel socket's descriptor.
pub(crate) fn install_accepted(fd: i32, accepted: Socket, is_nonblocking: bool) -> bool {
    accepted.set_nonblocking(is_nonblocking);
    fd_table::insert(fd, Entry::Socket(Arc::new(accepted)))
}

/// True when a socket bound to `local` also uses its kernel socket: traffic of the host to
/// itself never comes by the wire.
pub(super) fn uses_kernel_socket(local: SocketAddr) -> bool {
    local.ip().to_canonical().is_unspecified() || runtime::uses_kernel_addresses()
}
