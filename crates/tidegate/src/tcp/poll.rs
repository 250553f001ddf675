//! What futures are made of: calls that never wait, but see to it that the
//! task is woken when it is worth another try.
//!
//! They need somebody who runs the stack: a thread of its own
//! ([`crate::NetConfig::own_thread`]), or a task (`tidegate::tokio::drive`).

use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::task::{Context, Poll, ready};

use tidegate_stack::TcpError;

use super::{TcpListener, TcpStream};
use crate::net::Core;
use crate::tasks::Side;
use crate::wait::SocketId;

impl Core {
    /// Asks `ready`. If it has nothing yet, the task is woken when it may have.
    fn poll<R>(
        &mut self,
        context: &mut Context<'_>,
        (id, side): (SocketId, Side),
        ready: impl FnOnce(&mut Core) -> Result<R, TcpError>,
    ) -> Poll<io::Result<R>> {
        match ready(self) {
            Ok(result) => Poll::Ready(Ok(result)),
            Err(TcpError::WouldBlock) => {
                if let Some(failure) = &self.failure {
                    let failure = io::Error::new(failure.kind(), failure.to_string());
                    return Poll::Ready(Err(failure));
                }
                self.tasks.wait(id, side, context.waker());
                Poll::Pending
            }
            Err(error) => Poll::Ready(Err(error.into())),
        }
    }

    /// Lets the segments that calls have made go out: now, or with those of
    /// other tasks when the task that runs the engine has its turn.
    fn flush_later(&mut self) -> io::Result<()> {
        if self.tasks.call_driver() {
            return Ok(());
        }
        let (stack, arena, now_ns) = self.engine.parts();
        stack.tcp_flush(now_ns, arena);
        self.commit()
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
        let mut core = self.inner.net.lock();
        let waits = (SocketId::Listener(self.inner.id), Side::Read);
        let accepted = core.poll(context, waits, |core| self.take(core));
        drop(core);
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
        let mut core = self.inner.net.lock();
        core.poll(context, (SocketId::Stream(id), Side::Write), |core| core.finish_connect(id))
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
        let mut core = self.inner.net.lock();
        let taken = core.poll(context, (SocketId::Stream(id), Side::Read), |core| {
            let now_ns = core.engine.read_clock();
            let (stack, _, _) = core.engine.parts();
            let mut total = 0;
            loop {
                let mut shown = 0;
                let used = stack.tcp_read_with(now_ns, id, |bytes| {
                    shown = bytes.len();
                    read(bytes).min(shown)
                });
                match used {
                    Ok(used) => {
                        total += used;
                        if used < shown || shown == 0 || stack.tcp_readable(id) == 0 {
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
        Poll::Ready(core.flush_later().map(|()| taken))
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
        let mut core = self.inner.net.lock();
        let written = core.poll(context, (SocketId::Stream(id), Side::Write), |core| {
            let now_ns = core.engine.read_clock();
            core.write_vectored(now_ns, id, data)
        });
        let written = ready!(written)?;
        Poll::Ready(core.flush_later().map(|()| written))
    }
}
