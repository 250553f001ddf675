//! What futures are made of: calls that never wait, but see to it that the
//! task is woken when it is worth another try.
//!
//! They need somebody who runs the stack: a thread of its own
//! ([`crate::NetConfig::own_thread`]), or a task (`tidegate::tokio::drive`).

use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::task::{Context, Poll, ready};

use super::stream::write_pieces;
use super::{TcpListener, TcpStream};
use crate::calls::{CallError, Called, Calls};
use crate::tasks::Side;
use crate::wait::SocketId;

/// Asks `ready`. If it has nothing yet, the task is woken when it may have.
fn poll<R>(
    calls: &mut dyn Calls,
    context: &mut Context<'_>,
    (id, side): (SocketId, Side),
    ready: impl FnOnce(&mut dyn Calls) -> Called<R>,
) -> Poll<io::Result<R>> {
    match ready(calls) {
        Ok(result) => Poll::Ready(Ok(result)),
        Err(CallError::WouldBlock) => {
            if let Some(failure) = calls.failure() {
                return Poll::Ready(Err(failure));
            }
            calls.tasks().wait(id, side, context.waker());
            Poll::Pending
        }
        Err(CallError::Failed(error)) => Poll::Ready(Err(error)),
    }
}

impl TcpListener {
    /// A connection, if one waits; else the task is woken when one may wait.
    /// Several tasks may wait for one listener.
    ///
    /// # Errors
    /// When the port is of no further use.
    pub fn poll_accept(
        &self,
        context: &mut Context<'_>,
    ) -> Poll<io::Result<(TcpStream, SocketAddr)>> {
        let id = self.inner.id;
        let accepted = self.inner.net.with(|calls| {
            poll(calls, context, (SocketId::Listener(id), Side::Read), |calls| calls.tcp_accept(id))
        });
        accepted.map_ok(|(id, peer)| (self.stream(id), peer))
    }
}

impl TcpStream {
    /// Whether the connection is established; else the task is woken when it
    /// is, or has failed.
    ///
    /// # Errors
    /// As [`TcpStream::connect`].
    pub fn poll_connected(&self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let id = self.inner.id;
        self.inner.net.with(|calls| {
            poll(calls, context, (SocketId::Stream(id), Side::Write), |calls| {
                calls.tcp_finish_connect(id)
            })
        })
    }

    /// Reads what has arrived, where it lies, at least one byte: `read` is
    /// shown one piece after the other and says how much it takes, until it
    /// takes less than it was shown. 0 is the end. Else the task is woken when
    /// something arrives.
    ///
    /// One task at a time may wait to read from a connection.
    ///
    /// # Errors
    /// As [`TcpStream::recv`].
    pub fn poll_recv_with(
        &self,
        context: &mut Context<'_>,
        mut read: impl FnMut(&[u8]) -> usize,
    ) -> Poll<io::Result<usize>> {
        let id = self.inner.id;
        self.inner.net.with(|calls| {
            let taken = poll(calls, context, (SocketId::Stream(id), Side::Read), |calls| {
                calls.read_clock();
                let mut total = 0;
                loop {
                    let mut shown = 0;
                    let used = calls.tcp_recv_with(id, &mut |bytes| {
                        shown = bytes.len();
                        read(bytes).min(shown)
                    });
                    match used {
                        Ok(used) => {
                            total += used;
                            if used < shown || shown == 0 || calls.tcp_readable(id) == 0 {
                                return Ok(total);
                            }
                        }
                        Err(_) if total > 0 => return Ok(total),
                        Err(error) => return Err(error),
                    }
                }
            });
            let taken = ready!(taken)?;
            // The peer may have to be told that there is room again.
            Poll::Ready(calls.commit_later().map(|()| taken))
        })
    }

    /// Writes some of these pieces of data, at least one byte of them; else the
    /// task is woken when there is room.
    ///
    /// One task at a time may wait to write to a connection.
    ///
    /// # Errors
    /// As [`TcpStream::send`].
    pub fn poll_send_vectored(
        &self,
        context: &mut Context<'_>,
        data: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let id = self.inner.id;
        self.inner.net.with(|calls| {
            let written = poll(calls, context, (SocketId::Stream(id), Side::Write), |calls| {
                calls.read_clock();
                write_pieces(calls, id, data)
            });
            let written = ready!(written)?;
            Poll::Ready(calls.commit_later().map(|()| written))
        })
    }
}
