//! Meaning of the socket calls on the stack. A call that would block returns `EAGAIN`.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{FromRawFd, OwnedFd};

use tidegate_stack::{Shutdown, TcpError, TcpId, TcpState};

use crate::errno::{self, Errno};
use crate::host::{Endpoint, Socket, VirtualHost};

/// Result of a call: its return value or an error number.
pub type Outcome = Result<i64, Errno>;

impl VirtualHost {
    /// The socket behind a descriptor.
    pub fn socket(&mut self, fd: i32) -> Result<&mut Socket, Errno> {
        self.sockets.get_mut(&fd).ok_or(libc::EBADF)
    }

    fn connection(&mut self, fd: i32) -> Result<TcpId, Errno> {
        match self.socket(fd)?.endpoint {
            Endpoint::Connection(id) => Ok(id),
            Endpoint::Unconnected | Endpoint::Listener(_) => Err(libc::ENOTCONN),
        }
    }

    /// `socket`.
    pub fn open(&mut self, domain: i32, kind: i32, protocol: i32) -> Outcome {
        let flags = libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
        if !matches!(domain, libc::AF_INET | libc::AF_INET6) {
            return Err(libc::EAFNOSUPPORT);
        }
        if kind & !flags != libc::SOCK_STREAM || !matches!(protocol, 0 | libc::IPPROTO_TCP) {
            return Err(libc::EPROTONOSUPPORT);
        }
        let socket = self.new_socket(domain, kind & libc::SOCK_NONBLOCK != 0);
        Ok(self.add_socket(socket).into())
    }

    /// `bind`.
    pub fn bind(&mut self, fd: i32, address: SocketAddr) -> Outcome {
        let is_local = address.ip().is_unspecified() || self.stack.has_address(address.ip());
        let socket = self.socket(fd)?;
        if socket.local.is_some() {
            return Err(libc::EINVAL);
        }
        if !is_local {
            return Err(libc::EADDRNOTAVAIL);
        }
        socket.local = Some(address);
        Ok(0)
    }

    /// `listen`.
    pub fn listen(&mut self, fd: i32, backlog: i32) -> Outcome {
        let socket = self.socket(fd)?;
        match socket.endpoint {
            Endpoint::Listener(_) => return Ok(0),
            Endpoint::Connection(_) => return Err(libc::EINVAL),
            Endpoint::Unconnected => {}
        }
        let unspecified: IpAddr = match socket.domain {
            libc::AF_INET => Ipv4Addr::UNSPECIFIED.into(),
            _ => Ipv6Addr::UNSPECIFIED.into(),
        };
        let local = socket.local.unwrap_or_else(|| SocketAddr::new(unspecified, 0));
        let options = socket.options;
        let backlog = backlog.max(1) as usize;
        let id = self.stack.tcp_listen(local, backlog, options).map_err(errno::of)?;
        self.socket(fd)?.endpoint = Endpoint::Listener(id);
        Ok(0)
    }

    /// `accept`: the new descriptor and the peer's address.
    pub fn accept(&mut self, fd: i32) -> Result<(i32, SocketAddr), Errno> {
        let listener = self.socket(fd)?.clone();
        let Endpoint::Listener(id) = listener.endpoint else { return Err(libc::EINVAL) };
        let connection = self.stack.tcp_accept(id).map_err(errno::of)?;
        let peer = self.stack.tcp_peer_addr(connection).ok_or(libc::ECONNABORTED)?;
        let options = self.stack.tcp_options(connection).unwrap_or(listener.options);
        let endpoint = Endpoint::Connection(connection);
        let fd = self.add_socket(Socket { endpoint, options, non_blocking: false, ..listener });
        self.collect();
        Ok((fd, peer))
    }

    /// `connect`. `EAGAIN` stands for a connection in progress.
    pub fn connect(&mut self, fd: i32, remote: SocketAddr) -> Outcome {
        let socket = self.socket(fd)?;
        let (local, options) = (socket.local, socket.options);
        let id = match socket.endpoint {
            Endpoint::Listener(_) => return Err(libc::EISCONN),
            Endpoint::Connection(id) => {
                let was_connecting = socket.connecting;
                return self.connect_result(fd, id, was_connecting);
            }
            Endpoint::Unconnected => {
                let now_ns = self.now_ns;
                self.stack.tcp_connect(now_ns, &mut self.arena, local, remote, options)
            }
        };
        let id = id.map_err(errno::of)?;
        let socket = self.socket(fd)?;
        (socket.endpoint, socket.connecting) = (Endpoint::Connection(id), true);
        self.collect();
        Err(libc::EAGAIN)
    }

    /// Result of a connection that was begun before.
    fn connect_result(&mut self, fd: i32, id: TcpId, was_connecting: bool) -> Outcome {
        let is_opening = self
            .stack
            .tcp_state(id)
            .is_some_and(|state| matches!(state, TcpState::SynSent | TcpState::SynReceived));
        if is_opening {
            return Err(libc::EAGAIN);
        }
        self.socket(fd)?.connecting = false;
        if let Some(error) = self.stack.tcp_take_error(id) {
            self.socket(fd)?.failed = true;
            return Err(errno::of(error));
        }
        if was_connecting { Ok(0) } else { Err(libc::EISCONN) }
    }

    /// `read` and its kin: as many bytes as are there.
    pub fn receive_bytes(&mut self, fd: i32, buf: &mut [u8], flags: i32) -> Outcome {
        let id = self.connection(fd)?;
        let state = self.stack.tcp_state(id);
        if matches!(state, Some(TcpState::SynSent | TcpState::SynReceived)) {
            return Err(libc::EAGAIN);
        }
        let now_ns = self.now_ns;
        let result = match flags & libc::MSG_PEEK != 0 {
            true => self.stack.tcp_peek(id, buf),
            false => self.stack.tcp_recv(now_ns, &mut self.arena, id, buf),
        };
        self.collect();
        match result {
            Ok(count) => Ok(count as i64),
            // The error was reported before.
            Err(TcpError::NotConnected | TcpError::Closed) if self.socket(fd)?.failed => Ok(0),
            Err(error) => self.report(fd, error),
        }
    }

    /// `write` and its kin: as many bytes as the send buffer takes.
    pub fn send_bytes(&mut self, fd: i32, data: &[u8]) -> Outcome {
        let id = self.connection(fd).map_err(|errno| match errno {
            libc::ENOTCONN => libc::EPIPE,
            other => other,
        })?;
        let state = self.stack.tcp_state(id);
        if matches!(state, Some(TcpState::SynSent | TcpState::SynReceived)) {
            return Err(libc::EAGAIN);
        }
        let now_ns = self.now_ns;
        let result = self.stack.tcp_send(now_ns, &mut self.arena, id, data);
        self.collect();
        match result {
            Ok(count) => Ok(count as i64),
            Err(TcpError::NotConnected | TcpError::Closed) => Err(libc::EPIPE),
            Err(error) => self.report(fd, error),
        }
    }

    fn report(&mut self, fd: i32, error: TcpError) -> Outcome {
        if error != TcpError::WouldBlock {
            self.socket(fd)?.failed = true;
        }
        Err(errno::of(error))
    }

    /// `shutdown`.
    pub fn shut_down(&mut self, fd: i32, how: i32) -> Outcome {
        let how = match how {
            libc::SHUT_RD => Shutdown::Read,
            libc::SHUT_WR => Shutdown::Write,
            libc::SHUT_RDWR => Shutdown::Both,
            _ => return Err(libc::EINVAL),
        };
        let id = self.connection(fd)?;
        let now_ns = self.now_ns;
        let result = self.stack.tcp_shutdown(now_ns, &mut self.arena, id, how);
        self.collect();
        result.map(|()| 0).map_err(errno::of)
    }

    /// `close`.
    pub fn close(&mut self, fd: i32) -> Outcome {
        let socket = self.sockets.remove(&fd).ok_or(libc::EBADF)?;
        // SAFETY: the descriptor was opened for this socket and is closed once.
        drop(unsafe { OwnedFd::from_raw_fd(fd) });
        let (now_ns, arena) = (self.now_ns, &mut self.arena);
        match socket.endpoint {
            Endpoint::Unconnected => {}
            Endpoint::Listener(id) => self.stack.tcp_close_listener(now_ns, arena, id),
            Endpoint::Connection(id) if socket.resets_on_close => {
                self.stack.tcp_abort(now_ns, arena, id);
            }
            Endpoint::Connection(id) => self.stack.tcp_close(now_ns, arena, id),
        }
        self.collect();
        Ok(0)
    }

    /// `fcntl` with the status flags.
    pub fn control(&mut self, fd: i32, command: i32, argument: i32) -> Outcome {
        let socket = self.socket(fd)?;
        match command {
            libc::F_GETFL => {
                let flags = if socket.non_blocking { libc::O_NONBLOCK } else { 0 };
                Ok((libc::O_RDWR | flags).into())
            }
            libc::F_SETFL => {
                socket.non_blocking = argument & libc::O_NONBLOCK != 0;
                Ok(0)
            }
            libc::F_GETFD | libc::F_SETFD => Ok(0),
            _ => Err(libc::EINVAL),
        }
    }

    /// `ioctl` for the bytes in the queues.
    pub fn queue_bytes(&mut self, fd: i32, request: u64) -> Outcome {
        let id = self.connection(fd)?;
        let info = self.stack.tcp_info(id).ok_or(libc::EINVAL)?;
        match request {
            libc::FIONREAD => Ok(info.unread_bytes.into()),
            libc::TIOCOUTQ => Ok(info.unacknowledged_bytes.into()),
            _ => Err(libc::ENOTTY),
        }
    }

    /// Events of `poll` that are true now.
    pub fn ready_events(&mut self, fd: i32) -> i16 {
        let Some(socket) = self.sockets.get(&fd) else { return libc::POLLNVAL };
        match socket.endpoint {
            Endpoint::Unconnected => libc::POLLOUT | libc::POLLHUP,
            Endpoint::Listener(id) if self.stack.tcp_acceptable(id) > 0 => libc::POLLIN,
            Endpoint::Listener(_) => 0,
            Endpoint::Connection(id) => {
                let ready = self.stack.tcp_readiness(id);
                let all_closed = ready.read_closed && ready.write_closed;
                [
                    (ready.readable, libc::POLLIN | libc::POLLRDNORM),
                    (ready.writable, libc::POLLOUT | libc::POLLWRNORM),
                    (ready.read_closed, libc::POLLRDHUP),
                    (all_closed, libc::POLLHUP),
                    (ready.failed, libc::POLLERR),
                ]
                .into_iter()
                .filter(|&(is_true, _)| is_true)
                .fold(0, |events, (_, event)| events | event)
            }
        }
    }
}
