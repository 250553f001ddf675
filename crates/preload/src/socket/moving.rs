//! Moving sockets from the kernel to Tidegate.

use std::io;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use tidegate::{Net, TcpListener, TcpStream, UdpSocket};
use tidegate_posix::families::check_families;

use super::install::{MoveOutcome, install, uses_kernel_socket};
use super::{Endpoint, Listener, Socket, Stream, Udp, options, transfer, unspecified};
use crate::fd_table::{self, InUse};
use crate::rules::{Protocol, is_loopback};
use crate::signals::SignalGuard;
use crate::{epoll, lifecycle, local_addresses, log, raw, runtime};

/// Address and port as the stack knows them: IPv4 where an IPv6 socket has an IPv4-mapped address.
fn to_stack_address(local: SocketAddr) -> SocketAddr {
    SocketAddr::new(local.ip().to_canonical(), local.port())
}

/// True when Tidegate can serve a socket with this address. Datagrams also come to broadcast
/// addresses.
fn has_address(net: &Net, protocol: Protocol, local: SocketAddr) -> bool {
    let ip = local.ip().to_canonical();
    ip.is_unspecified()
        || match protocol {
            Protocol::Tcp => net.has_address(ip),
            Protocol::Udp => net.has_datagram_address(ip),
        }
}

/// Called after the kernel bound a socket to `local`. A UDP socket moves now, also where the kernel
/// chose the port: no later call shows that it is a server.
///
/// # Errors
/// The rules move the socket, but Tidegate cannot take it.
pub(crate) fn on_bound(fd: i32, local: SocketAddr) -> io::Result<MoveOutcome> {
    let _signal_guard = SignalGuard::enter();
    let Some(rules) = runtime::rules() else { return Ok(MoveOutcome::Kernel) };
    let Some((Protocol::Udp, is_v6)) = options::protocol_and_family(fd) else {
        return Ok(MoveOutcome::Kernel);
    };
    if local.port() == 0 || !rules.moves_listener(Protocol::Udp, local) {
        return Ok(MoveOutcome::Kernel);
    }
    let net = lifecycle::net()?;
    if !has_address(net, Protocol::Udp, local) {
        return Ok(MoveOutcome::Kernel);
    }
    move_udp(fd, net, local, is_v6)
}

/// Called before the application requests the local address of a descriptor. A UDP socket that
/// sending has bound moves now: the application may announce its port to others.
pub(crate) fn on_address_requested(fd: i32) {
    if runtime::rules().is_none() || runtime::is_child() || fd_table::is_tidegate(fd) {
        return;
    }
    let Some(local) = raw::kernel_local_address(fd).filter(|local| local.port() != 0) else {
        return;
    };
    // The peer of a connected socket is one that the kernel serves.
    if raw::has_kernel_peer(fd) {
        return;
    }
    if let Err(error) = on_bound(fd, local) {
        log::write_once(&format!(
            "a UDP socket on port {} stays at the kernel: {error}",
            local.port()
        ));
    }
}

/// Reserves the port of the kernel socket before it is bound on Tidegate: a daemon on the
/// kernel's addresses requires the kernel's descriptor.
fn reserve_bound_port(fd: i32, net: &Net, local: SocketAddr) -> io::Result<()> {
    if local.port() == 0 || !runtime::uses_shared_daemon() {
        return Ok(());
    }
    // SAFETY: the application passed the descriptor to a call that has not returned.
    net.reserve_port(unsafe { BorrowedFd::borrow_raw(fd) })
}

/// Announces the kernel socket before it listens on Tidegate: other processes that have the
/// kernel socket may listen on it, too.
fn reserve_listener(fd: i32, net: &Net) -> io::Result<()> {
    // SAFETY: the application passed the descriptor to a call that has not returned.
    let kernel_fd = unsafe { BorrowedFd::borrow_raw(fd) };
    match net.is_attached().then(|| net.reserve_port(kernel_fd)) {
        Some(Err(error)) if runtime::uses_shared_daemon() => Err(error),
        // An application that gave up the right to attach still listens, without sharing.
        _ => Ok(()),
    }
}

/// Moves a UDP socket, unless another thread has just moved it.
fn move_udp(fd: i32, net: &'static Net, local: SocketAddr, is_v6: bool) -> io::Result<MoveOutcome> {
    let _lock = fd_table::lock_moves();
    if let Some(moved) = fd_table::socket(fd) {
        return Ok(MoveOutcome::Tidegate(moved));
    }
    let local = udp_bind_address(fd, local, is_v6);
    reserve_bound_port(fd, net, local)?;
    let stack_address = to_stack_address(local);
    let socket = UdpSocket::bind_with(net, stack_address, options::udp_options(fd, is_v6))?;
    socket.set_nonblocking(true)?;
    let endpoint = Endpoint::Udp(Udp::new(socket));
    Ok(install(fd, Socket::new(net, endpoint, is_v6, uses_kernel_socket(local))))
}

/// Called when a kernel socket bound to `local` starts to listen.
///
/// # Errors
/// The rules move the socket, but Tidegate cannot take it.
pub(crate) fn on_listen(fd: i32, local: SocketAddr, backlog: usize) -> io::Result<MoveOutcome> {
    let _signal_guard = SignalGuard::enter();
    let Some(rules) = runtime::rules() else { return Ok(MoveOutcome::Kernel) };
    let Some((Protocol::Tcp, is_v6)) = options::protocol_and_family(fd) else {
        return Ok(MoveOutcome::Kernel);
    };
    if local.port() == 0 || !rules.moves_listener(Protocol::Tcp, local) {
        return Ok(MoveOutcome::Kernel);
    }
    let net = lifecycle::net()?;
    if !has_address(net, Protocol::Tcp, local) {
        return Ok(MoveOutcome::Kernel);
    }
    let options = options::tcp_options(fd, is_v6);
    let local = to_stack_address(local);
    reserve_listener(fd, net)?;
    // The kernel's accept queue holds one connection more than the backlog.
    let queue_len = backlog.saturating_add(1);
    let listener = match TcpListener::bind_with(net, local, queue_len, options) {
        Ok(listener) => listener,
        // Another process may listen on this very kernel socket: receive its listener.
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
            transfer::receive_socket(fd);
            return fd_table::socket(fd).map(MoveOutcome::Tidegate).ok_or(error);
        }
        Err(error) => return Err(error),
    };
    let endpoint = Endpoint::Listener(Listener::new(listener));
    Ok(install(fd, Socket::new(net, endpoint, is_v6, uses_kernel_socket(local))))
}

/// Returns the stack if the route to `peer` is through it.
fn stack_for(peer: SocketAddr) -> io::Result<Option<&'static Net>> {
    let Some(rules) = runtime::rules() else { return Ok(None) };
    if !rules.moves_connection_to(peer.ip()) || runtime::is_child() {
        return Ok(None);
    }
    // Traffic to the host itself stays at the kernel, which has the other end, too.
    if runtime::uses_kernel_addresses() && local_addresses::is_local(peer) {
        return Ok(None);
    }
    let net = lifecycle::net()?;
    Ok(net.source_for(peer.ip()).map(|_| net))
}

/// Called when a kernel socket, bound to `local` or unbound, connects to `peer`. A TCP socket
/// that has moved has started to connect.
///
/// # Errors
/// The rules move the socket, but Tidegate cannot take it.
pub(crate) fn on_connect(fd: i32, local: SocketAddr, peer: SocketAddr) -> io::Result<MoveOutcome> {
    let _signal_guard = SignalGuard::enter();
    let Some(net) = stack_for(peer)? else { return Ok(MoveOutcome::Kernel) };
    let Some((protocol, is_v6)) = options::protocol_and_family(fd) else {
        return Ok(MoveOutcome::Kernel);
    };
    if is_loopback(local.ip()) || !has_address(net, protocol, local) {
        return Ok(MoveOutcome::Kernel);
    }
    let is_v6_only = is_v6 && !options::is_dual_stack(fd, is_v6);
    check_families(is_v6, is_v6_only, local.ip(), peer.ip())?;
    match protocol {
        Protocol::Tcp => {
            let endpoint =
                Endpoint::Stream(Stream::new(start_connect(fd, net, local, peer, is_v6)?, true));
            Ok(install(fd, Socket::new(net, endpoint, is_v6, false)))
        }
        Protocol::Udp => {
            let outcome = move_udp(fd, net, local, is_v6)?;
            if let MoveOutcome::Tidegate(socket) = &outcome {
                connect_udp(socket, peer)?;
            }
            Ok(outcome)
        }
    }
}

fn start_connect(
    fd: i32,
    net: &Net,
    local: SocketAddr,
    peer: SocketAddr,
    is_v6: bool,
) -> io::Result<TcpStream> {
    reserve_bound_port(fd, net, local)?;
    let options = options::tcp_options(fd, is_v6);
    let ip = local.ip().to_canonical();
    if local.port() == 0 && ip.is_unspecified() {
        return TcpStream::connect_nonblocking(net, peer, options);
    }
    // The stack fills in unspecified parts, but requires the family of the peer.
    let ip = match ip.is_unspecified() {
        true => unspecified(peer.ip().to_canonical().is_ipv6()).ip(),
        false => ip,
    };
    TcpStream::connect_from(net, SocketAddr::new(ip, local.port()), peer, options)
}

/// Gives up the kernel socket's port after an attempt to connect was refused, if the application did
/// not choose the port: another socket may be bound to it then, as at the kernel.
pub(crate) fn release_unchosen_port(fd: i32) {
    let has_port = |local: SocketAddr| local.port() != 0 && !local.ip().is_unspecified();
    // On the kernel's addresses a peer could reach the socket while it listens.
    if !runtime::uses_kernel_addresses() && raw::kernel_local_address(fd).is_some_and(has_port) {
        options::release_unchosen_port(fd);
    }
}

/// Connects a TCP socket again whose last attempt failed.
///
/// # Errors
/// As [`on_connect`].
pub(crate) fn reconnect(fd: i32, old: &Socket, peer: SocketAddr) -> io::Result<InUse<Arc<Socket>>> {
    // The kernel socket is still bound as it was for the first attempt.
    let local = raw::kernel_local_address(fd).unwrap_or_else(|| unspecified(old.is_v6));
    check_families(old.is_v6, old.is_v6_only(), local.ip(), peer.ip())?;
    let stream = start_connect(fd, old.net, local, peer, old.is_v6)?;
    let endpoint = Endpoint::Stream(Stream::new(stream, true));
    match install(fd, Socket::new(old.net, endpoint, old.is_v6, false)) {
        MoveOutcome::Tidegate(socket) => Ok(socket),
        MoveOutcome::Kernel => Err(io::Error::from_raw_os_error(libc::EBADF)),
    }
}

/// Address to bind a UDP socket to. The kernel first assigns a port to an unbound socket, so
/// that the port is the same at the kernel and on Tidegate.
fn udp_bind_address(fd: i32, local: SocketAddr, is_v6: bool) -> SocketAddr {
    if local.port() != 0 {
        return SocketAddr::new(local.ip(), local.port());
    }
    SocketAddr::new(unspecified(is_v6).ip(), options::bind_any_port(fd, is_v6).unwrap_or(0))
}

/// Connects a UDP socket.
///
/// # Errors
/// As the stack reports them.
pub(crate) fn connect_udp(socket: &Socket, peer: SocketAddr) -> io::Result<()> {
    let Endpoint::Udp(udp) = &*socket.endpoint else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    udp.check_family(socket, Some(peer))?;
    udp.socket.connect(peer)?;
    udp.is_connected.store(true, std::sync::atomic::Ordering::Relaxed);
    Ok(())
}

/// Called before a UDP socket connects to `peer`. If the kernel serves `peer`, the socket
/// returns to the kernel with all its descriptors, and the result is true.
pub(crate) fn return_to_kernel(socket: &Arc<Socket>, peer: SocketAddr) -> bool {
    let Endpoint::Udp(udp) = &*socket.endpoint else { return false };
    if !udp.is_kernel_destination(socket, Some(peer)) {
        return false;
    }
    leave_to_kernel(socket);
    true
}

/// Ends listening: the descriptors of the listener are the kernel's again, where the socket does
/// not listen. Threads that wait for a connection return.
pub(crate) fn stop_listening(socket: &Arc<Socket>, listener: &Listener) {
    leave_to_kernel(socket);
    listener.listener.close();
}

/// Ends a connection (`connect` to an address of no family): the peer gets a reset, and the
/// descriptors are the kernel's again, where the socket is not connected.
pub(crate) fn disconnect_stream(socket: &Arc<Socket>, stream: &Stream) {
    stream.stream.set_reset_on_close(true);
    leave_to_kernel(socket);
}

/// Gives all descriptors of a socket back to the kernel.
pub(crate) fn leave_to_kernel(socket: &Arc<Socket>) {
    let is_this = |&fd: &i32| fd_table::socket(fd).is_some_and(|other| Arc::ptr_eq(&other, socket));
    for fd in fd_table::range(0, u32::MAX).filter(is_this) {
        epoll::on_returned(fd, socket);
        fd_table::remove(fd);
    }
}

/// Called when a kernel UDP socket sends to `peer`. A socket that is bound to a port which
/// does not move stays at the kernel.
///
/// # Errors
/// The rules move the socket, but Tidegate cannot take it.
pub(crate) fn on_send(fd: i32, local: SocketAddr, peer: SocketAddr) -> io::Result<MoveOutcome> {
    let _signal_guard = SignalGuard::enter();
    let Some(net) = stack_for(peer)? else { return Ok(MoveOutcome::Kernel) };
    let Some((Protocol::Udp, is_v6)) = options::protocol_and_family(fd) else {
        return Ok(MoveOutcome::Kernel);
    };
    let may_move = local.port() == 0
        || runtime::rules().is_some_and(|rules| rules.moves_listener(Protocol::Udp, local));
    if !may_move || is_loopback(local.ip()) || !has_address(net, Protocol::Udp, local) {
        return Ok(MoveOutcome::Kernel);
    }
    move_udp(fd, net, local, is_v6)
}
