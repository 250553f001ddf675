//! The services of [`crate::streams`] on kernel sockets, with epoll: a baseline that Tidegate is
//! compared with.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::{Timespec, epoll};
use rustix::io::Errno;

use crate::ServeCounters;
use crate::kernel_listener::listen_with_max_descriptors;
use crate::kernel_poll::{self, KernelBusyPoll};
use crate::slots::Slots;
use crate::streams::StreamService;

/// Interval at which an idle server checks its stop flag.
const STOP_CHECK_INTERVAL: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
const NO_WAIT: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

const MAX_EVENTS: usize = 256;

/// Bytes read at a time.
const BUFFER_BYTES: usize = 64 << 10;

/// Bytes that one connection may transfer before other connections get their turn.
const TURN_BYTES: usize = 256 << 10;

/// Serves on `addresses` until `stop` is set, which is noticed within 100 ms. Calls `ready` once
/// the server listens. With `spin` set the server never sleeps: it asks epoll again and again.
///
/// # Errors
/// When an address cannot be listened on, or the kernel cannot busy-poll.
pub fn serve_kernel_streams(
    addresses: &[SocketAddr],
    service: StreamService,
    spin: bool,
    busy_poll: KernelBusyPoll,
    stop: &AtomicBool,
    counters: &ServeCounters,
    ready: impl FnOnce() -> io::Result<()>,
) -> io::Result<()> {
    let epoll = kernel_poll::create(busy_poll)?;
    let listeners = listen_with_max_descriptors(addresses)?;
    for (index, listener) in listeners.iter().enumerate() {
        let data = epoll::EventData::new_u64(index as u64);
        epoll::add(&epoll, listener, data, epoll::EventFlags::IN)?;
    }
    ready()?;
    let mut server = Server {
        epoll,
        service,
        connections: Slots::default(),
        first_token: listeners.len(),
        buffer: vec![0; BUFFER_BYTES],
        counters,
    };
    let timeout = if spin { NO_WAIT } else { STOP_CHECK_INTERVAL };
    let mut events = Vec::with_capacity(MAX_EVENTS);
    while !stop.load(Ordering::Relaxed) {
        events.clear();
        let spare = rustix::buffer::spare_capacity(&mut events);
        match epoll::wait(&server.epoll, spare, Some(&timeout)) {
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
    wants_writable: bool,
}

struct Server<'c> {
    epoll: OwnedFd,
    service: StreamService,
    connections: Slots<Connection>,
    first_token: usize,
    buffer: Vec<u8>,
    counters: &'c ServeCounters,
}

impl Server<'_> {
    fn accept(&mut self, listener: &TcpListener) -> io::Result<()> {
        loop {
            let stream = match listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                // The connection closed before it was accepted, or a signal interrupted the call.
                Err(error)
                    if matches!(
                        error.kind(),
                        ErrorKind::ConnectionAborted | ErrorKind::Interrupted
                    ) =>
                {
                    continue;
                }
                // Out of file descriptors: open connections may close some.
                Err(_) => return Ok(()),
            };
            stream.set_nonblocking(true)?;
            stream.set_nodelay(true)?;
            let wants_writable = self.service == StreamService::Source;
            let token = (self.first_token + self.connections.next_slot()) as u64;
            let data = epoll::EventData::new_u64(token);
            epoll::add(&self.epoll, &stream, data, interest(wants_writable))?;
            self.connections.insert(Connection {
                stream,
                unsent: Box::default(),
                sent: 0,
                wants_writable,
            });
        }
    }

    fn serve(&mut self, token: usize) -> io::Result<()> {
        let slot = token - self.first_token;
        let Some(connection) = self.connections.get_mut(slot) else { return Ok(()) };
        match connection.turn(self.service, &mut self.buffer, self.counters) {
            Ok(wants_writable) if wants_writable != connection.wants_writable => {
                connection.wants_writable = wants_writable;
                let data = epoll::EventData::new_u64(token as u64);
                epoll::modify(&self.epoll, &connection.stream, data, interest(wants_writable))?;
            }
            Ok(_) => {}
            // The error closes this connection only.
            Err(_) => self.connections.remove(slot),
        }
        Ok(())
    }
}

fn interest(wants_writable: bool) -> epoll::EventFlags {
    if wants_writable { epoll::EventFlags::OUT } else { epoll::EventFlags::IN }
}

impl Connection {
    /// Serves the connection until nothing is left to do or its turn is over. Returns true when
    /// it waits for send space.
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
        let mut turn_bytes = 0;
        while turn_bytes < TURN_BYTES {
            while let Some(rest) = self.unsent.get(self.sent..).filter(|rest| !rest.is_empty()) {
                self.sent += self.stream.write(rest)?;
                ServeCounters::add(&counters.replies, 1);
            }
            (self.unsent, self.sent) = (Box::default(), 0);
            let len = self.stream.read(buffer)?;
            if len == 0 {
                return Err(ErrorKind::UnexpectedEof.into());
            }
            ServeCounters::add(&counters.requests, 1);
            turn_bytes += len;
            let sent = match self.stream.write(&buffer[..len]) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => 0,
                result => result?,
            };
            if sent < len {
                self.unsent = buffer[sent..len].into();
                return Ok(true);
            }
            ServeCounters::add(&counters.replies, 1);
            if len < buffer.len() {
                // A short read: another call would find nothing, and costs as much as a useful one.
                return Ok(false);
            }
        }
        Ok(false)
    }

    fn sink(&mut self, buffer: &mut [u8], counters: &ServeCounters) -> io::Result<bool> {
        let mut turn_bytes = 0;
        while turn_bytes < TURN_BYTES {
            match self.stream.read(buffer)? {
                0 => return Err(ErrorKind::UnexpectedEof.into()),
                len => turn_bytes += len,
            }
            ServeCounters::add(&counters.requests, 1);
        }
        Ok(false)
    }

    fn source(&mut self, buffer: &[u8], counters: &ServeCounters) -> io::Result<bool> {
        let mut turn_bytes = 0;
        while turn_bytes < TURN_BYTES {
            turn_bytes += self.stream.write(buffer)?;
            ServeCounters::add(&counters.replies, 1);
        }
        Ok(true)
    }
}
