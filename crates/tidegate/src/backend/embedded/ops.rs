//! Socket operations of an embedded stack.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use tidegate_device::sharded::PortSharing;
use tidegate_device::steering::TransportProtocol;
use tidegate_engine::{KernelPort, PortClaim};
use tidegate_stack::{
    DatagramInfo, Shutdown, TcpError, TcpId, TcpInfo, TcpListenerId, TcpOptions, TcpState,
    UdpErrorReport, UdpId, UdpOptions, UdpSendOptions,
};

use super::core::EmbeddedCore;
use crate::types::added_readiness::AddedReadiness;
use crate::types::datagram::DatagramMeta;
use crate::types::errors::{OpError, OpResult};
use crate::types::poll_sets::PollSets;
use crate::types::readiness::{Change, Readiness, Ready};
use crate::types::socket_id::{PollSetId, SocketId};
use crate::types::socket_ops::{NewSocket, SocketOps};
use crate::types::tasks::Tasks;
use crate::types::waiters::Waiters;

impl EmbeddedCore {
    /// Returns a port to the kernel, if no other socket uses it.
    fn release(&mut self, claim: Option<Arc<PortClaim>>) {
        self.claims.release(self.engine.device(), claim);
    }

    /// Receives what has arrived at the device: data of the connection counts as unread then, as at
    /// the kernel, and resets the connection (RFC 9293 section 3.10.4).
    fn receive_before_close(&mut self, id: TcpId) {
        let stack = self.engine.stack();
        let may_receive = !stack.tcp_readiness(id).read_closed && stack.tcp_readable(id) == 0;
        if may_receive && self.failure.is_none() {
            // A device error is reported to the next call.
            let _ = self.run();
        }
    }

    /// Wakes another waiting thread if more datagrams are queued.
    pub(crate) fn wake_next_reader(&self, id: UdpId) {
        if !self.waiters.is_empty() && self.engine.stack().udp_queue_len(id) > 0 {
            self.waiters.wake(SocketId::Udp(id));
        }
    }
}

impl SocketOps for EmbeddedCore {
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
        self.waiters.wake(id);
        self.poll_sets.on_event(id, Change::Any, &self.waiters);
        self.tasks.wake_both(id);
    }

    fn failure(&self) -> Option<io::Error> {
        self.failure.as_ref().map(|failure| io::Error::new(failure.kind(), failure.to_string()))
    }

    fn take_notifications(&mut self) {}

    fn readiness(&mut self, id: SocketId) -> Readiness {
        let Self { poll_sets, engine, added_readiness, .. } = self;
        let mut of = |id| added_readiness.apply(id, Readiness::of(engine.stack(), id));
        match id {
            SocketId::Poll(set) => {
                Readiness { readable: poll_sets.has_ready(set, &mut of), ..Readiness::default() }
            }
            _ => of(id),
        }
    }

    fn collect_ready(&mut self, set: PollSetId, limit: usize, report: &mut dyn FnMut(Ready)) {
        let Self { poll_sets, engine, added_readiness, .. } = self;
        let mut of = |id| added_readiness.apply(id, Readiness::of(engine.stack(), id));
        poll_sets.collect_ready(set, &mut of, limit, report);
    }

    fn has_address(&mut self, address: IpAddr) -> bool {
        self.engine.stack().has_address(address)
    }

    fn has_datagram_address(&mut self, address: IpAddr) -> bool {
        self.engine.stack().has_datagram_address(address)
    }

    fn path_mtu(&mut self, destination: IpAddr) -> Option<usize> {
        let (stack, _, now_ns) = self.engine.parts();
        Some(stack.path_mtu(now_ns, destination))
    }

    fn source_for(&mut self, destination: IpAddr) -> Option<IpAddr> {
        self.engine.stack().source_for(destination)
    }

    #[inline]
    fn read_clock(&mut self) {
        self.engine.read_clock();
    }

    fn commit(&mut self) -> io::Result<()> {
        let (stack, arena, now_ns) = self.engine.parts();
        stack.tcp_flush(now_ns, arena);
        self.flush_and_dispatch()
    }

    fn commit_later(&mut self) -> io::Result<()> {
        if self.tasks.wake_driver() {
            return Ok(());
        }
        SocketOps::commit(self)
    }

    fn begin_batch(&mut self) {
        self.engine.read_clock();
    }

    fn end_batch(&mut self, read: &[SocketId]) -> io::Result<()> {
        self.on_read(read);
        SocketOps::commit(self)
    }

    fn has_early_data(&self) -> bool {
        false
    }

    #[inline]
    fn on_release(&mut self) {
        if let Some(meter) = &mut self.meter {
            meter.on_release();
        }
    }

    fn tcp_listen(
        &mut self,
        local: SocketAddr,
        backlog: usize,
        options: TcpOptions,
    ) -> io::Result<NewSocket<TcpListenerId>> {
        let (device, dual) = (self.engine.device(), options.dual_stack);
        let claim =
            self.claims.claim(device, TransportProtocol::Tcp, local, dual, KernelPort::Own)?;
        let local = claim.as_ref().map_or(local, |claim| claim.local());
        let (stack, _, _) = self.engine.parts();
        match stack.tcp_listen(local, backlog, options) {
            Ok(id) => {
                let local = stack.tcp_listener_addr(id).unwrap_or(local);
                let sharing = PortSharing::new(options.reuse_port, options.owner);
                let (device, protocol) = (self.engine.device(), TransportProtocol::Tcp);
                let claim = self.claims.claim_among_cores(device, protocol, local, sharing, claim);
                let claim = claim.inspect_err(|_| self.tcp_close_listener(id, None))?;
                Ok((id, claim))
            }
            Err(error) => {
                self.release(claim);
                Err(error.into())
            }
        }
    }

    fn tcp_listener_addr(&mut self, id: TcpListenerId) -> Option<SocketAddr> {
        self.engine.stack().tcp_listener_addr(id)
    }

    fn tcp_set_listener_options(
        &mut self,
        id: TcpListenerId,
        options: TcpOptions,
    ) -> io::Result<()> {
        Ok(self.engine.parts().0.tcp_set_listener_options(id, options)?)
    }

    fn tcp_accept(&mut self, listener: TcpListenerId) -> OpResult<(TcpId, SocketAddr)> {
        let (stack, _, _) = self.engine.parts();
        let id = stack.tcp_accept(listener)?;
        let peer = stack.tcp_peer_addr(id).ok_or(TcpError::NotConnected)?;
        // Other threads or tasks may wait for the next connection.
        if stack.tcp_acceptable(listener) > 0 {
            let listener = SocketId::Listener(listener);
            self.waiters.wake(listener);
            self.tasks.wake_accepting(listener);
        }
        Ok((id, peer))
    }

    fn tcp_close_listener(&mut self, id: TcpListenerId, claim: Option<Arc<PortClaim>>) {
        let now_ns = self.engine.read_clock();
        let (stack, arena, _) = self.engine.parts();
        stack.tcp_close_listener(now_ns, arena, id);
        self.release(claim);
        // A device error is reported to the next call.
        let _ = self.flush_and_dispatch();
    }

    fn tcp_connect(
        &mut self,
        local: Option<SocketAddr>,
        remote: SocketAddr,
        options: TcpOptions,
    ) -> io::Result<NewSocket<TcpId>> {
        let device = self.engine.device();
        let claim = self.claims.claim_for_peer(device, local, remote, KernelPort::Own)?;
        let local = claim.as_ref().map(|claim| claim.local()).or(local);
        let now_ns = self.engine.read_clock();
        let (stack, arena, _) = self.engine.parts();
        match stack.tcp_connect(now_ns, arena, local, remote, options) {
            Ok(id) => {
                let Some(local) = stack.tcp_local_addr(id) else { return Ok((id, claim)) };
                let (protocol, sharing) = (TransportProtocol::Tcp, PortSharing::Exclusive);
                let device = self.engine.device();
                let claim = self.claims.claim_among_cores(device, protocol, local, sharing, claim);
                let claim = claim.inspect_err(|_| self.tcp_close(id, true, None))?;
                Ok((id, claim))
            }
            Err(error) => {
                self.release(claim);
                Err(error.into())
            }
        }
    }

    fn tcp_finish_connect(&mut self, id: TcpId) -> OpResult<()> {
        let (stack, _, _) = self.engine.parts();
        match stack.tcp_state(id) {
            Some(TcpState::SynSent | TcpState::SynReceived) => Err(OpError::WouldBlock),
            Some(_) => stack.tcp_take_error(id).map_or(Ok(()), |error| Err(error.into())),
            None => Err(TcpError::Closed.into()),
        }
    }

    #[inline]
    fn tcp_recv(&mut self, id: TcpId, buf: &mut [u8]) -> OpResult<usize> {
        let (stack, _, now_ns) = self.engine.parts();
        Ok(stack.tcp_recv_unflushed(now_ns, id, buf)?)
    }

    fn tcp_peek(&mut self, id: TcpId, buf: &mut [u8]) -> OpResult<usize> {
        Ok(self.engine.parts().0.tcp_peek(id, buf)?)
    }

    #[inline]
    fn tcp_recv_with(
        &mut self,
        id: TcpId,
        read: &mut dyn FnMut(&[u8]) -> usize,
    ) -> OpResult<usize> {
        let (stack, _, now_ns) = self.engine.parts();
        Ok(stack.tcp_recv_with(now_ns, id, read)?)
    }

    fn tcp_readable(&mut self, id: TcpId) -> usize {
        self.engine.stack().tcp_readable(id)
    }

    fn tcp_writable(&mut self, id: TcpId) -> usize {
        self.engine.stack().tcp_writable(id)
    }

    #[inline]
    fn tcp_send(&mut self, id: TcpId, data: &[u8]) -> OpResult<usize> {
        let (stack, ..) = self.engine.parts();
        Ok(stack.tcp_send_unflushed(id, data)?)
    }

    #[inline]
    fn tcp_send_with(
        &mut self,
        id: TcpId,
        limit: usize,
        write: &mut dyn FnMut(&mut [u8]) -> usize,
    ) -> OpResult<usize> {
        let (stack, ..) = self.engine.parts();
        Ok(stack.tcp_send_with(id, limit, write)?)
    }

    fn tcp_shutdown(&mut self, id: TcpId, how: Shutdown) -> io::Result<()> {
        let now_ns = self.engine.read_clock();
        let (stack, arena, _) = self.engine.parts();
        stack.tcp_shutdown(now_ns, arena, id, how)?;
        self.flush_and_dispatch()
    }

    fn tcp_local_addr(&mut self, id: TcpId) -> Option<SocketAddr> {
        self.engine.stack().tcp_local_addr(id)
    }

    fn tcp_peer_addr(&mut self, id: TcpId) -> Option<SocketAddr> {
        self.engine.stack().tcp_peer_addr(id)
    }

    fn tcp_info(&mut self, id: TcpId) -> Option<TcpInfo> {
        self.engine.stack().tcp_info(id)
    }

    fn tcp_options(&mut self, id: TcpId) -> Option<TcpOptions> {
        self.engine.stack().tcp_options(id)
    }

    fn tcp_set_options(&mut self, id: TcpId, options: TcpOptions) -> io::Result<()> {
        let now_ns = self.engine.read_clock();
        let (stack, arena, _) = self.engine.parts();
        stack.tcp_set_options(now_ns, arena, id, options)?;
        self.flush_and_dispatch()
    }

    fn tcp_take_error(&mut self, id: TcpId) -> Option<io::Error> {
        self.engine.parts().0.tcp_take_error(id).map(io::Error::from)
    }

    fn tcp_close(&mut self, id: TcpId, reset_on_close: bool, claim: Option<Arc<PortClaim>>) {
        self.poll_sets.forget(SocketId::Stream(id));
        self.tasks.forget(SocketId::Stream(id));
        self.added_readiness.forget(SocketId::Stream(id));
        if !reset_on_close {
            self.receive_before_close(id);
        }
        let now_ns = self.engine.read_clock();
        let (stack, arena, _) = self.engine.parts();
        match reset_on_close {
            true => stack.tcp_abort(now_ns, arena, id),
            false => stack.tcp_close(now_ns, arena, id),
        }
        self.claims.release_after_close(stack, id, claim);
    }

    fn udp_bind(&mut self, local: SocketAddr, options: UdpOptions) -> io::Result<NewSocket<UdpId>> {
        let (stack, _, _) = self.engine.parts();
        let id = stack.udp_bind(local, options)?;
        let local = stack.udp_local_addr(id).unwrap_or(local);
        let (device, dual) = (self.engine.device(), options.dual_stack);
        let claimed =
            self.claims.claim(device, TransportProtocol::Udp, local, dual, KernelPort::Own);
        let sharing = PortSharing::new(options.reuse_port, options.owner);
        let claimed = claimed.and_then(|claim| {
            self.claims.claim_among_cores(device, TransportProtocol::Udp, local, sharing, claim)
        });
        let claim = claimed.inspect_err(|_| {
            let (stack, arena, _) = self.engine.parts();
            stack.udp_close(id, arena);
        })?;
        Ok((id, claim))
    }

    fn udp_close(&mut self, id: UdpId, claim: Option<Arc<PortClaim>>) {
        self.release(claim);
        let (stack, arena, _) = self.engine.parts();
        stack.udp_close(id, arena);
        self.reader_groups.close(id);
        self.engine.report_level(id);
        self.poll_sets.forget(SocketId::Udp(id));
    }

    fn udp_connect(&mut self, id: UdpId, peer: Option<SocketAddr>) -> io::Result<()> {
        let (stack, _, _) = self.engine.parts();
        match peer {
            Some(peer) => stack.udp_connect(id, peer)?,
            None => stack.udp_disconnect(id)?,
        }
        Ok(())
    }

    fn udp_local_addr(&mut self, id: UdpId) -> Option<SocketAddr> {
        self.engine.stack().udp_local_addr(id)
    }

    fn udp_peer_addr(&mut self, id: UdpId) -> Option<SocketAddr> {
        self.engine.stack().udp_peer_addr(id)
    }

    fn udp_set_options(&mut self, id: UdpId, options: UdpOptions) -> io::Result<()> {
        Ok(self.engine.parts().0.udp_set_options(id, options)?)
    }

    fn udp_recv(&mut self, id: UdpId, buf: &mut [u8], peek: bool) -> OpResult<DatagramMeta> {
        if let Some(error) = self.udp_take_error(id) {
            return Err(OpError::Failed(error));
        }
        let received_ns = self.engine.monotonic_ns();
        let (stack, arena, _) = self.engine.parts();
        let mut take = |info: DatagramInfo, bytes: &[u8]| {
            let len = bytes.len().min(buf.len());
            buf[..len].copy_from_slice(&bytes[..len]);
            DatagramMeta {
                len,
                truncated: len < bytes.len(),
                datagram_len: bytes.len(),
                from: info.remote,
                to: info.local,
                hop_limit: Some(info.hop_limit),
                traffic_class: Some(info.traffic_class),
                received_ns: Some(received_ns),
            }
        };
        if peek {
            return stack.udp_peek(arena, id, take).ok_or(OpError::WouldBlock);
        }
        let datagram = stack.udp_recv(arena, id).ok_or(OpError::WouldBlock)?;
        let received = take(datagram.info(), datagram.bytes(arena));
        datagram.release(arena);
        self.wake_next_reader(id);
        Ok(received)
    }

    #[inline]
    fn udp_send(
        &mut self,
        id: UdpId,
        payload: &[u8],
        to: Option<SocketAddr>,
        options: UdpSendOptions,
    ) -> OpResult<()> {
        let (stack, arena, now_ns) = self.engine.parts();
        Ok(stack.udp_send(now_ns, arena, id, to, options, payload)?)
    }

    fn udp_flush(&mut self) -> io::Result<()> {
        self.flush()
    }

    fn udp_take_error(&mut self, id: UdpId) -> Option<io::Error> {
        self.engine.parts().0.udp_take_error(id).map(io::Error::from)
    }

    fn udp_take_error_report(&mut self, id: UdpId) -> io::Result<Option<UdpErrorReport>> {
        Ok(self.engine.parts().0.udp_take_error_report(id))
    }
}
