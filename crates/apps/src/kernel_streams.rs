//! The services of [`crate::streams`] on the kernel's sockets, with epoll: what
//! Tidegate is compared with.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::{Timespec, epoll};
use rustix::io::Errno;

use crate::ServeCounters;
use crate::kernel_listener::listen_for_many;
use crate::slots::Slots;
use crate::streams::StreamService;

/// How often an idle server looks at its stop flag.
const STOP_CHECK: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
const AT_ONCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

const EVENTS: usize = 256;

/// How much is read at once.
const BUFFER_BYTES: usize = 64 << 10;

/// How much one connection is served before others have their turn.
const TURN_BYTES: usize = 256 << 10;

/// Serves on these addresses until `stop` is set, which is noticed within a
/// tenth of a second. Calls `ready` when it listens. A server that `spins`
/// never sleeps: it asks epoll again at once.
///
/// # Errors
/// When an address cannot be listened on.
pub fn serve_kernel_streams(
    addresses: &[SocketAddr],
    service: StreamService,
    spins: bool,
    stop: &AtomicBool,
    counters: &ServeCounters,
    ready: impl FnOnce() -> io::Result<()>,
) -> io::Result<()> {
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    let listeners = listen_for_many(addresses)?;
    for (index, listener) in listeners.iter().enumerate() {
        let data = epoll::EventData::new_u64(index as u64);
        epoll::add(&epoll, listener, data, epoll::EventFlags::IN)?;
    }
    ready()?;
    let mut server = Server {
        epoll,
        service,
        connections: Slots::default(),
        first: listeners.len(),
        buffer: vec![0; BUFFER_BYTES],
        counters,
    };
    let timeout = if spins { AT_ONCE } else { STOP_CHECK };
    let mut events = Vec::with_capacity(EVENTS);
    while !stop.load(Ordering::Relaxed) {
        events.clear();
        let room = rustix::buffer::spare_capacity(&mut events);
        match epoll::wait(&server.epoll, room, Some(&timeout)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        for event in events.drain(..) {
            let index = event.data.u64() as usize;
            match listeners.get(index) {
                Some(listener) => server.accept(listener)?,
                None => server.serve(index)?,
            }
        }
    }
    Ok(())
}

struct Connection {
    stream: TcpStream,
    unsent: Box<[u8]>,
    sent: usize,
    wants_room: bool,
}

struct Server<'c> {
    epoll: OwnedFd,
    service: StreamService,
    connections: Slots<Connection>,
    first: usize,
    buffer: Vec<u8>,
    counters: &'c ServeCounters,
}

impl Server<'_> {
    fn accept(&mut self, listener: &TcpListener) -> io::Result<()> {
        loop {
            let stream = match listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                // It ended before it was accepted, or a signal came.
                Err(error)
                    if matches!(
                        error.kind(),
                        ErrorKind::ConnectionAborted | ErrorKind::Interrupted
                    ) =>
                {
                    continue;
                }
                // No descriptor is left: others may close some.
                Err(_) => return Ok(()),
            };
            stream.set_nonblocking(true)?;
            stream.set_nodelay(true)?;
            let wants_room = self.service == StreamService::Source;
            let token = (self.first + self.connections.next()) as u64;
            let data = epoll::EventData::new_u64(token);
            epoll::add(&self.epoll, &stream, data, interest(wants_room))?;
            self.connections.insert(Connection {
                stream,
                unsent: Box::default(),
                sent: 0,
                wants_room,
            });
        }
    }

    fn serve(&mut self, token: usize) -> io::Result<()> {
        let slot = token - self.first;
        let Some(connection) = self.connections.get_mut(slot) else { return Ok(()) };
        match connection.turn(self.service, &mut self.buffer, self.counters) {
            Ok(wants_room) if wants_room != connection.wants_room => {
                connection.wants_room = wants_room;
                let data = epoll::EventData::new_u64(token as u64);
                epoll::modify(&self.epoll, &connection.stream, data, interest(wants_room))?;
            }
            Ok(_) => {}
            // The end of this connection alone.
            Err(_) => self.connections.remove(slot),
        }
        Ok(())
    }
}

fn interest(wants_room: bool) -> epoll::EventFlags {
    if wants_room { epoll::EventFlags::OUT } else { epoll::EventFlags::IN }
}

impl Connection {
    /// Serves it until there is nothing to do or others have waited long
    /// enough. Returns whether it waits for room.
    fn turn(
        &mut self,
        service: StreamService,
        buffer: &mut [u8],
        counters: &ServeCounters,
    ) -> io::Result<bool> {
        let result = match service {
            StreamService::Echo => self.echo(buffer, counters),
            StreamService::Sink => self.sink(buffer, counters),
            StreamService::Source => self.source(buffer, counters),
        };
        match result {
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                Ok(!self.unsent.is_empty() || service == StreamService::Source)
            }
            result => result,
        }
    }

    fn echo(&mut self, buffer: &mut [u8], counters: &ServeCounters) -> io::Result<bool> {
        let mut turn = 0;
        while turn < TURN_BYTES {
            while let Some(rest) = self.unsent.get(self.sent..).filter(|rest| !rest.is_empty()) {
                self.sent += self.stream.write(rest)?;
                ServeCounters::add(&counters.answers, 1);
            }
            (self.unsent, self.sent) = (Box::default(), 0);
            let len = self.stream.read(buffer)?;
            if len == 0 {
                return Err(ErrorKind::UnexpectedEof.into());
            }
            ServeCounters::add(&counters.requests, 1);
            turn += len;
            let sent = match self.stream.write(&buffer[..len]) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => 0,
                result => result?,
            };
            if sent < len {
                self.unsent = buffer[sent..len].into();
                return Ok(true);
            }
            ServeCounters::add(&counters.answers, 1);
            if len < buffer.len() {
                // A call that finds nothing costs as much as one that does.
                return Ok(false);
            }
        }
        Ok(false)
    }

    fn sink(&mut self, buffer: &mut [u8], counters: &ServeCounters) -> io::Result<bool> {
        let mut turn = 0;
        while turn < TURN_BYTES {
            match self.stream.read(buffer)? {
                0 => return Err(ErrorKind::UnexpectedEof.into()),
                len => turn += len,
            }
            ServeCounters::add(&counters.requests, 1);
        }
        Ok(false)
    }

    fn source(&mut self, buffer: &[u8], counters: &ServeCounters) -> io::Result<bool> {
        let mut turn = 0;
        while turn < TURN_BYTES {
            turn += self.stream.write(buffer)?;
            ServeCounters::add(&counters.answers, 1);
        }
        Ok(true)
    }
}
