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
        let is_counted =
            |transfer: &&SocketTransfer| transfer.uid == uid && transfer.is_in_transit();
        let is_full = self.0.values().filter(is_counted).count() >= MAX_TRANSFERS_PER_USER;
        let is_free = self.can_insert(fd_cookie, key);
        match self.0.get_mut(&fd_cookie).filter(|transfer| transfer.key == key) {
            Some(transfer) if transfer.is_in_transit() => {
                (transfer.pending_receivers, transfer.expires_ns) =
                    (transfer.pending_receivers.saturating_add(1), expires_ns);
                return Ok(());
            }
            _ if is_full => return Err(ErrorKind::QuotaExceeded.into()),
            Some(transfer) => (transfer.pending_receivers, transfer.expires_ns) = (1, expires_ns),
            None if is_free => {
                let transfer = SocketTransfer {
                    key,
                    uid,
                    pending_receivers: 1,
                    expires_ns,
                    is_shared: false,
                    shards,
                };
                self.0.insert(fd_cookie, transfer);
            }
            None => return Err(ErrorKind::InvalidInput.into()),
        }
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
            self.0.insert(fd_cookie, transfer);
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
        let transfer = self.0.get(&fd_cookie).ok_or(ErrorKind::NotConnected)?;
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
        let transfer = self.0.get(&fd_cookie)?;
        if transfer.uid == uid { self.on_received(sockets, fd_cookie) } else { None }
    }

    /// Ends the transfers that have expired. Returns the sockets without a holder left.
    pub(in crate::daemon) fn expire(
        &mut self,
        sockets: &mut SocketTable,
        now_ns: u64,
    ) -> Vec<SocketKey> {
        let late = |(&fd_cookie, transfer): (&FdCookie, &SocketTransfer)| {
            (transfer.is_in_transit() && transfer.expires_ns <= now_ns).then_some(fd_cookie)
        };
        let late: Vec<_> = self.0.iter().filter_map(late).collect();
        late.into_iter().filter_map(|fd_cookie| self.end(sockets, fd_cookie)).collect()
    }

    /// Counts one receiver of a socket in transit. Returns the socket if no holder is left.
    fn on_received(&mut self, sockets: &mut SocketTable, fd_cookie: FdCookie) -> Option<SocketKey> {
        let transfer = self.0.get_mut(&fd_cookie).filter(|transfer| transfer.is_in_transit())?;
        transfer.pending_receivers -= 1;
        match transfer.pending_receivers {
            0 => self.end(sockets, fd_cookie),
            _ => None,
        }
    }

    /// Ends a transfer. Returns the socket if no holder is left.
    fn end(&mut self, sockets: &mut SocketTable, fd_cookie: FdCookie) -> Option<SocketKey> {
        let transfer = self.0.get_mut(&fd_cookie)?;
        let key = transfer.key;
        (transfer.pending_receivers, transfer.expires_ns) = (0, u64::MAX);
        if !transfer.is_shared {
            self.0.remove(&fd_cookie);
        }
        sockets.remove_holder(key, NO_APP);
        sockets.get(key)?.holders().is_empty().then_some(key)
    }
}
