//! Execution of the commands of applications on the stack.

use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::sync::Arc;

use tidegate_device::sharded::PortSharing;
use tidegate_device::steering::TransportProtocol;
use tidegate_engine::{KernelPort, PortClaim};
use tidegate_stack::{Limits, Shutdown, TcpId, TcpInfo, TcpOptions, UdpOptions};

use super::server::SocketServer;
use crate::daemon::application::{Application, KernelSocket, ProtocolError};
use crate::daemon::ids::{AppNumber, SocketKey, StackSocketId};
use crate::daemon::socket::{AppSocket, SocketKind};
use crate::ipc::command::{Command, Handle, Tag};
use crate::ipc::layout::SharedMemory;
use crate::ipc::notification::{AddressInfo, Notification, OpenedSocket};
use crate::ipc::share_group::port_sharing;

/// Maximum accept backlog of one listener, in connections.
const MAX_BACKLOG: u32 = 65_535;
/// User who may bind every port.
const ROOT: u32 = 0;
/// Minimum of the keepalive times that an application may set, as at the kernel. Without minimum a
/// connection would probe at every answer of its peer.
const MIN_KEEPALIVE_MS: u32 = 1000;

impl SocketServer {
    /// Socket that an application holds under this handle.
    fn socket_mut(&mut self, app: &Application, handle: Handle) -> Option<&mut AppSocket> {
        self.sockets.get_mut(app.key(handle)?)
    }

    /// Executes a command. Returns the socket to poll next, if any.
    pub(super) fn execute(
        &mut self,
        number: AppNumber,
        app: &mut Application,
        command: Command,
    ) -> Result<Option<SocketKey>, ProtocolError> {
        let (tag, outcome) = match command {
            Command::Poll(handle) => return Ok(app.key(handle)),
            Command::Shutdown { socket, how } => {
                self.shut_down(app, socket, how);
                return Ok(app.key(socket));
            }
            Command::SetOptions { socket, options } => {
                self.set_options(app, socket, limited(options));
                // A larger send buffer may have space.
                return Ok(app.key(socket));
            }
            Command::SetUdpOptions { socket, options } => {
                self.set_udp_options(app, socket, options);
                return Ok(None);
            }
            Command::Close { socket, reset_on_close } => {
                return Ok(self.close(number, app, socket, reset_on_close));
            }
            Command::LookUpAddress { tag, address } => {
                let (stack, _, now_ns) = self.engine.parts();
                let is_local = stack.has_address(address);
                let info = AddressInfo {
                    is_local,
                    is_broadcast: !is_local && stack.has_datagram_address(address),
                    path_mtu: u16::try_from(stack.path_mtu(now_ns, address)).unwrap_or(u16::MAX),
                    source: stack.source_for(address),
                };
                app.answer(Notification::AddressInfo { tag, info })?;
                return Ok(None);
            }
            Command::TcpInfo { tag, socket } => {
                let notice = match self.tcp_info(app, socket) {
                    Some(info) => {
                        app.answer(Notification::TcpTraffic(info.traffic))?;
                        Notification::TcpInfo { tag, info }
                    }
                    None => Notification::Reply { tag, outcome: Err(ErrorKind::NotConnected) },
                };
                app.answer(notice)?;
                return Ok(None);
            }
            Command::Ping { tag: None } => return Ok(None),
            Command::Ping { tag: Some(tag) } => {
                app.answer(Notification::Pong { tag, commands: app.commands.taken() })?;
                return Ok(None);
            }
            Command::Bind { tag, local, share_group, options } => {
                let (reuse_port, owner) =
                    port_sharing(share_group, options.reuse_port, app.identity.uid);
                let options = limited_udp(options.reuse_port(reuse_port).owner(owner));
                (tag, self.bind(number, app, local, options))
            }
            Command::ConnectUdp { tag, socket, peer } => (tag, self.connect_udp(app, socket, peer)),
            Command::Listen { tag, local, backlog, share_group, options } => {
                let (reuse_port, owner) =
                    port_sharing(share_group, options.reuse_port, app.identity.uid);
                let options = limited(options.reuse_port(reuse_port).owner(owner));
                (tag, self.listen(number, app, local, backlog, options))
            }
            Command::Accept { tag, listener } => (tag, self.accept(number, app, listener)),
            Command::ConnectTcp { tag, local, remote, options } => {
                (tag, self.connect(number, app, local, remote, limited(options)))
            }
        };
        answer(app, tag, outcome)
    }

    /// Checks the quotas for one more bound port.
    fn check_port_quota(&self, app: &Application) -> io::Result<()> {
        check_space(app)?;
        if app.max_ports == u32::MAX {
            return Ok(());
        }
        let is_bound = |socket: &&AppSocket| !matches!(socket.kind, SocketKind::Stream(_));
        let all = app.sockets().filter_map(|(_, key)| self.sockets.get(key));
        let bound = all.filter(is_bound).count();
        if bound < app.max_ports as usize { Ok(()) } else { Err(ErrorKind::QuotaExceeded.into()) }
    }

    fn granted(&self, key: SocketKey) -> io::Result<OpenedSocket> {
        let socket = self.sockets.get(key).ok_or(ErrorKind::NotConnected)?;
        Ok(OpenedSocket {
            handle: socket.handle,
            local: socket.local_addr(&self.engine),
            peer: socket.peer_addr(&self.engine),
        })
    }

    fn bind(
        &mut self,
        number: AppNumber,
        app: &mut Application,
        local: SocketAddr,
        options: UdpOptions,
    ) -> io::Result<OpenedSocket> {
        self.check_port_quota(app)?;
        let id = self.engine.parts().0.udp_bind(local, options)?;
        let local = self.engine.stack().udp_local_addr(id).unwrap_or(local);
        let (port, dual) = (self.engine.device(), options.dual_stack);
        let kernel_socket = app.kernel_sockets.take(TransportProtocol::Udp, local, dual);
        let kernel_port = kernel_port(app, kernel_socket);
        let claim = self.claims.claim(port, TransportProtocol::Udp, local, dual, kernel_port);
        let sharing = PortSharing::new(options.reuse_port, options.owner);
        let claim = claim.and_then(|claim| {
            self.claim_among_cores(TransportProtocol::Udp, local, sharing, claim)
        });
        let claim = claim.inspect_err(|_| self.close_udp(id))?;
        let make = |memory: &SharedMemory, handle| {
            Ok(AppSocket::udp(memory, handle, id)?.with_claim(claim))
        };
        let key = self.add_socket(number, app, make).inspect_err(|_| self.close_udp(id))?;
        self.socket_index.insert(StackSocketId::Udp(id), key);
        self.set_port_program(&app.identity, key);
        self.granted(key)
    }

    fn connect_udp(
        &mut self,
        app: &mut Application,
        handle: Handle,
        peer: Option<SocketAddr>,
    ) -> io::Result<OpenedSocket> {
        let key = app.key(handle).ok_or(ErrorKind::NotConnected)?;
        let socket = self.sockets.get(key).ok_or(ErrorKind::NotConnected)?;
        let SocketKind::Udp(datagrams) = &socket.kind else {
            return Err(ErrorKind::InvalidInput.into());
        };
        let (stack, _, _) = self.engine.parts();
        match peer {
            Some(peer) => stack.udp_connect(datagrams.id, peer)?,
            None => stack.udp_disconnect(datagrams.id)?,
        }
        self.granted(key).map(|granted| OpenedSocket { handle, ..granted })
    }

    fn listen(
        &mut self,
        number: AppNumber,
        app: &mut Application,
        local: SocketAddr,
        backlog: u32,
        options: TcpOptions,
    ) -> io::Result<OpenedSocket> {
        self.check_port_quota(app)?;
        let (port, dual) = (self.engine.device(), options.dual_stack);
        let kernel_socket = app.kernel_sockets.take(TransportProtocol::Tcp, local, dual);
        let share = kernel_socket.as_ref().map(|socket| (socket.cookie, socket.shard));
        let kernel_port = kernel_port(app, kernel_socket);
        let claim = self.claims.claim(port, TransportProtocol::Tcp, local, dual, kernel_port)?;
        let local = claim.as_ref().map_or(local, |claim| claim.local());
        let backlog = backlog.clamp(1, MAX_BACKLOG) as usize;
        let made = self.engine.parts().0.tcp_listen(local, backlog, options);
        let id = match made {
            Ok(id) => id,
            Err(error) => {
                self.release_claim(claim);
                return Err(error.into());
            }
        };
        let claimed = match self.engine.stack().tcp_listener_addr(id) {
            Some(local) => {
                let sharing = PortSharing::new(options.reuse_port, options.owner);
                self.claim_among_cores(TransportProtocol::Tcp, local, sharing, claim)
            }
            None => Ok(claim),
        };
        let claim = claimed.inspect_err(|_| self.close_listener(id))?;
        let make = |memory: &SharedMemory, handle| {
            Ok(AppSocket::listener(memory, handle, id)?.with_claim(claim))
        };
        let key = self.add_socket(number, app, make).inspect_err(|_| self.close_listener(id))?;
        self.socket_index.insert(StackSocketId::Listener(id), key);
        self.set_port_program(&app.identity, key);
        if let Some((cookie, shard)) = share {
            self.transfers.share_listener(app, key, cookie, shard);
        }
        self.granted(key)
    }

    fn accept(
        &mut self,
        number: AppNumber,
        app: &mut Application,
        listener: Handle,
    ) -> io::Result<OpenedSocket> {
        check_space(app)?;
        let key = app.key(listener).ok_or(ErrorKind::NotConnected)?;
        let socket = self.sockets.get_mut(key).ok_or(ErrorKind::NotConnected)?;
        let SocketKind::Listener(from) = socket.kind else {
            return Err(ErrorKind::InvalidInput.into());
        };
        let claim = socket.claim().cloned();
        let accepted = self.engine.parts().0.tcp_accept(from);
        // The accept level is reported in any case.
        let acceptable = self.engine.stack().tcp_acceptable(from) > 0;
        let mut status = socket.status;
        status.accept_ready = acceptable;
        socket.set_status(status);
        self.add_connection(number, app, accepted?, claim)
    }

    fn connect(
        &mut self,
        number: AppNumber,
        app: &mut Application,
        local: Option<SocketAddr>,
        remote: SocketAddr,
        options: TcpOptions,
    ) -> io::Result<OpenedSocket> {
        check_space(app)?;
        let kernel_socket =
            local.and_then(|local| app.kernel_sockets.take(TransportProtocol::Tcp, local, false));
        let kernel_port = kernel_port(app, kernel_socket);
        let claim = self.claims.claim_for_peer(self.engine.device(), local, remote, kernel_port)?;
        let local = claim.as_ref().map(|claim| claim.local()).or(local);
        let (stack, arena, now_ns) = self.engine.parts();
        let id = match stack.tcp_connect(now_ns, arena, local, remote, options) {
            Ok(id) => id,
            Err(error) => {
                self.release_claim(claim);
                return Err(error.into());
            }
        };
        let claimed = match self.engine.stack().tcp_local_addr(id) {
            Some(local) => {
                self.claim_among_cores(TransportProtocol::Tcp, local, PortSharing::Exclusive, claim)
            }
            None => Ok(claim),
        };
        let claim = claimed.inspect_err(|_| self.end_stream(id, true, None))?;
        self.add_connection(number, app, id, claim)
    }

    /// Creates an application's socket for a connection of the stack.
    fn add_connection(
        &mut self,
        number: AppNumber,
        app: &mut Application,
        id: TcpId,
        claim: Option<Arc<PortClaim>>,
    ) -> io::Result<OpenedSocket> {
        let make = |memory: &SharedMemory, handle| AppSocket::stream(memory, handle, id);
        let key = match self.add_socket(number, app, make) {
            Ok(key) => key,
            Err(error) => {
                self.end_stream(id, true, claim);
                return Err(error);
            }
        };
        self.socket_index.insert(StackSocketId::Stream(id), key);
        self.set_port_program(&app.identity, key);
        self.sockets.set_claim(key, claim);
        if let Some(socket) = self.sockets.get_mut(key) {
            // Data received so far is there before the application learns of the connection. It has
            // written nothing yet.
            let _ = socket.poll(&mut self.engine, 0);
        }
        self.granted(key)
    }

    fn shut_down(&mut self, app: &Application, handle: Handle, how: Shutdown) {
        let Self { engine, sockets, .. } = self;
        let socket = app.key(handle).and_then(|key| sockets.get_mut(key));
        let Some(SocketKind::Stream(stream)) = socket.map(|socket| &mut socket.kind) else {
            return;
        };
        if how != Shutdown::Write {
            let (stack, arena, now_ns) = engine.parts();
            // A closed connection needs no shutdown.
            let _ = stack.tcp_shutdown(now_ns, arena, stream.id, Shutdown::Read);
        }
        stream.shutdown_pending |= how != Shutdown::Read;
    }

    fn set_options(&mut self, app: &Application, handle: Handle, options: TcpOptions) {
        let Some(socket) = app.key(handle).and_then(|key| self.sockets.get(key)) else { return };
        let (stack, arena, now_ns) = self.engine.parts();
        // A closed connection has no options.
        let _ = match &socket.kind {
            SocketKind::Stream(stream) => stack.tcp_set_options(now_ns, arena, stream.id, options),
            SocketKind::Listener(id) => stack.tcp_set_listener_options(*id, options),
            SocketKind::Udp(_) => Ok(()),
        };
    }

    fn set_udp_options(&mut self, app: &Application, handle: Handle, options: UdpOptions) {
        let Some(socket) = app.key(handle).and_then(|key| self.sockets.get(key)) else { return };
        if let SocketKind::Udp(datagrams) = &socket.kind {
            // The socket is open.
            let _ = self.engine.parts().0.udp_set_options(datagrams.id, limited_udp(options));
        }
    }

    fn tcp_info(&self, app: &Application, handle: Handle) -> Option<TcpInfo> {
        match &self.sockets.get(app.key(handle)?)?.kind {
            SocketKind::Stream(stream) => self.engine.stack().tcp_info(stream.id),
            _ => None,
        }
    }

    /// Closes a socket. Returns its key if it must be polled.
    fn close(
        &mut self,
        number: AppNumber,
        app: &mut Application,
        handle: Handle,
        abrupt: bool,
    ) -> Option<SocketKey> {
        let key = app.key(handle)?;
        let socket = self.socket_mut(app, handle)?;
        if socket.holders().len() > 1 {
            self.leave_socket(number, app, key);
            return Some(key);
        }
        self.close_unshared(key, abrupt)
    }
}

/// Options of an application, within the limits of the daemon.
fn limited(mut options: TcpOptions) -> TcpOptions {
    if let Some(keepalive) = &mut options.keepalive {
        keepalive.idle_ms = keepalive.idle_ms.max(MIN_KEEPALIVE_MS);
        keepalive.interval_ms = keepalive.interval_ms.max(MIN_KEEPALIVE_MS);
        keepalive.probes = keepalive.probes.max(1);
    }
    options
}

/// UDP options of an application: its queue may be shorter than that of others, but not longer.
fn limited_udp(options: UdpOptions) -> UdpOptions {
    let max_bytes = Limits::default().socket_queue_bytes;
    let queue_bytes = options.queue_bytes.map(|bytes| bytes.min(max_bytes));
    options.queue_bytes(queue_bytes)
}

/// Right of an application to a port: the kernel socket that it has bound, or its user.
fn kernel_port(app: &Application, kernel_socket: Option<KernelSocket>) -> KernelPort {
    match kernel_socket {
        Some(KernelSocket { socket, port, .. }) => KernelPort::Held(Arc::new(socket), port),
        None if app.identity.uid == ROOT => KernelPort::Own,
        None => KernelPort::Unprivileged,
    }
}

fn check_space(app: &Application) -> io::Result<()> {
    if app.has_space() { Ok(()) } else { Err(ErrorKind::QuotaExceeded.into()) }
}

/// Answers a command. Returns the granted socket, which must be polled.
fn answer(
    app: &mut Application,
    tag: Tag,
    outcome: io::Result<OpenedSocket>,
) -> Result<Option<SocketKey>, ProtocolError> {
    let key = outcome.as_ref().ok().and_then(|granted| app.key(granted.handle));
    let outcome = outcome.map_err(|error| error.kind());
    app.answer(Notification::Reply { tag, outcome })?;
    Ok(key)
}

#[cfg(test)]
mod tests {
    use tidegate_stack::Keepalive;

    use super::*;

    #[test]
    fn keepalive_times_have_a_minimum() {
        let with = |keepalive| TcpOptions::default().keepalive(keepalive);
        let zero = Keepalive::default().idle_ms(0).interval_ms(0).probes(0);
        let min = Keepalive::default().idle_ms(1000).interval_ms(1000).probes(1);
        let long = Keepalive::default().idle_ms(7_200_000).interval_ms(75_000).probes(9);
        for (set, used) in [(zero, min), (min, min), (long, long)] {
            assert_eq!(limited(with(Some(set))), with(Some(used)));
        }
        assert_eq!(limited(with(None)), with(None));
    }
}
