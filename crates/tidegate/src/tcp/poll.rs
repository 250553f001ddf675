//! Building blocks of futures: calls that never wait, but register the task's waker for the
//! next try.
//!
//! Something must drive the stack: a dedicated thread ([`crate::NetConfig::own_thread`]), or a
//! task (`tidegate::tokio::drive`).

use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::task::{Context, Poll, ready};

use super::listener::TcpListener;
use super::stream::{TcpStream, send_buffers};
use crate::types::errors::{OpError, OpResult};
use crate::types::socket_id::SocketId;
use crate::types::socket_ops::SocketOps;
use crate::types::tasks::IoDirection;

/// Runs a non-blocking operation. If it would block, registers the task's waker.
fn poll<R>(
    ops: &mut dyn SocketOps,
    context: &mut Context<'_>,
    (id, direction): (SocketId, IoDirection),
    op: impl FnOnce(&mut dyn SocketOps) -> OpResult<R>,
) -> Poll<io::Result<R>> {
    match op(ops) {
        Ok(result) => Poll::Ready(Ok(result)),
        Err(OpError::WouldBlock) => {
            if let Some(failure) = ops.failure() {
                return Poll::Ready(Err(failure));
            }
            ops.tasks().register(id, direction, context.waker());
            Poll::Pending
        }
        Err(OpError::Failed(error)) => Poll::Ready(Err(error)),
    }
}

impl TcpListener {
    /// Returns a waiting connection, or registers the task for the next one. Several tasks may
    /// wait on one listener.
    ///
    /// # Errors
    /// When the device has failed.
    pub fn poll_accept(
        &self,
        context: &mut Context<'_>,
    ) -> Poll<io::Result<(TcpStream, SocketAddr)>> {
        let id = self.inner.id;
        let accepted = self.inner.net.with(|ops| {
            poll(ops, context, (SocketId::Listener(id), IoDirection::Read), |calls| {
                calls.tcp_accept(id)
            })
        });
        accepted.map_ok(|(id, peer)| (self.stream(id), peer))
    }
}

impl TcpStream {
    /// Ready once the connection is established; otherwise the task is woken when it is, or when
    /// connecting has failed.
    ///
    /// # Errors
    /// As [`TcpStream::connect`].
    pub fn poll_connected(&self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let id = self.inner.id;
        self.inner.net.with(|ops| {
            poll(ops, context, (SocketId::Stream(id), IoDirection::Write), |calls| {
                calls.tcp_finish_connect(id)
            })
        })
    }

    /// Reads received data in place, at least one byte. `read` gets one slice after the other
    /// and returns the number of bytes it takes, until it takes fewer than it got. Returns the
    /// total; 0 at the end of the stream. The task is woken when data arrives.
    ///
    /// Only one task at a time may wait to read from a connection.
    ///
    /// # Errors
    /// As [`TcpStream::recv`].
    pub fn poll_recv_with(
        &self,
        context: &mut Context<'_>,
        mut read: impl FnMut(&[u8]) -> usize,
    ) -> Poll<io::Result<usize>> {
        let id = self.inner.id;
        self.inner.net.with(|ops| {
            let received = poll(ops, context, (SocketId::Stream(id), IoDirection::Read), |calls| {
                calls.read_clock();
                let mut total = 0;
                loop {
                    let mut offered = 0;
                    let used = calls.tcp_recv_with(id, &mut |bytes| {
                        offered = bytes.len();
                        read(bytes).min(offered)
                    });
                    match used {
                        Ok(used) => {
                            total += used;
                            if used < offered || offered == 0 || calls.tcp_readable(id) == 0 {
                                return Ok(total);
                            }
                        }
                        Err(_) if total > 0 => return Ok(total),
                        Err(error) => return Err(error),
                    }
                }
            });
            let taken = ready!(received)?;
            // The peer may need a window update.
            Poll::Ready(ops.commit_later().map(|()| taken))
        })
    }

    /// Writes some of the data in these slices, at least one byte. The task is woken when there
    /// is send-buffer space.
    ///
    /// Only one task at a time may wait to write to a connection.
    ///
    /// # Errors
    /// As [`TcpStream::send`].
    pub fn poll_send_vectored(
        &self,
        context: &mut Context<'_>,
        data: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let id = self.inner.id;
        self.inner.net.with(|ops| {
            let written = poll(ops, context, (SocketId::Stream(id), IoDirection::Write), |calls| {
                calls.read_clock();
                send_buffers(calls, id, data)
            });
            let written = ready!(written)?;
            Poll::Ready(ops.commit_later().map(|()| written))
        })
    }
}
