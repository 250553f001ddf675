//! Flags of a connection.

use bitflags::bitflags;

bitflags! {
    /// Connection flags.
    #[derive(Clone, Copy, Debug)]
    pub(crate) struct ConnFlags: u64 {
        /// Passive open: the connection came through a listener.
        const PASSIVE = 1 << 0;
        /// No handle: the application has closed it, or has not accepted the connection yet.
        const ORPHAN = 1 << 1;
        const IN_ACCEPT_QUEUE = 1 << 2;
        /// In the hash table of four-tuples.
        const INDEXED = 1 << 3;
        /// Counted as a connection in TIME-WAIT.
        const IN_TIME_WAIT = 1 << 4;
        /// Counted in the SYN queue of the listener.
        const IN_SYN_QUEUE = 1 << 5;
        /// In the queue of connections with something to send.
        const PENDING = 1 << 6;
        const WANTS_OUTPUT = 1 << 7;
        const TIMESTAMPS = 1 << 8;
        const SACK = 1 << 9;
        const ECN = 1 << 10;
        /// Send ECE until the peer answers with CWR (RFC 3168).
        const SEND_ECE = 1 << 11;
        /// Send CWR: the congestion window was reduced.
        const SEND_CWR = 1 << 12;
        /// The application has shut down sending: a FIN follows the data.
        const FIN_QUEUED = 1 << 13;
        const FIN_SENT = 1 << 14;
        const FIN_RECEIVED = 1 << 15;
        const READ_SHUT = 1 << 16;
        const ACK_NOW = 1 << 17;
        const RESET_NOW = 1 << 18;
        const KEEPALIVE_NOW = 1 << 19;
        /// Retransmit one segment regardless of the congestion window.
        const FORCE_RETRANSMISSION = 1 << 20;
        /// Send what the peer's window allows, however little; a window probe if it is closed.
        const FORCE_OUTPUT = 1 << 21;
        const TAIL_PROBE_NOW = 1 << 22;
        /// A tail loss probe is in flight.
        const TAIL_PROBE_SENT = 1 << 23;
        /// The tail loss probe retransmits data sent before.
        const TAIL_PROBE_RETRANSMITS = 1 << 24;
        const REORDERING_SEEN = 1 << 25;
        /// Our SYN was sent more than once.
        const SYN_RETRANSMITTED = 1 << 26;
        /// The congestion window limited transmission.
        const WINDOW_LIMITED = 1 << 27;
        /// A write was cut short for lack of space.
        const WRITE_BLOCKED = 1 << 28;
        /// In the queue of writers that wait for memory.
        const WAITS_FOR_MEMORY = 1 << 29;
        /// Notify the application of readiness with the next update.
        const NOTIFY_READABLE = 1 << 30;
        const NOTIFY_WRITABLE = 1 << 31;
        /// The application was notified and has not taken the event yet.
        const READABLE_NOTIFIED = 1 << 32;
        const WRITABLE_NOTIFIED = 1 << 33;
        /// Report when the connection has terminated.
        const REPORT_END = 1 << 34;
        /// In the queue of connections whose peers do not take their data.
        const IN_STALL_QUEUE = 1 << 35;
        /// A SYN was sent without ECN bits, so data is not marked as ECN-capable (RFC 3168
        /// section 6.1.1).
        const SENDS_NO_ECT = 1 << 36;
        /// Send the SYN-ACK of SYN-RECEIVED: the peer's SYN has arrived.
        const SYN_ACK_NOW = 1 << 37;
    }
}

impl ConnFlags {
    /// Clears `flags`; returns true when they were set.
    pub(crate) fn take(&mut self, flags: Self) -> bool {
        let was = self.contains(flags);
        self.remove(flags);
        was
    }

    /// Sets `flags`; returns true when they were not set.
    pub(crate) fn set_new(&mut self, flags: Self) -> bool {
        let was = self.contains(flags);
        self.insert(flags);
        !was
    }
}

/// Flags that are kept in another stack. The other flags follow from the rest of the state.
pub(crate) const PERSISTENT_FLAGS: ConnFlags = ConnFlags::PASSIVE
    .union(ConnFlags::ORPHAN)
    .union(ConnFlags::IN_SYN_QUEUE)
    .union(ConnFlags::WANTS_OUTPUT)
    .union(ConnFlags::TIMESTAMPS)
    .union(ConnFlags::SACK)
    .union(ConnFlags::ECN)
    .union(ConnFlags::SENDS_NO_ECT)
    .union(ConnFlags::SEND_ECE)
    .union(ConnFlags::SEND_CWR)
    .union(ConnFlags::FIN_QUEUED)
    .union(ConnFlags::FIN_SENT)
    .union(ConnFlags::FIN_RECEIVED)
    .union(ConnFlags::READ_SHUT)
    .union(ConnFlags::ACK_NOW)
    .union(ConnFlags::SYN_ACK_NOW)
    .union(ConnFlags::RESET_NOW)
    .union(ConnFlags::KEEPALIVE_NOW)
    .union(ConnFlags::FORCE_RETRANSMISSION)
    .union(ConnFlags::FORCE_OUTPUT)
    .union(ConnFlags::TAIL_PROBE_NOW)
    .union(ConnFlags::TAIL_PROBE_SENT)
    .union(ConnFlags::TAIL_PROBE_RETRANSMITS)
    .union(ConnFlags::REORDERING_SEEN)
    .union(ConnFlags::SYN_RETRANSMITTED)
    .union(ConnFlags::WINDOW_LIMITED)
    .union(ConnFlags::WRITE_BLOCKED)
    .union(ConnFlags::WAITS_FOR_MEMORY);
