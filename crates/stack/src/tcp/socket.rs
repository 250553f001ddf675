//! TCP as seen by applications: handles, options, states and errors.

use std::io::{Error, ErrorKind};
use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroU32;

use super::congestion::CongestionControl;
use super::options::MAX_WINDOW_SHIFT;

/// Connection handle: slot index and generation. Never reused for another connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct TcpId {
    pub(crate) index: u32,
    pub(crate) generation: u32,
}

impl TcpId {
    /// The handle as a number, for tables of the caller.
    pub fn to_bits(self) -> u64 {
        u64::from(self.generation) << 32 | u64::from(self.index)
    }

    /// Inverse of [`TcpId::to_bits`]. Also lets callers use handles of this type for objects of
    /// their own.
    pub const fn from_bits(bits: u64) -> Self {
        Self { index: bits as u32, generation: (bits >> 32) as u32 }
    }

    /// Slot index: a small number, unique among the current connections, for tables of the caller.
    /// Reused after the connection has ended.
    pub fn slot(self) -> usize {
        self.index as usize
    }
}

/// Listener handle: slot index and generation. Never reused for another listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct TcpListenerId {
    pub(crate) index: u32,
    pub(crate) generation: NonZeroU32,
}

impl TcpListenerId {
    /// The handle as a number, for tables of the caller.
    pub fn to_bits(self) -> u64 {
        u64::from(self.generation.get()) << 32 | u64::from(self.index)
    }

    /// Inverse of [`TcpListenerId::to_bits`]; `None` when the upper half is 0.
    pub fn from_bits(bits: u64) -> Option<Self> {
        let generation = NonZeroU32::new((bits >> 32) as u32)?;
        Some(Self { index: bits as u32, generation })
    }
}

/// Connection state (RFC 9293 section 3.3.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum TcpState {
    /// No connection.
    Closed,
    /// The SYN of an active open is sent; no answer yet.
    SynSent,
    /// SYNs are exchanged; the handshake awaits its last ACK.
    SynReceived,
    /// Data flows in both directions.
    Established,
    /// The application has closed; the FIN is not acknowledged yet.
    FinWait1,
    /// The FIN is acknowledged; the peer has not closed.
    FinWait2,
    /// The peer has closed; the application has not.
    CloseWait,
    /// Both sides have closed at once; the FIN is not acknowledged yet.
    Closing,
    /// The peer closed first; the own FIN is not acknowledged yet.
    LastAck,
    /// Closed; old segments may still arrive.
    TimeWait,
}

/// Keep-alive parameters: when to probe a silent peer (RFC 9293 section 3.8.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
#[must_use]
pub struct Keepalive {
    /// Silence of the peer before the first probe, in milliseconds.
    pub idle_ms: u32,
    /// Time to wait for the answer to each probe, in milliseconds.
    pub interval_ms: u32,
    /// Unanswered probes before the connection is aborted.
    pub probes: u8,
}

impl Default for Keepalive {
    /// The usual values: two hours, 75 seconds, nine probes.
    fn default() -> Self {
        Self { idle_ms: 7_200_000, interval_ms: 75_000, probes: 9 }
    }
}

impl Keepalive {
    /// Sets the silence of the peer before the first probe, in milliseconds.
    pub fn idle_ms(self, idle_ms: u32) -> Self {
        Self { idle_ms, ..self }
    }

    /// Sets the time to wait for the answer to each probe, in milliseconds.
    pub fn interval_ms(self, interval_ms: u32) -> Self {
        Self { interval_ms, ..self }
    }

    /// Sets the unanswered probes before the connection is aborted.
    pub fn probes(self, probes: u8) -> Self {
        Self { probes, ..self }
    }
}

/// Options of a connection. Connections inherit the options of their listener.
///
/// # Examples
/// ```
/// use tidegate_stack::{Keepalive, TcpOptions};
///
/// let keepalive = Keepalive::default().idle_ms(60_000).probes(3);
/// let options = TcpOptions::default().no_delay(true).keepalive(keepalive);
/// assert_eq!(options.keepalive.unwrap().interval_ms, 75_000);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
#[must_use]
pub struct TcpOptions {
    /// Send buffer: limit of data written but not acknowledged, in bytes.
    pub send_buffer_bytes: u32,
    /// Receive buffer: limit of data received but not read, in bytes; also limits the window.
    pub receive_buffer_bytes: u32,
    /// Size up to which the send buffer grows with the congestion window, in bytes.
    pub max_send_buffer_bytes: u32,
    /// Size up to which the receive buffer grows with the bytes read per round trip, in bytes.
    pub max_receive_buffer_bytes: u32,
    /// Unread bytes before the application is notified again of readable data.
    pub receive_low_water_bytes: u32,
    /// Send small segments at once (disables the Nagle algorithm).
    pub no_delay: bool,
    /// Hold back a segment that is not full, for at most 200 ms, until there is more data
    /// (`TCP_CORK`). Takes precedence over `no_delay`.
    pub cork: bool,
    /// Offer explicit congestion notification (RFC 3168). An offer of the peer is always accepted.
    pub ecn: bool,
    /// A listener on the unspecified IPv6 address also accepts IPv4.
    pub dual_stack: bool,
    /// Several listeners share the address, each with its own accept queue, and new connections
    /// are distributed over them. All of the listeners must set this option and have the same
    /// owner.
    pub reuse_port: bool,
    /// Owner of the socket, where one stack serves several owners: a user ID, or the number of an
    /// application's group of sockets that share a port.
    pub owner: u64,
    /// Congestion control algorithm.
    pub congestion_control: CongestionControl,
    /// Hop limit (TTL) of packets sent; `None` for the default of the interface.
    pub hop_limit: Option<u8>,
    /// DSCP as the whole traffic class byte; TCP sets its two low bits (ECN).
    pub traffic_class: u8,
    /// Keep-alive parameters; `None` disables keep-alive.
    pub keepalive: Option<Keepalive>,
    /// Maximum time that data may stay unacknowledged, in milliseconds (user time-out, RFC 9293
    /// section 3.8.3, RFC 5482); `None` for about 15 minutes.
    pub user_timeout_ms: Option<u32>,
    /// Maximum time in FIN-WAIT-2 after the application has closed the connection, in milliseconds;
    /// `None` for the stack's own limit, which no option exceeds.
    pub fin_wait_2_ms: Option<u32>,
    /// Forbid routers to fragment IPv4 packets, as path MTU discovery requires (RFC 1191).
    pub dont_fragment: bool,
    /// Longest time that an established connection waits for data of the peer, outside the accept
    /// queue of its listener, in seconds (`TCP_DEFER_ACCEPT`); `None` does not wait.
    pub defer_accept_s: Option<u16>,
}

impl Default for TcpOptions {
    fn default() -> Self {
        Self {
            send_buffer_bytes: 1 << 20,
            receive_buffer_bytes: 1 << 20,
            max_send_buffer_bytes: 16 << 20,
            max_receive_buffer_bytes: 16 << 20,
            receive_low_water_bytes: 1,
            no_delay: false,
            cork: false,
            ecn: false,
            dual_stack: false,
            reuse_port: false,
            owner: 0,
            congestion_control: CongestionControl::Cubic,
            hop_limit: None,
            traffic_class: 0,
            keepalive: None,
            user_timeout_ms: None,
            fin_wait_2_ms: None,
            dont_fragment: true,
            defer_accept_s: None,
        }
    }
}

/// Minimum size of send and receive buffers.
const MIN_BUFFER_BYTES: u32 = 2048;

/// Size of a buffer after `growth` doublings: of `bytes` at first and at most `max_bytes`.
#[inline]
fn grown_bytes(bytes: u32, max_bytes: u32, growth: u8) -> u32 {
    let grown = u64::from(bytes) << growth.min(MAX_BUFFER_GROWTH);
    grown.min(max_bytes.max(bytes).into()) as u32
}

/// Doublings from the smallest buffer to the largest.
pub(crate) const MAX_BUFFER_GROWTH: u8 = 19;

impl TcpOptions {
    /// Sets the limit of data written but not acknowledged, in bytes. The buffer keeps this size.
    pub fn send_buffer_bytes(self, send_buffer_bytes: u32) -> Self {
        Self { send_buffer_bytes, max_send_buffer_bytes: send_buffer_bytes, ..self }
    }

    /// Sets the limit of data received but not read, in bytes. The buffer keeps this size.
    pub fn receive_buffer_bytes(self, receive_buffer_bytes: u32) -> Self {
        Self { receive_buffer_bytes, max_receive_buffer_bytes: receive_buffer_bytes, ..self }
    }

    /// Sets the size up to which the send buffer grows, in bytes.
    pub fn max_send_buffer_bytes(self, max_send_buffer_bytes: u32) -> Self {
        Self { max_send_buffer_bytes, ..self }
    }

    /// Sets the size up to which the receive buffer grows, in bytes.
    pub fn max_receive_buffer_bytes(self, max_receive_buffer_bytes: u32) -> Self {
        Self { max_receive_buffer_bytes, ..self }
    }

    /// Sets the unread bytes before the application is notified again.
    pub fn receive_low_water_bytes(self, receive_low_water_bytes: u32) -> Self {
        Self { receive_low_water_bytes, ..self }
    }

    /// Sets whether small segments are sent at once.
    pub fn no_delay(self, no_delay: bool) -> Self {
        Self { no_delay, ..self }
    }

    /// Sets whether a segment that is not full is held back for more data, for at most 200 ms.
    pub fn cork(self, cork: bool) -> Self {
        Self { cork, ..self }
    }

    /// Sets whether explicit congestion notification is offered.
    pub fn ecn(self, ecn: bool) -> Self {
        Self { ecn, ..self }
    }

    /// Sets whether a listener on the unspecified IPv6 address also accepts IPv4.
    pub fn dual_stack(self, dual_stack: bool) -> Self {
        Self { dual_stack, ..self }
    }

    /// Sets whether several listeners share the address.
    pub fn reuse_port(self, reuse_port: bool) -> Self {
        Self { reuse_port, ..self }
    }

    /// Sets the owner of the socket.
    pub fn owner(self, owner: u64) -> Self {
        Self { owner, ..self }
    }

    /// Sets the congestion control algorithm.
    pub fn congestion_control(self, congestion_control: CongestionControl) -> Self {
        Self { congestion_control, ..self }
    }

    /// Sets the hop limit of packets sent; `None` for the default of the interface.
    pub fn hop_limit(self, hop_limit: impl Into<Option<u8>>) -> Self {
        Self { hop_limit: hop_limit.into(), ..self }
    }

    /// Sets the traffic class byte.
    pub fn traffic_class(self, traffic_class: u8) -> Self {
        Self { traffic_class, ..self }
    }

    /// Sets the keep-alive parameters; `None` disables keep-alive.
    pub fn keepalive(self, keepalive: impl Into<Option<Keepalive>>) -> Self {
        Self { keepalive: keepalive.into(), ..self }
    }

    /// Sets the user time-out in milliseconds; `None` for about 15 minutes.
    pub fn user_timeout_ms(self, user_timeout_ms: impl Into<Option<u32>>) -> Self {
        Self { user_timeout_ms: user_timeout_ms.into(), ..self }
    }

    /// Sets the maximum time in FIN-WAIT-2 after closing, in milliseconds; `None` for the stack's
    /// own limit.
    pub fn fin_wait_2_ms(self, fin_wait_2_ms: impl Into<Option<u32>>) -> Self {
        Self { fin_wait_2_ms: fin_wait_2_ms.into(), ..self }
    }

    /// Sets whether routers are forbidden to fragment IPv4 packets.
    pub fn dont_fragment(self, dont_fragment: bool) -> Self {
        Self { dont_fragment, ..self }
    }

    /// Sets the time that connections of a listener wait for data before they can be accepted, in
    /// seconds; `None` does not wait.
    pub fn defer_accept_s(self, defer_accept_s: impl Into<Option<u16>>) -> Self {
        Self { defer_accept_s: defer_accept_s.into(), ..self }
    }

    /// Window shift needed to offer the whole receive buffer at its largest (RFC 7323 section 2.3).
    pub(crate) fn window_shift(&self) -> u8 {
        let largest = self.receive_buffer_bytes.max(self.max_receive_buffer_bytes);
        let bits = 32 - (largest >> 16).leading_zeros();
        (bits as u8).min(MAX_WINDOW_SHIFT)
    }

    /// Clamps the buffer sizes to those that a connection can work with: windows end at 2^30
    /// bytes (RFC 7323 section 2.3).
    pub fn within_limits(self) -> Self {
        let clamp = |bytes: u32| bytes.clamp(MIN_BUFFER_BYTES, 1 << 30);
        Self {
            send_buffer_bytes: clamp(self.send_buffer_bytes),
            receive_buffer_bytes: clamp(self.receive_buffer_bytes),
            max_send_buffer_bytes: clamp(self.max_send_buffer_bytes),
            max_receive_buffer_bytes: clamp(self.max_receive_buffer_bytes),
            ..self
        }
    }

    /// Size of the receive buffer after `growth` doublings, in bytes.
    #[inline]
    pub(crate) fn grown_receive_buffer(&self, growth: u8) -> u32 {
        grown_bytes(self.receive_buffer_bytes, self.max_receive_buffer_bytes, growth)
    }

    /// Size of the send buffer after `growth` doublings, in bytes.
    #[inline]
    pub(crate) fn grown_send_buffer(&self, growth: u8) -> u32 {
        grown_bytes(self.send_buffer_bytes, self.max_send_buffer_bytes, growth)
    }

    /// Doublings of the send buffer for a congestion window of `cwnd` bytes, while the memory of
    /// all connections allows one queue `allowed_bytes`. The buffer has room for what is in flight,
    /// and for as much again that the application writes in the meantime.
    #[inline]
    pub(crate) fn send_growth(&self, cwnd: u32, allowed_bytes: impl FnOnce() -> usize) -> u8 {
        let needed_bytes = cwnd.saturating_mul(2).min(self.max_send_buffer_bytes);
        if needed_bytes <= self.send_buffer_bytes {
            return 0;
        }
        let needed = needed_bytes.div_ceil(self.send_buffer_bytes).next_power_of_two().ilog2();
        let allowed = (allowed_bytes() / self.send_buffer_bytes as usize).checked_ilog2();
        needed.min(allowed.unwrap_or(0)) as u8
    }
}

/// Readiness of a connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TcpReadiness {
    /// Data, end of stream or an error can be read.
    pub readable: bool,
    /// Data can be written, or a write would return an error.
    pub writable: bool,
    /// No more data will arrive.
    pub read_closed: bool,
    /// No more data can be written.
    pub write_closed: bool,
    /// The connection failed, and the error has not been reported yet.
    pub failed: bool,
}

/// Reason why a peer cannot be reached, as an ICMP error gave it, where error kinds make no
/// difference (RFC 792, RFC 1122 section 3.2.2.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub enum UnreachableReason {
    /// The peer's host does not support TCP; reported as a refused connection.
    Protocol,
    /// A source route failed; reported as an unreachable host.
    SourceRoute,
    /// A router knows no such host; reported as an unreachable host.
    HostUnknown,
    /// A router does not forward for this host; reported as an unreachable host.
    SourceIsolated,
}

/// Loss recovery state of the sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum RecoveryPhase {
    /// No segment is known to be lost.
    Open,
    /// Fast recovery with proportional rate reduction (RFC 6937).
    FastRecovery,
    /// Recovery after a retransmission time-out.
    Loss,
}

/// State and measurements of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct TcpInfo {
    /// Connection state.
    pub state: TcpState,
    /// Smoothed round-trip time; `None` before the first sample.
    pub rtt_ns: Option<u64>,
    /// Mean deviation of the round-trip time (RTTVAR, RFC 6298 section 2); 0 before the first
    /// sample.
    pub rtt_variation_ns: u64,
    /// Smallest recent round-trip time; `None` before the first sample.
    pub min_rtt_ns: Option<u64>,
    /// Retransmission time-out.
    pub rto_ns: u64,
    /// Phase of loss recovery.
    pub recovery: RecoveryPhase,
    /// Consecutive retransmissions by time-out without progress.
    pub retries: u8,
    /// Reason of the last ICMP error, if nothing was acknowledged since.
    pub unreachable: Option<UnreachableReason>,
    /// Congestion window.
    pub cwnd_bytes: u32,
    /// Slow start threshold: below this size, the congestion window grows exponentially.
    pub ssthresh_bytes: u32,
    /// Window of the peer.
    pub send_window_bytes: u32,
    /// Window offered to the peer.
    pub receive_window_bytes: u32,
    /// Largest payload of a segment.
    pub mss_bytes: u16,
    /// Bytes written and not acknowledged.
    pub unacknowledged_bytes: u32,
    /// Bytes written and never sent.
    pub unsent_bytes: u32,
    /// Bytes that are believed lost and were not sent again.
    pub lost_bytes: u32,
    /// Bytes received and not read.
    pub unread_bytes: u32,
    /// Both sides support selective acknowledgements (SACK).
    pub sack: bool,
    /// Both sides send time stamps.
    pub timestamps: bool,
    /// Both sides support explicit congestion notification (ECN).
    pub ecn: bool,
    /// Shift of the peer's windows (RFC 7323 section 2).
    pub send_window_shift: u8,
    /// Shift of the windows that the peer is offered.
    pub receive_window_shift: u8,
    /// Traffic so far.
    pub traffic: TcpTraffic,
}

/// Traffic of a connection since it began. The numbers wrap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct TcpTraffic {
    /// Bytes of data that the peer has acknowledged.
    pub acknowledged_bytes: u64,
    /// Bytes of data received in order.
    pub received_bytes: u64,
    /// Segments sent, with and without data.
    pub sent_segments: u32,
    /// Segments received; several that the device has coalesced count as one.
    pub received_segments: u32,
    /// Segments sent again.
    pub retransmitted_segments: u32,
    /// Rate at which the peer last acknowledged data, in bytes in a millisecond. A lower rate does
    /// not replace it while the application sends less than it could.
    pub delivery_bytes_per_ms: u32,
}

impl TcpInfo {
    /// Returns a record in which only the state is known.
    pub fn unknown(state: TcpState) -> Self {
        Self {
            state,
            rtt_ns: None,
            rtt_variation_ns: 0,
            min_rtt_ns: None,
            rto_ns: 0,
            recovery: RecoveryPhase::Open,
            retries: 0,
            unreachable: None,
            cwnd_bytes: 0,
            ssthresh_bytes: 0,
            send_window_bytes: 0,
            receive_window_bytes: 0,
            mss_bytes: 0,
            unacknowledged_bytes: 0,
            unsent_bytes: 0,
            lost_bytes: 0,
            unread_bytes: 0,
            sack: false,
            timestamps: false,
            ecn: false,
            send_window_shift: 0,
            receive_window_shift: 0,
            traffic: TcpTraffic::default(),
        }
    }
}

/// Direction of a connection to shut down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shutdown {
    /// Discard received data.
    Read,
    /// Send nothing more: the peer reads end of stream.
    Write,
    /// Both directions.
    Both,
}

/// Reason for the end of a connection, in one byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub(crate) enum Failure {
    Refused,
    Reset,
    TimedOut,
    HostUnreachable,
    NetworkUnreachable,
    ProtocolUnreachable,
    SourceRouteFailed,
    HostUnknown,
    SourceHostIsolated,
    /// Aborted by the application itself.
    Aborted,
    /// Reset by the peer, which had ended its data before.
    ResetAfterEnd,
}

impl Failure {
    /// Reason of an ICMP error that the kind of an error does not show.
    pub(crate) fn unreachable_reason(self) -> Option<UnreachableReason> {
        match self {
            Self::ProtocolUnreachable => Some(UnreachableReason::Protocol),
            Self::SourceRouteFailed => Some(UnreachableReason::SourceRoute),
            Self::HostUnknown => Some(UnreachableReason::HostUnknown),
            Self::SourceHostIsolated => Some(UnreachableReason::SourceIsolated),
            _ => None,
        }
    }
}

/// Error of a TCP call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TcpError {
    /// The handle was closed.
    #[error("the socket is closed")]
    Closed,
    /// Nothing can be done now; not a failure.
    #[error("the operation would block: try again when the socket is ready")]
    WouldBlock,
    /// The connection is not established.
    #[error("the connection is not established: wait until the socket is writable")]
    NotConnected,
    /// The application has shut down this side for writing.
    #[error("cannot send: this side of the connection was shut down")]
    BrokenPipe,
    /// The peer's host refused the connection.
    #[error("{0} refused the connection: no listener on that port")]
    Refused(SocketAddr),
    /// The peer reset the connection.
    #[error("{0} reset the connection")]
    Reset(SocketAddr),
    /// The peer, which had ended its data, reset the connection. As at the kernel this is no reset
    /// of what this side reads.
    #[error("cannot send: {0} ended its data, then reset the connection")]
    ResetAfterEnd(SocketAddr),
    /// This side aborted the connection.
    #[error("the connection to {0} was aborted")]
    Aborted(SocketAddr),
    /// No answer from the peer.
    #[error("the connection to {0} timed out: the peer does not answer")]
    TimedOut(SocketAddr),
    /// A router reported the host unreachable, or the next hop does not answer.
    #[error("{0} is unreachable: no answer from its host or from the router before it")]
    HostUnreachable(SocketAddr),
    /// No route to the network.
    #[error("the network of {0} is unreachable: add a route")]
    NetworkUnreachable(SocketAddr),
    /// Address and port are in use by another socket.
    #[error("{0} is in use by another socket: choose another port, or 0 for any")]
    AddressInUse(SocketAddr),
    /// The address is not a local address.
    #[error(
        "{0} is not an address of this interface: bind to one that is, or to the unspecified address"
    )]
    AddressNotAvailable(IpAddr),
    /// All ports are in use.
    #[error("no port is free to reach {0}: close connections that are no longer used")]
    NoPortFree(SocketAddr),
    /// A limit of the stack is reached.
    #[error("all {0} are in use: close some, or raise the limit")]
    TooMany(&'static str),
    /// The peer address is not one that can be connected to.
    #[error("cannot connect to {0}: give a host's address and a port")]
    PeerInvalid(SocketAddr),
}

impl TcpError {
    pub(crate) fn from_failure(failure: Failure, remote: SocketAddr) -> Self {
        match failure {
            Failure::Refused | Failure::ProtocolUnreachable => Self::Refused(remote),
            Failure::Reset => Self::Reset(remote),
            Failure::TimedOut => Self::TimedOut(remote),
            Failure::HostUnreachable
            | Failure::SourceRouteFailed
            | Failure::HostUnknown
            | Failure::SourceHostIsolated => Self::HostUnreachable(remote),
            Failure::NetworkUnreachable => Self::NetworkUnreachable(remote),
            Failure::Aborted => Self::Aborted(remote),
            Failure::ResetAfterEnd => Self::ResetAfterEnd(remote),
        }
    }

    /// Equivalent I/O error kind, as applications know it.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Closed | Self::NotConnected => ErrorKind::NotConnected,
            Self::WouldBlock => ErrorKind::WouldBlock,
            Self::BrokenPipe | Self::ResetAfterEnd(_) => ErrorKind::BrokenPipe,
            Self::Refused(_) => ErrorKind::ConnectionRefused,
            Self::Reset(_) => ErrorKind::ConnectionReset,
            Self::Aborted(_) => ErrorKind::ConnectionAborted,
            Self::TimedOut(_) => ErrorKind::TimedOut,
            Self::HostUnreachable(_) => ErrorKind::HostUnreachable,
            Self::NetworkUnreachable(_) => ErrorKind::NetworkUnreachable,
            Self::AddressInUse(_) => ErrorKind::AddrInUse,
            Self::AddressNotAvailable(_) | Self::NoPortFree(_) => ErrorKind::AddrNotAvailable,
            Self::TooMany(_) => ErrorKind::OutOfMemory,
            Self::PeerInvalid(_) => ErrorKind::InvalidInput,
        }
    }
}

impl From<TcpError> for Error {
    fn from(error: TcpError) -> Self {
        Error::new(error.kind(), error)
    }
}
