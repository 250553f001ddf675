//! TCP listeners.

use std::future::poll_fn;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::task::{Context, Poll};

use tidegate_stack::TcpOptions;

use super::stream::TcpStream;
use crate::net::handle::Net;
use crate::tcp;

/// TCP listener, in the style of `tokio::net::TcpListener`.
#[derive(Clone, Debug)]
pub struct TcpListener {
    inner: tcp::TcpListener,
}

impl TcpListener {
    /// Listens, as [`crate::TcpListener::bind`]. Name resolution blocks the thread: pass
    /// addresses.
    ///
    /// # Errors
    /// As [`crate::TcpListener::bind`].
    pub fn bind(net: &Net, address: impl ToSocketAddrs) -> io::Result<Self> {
        tcp::TcpListener::bind(net, address).map(Self::from)
    }

    /// Like [`TcpListener::bind`], with an accept queue of `backlog` connections, and with
    /// options for all connections.
    ///
    /// # Errors
    /// As [`crate::TcpListener::bind`].
    pub fn bind_with(
        net: &Net,
        address: impl ToSocketAddrs,
        backlog: usize,
        options: TcpOptions,
    ) -> io::Result<Self> {
        tcp::TcpListener::bind_with(net, address, backlog, options).map(Self::from)
    }

    /// Waits for a connection. Returns its stream and the peer's address. Several tasks may
    /// wait. Cancel-safe: no connection is lost when the future is dropped.
    ///
    /// # Errors
    /// When the device has failed.
    pub async fn accept(&self) -> io::Result<(TcpStream, SocketAddr)> {
        poll_fn(|context| self.poll_accept(context)).await
    }

    /// Like [`TcpListener::accept`], for hand-written futures.
    ///
    /// # Errors
    /// When the device has failed.
    pub fn poll_accept(
        &self,
        context: &mut Context<'_>,
    ) -> Poll<io::Result<(TcpStream, SocketAddr)>> {
        self.inner.poll_accept(context).map_ok(|(stream, peer)| (TcpStream::from(stream), peer))
    }

    /// Local address of the listener.
    ///
    /// # Errors
    /// None while the listener is open.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.inner.local_addr()
    }
}

impl From<tcp::TcpListener> for TcpListener {
    fn from(inner: tcp::TcpListener) -> Self {
        Self { inner }
    }
}
