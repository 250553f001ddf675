//! Connections and listeners of an NFS server, on Tidegate and on kernel sockets.

use std::io;
use std::net::SocketAddr;

use tokio::io::{AsyncRead, AsyncWrite};

/// Listener that accepts connections.
pub(super) trait NfsListener: Send + Sync + 'static {
    /// Accepted connection.
    type Stream: AsyncRead + AsyncWrite + Unpin + Send + 'static;

    /// Waits for a connection.
    fn accept(&self) -> impl Future<Output = io::Result<(Self::Stream, SocketAddr)>> + Send;
}

impl NfsListener for tidegate::tokio::TcpListener {
    type Stream = tidegate::tokio::TcpStream;

    async fn accept(&self) -> io::Result<(Self::Stream, SocketAddr)> {
        self.accept().await
    }
}

impl NfsListener for tokio::net::TcpListener {
    type Stream = tokio::net::TcpStream;

    async fn accept(&self) -> io::Result<(Self::Stream, SocketAddr)> {
        let (stream, peer) = self.accept().await?;
        stream.set_nodelay(true)?;
        Ok((stream, peer))
    }
}
