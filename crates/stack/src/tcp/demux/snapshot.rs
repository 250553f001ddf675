//! Snapshots of connections and listeners, for a takeover by another process.
//!
//! Times are relative to the moment of saving.

use std::net::IpAddr;

use super::table::TcpTable;
use crate::tcp::connection::{Connection, ConnectionSnapshot, ensure_valid};
use crate::tcp::flags::ConnFlags;
use crate::tcp::identity::{PeerClock, PeerTime, Secret};
use crate::tcp::listener::ListenerSlotSnapshot;
use crate::tcp::socket::TcpState;
use crate::tcp::timers::NEVER;
use crate::{Event, RestoreError};

/// Snapshot of all TCP state.
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub(crate) struct TcpSnapshot<'a> {
    secret: Secret,
    peer_time: PeerTime,
    /// Remaining time in which acknowledgements may carry a SYN cookie.
    cookies_valid_for_ns: u64,
    reports_confirmed_peers: bool,
    /// Peers with a finished handshake that no event has reported yet.
    confirmed_peers: Vec<IpAddr>,
    listeners: Vec<ListenerSlotSnapshot>,
    /// All slots ever used: generation and connection.
    #[cfg_attr(feature = "serde", serde(borrow))]
    connections: Vec<(u32, Option<ConnectionSnapshot<'a>>)>,
}

impl TcpTable {
    pub(crate) fn save(&self, now_ns: u64) -> TcpSnapshot<'static> {
        let confirmed = self.events.iter().filter_map(|event| match event {
            Event::PeerConfirmed(peer) => Some(*peer),
            _ => None,
        });
        let pool = &self.shared.pool;
        let save_slot = |(generation, connection): (u32, Option<&Connection>)| {
            (generation, connection.map(|connection| connection.save(now_ns, pool)))
        };
        TcpSnapshot {
            secret: self.secret,
            peer_time: self.clock.peer_time(now_ns),
            cookies_valid_for_ns: self.cookies_until_ns.saturating_sub(now_ns),
            reports_confirmed_peers: self.reports_confirmed_peers,
            confirmed_peers: confirmed.collect(),
            listeners: self.listeners.save(),
            connections: self.connections.slots().map(save_slot).collect(),
        }
    }

    /// Local addresses of listeners and of connections that may still send.
    pub(crate) fn local_addresses(&self) -> impl Iterator<Item = IpAddr> + '_ {
        let listeners =
            (0..self.listeners.slot_count()).filter_map(|index| self.listeners.at(index));
        let connections = self.connections.iter().filter(|c| c.uses_local_address());
        listeners.map(|listener| listener.local.ip()).chain(connections.map(|c| c.tuple.local_ip()))
    }

    /// Restores a snapshot into an empty table.
    ///
    /// # Errors
    /// When the snapshot is damaged or exceeds the limits.
    pub(crate) fn restore(
        &mut self,
        now_ns: u64,
        saved: TcpSnapshot<'_>,
    ) -> Result<(), RestoreError> {
        self.secret = saved.secret;
        self.clock = PeerClock::starting_at(saved.peer_time, now_ns);
        self.cookies_until_ns = now_ns.saturating_add(saved.cookies_valid_for_ns);
        self.reports_confirmed_peers = saved.reports_confirmed_peers;
        self.events.extend(saved.confirmed_peers.into_iter().map(Event::PeerConfirmed));
        self.restore_listeners(saved.listeners)?;
        let mut restored = Vec::new();
        let mut out_of_order = Vec::new();
        let found = saved.connections.len();
        for (generation, saved) in saved.connections {
            let connection = match &saved {
                Some(saved) => Some(Connection::restore(now_ns, saved, &mut self.shared)?),
                None => None,
            };
            let Some(index) = self.connections.add_slot(generation, connection) else {
                let limit = self.connections.limit();
                return Err(RestoreError::TooMany { what: "connections", found, limit });
            };
            let Some(saved) = saved else { continue };
            if self.connections.at(index).is_some_and(Connection::holds_tuple) {
                let existing = self.by_tuple.find(&self.connections, &saved.tuple);
                ensure_valid(
                    existing.is_none(),
                    "two connections have the same addresses and ports",
                )?;
                self.by_tuple.insert(&mut self.connections, index);
            }
            restored.push(index);
            if !saved.receiving.out_of_order.is_empty() {
                out_of_order.push((index, saved.receiving.out_of_order));
            }
        }
        self.restore_queues()?;
        // Out-of-order data comes last: the peer can retransmit it if memory runs out.
        for (index, stretches) in out_of_order {
            let Some(connection) = self.connections.at_mut(index) else { continue };
            for (start, data) in stretches {
                connection.receive.restore_out_of_order(start, &data, &mut self.shared);
            }
        }
        self.resume_all(now_ns, restored);
        Ok(())
    }

    /// Resumes connections that come from a snapshot or from another table.
    pub(super) fn resume_all(&mut self, now_ns: u64, mut indices: Vec<u32>) {
        // The TIME-WAIT queue is ordered by age.
        indices.sort_by_key(|&index| match self.connections.at(index) {
            Some(connection) if connection.state == TcpState::TimeWait => {
                connection.timers.idle_deadline_ns
            }
            _ => NEVER,
        });
        indices.into_iter().for_each(|index| self.resume(now_ns, index));
    }

    fn resume(&mut self, now_ns: u64, index: u32) {
        let Some((connection, id)) = self.connections.at_mut_with_id(index) else { return };
        if connection.flags.take(ConnFlags::WAITS_FOR_MEMORY) {
            self.wait_for_memory(id);
        }
        self.update(now_ns, index);
    }

    fn restore_listeners(&mut self, saved: Vec<ListenerSlotSnapshot>) -> Result<(), RestoreError> {
        let (found, limit) = (saved.len(), self.listeners.limit());
        if found > limit {
            return Err(RestoreError::TooMany { what: "listeners", found, limit });
        }
        saved.into_iter().try_for_each(|slot| self.listeners.add_slot(slot, &mut self.shared))
    }

    /// Restores the accept queues, and the SYN queue counters of listeners.
    fn restore_queues(&mut self) -> Result<(), RestoreError> {
        for index in 0..self.listeners.slot_count() {
            let id = self.listeners.id(index);
            let Some(listener) = self.listeners.get_mut(id) else { continue };
            for queued in listener.queued() {
                let is_acceptable = self.connections.at_mut(queued).is_some_and(|connection| {
                    connection.listener == Some(id)
                        && connection.flags.contains(ConnFlags::ORPHAN)
                        && !matches!(connection.state, TcpState::SynSent | TcpState::SynReceived)
                        && connection.flags.set_new(ConnFlags::IN_ACCEPT_QUEUE)
                });
                ensure_valid(
                    is_acceptable,
                    "an accept queue holds a connection that cannot be accepted",
                )?;
            }
            if listener.accept_queue_len() > 0 {
                listener.notified = true;
                self.events.push_back(Event::TcpAcceptable(id));
            }
        }
        for connection in self.connections.iter_mut() {
            let listener = connection.listener.and_then(|id| self.listeners.get_mut(id));
            match listener {
                Some(listener) if connection.flags.contains(ConnFlags::IN_SYN_QUEUE) => {
                    listener.half_open += 1;
                }
                Some(_) => {}
                None => connection.flags.remove(ConnFlags::IN_SYN_QUEUE),
            }
        }
        Ok(())
    }
}
