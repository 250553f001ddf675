//! Memory of connections: payload buffers from a pool, scoreboards and queues for reuse.

mod pool;
mod shared;

pub(crate) use pool::{BUFFER_BYTES, BufferPool, ByteQueue, DetachedBuffer};
pub(crate) use shared::TcpShared;
