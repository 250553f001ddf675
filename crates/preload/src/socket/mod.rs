//! Sockets that have moved to Tidegate.

pub(crate) mod moving;
pub(crate) mod options;
pub(crate) mod passing;
mod tcp;
mod udp;

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use tidegate::{Interest, Net, Readiness, Source, TcpListener, TcpStream, UdpSocket};

use crate::sleeper::{self, KernelSide};
use crate::{signals, start};

/// A socket of Tidegate's, with what the kernel keeps of others.
pub(crate) struct Socket {
    pub(crate) body: Body,
    pub(crate) net: &'static Net,
    /// Addresses are shown to the program as those of IPv6.
    pub(crate) is_v6: bool,
    /// The kernel's socket is in use too, for loopback.
    pub(crate) has_kernel: bool,
    is_nonblocking: AtomicBool,
    receive_timeout: TimeLimit,
    send_timeout: TimeLimit,
}

/// What kind of socket it is.
pub(crate) enum Body {
    Listener(Listener),
    Stream(Stream),
    Udp(Udp),
}

/// A socket that listens.
pub(crate) struct Listener {
    pub(crate) listener: TcpListener,
    /// Options that the kernel's sockets of its connections are given.
    pub(crate) inherited: Mutex<Vec<options::Setting>>,
}

/// A connection.
pub(crate) struct Stream {
    pub(crate) stream: TcpStream,
    /// Nobody was told yet that it is connected, or has failed.
    pub(crate) is_connecting: AtomicBool,
    /// Everything that is written waits for more (`TCP_CORK`).
    is_corked: AtomicBool,
    /// What was written and waits for more to be sent with.
    held: Mutex<Vec<u8>>,
    has_held: AtomicBool,
}

/// A socket for datagrams.
pub(crate) struct Udp {
    pub(crate) socket: UdpSocket,
    /// Datagrams are told the address that they were sent to.
    pub(crate) tells_destination: AtomicBool,
    pub(crate) is_connected: AtomicBool,
}

/// A limit of time in milliseconds; 0 is none.
#[derive(Default)]
struct TimeLimit(AtomicU32);

impl TimeLimit {
    fn get(&self) -> Option<Duration> {
        let ms = self.0.load(Ordering::Relaxed);
        (ms > 0).then(|| Duration::from_millis(ms.into()))
    }

    fn set(&self, limit: Duration) {
        let ms = limit.as_micros().div_ceil(1_000);
        self.0.store(u32::try_from(ms).unwrap_or(0), Ordering::Relaxed);
    }
}

/// Which side of a socket a call waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Read,
    Write,
}

impl Socket {
    fn new(net: &'static Net, body: Body, is_v6: bool, has_kernel: bool) -> Self {
        Self {
            body,
            net,
            is_v6,
            has_kernel,
            is_nonblocking: AtomicBool::new(false),
            receive_timeout: TimeLimit::default(),
            send_timeout: TimeLimit::default(),
        }
    }

    pub(crate) fn set_nonblocking(&self, is_nonblocking: bool) {
        self.is_nonblocking.store(is_nonblocking, Ordering::Relaxed);
    }

    pub(crate) fn is_nonblocking(&self) -> bool {
        self.is_nonblocking.load(Ordering::Relaxed)
    }

    /// In a child that has it from its parent.
    pub(crate) fn on_inherited(&self) {
        if let Body::Stream(stream) = &self.body {
            stream.forget_held();
        }
    }

    /// What can be waited for.
    pub(crate) fn source(&self) -> &dyn Source {
        match &self.body {
            Body::Listener(listener) => &listener.listener,
            Body::Stream(stream) => &stream.stream,
            Body::Udp(udp) => &udp.socket,
        }
    }

    pub(crate) fn readiness(&self) -> Readiness {
        self.source().readiness()
    }

    /// Makes an attempt, and waits and makes another as long as nothing is
    /// ready, if the socket is one that waits.
    pub(crate) fn repeat<R>(
        &self,
        fd: i32,
        side: Side,
        waits: bool,
        mut attempt: impl FnMut() -> io::Result<R>,
    ) -> io::Result<R> {
        if start::is_child() {
            return Err(start::child_error());
        }
        let waits = waits && !self.is_nonblocking();
        let limit = match side {
            Side::Read => self.receive_timeout.get(),
            Side::Write => self.send_timeout.get(),
        };
        let deadline = limit.filter(|_| waits).map(|limit| Instant::now() + limit);
        let mut has_run = false;
        loop {
            match attempt() {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                result => return result,
            }
            if !waits {
                if has_run || !start::run_if_due(self.net)? {
                    return Err(io::ErrorKind::WouldBlock.into());
                }
                has_run = true;
                continue;
            }
            match self.wait(fd, side, deadline) {
                Ok(true) => {}
                Ok(false) => return Err(io::ErrorKind::WouldBlock.into()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {
                    if limit.is_some() || !sleeper::restarts() {
                        return Err(error);
                    }
                    signals::let_through();
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Waits until the side may be ready; `false` when the time is over.
    fn wait(&self, fd: i32, side: Side, deadline: Option<Instant>) -> io::Result<bool> {
        let interest = match side {
            Side::Read => Interest::Readable,
            Side::Write => Interest::Writable,
        };
        let mut kernel = match side == Side::Read && self.has_kernel {
            true => KernelSide::one(fd, libc::POLLIN),
            false => KernelSide::new(Vec::new(), None),
        };
        let left = deadline.map(|end| end.saturating_duration_since(Instant::now()));
        let found = self.net.wait(&[(self.source(), interest)], left, &mut kernel);
        start::has_run();
        found
    }

    /// An address as the program shall see it: on an IPv6 socket all are.
    pub(crate) fn present(&self, address: SocketAddr) -> SocketAddr {
        match address.ip() {
            IpAddr::V4(v4) if self.is_v6 => {
                SocketAddr::new(v4.to_ipv6_mapped().into(), address.port())
            }
            _ => address,
        }
    }

    /// Our own address; `None` when the kernel's socket knows it.
    pub(crate) fn local_addr(&self) -> io::Result<SocketAddr> {
        let address = match &self.body {
            Body::Listener(listener) => listener.listener.local_addr(),
            Body::Stream(stream) => stream.stream.local_addr(),
            Body::Udp(udp) => udp.socket.local_addr(),
        };
        address.map(|address| self.present(address))
    }

    pub(crate) fn peer_addr(&self) -> io::Result<SocketAddr> {
        let address = match &self.body {
            Body::Listener(_) => Err(io::ErrorKind::NotConnected.into()),
            Body::Stream(stream) => match stream.is_open() {
                true => stream.stream.peer_addr(),
                false => Err(io::ErrorKind::NotConnected.into()),
            },
            Body::Udp(udp) => udp.socket.peer_addr(),
        };
        address.map(|address| self.present(address))
    }

    /// The error that waits, which is then forgotten.
    pub(crate) fn take_error(&self) -> io::Result<Option<io::Error>> {
        match &self.body {
            Body::Listener(_) => Ok(None),
            Body::Stream(stream) => stream.stream.take_error(),
            Body::Udp(udp) => udp.socket.take_error(),
        }
    }

    /// How many bytes the next read could take.
    pub(crate) fn readable_bytes(&self) -> io::Result<usize> {
        match &self.body {
            Body::Listener(_) => Err(io::ErrorKind::InvalidInput.into()),
            Body::Stream(stream) => {
                let info = stream.stream.info();
                Ok(info.map_or(0, |info| info.unread_bytes as usize))
            }
            Body::Udp(udp) => Ok(udp.next_len()),
        }
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        if let Body::Stream(stream) = &self.body {
            stream.push(self);
        }
    }
}

/// The unspecified address of a family.
pub(crate) fn any(is_v6: bool) -> SocketAddr {
    match is_v6 {
        true => SocketAddr::new(std::net::Ipv6Addr::UNSPECIFIED.into(), 0),
        false => SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0),
    }
}
