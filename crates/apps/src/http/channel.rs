//! I/O of one connection: hyper's view of the stream, with all that waits in it.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::exchange::Exchange;
use super::ledger::Ledger;
use super::limits::MIN_SEND_BUFFER_BYTES;
use super::listener::HttpStream;

/// Small writes are collected up to this size, and written at the end of a turn: the answers to
/// pipelined requests leave together.
const COLLECT_BYTES: usize = 8 << 10;

/// Stream of one connection. What hyper writes is flushed by the task of the connection before
/// the task waits: neither hyper's flush nor its shutdown reaches the stream.
pub(super) struct Channel<S> {
    stream: S,
    ledger: Arc<Ledger>,
    exchange: Arc<Exchange>,
    /// Small writes that are not in the stream yet.
    collected: Vec<u8>,
    /// Size of the send buffer, and bytes written since it has that size.
    send_buffer_bytes: u32,
    written_with_size: u64,
    /// Bytes read from and written to the stream so far.
    received: u64,
    sent: u64,
    /// The stream did not take the last write.
    is_blocked: bool,
    /// The peer has ended its side, and the server its own.
    has_ended: bool,
    is_shut_down: bool,
}

impl<S: HttpStream> Channel<S> {
    pub(super) fn new(stream: S, ledger: Arc<Ledger>, exchange: Arc<Exchange>) -> Self {
        Self {
            stream,
            ledger,
            exchange,
            collected: Vec::new(),
            send_buffer_bytes: MIN_SEND_BUFFER_BYTES,
            written_with_size: 0,
            received: 0,
            sent: 0,
            is_blocked: false,
            has_ended: false,
            is_shut_down: false,
        }
    }

    /// Bytes that wait for the client: here, in hyper and in TCP's buffers.
    pub(super) fn waiting_bytes(&self) -> usize {
        let in_hyper = if self.is_blocked { self.exchange.waiting_bytes() } else { 0 };
        self.collected.capacity() + in_hyper + self.stream.queued_bytes()
    }

    /// Bytes that are still to be sent or acknowledged, or to be read from TCP's buffer.
    pub(super) fn queued_bytes(&self) -> usize {
        self.collected.len() + self.stream.queued_bytes()
    }

    /// True while the client has to read before more can be written.
    pub(super) fn waits_to_write(&self) -> bool {
        self.is_blocked || !self.collected.is_empty()
    }

    pub(super) fn received(&self) -> u64 {
        self.received
    }

    pub(super) fn sent(&self) -> u64 {
        self.sent
    }

    pub(super) fn set_reset_on_close(&self) {
        self.stream.set_reset_on_close();
    }

    /// Replaces the response `old`, if it was the last and was not written yet, by `new`.
    pub(super) fn replace_response(&mut self, old: &[u8], new: &[u8]) {
        let tail = self.collected.windows(old.len()).rposition(|window| window == old);
        if let Some(start) = tail {
            self.collected.truncate(start);
            self.collected.extend_from_slice(new);
        }
    }

    /// Adds a response that does not come from hyper.
    pub(super) fn push(&mut self, response: &[u8]) {
        self.collected.extend_from_slice(response);
    }

    /// Writes what was collected.
    pub(super) fn poll_flush(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut collected = std::mem::take(&mut self.collected);
        let mut written = 0;
        let mut result = Poll::Ready(Ok(()));
        while written < collected.len() {
            match self.poll_write_stream(context, &[IoSlice::new(&collected[written..])]) {
                Poll::Ready(Ok(0)) => {
                    result = Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
                    break;
                }
                Poll::Ready(Ok(len)) => written += len,
                Poll::Ready(Err(error)) => {
                    result = Poll::Ready(Err(error));
                    break;
                }
                Poll::Pending => {
                    result = Poll::Pending;
                    break;
                }
            }
        }
        if written < collected.len() {
            collected.drain(..written);
            self.collected = collected;
        }
        result
    }

    /// Ends the server's side of the stream, after what was collected.
    pub(super) fn poll_shutdown(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_flush(context))?;
        if !self.is_shut_down {
            ready!(Pin::new(&mut self.stream).poll_shutdown(context))?;
            self.is_shut_down = true;
        }
        Poll::Ready(Ok(()))
    }

    /// Reads and discards until the peer has ended its side.
    pub(super) fn poll_drain(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut scratch = [0; 4096];
        while !self.has_ended {
            let mut buf = ReadBuf::new(&mut scratch);
            ready!(self.poll_read(context, &mut buf))?;
        }
        Poll::Ready(Ok(()))
    }

    fn poll_read(
        &mut self,
        context: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(context, buf))?;
        match buf.filled().len() - before {
            0 => self.has_ended = true,
            len => {
                self.received += len as u64;
                self.exchange.on_received();
            }
        }
        Poll::Ready(Ok(()))
    }

    fn poll_write(
        &mut self,
        context: &mut Context<'_>,
        data: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let total: usize = data.iter().map(|slice| slice.len()).sum();
        if self.collected.len() + total > COLLECT_BYTES {
            ready!(self.poll_flush(context))?;
        }
        if total > COLLECT_BYTES {
            return self.poll_write_stream(context, data);
        }
        self.collected.reserve(total);
        for slice in data {
            self.collected.extend_from_slice(slice);
        }
        Poll::Ready(Ok(total))
    }

    fn poll_write_stream(
        &mut self,
        context: &mut Context<'_>,
        data: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        loop {
            let written = Pin::new(&mut self.stream).poll_write_vectored(context, data);
            self.is_blocked = written.is_pending();
            if self.is_blocked && self.resize_send_buffer() {
                continue;
            }
            if let Poll::Ready(Ok(len)) = written {
                self.sent += len as u64;
                self.written_with_size += len as u64;
            }
            return written;
        }
    }

    /// Adapts the send buffer to the free memory. A peer that has taken a whole buffer gets one
    /// twice as large. Returns true if the buffer has grown.
    fn resize_send_buffer(&mut self) -> bool {
        let old = self.send_buffer_bytes;
        // All of the buffer is full: what was written before that, the peer has taken.
        let takes_data = self.written_with_size >= 2 * u64::from(old);
        let wanted = if takes_data { old.saturating_mul(2) } else { old };
        let new = wanted.min(self.ledger.send_buffer_bytes());
        if new != old {
            self.send_buffer_bytes = new;
            self.written_with_size = 0;
            self.exchange.set_send_buffer(new);
            self.stream.set_send_buffer(new);
        }
        new > old
    }
}

/// Handle of a [`Channel`] for hyper.
pub(super) struct ChannelIo<S>(pub(super) Arc<Mutex<Channel<S>>>);

/// Locks a channel. Only the task of its connection does.
pub(super) fn lock<S>(channel: &Mutex<Channel<S>>) -> MutexGuard<'_, Channel<S>> {
    channel.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<S: HttpStream> AsyncRead for ChannelIo<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        lock(&self.0).poll_read(context, buf)
    }
}

impl<S: HttpStream> AsyncWrite for ChannelIo<S> {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        lock(&self.0).poll_write(context, &[IoSlice::new(data)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        data: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        lock(&self.0).poll_write(context, data)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}
