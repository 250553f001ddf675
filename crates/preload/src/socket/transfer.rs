//! Transfer of sockets to and from other processes, with their kernel descriptors: in
//! messages on Unix sockets (`SCM_RIGHTS`) and through `exec`.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use tidegate::{ReceivedSocket, TcpState};

use super::install::{install, uses_kernel_socket};
use super::{Endpoint, Listener, Socket, Stream, Udp, options};
use crate::fd_table::{self, Entry};
use crate::signals::SignalGuard;
use crate::{lifecycle, log, runtime};

/// Kernel descriptor of a socket.
fn kernel_fd(fd: &i32) -> BorrowedFd<'_> {
    // SAFETY: the application names the descriptor, and does not close it while it is sent or
    // has just been received.
    unsafe { BorrowedFd::borrow_raw(*fd) }
}

/// Sends the socket of a descriptor that is about to be passed to another process. Returns
/// true if a Tidegate socket is in transit now.
pub(crate) fn send_socket(fd: i32) -> bool {
    let Some(socket) = fd_table::socket(fd) else { return false };
    if let Endpoint::Stream(stream) = &*socket.endpoint {
        // The other process does not know that more should follow.
        stream.end_more();
    }
    let sent = socket.net.send_socket(socket.source(), kernel_fd(&fd));
    if let Err(error) = &sent {
        log::write_once(&format!(
            "a socket that was passed to another process will not arrive there: {error}"
        ));
    }
    socket.note_other_holders();
    sent.is_ok()
}

/// Withdraws the socket of a descriptor that was not passed after all.
pub(crate) fn withdraw_socket(fd: i32) {
    if let Some(socket) = fd_table::socket(fd) {
        // A daemon that has exited knows of no socket in transit.
        let _ = socket.net.withdraw_socket(socket.source(), kernel_fd(&fd));
    }
}

/// Receives the socket of a descriptor that another process passed, if a Tidegate socket was
/// sent with it.
pub(crate) fn receive_socket(fd: i32) {
    let _signal_guard = SignalGuard::enter();
    if !runtime::uses_daemon() || fd_table::is_tidegate(fd) {
        return;
    }
    let Some((_, is_v6)) = options::protocol_and_family(fd) else { return };
    let Ok(net) = lifecycle::net() else { return };
    match net.receive_socket(kernel_fd(&fd)) {
        Ok(Some(received)) => install_received(fd, net, received, is_v6),
        Ok(None) => share_existing(fd),
        // A kernel socket.
        Err(error) if error.kind() == io::ErrorKind::NotConnected => {}
        Err(error) => log::write_once(&format!(
            "a socket passed by another process cannot be used: {error}; both processes \
             must run as the same user"
        )),
    }
}

fn install_received(fd: i32, net: &'static tidegate::Net, received: ReceivedSocket, is_v6: bool) {
    let (endpoint, local) = match received {
        ReceivedSocket::Udp(socket) => {
            let (local, is_connected) = (socket.local_addr(), socket.peer_addr().is_ok());
            let udp = Udp::new(socket);
            udp.is_connected.store(is_connected, std::sync::atomic::Ordering::Relaxed);
            (Endpoint::Udp(udp), local.ok())
        }
        ReceivedSocket::Listener(listener) => {
            let local = listener.local_addr().ok();
            (Endpoint::Listener(Listener::new(listener)), local)
        }
        ReceivedSocket::Stream(stream) => {
            let is_syn_sent = |info: tidegate::TcpInfo| info.state == TcpState::SynSent;
            let is_connecting = stream.info().is_ok_and(is_syn_sent);
            (Endpoint::Stream(Stream::new(stream, is_connecting)), None)
        }
    };
    let uses_kernel_socket = local.is_some_and(uses_kernel_socket);
    let socket = Socket::new(net, endpoint, is_v6, uses_kernel_socket);
    socket.note_other_holders();
    install(fd, socket);
}

/// Shares the object of another descriptor in this process that refers to the same socket.
fn share_existing(fd: i32) {
    let cookie = options::cookie(fd);
    let has_same_cookie = |&other: &i32| cookie.is_some() && options::cookie(other) == cookie;
    if let Some(socket) =
        fd_table::range(0, u32::MAX).find(has_same_cookie).and_then(fd_table::socket)
    {
        fd_table::insert(fd, Entry::Socket(Arc::clone(&socket)));
    }
}
