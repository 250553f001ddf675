//! Messages over streams: each with its length in two bytes in front, as DNS
//! has them (RFC 1035 section 4.2.2, RFC 7766).

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use tidegate::{Batch, Interest, Net, Poll, TcpListener, TcpStream, Token};

use crate::slots::Slots;
use crate::{Responder, ServeCounters};

/// The longest message that a length can be given for.
const MAX_MESSAGE_BYTES: usize = u16::MAX as usize;

/// The length in front of a message.
const PREFIX_BYTES: usize = 2;

/// Requests of one connection that are answered before others have their turn.
const TURN_REQUESTS: usize = 32;

/// Connections that are served while others cannot use the stack.
const BATCH: usize = 32;

/// What connections may cost.
#[derive(Clone, Copy, Debug)]
pub struct MessageLimits {
    /// Connections at the same time. One more ends the one that has been idle
    /// longest (RFC 7766 section 6.2.2).
    pub connections: usize,
    /// Connections of one address at the same time; more are refused.
    pub per_address: usize,
    /// How long a connection may go without a whole request or with an answer
    /// that is not taken.
    pub idle_timeout: Duration,
}

impl Default for MessageLimits {
    /// As name servers have it: 1,024 connections, 64 of one address, 10 s.
    fn default() -> Self {
        Self { connections: 1024, per_address: 64, idle_timeout: Duration::from_secs(10) }
    }
}

/// Answers messages on connections.
pub(crate) struct MessageServer<'s> {
    net: &'s Net,
    poll: &'s Poll,
    listeners: &'s [TcpListener],
    /// The token of the first listener; connections come behind the last.
    first: usize,
    limits: MessageLimits,
    connections: Slots<Connection>,
    open: usize,
    by_address: HashMap<IpAddr, usize>,
    looked_at: Instant,
    reply: Vec<u8>,
}

struct Connection {
    stream: TcpStream,
    peer: IpAddr,
    /// The beginning of a request.
    unread: Vec<u8>,
    unsent: Vec<u8>,
    sent: usize,
    /// The last time that a whole request had come and its answer had gone.
    active: Instant,
    waits_for_room: bool,
    /// The peer sends nothing more: what is owed goes out, then it ends.
    is_ending: bool,
}

/// Whether a connection goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Turn {
    GoesOn,
    Over,
}

impl<'s> MessageServer<'s> {
    /// A server for `listeners`, which have tokens from `first` on in `poll`.
    pub(crate) fn new(
        net: &'s Net,
        poll: &'s Poll,
        listeners: &'s [TcpListener],
        first: usize,
        limits: MessageLimits,
    ) -> io::Result<Self> {
        net.batch(|batch| {
            listeners.iter().enumerate().try_for_each(|(index, listener)| {
                batch.register(poll, listener, Token(first + index), Interest::Readable)
            })
        })??;
        Ok(Self {
            net,
            poll,
            listeners,
            first,
            limits,
            connections: Slots::default(),
            open: 0,
            by_address: HashMap::new(),
            looked_at: Instant::now(),
            reply: vec![0; PREFIX_BYTES + MAX_MESSAGE_BYTES],
        })
    }

    /// Whether there can be anything to serve.
    pub(crate) fn is_used(&self) -> bool {
        !self.listeners.is_empty()
    }

    /// Serves those that are ready; tokens of others are left alone.
    pub(crate) fn serve(
        &mut self,
        ready: &[Token],
        responder: &mut impl Responder,
        counters: &ServeCounters,
    ) -> io::Result<()> {
        if !self.is_used() {
            return Ok(());
        }
        let net = self.net;
        for burst in ready.chunks(BATCH) {
            if burst.iter().any(|token| token.0 >= self.first) {
                net.batch(|batch| {
                    burst
                        .iter()
                        .try_for_each(|&token| self.serve_one(batch, token, responder, counters))
                })??;
            }
        }
        self.end_idle();
        Ok(())
    }

    fn serve_one(
        &mut self,
        batch: &mut Batch<'_>,
        token: Token,
        responder: &mut impl Responder,
        counters: &ServeCounters,
    ) -> io::Result<()> {
        let Some(index) = token.0.checked_sub(self.first) else { return Ok(()) };
        if let Some(listener) = self.listeners.get(index) {
            return self.accept(batch, listener);
        }
        let slot = index - self.listeners.len();
        let Some(connection) = self.connections.get_mut(slot) else { return Ok(()) };
        let turn = connection.turn(batch, &mut self.reply, responder, counters);
        if !matches!(turn, Ok(Turn::GoesOn)) {
            self.end(slot);
            return Ok(());
        }
        let waits = connection.has_unsent();
        if waits != connection.waits_for_room {
            connection.waits_for_room = waits;
            let interest = if waits { Interest::Writable } else { Interest::Readable };
            batch.reregister(self.poll, &connection.stream, token, interest)?;
        }
        Ok(())
    }

    fn accept(&mut self, batch: &mut Batch<'_>, listener: &TcpListener) -> io::Result<()> {
        loop {
            let (stream, peer) = match batch.accept(listener) {
                Ok((stream, peer)) => (stream, peer.ip().to_canonical()),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                // It ended before it was accepted.
                Err(error) if error.kind() == io::ErrorKind::NotConnected => continue,
                Err(error) => return Err(error),
            };
            let of_peer = self.by_address.get(&peer).copied().unwrap_or(0);
            if of_peer >= self.limits.per_address {
                stream.set_abrupt(true);
                continue;
            }
            if self.open >= self.limits.connections {
                self.end_longest_idle();
            }
            let slot = self.connections.next();
            let token = Token(self.first + self.listeners.len() + slot);
            batch.register(self.poll, &stream, token, Interest::Readable)?;
            self.connections.insert(Connection::new(stream, peer));
            self.open += 1;
            *self.by_address.entry(peer).or_default() += 1;
        }
    }

    fn end(&mut self, slot: usize) {
        let Some(connection) = self.connections.get_mut(slot) else { return };
        let peer = connection.peer;
        self.connections.remove(slot);
        self.open -= 1;
        if let Some(count) = self.by_address.get_mut(&peer) {
            *count -= 1;
            if *count == 0 {
                self.by_address.remove(&peer);
            }
        }
    }

    fn end_longest_idle(&mut self) {
        let longest = self.connections.iter().min_by_key(|(_, connection)| connection.active);
        if let Some((slot, _)) = longest {
            self.end(slot);
        }
    }

    /// Ends those that were idle too long. Looks at all of them, but seldom.
    fn end_idle(&mut self) {
        let now = Instant::now();
        if self.open == 0 || now.duration_since(self.looked_at) < self.limits.idle_timeout / 10 {
            return;
        }
        self.looked_at = now;
        let limit = self.limits.idle_timeout;
        let idle = |connection: &Connection| now.duration_since(connection.active) >= limit;
        let slots = self.connections.iter().filter(|(_, connection)| idle(connection));
        let slots: Vec<usize> = slots.map(|(slot, _)| slot).collect();
        slots.into_iter().for_each(|slot| self.end(slot));
    }
}

impl Connection {
    fn new(stream: TcpStream, peer: IpAddr) -> Self {
        Self {
            stream,
            peer,
            unread: Vec::new(),
            unsent: Vec::new(),
            sent: 0,
            active: Instant::now(),
            waits_for_room: false,
            is_ending: false,
        }
    }

    fn has_unsent(&self) -> bool {
        self.sent < self.unsent.len()
    }

    /// Answers what has come. While an answer is not taken nothing is read, so
    /// a peer that takes none costs no more than one.
    fn turn(
        &mut self,
        batch: &mut Batch<'_>,
        reply: &mut [u8],
        responder: &mut impl Responder,
        counters: &ServeCounters,
    ) -> io::Result<Turn> {
        for _ in 0..TURN_REQUESTS {
            if !self.send_rest(batch)? {
                return Ok(Turn::GoesOn);
            }
            while self.needs() > 0 && !self.is_ending {
                if !self.read(batch)? {
                    return Ok(Turn::GoesOn);
                }
            }
            if self.is_ending && self.needs() > 0 {
                return Ok(Turn::Over);
            }
            self.answer(reply, responder, counters)?;
        }
        self.send_rest(batch)?;
        Ok(Turn::GoesOn)
    }

    /// How many bytes of the next request are missing, at least.
    fn needs(&self) -> usize {
        let whole = match self.unread.first_chunk() {
            Some(&prefix) => PREFIX_BYTES + usize::from(u16::from_be_bytes(prefix)),
            None => PREFIX_BYTES,
        };
        whole.saturating_sub(self.unread.len())
    }

    /// Reads what of the next request has come. Whether anything has.
    fn read(&mut self, batch: &mut Batch<'_>) -> io::Result<bool> {
        let (needs, unread) = (self.needs(), &mut self.unread);
        let taken = batch.recv_with(&self.stream, |bytes| {
            let len = bytes.len().min(needs);
            unread.extend_from_slice(&bytes[..len]);
            len
        });
        match taken {
            Ok(0) => self.is_ending = true,
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
            Err(error) => return Err(error),
        }
        Ok(true)
    }

    fn answer(
        &mut self,
        reply: &mut [u8],
        responder: &mut impl Responder,
        counters: &ServeCounters,
    ) -> io::Result<()> {
        ServeCounters::add(&counters.requests, 1);
        let from = SocketAddr::new(self.peer, 0);
        let request = self.unread.get(PREFIX_BYTES..).unwrap_or(&[]);
        // Who sends what cannot be answered has lost count of the bytes.
        let len = responder
            .respond_to_stream(request, from, &mut reply[PREFIX_BYTES..])
            .filter(|&len| len <= MAX_MESSAGE_BYTES)
            .ok_or(io::ErrorKind::InvalidData)?;
        ServeCounters::add(&counters.answers, 1);
        reply[..PREFIX_BYTES].copy_from_slice(&(len as u16).to_be_bytes());
        self.unsent.clear();
        self.unsent.extend_from_slice(&reply[..PREFIX_BYTES + len]);
        self.sent = 0;
        self.unread = Vec::new();
        self.active = Instant::now();
        Ok(())
    }

    /// Whether everything is sent.
    fn send_rest(&mut self, batch: &mut Batch<'_>) -> io::Result<bool> {
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
