//! The TCP services of RFC 862 (echo), RFC 863 (discard) and RFC 864 (character generator, here
//! a source of bytes), on Tidegate.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tidegate::{Batch, Interest, Net, Poll, TcpListener, TcpStream, Token};

use crate::ServeCounters;
use crate::slots::Slots;

/// Interval at which an idle server checks its stop flag.
const STOP_CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Bytes read at a time.
const BUFFER_BYTES: usize = 64 << 10;

/// Bytes that one connection may transfer before other connections get their turn.
const TURN_BYTES: usize = 256 << 10;

/// Connections served while the stack is locked.
const BATCH_CONNECTIONS: usize = 64;

/// Treatment of received bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StreamService {
    /// Received bytes are sent back.
    #[default]
    Echo,
    /// Received bytes are discarded.
    Sink,
    /// Received bytes are discarded, and bytes are sent as fast as the peer reads them.
    Source,
}

/// Connection. Most of many connections have nothing unsent, so unsent bytes are boxed.
struct Connection {
    stream: TcpStream,
    unsent: Option<Box<Unsent>>,
}

/// Bytes that were read and not completely sent back yet.
struct Unsent {
    bytes: Box<[u8]>,
    sent: usize,
}

/// Readiness that a connection waits for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Reading,
    Writing,
    Closed,
}

/// Serves connections accepted from `listeners` until `stop` is set, which is noticed within
/// 100 ms. Counts each read as a request and each write as a reply.
///
/// # Errors
/// When the device fails for good.
pub fn serve_streams(
    net: &Net,
    listeners: &[TcpListener],
    service: StreamService,
    stop: &AtomicBool,
    counters: &ServeCounters,
) -> io::Result<()> {
    let poll = Poll::new(net);
    let mut server = Server {
        poll: &poll,
        service,
        connections: Slots::default(),
        first_token: listeners.len(),
        buffer: vec![0; BUFFER_BYTES],
        counters,
    };
    net.batch(|batch| {
        let mut listeners = listeners.iter().enumerate();
        listeners.try_for_each(|(index, listener)| {
            batch.register(&poll, listener, Token(index), Interest::Readable)
        })
    })??;
    let mut ready = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        poll.wait(&mut ready, Some(STOP_CHECK_INTERVAL))?;
        for burst in ready.chunks(BATCH_CONNECTIONS) {
            net.batch(|batch| {
                burst.iter().try_for_each(|&token| match listeners.get(token.0) {
                    Some(listener) => server.accept(batch, listener),
                    None => server.serve(batch, token),
                })
            })??;
        }
    }
    Ok(())
}

struct Server<'s> {
    poll: &'s Poll,
    service: StreamService,
    connections: Slots<Connection>,
    /// First token of a connection; listeners have lower tokens.
    first_token: usize,
    buffer: Vec<u8>,
    counters: &'s ServeCounters,
}

impl Server<'_> {
    fn accept(&mut self, batch: &mut Batch<'_>, listener: &TcpListener) -> io::Result<()> {
        loop {
            let stream = match batch.accept(listener) {
                Ok((stream, _)) => stream,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                // The connection closed before it was accepted.
                Err(error) if error.kind() == io::ErrorKind::NotConnected => continue,
                Err(error) => return Err(error),
            };
            let slot = self.connections.next_slot();
            let token = Token(self.first_token + slot);
            let connection = Connection { stream, unsent: None };
            let interest = connection.state(self.service).interest();
            batch.register(self.poll, &connection.stream, token, interest)?;
            self.connections.insert(connection);
        }
    }

    fn serve(&mut self, batch: &mut Batch<'_>, token: Token) -> io::Result<()> {
        let slot = token.0 - self.first_token;
        let Some(connection) = self.connections.get_mut(slot) else { return Ok(()) };
        let was = connection.state(self.service);
        let now = connection.turn(batch, self.service, &mut self.buffer, self.counters);
        if now == State::Closed {
            self.connections.remove(slot);
        } else if now != was {
            batch.reregister(self.poll, &connection.stream, token, now.interest())?;
        }
        Ok(())
    }
}

impl State {
    fn interest(self) -> Interest {
        if self == State::Writing { Interest::Writable } else { Interest::Readable }
    }
}

impl Connection {
    /// Readiness that the connection waits for between two turns.
    fn state(&self, service: StreamService) -> State {
        if service == StreamService::Source || self.unsent.is_some() {
            State::Writing
        } else {
            State::Reading
        }
    }

    /// Serves the connection until nothing is left to do or its turn is over. An error closes
    /// this connection only.
    fn turn(
        &mut self,
        batch: &mut Batch<'_>,
        service: StreamService,
        buffer: &mut [u8],
        counters: &ServeCounters,
    ) -> State {
        let result = match service {
            StreamService::Echo => self.echo(batch, buffer, counters),
            StreamService::Sink => self.sink(batch, counters),
            StreamService::Source => self.source(batch, buffer, counters),
        };
        result.unwrap_or(State::Closed)
    }

    /// Reads bytes and sends them back.
    fn echo(
        &mut self,
        batch: &mut Batch<'_>,
        buffer: &mut [u8],
        counters: &ServeCounters,
    ) -> io::Result<State> {
        let mut turn_bytes = 0;
        while turn_bytes < TURN_BYTES {
            while let Some(unsent) = &mut self.unsent {
                match none_if_would_block(batch.send(&self.stream, &unsent.bytes[unsent.sent..]))? {
                    Some(len) => unsent.sent += len,
                    None => return Ok(State::Writing),
                }
                ServeCounters::add(&counters.replies, 1);
                if unsent.sent == unsent.bytes.len() {
                    self.unsent = None;
                }
            }
            let Some(len) = none_if_would_block(batch.recv(&self.stream, buffer))? else {
                return Ok(State::Reading);
            };
            if len == 0 {
                return Ok(State::Closed);
            }
            ServeCounters::add(&counters.requests, 1);
            turn_bytes += len;
            // Usually all bytes can be sent at once.
            let sent = none_if_would_block(batch.send(&self.stream, &buffer[..len]))?.unwrap_or(0);
            if sent == len {
                ServeCounters::add(&counters.replies, 1);
            } else {
                let bytes = buffer[sent..len].into();
                self.unsent = Some(Box::new(Unsent { bytes, sent: 0 }));
            }
            if len < buffer.len() && sent == len {
                return Ok(State::Reading);
            }
        }
        Ok(if self.unsent.is_none() { State::Reading } else { State::Writing })
    }

    /// Reads received bytes in place and discards them.
    fn sink(&mut self, batch: &mut Batch<'_>, counters: &ServeCounters) -> io::Result<State> {
        let mut turn_bytes = 0;
        while turn_bytes < TURN_BYTES {
            match none_if_would_block(batch.recv_with(&self.stream, <[u8]>::len))? {
                None => return Ok(State::Reading),
                Some(0) => return Ok(State::Closed),
                Some(len) => turn_bytes += len,
            }
            ServeCounters::add(&counters.requests, 1);
        }
        Ok(State::Reading)
    }

    /// Sends bytes, and discards received bytes.
    fn source(
        &mut self,
        batch: &mut Batch<'_>,
        buffer: &[u8],
        counters: &ServeCounters,
    ) -> io::Result<State> {
        let mut turn_bytes = 0;
        while turn_bytes < TURN_BYTES {
            match none_if_would_block(batch.send(&self.stream, buffer))? {
                None => return Ok(State::Writing),
                Some(len) => turn_bytes += len,
            }
            ServeCounters::add(&counters.replies, 1);
        }
        // A closed connection shows up as a send error.
        while let Some(len) = none_if_would_block(batch.recv_with(&self.stream, <[u8]>::len))? {
            if len == 0 {
                break;
            }
        }
        Ok(State::Writing)
    }
}

/// Turns `WouldBlock` into `None`.
fn none_if_would_block<R>(result: io::Result<R>) -> io::Result<Option<R>> {
    match result {
        Ok(result) => Ok(Some(result)),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
        Err(error) => Err(error),
    }
}
