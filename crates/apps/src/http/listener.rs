//! Connections and listeners of an HTTP server, on Tidegate and on kernel sockets.

use std::io;
use std::net::SocketAddr;
use std::task::{Context, Poll};
use std::time::Duration;

use rustix::net::sockopt::{set_socket_linger, set_tcp_user_timeout};
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite};

use super::limits::{HttpLimits, PROGRESS_BYTES};

/// Size of the pieces in which TCP allocates its buffers, in bytes.
const TCP_PIECE_BYTES: usize = 2048;

/// Unsent bytes in the kernel's send buffer from which on a socket is not writable.
const KERNEL_UNSENT_BYTES: u32 = PROGRESS_BYTES as u32;

/// Connection to an HTTP client.
pub trait HttpStream: AsyncRead + AsyncWrite + Unpin + Send + 'static {
    /// Bytes of this process that TCP's buffers hold for the connection.
    fn queued_bytes(&self) -> usize;

    /// Sets the size of the send buffer in bytes, where this process chooses it.
    fn set_send_buffer(&self, bytes: u32);

    /// Makes the end of the connection a reset, which frees its buffers at once.
    fn set_reset_on_close(&self);
}

/// Listener that accepts connections.
pub trait HttpListener: Send + Sync + 'static {
    /// Accepted connection.
    type Stream: HttpStream;

    /// Polls for the next connection and its peer.
    ///
    /// # Errors
    /// When no connection can be accepted now.
    fn poll_accept(
        &self,
        context: &mut Context<'_>,
        limits: &HttpLimits,
    ) -> Poll<io::Result<(Self::Stream, SocketAddr)>>;
}

impl HttpStream for tidegate::tokio::TcpStream {
    fn queued_bytes(&self) -> usize {
        let pieces = |bytes: u32| (bytes as usize).next_multiple_of(TCP_PIECE_BYTES);
        self.info().map_or(0, |info| pieces(info.unacknowledged_bytes) + pieces(info.unread_bytes))
    }

    fn set_send_buffer(&self, bytes: u32) {
        // A connection that has ended needs no buffer.
        let _ = self.set_options(|options| options.send_buffer_bytes = bytes);
    }

    fn set_reset_on_close(&self) {
        (**self).set_reset_on_close(true);
    }
}

impl HttpListener for tidegate::tokio::TcpListener {
    type Stream = tidegate::tokio::TcpStream;

    fn poll_accept(
        &self,
        context: &mut Context<'_>,
        _: &HttpLimits,
    ) -> Poll<io::Result<(Self::Stream, SocketAddr)>> {
        self.poll_accept(context)
    }
}

/// The kernel owns the buffers of its sockets. Here is set how much of a response goes into them
/// before it can be sent, and how long it may stay there.
impl HttpStream for tokio::net::TcpStream {
    fn queued_bytes(&self) -> usize {
        0
    }

    fn set_send_buffer(&self, _: u32) {}

    fn set_reset_on_close(&self) {
        // Without the option the connection ends in order, a little later.
        let _ = set_socket_linger(self, Some(Duration::ZERO));
    }
}

impl HttpListener for tokio::net::TcpListener {
    type Stream = tokio::net::TcpStream;

    fn poll_accept(
        &self,
        context: &mut Context<'_>,
        limits: &HttpLimits,
    ) -> Poll<io::Result<(Self::Stream, SocketAddr)>> {
        self.poll_accept(context).map(|accepted| {
            let (stream, peer) = accepted?;
            stream.set_nodelay(true)?;
            SockRef::from(&stream).set_tcp_notsent_lowat(KERNEL_UNSENT_BYTES)?;
            set_tcp_user_timeout(&stream, limits.user_timeout_ms())?;
            Ok((stream, peer))
        })
    }
}
