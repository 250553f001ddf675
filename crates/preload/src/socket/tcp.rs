//! TCP connections: nonblocking receive, send and accept.

use std::io::{self, IoSlice, IoSliceMut};
use std::net::{Shutdown, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use tidegate::{Batch, TcpState, TcpStream, UnreachableReason};

use super::{Corked, Endpoint, Listener, Socket, Stream};

/// Maximum number of bytes that are held back; a full segment is sent without waiting.
const MAX_CORKED_BYTES: usize = 1400;

impl Stream {
    pub(super) fn new(stream: TcpStream, is_connecting: bool) -> Self {
        Self {
            stream,
            is_connecting: AtomicBool::new(is_connecting),
            has_never_connected: AtomicBool::new(false),
            is_corked: AtomicBool::new(false),
            corked: Mutex::default(),
            has_corked: AtomicBool::new(false),
            linger: super::AtomicTimeout::default(),
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
        if !matches!(
            error.kind(),
            io::ErrorKind::HostUnreachable | io::ErrorKind::ConnectionRefused
        ) {
            return error;
        }
        let code = match self.stream.info().ok().and_then(|info| info.unreachable) {
            Some(UnreachableReason::Protocol) => libc::ENOPROTOOPT,
            Some(UnreachableReason::SourceRoute) => libc::EOPNOTSUPP,
            Some(UnreachableReason::HostUnknown) => libc::EHOSTDOWN,
            Some(UnreachableReason::SourceIsolated) => libc::ENONET,
            _ => return error,
        };
        io::Error::from_raw_os_error(code)
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
        // A reader waits for the answer to data that may still be held back.
        self.flush_corked(socket);
        let received = socket.net.batch(|batch| match consume {
            true => batch.recv_vectored(&self.stream, bufs),
            false => peek(batch, &self.stream, bufs),
        })?;
        match self.block_while_connecting(received) {
            Ok(0) if self.has_never_connected.load(Ordering::Relaxed) => {
                Err(io::ErrorKind::NotConnected.into())
            }
            Ok(0) => self.take_corked_failure().map_or(Ok(0), Err),
            received => received,
        }
    }

    /// Sends the buffers in order, as far as there is space. If more data follows, small
    /// buffers are held back for it.
    pub(crate) fn send(
        &self,
        socket: &Socket,
        data: &[IoSlice<'_>],
        more_follows: bool,
    ) -> io::Result<usize> {
        let delays = more_follows || self.is_corked.load(Ordering::Relaxed);
        if !delays && !self.has_corked.load(Ordering::Relaxed) {
            let sent = socket.net.batch(|batch| send(batch, &self.stream, data))?;
            return self.block_while_connecting(sent);
        }
        let len: usize = data.iter().map(|piece| piece.len()).sum();
        let mut corked = self.lock_corked();
        if let Some(failure) = corked.failure.take() {
            self.has_corked.store(!corked.data.is_empty(), Ordering::Relaxed);
            return Err(failure);
        }
        if delays && self.can_cork(corked.data.len() + len) {
            data.iter().for_each(|piece| corked.data.extend_from_slice(piece));
            self.has_corked.store(!corked.data.is_empty(), Ordering::Relaxed);
            return Ok(len);
        }
        let all: Vec<IoSlice<'_>> =
            [IoSlice::new(&corked.data)].into_iter().chain(data.iter().copied()).collect();
        let sent = socket.net.batch(|batch| send(batch, &self.stream, &all))?;
        let sent = self.block_while_connecting(sent)?;
        let sent_corked = sent.min(corked.data.len());
        corked.data.drain(..sent_corked);
        self.has_corked.store(!corked.data.is_empty(), Ordering::Relaxed);
        match sent - sent_corked {
            0 if len > 0 => Err(io::ErrorKind::WouldBlock.into()),
            sent => Ok(sent),
        }
    }

    /// True when `bytes` may be held back. The send buffer must have space for all of them:
    /// the application was told that they are sent, and may never call again.
    fn can_cork(&self, bytes: usize) -> bool {
        bytes <= MAX_CORKED_BYTES && self.is_open() && bytes <= self.stream.writable_bytes()
    }

    fn lock_corked(&self) -> MutexGuard<'_, Corked> {
        self.corked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Discards held-back data in a forked child: the parent sends it.
    pub(super) fn discard_corked(&self) {
        // A thread of the parent, absent in the child, may have held the lock.
        if let Ok(mut corked) = self.corked.try_lock() {
            *corked = Corked::default();
            self.has_corked.store(false, Ordering::Relaxed);
        }
    }

    /// Sends held-back data, as far as there is space. Keeps the error that has ended the
    /// connection for the next call.
    pub(crate) fn flush_corked(&self, socket: &Socket) {
        if !self.has_corked.load(Ordering::Relaxed) {
            return;
        }
        let was_corked = self.is_corked.swap(false, Ordering::Relaxed);
        let flushed = self.send(socket, &[], false);
        self.is_corked.store(was_corked, Ordering::Relaxed);
        if let Err(failure) = flushed
            && !matches!(failure.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::BrokenPipe)
        {
            *self.lock_corked() = Corked { data: Vec::new(), failure: Some(failure) };
            self.has_corked.store(true, Ordering::Relaxed);
        }
    }

    /// Takes the error that sending held-back data has returned.
    pub(super) fn take_corked_failure(&self) -> Option<io::Error> {
        if !self.has_corked.load(Ordering::Relaxed) {
            return None;
        }
        let mut corked = self.lock_corked();
        let failure = corked.failure.take()?;
        self.has_corked.store(!corked.data.is_empty(), Ordering::Relaxed);
        Some(failure)
    }

    /// Sets `TCP_CORK`.
    pub(crate) fn set_corked(&self, socket: &Socket, is_corked: bool) {
        self.is_corked.store(is_corked, Ordering::Relaxed);
        if !is_corked {
            self.flush_corked(socket);
        }
    }

    pub(crate) fn shutdown(&self, socket: &Socket, how: Shutdown) -> io::Result<()> {
        self.flush_corked(socket);
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
pub(super) fn scatter(mut data: &[u8], bufs: &mut [IoSliceMut<'_>]) {
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
    /// Accepts the connection that has waited longest; returns it with the peer's address.
    pub(crate) fn accept(&self, socket: &Socket) -> io::Result<(Socket, SocketAddr)> {
        let (stream, peer) = socket.net.batch(|batch| batch.accept(&self.listener))??;
        let body = Endpoint::Stream(Stream::new(stream, false));
        let accepted = Socket::new(socket.net, body, socket.is_v6, false);
        let peer = accepted.to_app_family(peer);
        Ok((accepted, peer))
    }
}
