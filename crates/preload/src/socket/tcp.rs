//! TCP connections: nonblocking receive, send and accept.

use std::io::{self, IoSlice, IoSliceMut};
use std::net::{Shutdown, SocketAddr};
use std::sync::PoisonError;
use std::sync::atomic::{AtomicBool, Ordering};

use tidegate::{Batch, TcpListener, TcpState, TcpStream};
use tidegate_posix::unreachable::with_unreachable_reason;

use super::options::SocketOption;
use super::zero_copy::ZeroCopy;
use super::{Endpoint, Listener, Socket, Stream};

impl Stream {
    pub(super) fn new(stream: TcpStream, is_connecting: bool) -> Self {
        let is_corked = stream.options().is_ok_and(|options| options.cork);
        Self {
            stream,
            is_connecting: AtomicBool::new(is_connecting),
            has_never_connected: AtomicBool::new(false),
            is_corked: AtomicBool::new(is_corked),
            more_follows: AtomicBool::new(false),
            linger: super::AtomicTimeout::default(),
            reports_left_bytes: AtomicBool::new(false),
            zero_copy: ZeroCopy::default(),
        }
    }

    /// True while the connection is established or closing; false from TIME-WAIT on.
    pub(crate) fn is_open(&self) -> bool {
        let closed =
            [TcpState::SynSent, TcpState::SynReceived, TcpState::Closed, TcpState::TimeWait];
        self.stream.info().is_ok_and(|info| !closed.contains(&info.state))
    }

    /// Result of connecting.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] while the attempt is in progress; otherwise the cause of
    /// the failure.
    pub(crate) fn finish_connect(&self, socket: &Socket) -> io::Result<()> {
        let finished = socket.net.batch(|batch| batch.finish_connect(&self.stream))?;
        let finished = finished.map_err(|error| self.with_unreachable_reason(error));
        // Without an error the attempt has failed if the application took the error before.
        let is_aborted = finished.is_ok()
            && self.is_connecting.load(Ordering::Relaxed)
            && self.stream.info().is_ok_and(|info| info.state == TcpState::Closed);
        let finished = match is_aborted {
            true => Err(io::ErrorKind::ConnectionAborted.into()),
            false => finished,
        };
        if !matches!(&finished, Err(error) if error.kind() == io::ErrorKind::WouldBlock) {
            self.is_connecting.store(false, Ordering::Relaxed);
            self.has_never_connected.store(finished.is_err(), Ordering::Relaxed);
        }
        finished
    }

    /// The kernel's error code where an ICMP error has ended the connection for a reason that has
    /// no error kind.
    pub(super) fn with_unreachable_reason(&self, error: io::Error) -> io::Error {
        with_unreachable_reason(&self.stream, error)
    }

    /// Turns `NotConnected` into `WouldBlock` while connecting: such a call waits for the
    /// connection, as at the kernel.
    fn block_while_connecting<R>(&self, result: io::Result<R>) -> io::Result<R> {
        let result = result.map_err(|error| self.with_unreachable_reason(error));
        let is_not_connected =
            matches!(&result, Err(error) if error.kind() == io::ErrorKind::NotConnected);
        if is_not_connected && self.is_connecting.load(Ordering::Relaxed) {
            let state = self.stream.info().map(|info| info.state);
            if matches!(state, Ok(TcpState::SynSent | TcpState::SynReceived)) {
                return Err(io::ErrorKind::WouldBlock.into());
            }
        }
        result
    }

    /// Receives into the buffers in order. With `consume` false the data stays in the queue
    /// (`MSG_PEEK`).
    pub(crate) fn receive(
        &self,
        socket: &Socket,
        bufs: &mut [IoSliceMut<'_>],
        consume: bool,
    ) -> io::Result<usize> {
        let received = match bufs {
            // As most calls are.
            [buf] if consume && !buf.is_empty() => self.stream.try_recv(buf),
            _ => socket.net.batch(|batch| match consume {
                true => batch.recv_vectored(&self.stream, bufs),
                false => peek(batch, &self.stream, bufs),
            })?,
        };
        match self.block_while_connecting(received) {
            Ok(0) if self.has_never_connected.load(Ordering::Relaxed) => {
                Err(io::ErrorKind::NotConnected.into())
            }
            received => received,
        }
    }

    /// Sends the buffers in order, as far as there is space. If more data follows (`MSG_MORE`), a
    /// segment that is not full waits for it.
    pub(crate) fn send(
        &self,
        socket: &Socket,
        data: &[IoSlice<'_>],
        more_follows: bool,
    ) -> io::Result<usize> {
        if more_follows && !self.more_follows.swap(true, Ordering::Relaxed) {
            self.update_cork();
        }
        let sent = match data {
            [piece] if !piece.is_empty() => self.stream.try_send(piece),
            _ => socket.net.batch(|batch| send(batch, &self.stream, data))?,
        };
        if !more_follows {
            self.end_more();
        }
        self.block_while_connecting(sent)
    }

    /// No more data follows what was sent with `MSG_MORE`.
    pub(super) fn end_more(&self) {
        if self.more_follows.load(Ordering::Relaxed)
            && self.more_follows.swap(false, Ordering::Relaxed)
        {
            self.update_cork();
        }
    }

    /// Sets `TCP_CORK`.
    pub(crate) fn set_corked(&self, is_corked: bool) {
        self.is_corked.store(is_corked, Ordering::Relaxed);
        self.update_cork();
    }

    /// True while segments that are not full are held back.
    pub(super) fn holds_partial(&self) -> bool {
        self.is_corked.load(Ordering::Relaxed) || self.more_follows.load(Ordering::Relaxed)
    }

    fn update_cork(&self) {
        // An ended connection has no options, which is no error of the kernel's call either.
        let _ = self.stream.set_options(|options| options.cork = self.holds_partial());
    }

    pub(crate) fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        let was_connecting = self.is_connecting.load(Ordering::Relaxed) && !self.is_open();
        self.stream.shutdown(how)?;
        if was_connecting {
            // The attempt has ended, and the next `connect` starts another one.
            self.is_connecting.store(false, Ordering::Relaxed);
        }
        Ok(())
    }
}

/// Peeks into one joined buffer, since each peek starts at the head of the queue.
fn peek(
    batch: &mut Batch<'_>,
    stream: &TcpStream,
    bufs: &mut [IoSliceMut<'_>],
) -> io::Result<usize> {
    let mut joined = vec![0; bufs.iter().map(|buf| buf.len()).sum()];
    let len = batch.peek(stream, &mut joined)?;
    scatter(&joined[..len], bufs);
    Ok(len)
}

/// Copies `data` into the buffers in order.
pub(crate) fn scatter(mut data: &[u8], bufs: &mut [IoSliceMut<'_>]) {
    for buf in bufs {
        let (chunk, rest) = data.split_at(data.len().min(buf.len()));
        buf[..chunk.len()].copy_from_slice(chunk);
        data = rest;
    }
}

fn send(batch: &mut Batch<'_>, stream: &TcpStream, data: &[IoSlice<'_>]) -> io::Result<usize> {
    match data.iter().all(|piece| piece.is_empty()) {
        // Returns the error of an ended connection.
        true => batch.send(stream, &[]),
        false => batch.send_vectored(stream, data),
    }
}

impl Listener {
    pub(super) fn new(listener: TcpListener) -> Self {
        let (inherited_options, passes_zero_copy) = Default::default();
        Self { listener, inherited_options, passes_zero_copy }
    }

    /// Sets the options for the kernel sockets of accepted connections.
    pub(super) fn set_inherited(&self, options: Vec<SocketOption>) {
        *self.inherited_options.lock().unwrap_or_else(PoisonError::into_inner) = options;
    }

    /// Accepts the connection that has waited longest; returns it with the peer's address.
    pub(crate) fn accept(&self, socket: &Socket) -> io::Result<(Socket, SocketAddr)> {
        let (stream, peer) = socket.net.batch(|batch| batch.accept(&self.listener))??;
        let body = Stream::new(stream, false);
        body.zero_copy.set(self.passes_zero_copy.load(Ordering::Relaxed));
        let body = Endpoint::Stream(body);
        let accepted = Socket::new(socket.net, body, socket.is_v6, false);
        let peer = accepted.to_app_family(peer);
        Ok((accepted, peer))
    }
}
