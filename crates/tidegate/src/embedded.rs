//! Calls on a stack that runs in this program.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use tidegate_engine::Claim;
use tidegate_port::steering::Protocol;
use tidegate_stack::{
    Shutdown, TcpError, TcpId, TcpInfo, TcpListenerId, TcpOptions, TcpState, UdpId, UdpOptions,
};

use crate::calls::{CallError, Called, Calls, Made};
use crate::net::Core;
use crate::poll::{Polls, Ready};
use crate::readiness::Readiness;
use crate::tasks::Tasks;
use crate::udp::Received;
use crate::wait::{SetNumber, SocketId, Waiters};

impl Core {
    /// Gives a port back to the kernel, if nobody else needs it.
    fn release(&mut self, claim: Option<Arc<Claim>>) {
        self.claims.release(self.engine.port(), claim);
    }

    /// When more datagrams wait, wakes another thread that waits for them.
    pub(crate) fn pass_on(&self, id: UdpId) {
        if !self.waiters.is_empty() && self.engine.stack().udp_readable(id) > 0 {
            self.waiters.wake(SocketId::Udp(id));
        }
    }
}

impl Calls for Core {
    fn core(&mut self) -> Option<&mut Core> {
        Some(self)
    }

    fn polls(&mut self) -> &mut Polls {
        &mut self.polls
    }

    fn waiters(&mut self) -> &mut Waiters {
        &mut self.waiters
    }

    fn tasks(&mut self) -> &mut Tasks {
        &mut self.tasks
    }

    fn failure(&self) -> Option<io::Error> {
        self.failure.as_ref().map(|failure| io::Error::new(failure.kind(), failure.to_string()))
    }

    fn readiness(&mut self, id: SocketId) -> Readiness {
        let Self { polls, engine, .. } = self;
        match id {
            SocketId::Poll(set) => Readiness {
                readable: polls.has_ready(set, &mut |id| Readiness::of(engine.stack(), id)),
                ..Readiness::default()
            },
            _ => Readiness::of(engine.stack(), id),
        }
    }

    fn collect(&mut self, set: SetNumber, limit: usize, tell: &mut dyn FnMut(Ready)) {
        let Self { polls, engine, .. } = self;
        polls.collect(set, &mut |id| Readiness::of(engine.stack(), id), limit, tell);
    }

    fn has_address(&mut self, address: IpAddr) -> bool {
        self.engine.stack().has_address(address)
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
        self.send_and_tell()
    }

    fn commit_later(&mut self) -> io::Result<()> {
        if self.tasks.call_driver() {
            return Ok(());
        }
        Calls::commit(self)
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
    ) -> io::Result<Made<TcpListenerId>> {
        let (port, dual) = (self.engine.port(), options.dual_stack);
        let claim = self.claims.claim(port, Protocol::Tcp, local, dual, None)?;
        let local = claim.as_ref().map_or(local, |claim| claim.local());
        let (stack, _, _) = self.engine.parts();
        match stack.tcp_listen(local, backlog, options) {
            Ok(id) => Ok((id, claim)),
            Err(error) => {
                self.release(claim);
                Err(error.into())
            }
        }
    }

    fn tcp_listener_addr(&mut self, id: TcpListenerId) -> Option<SocketAddr> {
        self.engine.stack().tcp_listener_addr(id)
    }

    fn tcp_accept(&mut self, listener: TcpListenerId) -> Called<(TcpId, SocketAddr)> {
        let (stack, _, _) = self.engine.parts();
        let id = stack.tcp_accept(listener)?;
        let peer = stack.tcp_peer_addr(id).ok_or(TcpError::NotConnected)?;
        // Others may wait for the next.
        if stack.tcp_acceptable(listener) > 0 {
            let listener = SocketId::Listener(listener);
            self.waiters.wake(listener);
            self.tasks.wake_accepting(listener);
        }
        Ok((id, peer))
    }

    fn tcp_close_listener(&mut self, id: TcpListenerId, claim: Option<Arc<Claim>>) {
        let now_ns = self.engine.read_clock();
        let (stack, arena, _) = self.engine.parts();
        stack.tcp_close_listener(now_ns, arena, id);
        self.release(claim);
        // A port that takes nothing more says so to the next who uses it.
        let _ = self.send_and_tell();
    }

    fn tcp_connect(
        &mut self,
        local: Option<SocketAddr>,
        remote: SocketAddr,
        options: TcpOptions,
    ) -> io::Result<Made<TcpId>> {
        let claim = self.claims.claim_to_reach(self.engine.port(), local, remote, None)?;
        let local = claim.as_ref().map(|claim| claim.local()).or(local);
        let now_ns = self.engine.read_clock();
        let (stack, arena, _) = self.engine.parts();
        match stack.tcp_connect(now_ns, arena, local, remote, options) {
            Ok(id) => Ok((id, claim)),
            Err(error) => {
                self.release(claim);
                Err(error.into())
            }
        }
    }

    fn tcp_finish_connect(&mut self, id: TcpId) -> Called<()> {
        let (stack, _, _) = self.engine.parts();
        match stack.tcp_state(id) {
            Some(TcpState::SynSent | TcpState::SynReceived) => Err(CallError::WouldBlock),
            Some(_) => stack.tcp_take_error(id).map_or(Ok(()), |error| Err(error.into())),
            None => Err(TcpError::Closed.into()),
        }
    }

    #[inline]
    fn tcp_recv(&mut self, id: TcpId, buf: &mut [u8]) -> Called<usize> {
        let (stack, _, now_ns) = self.engine.parts();
        Ok(stack.tcp_read(now_ns, id, buf)?)
    }

    fn tcp_peek(&mut self, id: TcpId, buf: &mut [u8]) -> Called<usize> {
        Ok(self.engine.parts().0.tcp_peek(id, buf)?)
    }

    #[inline]
    fn tcp_recv_with(&mut self, id: TcpId, read: &mut dyn FnMut(&[u8]) -> usize) -> Called<usize> {
        let (stack, _, now_ns) = self.engine.parts();
        Ok(stack.tcp_read_with(now_ns, id, read)?)
    }

    fn tcp_readable(&mut self, id: TcpId) -> usize {
        self.engine.stack().tcp_readable(id)
    }

    fn tcp_writable(&mut self, id: TcpId) -> usize {
        self.engine.stack().tcp_writable(id)
    }

    #[inline]
    fn tcp_send(&mut self, id: TcpId, data: &[u8]) -> Called<usize> {
        let (stack, _, now_ns) = self.engine.parts();
        Ok(stack.tcp_write(now_ns, id, data)?)
    }

    #[inline]
    fn tcp_send_with(
        &mut self,
        id: TcpId,
        limit: usize,
        write: &mut dyn FnMut(&mut [u8]) -> usize,
    ) -> Called<usize> {
        let (stack, _, now_ns) = self.engine.parts();
        Ok(stack.tcp_write_with(now_ns, id, limit, write)?)
    }

    fn tcp_shutdown(&mut self, id: TcpId, how: Shutdown) -> io::Result<()> {
        let now_ns = self.engine.read_clock();
        let (stack, arena, _) = self.engine.parts();
        stack.tcp_shutdown(now_ns, arena, id, how)?;
        self.send_and_tell()
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
        self.send_and_tell()
    }

    fn tcp_take_error(&mut self, id: TcpId) -> Option<io::Error> {
        self.engine.parts().0.tcp_take_error(id).map(io::Error::from)
    }

    fn tcp_end(&mut self, id: TcpId, abrupt: bool, claim: Option<Arc<Claim>>) {
        self.polls.forget(SocketId::Stream(id));
        self.tasks.forget(SocketId::Stream(id));
        let now_ns = self.engine.read_clock();
        let (stack, arena, _) = self.engine.parts();
        match abrupt {
            true => stack.tcp_abort(now_ns, arena, id),
            false => stack.tcp_close(now_ns, arena, id),
        }
        self.claims.release_later(id, claim);
    }

    fn udp_bind(&mut self, local: SocketAddr, options: UdpOptions) -> io::Result<Made<UdpId>> {
        let (stack, _, _) = self.engine.parts();
        let id = stack.udp_bind(local, options)?;
        let local = stack.udp_local_addr(id).unwrap_or(local);
        let port = self.engine.port();
        let claimed = self.claims.claim(port, Protocol::Udp, local, options.dual_stack, None);
        let claim = claimed.inspect_err(|_| {
            let (stack, arena, _) = self.engine.parts();
            stack.udp_close(id, arena);
        })?;
        Ok((id, claim))
    }

    fn udp_close(&mut self, id: UdpId, claim: Option<Arc<Claim>>) {
        self.release(claim);
        let (stack, arena, _) = self.engine.parts();
        stack.udp_close(id, arena);
        self.groups.close(id);
        self.engine.tell_level(id);
        self.polls.forget(SocketId::Udp(id));
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

    fn udp_recv(&mut self, id: UdpId, buf: &mut [u8], peek: bool) -> Called<Received> {
        if let Some(error) = self.udp_take_error(id) {
            return Err(CallError::Failed(error));
        }
        let (stack, arena, _) = self.engine.parts();
        let mut take = |from, to, bytes: &[u8]| {
            let len = bytes.len().min(buf.len());
            buf[..len].copy_from_slice(&bytes[..len]);
            Received { len, truncated: len < bytes.len(), datagram_len: bytes.len(), from, to }
        };
        if peek {
            return stack.udp_peek(arena, id, take).ok_or(CallError::WouldBlock);
        }
        let datagram = stack.udp_receive(arena, id).ok_or(CallError::WouldBlock)?;
        let received = take(datagram.remote, datagram.local, datagram.bytes(arena));
        datagram.release(arena);
        self.pass_on(id);
        Ok(received)
    }

    #[inline]
    fn udp_send(
        &mut self,
        id: UdpId,
        payload: &[u8],
        to: Option<SocketAddr>,
        from: Option<IpAddr>,
    ) -> Called<()> {
        let (stack, arena, now_ns) = self.engine.parts();
        Ok(stack.udp_send(now_ns, arena, id, to, from, payload)?)
    }

    fn udp_flush(&mut self) -> io::Result<()> {
        self.flush()
    }

    fn udp_take_error(&mut self, id: UdpId) -> Option<io::Error> {
        self.engine.parts().0.udp_take_error(id).map(io::Error::from)
    }
}
