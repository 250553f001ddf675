//! Batches: several calls on TCP sockets under one lock.

use std::io::{self, IoSlice, IoSliceMut};
use std::net::SocketAddr;

use tidegate_stack::TcpOptions;

use crate::net::handle::Net;
use crate::net::source::Source;
use crate::poll::Poll;
use crate::tcp::{BatchGuard, ClosingStream, TcpListener, TcpStream, recv_buffers, send_buffers};
use crate::types::readiness::{Interest, Token, Trigger};
use crate::types::socket_id::SocketId;
use crate::types::socket_ops::SocketOps;

/// Locked stack, for several calls on its TCP sockets: one lock for all calls, and their
/// segments are transmitted together. No call blocks.
///
/// Created by [`Net::batch`].
pub struct Batch<'b> {
    net: &'b Net,
    ops: &'b mut dyn SocketOps,
}

impl Net {
    /// Locks the stack while `body` runs, then transmits the segments of its calls. All other
    /// threads wait meanwhile, so `body` should be short.
    ///
    /// # Panics
    /// When `body` uses a socket of any [`Net`] other than through the batch, which would
    /// deadlock. Dropping a socket is allowed.
    ///
    /// # Errors
    /// When the device has failed.
    pub fn batch<R>(&self, body: impl FnOnce(&mut Batch<'_>) -> R) -> io::Result<R> {
        let (result, committed, others) = self.with(|core| {
            core.read_clock();
            let held = BatchGuard::enter();
            let result = body(&mut Batch { net: self, ops: core });
            let dropped = held.leave().into_iter();
            // Dropped sockets of other stacks need the locks of those stacks.
            let others: Vec<ClosingStream> =
                dropped.filter_map(|ended| ended.close_in(self, core)).collect();
            (result, core.commit(), others)
        });
        drop(others);
        committed.map(|()| result)
    }
}

impl Batch<'_> {
    /// Like [`TcpListener::accept`].
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] when no connection is waiting.
    pub fn accept(&mut self, listener: &TcpListener) -> io::Result<(TcpStream, SocketAddr)> {
        self.check(listener)?;
        let (id, peer) = self.ops.tcp_accept(listener.listener_id())?;
        Ok((listener.stream(id), peer))
    }

    /// Starts a connection, from `local` if given. The stream becomes writable when the
    /// connection is established or has failed.
    ///
    /// # Errors
    /// As [`TcpStream::connect_from`].
    pub fn connect(
        &mut self,
        local: Option<SocketAddr>,
        address: SocketAddr,
        options: TcpOptions,
    ) -> io::Result<TcpStream> {
        TcpStream::start_connect(self.net, self.ops, local, address, options)
    }

    /// Succeeds once the connection of a stream is established.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] while it is being established; the error it failed with.
    pub fn finish_connect(&mut self, stream: &TcpStream) -> io::Result<()> {
        self.check(stream)?;
        Ok(self.ops.tcp_finish_connect(stream.tcp_id())?)
    }

    /// Like [`TcpStream::recv`].
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] when no data has arrived; the error that ended the
    /// connection.
    pub fn recv(&mut self, stream: &TcpStream, buf: &mut [u8]) -> io::Result<usize> {
        self.check(stream)?;
        Ok(self.ops.tcp_recv(stream.tcp_id(), buf)?)
    }

    /// Like [`TcpStream::recv_vectored`].
    ///
    /// # Errors
    /// As [`Batch::recv`].
    pub fn recv_vectored(
        &mut self,
        stream: &TcpStream,
        bufs: &mut [IoSliceMut<'_>],
    ) -> io::Result<usize> {
        self.check(stream)?;
        Ok(recv_buffers(self.ops, stream.tcp_id(), bufs)?)
    }

    /// Like [`TcpStream::peek`].
    ///
    /// # Errors
    /// As [`Batch::recv`].
    pub fn peek(&mut self, stream: &TcpStream, buf: &mut [u8]) -> io::Result<usize> {
        self.check(stream)?;
        Ok(self.ops.tcp_peek(stream.tcp_id(), buf)?)
    }

    /// Like [`TcpStream::recv_with`].
    ///
    /// # Errors
    /// As [`Batch::recv`].
    pub fn recv_with(
        &mut self,
        stream: &TcpStream,
        mut read: impl FnMut(&[u8]) -> usize,
    ) -> io::Result<usize> {
        self.check(stream)?;
        Ok(self.ops.tcp_recv_with(stream.tcp_id(), &mut read)?)
    }

    /// Like [`TcpStream::send`].
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] when the send buffer is full; the error that ended the
    /// connection.
    pub fn send(&mut self, stream: &TcpStream, data: &[u8]) -> io::Result<usize> {
        self.check(stream)?;
        Ok(self.ops.tcp_send(stream.tcp_id(), data)?)
    }

    /// Like [`TcpStream::send_vectored`].
    ///
    /// # Errors
    /// As [`Batch::send`].
    pub fn send_vectored(&mut self, stream: &TcpStream, data: &[IoSlice<'_>]) -> io::Result<usize> {
        self.check(stream)?;
        Ok(send_buffers(self.ops, stream.tcp_id(), data)?)
    }

    /// Like [`TcpStream::send_with`].
    ///
    /// # Errors
    /// As [`Batch::send`].
    pub fn send_with(
        &mut self,
        stream: &TcpStream,
        limit: usize,
        mut write: impl FnMut(&mut [u8]) -> usize,
    ) -> io::Result<usize> {
        self.check(stream)?;
        Ok(self.ops.tcp_send_with(stream.tcp_id(), limit, &mut write)?)
    }

    /// Like [`Poll::register_for`].
    ///
    /// # Errors
    /// As [`Poll::register_for`].
    pub fn register(
        &mut self,
        poll: &Poll,
        socket: &(impl Source + ?Sized),
        token: Token,
        interest: Interest,
    ) -> io::Result<()> {
        self.check(socket)?;
        self.ops.poll_sets().insert(poll.set_id(), socket.id(), token, interest)?;
        self.ops.waiters().wake(SocketId::Poll(poll.set_id()));
        Ok(())
    }

    /// Like [`Poll::reregister`].
    ///
    /// # Errors
    /// As [`Poll::reregister`].
    pub fn reregister(
        &mut self,
        poll: &Poll,
        socket: &(impl Source + ?Sized),
        token: Token,
        interest: Interest,
    ) -> io::Result<()> {
        self.check(socket)?;
        let changed = self.ops.poll_sets().change(poll.set_id(), socket.id(), token, interest);
        self.ops.waiters().wake(SocketId::Poll(poll.set_id()));
        if changed { Ok(()) } else { Err(io::ErrorKind::NotFound.into()) }
    }

    /// Like [`Poll::set_trigger`].
    ///
    /// # Errors
    /// As [`Poll::set_trigger`].
    pub fn set_trigger(
        &mut self,
        poll: &Poll,
        socket: &(impl Source + ?Sized),
        trigger: Trigger,
    ) -> io::Result<()> {
        self.check(socket)?;
        let changed = self.ops.poll_sets().set_trigger(poll.set_id(), socket.id(), trigger);
        if changed { Ok(()) } else { Err(io::ErrorKind::NotFound.into()) }
    }

    /// Like [`Poll::deregister`].
    ///
    /// # Errors
    /// As [`Poll::deregister`].
    pub fn deregister(&mut self, poll: &Poll, socket: &(impl Source + ?Sized)) -> io::Result<()> {
        self.check(socket)?;
        let removed = self.ops.poll_sets().remove(poll.set_id(), socket.id());
        if removed { Ok(()) } else { Err(io::ErrorKind::NotFound.into()) }
    }

    /// Rejects a socket of another stack: its handle could match a socket of this stack.
    fn check(&self, socket: &(impl Source + ?Sized)) -> io::Result<()> {
        if socket.net().is_same(self.net) {
            return Ok(());
        }
        Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "the socket belongs to another Net: use one batch per Net",
        ))
    }
}
