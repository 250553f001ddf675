//! Socket server of a network core: its engine, and the application sockets served from it.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use tidegate_device::sharded::PortSharing;
use tidegate_device::steering::TransportProtocol;
use tidegate_engine::{Engine, PortClaim, PortClaims};
use tidegate_stack::{TcpId, TcpListenerId, UdpId};

use crate::daemon::application::Application;
use crate::daemon::ids::{AppNumber, Holder, SocketKey, StackSocketId};
use crate::daemon::socket::table::{SocketIndex, SocketTable};
use crate::daemon::socket::{AppSocket, SocketKind};
use crate::daemon::transfer::table::TransferTable;
use crate::ipc::command::Handle;
use crate::ipc::layout::SharedMemory;

/// Engine of a network core, and the application sockets served from it.
pub(in crate::daemon) struct SocketServer {
    pub(in crate::daemon) engine: Engine,
    pub(in crate::daemon) claims: PortClaims,
    pub(in crate::daemon) sockets: SocketTable,
    pub(in crate::daemon) socket_index: SocketIndex,
    pub(in crate::daemon) transfers: TransferTable,
    /// Ended sockets whose holders have not released their slots yet.
    pub(in crate::daemon) ended: Vec<AppSocket>,
}

impl SocketServer {
    pub(in crate::daemon) fn new(mut engine: Engine, claims: PortClaims) -> Self {
        // A slow reader must cost the other applications of the core little.
        engine.gate().bound_pauses();
        Self {
            engine,
            claims,
            sockets: SocketTable::default(),
            socket_index: SocketIndex::default(),
            transfers: TransferTable::default(),
            ended: Vec::new(),
        }
    }

    /// Creates a socket and inserts it for its application.
    pub(super) fn add_socket(
        &mut self,
        number: AppNumber,
        app: &mut Application,
        make: impl FnOnce(&SharedMemory, Handle) -> io::Result<AppSocket>,
    ) -> io::Result<SocketKey> {
        let handle = app.slots.reserve()?;
        let made = make(&app.memory, handle).inspect_err(|_| app.slots.free(handle.slot));
        let socket = made?.owned_by(Holder { app: number, slot: handle.slot });
        let key = self.sockets.insert(socket);
        app.insert_socket(handle, key)?;
        Ok(key)
    }

    /// Gives a fork child the sockets of its parent, without sockets the parent has closed.
    pub(in crate::daemon) fn inherit(
        &mut self,
        number: AppNumber,
        child: &mut Application,
        parent: &Application,
    ) -> io::Result<()> {
        for (handle, key) in parent.sockets() {
            if self.sockets.get(key).is_some_and(|socket| !socket.is_closed()) {
                child.inherit_socket(handle, key)?;
                self.sockets.add_holder(key, Holder { app: number, slot: handle.slot });
            }
        }
        child.slots.finish_inheriting();
        Ok(())
    }

    /// Removes an application from the holders of a shared socket.
    pub(super) fn leave_socket(
        &mut self,
        number: AppNumber,
        app: &mut Application,
        key: SocketKey,
    ) {
        let Some(holder) = self.sockets.remove_holder(key, number) else { return };
        let is_own = self.sockets.get(key).is_some_and(|socket| socket.slot.is_in(&app.memory));
        app.slots.remove(holder.slot, is_own);
    }

    /// Closes a socket without other holders. Returns its key if it must be polled. Received bytes
    /// that the application has not read reset the connection (RFC 9293 section 3.10.4).
    pub(super) fn close_unshared(&mut self, key: SocketKey, abrupt: bool) -> Option<SocketKey> {
        let socket = self.sockets.get_mut(key)?;
        let mut abrupt = abrupt;
        if let SocketKind::Stream(stream) = &mut socket.kind {
            abrupt |= stream.has_unread();
            if !abrupt {
                stream.is_closed = true;
                return Some(key);
            }
        }
        self.end_socket(key, abrupt);
        None
    }

    /// Ends a socket, in the stack too.
    pub(super) fn end_socket(&mut self, key: SocketKey, abrupt: bool) {
        let Some(socket) = self.sockets.remove(key) else { return };
        let (mut socket, claim) = socket.split_claim();
        match &mut socket.kind {
            SocketKind::Udp(datagrams) => {
                let (_, arena, _) = self.engine.parts();
                datagrams.release_pending(arena);
                self.socket_index.remove(StackSocketId::Udp(datagrams.id));
                self.close_udp(datagrams.id);
                self.release_claim(claim);
            }
            SocketKind::Listener(id) => {
                self.socket_index.remove(StackSocketId::Listener(*id));
                self.transfers.remove_socket(key);
                self.close_listener(*id);
                // Its connections may still need the port.
                if let Some(claim) = claim.as_ref().filter(|claim| Arc::strong_count(claim) > 1) {
                    claim.stop_listening();
                }
                self.release_claim(claim);
            }
            SocketKind::Stream(stream) => {
                self.socket_index.remove(StackSocketId::Stream(stream.id));
                self.end_stream(stream.id, abrupt, claim);
            }
        }
        self.ended.push(*socket);
    }

    pub(super) fn close_udp(&mut self, id: UdpId) {
        let (stack, arena, _) = self.engine.parts();
        stack.udp_close(id, arena);
        self.engine.report_level(id);
    }

    pub(super) fn close_listener(&mut self, id: TcpListenerId) {
        let (stack, arena, now_ns) = self.engine.parts();
        stack.tcp_close_listener(now_ns, arena, id);
    }

    pub(super) fn end_stream(&mut self, id: TcpId, abrupt: bool, claim: Option<Arc<PortClaim>>) {
        let (stack, arena, now_ns) = self.engine.parts();
        match abrupt {
            true => stack.tcp_abort(now_ns, arena, id),
            false => stack.tcp_close(now_ns, arena, id),
        }
        self.claims.release_after_close(stack, id, claim);
    }

    /// Claims the port of a new socket among the network cores.
    pub(in crate::daemon) fn claim_among_cores(
        &mut self,
        protocol: TransportProtocol,
        local: SocketAddr,
        sharing: PortSharing,
        claim: Option<Arc<PortClaim>>,
    ) -> io::Result<Option<Arc<PortClaim>>> {
        self.claims.claim_among_cores(self.engine.device(), protocol, local, sharing, claim)
    }

    /// Returns a port to the kernel unless another socket needs it.
    pub(in crate::daemon) fn release_claim(&mut self, claim: Option<Arc<PortClaim>>) {
        self.claims.release(self.engine.device(), claim);
    }

    /// Releases the ports of closed connections that have ended.
    pub(in crate::daemon) fn release_closed(&mut self) {
        self.claims.release_closed(&mut self.engine);
    }
}
