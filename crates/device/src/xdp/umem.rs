//! Arena memory as registered with the kernel: a umem whose chunks are the arena's frames.

use std::io;
use std::os::fd::BorrowedFd;

use rustix::net::sockopt;
use rustix::net::xdp::{XdpUmemReg, XdpUmemRegFlags};
use tidegate_memory::Arena;

use crate::buffer::LINK_HEADER_BYTES;

/// `XDP_PACKET_HEADROOM`: offset in bytes at which the kernel writes a received frame into
/// its chunk, before any headroom configured on top.
const KERNEL_HEADROOM_BYTES: usize = 256;

/// Memory of an arena, ready for registration. The memory must outlive the sockets that it is
/// registered with; [`super::XdpDevice`] requires this of its caller.
#[derive(Clone, Copy)]
pub(super) struct Umem {
    address: u64,
    len_bytes: u64,
    chunk_bytes: u32,
}

impl Umem {
    pub(super) fn from_arena(arena: &Arena) -> Self {
        let (base, len) = arena.region();
        Self {
            address: base.as_ptr() as u64,
            len_bytes: len as u64,
            chunk_bytes: arena.frame_bytes() as u32,
        }
    }

    /// Size of the memory in bytes.
    pub(super) fn len(&self) -> usize {
        self.len_bytes as usize
    }

    /// Largest MTU whose frames fit in a chunk, in bytes.
    pub(super) fn max_mtu(&self) -> u32 {
        self.chunk_bytes - (KERNEL_HEADROOM_BYTES + LINK_HEADER_BYTES) as u32
    }

    /// Registers the memory with a new socket.
    pub(super) fn register(&self, socket: BorrowedFd<'_>) -> io::Result<()> {
        let registration = XdpUmemReg {
            addr: self.address,
            len: self.len_bytes,
            chunk_size: self.chunk_bytes,
            headroom: 0,
            flags: XdpUmemRegFlags::empty(),
            tx_metadata_len: 0,
        };
        Ok(sockopt::set_xdp_umem_reg(socket, registration)?)
    }
}
