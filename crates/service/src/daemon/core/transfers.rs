//! Requests to send or receive a socket, executed on the core of the application.

use std::io::ErrorKind;

use super::find_by_token;
use super::server::SocketServer;
use crate::daemon::application::{Application, KernelSocket};
use crate::daemon::ids::SocketKey;
use crate::daemon::transfer::request::{TransferRequest, answer};
use crate::daemon::workers::WakeCores;
use crate::ipc::handshake::{Shard, TransferOperation};

impl SocketServer {
    /// Executes a transfer request and answers it. Returns the socket to poll next, if any.
    pub(in crate::daemon) fn handle_transfer(
        &mut self,
        apps: &mut [Option<Box<Application>>],
        request: TransferRequest,
        wake: &WakeCores,
    ) -> Option<SocketKey> {
        let fd_cookie = request.fd_cookie();
        let TransferRequest { connection, token, operation, descriptor, port, cookie, .. } =
            request;
        let Self { engine, sockets, transfers, .. } = self;
        let mut left = None;
        let outcome = match find_by_token(apps, token) {
            None => Err(ErrorKind::PermissionDenied.into()),
            Some((number, app)) => match operation {
                TransferOperation::Send(handle, Shard { count, .. }) => {
                    let (_, _, now_ns) = engine.parts();
                    let sent = transfers.send(sockets, app, handle, fd_cookie, count, now_ns);
                    sent.map(|()| None)
                }
                TransferOperation::Withdraw(_) => {
                    left = transfers.withdraw(sockets, app.identity.uid, fd_cookie);
                    Ok(None)
                }
                TransferOperation::Receive(_) => {
                    transfers.receive(sockets, engine, number, app, fd_cookie).map(Some)
                }
                TransferOperation::ReservePort(shard) => match port {
                    Some(port) => {
                        let kernel_socket =
                            KernelSocket { socket: descriptor, port, cookie, shard };
                        app.register_kernel_socket(kernel_socket, wake);
                        Ok(None)
                    }
                    None => Err(ErrorKind::InvalidInput.into()),
                },
            },
        };
        let to_poll = left.and_then(|key| self.close_unshared(key, false));
        answer(&connection, outcome);
        to_poll
    }

    /// Closes sockets whose transfer has expired. Returns the sockets to poll.
    pub(super) fn expire_transfers(&mut self, now_ns: u64) -> Vec<SocketKey> {
        let left = self.transfers.expire(&mut self.sockets, now_ns);
        left.into_iter().filter_map(|key| self.close_unshared(key, false)).collect()
    }
}
