//! Sockets of the C library: a socket of the Rust library with the state of a descriptor.

mod linger;
pub(crate) mod open;
pub(crate) mod options;
pub(crate) mod settings;
pub(crate) mod transfer;

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use libc::c_int;
use tidegate::{Interest, Net, Readiness, Source, TcpListener, TcpStream, UdpSocket};
use tidegate_posix::control::ControlRequests;

use self::settings::Settings;
use crate::sleeper::{self, KernelWaiter};

/// Error of the kernel.
pub(crate) fn os_error(code: c_int) -> io::Error {
    io::Error::from_raw_os_error(code)
}

/// Locks a mutex, also after a panic of another thread.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Transport of a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Protocol {
    Tcp,
    Udp,
}

/// Socket of the stack behind a descriptor.
pub(crate) enum Endpoint {
    Listener(TcpListener),
    Stream(TcpStream),
    Udp(UdpSocket),
}

/// Observer of a socket that has no endpoint yet.
pub(crate) trait Watcher: Send + Sync {
    /// Called when the socket has its endpoint.
    fn on_opened(&self, socket: &Arc<Socket>);
}

/// Socket of a program.
pub(crate) struct Socket {
    pub(crate) net: Net,
    pub(crate) protocol: Protocol,
    /// IPv6 socket: the program gets IPv4 addresses in mapped form.
    pub(crate) is_v6: bool,
    is_nonblocking: AtomicBool,
    receive_timeout: AtomicTimeout,
    send_timeout: AtomicTimeout,
    settings: Mutex<Settings>,
    pub(crate) control_requests: ControlRequests,
    endpoint: OnceLock<Endpoint>,
    watchers: Mutex<Vec<Weak<dyn Watcher>>>,
    /// The program does not know the result of connecting yet.
    is_connecting: AtomicBool,
    /// The attempt to connect has failed.
    has_never_connected: AtomicBool,
    /// The last data was sent with `MSG_MORE`.
    more_follows: AtomicBool,
}

/// Timeout in milliseconds; 0 is none.
#[derive(Default)]
pub(crate) struct AtomicTimeout(AtomicU32);

impl AtomicTimeout {
    pub(crate) fn get(&self) -> Option<Duration> {
        let ms = self.0.load(Ordering::Relaxed);
        (ms > 0).then(|| Duration::from_millis(ms.into()))
    }

    fn set(&self, timeout: Option<Duration>) {
        let ms = timeout.map_or(0, |timeout| timeout.as_micros().div_ceil(1_000));
        self.0.store(u32::try_from(ms).unwrap_or(0), Ordering::Relaxed);
    }
}

/// Direction that a call waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IoDirection {
    Read,
    Write,
}

impl Socket {
    /// Connection, for calls that exist for connections only.
    ///
    /// # Errors
    /// `EOPNOTSUPP` for UDP, `ENOTCONN` without a connection.
    pub(crate) fn transfer_stream(&self) -> io::Result<&TcpStream> {
        match self.protocol {
            Protocol::Udp => Err(os_error(libc::EOPNOTSUPP)),
            Protocol::Tcp => self.stream().ok_or_else(|| os_error(libc::ENOTCONN)),
        }
    }

    /// New socket without an endpoint.
    pub(crate) fn new(net: &Net, protocol: Protocol, is_v6: bool) -> Self {
        Self {
            net: net.clone(),
            protocol,
            is_v6,
            is_nonblocking: AtomicBool::new(false),
            receive_timeout: AtomicTimeout::default(),
            send_timeout: AtomicTimeout::default(),
            settings: Mutex::new(Settings::new()),
            control_requests: ControlRequests::default(),
            endpoint: OnceLock::new(),
            watchers: Mutex::default(),
            is_connecting: AtomicBool::new(false),
            has_never_connected: AtomicBool::new(false),
            more_follows: AtomicBool::new(false),
        }
    }

    pub(crate) fn set_nonblocking(&self, is_nonblocking: bool) {
        self.is_nonblocking.store(is_nonblocking, Ordering::Relaxed);
    }

    pub(crate) fn is_nonblocking(&self) -> bool {
        self.is_nonblocking.load(Ordering::Relaxed)
    }

    pub(crate) fn settings(&self) -> MutexGuard<'_, Settings> {
        lock(&self.settings)
    }

    pub(crate) fn endpoint(&self) -> Option<&Endpoint> {
        self.endpoint.get()
    }

    /// Connection or socket that the program can transfer data with.
    pub(crate) fn stream(&self) -> Option<&TcpStream> {
        match self.endpoint() {
            Some(Endpoint::Stream(stream)) => Some(stream),
            _ => None,
        }
    }

    /// Gives the socket its endpoint, whose calls never wait by themselves.
    fn open(self: &Arc<Self>, endpoint: Endpoint) -> io::Result<()> {
        match &endpoint {
            Endpoint::Listener(listener) => listener.set_nonblocking(true),
            Endpoint::Stream(stream) => stream.set_nonblocking(true),
            Endpoint::Udp(udp) => udp.set_nonblocking(true),
        }?;
        if self.endpoint.set(endpoint).is_err() {
            // Another thread was first.
            return Err(os_error(libc::EINVAL));
        }
        let watchers = std::mem::take(&mut *lock(&self.watchers));
        for watcher in watchers.iter().filter_map(Weak::upgrade) {
            watcher.on_opened(self);
        }
        Ok(())
    }

    /// Calls the watcher when the socket has its endpoint. Returns false if it has one.
    pub(crate) fn watch(&self, watcher: Weak<dyn Watcher>) -> bool {
        let mut watchers = lock(&self.watchers);
        let is_pending = self.endpoint().is_none();
        if is_pending {
            watchers.push(watcher);
        }
        is_pending
    }

    /// Event source, if the socket has an endpoint.
    pub(crate) fn source(&self) -> Option<&dyn Source> {
        Some(match self.endpoint()? {
            Endpoint::Listener(listener) => listener,
            Endpoint::Stream(stream) => stream,
            Endpoint::Udp(udp) => udp,
        })
    }

    /// Readiness. A TCP socket that neither listens nor connects is closed in both directions, as
    /// at the kernel.
    pub(crate) fn readiness(&self) -> Readiness {
        match self.source() {
            Some(source) => source.readiness(),
            None => Readiness {
                writable: true,
                write_closed: true,
                read_closed: true,
                ..Readiness::default()
            },
        }
    }

    /// Repeats `attempt` until it succeeds or fails, waiting for readiness in between. A call that
    /// may not wait runs the stack at most once. `attempt` should not run the stack: signals that
    /// arrive meanwhile do not end the call.
    #[inline]
    pub(crate) fn retry_until_ready<R>(
        &self,
        direction: IoDirection,
        may_block: bool,
        mut attempt: impl FnMut() -> io::Result<R>,
    ) -> io::Result<R> {
        match attempt() {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                if may_block && !self.is_nonblocking() {
                    return self.wait_and_retry(direction, &mut attempt);
                }
                // Something may have arrived since the stack ran last.
                match self.net.run_if_due()? {
                    true => attempt(),
                    false => Err(error),
                }
            }
            result => result,
        }
    }

    #[cold]
    fn wait_and_retry<R>(
        &self,
        direction: IoDirection,
        attempt: &mut dyn FnMut() -> io::Result<R>,
    ) -> io::Result<R> {
        let (interest, timeout) = match direction {
            IoDirection::Read => (Interest::Receive, self.receive_timeout.get()),
            IoDirection::Write => (Interest::Send, self.send_timeout.get()),
        };
        let source = self.source().ok_or(io::ErrorKind::NotConnected)?;
        let deadline = timeout.map(|limit| Instant::now() + limit);
        loop {
            let remaining = deadline.map(|end| end.saturating_duration_since(Instant::now()));
            let mut kernel = KernelWaiter::new(Vec::new(), None, true);
            match self.net.wait(&[(source, interest)], remaining, &mut kernel) {
                Ok(true) => {}
                Ok(false) => return Err(io::ErrorKind::WouldBlock.into()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {
                    if timeout.is_some() || !sleeper::all_handlers_restart() {
                        return Err(error);
                    }
                }
                Err(error) => return Err(error),
            }
            drop(kernel);
            match attempt() {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                result => return result,
            }
        }
    }

    /// Address in the family of the socket: an IPv6 socket gets IPv4-mapped addresses.
    pub(crate) fn to_program_family(&self, address: SocketAddr) -> SocketAddr {
        match address.ip() {
            IpAddr::V4(v4) if self.is_v6 => {
                SocketAddr::new(v4.to_ipv6_mapped().into(), address.port())
            }
            _ => address,
        }
    }

    /// Unspecified address of the socket's family, with port 0.
    pub(crate) fn unspecified(&self) -> SocketAddr {
        match self.is_v6 {
            true => SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), 0),
            false => SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0),
        }
    }

    /// Local address, in the family of the socket.
    ///
    /// # Errors
    /// As `getsockname`.
    pub(crate) fn local_addr(&self) -> io::Result<SocketAddr> {
        let address = match self.endpoint() {
            Some(Endpoint::Listener(listener)) => listener.local_addr(),
            Some(Endpoint::Stream(stream)) => stream.local_addr(),
            Some(Endpoint::Udp(udp)) => udp.local_addr(),
            None => Ok(self.settings().bound.unwrap_or_else(|| self.unspecified())),
        };
        // An ended connection has no address any more.
        let address = address.unwrap_or_else(|_| self.unspecified());
        Ok(self.to_program_family(address))
    }

    /// Address of the peer, in the family of the socket.
    ///
    /// # Errors
    /// As `getpeername`.
    pub(crate) fn peer_addr(&self) -> io::Result<SocketAddr> {
        let not_connected = || os_error(libc::ENOTCONN);
        let address = match self.endpoint() {
            Some(Endpoint::Stream(stream)) if !self.is_unconnected() => stream.peer_addr(),
            Some(Endpoint::Udp(udp)) => udp.peer_addr(),
            _ => Err(not_connected()),
        };
        address.map(|address| self.to_program_family(address)).map_err(|_| not_connected())
    }

    /// True before a connection is established, and after the attempt has failed.
    fn is_unconnected(&self) -> bool {
        use tidegate::TcpState::{Closed, SynReceived, SynSent};
        let is_unconnected = |stream: &TcpStream| {
            stream.info().map_or(true, |info| matches!(info.state, SynSent | SynReceived | Closed))
        };
        self.stream().is_none_or(is_unconnected)
    }

    /// Bytes that the next read could return (`FIONREAD`).
    ///
    /// # Errors
    /// As `ioctl`.
    pub(crate) fn readable_bytes(&self) -> io::Result<usize> {
        match self.endpoint() {
            Some(Endpoint::Listener(_)) => Err(os_error(libc::EINVAL)),
            Some(Endpoint::Stream(stream)) => {
                Ok(stream.info().map_or(0, |info| info.unread_bytes as usize))
            }
            Some(Endpoint::Udp(udp)) if udp.readiness().readable => {
                Ok(udp.peek_meta(&mut []).map_or(0, |next| next.datagram_len))
            }
            Some(Endpoint::Udp(_)) | None => Ok(0),
        }
    }
}
