//! Transfer of sockets between applications.
//!
//! A process hands a socket on by sending the kernel descriptor that stands for it, over a Unix
//! socket or through `exec`. The daemon sees neither. The sending process announces the
//! transfer before, and the receiving process asks for the socket after; both present the
//! descriptor. The kernel's cookie of the descriptor identifies the socket, and a process can
//! only present a descriptor it has.
//!
//! The receiving application gets the memory of the socket, like a fork child, so both must run
//! as one user. A socket in transit has a holder of its own, so that it outlives its sender.

use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use super::table::{FdCookie, IN_TRANSIT, SocketTransfer, TRANSFER_TIMEOUT_NS};
use crate::daemon::application::Application;
use crate::daemon::core::commands::SocketServer;
use crate::daemon::ids::{AppNumber, Holder, NO_APP, SocketKey};
use crate::daemon::socket::SocketKind;
use crate::ipc::command::Handle;
use crate::ipc::handshake::{Shard, TransferOperation};
use crate::ipc::notification::OpenedSocket;
use crate::ipc::takeover_token::TakeoverToken;
use crate::ipc::transfer_reply::{TransferReply, TransferredType, send_outcome};

/// Maximum number of sockets of one user in transit.
const MAX_TRANSFERS_PER_USER: usize = 4096;

/// Request of an application that presents a descriptor.
pub(in crate::daemon) struct TransferRequest {
    /// Connection on which the request is answered.
    pub(in crate::daemon) connection: UnixStream,
    /// Takeover token of the application.
    pub(in crate::daemon) token: TakeoverToken,
    pub(in crate::daemon) operation: TransferOperation,
    /// Presented descriptor.
    pub(in crate::daemon) descriptor: OwnedFd,
    /// Kernel's socket cookie of the descriptor.
    pub(in crate::daemon) cookie: u64,
    /// Current target of the search among the cores.
    pub(in crate::daemon) search: SearchTarget,
    /// Cores that have had the request.
    pub(in crate::daemon) hops: usize,
}

impl TransferRequest {
    /// Descriptor cookie and shard of the socket concerned.
    pub(in crate::daemon) fn fd_cookie(&self) -> FdCookie {
        let shard = match self.operation {
            TransferOperation::Send(_, Shard { index, .. })
            | TransferOperation::ReservePort(Shard { index, .. }) => index,
            TransferOperation::Withdraw(part) | TransferOperation::Receive(part) => part,
        };
        FdCookie { cookie: self.cookie, shard }
    }
}

/// Target of the search from core to core.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::daemon) enum SearchTarget {
    /// The core of the application, which executes the request.
    Application,
    /// The core of the socket, which migrates to the application's core.
    Socket {
        /// Core of the application.
        target_core: usize,
        /// Cores searched without success.
        asked_cores: usize,
    },
}

type Applications = [Option<Box<Application>>];

pub(in crate::daemon) fn answer(
    connection: &UnixStream,
    outcome: io::Result<Option<TransferReply>>,
) {
    // The process may be gone, and the socket with it soon.
    let _ = send_outcome(connection.as_fd(), outcome.map_err(|error| error.kind()));
}

pub(in crate::daemon) fn find_by_token(
    apps: &mut Applications,
    token: TakeoverToken,
) -> Option<(AppNumber, &mut Application)> {
    let mut all = apps.iter_mut().enumerate();
    all.find_map(|(number, app)| {
        let app = app.as_deref_mut().filter(|app| app.token.ct_eq(&token))?;
        Some((number as AppNumber, app))
    })
}

impl SocketServer {
    /// Executes a transfer request and answers it. Returns the socket to poll next, if any.
    pub(in crate::daemon) fn handle_transfer(
        &mut self,
        apps: &mut Applications,
        request: TransferRequest,
    ) -> Option<SocketKey> {
        let fd_cookie = request.fd_cookie();
        let TransferRequest { connection, token, operation, descriptor, .. } = request;
        let mut to_poll = None;
        let outcome = match find_by_token(apps, token) {
            None => Err(ErrorKind::PermissionDenied.into()),
            Some((number, app)) => match operation {
                TransferOperation::Send(handle, Shard { count, .. }) => {
                    self.send_socket(app, handle, fd_cookie, count).map(|()| None)
                }
                TransferOperation::Withdraw(_) => {
                    let uid = app.identity.uid;
                    let is_own =
                        |transfer: &SocketTransfer| transfer.uid == uid && transfer.is_in_transit();
                    if self.transfers.0.get(&fd_cookie).is_some_and(is_own) {
                        to_poll = self.on_received(fd_cookie);
                    }
                    Ok(None)
                }
                TransferOperation::Receive(_) => {
                    self.receive_socket(number, app, fd_cookie).map(Some)
                }
                TransferOperation::ReservePort(part) => {
                    app.kernel_sockets.register(descriptor, part).map(|()| None)
                }
            },
        };
        answer(&connection, outcome);
        to_poll
    }

    fn send_socket(
        &mut self,
        app: &Application,
        handle: Handle,
        fd_cookie: FdCookie,
        shards: u8,
    ) -> io::Result<()> {
        let key = app.key(handle).ok_or(ErrorKind::NotConnected)?;
        let (_, _, now_ns) = self.engine.parts();
        let (uid, expires_ns) = (app.identity.uid, now_ns.saturating_add(TRANSFER_TIMEOUT_NS));
        let is_counted =
            |transfer: &&SocketTransfer| transfer.uid == uid && transfer.is_in_transit();
        let transfers = &mut self.transfers;
        let is_full = transfers.0.values().filter(is_counted).count() >= MAX_TRANSFERS_PER_USER;
        let is_free = transfers.can_insert(fd_cookie, key);
        match transfers.0.get_mut(&fd_cookie).filter(|transfer| transfer.key == key) {
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
                transfers.0.insert(fd_cookie, transfer);
            }
            None => return Err(ErrorKind::InvalidInput.into()),
        }
        if let Some(socket) = self.sockets.get_mut(key) {
            socket.add_holder(IN_TRANSIT);
        }
        Ok(())
    }

    /// Makes a listener available to the other holders of its kernel socket: an application that
    /// presents the kernel socket and listens on it receives the listener.
    pub(in crate::daemon) fn share_listener(
        &mut self,
        app: &Application,
        key: SocketKey,
        cookie: u64,
        part: Shard,
    ) {
        let fd_cookie = FdCookie { cookie, shard: part.index };
        if self.transfers.can_insert(fd_cookie, key) {
            let (uid, expires_ns) = (app.identity.uid, u64::MAX);
            let shards = part.count;
            let transfer = SocketTransfer {
                key,
                uid,
                pending_receivers: 0,
                expires_ns,
                is_shared: true,
                shards,
            };
            self.transfers.0.insert(fd_cookie, transfer);
        }
    }

    fn receive_socket(
        &mut self,
        number: AppNumber,
        app: &mut Application,
        fd_cookie: FdCookie,
    ) -> io::Result<TransferReply> {
        let transfer = self.transfers.0.get(&fd_cookie).ok_or(ErrorKind::NotConnected)?;
        let (key, shards) = (transfer.key, transfer.shards);
        if transfer.uid != app.identity.uid {
            return Err(ErrorKind::PermissionDenied.into());
        }
        let socket = self.sockets.get_mut(key).ok_or(ErrorKind::NotConnected)?;
        let own = app.sockets().find(|&(_, other)| other == key);
        let handle = match own {
            Some((handle, _)) => handle,
            None => {
                let handle = app.slots.reserve()?;
                app.insert_socket(handle, key)?;
                socket.add_holder(Holder { app: number, slot: handle.slot });
                handle
            }
        };
        let socket_type = match &socket.kind {
            SocketKind::Udp(_) => TransferredType::Udp,
            SocketKind::Listener(_) => TransferredType::Listener,
            SocketKind::Stream(_) => TransferredType::Stream,
        };
        let taken = TransferReply {
            socket: OpenedSocket {
                handle,
                local: socket.local_addr(&self.engine),
                peer: socket.peer_addr(&self.engine),
            },
            socket_type,
            is_new: own.is_none(),
            shards,
            slot: socket.handle.slot,
            memory: socket.slot.memory().clone(),
        };
        // The socket has a lasting holder now.
        self.on_received(fd_cookie);
        Ok(taken)
    }

    /// Counts one receiver. Returns the socket if no holder is left and it must be polled.
    fn on_received(&mut self, fd_cookie: FdCookie) -> Option<SocketKey> {
        let transfer = self.transfers.0.get_mut(&fd_cookie).filter(|p| p.is_in_transit())?;
        transfer.pending_receivers -= 1;
        match transfer.pending_receivers {
            0 => self.end_transfer(fd_cookie),
            _ => None,
        }
    }

    fn end_transfer(&mut self, fd_cookie: FdCookie) -> Option<SocketKey> {
        let transfer = self.transfers.0.get_mut(&fd_cookie)?;
        let key = transfer.key;
        (transfer.pending_receivers, transfer.expires_ns) = (0, u64::MAX);
        if !transfer.is_shared {
            self.transfers.0.remove(&fd_cookie);
        }
        let socket = self.sockets.get_mut(key)?;
        socket.remove_holder(NO_APP);
        if socket.holders.is_empty() { self.close_unshared(key, false) } else { None }
    }

    /// Closes sockets whose transfer has expired. Returns the sockets to poll.
    pub(in crate::daemon) fn expire_transfers(&mut self, now_ns: u64) -> Vec<SocketKey> {
        let late = |(&fd_cookie, transfer): (&FdCookie, &SocketTransfer)| {
            (transfer.is_in_transit() && transfer.expires_ns <= now_ns).then_some(fd_cookie)
        };
        let late: Vec<_> = self.transfers.0.iter().filter_map(late).collect();
        late.into_iter().filter_map(|fd_cookie| self.end_transfer(fd_cookie)).collect()
    }
}
