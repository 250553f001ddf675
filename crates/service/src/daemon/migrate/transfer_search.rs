//! Search of the cores for an application and its socket, for a transfer request.

use std::io::{self, ErrorKind};

use crate::daemon::core::message::CoreMessage;
use crate::daemon::core::{NetworkCore, find_by_token};
use crate::daemon::transfer::request::{SearchTarget, TransferRequest, answer};
use crate::ipc::handshake::TransferOperation;

/// Times that all cores are searched for a socket, which may be migrating.
const SOCKET_SEARCH_LAPS: usize = 8;

impl NetworkCore {
    /// Handles a transfer request here, or forwards it to the core of its application. A socket
    /// to be received migrates to the application's core first.
    pub(in crate::daemon) fn handle_transfer(
        &mut self,
        request: TransferRequest,
    ) -> io::Result<()> {
        let (count, own, hops) = (self.cores.count(), self.index, request.hops);
        let is_here = find_by_token(&mut self.apps, request.token).is_some();
        let is_take = matches!(request.operation, TransferOperation::Receive(_));
        let key = self.server.transfers.key(request.fd_cookie());
        let next = (own + 1) % count;
        let (to, search, hops) = match request.search {
            _ if count == 1 || hops >= self.cores.max_hops() => return self.transfer_here(request),
            SearchTarget::Application if !is_here => (next, SearchTarget::Application, hops + 1),
            SearchTarget::Application if is_take && key.is_none() => {
                (next, SearchTarget::Socket { target_core: own, asked_cores: 1 }, hops + 1)
            }
            SearchTarget::Application => return self.transfer_here(request),
            SearchTarget::Socket { target_core, asked_cores } => match key {
                Some(key) if target_core != own => {
                    let set = self.migration_set_of(key);
                    self.migrate(set, target_core)?;
                    (target_core, SearchTarget::Application, hops + 1)
                }
                Some(_) => (target_core, SearchTarget::Application, hops + 1),
                None if asked_cores < SOCKET_SEARCH_LAPS * count => (
                    next,
                    SearchTarget::Socket { target_core, asked_cores: asked_cores + 1 },
                    hops + 1,
                ),
                None => {
                    answer(&request.connection, Err(ErrorKind::NotConnected.into()));
                    return Ok(());
                }
            },
        };
        let request = TransferRequest { search, hops, ..request };
        self.cores.inbox(to).send(CoreMessage::Transfer(Box::new(request)))
    }

    fn transfer_here(&mut self, request: TransferRequest) -> io::Result<()> {
        let wake = self.cores.wake();
        if let Some(key) = self.server.handle_transfer(&mut self.apps, request, wake) {
            self.poll_socket(key);
        }
        self.free_ended_sockets();
        Ok(())
    }
}
