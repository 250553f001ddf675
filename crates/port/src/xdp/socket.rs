//! One AF_XDP socket: one receive queue of the interface, with its four rings.

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

/// How often a bind is tried while the queue is busy: a socket that was just
/// closed lets go of its queue a moment later.
const BIND_ATTEMPTS: u32 = 20;
const BIND_PAUSE: Duration = Duration::from_millis(10);

/// What the kernel charges a socket for one packet in flight in copy mode, in
/// bytes, rounded up.
const SEND_BUFFER_BYTES_PER_PACKET: usize = 4096;

/// A bound socket with its rings.
pub(super) struct Socket {
    pub fill: Producer<u64>,
    pub completion: Consumer<u64>,
    pub receive: Consumer<Descriptor>,
    pub transmit: Producer<Descriptor>,
    fd: OwnedFd,
}

/// Where and how to bind.
#[derive(Clone, Copy)]
pub(super) struct Binding {
    pub interface_index: u32,
    pub queue: u32,
    pub zero_copy: bool,
}

/// What came of asking the kernel to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kick {
    /// It did all it could in one call.
    Done,
    /// There is more to do: call again.
    Again,
    /// It threw the first waiting packet away; call again for the rest.
    Refused,
    /// It cannot now: the link is down or memory is short.
    Stuck,
}

impl Socket {
    /// Makes a socket with rings and binds it. The first socket of a port
    /// registers the umem; later ones share it with `first`.
    pub(super) fn open(
        umem: &Umem,
        first: Option<&Socket>,
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
        socket.tune(rings);
        socket.bind(first, binding)?;
        Ok(socket)
    }

    /// Rings without a kernel behind them, for tests that play it.
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

    /// Lets one call send a whole ring. Both are improvements only: without
    /// them a call sends less, and [`Kick::Again`] asks for the next.
    fn tune(&self, rings: &RingSizes) {
        let _ = sys::set_option(self.fd.as_fd(), IntOption::TransmitBudget, rings.transmit);
        let bytes = rings.transmit as usize * SEND_BUFFER_BYTES_PER_PACKET;
        if sockopt::set_socket_send_buffer_size_force(&self.fd, bytes).is_err() {
            let _ = sockopt::set_socket_send_buffer_size(&self.fd, bytes);
        }
    }

    fn bind(&self, first: Option<&Socket>, binding: Binding) -> io::Result<()> {
        let mut attempt = 0;
        loop {
            match self.bind_once(first, binding) {
                Err(Errno::BUSY) if attempt < BIND_ATTEMPTS => {
                    attempt += 1;
                    std::thread::sleep(BIND_PAUSE);
                }
                result => return Ok(result?),
            }
        }
    }

    fn bind_once(&self, first: Option<&Socket>, binding: Binding) -> rustix::io::Result<()> {
        let Binding { interface_index, queue, zero_copy } = binding;
        // A socket that shares a umem takes over how the first was bound.
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
        let flags = copy | SocketAddrXdpFlags::XDP_USE_NEED_WAKEUP;
        rustix::net::bind(&self.fd, &SocketAddrXdp::new(flags, interface_index, queue))
    }

    /// Asks for preferred busy polling: the device's interrupts stay off while
    /// this socket polls.
    pub(super) fn prefer_busy_poll(&self, settings: &BusyPoll) -> io::Result<()> {
        let fd = self.fd.as_fd();
        sys::set_option(fd, IntOption::PreferBusyPoll, 1)?;
        // Any time but 0: our calls do not block, so each polls just once.
        sys::set_option(fd, IntOption::BusyPoll, 20)?;
        sys::set_option(fd, IntOption::BusyPollBudget, u32::from(settings.budget))
    }

    /// Whether this socket's calls run the device's receive path. Only certain
    /// once a packet arrived.
    pub(super) fn runs_device(&self) -> bool {
        sys::napi_id(self.fd.as_fd()) != 0
    }

    /// Runs the device's receive path once, or tells it that there are new
    /// buffers. No data is copied by this call.
    ///
    /// # Errors
    /// The interface is gone.
    pub(super) fn poll_device(&self) -> io::Result<()> {
        let nothing: &mut [u8] = &mut [];
        match rustix::net::recv(&self.fd, nothing, RecvFlags::DONTWAIT) {
            Err(error @ (Errno::NXIO | Errno::NODEV | Errno::BADF)) => Err(error.into()),
            _ => Ok(()),
        }
    }

    /// Asks the kernel to send what is in the transmit ring.
    ///
    /// # Errors
    /// The interface is gone.
    pub(super) fn kick_transmit(&self) -> io::Result<Kick> {
        match rustix::net::send(&self.fd, &[], SendFlags::DONTWAIT) {
            Ok(_) => Ok(Kick::Done),
            Err(Errno::AGAIN | Errno::INTR) => Ok(Kick::Again),
            Err(Errno::BUSY) => Ok(Kick::Refused),
            Err(error @ (Errno::NXIO | Errno::NODEV | Errno::BADF)) => Err(error.into()),
            Err(_) => Ok(Kick::Stuck),
        }
    }

    /// What the kernel counted for this socket.
    pub(super) fn statistics(&self) -> io::Result<XdpStatistics> {
        Ok(sockopt::xdp_statistics(&self.fd)?)
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
