//! Table of socket transfers: sockets in transit between applications, and listeners that
//! other holders of their kernel socket may receive.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use crate::daemon::ids::{Holder, NO_APP, SocketKey};
use crate::daemon::snapshot_error::InvalidSnapshot;

/// Time after which a socket that no application has received is closed.
pub(super) const TRANSFER_TIMEOUT_NS: u64 = 60_000_000_000;

/// Holder of a socket in transit.
pub(in crate::daemon) const IN_TRANSIT: Holder = Holder { app: NO_APP, slot: 0 };

/// Identifies a transferred socket by the descriptor that travels with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(in crate::daemon) struct FdCookie {
    /// Kernel's socket cookie of the descriptor (`SO_COOKIE`), never reused for another socket.
    pub(in crate::daemon) cookie: u64,
    /// Shard among the sockets that travel with the descriptor.
    pub(in crate::daemon) shard: u8,
}

/// Transfers by descriptor: an application that presents the descriptor receives the socket.
#[derive(Default)]
pub(in crate::daemon) struct TransferTable(pub(in crate::daemon) HashMap<FdCookie, SocketTransfer>);

#[derive(Clone, Copy)]
pub(in crate::daemon) struct SocketTransfer {
    pub(in crate::daemon) key: SocketKey,
    pub(in crate::daemon) uid: u32,
    /// Receivers still expected; the socket is in transit while there are any.
    pub(in crate::daemon) pending_receivers: u32,
    pub(super) expires_ns: u64,
    /// A listener, which other holders of the kernel socket may receive at any time.
    pub(in crate::daemon) is_shared: bool,
    /// Number of sockets that travel with the descriptor.
    pub(in crate::daemon) shards: u8,
}

/// Snapshot of a socket transfer.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(in crate::daemon) struct TransferSnapshot {
    pub(in crate::daemon) fd_cookie: FdCookie,
    pub(in crate::daemon) key: SocketKey,
    pub(in crate::daemon) uid: u32,
    pub(in crate::daemon) pending_receivers: u32,
    pub(in crate::daemon) is_shared: bool,
    pub(in crate::daemon) shards: u8,
}

impl SocketTransfer {
    pub(in crate::daemon) fn is_in_transit(&self) -> bool {
        self.pending_receivers > 0
    }
}

impl TransferTable {
    pub(in crate::daemon) fn save(&self) -> Vec<TransferSnapshot> {
        let save = |(&fd_cookie, transfer): (&FdCookie, &SocketTransfer)| {
            let SocketTransfer { key, uid, pending_receivers, is_shared, shards, .. } = *transfer;
            TransferSnapshot { fd_cookie, key, uid, pending_receivers, is_shared, shards }
        };
        self.0.iter().map(save).collect()
    }

    /// Restores the transfers that another daemon saved. `fits` tells if a transfer agrees with
    /// the socket.
    pub(in crate::daemon) fn restore(
        saved: Vec<TransferSnapshot>,
        now_ns: u64,
        fits: impl Fn(&SocketTransfer) -> bool,
    ) -> Result<Self, InvalidSnapshot> {
        let expires_ns = now_ns.saturating_add(TRANSFER_TIMEOUT_NS);
        let mut transfers = Self::default();
        for TransferSnapshot { fd_cookie, key, uid, pending_receivers, is_shared, shards } in saved
        {
            let is_known = transfers.0.values().any(|transfer| transfer.key == key);
            let transfer =
                SocketTransfer { key, uid, pending_receivers, expires_ns, is_shared, shards };
            let is_right = (transfer.is_in_transit() || is_shared) && fits(&transfer);
            if !is_right || is_known || transfers.0.insert(fd_cookie, transfer).is_some() {
                return Err(InvalidSnapshot("a transfer does not match its socket"));
            }
        }
        Ok(transfers)
    }

    /// True if neither the descriptor nor the socket has a transfer: they correspond one to one.
    pub(super) fn can_insert(&self, fd_cookie: FdCookie, key: SocketKey) -> bool {
        !self.0.contains_key(&fd_cookie) && self.0.values().all(|transfer| transfer.key != key)
    }

    /// Removes the transfer of a listener that has ended.
    pub(in crate::daemon) fn remove_socket(&mut self, key: SocketKey) {
        self.0.retain(|_, transfer| transfer.key != key);
    }

    /// Socket that belongs to this descriptor.
    pub(in crate::daemon) fn key(&self, fd_cookie: FdCookie) -> Option<SocketKey> {
        self.0.get(&fd_cookie).map(|transfer| transfer.key)
    }

    /// Extracts the transfers of these sockets, for another core.
    pub(in crate::daemon) fn extract(
        &mut self,
        keys: &[SocketKey],
    ) -> Vec<(FdCookie, SocketTransfer)> {
        self.0.extract_if(|_, transfer| keys.contains(&transfer.key)).collect()
    }

    /// Inserts transfers from another core; `keys` maps their sockets to the keys on this core.
    pub(in crate::daemon) fn insert_all(
        &mut self,
        transfers: Vec<(FdCookie, SocketTransfer)>,
        keys: &HashMap<SocketKey, SocketKey>,
    ) {
        let here = |(fd_cookie, transfer): (FdCookie, SocketTransfer)| {
            Some((fd_cookie, SocketTransfer { key: *keys.get(&transfer.key)?, ..transfer }))
        };
        self.0.extend(transfers.into_iter().filter_map(here));
    }

    /// Next time at which a transfer expires.
    pub(in crate::daemon) fn next_expiry_ns(&self) -> Option<u64> {
        let in_transit = self.0.values().filter(|transfer| transfer.is_in_transit());
        in_transit.map(|transfer| transfer.expires_ns).min()
    }
}
