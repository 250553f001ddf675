//! Requests of applications to send or receive a socket.

use std::io;
use std::os::fd::AsFd;

use tidegate_engine::BoundPort;

use super::table::FdCookie;
use crate::daemon::workers::AppFd;
use crate::ipc::handshake::{Shard, TransferOperation};
use crate::ipc::takeover_token::TakeoverToken;
use crate::ipc::transfer_reply::{TransferReply, send_outcome};

/// Request of an application that presents a descriptor.
pub(in crate::daemon) struct TransferRequest {
    /// Connection on which the request is answered.
    pub(in crate::daemon) connection: AppFd,
    /// Takeover token of the application.
    pub(in crate::daemon) token: TakeoverToken,
    pub(in crate::daemon) operation: TransferOperation,
    /// Presented descriptor.
    pub(in crate::daemon) descriptor: AppFd,
    /// Port of the descriptor, for a port to be reserved.
    pub(in crate::daemon) port: Option<BoundPort>,
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

/// Answers a request, on a worker.
pub(in crate::daemon) fn answer(connection: &AppFd, outcome: io::Result<Option<TransferReply>>) {
    connection.run(|connection| {
        // The process may be gone, and the socket with it soon.
        let _ = send_outcome(connection.as_fd(), outcome.map_err(|error| error.kind()));
    });
}
