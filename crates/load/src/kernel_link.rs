//! Link over kernel sockets: for machines without a usable device, and as a baseline.

use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::fd::AsFd;

use crate::error::LoadError;
use crate::link::Link;
use crate::sys::DatagramBatch;
use crate::workload::WrittenPayload;

/// Maximum number of datagrams per system call.
const BATCH_DATAGRAMS: usize = 64;
/// Size of a datagram buffer in bytes.
const MAX_DATAGRAM_BYTES: usize = 2048;
/// Maximum number of sockets read per poll.
const SOCKETS_PER_POLL: usize = 4;

/// Link over connected UDP sockets, one for each flow. The sockets send one batch each in turn.
pub struct KernelLink {
    sockets: Vec<UdpSocket>,
    current_flow: usize,
    next_read_flow: usize,
    tx_batch: DatagramBatch,
    queued: usize,
    rx_batch: DatagramBatch,
}

impl KernelLink {
    /// Opens `flows` sockets connected to `target`; `source` is the address to bind to.
    ///
    /// # Errors
    /// When a socket cannot be opened, or there is no route to `target`.
    pub fn open(target: SocketAddr, source: Option<IpAddr>, flows: u32) -> Result<Self, LoadError> {
        let sockets: io::Result<Vec<UdpSocket>> =
            (0..flows.max(1)).map(|_| connected_socket(target, source)).collect();
        Ok(Self {
            sockets: sockets.map_err(LoadError::io(format!("cannot open a socket to {target}")))?,
            current_flow: 0,
            next_read_flow: 0,
            tx_batch: DatagramBatch::new(BATCH_DATAGRAMS, MAX_DATAGRAM_BYTES),
            queued: 0,
            rx_batch: DatagramBatch::new(BATCH_DATAGRAMS, MAX_DATAGRAM_BYTES),
        })
    }
}

impl Link for KernelLink {
    fn flow_count(&self) -> u32 {
        self.sockets.len() as u32
    }

    fn space(&self) -> usize {
        BATCH_DATAGRAMS - self.queued
    }

    fn push(&mut self, write: impl FnOnce(u32, &mut [u8]) -> WrittenPayload) {
        let payload = write(self.current_flow as u32, self.tx_batch.slot_mut(self.queued));
        self.tx_batch.set_len(self.queued, payload.len);
        self.queued += 1;
    }

    fn flush(&mut self) -> io::Result<()> {
        let mut sent = 0;
        while sent < self.queued {
            match self.tx_batch.send(self.sockets[self.current_flow].as_fd(), sent..self.queued) {
                Ok(0) => break,
                Ok(count) => sent += count,
                Err(error) if is_transient(&error) => break,
                Err(error) => return Err(error),
            }
        }
        // Datagrams that overflow the kernel's send buffer are lost, as on a saturated link; their
        // missing responses count.
        self.queued = 0;
        self.current_flow = (self.current_flow + 1) % self.sockets.len();
        Ok(())
    }

    fn poll(&mut self, quota: usize, mut on_response: impl FnMut(u32, &[u8])) -> io::Result<()> {
        let mut remaining = quota;
        // Few sockets per poll: a system call that finds nothing costs as much as a burst.
        for _ in 0..self.sockets.len().min(SOCKETS_PER_POLL) {
            let flow = self.next_read_flow;
            self.next_read_flow = (flow + 1) % self.sockets.len();
            let socket = &self.sockets[flow];
            while remaining > 0 {
                let count = match self.rx_batch.receive(socket.as_fd()) {
                    Ok(count) => count,
                    Err(error) if is_transient(&error) => break,
                    Err(error) => return Err(error),
                };
                for index in 0..count {
                    on_response(flow as u32, self.rx_batch.get(index));
                }
                remaining = remaining.saturating_sub(count);
                if count < self.rx_batch.capacity() {
                    break;
                }
            }
        }
        Ok(())
    }
}

/// Opens a socket that does not block, bound to `source` or to any address.
pub(crate) fn connected_socket(
    target: SocketAddr,
    source: Option<IpAddr>,
) -> io::Result<UdpSocket> {
    let unspecified: IpAddr =
        if target.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((source.unwrap_or(unspecified), 0))?;
    socket.connect(target)?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}

/// True for transient errors of a datagram socket: nothing to read, no buffer space, or an ICMP
/// error about an earlier packet.
pub(crate) fn is_transient(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::WouldBlock
            | ErrorKind::Interrupted
            | ErrorKind::ConnectionRefused
            | ErrorKind::HostUnreachable
            | ErrorKind::NetworkUnreachable
    ) || error.raw_os_error() == Some(libc::ENOBUFS)
}
