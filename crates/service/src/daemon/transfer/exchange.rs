//! Sockets that leave and enter the transfer table.

use std::io::{self, ErrorKind};

use tidegate_engine::Engine;

use super::table::{FdCookie, IN_TRANSIT, SocketTransfer, TRANSFER_TIMEOUT_NS, TransferTable};
use crate::daemon::application::Application;
use crate::daemon::ids::{AppNumber, Holder, NO_APP, SocketKey};
use crate::daemon::socket::SocketKind;
use crate::daemon::socket::table::SocketTable;
use crate::ipc::command::Handle;
use crate::ipc::handshake::Shard;
use crate::ipc::notification::OpenedSocket;
use crate::ipc::transfer_reply::{TransferReply, TransferredType};

/// Maximum number of sockets of one user in transit.
const MAX_TRANSFERS_PER_USER: usize = 4096;

impl TransferTable {
    /// Puts a socket of an application in transit, for one more receiver.
    ///
    /// # Errors
    /// [`ErrorKind::NotConnected`] without such a socket, [`ErrorKind::QuotaExceeded`] when too
    /// many sockets of the user are in transit, [`ErrorKind::InvalidInput`] when the descriptor
    /// or the socket has another transfer.
    pub(in crate::daemon) fn send(
        &mut self,
        sockets: &mut SocketTable,
        app: &Application,
        handle: Handle,
        fd_cookie: FdCookie,
        shards: u8,
        now_ns: u64,
    ) -> io::Result<()> {
        let key = app.key(handle).ok_or(ErrorKind::NotConnected)?;
        let (uid, expires_ns) = (app.identity.uid, now_ns.saturating_add(TRANSFER_TIMEOUT_NS));
        let is_full = self.in_transit_of(uid) >= MAX_TRANSFERS_PER_USER;
        let known = self.get(fd_cookie).filter(|transfer| transfer.key == key).copied();
        let transfer = match known {
            Some(transfer) if transfer.is_in_transit() => {
                let pending_receivers = transfer.pending_receivers.saturating_add(1);
                let transfer = SocketTransfer { pending_receivers, expires_ns, ..transfer };
                self.insert(fd_cookie, transfer);
                return Ok(());
            }
            _ if is_full => return Err(ErrorKind::QuotaExceeded.into()),
            Some(transfer) => SocketTransfer { pending_receivers: 1, expires_ns, ..transfer },
            None if self.can_insert(fd_cookie, key) => SocketTransfer {
                key,
                uid,
                pending_receivers: 1,
                expires_ns,
                is_shared: false,
                shards,
            },
            None => return Err(ErrorKind::InvalidInput.into()),
        };
        self.insert(fd_cookie, transfer);
        sockets.add_holder(key, IN_TRANSIT);
        Ok(())
    }

    /// Makes a listener available to the other holders of its kernel socket: an application that
    /// presents the kernel socket and listens on it receives the listener.
    pub(in crate::daemon) fn share_listener(
        &mut self,
        app: &Application,
        key: SocketKey,
        cookie: u64,
        shard: Shard,
    ) {
        let fd_cookie = FdCookie { cookie, shard: shard.index };
        if self.can_insert(fd_cookie, key) {
            let transfer = SocketTransfer {
                key,
                uid: app.identity.uid,
                pending_receivers: 0,
                expires_ns: u64::MAX,
                is_shared: true,
                shards: shard.count,
            };
            self.insert(fd_cookie, transfer);
        }
    }

    /// Gives an application the socket that belongs to a descriptor.
    ///
    /// # Errors
    /// [`ErrorKind::NotConnected`] without such a socket, [`ErrorKind::PermissionDenied`] for a
    /// socket of another user, and errors when the application has no free slot.
    pub(in crate::daemon) fn receive(
        &mut self,
        sockets: &mut SocketTable,
        engine: &Engine,
        number: AppNumber,
        app: &mut Application,
        fd_cookie: FdCookie,
    ) -> io::Result<TransferReply> {
        let transfer = self.get(fd_cookie).ok_or(ErrorKind::NotConnected)?;
        let (key, shards) = (transfer.key, transfer.shards);
        if transfer.uid != app.identity.uid {
            return Err(ErrorKind::PermissionDenied.into());
        }
        if sockets.get(key).is_none() {
            return Err(ErrorKind::NotConnected.into());
        }
        let own = app.sockets().find(|&(_, other)| other == key);
        let handle = match own {
            Some((handle, _)) => handle,
            None => {
                let handle = app.slots.reserve()?;
                app.insert_socket(handle, key)?;
                sockets.add_holder(key, Holder { app: number, slot: handle.slot });
                handle
            }
        };
        let socket = sockets.get(key).ok_or(ErrorKind::NotConnected)?;
        let socket_type = match &socket.kind {
            SocketKind::Udp(_) => TransferredType::Udp,
            SocketKind::Listener(_) => TransferredType::Listener,
            SocketKind::Stream(_) => TransferredType::Stream,
        };
        let reply = TransferReply {
            socket: OpenedSocket {
                handle,
                local: socket.local_addr(engine),
                peer: socket.peer_addr(engine),
            },
            socket_type,
            is_new: own.is_none(),
            shards,
            slot: socket.handle.slot,
            memory: socket.slot.memory().clone(),
        };
        // The socket has a lasting holder now.
        self.on_received(sockets, fd_cookie);
        Ok(reply)
    }

    /// Withdraws a socket of a user from transit, for one receiver. Returns the socket if no
    /// holder is left.
    pub(in crate::daemon) fn withdraw(
        &mut self,
        sockets: &mut SocketTable,
        uid: u32,
        fd_cookie: FdCookie,
    ) -> Option<SocketKey> {
        let transfer = self.get(fd_cookie)?;
        if transfer.uid == uid { self.on_received(sockets, fd_cookie) } else { None }
    }

    /// Ends the transfers that have expired. Returns the sockets without a holder left.
    pub(in crate::daemon) fn expire(
        &mut self,
        sockets: &mut SocketTable,
        now_ns: u64,
    ) -> Vec<SocketKey> {
        let mut unheld = Vec::new();
        while let Some(fd_cookie) = self.expired(now_ns) {
            unheld.extend(self.end(sockets, fd_cookie));
        }
        unheld
    }

    /// Counts one receiver of a socket in transit. Returns the socket if no holder is left.
    fn on_received(&mut self, sockets: &mut SocketTable, fd_cookie: FdCookie) -> Option<SocketKey> {
        let transfer = *self.get(fd_cookie).filter(|transfer| transfer.is_in_transit())?;
        let pending_receivers = transfer.pending_receivers - 1;
        if pending_receivers == 0 {
            return self.end(sockets, fd_cookie);
        }
        self.insert(fd_cookie, SocketTransfer { pending_receivers, ..transfer });
        None
    }

    /// Ends a transfer. Returns the socket if no holder is left.
    fn end(&mut self, sockets: &mut SocketTable, fd_cookie: FdCookie) -> Option<SocketKey> {
        let transfer = self.remove(fd_cookie)?;
        let key = transfer.key;
        if transfer.is_shared {
            let ended = SocketTransfer { pending_receivers: 0, expires_ns: u64::MAX, ..transfer };
            self.insert(fd_cookie, ended);
        }
        sockets.remove_holder(key, NO_APP);
        sockets.get(key)?.holders().is_empty().then_some(key)
    }
}
