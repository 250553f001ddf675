//! Messages over streams, each with a two-byte length prefix, as in DNS over TCP (RFC 1035
//! section 4.2.2, RFC 7766).

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use tidegate::{Batch, Interest, Net, Poll, TcpListener, TcpStream, Token};

use crate::slots::Slots;
use crate::{Responder, ServeCounters};

/// Longest message that the length prefix can describe.
const MAX_MESSAGE_BYTES: usize = u16::MAX as usize;

/// Bytes of the length prefix.
const PREFIX_BYTES: usize = 2;

/// Requests of one connection answered before other connections get their turn.
const TURN_REQUESTS: usize = 32;

/// Connections served while the stack is locked.
const BATCH_CONNECTIONS: usize = 32;

/// Limits on message connections.
#[derive(Clone, Copy, Debug)]
pub struct MessageLimits {
    /// Concurrent connections. One connection more closes the connection that has been idle
    /// longest (RFC 7766 section 6.2.2).
    pub max_connections: usize,
    /// Concurrent connections per client address; more are refused.
    pub max_per_address: usize,
    /// Time that a connection may go without a complete request, or with a response that the
    /// peer does not read.
    pub idle_timeout: Duration,
}

impl Default for MessageLimits {
    /// As usual for name servers: 1,024 connections, 64 per address, 10 s.
    fn default() -> Self {
        Self { max_connections: 1024, max_per_address: 64, idle_timeout: Duration::from_secs(10) }
    }
}

/// Answers messages on TCP connections.
pub(crate) struct MessageServer<'s> {
    net: &'s Net,
    poll: &'s Poll,
    listeners: &'s [TcpListener],
    /// Token of the first listener; connections follow the last listener.
    first_token: usize,
    limits: MessageLimits,
    connections: Slots<Connection>,
    open_connections: usize,
    by_address: HashMap<IpAddr, usize>,
    last_idle_check: Instant,
    reply: Vec<u8>,
}

struct Connection {
    stream: TcpStream,
    peer: IpAddr,
    /// Bytes of the next request received so far.
    partial_request: Vec<u8>,
    unsent: Vec<u8>,
    sent: usize,
    /// Time of the last complete request and response.
    last_active: Instant,
    wants_writable: bool,
    /// The peer has closed its side: pending responses are sent, then the connection closes.
    peer_closed: bool,
}

/// Fate of a connection after its turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TurnResult {
    Continue,
    Close,
}

impl<'s> MessageServer<'s> {
    /// Creates a server for `listeners`, whose tokens in `poll` start at `first`.
    pub(crate) fn new(
        net: &'s Net,
        poll: &'s Poll,
        listeners: &'s [TcpListener],
        first_token: usize,
        limits: MessageLimits,
    ) -> io::Result<Self> {
        net.batch(|batch| {
            listeners.iter().enumerate().try_for_each(|(index, listener)| {
                batch.register(poll, listener, Token(first_token + index), Interest::Readable)
            })
        })??;
        Ok(Self {
            net,
            poll,
            listeners,
            first_token,
            limits,
            connections: Slots::default(),
            open_connections: 0,
            by_address: HashMap::new(),
            last_idle_check: Instant::now(),
            reply: vec![0; PREFIX_BYTES + MAX_MESSAGE_BYTES],
        })
    }

    /// True when there are listeners to serve.
    pub(crate) fn has_listeners(&self) -> bool {
        !self.listeners.is_empty()
    }

    /// Serves the ready listeners and connections; ignores tokens below the first listener's.
    pub(crate) fn serve(
        &mut self,
        ready: &[Token],
        responder: &mut impl Responder,
        counters: &ServeCounters,
    ) -> io::Result<()> {
        if !self.has_listeners() {
            return Ok(());
        }
        let net = self.net;
        for burst in ready.chunks(BATCH_CONNECTIONS) {
            if burst.iter().any(|token| token.0 >= self.first_token) {
                net.batch(|batch| {
                    burst
                        .iter()
                        .try_for_each(|&token| self.serve_token(batch, token, responder, counters))
                })??;
            }
        }
        self.close_idle();
        Ok(())
    }

    fn serve_token(
        &mut self,
        batch: &mut Batch<'_>,
        token: Token,
        responder: &mut impl Responder,
        counters: &ServeCounters,
    ) -> io::Result<()> {
        let Some(index) = token.0.checked_sub(self.first_token) else { return Ok(()) };
        if let Some(listener) = self.listeners.get(index) {
            return self.accept(batch, listener);
        }
        let slot = index - self.listeners.len();
        let Some(connection) = self.connections.get_mut(slot) else { return Ok(()) };
        let result = connection.turn(batch, &mut self.reply, responder, counters);
        if !matches!(result, Ok(TurnResult::Continue)) {
            self.close(slot);
            return Ok(());
        }
        let wants_writable = connection.has_unsent();
        if wants_writable != connection.wants_writable {
            connection.wants_writable = wants_writable;
            let interest = if wants_writable { Interest::Writable } else { Interest::Readable };
            batch.reregister(self.poll, &connection.stream, token, interest)?;
        }
        Ok(())
    }

    fn accept(&mut self, batch: &mut Batch<'_>, listener: &TcpListener) -> io::Result<()> {
        loop {
            let (stream, peer) = match batch.accept(listener) {
                Ok((stream, peer)) => (stream, peer.ip().to_canonical()),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                // The connection closed before it was accepted.
                Err(error) if error.kind() == io::ErrorKind::NotConnected => continue,
                Err(error) => return Err(error),
            };
            let peer_connections = self.by_address.get(&peer).copied().unwrap_or(0);
            if peer_connections >= self.limits.max_per_address {
                stream.set_reset_on_close(true);
                continue;
            }
            if self.open_connections >= self.limits.max_connections {
                self.close_longest_idle();
            }
            let slot = self.connections.next_slot();
            let token = Token(self.first_token + self.listeners.len() + slot);
            batch.register(self.poll, &stream, token, Interest::Readable)?;
            self.connections.insert(Connection::new(stream, peer));
            self.open_connections += 1;
            *self.by_address.entry(peer).or_default() += 1;
        }
    }

    fn close(&mut self, slot: usize) {
        let Some(connection) = self.connections.get_mut(slot) else { return };
        let peer = connection.peer;
        self.connections.remove(slot);
        self.open_connections -= 1;
        if let Some(count) = self.by_address.get_mut(&peer) {
            *count -= 1;
            if *count == 0 {
                self.by_address.remove(&peer);
            }
        }
    }

    fn close_longest_idle(&mut self) {
        let longest = self.connections.iter().min_by_key(|(_, connection)| connection.last_active);
        if let Some((slot, _)) = longest {
            self.close(slot);
        }
    }

    /// Closes connections that were idle too long. Scans all connections, but rarely.
    fn close_idle(&mut self) {
        let now = Instant::now();
        if self.open_connections == 0
            || now.duration_since(self.last_idle_check) < self.limits.idle_timeout / 10
        {
            return;
        }
        self.last_idle_check = now;
        let limit = self.limits.idle_timeout;
        let idle = |connection: &Connection| now.duration_since(connection.last_active) >= limit;
        let slots = self.connections.iter().filter(|(_, connection)| idle(connection));
        let slots: Vec<usize> = slots.map(|(slot, _)| slot).collect();
        slots.into_iter().for_each(|slot| self.close(slot));
    }
}

impl Connection {
    fn new(stream: TcpStream, peer: IpAddr) -> Self {
        Self {
            stream,
            peer,
            partial_request: Vec::new(),
            unsent: Vec::new(),
            sent: 0,
            last_active: Instant::now(),
            wants_writable: false,
            peer_closed: false,
        }
    }

    fn has_unsent(&self) -> bool {
        self.sent < self.unsent.len()
    }

    /// Answers received requests. While a response is unsent nothing is read, so a peer that does
    /// not read its responses costs one response at most.
    fn turn(
        &mut self,
        batch: &mut Batch<'_>,
        reply: &mut [u8],
        responder: &mut impl Responder,
        counters: &ServeCounters,
    ) -> io::Result<TurnResult> {
        for _ in 0..TURN_REQUESTS {
            if !self.flush_unsent(batch)? {
                return Ok(TurnResult::Continue);
            }
            while self.missing_bytes() > 0 && !self.peer_closed {
                if !self.read(batch)? {
                    return Ok(TurnResult::Continue);
                }
            }
            if self.peer_closed && self.missing_bytes() > 0 {
                return Ok(TurnResult::Close);
            }
            self.respond(reply, responder, counters)?;
        }
        self.flush_unsent(batch)?;
        Ok(TurnResult::Continue)
    }

    /// Minimum number of bytes missing from the next request.
    fn missing_bytes(&self) -> usize {
        let message_bytes = match self.partial_request.first_chunk() {
            Some(&prefix) => PREFIX_BYTES + usize::from(u16::from_be_bytes(prefix)),
            None => PREFIX_BYTES,
        };
        message_bytes.saturating_sub(self.partial_request.len())
    }

    /// Reads available bytes of the next request. Returns false when none are available.
    fn read(&mut self, batch: &mut Batch<'_>) -> io::Result<bool> {
        let (missing, request) = (self.missing_bytes(), &mut self.partial_request);
        let taken = batch.recv_with(&self.stream, |bytes| {
            let len = bytes.len().min(missing);
            request.extend_from_slice(&bytes[..len]);
            len
        });
        match taken {
            Ok(0) => self.peer_closed = true,
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
            Err(error) => return Err(error),
        }
        Ok(true)
    }

    fn respond(
        &mut self,
        reply: &mut [u8],
        responder: &mut impl Responder,
        counters: &ServeCounters,
    ) -> io::Result<()> {
        ServeCounters::add(&counters.requests, 1);
        let from = SocketAddr::new(self.peer, 0);
        let request = self.partial_request.get(PREFIX_BYTES..).unwrap_or(&[]);
        // A peer whose request cannot be answered has lost the message framing.
        let len = responder
            .respond_to_stream(request, from, &mut reply[PREFIX_BYTES..])
            .filter(|&len| len <= MAX_MESSAGE_BYTES)
            .ok_or(io::ErrorKind::InvalidData)?;
        ServeCounters::add(&counters.replies, 1);
        reply[..PREFIX_BYTES].copy_from_slice(&(len as u16).to_be_bytes());
        self.unsent.clear();
        self.unsent.extend_from_slice(&reply[..PREFIX_BYTES + len]);
        self.sent = 0;
        self.partial_request = Vec::new();
        self.last_active = Instant::now();
        Ok(())
    }

    /// Sends pending bytes. Returns true when all are sent.
    fn flush_unsent(&mut self, batch: &mut Batch<'_>) -> io::Result<bool> {
        while self.has_unsent() {
            match batch.send(&self.stream, &self.unsent[self.sent..]) {
                Ok(len) => self.sent += len,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        (self.unsent, self.sent) = (Vec::new(), 0);
        Ok(true)
    }
}
