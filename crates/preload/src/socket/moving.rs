//! When a socket moves from the kernel to Tidegate.

use std::io;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex};

use tidegate::{Net, TcpListener, TcpStream, UdpSocket};

use super::{Body, Listener, Socket, Stream, Udp, any, options, passing};
use crate::rules::{Protocol, is_loopback};
use crate::signals::Turn;
use crate::table::{self, Entry, InUse};
use crate::{epoll, own_address, start};

/// What a call on a kernel's socket came to.
pub(crate) enum Moved {
    /// It stays where it is: the kernel serves the call.
    No,
    /// It is Tidegate's now.
    Yes(InUse<Arc<Socket>>),
}

/// The descriptor is this socket from now on.
pub(super) fn enter(fd: i32, socket: Socket) -> Moved {
    let _turn = Turn::begin();
    let socket = Arc::new(socket);
    options::adopt(fd, &socket);
    if !table::put(fd, Entry::Socket(Arc::clone(&socket))) {
        return Moved::No;
    }
    epoll::on_moved(fd, &socket);
    Moved::Yes(InUse::new(socket))
}

/// Whether a socket with this address can be Tidegate's.
fn has_address(net: &Net, local: SocketAddr) -> bool {
    let ip = local.ip().to_canonical();
    ip.is_unspecified() || net.has_address(ip)
}

/// Whether the kernel's socket of one that is bound to `local` is in use too: what the
/// host sends to itself never comes by the wire.
pub(super) fn has_kernel(local: SocketAddr) -> bool {
    local.ip().is_unspecified() || start::is_shared()
}

/// A socket was bound by the kernel to `local`. One for datagrams moves now if
/// a port was asked for: nothing else will tell that it serves.
///
/// # Errors
/// When it is to move and cannot.
pub(crate) fn on_bound(fd: i32, local: SocketAddr) -> io::Result<Moved> {
    let _turn = Turn::begin();
    let Some(rules) = start::rules() else { return Ok(Moved::No) };
    let Some((Protocol::Udp, is_v6)) = options::kind(fd) else { return Ok(Moved::No) };
    if local.port() == 0 || !rules.moves_listener(Protocol::Udp, local) {
        return Ok(Moved::No);
    }
    let net = start::net()?;
    if !has_address(net, local) {
        return Ok(Moved::No);
    }
    move_udp(fd, net, local, is_v6)
}

/// Before a port is bound on Tidegate that the kernel's socket has: a daemon on the
/// kernel's addresses wants to see that.
fn hold(fd: i32, net: &Net, local: SocketAddr) -> io::Result<()> {
    if local.port() == 0 || !start::is_shared_daemon() {
        return Ok(());
    }
    // SAFETY: the program has just named the descriptor in a call that is not over.
    net.hold(unsafe { BorrowedFd::borrow_raw(fd) })
}

/// Before a socket listens on Tidegate: others that have the kernel's socket may listen
/// on it, too.
fn share(fd: i32, net: &Net) -> io::Result<()> {
    // SAFETY: the program has just named the descriptor in a call that is not over.
    let shown = unsafe { BorrowedFd::borrow_raw(fd) };
    match net.is_attached().then(|| net.hold(shown)) {
        Some(Err(error)) if start::is_shared_daemon() => Err(error),
        // A program that gave up the right to attach still listens, by itself.
        _ => Ok(()),
    }
}

fn move_udp(fd: i32, net: &'static Net, local: SocketAddr, is_v6: bool) -> io::Result<Moved> {
    hold(fd, net, local)?;
    let socket = UdpSocket::bind_with(net, local, options::of_udp(fd, is_v6))?;
    socket.set_nonblocking(true)?;
    let body = Body::Udp(Udp::new(socket));
    Ok(enter(fd, Socket::new(net, body, is_v6, has_kernel(local))))
}

/// A kernel's socket that is bound to `local` begins to listen.
///
/// # Errors
/// When it is to move and cannot.
pub(crate) fn on_listen(fd: i32, local: SocketAddr, backlog: usize) -> io::Result<Moved> {
    let _turn = Turn::begin();
    let Some(rules) = start::rules() else { return Ok(Moved::No) };
    let Some((Protocol::Tcp, is_v6)) = options::kind(fd) else { return Ok(Moved::No) };
    if local.port() == 0 || !rules.moves_listener(Protocol::Tcp, local) {
        return Ok(Moved::No);
    }
    let net = start::net()?;
    if !has_address(net, local) {
        return Ok(Moved::No);
    }
    let options = options::of_tcp(fd, is_v6);
    let local = SocketAddr::new(local.ip(), local.port());
    share(fd, net)?;
    let listener = match TcpListener::bind_with(net, local, backlog.max(1), options) {
        Ok(listener) => listener,
        // Whoever listens there may do so on this very socket of the kernel's.
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
            passing::take(fd);
            return table::socket(fd).map(Moved::Yes).ok_or(error);
        }
        Err(error) => return Err(error),
    };
    let inherited = Mutex::new(options::inherited(fd));
    let body = Body::Listener(Listener { listener, inherited });
    Ok(enter(fd, Socket::new(net, body, is_v6, has_kernel(local))))
}

/// The stack, if it is what leads to `peer`.
fn leads_to(peer: SocketAddr) -> io::Result<Option<&'static Net>> {
    let Some(rules) = start::rules() else { return Ok(None) };
    if !rules.moves_to(peer.ip()) || start::is_child() {
        return Ok(None);
    }
    // What is sent to the host itself stays at the kernel, which has the other end too.
    if start::is_shared() && own_address::is_own(peer) {
        return Ok(None);
    }
    let net = start::net()?;
    Ok(net.source_for(peer.ip()).map(|_| net))
}

/// A kernel's socket that is bound to `local`, if it is, connects to `peer`.
/// One for a connection has begun to when it has moved.
///
/// # Errors
/// When it is to move and cannot.
pub(crate) fn on_connect(fd: i32, local: SocketAddr, peer: SocketAddr) -> io::Result<Moved> {
    let _turn = Turn::begin();
    let Some(net) = leads_to(peer)? else { return Ok(Moved::No) };
    let Some((protocol, is_v6)) = options::kind(fd) else { return Ok(Moved::No) };
    if is_loopback(local.ip()) || !has_address(net, local) {
        return Ok(Moved::No);
    }
    match protocol {
        Protocol::Tcp => {
            let body = Body::Stream(Stream::new(begin(fd, net, local, peer, is_v6)?, true));
            Ok(enter(fd, Socket::new(net, body, is_v6, false)))
        }
        Protocol::Udp => {
            let moved = move_udp(fd, net, bound(fd, local, is_v6), is_v6)?;
            if let Moved::Yes(socket) = &moved {
                connect_udp(socket, peer)?;
            }
            Ok(moved)
        }
    }
}

fn begin(
    fd: i32,
    net: &Net,
    local: SocketAddr,
    peer: SocketAddr,
    is_v6: bool,
) -> io::Result<TcpStream> {
    hold(fd, net, local)?;
    let options = options::of_tcp(fd, is_v6);
    let ip = local.ip().to_canonical();
    if local.port() == 0 && ip.is_unspecified() {
        return TcpStream::connect_nonblocking(net, peer, options);
    }
    // The stack fills in what is open, but wants it of the peer's family.
    let ip = match ip.is_unspecified() {
        true => any(peer.ip().to_canonical().is_ipv6()).ip(),
        false => ip,
    };
    TcpStream::connect_from(net, SocketAddr::new(ip, local.port()), peer, options)
}

/// A socket that connects again after it failed to.
///
/// # Errors
/// As [`on_connect`].
pub(crate) fn connect_again(
    fd: i32,
    old: &Socket,
    peer: SocketAddr,
) -> io::Result<InUse<Arc<Socket>>> {
    let stream = begin(fd, old.net, any(old.is_v6), peer, old.is_v6)?;
    let body = Body::Stream(Stream::new(stream, true));
    match enter(fd, Socket::new(old.net, body, old.is_v6, false)) {
        Moved::Yes(socket) => Ok(socket),
        Moved::No => Err(io::Error::from_raw_os_error(libc::EBADF)),
    }
}

/// The address to bind a socket for datagrams to that is not bound yet: the
/// kernel's gets a port first, so that it is the same in both worlds.
fn bound(fd: i32, local: SocketAddr, is_v6: bool) -> SocketAddr {
    if local.port() != 0 {
        return SocketAddr::new(local.ip(), local.port());
    }
    SocketAddr::new(any(is_v6).ip(), options::bind_any(fd, is_v6).unwrap_or(0))
}

/// Connects a socket for datagrams.
///
/// # Errors
/// What the stack says.
pub(crate) fn connect_udp(socket: &Socket, peer: SocketAddr) -> io::Result<()> {
    let Body::Udp(udp) = &socket.body else { return Err(io::ErrorKind::InvalidInput.into()) };
    udp.socket.connect(peer)?;
    udp.is_connected.store(true, std::sync::atomic::Ordering::Relaxed);
    Ok(())
}

/// A socket for datagrams is about to connect to `peer`. If the kernel serves him, it
/// is the kernel's again, with all its descriptors. Whether it is.
pub(crate) fn go_back(socket: &Arc<Socket>, peer: SocketAddr) -> bool {
    let Body::Udp(udp) = &socket.body else { return false };
    if !udp.is_for_kernel(socket, Some(peer)) {
        return false;
    }
    let is_this = |&fd: &i32| table::socket(fd).is_some_and(|other| Arc::ptr_eq(&other, socket));
    for fd in table::between(0, u32::MAX).filter(is_this) {
        epoll::on_returned(fd, socket);
        table::remove(fd);
    }
    true
}

/// A kernel's socket for datagrams sends to `peer`. If it is bound to a port
/// that does not move, it does not either.
///
/// # Errors
/// When it is to move and cannot.
pub(crate) fn on_send(fd: i32, local: SocketAddr, peer: SocketAddr) -> io::Result<Moved> {
    let _turn = Turn::begin();
    let Some(net) = leads_to(peer)? else { return Ok(Moved::No) };
    let Some((Protocol::Udp, is_v6)) = options::kind(fd) else { return Ok(Moved::No) };
    let may_move = local.port() == 0
        || start::rules().is_some_and(|rules| rules.moves_listener(Protocol::Udp, local));
    if !may_move || is_loopback(local.ip()) || !has_address(net, local) {
        return Ok(Moved::No);
    }
    move_udp(fd, net, bound(fd, local, is_v6), is_v6)
}

/// The kernel's socket of a connection that was accepted: its entry.
pub(crate) fn enter_accepted(fd: i32, accepted: Socket, is_nonblocking: bool) -> bool {
    accepted.set_nonblocking(is_nonblocking);
    table::put(fd, Entry::Socket(Arc::new(accepted)))
}
