//! The services of RFC 862 (echo), 863 (discard) and 864 (a source of bytes),
//! over TCP, on Tidegate.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tidegate::{Batch, Interest, Net, Poll, TcpListener, TcpStream, Token};

use crate::ServeCounters;
use crate::slots::Slots;

/// How often an idle server looks at its stop flag.
const STOP_CHECK: Duration = Duration::from_millis(100);

/// How much is read at once.
const BUFFER_BYTES: usize = 64 << 10;

/// How much one connection is served before others have their turn.
const TURN_BYTES: usize = 256 << 10;

/// How many connections are served while others cannot use the stack.
const BATCH: usize = 64;

/// What is done with what comes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StreamService {
    /// It is sent back.
    #[default]
    Echo,
    /// It is thrown away.
    Sink,
    /// It is thrown away, and bytes are sent as fast as they are taken.
    Source,
}

/// A connection. Most of many have nothing unsent, so that is elsewhere.
struct Connection {
    stream: TcpStream,
    unsent: Option<Box<Unsent>>,
}

/// What was read and not all sent back yet.
struct Unsent {
    bytes: Box<[u8]>,
    sent: usize,
}

/// What a connection waits for now.
#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Reading,
    Writing,
    Over,
}

/// Serves connections through `listeners`, until `stop` is set, which is
/// noticed within a tenth of a second. Counts what was read at one time as a
/// request, and what was written as an answer.
///
/// # Errors
/// When the port is of no further use.
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
        first: listeners.len(),
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
        poll.wait(&mut ready, Some(STOP_CHECK))?;
        for burst in ready.chunks(BATCH) {
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
    /// The first token that is a connection's.
    first: usize,
    buffer: Vec<u8>,
    counters: &'s ServeCounters,
}

impl Server<'_> {
    fn accept(&mut self, batch: &mut Batch<'_>, listener: &TcpListener) -> io::Result<()> {
        loop {
            let stream = match batch.accept(listener) {
                Ok((stream, _)) => stream,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                // It ended before it was accepted.
                Err(error) if error.kind() == io::ErrorKind::NotConnected => continue,
                Err(error) => return Err(error),
            };
            let slot = self.connections.next();
            let token = Token(self.first + slot);
            let connection = Connection { stream, unsent: None };
            let interest = connection.state(self.service).interest();
            batch.register(self.poll, &connection.stream, token, interest)?;
            self.connections.insert(connection);
        }
    }

    fn serve(&mut self, batch: &mut Batch<'_>, token: Token) -> io::Result<()> {
        let slot = token.0 - self.first;
        let Some(connection) = self.connections.get_mut(slot) else { return Ok(()) };
        let was = connection.state(self.service);
        let now = connection.turn(batch, self.service, &mut self.buffer, self.counters);
        if now == State::Over {
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
    /// What it waits for between two turns.
    fn state(&self, service: StreamService) -> State {
        if service == StreamService::Source || self.unsent.is_some() {
            State::Writing
        } else {
            State::Reading
        }
    }

    /// Serves it until there is nothing to do or others have waited long
    /// enough. An error is the end of this connection alone.
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
        result.unwrap_or(State::Over)
    }

    /// Reads and sends back.
    fn echo(
        &mut self,
        batch: &mut Batch<'_>,
        buffer: &mut [u8],
        counters: &ServeCounters,
    ) -> io::Result<State> {
        let mut turn = 0;
        while turn < TURN_BYTES {
            while let Some(unsent) = &mut self.unsent {
                match unless_blocked(batch.send(&self.stream, &unsent.bytes[unsent.sent..]))? {
                    Some(len) => unsent.sent += len,
                    None => return Ok(State::Writing),
                }
                ServeCounters::add(&counters.answers, 1);
                if unsent.sent == unsent.bytes.len() {
                    self.unsent = None;
                }
            }
            let Some(len) = unless_blocked(batch.recv(&self.stream, buffer))? else {
                return Ok(State::Reading);
            };
            if len == 0 {
                return Ok(State::Over);
            }
            ServeCounters::add(&counters.requests, 1);
            turn += len;
            // Most often all of it can be sent at once.
            let sent = unless_blocked(batch.send(&self.stream, &buffer[..len]))?.unwrap_or(0);
            if sent == len {
                ServeCounters::add(&counters.answers, 1);
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

    /// Reads, where it lies, and forgets.
    fn sink(&mut self, batch: &mut Batch<'_>, counters: &ServeCounters) -> io::Result<State> {
        let mut turn = 0;
        while turn < TURN_BYTES {
            match unless_blocked(batch.recv_with(&self.stream, <[u8]>::len))? {
                None => return Ok(State::Reading),
                Some(0) => return Ok(State::Over),
                Some(len) => turn += len,
            }
            ServeCounters::add(&counters.requests, 1);
        }
        Ok(State::Reading)
    }

    /// Sends, and forgets what comes.
    fn source(
        &mut self,
        batch: &mut Batch<'_>,
        buffer: &[u8],
        counters: &ServeCounters,
    ) -> io::Result<State> {
        let mut turn = 0;
        while turn < TURN_BYTES {
            match unless_blocked(batch.send(&self.stream, buffer))? {
                None => return Ok(State::Writing),
                Some(len) => turn += len,
            }
            ServeCounters::add(&counters.answers, 1);
        }
        // Who has ended is told by an error of sending.
        while let Some(len) = unless_blocked(batch.recv_with(&self.stream, <[u8]>::len))? {
            if len == 0 {
                break;
            }
        }
        Ok(State::Writing)
    }
}

/// `None` when it is not the time for it.
fn unless_blocked<R>(result: io::Result<R>) -> io::Result<Option<R>> {
    match result {
        Ok(result) => Ok(Some(result)),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
        Err(error) => Err(error),
    }
}
