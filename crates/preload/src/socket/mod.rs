//! Sockets that have moved to Tidegate.

pub(crate) mod error_queue;
pub(crate) mod install;
pub(crate) mod linger;
pub(crate) mod moving;
pub(crate) mod options;
mod receive_time;
pub(crate) mod tcp;
pub(crate) mod transfer;
pub(crate) mod udp;
pub(crate) mod zero_copy;

use std::io;
use std::mem::ManuallyDrop;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use tidegate::{Interest, Net, Readiness, Source, TcpListener, TcpStream, UdpSocket};
use tidegate_posix::control;

use crate::raw::ControlMessage;
use crate::sleeper::{self, KernelWaiter};
use crate::{errno, runtime, signals};

/// Tidegate socket behind a kernel descriptor.
pub(crate) struct Socket {
    pub(crate) endpoint: ManuallyDrop<Endpoint>,
    pub(crate) net: &'static Net,
    /// IPv6 socket: the application gets IPv4 addresses in mapped form.
    pub(crate) is_v6: bool,
    /// The socket refuses IPv4 addresses (`IPV6_V6ONLY`).
    is_v6_only: AtomicBool,
    /// The kernel socket is in use, too, for loopback.
    pub(crate) uses_kernel_socket: bool,
    is_nonblocking: AtomicBool,
    receive_timeout: AtomicTimeout,
    send_timeout: AtomicTimeout,
    /// Another process has, or had, the socket too.
    has_other_holders: AtomicBool,
}

/// Type of a socket, with its state.
pub(crate) enum Endpoint {
    Listener(Listener),
    Stream(Stream),
    Udp(Udp),
}

/// Listening TCP socket.
pub(crate) struct Listener {
    pub(crate) listener: TcpListener,
    /// Options for the kernel sockets of accepted connections.
    pub(crate) inherited_options: Mutex<Vec<options::SocketOption>>,
    /// Accepted connections have `SO_ZEROCOPY`.
    passes_zero_copy: AtomicBool,
}

/// TCP connection.
pub(crate) struct Stream {
    pub(crate) stream: TcpStream,
    /// The application does not know the result of connecting yet.
    pub(crate) is_connecting: AtomicBool,
    /// The attempt to connect has failed.
    has_never_connected: AtomicBool,
    /// `TCP_CORK` is set.
    is_corked: AtomicBool,
    /// The last data was sent with `MSG_MORE`.
    more_follows: AtomicBool,
    /// Time for which closing waits (`SO_LINGER`).
    linger: AtomicTimeout,
    /// Received data carries the number of bytes that are left (`TCP_INQ`).
    pub(crate) reports_left_bytes: AtomicBool,
    pub(crate) zero_copy: zero_copy::ZeroCopy,
}

/// UDP socket.
pub(crate) struct Udp {
    pub(crate) socket: UdpSocket,
    /// Address that the socket was bound to when it moved.
    pub(crate) bound: IpAddr,
    pub(crate) control_requests: control::ControlRequests,
    pub(crate) is_connected: AtomicBool,
    /// Datagrams are not fragmented (`IP_MTU_DISCOVER`).
    dont_fragment: AtomicBool,
    /// Payload bytes of each datagram that a call sends (`UDP_SEGMENT`); 0 is one datagram.
    segment_bytes: AtomicU16,
    pub(crate) zero_copy: zero_copy::ZeroCopy,
    pub(crate) receive_time: receive_time::ReceiveTime,
}

/// Timeout in milliseconds; 0 is none.
#[derive(Default)]
struct AtomicTimeout(AtomicU32);

impl AtomicTimeout {
    fn get(&self) -> Option<Duration> {
        let ms = self.0.load(Ordering::Relaxed);
        (ms > 0).then(|| Duration::from_millis(ms.into()))
    }

    fn set(&self, timeout: Duration) {
        let ms = timeout.as_micros().div_ceil(1_000);
        self.0.store(u32::try_from(ms).unwrap_or(0), Ordering::Relaxed);
    }
}

/// Direction that a call waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IoDirection {
    Read,
    Write,
}

/// A call of the application may hold the last reference, and drops it after it has set `errno`.
impl Drop for Socket {
    fn drop(&mut self) {
        // SAFETY: dropped here only, and not used afterwards.
        errno::preserve(|| unsafe { ManuallyDrop::drop(&mut self.endpoint) });
    }
}

impl Socket {
    fn new(net: &'static Net, endpoint: Endpoint, is_v6: bool, uses_kernel_socket: bool) -> Self {
        Self {
            endpoint: ManuallyDrop::new(endpoint),
            net,
            is_v6,
            is_v6_only: AtomicBool::new(false),
            uses_kernel_socket,
            is_nonblocking: AtomicBool::new(false),
            receive_timeout: AtomicTimeout::default(),
            send_timeout: AtomicTimeout::default(),
            has_other_holders: AtomicBool::new(false),
        }
    }

    pub(crate) fn set_nonblocking(&self, is_nonblocking: bool) {
        self.is_nonblocking.store(is_nonblocking, Ordering::Relaxed);
    }

    pub(crate) fn is_nonblocking(&self) -> bool {
        self.is_nonblocking.load(Ordering::Relaxed)
    }

    pub(crate) fn is_v6_only(&self) -> bool {
        self.is_v6_only.load(Ordering::Relaxed)
    }

    /// Records that another process has the socket, too.
    pub(crate) fn note_other_holders(&self) {
        self.has_other_holders.store(true, Ordering::Relaxed);
    }

    /// True if another process may have the socket.
    fn has_other_holders(&self) -> bool {
        self.has_other_holders.load(Ordering::Relaxed)
    }

    /// Called in a forked child that inherited the socket.
    pub(crate) fn on_inherited(&self) {
        self.note_other_holders();
    }

    /// Event source of the socket.
    pub(crate) fn source(&self) -> &dyn Source {
        match &*self.endpoint {
            Endpoint::Listener(listener) => &listener.listener,
            Endpoint::Stream(stream) => &stream.stream,
            Endpoint::Udp(udp) => &udp.socket,
        }
    }

    pub(crate) fn readiness(&self) -> Readiness {
        self.source().readiness()
    }

    /// Repeats `attempt` until it succeeds or fails, waiting for readiness in between. A
    /// nonblocking call runs the stack at most once instead of waiting.
    pub(crate) fn retry_until_ready<R>(
        &self,
        fd: i32,
        direction: IoDirection,
        may_block: bool,
        mut attempt: impl FnMut() -> io::Result<R>,
    ) -> io::Result<R> {
        if runtime::is_child() {
            return Err(runtime::child_error());
        }
        let may_block = may_block && !self.is_nonblocking();
        let timeout = match direction {
            IoDirection::Read => self.receive_timeout.get(),
            IoDirection::Write => self.send_timeout.get(),
        };
        let deadline = timeout.filter(|_| may_block).map(|limit| Instant::now() + limit);
        let mut has_run = false;
        loop {
            match attempt() {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                result => return result,
            }
            if !may_block {
                if has_run || !self.net.run_if_due()? {
                    return Err(io::ErrorKind::WouldBlock.into());
                }
                has_run = true;
                continue;
            }
            match self.wait(fd, direction, deadline) {
                Ok(true) => {}
                Ok(false) => return Err(io::ErrorKind::WouldBlock.into()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {
                    if timeout.is_some() || !sleeper::all_handlers_restart() {
                        return Err(error);
                    }
                    signals::deliver_deferred();
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Waits until the direction may be ready; false when the deadline has passed.
    fn wait(&self, fd: i32, direction: IoDirection, deadline: Option<Instant>) -> io::Result<bool> {
        let interest = match direction {
            IoDirection::Read => Interest::Receive,
            IoDirection::Write => Interest::Send,
        };
        let mut kernel = match direction == IoDirection::Read && self.uses_kernel_socket {
            true => KernelWaiter::for_fd(fd, libc::POLLIN),
            false => KernelWaiter::new(Vec::new(), None),
        };
        let remaining = deadline.map(|end| end.saturating_duration_since(Instant::now()));
        self.net.wait(&[(self.source(), interest)], remaining, &mut kernel)
    }

    /// Address in the family of the socket: an IPv6 socket gets IPv4-mapped addresses.
    pub(crate) fn to_app_family(&self, address: SocketAddr) -> SocketAddr {
        match address.ip() {
            IpAddr::V4(v4) if self.is_v6 => {
                SocketAddr::new(v4.to_ipv6_mapped().into(), address.port())
            }
            _ => address,
        }
    }

    /// Local address, in the family of the socket.
    pub(crate) fn local_addr(&self) -> io::Result<SocketAddr> {
        let address = match &*self.endpoint {
            Endpoint::Listener(listener) => listener.listener.local_addr(),
            Endpoint::Stream(stream) => stream.stream.local_addr(),
            Endpoint::Udp(udp) => udp.socket.local_addr(),
        };
        address.map(|address| self.to_app_family(address))
    }

    pub(crate) fn peer_addr(&self) -> io::Result<SocketAddr> {
        let address = match &*self.endpoint {
            Endpoint::Listener(_) => Err(io::ErrorKind::NotConnected.into()),
            Endpoint::Stream(stream) => match stream.is_open() {
                true => stream.stream.peer_addr(),
                false => Err(io::ErrorKind::NotConnected.into()),
            },
            Endpoint::Udp(udp) => udp.socket.peer_addr(),
        };
        address.map(|address| self.to_app_family(address))
    }

    /// Returns the pending error and clears it.
    pub(crate) fn take_error(&self) -> io::Result<Option<io::Error>> {
        match &*self.endpoint {
            Endpoint::Listener(_) => Ok(None),
            Endpoint::Stream(stream) => {
                let error = stream.stream.take_error()?;
                Ok(error.map(|error| stream.with_unreachable_reason(error)))
            }
            Endpoint::Udp(udp) => udp.socket.take_error().map(|error| error.map(udp::with_code)),
        }
    }

    fn zero_copy(&self) -> Option<&zero_copy::ZeroCopy> {
        match &*self.endpoint {
            Endpoint::Listener(_) => None,
            Endpoint::Stream(stream) => Some(&stream.zero_copy),
            Endpoint::Udp(udp) => Some(&udp.zero_copy),
        }
    }

    /// Called after a call with `MSG_ZEROCOPY` has sent `len` bytes. An empty datagram counts.
    pub(crate) fn on_zero_copy_sent(&self, len: usize) {
        let counts = len > 0 || matches!(*self.endpoint, Endpoint::Udp(_));
        if let Some(zero_copy) = self.zero_copy().filter(|_| counts) {
            zero_copy.on_sent(self.source());
        }
    }

    /// Takes the notification of data sent with `MSG_ZEROCOPY`, if there is one.
    pub(crate) fn take_zero_copy_notification(&self) -> Option<ControlMessage> {
        self.zero_copy()?.take(self.source(), self.is_v6)
    }

    /// Bytes that the next read could return (`FIONREAD`).
    pub(crate) fn readable_bytes(&self) -> io::Result<usize> {
        match &*self.endpoint {
            Endpoint::Listener(_) => Err(io::ErrorKind::InvalidInput.into()),
            Endpoint::Stream(stream) => {
                let info = stream.stream.info();
                Ok(info.map_or(0, |info| info.unread_bytes as usize))
            }
            Endpoint::Udp(udp) => Ok(udp.next_datagram_bytes()),
        }
    }
}

/// Unspecified address of a family, with port 0.
pub(crate) fn unspecified(is_v6: bool) -> SocketAddr {
    match is_v6 {
        true => SocketAddr::new(std::net::Ipv6Addr::UNSPECIFIED.into(), 0),
        false => SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0),
    }
}
