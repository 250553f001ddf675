//! Memory that two processes share, and the rings in it.
//!
//! Neither side trusts the other. A [`Region`] is of a size that nobody can
//! change any more. A ring keeps its own index to itself and looks at the other
//! side's as at any number that a stranger names; messages are copied out before
//! anybody looks at them. So the worst that a side can do to the other is to
//! send it nonsense, or to send and take nothing.

#[cfg(not(loom))]
mod byte_part;
mod bytes;
#[cfg(not(loom))]
mod region;
mod ring;
mod stream;
mod wanted;

#[cfg(not(loom))]
pub use byte_part::BytePart;
pub use bytes::Bytes;
#[cfg(not(loom))]
pub use region::{Part, Region};
pub use ring::{Broken, Receiver, RingError, Sender, Words, words_for};
pub use stream::{ByteReceiver, ByteSender, STREAM_WORDS, StreamError};
pub use wanted::Wanted;
