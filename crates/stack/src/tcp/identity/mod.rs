//! Numbers that identify this host to its peers: initial sequence numbers, time stamps, the
//! secrets behind them and the clock that peers see.

mod isn;
mod peer_clock;
mod prf;
mod secrets;

pub(crate) use isn::{initial as initial_seq, timestamp_offset};
pub(crate) use peer_clock::{PeerClock, PeerTime, milliseconds, whole_seconds};
pub(crate) use prf::Secret;
pub use secrets::TcpSecrets;
