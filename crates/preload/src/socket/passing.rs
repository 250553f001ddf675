//! Sockets that are handed to other processes and come from them: with the kernel's
//! descriptors, in messages on Unix sockets and through `exec`.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use tidegate::{Arrived, TcpState};

use super::{Body, Listener, Socket, Stream, Udp, moving, options};
use crate::signals::Turn;
use crate::table::{self, Entry};
use crate::{log, start};

/// The kernel's side of a socket.
fn shown(fd: &i32) -> BorrowedFd<'_> {
    // SAFETY: the caller is told of the descriptor by the program, which does not
    // close what it hands on or is just given.
    unsafe { BorrowedFd::borrow_raw(*fd) }
}

/// A descriptor is about to be handed to another process. Whether it is that of a
/// socket of ours, which is then on its way.
pub(crate) fn offer(fd: i32) -> bool {
    let Some(socket) = table::socket(fd) else { return false };
    if let Body::Stream(stream) = &socket.body {
        // What is held back here is nothing that others know of.
        stream.push(&socket);
    }
    let offered = socket.net.offer(socket.source(), shown(&fd));
    if let Err(error) = &offered {
        log::say_once(&format!("a socket is handed on and will not arrive: {error}"));
    }
    offered.is_ok()
}

/// A descriptor that was offered stays here.
pub(crate) fn withdraw(fd: i32) {
    if let Some(socket) = table::socket(fd) {
        // A daemon that has ended knows of nothing that is on its way.
        let _ = socket.net.withdraw(socket.source(), shown(&fd));
    }
}

/// A descriptor has come from another process: if a socket of ours came with it, it
/// is that from now on.
pub(crate) fn take(fd: i32) {
    let _turn = Turn::begin();
    if !start::is_to_attach() || table::is_ours(fd) {
        return;
    }
    let Some((_, is_v6)) = options::kind(fd) else { return };
    let Ok(net) = start::net() else { return };
    match net.take(shown(&fd)) {
        Ok(Some(arrived)) => enter(fd, net, arrived, is_v6),
        Ok(None) => share(fd),
        // It is the kernel's.
        Err(error) if error.kind() == io::ErrorKind::NotConnected => {}
        Err(error) => log::say_once(&format!(
            "a socket that another program has handed to this one cannot be used: {error}; they \
             must be of the same user"
        )),
    }
}

fn enter(fd: i32, net: &'static tidegate::Net, arrived: Arrived, is_v6: bool) {
    let (body, local) = match arrived {
        Arrived::Udp(socket) => {
            let (local, is_connected) = (socket.local_addr(), socket.peer_addr().is_ok());
            let udp = Udp::new(socket);
            udp.is_connected.store(is_connected, std::sync::atomic::Ordering::Relaxed);
            (Body::Udp(udp), local.ok())
        }
        Arrived::Listener(listener) => {
            let (local, inherited) = (listener.local_addr().ok(), options::inherited(fd).into());
            (Body::Listener(Listener { listener, inherited }), local)
        }
        Arrived::Stream(stream) => {
            let connects = |info: tidegate::TcpInfo| info.state == TcpState::SynSent;
            let is_connecting = stream.info().is_ok_and(connects);
            (Body::Stream(Stream::new(stream, is_connecting)), None)
        }
    };
    let has_kernel = local.is_some_and(moving::has_kernel);
    moving::enter(fd, Socket::new(net, body, is_v6, has_kernel));
}

/// The descriptor is that of a socket which this process has by another one.
fn share(fd: i32) {
    let name = options::cookie(fd);
    let same = |&other: &i32| name.is_some() && options::cookie(other) == name;
    if let Some(socket) = table::between(0, u32::MAX).find(same).and_then(table::socket) {
        table::put(fd, Entry::Socket(Arc::clone(&socket)));
    }
}
