//! Table of socket transfers: sockets in transit between applications, and listeners that
//! other holders of their kernel socket may receive.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use super::ids::{Holder, NO_APP, SocketKey};
use super::snapshot::{InvalidSnapshot, TransferSnapshot};

/// Time after which a socket that no application has received is closed.
pub(super) const TRANSFER_TIMEOUT_NS: u64 = 60_000_000_000;

/// Holder of a socket in transit.
pub(super) const IN_TRANSIT: Holder = Holder { app: NO_APP, slot: 0 };

/// Identifies a transferred socket by the descriptor that travels with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(super) struct FdCookie {
    /// Kernel's socket cookie of the descriptor (`SO_COOKIE`), never reused for another socket.
    pub(super) cookie: u64,
    /// Shard among the sockets that travel with the descriptor.
    pub(super) shard: u8,
}

/// Transfers by descriptor: an application that presents the descriptor receives the socket.
#[derive(Default)]
pub(super) struct TransferTable(pub(super) HashMap<FdCookie, SocketTransfer>);

#[derive(Clone, Copy)]
pub(super) struct SocketTransfer {
    pub(super) key: SocketKey,
    pub(super) uid: u32,
    /// Receivers still expected; the socket is in transit while there are any.
    pub(super) pending_receivers: u32,
    pub(super) expires_ns: u64,
    /// A listener, which other holders of the kernel socket may receive at any time.
    pub(super) is_shared: bool,
    /// Number of sockets that travel with the descriptor.
    pub(super) shards: u8,
}

impl SocketTransfer {
    pub(super) fn is_in_transit(&self) -> bool {
        self.pending_receivers > 0
    }
}

impl TransferTable {
    pub(super) fn save(&self) -> Vec<TransferSnapshot> {
        let save = |(&fd_cookie, transfer): (&FdCookie, &SocketTransfer)| {
            let SocketTransfer { key, uid, pending_receivers, is_shared, shards, .. } = *transfer;
            TransferSnapshot { fd_cookie, key, uid, pending_receivers, is_shared, shards }
        };
        self.0.iter().map(save).collect()
    }

    /// Restores the transfers that another daemon saved. `fits` tells if a transfer agrees with
    /// the socket.
    pub(super) fn restore(
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
    pub(super) fn remove_socket(&mut self, key: SocketKey) {
        self.0.retain(|_, transfer| transfer.key != key);
    }

    /// Socket that belongs to this descriptor.
    pub(super) fn key(&self, fd_cookie: FdCookie) -> Option<SocketKey> {
        self.0.get(&fd_cookie).map(|transfer| transfer.key)
    }

    /// Extracts the transfers of these sockets, for another core.
    pub(super) fn extract(&mut self, keys: &[SocketKey]) -> Vec<(FdCookie, SocketTransfer)> {
        self.0.extract_if(|_, transfer| keys.contains(&transfer.key)).collect()
    }

    /// Inserts transfers from another core; `keys` maps their sockets to the keys on this core.
    pub(super) fn insert_all(
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
    pub(super) fn next_expiry_ns(&self) -> Option<u64> {
        let in_transit = self.0.values().filter(|transfer| transfer.is_in_transit());
        in_transit.map(|transfer| transfer.expires_ns).min()
    }
}
