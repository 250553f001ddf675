//! What applications see of TCP: names, options, states and errors.

use std::io::{Error, ErrorKind};
use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroU32;

use serde::{Deserialize, Serialize};

use super::congestion::CongestionControl;
use super::options::MAX_WINDOW_SHIFT;

/// The name of a connection. Never used again for another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct TcpId {
    pub(crate) index: u32,
    pub(crate) generation: u32,
}

impl TcpId {
    /// The name as a number, for tables of the caller's.
    pub fn to_bits(self) -> u64 {
        u64::from(self.generation) << 32 | u64::from(self.index)
    }

    /// The name that a number is, for who gives names of this kind to something
    /// else.
    pub const fn from_bits(bits: u64) -> Self {
        Self { index: bits as u32, generation: (bits >> 32) as u32 }
    }

    /// A small number that no other connection has while this one is there, for
    /// tables of the caller's. It is used again.
    pub fn place(self) -> usize {
        self.index as usize
    }
}

/// The name of a listener. Never used again for another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct TcpListenerId {
    pub(crate) index: u32,
    pub(crate) generation: NonZeroU32,
}

impl TcpListenerId {
    /// The name as a number, for tables of the caller's.
    pub fn to_bits(self) -> u64 {
        u64::from(self.generation.get()) << 32 | u64::from(self.index)
    }

    /// As [`TcpId::from_bits`]; `None` when the upper half is 0.
    pub fn from_bits(bits: u64) -> Option<Self> {
        let generation = NonZeroU32::new((bits >> 32) as u32)?;
        Some(Self { index: bits as u32, generation })
    }
}

/// The states of a connection (RFC 9293 section 3.3.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names are those of the RFC")]
pub enum TcpState {
    Closed,
    SynSent,
    SynReceived,
    Established,
    FinWait1,
    FinWait2,
    CloseWait,
    Closing,
    LastAck,
    TimeWait,
}

/// When to ask a silent peer whether it is still there (RFC 9293 section 3.8.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Keepalive {
    /// How long the peer may be silent before it is asked.
    pub idle_ms: u32,
    /// How long to wait for each answer.
    pub interval_ms: u32,
    /// How often to ask before the connection is given up.
    pub probes: u8,
}

impl Default for Keepalive {
    /// As everywhere: two hours, 75 seconds, nine times.
    fn default() -> Self {
        Self { idle_ms: 7_200_000, interval_ms: 75_000, probes: 9 }
    }
}

/// How a connection shall behave. A listener's options are those of the
/// connections that come through it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TcpOptions {
    /// Data that is written but not acknowledged, at most.
    pub send_buffer_bytes: u32,
    /// Data that is received but not read, at most: what the window offers.
    pub receive_buffer_bytes: u32,
    /// The application is told of data again only when there is this much.
    pub receive_low_water_bytes: u32,
    /// Small segments are sent at once (no Nagle algorithm).
    pub no_delay: bool,
    /// Offer explicit congestion notification (RFC 3168). What a peer offers is
    /// taken up in any case.
    pub ecn: bool,
    /// A listener on the unspecified IPv6 address takes IPv4 too.
    pub dual_stack: bool,
    /// Several listeners share the address, each with an accept queue of its
    /// own, and new connections are spread over them. All of them must say so
    /// and be of the same party.
    pub reuse_port: bool,
    /// Whose it is, where one stack serves several parties: the number of a user, or
    /// of a program's sockets that have one port together.
    pub party: u64,
    /// How the window moves.
    pub congestion_control: CongestionControl,
    /// The hop limit of what is sent; `None` for that of the interface.
    pub hop_limit: Option<u8>,
    /// The differentiated services code point, as the whole byte; its two low
    /// bits are TCP's own.
    pub traffic_class: u8,
    /// Whether to ask a silent peer.
    pub keepalive: Option<Keepalive>,
    /// How long data may go without being acknowledged (RFC 9293 section
    /// 3.8.3, RFC 5482); `None` for about 15 minutes.
    pub user_timeout_ms: Option<u32>,
}

impl Default for TcpOptions {
    fn default() -> Self {
        Self {
            send_buffer_bytes: 1 << 20,
            receive_buffer_bytes: 1 << 20,
            receive_low_water_bytes: 1,
            no_delay: false,
            ecn: false,
            dual_stack: false,
            reuse_port: false,
            party: 0,
            congestion_control: CongestionControl::Cubic,
            hop_limit: None,
            traffic_class: 0,
            keepalive: None,
            user_timeout_ms: None,
        }
    }
}

/// The least that buffers can be set to.
const LEAST_BUFFER_BYTES: u32 = 2048;

impl TcpOptions {
    /// How far the window field must be shifted to offer the whole buffer
    /// (RFC 7323 section 2.3).
    pub(crate) fn window_shift(&self) -> u8 {
        let bits = 32 - (self.receive_buffer_bytes >> 16).leading_zeros();
        (bits as u8).min(MAX_WINDOW_SHIFT)
    }

    /// With buffers that a connection can work with: windows end at 2^30
    /// (RFC 7323 section 2.3).
    #[must_use]
    pub fn within_limits(self) -> Self {
        Self {
            send_buffer_bytes: self.send_buffer_bytes.clamp(LEAST_BUFFER_BYTES, 1 << 30),
            receive_buffer_bytes: self.receive_buffer_bytes.clamp(LEAST_BUFFER_BYTES, 1 << 30),
            ..self
        }
    }
}

/// What a connection is ready for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TcpReadiness {
    /// Something can be read: data, the end, or an error.
    pub readable: bool,
    /// Something can be written, or writing would give an error.
    pub writable: bool,
    /// Nothing will come any more.
    pub read_closed: bool,
    /// Nothing can be written any more.
    pub write_closed: bool,
    /// The connection failed, and nobody was told how.
    pub failed: bool,
}

/// What is known about a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TcpInfo {
    /// The state.
    pub state: TcpState,
    /// The smoothed round trip, once there was a sample.
    pub rtt_ns: Option<u64>,
    /// The retransmission time-out.
    pub rto_ns: u64,
    /// The congestion window.
    pub cwnd_bytes: u32,
    /// Up to here the congestion window doubles.
    pub ssthresh_bytes: u32,
    /// The peer's window.
    pub send_window_bytes: u32,
    /// Our window.
    pub receive_window_bytes: u32,
    /// The largest payload of a segment.
    pub mss_bytes: u16,
    /// Bytes written and not acknowledged.
    pub unacknowledged_bytes: u32,
    /// Bytes received and not read.
    pub unread_bytes: u32,
    /// Whether both sides understand selective acknowledgements.
    pub sack: bool,
    /// Whether both sides send time stamps.
    pub timestamps: bool,
    /// Whether both sides understand congestion marks.
    pub ecn: bool,
}

impl TcpInfo {
    /// Nothing is known but the state.
    pub fn unknown(state: TcpState) -> Self {
        Self {
            state,
            rtt_ns: None,
            rto_ns: 0,
            cwnd_bytes: 0,
            ssthresh_bytes: 0,
            send_window_bytes: 0,
            receive_window_bytes: 0,
            mss_bytes: 0,
            unacknowledged_bytes: 0,
            unread_bytes: 0,
            sack: false,
            timestamps: false,
            ecn: false,
        }
    }
}

/// Which half of a connection to shut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shutdown {
    /// What comes is thrown away.
    Read,
    /// Nothing more is sent: the peer reads the end.
    Write,
    /// Both.
    Both,
}

/// Why a connection ended, in one byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Failure {
    Refused,
    Reset,
    TimedOut,
    HostUnreachable,
    NetworkUnreachable,
    /// The application itself ended it.
    Aborted,
    /// It was over already.
    Ended,
}

/// Why a call on TCP failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TcpError {
    /// The handle was closed.
    #[error("the socket is closed")]
    Closed,
    /// Nothing is wrong: try again when the socket is ready.
    #[error("not now: try again when the socket is ready")]
    WouldBlock,
    /// The connection is not established.
    #[error("the connection is not established: wait until the socket is writable")]
    NotConnected,
    /// This side has said that it sends nothing more.
    #[error("nothing can be sent any more: this side was shut down")]
    BrokenPipe,
    /// The peer's host refused.
    #[error("{0} refused: nobody listens on that port")]
    Refused(SocketAddr),
    /// The peer broke off.
    #[error("{0} reset the connection")]
    Reset(SocketAddr),
    /// This side broke off.
    #[error("the connection to {0} was aborted")]
    Aborted(SocketAddr),
    /// No answer.
    #[error("{0} does not answer")]
    TimedOut(SocketAddr),
    /// A router or a missing neighbour.
    #[error("{0} cannot be reached: no answer from its host or the router before it")]
    HostUnreachable(SocketAddr),
    /// No way to the network.
    #[error("the network of {0} cannot be reached: add a route")]
    NetworkUnreachable(SocketAddr),
    /// Another socket has the address and port.
    #[error("{0} is in use by another socket: choose another port, or 0 for any")]
    AddressInUse(SocketAddr),
    /// The address is not ours.
    #[error(
        "{0} is not an address of this interface: bind to one that is, or to the unspecified address"
    )]
    AddressNotAvailable(IpAddr),
    /// No port is free.
    #[error("no port is free to reach {0}: close connections that are no longer used")]
    NoPortFree(SocketAddr),
    /// The limits allow no more.
    #[error("all {0} are in use: close some, or raise the limit")]
    TooMany(&'static str),
    /// The peer's address is none that can be connected to.
    #[error("{0} cannot be connected to: give a host's address and a port")]
    PeerInvalid(SocketAddr),
}

impl TcpError {
    pub(crate) fn from_failure(failure: Failure, remote: SocketAddr) -> Self {
        match failure {
            Failure::Refused => Self::Refused(remote),
            Failure::Reset => Self::Reset(remote),
            Failure::TimedOut => Self::TimedOut(remote),
            Failure::HostUnreachable => Self::HostUnreachable(remote),
            Failure::NetworkUnreachable => Self::NetworkUnreachable(remote),
            Failure::Aborted => Self::Aborted(remote),
            Failure::Ended => Self::NotConnected,
        }
    }

    /// The kind of I/O error that programs know this by.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Closed | Self::NotConnected => ErrorKind::NotConnected,
            Self::WouldBlock => ErrorKind::WouldBlock,
            Self::BrokenPipe => ErrorKind::BrokenPipe,
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
