//! Connections: reading, writing and accepting without waiting.

use std::io::{self, IoSlice, IoSliceMut};
use std::net::{Shutdown, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use tidegate::{Batch, TcpState, TcpStream};

use super::{Body, Listener, Socket, Stream};

/// So much waits for more at most: what a segment takes goes out anyway.
const MOST_HELD_BYTES: usize = 1400;

impl Stream {
    pub(super) fn new(stream: TcpStream, is_connecting: bool) -> Self {
        Self {
            stream,
            is_connecting: AtomicBool::new(is_connecting),
            is_corked: AtomicBool::new(false),
            held: Mutex::default(),
            has_held: AtomicBool::new(false),
        }
    }

    /// Whether a peer is on the other side.
    pub(crate) fn is_open(&self) -> bool {
        let closed =
            [TcpState::SynSent, TcpState::SynReceived, TcpState::Closed, TcpState::TimeWait];
        self.stream.info().is_ok_and(|info| !closed.contains(&info.state))
    }

    /// Whether it has connected, or how that failed.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] while it has done neither.
    pub(crate) fn finish_connect(&self, socket: &Socket) -> io::Result<()> {
        let finished = socket.net.batch(|batch| batch.finish_connect(&self.stream))?;
        if !matches!(&finished, Err(error) if error.kind() == io::ErrorKind::WouldBlock) {
            self.is_connecting.store(false, Ordering::Relaxed);
        }
        finished
    }

    /// A call on a connection that is not there yet waits for it, as the
    /// kernel's does.
    fn not_yet<R>(&self, result: io::Result<R>) -> io::Result<R> {
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

    /// Reads into one buffer after the other what has arrived, and takes it
    /// away if it is `taken`.
    pub(crate) fn receive(
        &self,
        socket: &Socket,
        bufs: &mut [IoSliceMut<'_>],
        taken: bool,
    ) -> io::Result<usize> {
        // Who reads waits for an answer to what was written.
        self.push(socket);
        let received = socket.net.batch(|batch| match taken {
            true => receive(batch, &self.stream, bufs),
            false => peek(batch, &self.stream, bufs),
        })?;
        self.not_yet(received)
    }

    /// Writes one piece after the other, as far as there is room. If more is
    /// said to follow, small pieces wait for it.
    pub(crate) fn send(
        &self,
        socket: &Socket,
        data: &[IoSlice<'_>],
        more_follows: bool,
    ) -> io::Result<usize> {
        let waits = more_follows || self.is_corked.load(Ordering::Relaxed);
        if !waits && !self.has_held.load(Ordering::Relaxed) {
            let sent = socket.net.batch(|batch| send(batch, &self.stream, data))?;
            return self.not_yet(sent);
        }
        let len: usize = data.iter().map(|piece| piece.len()).sum();
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        if waits && self.can_hold(held.len() + len) {
            data.iter().for_each(|piece| held.extend_from_slice(piece));
            self.has_held.store(!held.is_empty(), Ordering::Relaxed);
            return Ok(len);
        }
        let all: Vec<IoSlice<'_>> =
            [IoSlice::new(&held)].into_iter().chain(data.iter().copied()).collect();
        let sent = socket.net.batch(|batch| send(batch, &self.stream, &all))?;
        let sent = self.not_yet(sent)?;
        let of_held = sent.min(held.len());
        held.drain(..of_held);
        self.has_held.store(!held.is_empty(), Ordering::Relaxed);
        match sent - of_held {
            0 if len > 0 => Err(io::ErrorKind::WouldBlock.into()),
            sent => Ok(sent),
        }
    }

    /// Whether so many bytes may wait here for more. There must be room for them when
    /// they are to go: the program was told that they were sent, and may never come
    /// back for them.
    fn can_hold(&self, bytes: usize) -> bool {
        bytes <= MOST_HELD_BYTES && self.is_open() && bytes <= self.stream.writable_bytes()
    }

    /// In a child: what waits for more is the parent's to send.
    pub(super) fn forget_held(&self) {
        // A thread of the parent's may be about to write, and is not here.
        if let Ok(mut held) = self.held.try_lock() {
            held.clear();
            self.has_held.store(false, Ordering::Relaxed);
        }
    }

    /// Sends what waits for more, as far as there is room.
    pub(crate) fn push(&self, socket: &Socket) {
        if self.has_held.load(Ordering::Relaxed) {
            let was_corked = self.is_corked.swap(false, Ordering::Relaxed);
            // What went wrong is told by the next call.
            let _ = self.send(socket, &[], false);
            self.is_corked.store(was_corked, Ordering::Relaxed);
        }
    }

    /// `TCP_CORK`.
    pub(crate) fn set_corked(&self, socket: &Socket, is_corked: bool) {
        self.is_corked.store(is_corked, Ordering::Relaxed);
        if !is_corked {
            self.push(socket);
        }
    }

    pub(crate) fn shutdown(&self, socket: &Socket, how: Shutdown) -> io::Result<()> {
        self.push(socket);
        self.stream.shutdown(how)
    }
}

fn receive(
    batch: &mut Batch<'_>,
    stream: &TcpStream,
    bufs: &mut [IoSliceMut<'_>],
) -> io::Result<usize> {
    let mut total = 0;
    for buf in bufs.iter_mut().filter(|buf| !buf.is_empty()) {
        match batch.recv(stream, buf) {
            Ok(len) => {
                total += len;
                if len < buf.len() {
                    break;
                }
            }
            // What went wrong behind the data is told by the next call.
            Err(_) if total > 0 => break,
            Err(error) => return Err(error),
        }
    }
    Ok(total)
}

/// Peeking begins anew with each call, so it takes one buffer for all.
fn peek(
    batch: &mut Batch<'_>,
    stream: &TcpStream,
    bufs: &mut [IoSliceMut<'_>],
) -> io::Result<usize> {
    let mut whole = vec![0; bufs.iter().map(|buf| buf.len()).sum()];
    let len = batch.peek(stream, &mut whole)?;
    scatter(&whole[..len], bufs);
    Ok(len)
}

/// Copies `data` into one buffer after the other.
pub(super) fn scatter(mut data: &[u8], bufs: &mut [IoSliceMut<'_>]) {
    for buf in bufs {
        let (now, rest) = data.split_at(data.len().min(buf.len()));
        buf[..now.len()].copy_from_slice(now);
        data = rest;
    }
}

fn send(batch: &mut Batch<'_>, stream: &TcpStream, data: &[IoSlice<'_>]) -> io::Result<usize> {
    let mut total = 0;
    if data.iter().all(|piece| piece.is_empty()) {
        return batch.send(stream, &[]);
    }
    for piece in data.iter().filter(|piece| !piece.is_empty()) {
        match batch.send(stream, piece) {
            Ok(len) => {
                total += len;
                if len < piece.len() {
                    break;
                }
            }
            Err(_) if total > 0 => break,
            Err(error) => return Err(error),
        }
    }
    Ok(total)
}

impl Listener {
    /// The connection that has waited longest, with the peer's address.
    pub(crate) fn accept(&self, socket: &Socket) -> io::Result<(Socket, SocketAddr)> {
        let (stream, peer) = socket.net.batch(|batch| batch.accept(&self.listener))??;
        let body = Body::Stream(Stream::new(stream, false));
        let accepted = Socket::new(socket.net, body, socket.is_v6, false);
        let peer = accepted.present(peer);
        Ok((accepted, peer))
    }
}
