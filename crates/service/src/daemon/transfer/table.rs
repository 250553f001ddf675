//! Table of socket transfers: sockets in transit between applications, and listeners that
//! other holders of their kernel socket may receive.

use std::collections::{BTreeSet, HashMap};

use serde::{Deserialize, Serialize};

use crate::daemon::ids::{Holder, NO_APP, SocketKey};
use crate::daemon::snapshot_error::InvalidSnapshot;

/// Time after which a socket that no application has received is closed.
pub(super) const TRANSFER_TIMEOUT_NS: u64 = 60_000_000_000;

/// Holder of a socket in transit.
pub(in crate::daemon) const IN_TRANSIT: Holder = Holder { app: NO_APP, slot: 0 };

/// Identifies a transferred socket by the descriptor that travels with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(in crate::daemon) struct FdCookie {
    /// Kernel's socket cookie of the descriptor (`SO_COOKIE`), never reused for another socket.
    pub(in crate::daemon) cookie: u64,
    /// Shard among the sockets that travel with the descriptor.
    pub(in crate::daemon) shard: u8,
}

/// Transfers by descriptor: an application that presents the descriptor receives the socket.
/// Descriptors and sockets correspond one to one.
#[derive(Default)]
pub(in crate::daemon) struct TransferTable {
    transfers: HashMap<FdCookie, SocketTransfer>,
    /// Descriptors by socket.
    of_sockets: HashMap<SocketKey, FdCookie>,
    /// Number of sockets in transit of each user.
    in_transit: HashMap<u32, usize>,
    /// Sockets in transit in the order of their expiry.
    expiries: BTreeSet<(u64, FdCookie)>,
}

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
        self.transfers.iter().map(save).collect()
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
            let transfer =
                SocketTransfer { key, uid, pending_receivers, expires_ns, is_shared, shards };
            let is_right = (transfer.is_in_transit() || is_shared) && fits(&transfer);
            if !is_right || !transfers.can_insert(fd_cookie, key) {
                return Err(InvalidSnapshot("a transfer does not match its socket"));
            }
            transfers.insert(fd_cookie, transfer);
        }
        Ok(transfers)
    }

    /// True if neither the descriptor nor the socket has a transfer.
    pub(super) fn can_insert(&self, fd_cookie: FdCookie, key: SocketKey) -> bool {
        !self.transfers.contains_key(&fd_cookie) && !self.of_sockets.contains_key(&key)
    }

    /// Adds or replaces the transfer of a descriptor.
    pub(super) fn insert(&mut self, fd_cookie: FdCookie, transfer: SocketTransfer) {
        self.remove(fd_cookie);
        if transfer.is_in_transit() {
            *self.in_transit.entry(transfer.uid).or_default() += 1;
            self.expiries.insert((transfer.expires_ns, fd_cookie));
        }
        self.of_sockets.insert(transfer.key, fd_cookie);
        self.transfers.insert(fd_cookie, transfer);
    }

    /// Removes the transfer of a descriptor.
    pub(super) fn remove(&mut self, fd_cookie: FdCookie) -> Option<SocketTransfer> {
        let transfer = self.transfers.remove(&fd_cookie)?;
        self.of_sockets.remove(&transfer.key);
        if transfer.is_in_transit() {
            self.expiries.remove(&(transfer.expires_ns, fd_cookie));
            if let Some(count) = self.in_transit.get_mut(&transfer.uid) {
                *count -= 1;
                if *count == 0 {
                    self.in_transit.remove(&transfer.uid);
                }
            }
        }
        Some(transfer)
    }

    /// Transfer of a descriptor.
    pub(super) fn get(&self, fd_cookie: FdCookie) -> Option<&SocketTransfer> {
        self.transfers.get(&fd_cookie)
    }

    /// Number of sockets of a user in transit.
    pub(super) fn in_transit_of(&self, uid: u32) -> usize {
        self.in_transit.get(&uid).copied().unwrap_or(0)
    }

    /// Descriptor of the socket in transit that expires first, if it has expired.
    pub(super) fn expired(&self, now_ns: u64) -> Option<FdCookie> {
        self.expiries.first().filter(|(at_ns, _)| *at_ns <= now_ns).map(|&(_, fd_cookie)| fd_cookie)
    }

    /// Removes the transfer of a listener that has ended.
    pub(in crate::daemon) fn remove_socket(&mut self, key: SocketKey) {
        if let Some(&fd_cookie) = self.of_sockets.get(&key) {
            self.remove(fd_cookie);
        }
    }

    /// Socket that belongs to this descriptor.
    pub(in crate::daemon) fn key(&self, fd_cookie: FdCookie) -> Option<SocketKey> {
        self.get(fd_cookie).map(|transfer| transfer.key)
    }

    /// Extracts the transfers of these sockets, for another core.
    pub(in crate::daemon) fn extract(
        &mut self,
        keys: &[SocketKey],
    ) -> Vec<(FdCookie, SocketTransfer)> {
        let take = |key| {
            let fd_cookie = *self.of_sockets.get(key)?;
            Some((fd_cookie, self.remove(fd_cookie)?))
        };
        keys.iter().filter_map(take).collect()
    }

    /// Inserts transfers from another core; `keys` maps their sockets to the keys on this core.
    pub(in crate::daemon) fn insert_all(
        &mut self,
        transfers: Vec<(FdCookie, SocketTransfer)>,
        keys: &HashMap<SocketKey, SocketKey>,
    ) {
        for (fd_cookie, transfer) in transfers {
            if let Some(&key) = keys.get(&transfer.key) {
                self.insert(fd_cookie, SocketTransfer { key, ..transfer });
            }
        }
    }

    /// Next time at which a transfer expires.
    pub(in crate::daemon) fn next_expiry_ns(&self) -> Option<u64> {
        self.expiries.first().map(|&(at_ns, _)| at_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn transfer(key: SocketKey, uid: u32, expires_ns: u64) -> SocketTransfer {
        let pending_receivers = u32::from(expires_ns < u64::MAX);
        SocketTransfer { key, uid, pending_receivers, expires_ns, is_shared: true, shards: 1 }
    }

    #[test]
    fn counts_and_expiries_follow_each_change() {
        let cookie = |cookie| FdCookie { cookie, shard: 0 };
        let mut table = TransferTable::default();
        for (number, expires_ns) in [(1, 30), (2, 10), (3, 20), (4, u64::MAX)] {
            table.insert(cookie(number), transfer(number as SocketKey + 10, 7, expires_ns));
        }
        assert_eq!((table.in_transit_of(7), table.next_expiry_ns()), (3, Some(10)));
        assert!(!table.can_insert(cookie(9), 11) && !table.can_insert(cookie(1), 99));
        assert_eq!((table.expired(9), table.expired(10)), (None, Some(cookie(2))));
        table.insert(cookie(2), transfer(12, 7, u64::MAX));
        assert_eq!((table.in_transit_of(7), table.next_expiry_ns()), (2, Some(20)));
        let moved = table.extract(&[13, 99, 12]);
        assert_eq!(moved.iter().map(|(_, it)| it.key).collect::<Vec<_>>(), [13, 12]);
        assert_eq!((table.in_transit_of(7), table.key(cookie(3))), (1, None));
        table.insert_all(moved, &HashMap::from([(13, 50)]));
        assert_eq!((table.in_transit_of(7), table.key(cookie(3))), (2, Some(50)));
        [11, 50, 14].into_iter().for_each(|key| table.remove_socket(key));
        assert!(table.transfers.is_empty() && table.of_sockets.is_empty());
        assert!(table.in_transit.is_empty() && table.expiries.is_empty());
    }
}
