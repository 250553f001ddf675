//! TCP connections.

use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::net::{Shutdown, SocketAddr, ToSocketAddrs};
use std::ops::Deref;
use std::pin::Pin;
use std::task::{Context, Poll};

use ::tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tidegate_stack::TcpOptions;

use crate::net::handle::Net;
use crate::tcp;
use crate::types::errors::no_address;

/// TCP connection, in the style of `tokio::net::TcpStream`. Calls that do not wait, such as
/// options, are those of the inner [`crate::TcpStream`].
///
/// One task at a time may read from a connection, and one task may write to it.
#[derive(Debug)]
pub struct TcpStream {
    inner: tcp::TcpStream,
}

impl TcpStream {
    /// Connects to the first of the addresses that accepts. Name resolution blocks the thread:
    /// pass addresses.
    ///
    /// # Errors
    /// As [`crate::TcpStream::connect`].
    pub async fn connect(net: &Net, address: impl ToSocketAddrs) -> io::Result<Self> {
        let mut last = no_address();
        for address in address.to_socket_addrs()? {
            match Self::connect_with(net, address, TcpOptions::default()).await {
                Ok(stream) => return Ok(stream),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    /// Connects to one address, with options.
    ///
    /// # Errors
    /// As [`crate::TcpStream::connect`].
    pub async fn connect_with(
        net: &Net,
        address: SocketAddr,
        options: TcpOptions,
    ) -> io::Result<Self> {
        let inner = tcp::TcpStream::connect_nonblocking(net, address, options)?;
        poll_fn(|context| inner.poll_connected(context)).await?;
        Ok(Self { inner })
    }

    /// Converts to the connection with blocking calls.
    pub fn into_blocking(self) -> tcp::TcpStream {
        self.inner
    }
}

impl From<tcp::TcpStream> for TcpStream {
    fn from(inner: tcp::TcpStream) -> Self {
        Self { inner }
    }
}

impl Deref for TcpStream {
    type Target = tcp::TcpStream;

    fn deref(&self) -> &tcp::TcpStream {
        &self.inner
    }
}

impl AsyncRead for TcpStream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if buf.remaining() == 0 {
            return Poll::Ready(Ok(()));
        }
        let read = self.inner.poll_recv_with(context, |bytes| {
            let len = bytes.len().min(buf.remaining());
            buf.put_slice(&bytes[..len]);
            len
        });
        read.map_ok(|_| ())
    }
}

impl AsyncWrite for TcpStream {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.inner.poll_send_vectored(context, &[IoSlice::new(data)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        data: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.inner.poll_send_vectored(context, data)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    /// Does nothing: written data is not held back.
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    /// Shuts down writing: the peer reads the end of the stream after the written data.
    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(self.inner.shutdown(Shutdown::Write))
    }
}
