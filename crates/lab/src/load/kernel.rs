//! A line over kernel sockets: for machines where no port can be opened, and
//! for comparison.

use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::fd::AsFd;

use super::line::Line;
use super::workload::Payload;
use crate::error::LabError;
use crate::sys::Datagrams;

/// Datagrams in one system call.
const BATCH: usize = 64;
const MAX_BYTES: usize = 2048;
/// Sockets read from in one poll.
const READ_AT_ONCE: usize = 4;

/// A line over connected UDP sockets, one for each flow, used in turn for a
/// batch each.
pub struct KernelLine {
    sockets: Vec<UdpSocket>,
    current: usize,
    next_read: usize,
    out: Datagrams,
    pushed: usize,
    arrived: Datagrams,
}

impl KernelLine {
    /// Opens `flows` sockets to `target`; `source` is the address to bind to.
    ///
    /// # Errors
    /// When the system refuses a socket or has no route.
    pub fn open(target: SocketAddr, source: Option<IpAddr>, flows: u32) -> Result<Self, LabError> {
        let any: IpAddr = if target.is_ipv4() {
            Ipv4Addr::UNSPECIFIED.into()
        } else {
            Ipv6Addr::UNSPECIFIED.into()
        };
        let open = || {
            let socket = UdpSocket::bind((source.unwrap_or(any), 0))?;
            socket.connect(target)?;
            socket.set_nonblocking(true)?;
            Ok(socket)
        };
        let sockets: io::Result<Vec<UdpSocket>> = (0..flows.max(1)).map(|_| open()).collect();
        Ok(Self {
            sockets: sockets.map_err(LabError::io(format!("cannot open a socket to {target}")))?,
            current: 0,
            next_read: 0,
            out: Datagrams::new(BATCH, MAX_BYTES),
            pushed: 0,
            arrived: Datagrams::new(BATCH, MAX_BYTES),
        })
    }
}

impl Line for KernelLine {
    fn flows(&self) -> u32 {
        self.sockets.len() as u32
    }

    fn room(&self) -> usize {
        BATCH - self.pushed
    }

    fn push(&mut self, write: impl FnOnce(u32, &mut [u8]) -> Payload) {
        let payload = write(self.current as u32, self.out.room(self.pushed));
        self.out.set_len(self.pushed, payload.len);
        self.pushed += 1;
    }

    fn flush(&mut self) -> io::Result<()> {
        let mut sent = 0;
        while sent < self.pushed {
            match self.out.send(self.sockets[self.current].as_fd(), sent..self.pushed) {
                Ok(0) => break,
                Ok(count) => sent += count,
                Err(error) if is_passing(&error) => break,
                Err(error) => return Err(error),
            }
        }
        // What the kernel has no room for is lost, as on a full wire; the
        // answer that never comes counts it.
        self.pushed = 0;
        self.current = (self.current + 1) % self.sockets.len();
        Ok(())
    }

    fn poll(&mut self, quota: usize, mut answer: impl FnMut(u32, &[u8])) -> io::Result<()> {
        let mut left = quota;
        // A few sockets each time: a call for nothing costs as much as one for
        // a burst.
        for _ in 0..self.sockets.len().min(READ_AT_ONCE) {
            let flow = self.next_read;
            self.next_read = (flow + 1) % self.sockets.len();
            let socket = &self.sockets[flow];
            while left > 0 {
                let count = match self.arrived.receive(socket.as_fd()) {
                    Ok(count) => count,
                    Err(error) if is_passing(&error) => break,
                    Err(error) => return Err(error),
                };
                for index in 0..count {
                    answer(flow as u32, self.arrived.get(index));
                }
                left = left.saturating_sub(count);
                if count < self.arrived.capacity() {
                    break;
                }
            }
        }
        Ok(())
    }
}

/// Errors that a datagram socket reports and gets over: nothing there, no
/// room, or an ICMP message about an earlier packet.
fn is_passing(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::WouldBlock
            | ErrorKind::Interrupted
            | ErrorKind::ConnectionRefused
            | ErrorKind::HostUnreachable
            | ErrorKind::NetworkUnreachable
    ) || error.raw_os_error() == Some(libc::ENOBUFS)
}
