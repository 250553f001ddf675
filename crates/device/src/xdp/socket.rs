//! AF_XDP socket: one receive queue of the interface, with four rings.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::xdp::{
    SocketAddrXdp, SocketAddrXdpFlags, SocketAddrXdpWithSharedUmem, XDP_PGOFF_RX_RING,
    XDP_PGOFF_TX_RING, XDP_UMEM_PGOFF_COMPLETION_RING, XDP_UMEM_PGOFF_FILL_RING, XdpStatistics,
};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, sockopt};

use super::ring::{Consumer, Producer};
use super::sys::{self, Descriptor, IntOption, RingMemory};
use super::umem::Umem;
use super::{BusyPoll, RingSizes};

/// Maximum bind retries while the queue is busy, and the interval between them: the kernel
/// frees the queue of a closed socket a moment after the close.
const MAX_BIND_RETRIES: u32 = 20;
const BIND_RETRY_INTERVAL: Duration = Duration::from_millis(10);

/// Send-buffer bytes that the kernel charges for one packet in flight in copy mode, rounded
/// up.
const SEND_BUFFER_BYTES_PER_PACKET: usize = 4096;

/// A bound socket with its rings.
pub(super) struct XdpSocket {
    pub fill: Producer<u64>,
    pub completion: Consumer<u64>,
    pub receive: Consumer<Descriptor>,
    pub transmit: Producer<Descriptor>,
    fd: OwnedFd,
}

/// Queue and mode of a bind.
#[derive(Clone, Copy)]
pub(super) struct Binding {
    pub interface_index: u32,
    pub queue: u32,
    pub zero_copy: bool,
    /// Received packets may take several descriptors (`XDP_USE_SG`, Linux 6.6).
    pub multi_buffer: bool,
}

/// Result of a request to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kick {
    /// The kernel sent all that one call can send.
    Done,
    /// More frames are pending: call again.
    Again,
    /// The kernel dropped the first pending packet; call again for the rest.
    Dropped,
    /// The kernel cannot send now: the link is down or memory is short.
    Unavailable,
}

/// Sets the size of a socket's send buffer; without privileges the system limits it.
pub(super) fn raise_send_buffer(socket: impl AsFd, bytes: usize) -> rustix::io::Result<()> {
    sockopt::set_socket_send_buffer_size_force(&socket, bytes)
        .or_else(|_| sockopt::set_socket_send_buffer_size(&socket, bytes))
}

impl XdpSocket {
    /// Opens a socket with rings and binds it. The first socket of a device registers the umem;
    /// later sockets share the umem of `first`.
    pub(super) fn open(
        umem: &Umem,
        first: Option<&XdpSocket>,
        rings: &RingSizes,
        binding: Binding,
    ) -> io::Result<Self> {
        let fd = rustix::net::socket_with(
            AddressFamily::XDP,
            SocketType::RAW,
            SocketFlags::CLOEXEC,
            None,
        )?;
        if first.is_none() {
            umem.register(fd.as_fd())?;
        }
        sockopt::set_xdp_umem_fill_ring_size(&fd, rings.fill)?;
        sockopt::set_xdp_umem_completion_ring_size(&fd, rings.completion)?;
        sockopt::set_xdp_rx_ring_size(&fd, rings.receive)?;
        sockopt::set_xdp_tx_ring_size(&fd, rings.transmit)?;
        let offsets = sockopt::xdp_mmap_offsets(&fd)?;
        let socket = Self {
            fill: Producer::new(RingMemory::map(
                fd.as_fd(),
                XDP_UMEM_PGOFF_FILL_RING,
                &offsets.fr,
                rings.fill,
            )?),
            completion: Consumer::new(RingMemory::map(
                fd.as_fd(),
                XDP_UMEM_PGOFF_COMPLETION_RING,
                &offsets.cr,
                rings.completion,
            )?),
            receive: Consumer::new(RingMemory::map(
                fd.as_fd(),
                XDP_PGOFF_RX_RING,
                &offsets.rx,
                rings.receive,
            )?),
            transmit: Producer::new(RingMemory::map(
                fd.as_fd(),
                XDP_PGOFF_TX_RING,
                &offsets.tx,
                rings.transmit,
            )?),
            fd,
        };
        socket.raise_send_limits(rings);
        socket.bind(first, binding)?;
        Ok(socket)
    }

    /// Rings with a simulated kernel side, for tests.
    #[cfg(test)]
    pub(super) fn private(size: u32) -> Self {
        use rustix::event::{EventfdFlags, eventfd};
        Self {
            fill: Producer::new(RingMemory::private(size)),
            completion: Consumer::new(RingMemory::private(size)),
            receive: Consumer::new(RingMemory::private(size)),
            transmit: Producer::new(RingMemory::private(size)),
            fd: eventfd(0, EventfdFlags::CLOEXEC).unwrap(),
        }
    }

    /// Lets one call send a whole ring. Both settings are optional: without them a call sends
    /// less, and [`Kick::Again`] requests the next call.
    fn raise_send_limits(&self, rings: &RingSizes) {
        let _ = sys::set_option(self.fd.as_fd(), IntOption::TransmitBudget, rings.transmit);
        let bytes = rings.transmit as usize * SEND_BUFFER_BYTES_PER_PACKET;
        let _ = raise_send_buffer(&self.fd, bytes);
    }

    fn bind(&self, first: Option<&XdpSocket>, binding: Binding) -> io::Result<()> {
        let mut attempt = 0;
        loop {
            match self.bind_once(first, binding) {
                Err(Errno::BUSY) if attempt < MAX_BIND_RETRIES => {
                    attempt += 1;
                    std::thread::sleep(BIND_RETRY_INTERVAL);
                }
                result => return Ok(result?),
            }
        }
    }

    fn bind_once(&self, first: Option<&XdpSocket>, binding: Binding) -> rustix::io::Result<()> {
        let Binding { interface_index, queue, zero_copy, multi_buffer } = binding;
        // A socket that shares a umem inherits the bind flags of the first socket.
        if let Some(first) = first {
            let flags = SocketAddrXdpFlags::XDP_SHARED_UMEM;
            let address = SocketAddrXdpWithSharedUmem {
                addr: SocketAddrXdp::new(flags, interface_index, queue),
                shared_umem_fd: first.fd.as_fd(),
            };
            return rustix::net::bind(&self.fd, &address);
        }
        let copy =
            if zero_copy { SocketAddrXdpFlags::XDP_ZEROCOPY } else { SocketAddrXdpFlags::XDP_COPY };
        let mut flags = copy | SocketAddrXdpFlags::XDP_USE_NEED_WAKEUP;
        flags.set(SocketAddrXdpFlags::XDP_USE_SG, multi_buffer);
        rustix::net::bind(&self.fd, &SocketAddrXdp::new(flags, interface_index, queue))
    }

    /// Enables preferred busy polling: the NIC's interrupts stay off while this socket polls.
    pub(super) fn prefer_busy_poll(&self, settings: &BusyPoll) -> io::Result<()> {
        let fd = self.fd.as_fd();
        sys::set_option(fd, IntOption::PreferBusyPoll, 1)?;
        // Any value but 0: the calls do not block, so each call polls exactly once.
        sys::set_option(fd, IntOption::BusyPoll, 20)?;
        sys::set_option(fd, IntOption::BusyPollBudget, u32::from(settings.budget))
    }

    /// True if this socket's system calls run the driver's receive path. Certain only after the
    /// first received packet.
    pub(super) fn can_poll_driver(&self) -> bool {
        sys::napi_id(self.fd.as_fd()) != 0
    }

    /// Runs the driver's receive path once, or announces new buffers in the fill ring. Copies no
    /// data.
    ///
    /// # Errors
    /// The interface is gone.
    pub(super) fn poll_driver(&self) -> io::Result<()> {
        let empty: &mut [u8] = &mut [];
        match rustix::net::recv(&self.fd, empty, RecvFlags::DONTWAIT) {
            Err(error @ (Errno::NXIO | Errno::NODEV | Errno::BADF)) => Err(error.into()),
            _ => Ok(()),
        }
    }

    /// Requests that the kernel send the frames in the TX ring.
    ///
    /// # Errors
    /// The interface is gone.
    pub(super) fn kick_transmit(&self) -> io::Result<Kick> {
        match rustix::net::send(&self.fd, &[], SendFlags::DONTWAIT) {
            Ok(_) => Ok(Kick::Done),
            Err(Errno::AGAIN | Errno::INTR) => Ok(Kick::Again),
            Err(Errno::BUSY) => Ok(Kick::Dropped),
            Err(error @ (Errno::NXIO | Errno::NODEV | Errno::BADF)) => Err(error.into()),
            Err(_) => Ok(Kick::Unavailable),
        }
    }

    /// Statistics that the kernel keeps for this socket.
    pub(super) fn statistics(&self) -> io::Result<XdpStatistics> {
        Ok(sockopt::xdp_statistics(&self.fd)?)
    }
}

impl AsFd for XdpSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
