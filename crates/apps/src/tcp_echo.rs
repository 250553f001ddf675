//! The echo service of RFC 862, over TCP, on Tidegate.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tidegate::{Interest, Net, Poll, TcpListener, TcpStream, Token};

use crate::ServeCounters;

/// How often an idle server looks at its stop flag.
const STOP_CHECK: Duration = Duration::from_millis(100);

/// How much is read at once.
const BUFFER_BYTES: usize = 64 << 10;

/// How much one connection is served before others have their turn.
const TURN_BYTES: usize = 256 << 10;

/// A connection and what of it was read and not sent back yet.
struct Connection {
    stream: TcpStream,
    unsent: Vec<u8>,
    /// How much of `unsent` is sent.
    sent: usize,
}

/// What a connection waits for now.
#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Reading,
    Writing,
    Over,
}

/// Sends back whatever comes on connections through `listeners`, until `stop`
/// is set, which is noticed within a tenth of a second. Counts what was read
/// at one time as a request, and what was written as an answer.
///
/// # Errors
/// When the port is of no further use.
pub fn serve_tcp_echo(
    net: &Net,
    listeners: &[TcpListener],
    stop: &AtomicBool,
    counters: &ServeCounters,
) -> io::Result<()> {
    let mut server = Server {
        poll: Poll::new(net),
        connections: HashMap::new(),
        next: listeners.len(),
        buffer: vec![0; BUFFER_BYTES],
        counters,
    };
    for (index, listener) in listeners.iter().enumerate() {
        listener.set_nonblocking(true)?;
        server.poll.register(listener, Token(index))?;
    }
    let mut ready = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        server.poll.wait(&mut ready, Some(STOP_CHECK))?;
        for &token in &ready {
            match listeners.get(token.0) {
                Some(listener) => server.accept(listener)?,
                None => server.serve(token)?,
            }
        }
    }
    Ok(())
}

struct Server<'c> {
    poll: Poll,
    connections: HashMap<Token, Connection>,
    next: usize,
    buffer: Vec<u8>,
    counters: &'c ServeCounters,
}

impl Server<'_> {
    fn accept(&mut self, listener: &TcpListener) -> io::Result<()> {
        loop {
            let stream = match listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            };
            stream.set_nonblocking(true)?;
            let token = Token(self.next);
            self.next += 1;
            self.poll.register(&stream, token)?;
            let connection = Connection { stream, unsent: Vec::new(), sent: 0 };
            self.connections.insert(token, connection);
        }
    }

    fn serve(&mut self, token: Token) -> io::Result<()> {
        let Some(connection) = self.connections.get_mut(&token) else { return Ok(()) };
        let was = connection.state();
        let now = connection.turn(&mut self.buffer, self.counters);
        let interest = match now {
            State::Over => {
                self.connections.remove(&token);
                return Ok(());
            }
            State::Reading => Interest::Readable,
            State::Writing => Interest::Writable,
        };
        if was != now {
            self.poll.reregister(&connection.stream, token, interest)?;
        }
        Ok(())
    }
}

impl Connection {
    fn state(&self) -> State {
        if self.unsent.is_empty() { State::Reading } else { State::Writing }
    }

    /// Reads and sends back, until there is nothing to do or others have waited
    /// long enough. An error is the end of this connection alone.
    fn turn(&mut self, buffer: &mut [u8], counters: &ServeCounters) -> State {
        let mut turn = 0;
        while turn < TURN_BYTES {
            while let Some(rest) = self.unsent.get(self.sent..).filter(|rest| !rest.is_empty()) {
                match self.stream.send(rest) {
                    Ok(len) => self.sent += len,
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                        return State::Writing;
                    }
                    Err(_) => return State::Over,
                }
                ServeCounters::add(&counters.answers, 1);
            }
            self.unsent = Vec::new();
            self.sent = 0;
            match self.stream.recv(buffer) {
                Ok(0) => return State::Over,
                Ok(len) => {
                    ServeCounters::add(&counters.requests, 1);
                    turn += len;
                    // Most often all of it can be sent at once.
                    let sent = match self.stream.send(&buffer[..len]) {
                        Ok(sent) => sent,
                        Err(error) if error.kind() == io::ErrorKind::WouldBlock => 0,
                        Err(_) => return State::Over,
                    };
                    if sent == len {
                        ServeCounters::add(&counters.answers, 1);
                    } else {
                        self.unsent = buffer[sent..len].to_vec();
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return State::Reading,
                Err(_) => return State::Over,
            }
        }
        self.state()
    }
}
