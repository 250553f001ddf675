//! Socket operations of an attached stack.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;
use std::sync::Arc;

use tidegate_engine::PortClaim;
use tidegate_memory::OwnFd;
use tidegate_service::attachment::{Attachment, ReceivedDatagram};
use tidegate_service::{Handle, Shard, ShareGroupId, SocketState};
use tidegate_stack::{
    Shutdown, TcpId, TcpInfo, TcpListenerId, TcpOptions, UdpErrorReport, UdpId, UdpOptions,
    UdpSendOptions,
};

use super::attachments::Attachments;
use super::core::{AttachedCore, daemon_exited};
use super::shards::ShardRank;
use super::socket_number::{listener_id, stream_id, udp_id};
use crate::types::added_readiness::AddedReadiness;
use crate::types::datagram::DatagramMeta;
use crate::types::errors::{OpError, OpResult, unless_blocked};
use crate::types::poll_sets::PollSets;
use crate::types::readiness::{Change, Readiness, Ready};
use crate::types::socket_id::{PollSetId, SocketId};
use crate::types::socket_ops::{NewSocket, SocketOps};
use crate::types::tasks::Tasks;
use crate::types::waiters::Waiters;

/// Largest copy, in bytes, of the operations that read or write without a caller's buffer.
const MAX_COPY_BYTES: usize = 2048;

/// The daemon claims kernel ports by itself, never through this process.
fn without_claim<I>(id: I) -> NewSocket<I> {
    (id, None)
}

/// Reserves a port by the kernel socket that the application has bound to it, before an
/// attachment listens there.
fn reserve_port(attachment: &mut Attachment, kernel_socket: Option<&OwnFd>, part: Shard) {
    if let Some(held) = kernel_socket {
        // Without the right to attach, the application keeps the kernel port by itself.
        let _ = attachment.reserve_port(part, held.as_fd());
    }
}

impl AttachedCore {
    /// Opens the same socket on all attachments, which share the port; incoming traffic is
    /// distributed over them. The first attachment chooses the port, and only its socket is
    /// required.
    fn open_sharded(
        &mut self,
        local: SocketAddr,
        mut open: impl FnMut(&mut Attachment, SocketAddr, Option<ShareGroupId>) -> io::Result<Handle>,
    ) -> io::Result<u64> {
        self.attachments.attach_to_all_cores();
        let count = self.attachments.count();
        let share_group = (count > 1).then(ShareGroupId::new).transpose()?;
        let kernel_socket = self.kernel_sockets.take(local);
        let shard = |number: usize| Shard { index: number as u8, count: count as u8 };
        let first_attachment = self.attachments.first();
        reserve_port(first_attachment, kernel_socket.as_ref(), shard(0));
        let first = open(first_attachment, local, share_group)?;
        let local = first_attachment.local_addr(first)?;
        let mut all = vec![self.attachments.pack(0, first)];
        for index in 1..count {
            let attachment = self.attachments.get(index)?;
            reserve_port(attachment, kernel_socket.as_ref(), shard(all.len()));
            if let Ok(other) = open(attachment, local, share_group) {
                all.push(self.attachments.pack(index, other));
            }
        }
        let number = all[0];
        self.shards.insert(all);
        Ok(number)
    }

    /// True if a socket at `local` is worth sharding: there are several attachments, and
    /// traffic to `local` reaches exactly one of the sockets that share the port.
    fn should_shard(&mut self, local: SocketAddr) -> bool {
        let ip = local.ip();
        // With one attachment there is nothing to distribute, and no query to the daemon.
        self.attachments.max() > 1
            && local.port() != 0
            && (ip.is_unspecified() || self.has_address(ip.to_canonical()))
    }

    /// Closes a socket with all its shards. Waits until the shards are closed: the next owner
    /// of the port must not find them there.
    fn close(&mut self, socket: u64) {
        match self.shards.remove(socket).as_slice() {
            [only] => self.attachments.close(*only, false),
            all => self.attachments.close_and_wait(all),
        }
    }

    fn take_error(&mut self, socket: u64) -> Option<io::Error> {
        let taken = self
            .attachments
            .attachment_of(socket)
            .and_then(|(attachment, socket)| attachment.take_error(socket));
        match taken {
            Ok(kind) => kind.map(io::Error::from),
            Err(error) => Some(error),
        }
    }
}

impl Attachments {
    fn accept(&mut self, listener_number: u64) -> io::Result<(u64, SocketAddr)> {
        let (index, _) = self.unpack(listener_number);
        let (attachment, socket) = self.attachment_of(listener_number)?;
        let (accepted, peer) = attachment.accept(socket)?;
        Ok((self.pack(index, accepted), peer))
    }

    /// Receives a datagram of one shard. Multicast datagrams reach every shard, so all shards
    /// but the first discard them.
    fn recv_datagram(
        &mut self,
        shard: u64,
        rank: ShardRank,
        buf: &mut [u8],
        peek: bool,
    ) -> io::Result<ReceivedDatagram> {
        let (attachment, socket) = self.attachment_of(shard)?;
        loop {
            let received = attachment.recv_datagram(socket, buf, peek)?;
            if rank == ShardRank::First
                || attachment.look_up_address(received.to.to_canonical())?.is_local
            {
                return Ok(received);
            }
            if peek {
                attachment.recv_datagram(socket, buf, false)?;
            }
        }
    }
}

impl SocketOps for AttachedCore {
    fn poll_sets(&mut self) -> &mut PollSets {
        &mut self.poll_sets
    }

    fn waiters(&mut self) -> &mut Waiters {
        &mut self.waiters
    }

    fn tasks(&mut self) -> &mut Tasks {
        &mut self.tasks
    }

    fn added_readiness(&mut self) -> &mut AddedReadiness {
        &mut self.added_readiness
    }

    fn notify(&mut self, id: SocketId) {
        self.wake(id, Change::Any);
    }

    fn failure(&self) -> Option<io::Error> {
        self.has_daemon_exited.then(daemon_exited)
    }

    fn take_notifications(&mut self) {
        // After the daemon exits every socket is ready, for its error.
        let _ = self.poll_daemon();
    }

    fn readiness(&mut self, id: SocketId) -> Readiness {
        match id {
            SocketId::Poll(set) => Readiness {
                readable: self.with_polls(|polls, of| polls.has_ready(set, of)),
                ..Readiness::default()
            },
            _ => self.readiness_of(id),
        }
    }

    fn collect_ready(&mut self, set: PollSetId, limit: usize, report: &mut dyn FnMut(Ready)) {
        self.take_notifications();
        self.with_polls(|polls, of| polls.collect_ready(set, of, limit, report));
    }

    fn has_address(&mut self, address: IpAddr) -> bool {
        self.attachments.first().look_up_address(address).is_ok_and(|found| found.is_local)
    }

    fn has_datagram_address(&mut self, address: IpAddr) -> bool {
        let found = self.attachments.first().look_up_address(address);
        found.is_ok_and(|found| found.is_local || found.is_broadcast)
    }

    fn path_mtu(&mut self, destination: IpAddr) -> Option<usize> {
        let found = self.attachments.first().look_up_address(destination).ok()?;
        Some(usize::from(found.path_mtu))
    }

    fn source_for(&mut self, destination: IpAddr) -> Option<IpAddr> {
        self.attachments.first().look_up_address(destination).ok()?.source
    }

    fn read_clock(&mut self) {}

    /// Does nothing: the daemon sees written data at once.
    fn commit(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn commit_later(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn begin_batch(&mut self) {
        self.attachments.defer_wake_ups(u32::MAX);
    }

    fn end_batch(&mut self, _: &[SocketId]) -> io::Result<()> {
        self.attachments.wake_daemon_if_deferred();
        Ok(())
    }

    /// Data is in shared memory before its notification is read.
    fn has_early_data(&self) -> bool {
        !self.attachments.share_processor()
    }

    /// Dispatches notifications that a call received while it waited for its reply.
    fn on_release(&mut self) {
        if self.attachments.have_changed() {
            // A protocol error of the daemon is reported by the next call.
            let _ = self.dispatch_events();
        }
    }

    fn tcp_listen(
        &mut self,
        local: SocketAddr,
        backlog: usize,
        options: TcpOptions,
    ) -> io::Result<NewSocket<TcpListenerId>> {
        let number = match options.reuse_port {
            true => {
                self.attachments.attach_to_all_cores();
                let index = self.attachments.next_index();
                let kernel_socket = self.kernel_sockets.take(local);
                let attachment = self.attachments.get(index)?;
                reserve_port(attachment, kernel_socket.as_ref(), Shard::ONLY);
                let made = attachment.listen(local, backlog, options)?;
                self.attachments.pack(index, made)
            }
            false => self.open_sharded(local, |attachment, local, share_group| {
                attachment.listen_in_group(local, backlog, share_group, options)
            })?,
        };
        Ok(without_claim(listener_id(number)?))
    }

    fn tcp_listener_addr(&mut self, id: TcpListenerId) -> Option<SocketAddr> {
        let (attachment, socket) = self.attachments.attachment_of(id.to_bits()).ok()?;
        attachment.local_addr(socket).ok()
    }

    fn tcp_set_listener_options(
        &mut self,
        id: TcpListenerId,
        options: TcpOptions,
    ) -> io::Result<()> {
        for shard in self.shards.shards_of(id.to_bits()) {
            let (attachment, socket) = self.attachments.attachment_of(shard)?;
            attachment.set_options(socket, options)?;
        }
        Ok(())
    }

    fn tcp_accept(&mut self, id: TcpListenerId) -> OpResult<(TcpId, SocketAddr)> {
        let Self { attachments, shards, .. } = self;
        let accepted = shards.receive_in_turn(id.to_bits(), false, |shard, _| {
            unless_blocked(attachments.accept(shard).map_err(OpError::from))
        });
        let (accepted, peer) = accepted.ok_or(OpError::WouldBlock)??;
        // Other threads or tasks may wait for the next connection.
        let listener = SocketId::Listener(id);
        if self.readiness_of(listener).readable {
            self.waiters.wake(listener);
            self.tasks.wake_accepting(listener);
        }
        Ok((stream_id(accepted), peer))
    }

    fn tcp_close_listener(&mut self, id: TcpListenerId, _: Option<Arc<PortClaim>>) {
        self.close(id.to_bits());
    }

    fn tcp_connect(
        &mut self,
        local: Option<SocketAddr>,
        remote: SocketAddr,
        options: TcpOptions,
    ) -> io::Result<NewSocket<TcpId>> {
        let has_local_port = local.is_some_and(|local| local.port() != 0);
        // Other sockets on the port may be anywhere, but always on the first attachment.
        let index = if has_local_port { 0 } else { self.attachments.next_index() };
        let connected = self.attachments.get(index)?.connect_tcp(local, remote, options)?;
        Ok(without_claim(stream_id(self.attachments.pack(index, connected))))
    }

    fn tcp_finish_connect(&mut self, id: TcpId) -> OpResult<()> {
        let (attachment, socket) = self.attachments.attachment_of(id.to_bits())?;
        match attachment.state(socket)? {
            SocketState::Connecting => Err(OpError::WouldBlock),
            _ => match attachment.take_error(socket)? {
                Some(kind) => Err(OpError::Failed(kind.into())),
                None => Ok(()),
            },
        }
    }

    fn tcp_recv(&mut self, id: TcpId, buf: &mut [u8]) -> OpResult<usize> {
        let (attachment, socket) = self.attachments.attachment_of(id.to_bits())?;
        Ok(attachment.recv(socket, buf, false)?)
    }

    fn tcp_peek(&mut self, id: TcpId, buf: &mut [u8]) -> OpResult<usize> {
        let (attachment, socket) = self.attachments.attachment_of(id.to_bits())?;
        Ok(attachment.recv(socket, buf, true)?)
    }

    fn tcp_recv_with(
        &mut self,
        id: TcpId,
        read: &mut dyn FnMut(&[u8]) -> usize,
    ) -> OpResult<usize> {
        // The daemon can write to the shared buffer: `read` gets a copy.
        let mut copy = [0; MAX_COPY_BYTES];
        let (attachment, socket) = self.attachments.attachment_of(id.to_bits())?;
        let len = attachment.recv(socket, &mut copy, true)?;
        let used = read(&copy[..len]).min(len);
        if used > 0 {
            attachment.recv(socket, &mut copy[..used], false)?;
        }
        Ok(used)
    }

    fn tcp_readable(&mut self, id: TcpId) -> usize {
        let found = self
            .attachments
            .attachment_of(id.to_bits())
            .and_then(|(attachment, socket)| attachment.readable_bytes(socket));
        found.unwrap_or(0)
    }

    fn tcp_writable(&mut self, id: TcpId) -> usize {
        let found = self
            .attachments
            .attachment_of(id.to_bits())
            .and_then(|(attachment, socket)| attachment.writable_bytes(socket));
        found.unwrap_or(0)
    }

    fn tcp_send(&mut self, id: TcpId, data: &[u8]) -> OpResult<usize> {
        let (attachment, socket) = self.attachments.attachment_of(id.to_bits())?;
        Ok(attachment.send(socket, data)?)
    }

    fn tcp_send_with(
        &mut self,
        id: TcpId,
        limit: usize,
        write: &mut dyn FnMut(&mut [u8]) -> usize,
    ) -> OpResult<usize> {
        let (attachment, socket) = self.attachments.attachment_of(id.to_bits())?;
        // Returns the error of an ended connection.
        attachment.send(socket, &[])?;
        let space = attachment.writable_bytes(socket)?.min(limit).min(MAX_COPY_BYTES);
        if space == 0 && limit > 0 {
            return Err(OpError::WouldBlock);
        }
        let mut copy = [0; MAX_COPY_BYTES];
        let len = write(&mut copy[..space]).min(space);
        Ok(attachment.send(socket, &copy[..len])?)
    }

    fn tcp_shutdown(&mut self, id: TcpId, how: Shutdown) -> io::Result<()> {
        let (attachment, socket) = self.attachments.attachment_of(id.to_bits())?;
        attachment.shutdown(socket, how)
    }

    fn tcp_local_addr(&mut self, id: TcpId) -> Option<SocketAddr> {
        let (attachment, socket) = self.attachments.attachment_of(id.to_bits()).ok()?;
        attachment.local_addr(socket).ok()
    }

    fn tcp_peer_addr(&mut self, id: TcpId) -> Option<SocketAddr> {
        let (attachment, socket) = self.attachments.attachment_of(id.to_bits()).ok()?;
        attachment.peer_addr(socket).ok()
    }

    fn tcp_info(&mut self, id: TcpId) -> Option<TcpInfo> {
        let (attachment, socket) = self.attachments.attachment_of(id.to_bits()).ok()?;
        let mut info = attachment.tcp_info(socket).ok()?;
        info.unread_bytes += attachment.readable_bytes(socket).unwrap_or(0) as u32;
        Some(info)
    }

    fn tcp_options(&mut self, id: TcpId) -> Option<TcpOptions> {
        let (attachment, socket) = self.attachments.attachment_of(id.to_bits()).ok()?;
        attachment.options(socket).ok()
    }

    fn tcp_set_options(&mut self, id: TcpId, options: TcpOptions) -> io::Result<()> {
        let (attachment, socket) = self.attachments.attachment_of(id.to_bits())?;
        attachment.set_options(socket, options)
    }

    fn tcp_take_error(&mut self, id: TcpId) -> Option<io::Error> {
        self.take_error(id.to_bits())
    }

    fn tcp_close(&mut self, id: TcpId, reset_on_close: bool, _: Option<Arc<PortClaim>>) {
        self.poll_sets.forget(SocketId::Stream(id));
        self.tasks.forget(SocketId::Stream(id));
        self.added_readiness.forget(SocketId::Stream(id));
        self.attachments.close(id.to_bits(), reset_on_close);
    }

    fn udp_bind(&mut self, local: SocketAddr, options: UdpOptions) -> io::Result<NewSocket<UdpId>> {
        // A socket that shares its port by option is not sharded: other sockets are beside it.
        let is_exclusive = !options.reuse_port && !options.reuse_address;
        if is_exclusive && self.should_shard(local) {
            let bind = |attachment: &mut Attachment, local, share_group| {
                attachment.bind_udp_in_group(local, share_group, options)
            };
            return Ok(without_claim(udp_id(self.open_sharded(local, bind)?)));
        }
        if options.reuse_port {
            self.attachments.attach_to_all_cores();
        }
        let index = if options.reuse_address { 0 } else { self.attachments.next_index() };
        let bound = self.attachments.get(index)?.bind_udp(local, options)?;
        Ok(without_claim(udp_id(self.attachments.pack(index, bound))))
    }

    fn udp_close(&mut self, id: UdpId, _: Option<Arc<PortClaim>>) {
        self.poll_sets.forget(SocketId::Udp(id));
        self.close(id.to_bits());
    }

    fn udp_connect(&mut self, id: UdpId, peer: Option<SocketAddr>) -> io::Result<()> {
        if peer.is_none() {
            let (attachment, socket) =
                self.attachments.attachment_of(self.shards.first(id.to_bits()))?;
            return attachment.connect_udp(socket, None);
        }
        // Keeps the shard that received last: more datagrams of the peer may be queued there.
        // Datagrams of other peers are not wanted any more.
        let (shard, others) = self.shards.collapse_to_last_used(id.to_bits());
        self.attachments.close_and_wait(&others);
        let (attachment, socket) = self.attachments.attachment_of(shard)?;
        attachment.connect_udp(socket, peer)
    }

    fn udp_local_addr(&mut self, id: UdpId) -> Option<SocketAddr> {
        let (attachment, socket) =
            self.attachments.attachment_of(self.shards.first(id.to_bits())).ok()?;
        attachment.local_addr(socket).ok()
    }

    fn udp_peer_addr(&mut self, id: UdpId) -> Option<SocketAddr> {
        let (attachment, socket) =
            self.attachments.attachment_of(self.shards.first(id.to_bits())).ok()?;
        attachment.peer_addr(socket).ok()
    }

    fn udp_set_options(&mut self, id: UdpId, options: UdpOptions) -> io::Result<()> {
        for shard in self.shards.shards_of(id.to_bits()) {
            let (attachment, socket) = self.attachments.attachment_of(shard)?;
            attachment.set_udp_options(socket, options)?;
        }
        Ok(())
    }

    fn udp_recv(&mut self, id: UdpId, buf: &mut [u8], peek: bool) -> OpResult<DatagramMeta> {
        let Self { attachments, shards, .. } = self;
        let received = shards.receive_in_turn(id.to_bits(), peek, |shard, rank| {
            unless_blocked(attachments.recv_datagram(shard, rank, buf, peek).map_err(OpError::from))
        });
        let received = received.ok_or(OpError::WouldBlock)??;
        Ok(DatagramMeta {
            len: received.len,
            truncated: received.len < received.full_len,
            datagram_len: received.full_len,
            from: received.from,
            to: received.to,
            hop_limit: Some(received.hop_limit),
            traffic_class: Some(received.traffic_class),
            received_ns: Some(received.received_ns),
        })
    }

    fn udp_send(
        &mut self,
        id: UdpId,
        payload: &[u8],
        to: Option<SocketAddr>,
        options: UdpSendOptions,
    ) -> OpResult<()> {
        let Self { attachments, shards, .. } = self;
        let sent = shards.send_from_last_used(id.to_bits(), |shard| {
            let sent = attachments.attachment_of(shard).and_then(|(attachment, socket)| {
                attachment.send_datagram(socket, payload, to, options)
            });
            unless_blocked(sent.map_err(OpError::from))
        });
        Ok(sent.ok_or(OpError::WouldBlock)??)
    }

    fn udp_flush(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn udp_take_error(&mut self, id: UdpId) -> Option<io::Error> {
        self.shards.shards_of(id.to_bits()).into_iter().find_map(|shard| self.take_error(shard))
    }

    fn udp_take_error_report(&mut self, id: UdpId) -> io::Result<Option<UdpErrorReport>> {
        for shard in self.shards.shards_of(id.to_bits()) {
            let (attachment, socket) = self.attachments.attachment_of(shard)?;
            if let Some(report) = attachment.take_error_report(socket)? {
                return Ok(Some(report));
            }
        }
        Ok(None)
    }
}
