//! Runs a [`Responder`] on the kernel's own UDP sockets.
//!
//! This is the peer that Tidegate is compared with, so it is written as one
//! would write a fast kernel server: batches by `recvmmsg` and `sendmmsg`,
//! large buffers, one thread per socket if the caller wants it.

mod sys;

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};
use thiserror::Error;

use crate::{Responder, ServeCounters};
use sys::Batch;

/// How many datagrams are received or sent by one system call.
pub const BATCH: usize = 64;

/// How often an idle server looks at its stop flag.
const STOP_CHECK: Duration = Duration::from_millis(100);

/// Why a kernel socket could not be used.
#[derive(Debug, Error)]
pub enum KernelError {
    /// The socket could not be made.
    #[error("cannot open a UDP socket for {address}: {source}")]
    Open {
        /// The address to serve.
        address: SocketAddr,
        /// What the kernel said.
        source: io::Error,
    },
    /// The address is in use or not on this machine.
    #[error(
        "cannot bind UDP {address}: {source}; `ss -lunp` shows who holds the port, \
         `ip address` the addresses of this machine"
    )]
    Bind {
        /// The address to serve.
        address: SocketAddr,
        /// What the kernel said.
        source: io::Error,
    },
    /// The kernel does not let the sockets be waited for.
    #[error("waiting for datagrams failed: {0}")]
    Poll(#[source] io::Error),
    /// The socket failed while it was served.
    #[error("receiving on UDP {address} failed: {source}")]
    Receive {
        /// The address being served.
        address: SocketAddr,
        /// What the kernel said.
        source: io::Error,
    },
}

/// How to set up a kernel socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelOptions {
    /// The receive buffer to ask for. The kernel gives less when the process
    /// may not go over `net.core.rmem_max`.
    pub receive_buffer_bytes: usize,
    /// Lets several sockets share the address, one per thread.
    pub reuse_port: bool,
}

impl Default for KernelOptions {
    fn default() -> Self {
        KernelOptions { receive_buffer_bytes: 8 << 20, reuse_port: false }
    }
}

/// A bound UDP socket of the kernel.
#[derive(Debug)]
pub struct KernelSocket {
    fd: OwnedFd,
    address: SocketAddr,
}

impl KernelSocket {
    /// Binds `address`. An IPv6 socket takes IPv6 only, so that both families
    /// can be bound side by side.
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
        sys::ask_for_destination(fd.as_fd(), address.is_ipv6())
            .map_err(|source| KernelError::Open { address, source })?;
        let bind_error = |source: io::Error| KernelError::Bind { address, source };
        rustix::net::bind(&fd, &address).map_err(|errno| bind_error(errno.into()))?;
        let bound = rustix::net::getsockname(&fd).map_err(|errno| bind_error(errno.into()))?;
        let address = SocketAddr::try_from(bound).map_err(|errno| bind_error(errno.into()))?;
        Ok(KernelSocket { fd, address })
    }

    /// The address in use, with the port that was given when 0 was asked for.
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }
}

impl AsFd for KernelSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Serves `sockets` with `responder` until `stop` is set, which is noticed
/// within a tenth of a second. Sleeps in the kernel while nothing arrives.
/// Replies leave from the address that was asked.
///
/// `max_datagram_bytes` bounds requests and replies. Each set of counters
/// belongs to one serving loop.
///
/// # Errors
/// When a socket can be served no longer. A reply that cannot be sent is
/// counted, not an error.
pub fn serve_kernel(
    sockets: &[KernelSocket],
    responder: &mut impl Responder,
    max_datagram_bytes: usize,
    stop: &AtomicBool,
    counters: &ServeCounters,
) -> Result<(), KernelError> {
    let mut batch = Batch::new(max_datagram_bytes);
    let mut polled: Vec<PollFd<'_>> =
        sockets.iter().map(|socket| PollFd::new(socket, PollFlags::IN)).collect();
    while !stop.load(Ordering::Relaxed) {
        let mut served = 0;
        for socket in sockets {
            served += serve_batch(socket, responder, &mut batch, counters)?;
        }
        if served == 0 {
            wait(&mut polled)?;
        }
    }
    Ok(())
}

/// Receives, answers and sends one batch. Returns how many arrived.
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
    ServeCounters::add(&counters.answers, sent);
    ServeCounters::add(&counters.unsent, unsent);
    Ok(received)
}

/// Sleeps until a datagram arrives or the stop flag is due for a look.
fn wait(polled: &mut [PollFd<'_>]) -> Result<(), KernelError> {
    let timeout = Timespec { tv_sec: 0, tv_nsec: STOP_CHECK.subsec_nanos().into() };
    match poll(polled, Some(&timeout)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(errno) => Err(KernelError::Poll(errno.into())),
    }
}
