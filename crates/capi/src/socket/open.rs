//! Binding, listening, connecting and accepting.

use std::io;
use std::net::{Shutdown, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use tidegate::{TcpListener, TcpState, TcpStream, UdpSocket};
use tidegate_posix::families::check_families;
use tidegate_posix::unreachable::with_unreachable_reason;

use super::{Endpoint, IoDirection, Protocol, Socket, os_error};

/// Longest accept queue, as the kernel's `somaxconn`.
const MAX_BACKLOG: usize = 4096;

fn to_stack_address(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

impl Socket {
    /// Checks that an address is of a family that the socket can be bound to.
    fn check_local_family(&self, local: SocketAddr) -> io::Result<()> {
        let is_mapped = local.is_ipv6() && local.ip().to_canonical().is_ipv4();
        match local.is_ipv6() == self.is_v6 {
            false if self.is_v6 => Err(os_error(libc::EINVAL)),
            false => Err(os_error(libc::EAFNOSUPPORT)),
            true if is_mapped && self.settings().v6_only => Err(os_error(libc::EINVAL)),
            true => Ok(()),
        }
    }

    /// Binds the socket.
    ///
    /// # Errors
    /// As `bind`.
    pub(crate) fn bind(self: &Arc<Self>, local: SocketAddr) -> io::Result<()> {
        self.check_local_family(local)?;
        if self.endpoint().is_some() || self.settings().bound.is_some() {
            return Err(os_error(libc::EINVAL));
        }
        match self.protocol {
            Protocol::Udp => self.open_udp(local),
            Protocol::Tcp => {
                // The stack takes the port when the socket listens or connects: here it only says
                // whether the port is free, and chooses one.
                let options = self.settings().tcp_options(self.is_v6);
                let probe = TcpListener::bind_with(&self.net, to_stack_address(local), 1, options)?;
                let port = probe.local_addr()?.port();
                self.settings().bound = Some(SocketAddr::new(local.ip(), port));
                Ok(())
            }
        }
    }

    fn open_udp(self: &Arc<Self>, local: SocketAddr) -> io::Result<()> {
        let options = self.settings().udp_options(self.is_v6);
        let udp = UdpSocket::bind_with(&self.net, to_stack_address(local), options)?;
        self.open(Endpoint::Udp(udp))
    }

    /// UDP socket, bound to a port that the stack chooses if the program has not bound it.
    ///
    /// # Errors
    /// As `bind`; `EOPNOTSUPP` for TCP.
    pub(crate) fn udp(self: &Arc<Self>) -> io::Result<&UdpSocket> {
        if self.protocol == Protocol::Udp && self.endpoint().is_none() {
            // Another thread may be first.
            let opened = self.open_udp(self.unspecified());
            if self.endpoint().is_none() {
                opened?;
            }
        }
        match self.endpoint() {
            Some(Endpoint::Udp(udp)) => Ok(udp),
            _ => Err(os_error(libc::EOPNOTSUPP)),
        }
    }

    /// Listens for connections.
    ///
    /// # Errors
    /// As `listen`.
    pub(crate) fn listen(self: &Arc<Self>, backlog: i32) -> io::Result<()> {
        match (self.protocol, self.endpoint()) {
            (Protocol::Udp, _) => return Err(os_error(libc::EOPNOTSUPP)),
            // The length of the accept queue stays as it is.
            (_, Some(Endpoint::Listener(_))) => return Ok(()),
            (_, Some(_)) => return Err(os_error(libc::EINVAL)),
            (_, None) => {}
        }
        let (local, options) = {
            let settings = self.settings();
            let local = settings.bound.unwrap_or_else(|| self.unspecified());
            (local, settings.tcp_options(self.is_v6))
        };
        let backlog = usize::try_from(backlog).unwrap_or(MAX_BACKLOG).clamp(1, MAX_BACKLOG);
        let local = to_stack_address(local);
        let listener = TcpListener::bind_with(&self.net, local, backlog, options)?;
        self.open(Endpoint::Listener(listener))
    }

    /// Accepts the connection that has waited longest; returns it with the peer's address.
    ///
    /// # Errors
    /// As `accept`.
    pub(crate) fn accept(&self) -> io::Result<(Arc<Self>, SocketAddr)> {
        let listener = match self.endpoint() {
            Some(Endpoint::Listener(listener)) => listener,
            _ if self.protocol == Protocol::Udp => return Err(os_error(libc::EOPNOTSUPP)),
            _ => return Err(os_error(libc::EINVAL)),
        };
        let (stream, peer) = self.retry_until_ready(IoDirection::Read, true, || {
            match self.net.batch(|batch| batch.accept(listener))? {
                // Another thread has shut the listener down.
                Err(error) if error.kind() == io::ErrorKind::NotConnected => {
                    Err(os_error(libc::EINVAL))
                }
                accepted => accepted,
            }
        })?;
        let accepted = self.open_accepted(stream)?;
        let peer = accepted.to_program_family(peer);
        Ok((accepted, peer))
    }

    /// Socket of a connection that the listener has accepted.
    ///
    /// # Errors
    /// None in a new socket.
    pub(crate) fn open_accepted(&self, stream: TcpStream) -> io::Result<Arc<Self>> {
        let settings = self.settings().accepted();
        stream.set_reset_on_close(settings.resets_on_close());
        let mut accepted = Self::new(&self.net, Protocol::Tcp, self.is_v6);
        accepted.settings = settings.into();
        let accepted = Arc::new(accepted);
        accepted.open(Endpoint::Stream(stream))?;
        Ok(accepted)
    }

    /// Connects to a peer; `None` undoes the connection of a UDP socket. Returns false if the
    /// attempt has failed before and a new socket must take the place of this one.
    ///
    /// # Errors
    /// As `connect`.
    pub(crate) fn connect(self: &Arc<Self>, peer: Option<SocketAddr>) -> io::Result<bool> {
        if self.protocol == Protocol::Udp {
            let udp = self.udp()?;
            let Some(peer) = peer else { return udp.disconnect().map(|()| true) };
            let local = udp.local_addr()?.ip();
            check_families(self.is_v6, self.settings().v6_only, local, peer.ip())?;
            return udp.connect(to_stack_address(peer)).map(|()| true);
        }
        let Some(peer) = peer else { return Err(os_error(libc::EAFNOSUPPORT)) };
        match self.endpoint() {
            Some(Endpoint::Stream(stream)) => {
                if self.has_never_connected.load(Ordering::Relaxed) {
                    return Ok(false);
                }
                if !self.is_connecting.load(Ordering::Relaxed) {
                    return Err(os_error(libc::EISCONN));
                }
                if self.is_nonblocking() {
                    return match self.finish_connect(stream) {
                        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                            Err(os_error(libc::EALREADY))
                        }
                        result => result.map(|()| true),
                    };
                }
            }
            Some(_) => return Err(os_error(libc::EISCONN)),
            None => {
                self.start_connect(peer)?;
                // Although the peer may have answered already, as at the kernel.
                if self.is_nonblocking() {
                    return Err(os_error(libc::EINPROGRESS));
                }
            }
        }
        self.wait_connected().map(|()| true)
    }

    /// Starts to connect a TCP socket; the caller learns the result and calls
    /// [`Socket::note_connected`].
    ///
    /// # Errors
    /// As `connect`; `EALREADY` for another attempt.
    pub(crate) fn begin_connect(self: &Arc<Self>, peer: SocketAddr) -> io::Result<()> {
        match self.endpoint() {
            None => self.start_connect(peer),
            Some(_) if self.is_connecting() => Err(os_error(libc::EALREADY)),
            Some(_) => Err(os_error(libc::EISCONN)),
        }
    }

    /// True while the program does not know the result of connecting.
    pub(crate) fn is_connecting(&self) -> bool {
        self.is_connecting.load(Ordering::Relaxed)
    }

    /// Notes that the program knows the result of connecting.
    pub(crate) fn note_connected(&self, is_success: bool) {
        self.is_connecting.store(false, Ordering::Relaxed);
        self.has_never_connected.store(!is_success, Ordering::Relaxed);
    }

    fn start_connect(self: &Arc<Self>, peer: SocketAddr) -> io::Result<()> {
        let (bound, options, v6_only, resets) = {
            let settings = self.settings();
            let options = settings.tcp_options(self.is_v6);
            (settings.bound, options, settings.v6_only, settings.resets_on_close())
        };
        let local = bound.unwrap_or_else(|| self.unspecified());
        check_families(self.is_v6, v6_only, local.ip(), peer.ip())?;
        let peer = to_stack_address(peer);
        let stream = match bound {
            Some(mut local) => {
                local = to_stack_address(local);
                if local.ip().is_unspecified() {
                    let source = self.net.source_for(peer.ip());
                    local.set_ip(source.ok_or(io::ErrorKind::NetworkUnreachable)?);
                }
                TcpStream::connect_from(&self.net, local, peer, options)
            }
            None => TcpStream::connect_nonblocking(&self.net, peer, options),
        }?;
        stream.set_reset_on_close(resets);
        self.is_connecting.store(true, Ordering::Relaxed);
        self.open(Endpoint::Stream(stream))
    }

    fn wait_connected(&self) -> io::Result<()> {
        let Some(stream) = self.stream() else { return Err(os_error(libc::EINVAL)) };
        let finished =
            self.retry_until_ready(IoDirection::Write, true, || self.finish_connect(stream));
        finished.map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => os_error(libc::EINPROGRESS),
            _ => error,
        })
    }

    /// Result of connecting.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] while the attempt is in progress; otherwise the cause of the
    /// failure.
    pub(super) fn finish_connect(&self, stream: &TcpStream) -> io::Result<()> {
        let finished = self.net.batch(|batch| batch.finish_connect(stream))?;
        let finished = finished.map_err(|error| with_unreachable_reason(stream, error));
        // Without an error the attempt has failed if the program took the error before.
        let is_aborted = finished.is_ok()
            && self.is_connecting.load(Ordering::Relaxed)
            && stream.info().is_ok_and(|info| info.state == TcpState::Closed);
        let finished = match is_aborted {
            true => Err(os_error(libc::ECONNABORTED)),
            false => finished,
        };
        if !matches!(&finished, Err(error) if error.kind() == io::ErrorKind::WouldBlock) {
            self.note_connected(finished.is_ok());
        }
        finished
    }

    /// New socket with the same options, without an endpoint: for another attempt to connect.
    pub(crate) fn renewed(&self) -> Arc<Self> {
        let mut renewed = Self::new(&self.net, self.protocol, self.is_v6);
        renewed.settings = self.settings().clone().into();
        renewed.set_nonblocking(self.is_nonblocking());
        renewed.receive_timeout.set(self.receive_timeout.get());
        renewed.send_timeout.set(self.send_timeout.get());
        Arc::new(renewed)
    }

    /// Closes directions.
    ///
    /// # Errors
    /// As `shutdown`.
    pub(crate) fn shutdown(self: &Arc<Self>, how: Shutdown) -> io::Result<()> {
        match self.endpoint() {
            Some(Endpoint::Listener(listener)) => {
                if how != Shutdown::Write {
                    listener.close();
                }
                Ok(())
            }
            Some(Endpoint::Stream(stream)) => {
                let was_connecting = self.is_connecting.load(Ordering::Relaxed);
                stream.shutdown(how)?;
                if was_connecting && self.is_unconnected() {
                    self.is_connecting.store(false, Ordering::Relaxed);
                }
                Ok(())
            }
            Some(Endpoint::Udp(udp)) => {
                udp.shutdown(how);
                // The kernel, too, closes the directions and fails.
                udp.peer_addr().map(|_| ()).map_err(|_| os_error(libc::ENOTCONN))
            }
            None => Err(os_error(libc::ENOTCONN)),
        }
    }

    /// Aborts the connection with RST when the socket is dropped.
    pub(crate) fn reset_on_close(&self) {
        if let Some(stream) = self.stream() {
            stream.set_reset_on_close(true);
        }
    }
}
