//! Several calls on sockets at once.

use std::cell::RefCell;
use std::io;
use std::net::SocketAddr;

use tidegate_stack::TcpOptions;

use crate::net::{Core, Net};
use crate::poll::{Interest, Poll, Source, Token};
use crate::tcp::{Ended, TcpListener, TcpStream};

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
    core: &'b mut Core,
    now_ns: u64,
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
        let mut core = self.lock();
        let now_ns = core.engine.read_clock();
        let held = Held::enter();
        let result = calls(&mut Batch { net: self, core: &mut core, now_ns });
        let dropped = held.leave().into_iter();
        // What was dropped of other stacks needs their locks.
        let others: Vec<Ended> =
            dropped.filter_map(|ended| ended.end_in(self, &mut core)).collect();
        let (stack, arena, _) = core.engine.parts();
        stack.tcp_flush(now_ns, arena);
        let committed = core.commit();
        drop(core);
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
    DROPPED.with_borrow(Option::is_some)
}

impl Batch<'_> {
    /// As [`TcpListener::accept`].
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] when no connection waits.
    pub fn accept(&mut self, listener: &TcpListener) -> io::Result<(TcpStream, SocketAddr)> {
        self.check(listener)?;
        let (id, peer) = listener.take(self.core)?;
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
        TcpStream::begin(self.net, self.core, local, address, options)
    }

    /// Whether a stream is connected.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] while it is not; how it failed.
    pub fn finish_connect(&mut self, stream: &TcpStream) -> io::Result<()> {
        self.check(stream)?;
        Ok(self.core.finish_connect(stream.tcp_id())?)
    }

    /// As [`TcpStream::recv`].
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] when nothing has arrived; how the
    /// connection ended.
    pub fn recv(&mut self, stream: &TcpStream, buf: &mut [u8]) -> io::Result<usize> {
        self.check(stream)?;
        let (stack, _, _) = self.core.engine.parts();
        Ok(stack.tcp_read(self.now_ns, stream.tcp_id(), buf)?)
    }

    /// As [`TcpStream::recv_with`].
    ///
    /// # Errors
    /// As [`Batch::recv`].
    pub fn recv_with(
        &mut self,
        stream: &TcpStream,
        read: impl FnOnce(&[u8]) -> usize,
    ) -> io::Result<usize> {
        self.check(stream)?;
        let (stack, _, _) = self.core.engine.parts();
        Ok(stack.tcp_read_with(self.now_ns, stream.tcp_id(), read)?)
    }

    /// As [`TcpStream::send`].
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] when there is no room; how the connection
    /// ended.
    pub fn send(&mut self, stream: &TcpStream, data: &[u8]) -> io::Result<usize> {
        self.check(stream)?;
        let (stack, _, _) = self.core.engine.parts();
        Ok(stack.tcp_write(self.now_ns, stream.tcp_id(), data)?)
    }

    /// As [`Poll::register_for`].
    ///
    /// # Errors
    /// As [`Poll::register_for`].
    pub fn register(
        &mut self,
        poll: &Poll,
        socket: &impl Source,
        token: Token,
        interest: Interest,
    ) -> io::Result<()> {
        self.check(socket)?;
        self.core.polls.insert(poll.number(), socket.id(), token, interest)
    }

    /// As [`Poll::reregister`].
    ///
    /// # Errors
    /// As [`Poll::reregister`].
    pub fn reregister(
        &mut self,
        poll: &Poll,
        socket: &impl Source,
        token: Token,
        interest: Interest,
    ) -> io::Result<()> {
        self.check(socket)?;
        let changed = self.core.polls.change(poll.number(), socket.id(), token, interest);
        if changed { Ok(()) } else { Err(io::ErrorKind::NotFound.into()) }
    }

    /// Without this a socket of another stack would be one of ours by number.
    fn check(&self, socket: &impl Source) -> io::Result<()> {
        if socket.net().is_same(self.net) {
            return Ok(());
        }
        Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "the socket belongs to another Net: use one batch per Net",
        ))
    }
}
