//! TCP sockets.

mod closing;
mod listener;
mod poll;
mod stream;

pub(crate) use closing::{BatchGuard, ClosingStream};
pub use listener::TcpListener;
pub use stream::TcpStream;
pub(crate) use stream::{recv_buffers, send_buffers};
