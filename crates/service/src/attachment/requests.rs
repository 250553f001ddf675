//! Requests to the daemon that wait for a reply.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use tidegate_memory::shared::PeerError;
use tidegate_stack::{TcpInfo, TcpOptions, UdpOptions};

use super::socket::{AttachedSocket, SocketType};
use super::{Attachment, Reply, daemon_exited_error};
use crate::ipc::command::{Command, Handle, Tag};
use crate::ipc::notification::{AddressInfo, OpenedSocket};
use crate::ipc::share_group::ShareGroupId;

/// Time to busy-poll before sleeping. A daemon on a core of its own replies within this time.
const BUSY_POLL_TIME: Duration = Duration::from_micros(20);

/// Longest sleep for a reply before its time-out is checked.
const REPLY_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Maximum number of cached address lookups.
const MAX_CACHED_ADDRESSES: usize = 1024;

/// Time after which the daemon counts as gone.
pub(super) const REPLY_TIMEOUT: Duration = Duration::from_secs(10);

impl Attachment {
    /// Opens a UDP socket. With port 0 the daemon chooses a port. The daemon also sets the
    /// queue limits and ignores those in `options`.
    ///
    /// # Errors
    /// [`io::ErrorKind::AddrInUse`], [`io::ErrorKind::AddrNotAvailable`],
    /// [`io::ErrorKind::QuotaExceeded`] if the application has used up its quota.
    pub fn bind_udp(&mut self, local: SocketAddr, options: UdpOptions) -> io::Result<Handle> {
        self.bind_udp_in_group(local, None, options)
    }

    /// Opens a UDP socket like [`Attachment::bind_udp`], as a member of a share group: sockets
    /// of several attachments with one port and the same address and options. Datagrams are
    /// divided among the members by peer: all datagrams of a peer reach the same member.
    ///
    /// # Errors
    /// As [`Attachment::bind_udp`].
    pub fn bind_udp_in_group(
        &mut self,
        local: SocketAddr,
        share_group: Option<ShareGroupId>,
        options: UdpOptions,
    ) -> io::Result<Handle> {
        let opened =
            self.request_socket(|tag| Command::Bind { tag, local, share_group, options })?;
        let handle = self.register_socket(opened, SocketType::Udp, TcpOptions::default())?;
        self.socket(handle)?.error_reports.expect(options.report_errors);
        Ok(handle)
    }

    /// Connects a UDP socket: it receives datagrams of `peer` only. `None` removes the
    /// restriction.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] for a peer of the other family,
    /// [`io::ErrorKind::NetworkUnreachable`] without a route.
    pub fn connect_udp(&mut self, socket: Handle, peer: Option<SocketAddr>) -> io::Result<()> {
        let opened = self.request_socket(|tag| Command::ConnectUdp { tag, socket, peer })?;
        let socket = self.socket(socket)?;
        (socket.local, socket.peer) = (opened.local, opened.peer);
        Ok(())
    }

    /// Opens a listener with an accept queue of `backlog` connections.
    ///
    /// # Errors
    /// As [`Attachment::bind_udp`].
    pub fn listen(
        &mut self,
        local: SocketAddr,
        backlog: usize,
        options: TcpOptions,
    ) -> io::Result<Handle> {
        self.listen_in_group(local, backlog, None, options)
    }

    /// Opens a listener like [`Attachment::listen`], as a member of a share group: listeners of
    /// several attachments with one port and the same address and options. Each new connection
    /// reaches one of the members.
    ///
    /// # Errors
    /// As [`Attachment::bind_udp`].
    pub fn listen_in_group(
        &mut self,
        local: SocketAddr,
        backlog: usize,
        share_group: Option<ShareGroupId>,
        options: TcpOptions,
    ) -> io::Result<Handle> {
        let backlog = backlog.try_into().unwrap_or(u32::MAX);
        let opened = self.request_socket(|tag| Command::Listen {
            tag,
            local,
            backlog,
            share_group,
            options,
        })?;
        self.register_socket(opened, SocketType::Listener, options)
    }

    /// Accepts the connection that has waited longest. Returns its handle and its peer.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] if the accept queue is empty.
    pub fn accept(&mut self, listener: Handle) -> io::Result<(Handle, SocketAddr)> {
        let socket = self.socket(listener)?;
        let options = socket.options;
        if !socket.status().accept_ready {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let opened = self.request_socket(|tag| Command::Accept { tag, listener })?;
        let peer = opened.peer.ok_or(io::ErrorKind::NotConnected)?;
        Ok((self.register_socket(opened, SocketType::Stream, options)?, peer))
    }

    /// Starts to connect. Does not wait until the connection is established.
    ///
    /// # Errors
    /// If there is no route to `remote`, or no local port is free.
    pub fn connect_tcp(
        &mut self,
        local: Option<SocketAddr>,
        remote: SocketAddr,
        options: TcpOptions,
    ) -> io::Result<Handle> {
        let opened =
            self.request_socket(|tag| Command::ConnectTcp { tag, local, remote, options })?;
        self.register_socket(opened, SocketType::Stream, options)
    }

    fn register_socket(
        &mut self,
        opened: OpenedSocket,
        socket_type: SocketType,
        options: TcpOptions,
    ) -> io::Result<Handle> {
        let socket = AttachedSocket::new(&self.memory, &opened, socket_type, options)?;
        self.insert(socket);
        Ok(opened.handle)
    }

    /// Adds a socket to the attachment's sockets.
    pub(super) fn insert(&mut self, socket: AttachedSocket) {
        let handle = socket.handle;
        let slot = handle.slot as usize;
        if slot >= self.sockets.len() {
            self.sockets.resize_with(slot + 1, || None);
        }
        // A notification before this point was dropped: have the socket checked.
        socket.slot.notify_on_change.request();
        self.changed.push_back(handle);
        self.sockets[slot] = Some(Box::new(socket));
    }

    /// Looks up an address: its kind, and source address and size of packets to it. The result is
    /// cached.
    ///
    /// # Errors
    /// As [`Attachment::ping`].
    pub fn look_up_address(&mut self, address: IpAddr) -> io::Result<AddressInfo> {
        if let Some(info) = self.address_cache.get(&address) {
            return Ok(*info);
        }
        let Reply::Address(info) = self.request(|tag| Command::LookUpAddress { tag, address })?
        else {
            return Err(self.disconnect(PeerError));
        };
        if self.address_cache.len() >= MAX_CACHED_ADDRESSES {
            self.address_cache.clear();
        }
        self.address_cache.insert(address, info);
        Ok(info)
    }

    /// State of a connection in the daemon.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotConnected`] if the socket is closed.
    pub fn tcp_info(&mut self, socket: Handle) -> io::Result<TcpInfo> {
        match self.request(|tag| Command::TcpInfo { tag, socket })? {
            Reply::TcpInfo(info) => Ok(info),
            _ => Err(self.disconnect(PeerError)),
        }
    }

    /// Waits until the daemon has executed all previous commands of this attachment. Returns
    /// the number of commands executed so far.
    ///
    /// # Errors
    /// [`io::ErrorKind::ConnectionAborted`] if the daemon has exited.
    pub fn ping(&mut self) -> io::Result<u64> {
        match self.request(|tag| Command::Ping { tag: Some(tag) })? {
            Reply::Commands(commands) => Ok(commands),
            _ => Err(self.disconnect(PeerError)),
        }
    }

    /// Sends the daemon a command that does nothing and has no reply.
    ///
    /// # Errors
    /// As [`Attachment::ping`].
    pub fn send_no_op(&mut self) -> io::Result<()> {
        self.send_command(Command::Ping { tag: None })
    }

    fn request_socket(&mut self, command: impl FnOnce(Tag) -> Command) -> io::Result<OpenedSocket> {
        match self.request(command)? {
            Reply::Socket(opened) => Ok(opened),
            _ => Err(self.disconnect(PeerError)),
        }
    }

    /// Sends a command with a new tag, and waits for the reply.
    fn request(&mut self, command: impl FnOnce(Tag) -> Command) -> io::Result<Reply> {
        self.last_tag = self.last_tag.wrapping_add(1);
        let tag = self.last_tag;
        self.send_command(command(tag))?;
        self.wake_daemon_if_deferred();
        let mut wait_start = None;
        loop {
            self.poll()?;
            if let Some(index) = self.replies.iter().position(|(reply_tag, _)| *reply_tag == tag) {
                let (_, outcome) = self.replies.swap_remove(index);
                return outcome.map_err(io::Error::from);
            }
            let waited = wait_start.get_or_insert_with(Instant::now).elapsed();
            if waited < BUSY_POLL_TIME {
                std::hint::spin_loop();
                continue;
            }
            if waited > REPLY_TIMEOUT {
                self.is_disconnected = true;
                return Err(daemon_exited_error());
            }
            self.sleep_until_reply()?;
        }
    }

    fn sleep_until_reply(&mut self) -> io::Result<()> {
        self.enter_sleep();
        let slept = if self.poll()? { Ok(false) } else { self.await_events(REPLY_CHECK_INTERVAL) };
        self.end_sleep(matches!(slept, Ok(true)))?;
        slept.map(drop)
    }
}
