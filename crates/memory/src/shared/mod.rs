//! Memory shared between two processes, and the rings in it.
//!
//! Neither process trusts the other. The size of a [`Region`] is sealed. A ring keeps its own
//! index in private memory and validates the peer's index as untrusted input. Messages are
//! copied out before they are parsed. So the worst that a peer can do is to send nonsense, or to
//! send and receive nothing.

#[cfg(not(loom))]
mod byte_range;
mod bytes;
#[cfg(not(loom))]
mod copy;
#[cfg(not(loom))]
mod event_signal;
#[cfg(not(loom))]
mod peer;
#[cfg(not(loom))]
mod region;
mod ring;
#[cfg(not(loom))]
mod sealed;
mod stream;
mod wake_flag;

#[cfg(not(loom))]
pub use byte_range::ByteRange;
pub use bytes::SharedBytes;
#[cfg(not(loom))]
pub use event_signal::EventSignal;
#[cfg(not(loom))]
pub use peer::{PeerCredentials, peer_credentials};
#[cfg(not(loom))]
pub use region::{Region, RegionReleaser, ReleasedRegion, WordRange};
pub use ring::{PeerError, Receiver, RingError, Sender, SharedWords, ring_words};
#[cfg(not(loom))]
pub use sealed::SealedBytes;
pub use stream::{ByteReceiver, ByteSender, STREAM_WORDS, StreamError};
pub use wake_flag::WakeFlag;
