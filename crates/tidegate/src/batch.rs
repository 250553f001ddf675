//! Several calls on sockets at once.

use std::cell::RefCell;
use std::io;
use std::net::SocketAddr;

use tidegate_stack::TcpOptions;

use crate::calls::Calls;
use crate::net::Net;
use crate::poll::{Interest, Poll, Source, Token, Trigger};
use crate::tcp::{Ended, TcpListener, TcpStream};
use crate::wait::SocketId;

thread_local! {
    /// The streams that were dropped while this thread held a stack.
    static DROPPED: RefCell<Option<Vec<Ended>>> = const { RefCell::new(None) };
}

/// The stack, held for several calls on its TCP sockets: no lock for each, and
/// what they send leaves together. No call waits.
///
/// Made by [`Net::batch`].
pub struct Batch<'b> {
    net: &'b Net,
    calls: &'b mut dyn Calls,
}

impl Net {
    /// Holds the stack for as long as `calls` runs, then sends what its calls
    /// have made. Nobody else can use the stack meanwhile, so `calls` should be
    /// short.
    ///
    /// # Panics
    /// When `calls` uses a socket of any [`Net`] by other ways than the batch:
    /// it would wait for itself. Dropping one is fine.
    ///
    /// # Errors
    /// When the port is of no further use.
    pub fn batch<R>(&self, calls: impl FnOnce(&mut Batch<'_>) -> R) -> io::Result<R> {
        let (result, committed, others) = self.with(|core| {
            core.read_clock();
            let held = Held::enter();
            let result = calls(&mut Batch { net: self, calls: core });
            let dropped = held.leave().into_iter();
            // What was dropped of other stacks needs their locks.
            let others: Vec<Ended> = dropped.filter_map(|ended| ended.end_in(self, core)).collect();
            (result, core.commit(), others)
        });
        drop(others);
        committed.map(|()| result)
    }
}

/// Says that this thread holds a stack, until it is dropped.
struct Held;

impl Held {
    fn enter() -> Self {
        DROPPED.with_borrow_mut(|dropped| *dropped = Some(Vec::new()));
        Self
    }

    fn leave(self) -> Vec<Ended> {
        DROPPED.take().unwrap_or_default()
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // Only when the calls panicked is there anything left: it is lost with
        // the thread's lock, as everything else that they held.
        std::mem::forget(DROPPED.take());
    }
}

/// Keeps a stream that ends for later, if this thread holds a stack.
pub(crate) fn defer(ended: Ended) -> Result<(), Ended> {
    // A thread that is about to end holds nothing.
    if !is_held() {
        return Err(ended);
    }
    DROPPED.with_borrow_mut(|dropped| match dropped {
        Some(dropped) => {
            dropped.push(ended);
            Ok(())
        }
        None => Err(ended),
    })
}

/// Whether this thread holds a stack.
pub(crate) fn is_held() -> bool {
    DROPPED.try_with(|dropped| dropped.borrow().is_some()).unwrap_or(false)
}

impl Batch<'_> {
    /// As [`TcpListener::accept`].
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] when no connection waits.
    pub fn accept(&mut self, listener: &TcpListener) -> io::Result<(TcpStream, SocketAddr)> {
        self.check(listener)?;
        let (id, peer) = self.calls.tcp_accept(listener.listener_id())?;
        Ok((listener.stream(id), peer))
    }

    /// Begins to connect, from a local address if one is given; the stream is
    /// writable when that has worked or failed.
    ///
    /// # Errors
    /// As [`TcpStream::connect_from`].
    pub fn connect(
        &mut self,
        local: Option<SocketAddr>,
        address: SocketAddr,
        options: TcpOptions,
    ) -> io::Result<TcpStream> {
        TcpStream::begin(self.net, self.calls, local, address, options)
    }

    /// Whether a stream is connected.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] while it is not; how it failed.
    pub fn finish_connect(&mut self, stream: &TcpStream) -> io::Result<()> {
        self.check(stream)?;
        Ok(self.calls.tcp_finish_connect(stream.tcp_id())?)
    }

    /// As [`TcpStream::recv`].
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] when nothing has arrived; how the
    /// connection ended.
    pub fn recv(&mut self, stream: &TcpStream, buf: &mut [u8]) -> io::Result<usize> {
        self.check(stream)?;
        Ok(self.calls.tcp_recv(stream.tcp_id(), buf)?)
    }

    /// As [`TcpStream::peek`].
    ///
    /// # Errors
    /// As [`Batch::recv`].
    pub fn peek(&mut self, stream: &TcpStream, buf: &mut [u8]) -> io::Result<usize> {
        self.check(stream)?;
        Ok(self.calls.tcp_peek(stream.tcp_id(), buf)?)
    }

    /// As [`TcpStream::recv_with`].
    ///
    /// # Errors
    /// As [`Batch::recv`].
    pub fn recv_with(
        &mut self,
        stream: &TcpStream,
        mut read: impl FnMut(&[u8]) -> usize,
    ) -> io::Result<usize> {
        self.check(stream)?;
        Ok(self.calls.tcp_recv_with(stream.tcp_id(), &mut read)?)
    }

    /// As [`TcpStream::send`].
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] when there is no room; how the connection
    /// ended.
    pub fn send(&mut self, stream: &TcpStream, data: &[u8]) -> io::Result<usize> {
        self.check(stream)?;
        Ok(self.calls.tcp_send(stream.tcp_id(), data)?)
    }

    /// As [`TcpStream::send_with`].
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
        Ok(self.calls.tcp_send_with(stream.tcp_id(), limit, &mut write)?)
    }

    /// As [`Poll::register_for`].
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
        self.calls.polls().insert(poll.number(), socket.id(), token, interest)?;
        self.calls.waiters().wake(SocketId::Poll(poll.number()));
        Ok(())
    }

    /// As [`Poll::reregister`].
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
        let changed = self.calls.polls().change(poll.number(), socket.id(), token, interest);
        self.calls.waiters().wake(SocketId::Poll(poll.number()));
        if changed { Ok(()) } else { Err(io::ErrorKind::NotFound.into()) }
    }

    /// As [`Poll::set_trigger`].
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
        let changed = self.calls.polls().set_trigger(poll.number(), socket.id(), trigger);
        if changed { Ok(()) } else { Err(io::ErrorKind::NotFound.into()) }
    }

    /// As [`Poll::deregister`].
    ///
    /// # Errors
    /// As [`Poll::deregister`].
    pub fn deregister(&mut self, poll: &Poll, socket: &(impl Source + ?Sized)) -> io::Result<()> {
        self.check(socket)?;
        let removed = self.calls.polls().remove(poll.number(), socket.id());
        if removed { Ok(()) } else { Err(io::ErrorKind::NotFound.into()) }
    }

    /// Without this a socket of another stack would be one of ours by number.
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
