//! Runs a [`Responder`] on the kernel's UDP sockets.
//!
//! This is the baseline that Tidegate is compared with, so it is written as a fast kernel server:
//! batches by `recvmmsg` and `sendmmsg`, large buffers, and one thread per socket if the caller
//! wants that.

mod sys;

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::event::{Timespec, epoll};
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};
use thiserror::Error;

use crate::kernel_poll::{self, KernelBusyPoll};
use crate::responder::unix_time_ns;
use crate::{Responder, ServeCounters};
use sys::Batch;

/// Datagrams received or sent by one system call.
pub const BATCH_DATAGRAMS: usize = 64;

/// Interval at which an idle server checks its stop flag.
const STOP_CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Errors of kernel sockets.
#[derive(Debug, Error)]
pub enum KernelError {
    /// The socket could not be created.
    #[error("cannot open a UDP socket for {address}: {source}")]
    Open {
        /// Address to serve.
        address: SocketAddr,
        /// Error of the system call.
        source: io::Error,
    },
    /// The address is in use or is not assigned to this machine.
    #[error(
        "cannot bind UDP {address}: {source}; `ss -lunp` shows which process holds the port, \
         `ip address` the addresses of this machine"
    )]
    Bind {
        /// Address to serve.
        address: SocketAddr,
        /// Error of the system call.
        source: io::Error,
    },
    /// The socket may not busy-poll its device.
    #[error("cannot busy-poll for UDP {address}: {source}; it needs Linux 6.9 and CAP_NET_ADMIN")]
    BusyPoll {
        /// Address to serve.
        address: SocketAddr,
        /// Error of the system call.
        source: io::Error,
    },
    /// Waiting for datagrams failed (`epoll_wait`).
    #[error("waiting for datagrams failed: {0}")]
    Wait(#[source] io::Error),
    /// The socket failed while it was being served.
    #[error("receiving on UDP {address} failed: {source}")]
    Receive {
        /// Address being served.
        address: SocketAddr,
        /// Error of the system call.
        source: io::Error,
    },
}

/// Options of a kernel socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelOptions {
    /// Receive buffer to request, in bytes. The kernel grants less to a process that may not
    /// exceed `net.core.rmem_max`.
    pub receive_buffer_bytes: usize,
    /// Lets several sockets share the address (`SO_REUSEPORT`), one per thread.
    pub reuse_port: bool,
    /// Busy polling of the device.
    pub busy_poll: KernelBusyPoll,
}

impl Default for KernelOptions {
    fn default() -> Self {
        KernelOptions {
            receive_buffer_bytes: 8 << 20,
            reuse_port: false,
            busy_poll: KernelBusyPoll::Off,
        }
    }
}

/// Bound UDP socket of the kernel.
#[derive(Debug)]
pub struct KernelSocket {
    fd: OwnedFd,
    address: SocketAddr,
    busy_poll: KernelBusyPoll,
}

impl KernelSocket {
    /// Binds `address`. An IPv6 socket receives IPv6 only, so that both families can be bound
    /// side by side.
    ///
    /// # Errors
    /// When the socket cannot be opened or the address cannot be bound.
    pub fn bind(address: SocketAddr, options: &KernelOptions) -> Result<Self, KernelError> {
        let open_error =
            |errno: rustix::io::Errno| KernelError::Open { address, source: errno.into() };
        let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let fd = rustix::net::socket_with(family, SocketType::DGRAM, SocketFlags::CLOEXEC, None)
            .map_err(open_error)?;
        if address.is_ipv6() {
            sockopt::set_ipv6_v6only(&fd, true).map_err(open_error)?;
        }
        if options.reuse_port {
            sockopt::set_socket_reuseport(&fd, true).map_err(open_error)?;
        }
        if sockopt::set_socket_recv_buffer_size_force(&fd, options.receive_buffer_bytes).is_err() {
            sockopt::set_socket_recv_buffer_size(&fd, options.receive_buffer_bytes)
                .map_err(open_error)?;
        }
        sys::enable_packet_info(fd.as_fd(), address.is_ipv6())
            .map_err(|source| KernelError::Open { address, source })?;
        if options.busy_poll == KernelBusyPoll::Always {
            sys::prefer_busy_poll(fd.as_fd())
                .map_err(|source| KernelError::BusyPoll { address, source })?;
        }
        let bind_error = |source: io::Error| KernelError::Bind { address, source };
        rustix::net::bind(&fd, &address).map_err(|errno| bind_error(errno.into()))?;
        let bound = rustix::net::getsockname(&fd).map_err(|errno| bind_error(errno.into()))?;
        let address = SocketAddr::try_from(bound).map_err(|errno| bind_error(errno.into()))?;
        Ok(KernelSocket { fd, address, busy_poll: options.busy_poll })
    }

    /// Bound address; contains the assigned port when port 0 was requested.
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }
}

impl AsFd for KernelSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Serves `sockets` with `responder` until `stop` is set, which is noticed within 100 ms. Sleeps
/// in the kernel while no datagram arrives, unless the first socket always busy-polls. Replies
/// leave from the address that the request was sent to.
///
/// `max_datagram_bytes` bounds requests and replies. Each set of counters belongs to one serving
/// loop.
///
/// # Errors
/// When a socket fails for good. A reply that cannot be sent is counted and is no error.
///
/// # Examples
/// ```no_run
/// use std::sync::atomic::AtomicBool;
///
/// use tidegate_apps::ServeCounters;
/// use tidegate_apps::echo::Echo;
/// use tidegate_apps::kernel::{KernelOptions, KernelSocket, serve_kernel};
///
/// let socket = KernelSocket::bind("127.0.0.1:7".parse()?, &KernelOptions::default())?;
/// let (stop, counters) = (AtomicBool::new(false), ServeCounters::new());
/// serve_kernel(&[socket], &mut Echo, 2048, &stop, &counters)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn serve_kernel(
    sockets: &[KernelSocket],
    responder: &mut impl Responder,
    max_datagram_bytes: usize,
    stop: &AtomicBool,
    counters: &ServeCounters,
) -> Result<(), KernelError> {
    let mut batch = Batch::new(max_datagram_bytes);
    let busy_poll = sockets.first().map_or(KernelBusyPoll::Off, |socket| socket.busy_poll);
    let epoll = wait_set(sockets, busy_poll).map_err(KernelError::Wait)?;
    while !stop.load(Ordering::Relaxed) {
        responder.start_batch(&unix_time_ns);
        let mut served = 0;
        for socket in sockets {
            served += serve_batch(socket, responder, &mut batch, counters)?;
        }
        if served == 0 {
            responder.on_idle();
            // A socket that always busy-polls has looked at its device when it was read.
            if busy_poll != KernelBusyPoll::Always {
                wait(epoll.as_fd()).map_err(KernelError::Wait)?;
            }
        }
    }
    Ok(())
}

/// Receives, answers and sends one batch. Returns the number of datagrams received.
fn serve_batch(
    socket: &KernelSocket,
    responder: &mut impl Responder,
    batch: &mut Batch,
    counters: &ServeCounters,
) -> Result<usize, KernelError> {
    let received = batch
        .receive(socket.as_fd())
        .map_err(|source| KernelError::Receive { address: socket.address, source })?;
    if received == 0 {
        return Ok(0);
    }
    let (mut requests, mut oversized) = (0, 0);
    for index in 0..received {
        let Some((request, from, reply)) = batch.exchange(index) else {
            oversized += 1;
            continue;
        };
        requests += 1;
        if let Some(len) = responder.respond(request, from, reply) {
            batch.queue_reply(index, len);
        }
    }
    let (sent, unsent) = batch.send(socket.as_fd());
    ServeCounters::add(&counters.requests, requests);
    ServeCounters::add(&counters.oversized, oversized);
    ServeCounters::add(&counters.replies, sent);
    ServeCounters::add(&counters.unsent, unsent);
    Ok(received)
}

/// Creates the epoll of the sockets.
fn wait_set(sockets: &[KernelSocket], busy_poll: KernelBusyPoll) -> io::Result<OwnedFd> {
    let epoll = kernel_poll::create(busy_poll)?;
    for socket in sockets {
        epoll::add(&epoll, socket, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
    }
    Ok(epoll)
}

/// Sleeps until a datagram arrives or the stop flag is due for a check.
fn wait(epoll: BorrowedFd<'_>) -> io::Result<()> {
    let timeout = Timespec { tv_sec: 0, tv_nsec: STOP_CHECK_INTERVAL.subsec_nanos().into() };
    let mut events =
        [epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) }; 1];
    match epoll::wait(epoll, &mut events[..], Some(&timeout)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}
