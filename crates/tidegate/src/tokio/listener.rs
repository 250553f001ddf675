//! Listening for connections.

use std::future::poll_fn;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::task::{Context, Poll};

use tidegate_stack::TcpOptions;

use super::TcpStream;
use crate::Net;

/// A listener for TCP connections, in the style of `tokio::net::TcpListener`.
#[derive(Clone, Debug)]
pub struct TcpListener {
    inner: crate::TcpListener,
}

impl TcpListener {
    /// Listens, as [`crate::TcpListener::bind`]. Names are resolved at once,
    /// which may block: give addresses.
    ///
    /// # Errors
    /// As [`crate::TcpListener::bind`].
    pub fn bind(net: &Net, address: impl ToSocketAddrs) -> io::Result<Self> {
        crate::TcpListener::bind(net, address).map(Self::from)
    }

    /// As [`TcpListener::bind`], with room for `backlog` connections that were
    /// not accepted yet, and with options for all of them.
    ///
    /// # Errors
    /// As [`crate::TcpListener::bind`].
    pub fn bind_with(
        net: &Net,
        address: impl ToSocketAddrs,
        backlog: usize,
        options: TcpOptions,
    ) -> io::Result<Self> {
        crate::TcpListener::bind_with(net, address, backlog, options).map(Self::from)
    }

    /// Waits for a connection. Returns it with the peer's address. Several
    /// tasks may wait; nothing is lost when one gives up.
    ///
    /// # Errors
    /// When the port is of no further use.
    pub async fn accept(&self) -> io::Result<(TcpStream, SocketAddr)> {
        poll_fn(|context| self.poll_accept(context)).await
    }

    /// As [`TcpListener::accept`], for futures written by hand.
    ///
    /// # Errors
    /// When the port is of no further use.
    pub fn poll_accept(
        &self,
        context: &mut Context<'_>,
    ) -> Poll<io::Result<(TcpStream, SocketAddr)>> {
        self.inner.poll_accept(context).map_ok(|(stream, peer)| (TcpStream::from(stream), peer))
    }

    /// The address it listens on.
    ///
    /// # Errors
    /// None while it is open.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.inner.local_addr()
    }
}

impl From<crate::TcpListener> for TcpListener {
    fn from(inner: crate::TcpListener) -> Self {
        Self { inner }
    }
}
