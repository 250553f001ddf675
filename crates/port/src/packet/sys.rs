//! The system calls of packet sockets (packet(7)), the mapped ring, and
//! bursts of messages.

use std::io;
use std::mem;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, Ordering};

use tidegate_memory::{Arena, Frame};
use tidegate_wire::Medium;

use super::filter::Instruction;
use crate::vnet;

/// The most frames that go through one system call.
pub const BURST: usize = 64;

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// A packet socket.
pub struct Socket(OwnedFd);

impl Socket {
    /// Opens a socket that receives nothing until it is bound.
    pub fn open() -> io::Result<Self> {
        let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // SAFETY: socket(2) takes no pointers.
        let fd = check(unsafe { libc::socket(libc::AF_PACKET, kind, 0) })?;
        // SAFETY: the descriptor is new and belongs to nobody else.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    fn set<T>(&self, level: i32, option: i32, value: &T) -> io::Result<()> {
        // SAFETY: the pointer and length are of a live value, which the kernel
        // only reads; every caller passes the type that the option asks for.
        check(unsafe {
            libc::setsockopt(
                self.0.as_raw_fd(),
                level,
                option,
                ptr::from_ref(value).cast(),
                size_of::<T>() as libc::socklen_t,
            )
        })?;
        Ok(())
    }

    /// Sets an option of packet(7) that is a number.
    pub fn set_packet(&self, option: i32, value: i32) -> io::Result<()> {
        self.set(libc::SOL_PACKET, option, &value)
    }

    /// Asks for socket buffers of `bytes`; gets what the system allows.
    pub fn set_buffers(&self, bytes: usize) -> io::Result<()> {
        let bytes = i32::try_from(bytes).unwrap_or(i32::MAX);
        for (force, plain) in
            [(libc::SO_RCVBUFFORCE, libc::SO_RCVBUF), (libc::SO_SNDBUFFORCE, libc::SO_SNDBUF)]
        {
            if self.set(libc::SOL_SOCKET, force, &bytes).is_err() {
                self.set(libc::SOL_SOCKET, plain, &bytes)?;
            }
        }
        Ok(())
    }

    /// Lets only frames through that the filter accepts.
    pub fn attach_filter(&self, program: &[Instruction]) -> io::Result<()> {
        let mut code: Vec<_> = program
            .iter()
            .map(|i| libc::sock_filter { code: i.code, jt: i.if_true, jf: i.if_false, k: i.k })
            .collect();
        let filter =
            libc::sock_fprog { len: code.len() as libc::c_ushort, filter: code.as_mut_ptr() };
        self.set(libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, &filter)
    }

    /// Joins every link-layer group of the interface, or takes frames for
    /// every station. Ends with the socket.
    pub fn join(&self, index: u32, kind: i32) -> io::Result<()> {
        let request = libc::packet_mreq {
            mr_ifindex: index as i32,
            mr_type: kind as libc::c_ushort,
            mr_alen: 0,
            mr_address: [0; 8],
        };
        self.set(libc::SOL_PACKET, libc::PACKET_ADD_MEMBERSHIP, &request)
    }

    /// Begins to receive every protocol from the interface.
    pub fn bind(&self, index: u32) -> io::Result<()> {
        // SAFETY: all zero is a valid `sockaddr_ll`.
        let mut address: libc::sockaddr_ll = unsafe { mem::zeroed() };
        address.sll_family = libc::AF_PACKET as libc::c_ushort;
        address.sll_protocol = (libc::ETH_P_ALL as u16).to_be();
        address.sll_ifindex = index as i32;
        // SAFETY: the address is live and of the length given.
        check(unsafe {
            libc::bind(
                self.0.as_raw_fd(),
                ptr::from_ref(&address).cast(),
                size_of::<libc::sockaddr_ll>() as libc::socklen_t,
            )
        })?;
        Ok(())
    }

    /// Whether the interface that the socket is bound to still exists.
    pub fn is_bound(&self) -> io::Result<bool> {
        // SAFETY: all zero is a valid `sockaddr_ll`.
        let mut address: libc::sockaddr_ll = unsafe { mem::zeroed() };
        let mut len = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
        // SAFETY: the kernel writes at most `len` bytes into the live value.
        check(unsafe {
            libc::getsockname(self.0.as_raw_fd(), ptr::from_mut(&mut address).cast(), &mut len)
        })?;
        // The kernel sets -1 when the interface goes away.
        Ok(address.sll_ifindex > 0)
    }

    /// Frames that the kernel dropped since the last call, because the ring or
    /// the socket's buffer was full.
    pub fn take_drops(&self) -> io::Result<u64> {
        // SAFETY: all zero is a valid `tpacket_stats_v3`.
        let mut stats: libc::tpacket_stats_v3 = unsafe { mem::zeroed() };
        let mut len = size_of::<libc::tpacket_stats_v3>() as libc::socklen_t;
        // SAFETY: the kernel writes at most `len` bytes into the live value;
        // sockets without a V3 ring fill the first two of its fields.
        check(unsafe {
            libc::getsockopt(
                self.0.as_raw_fd(),
                libc::SOL_PACKET,
                libc::PACKET_STATISTICS,
                ptr::from_mut(&mut stats).cast(),
                &mut len,
            )
        })?;
        Ok(u64::from(stats.tp_drops))
    }

    /// Makes a TPACKET_V3 receive ring and maps it. `block_bytes` is a power of
    /// two of at least a page.
    pub fn map_ring(&self, block_bytes: usize, blocks: usize, timeout_ms: u32) -> io::Result<Ring> {
        self.set_packet(libc::PACKET_VERSION, libc::tpacket_versions::TPACKET_V3 as i32)?;
        // The frame size has no meaning for V3 but has to divide the block.
        let request = libc::tpacket_req3 {
            tp_block_size: block_bytes as u32,
            tp_block_nr: blocks as u32,
            tp_frame_size: block_bytes as u32,
            tp_frame_nr: blocks as u32,
            tp_retire_blk_tov: timeout_ms,
            tp_sizeof_priv: 0,
            tp_feature_req_word: 0,
        };
        self.set(libc::SOL_PACKET, libc::PACKET_RX_RING, &request)?;
        let len = block_bytes * blocks;
        // SAFETY: a new shared mapping at an address of the kernel's choice
        // aliases nothing of ours.
        let base = unsafe {
            libc::mmap(
                ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                self.0.as_raw_fd(),
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(base.cast()).ok_or_else(|| io::Error::other("mmap gave null"))?;
        Ok(Ring { base, block_bytes, blocks, current: 0 })
    }

    /// The error that waits on the socket, if there is one; reading clears it.
    pub fn take_error(&self) -> io::Result<Option<io::Error>> {
        Ok(rustix::net::sockopt::socket_error(&self.0)?.err().map(io::Error::from))
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A mapped TPACKET_V3 receive ring: blocks that are ours or the kernel's, in
/// turn.
pub struct Ring {
    base: NonNull<u8>,
    block_bytes: usize,
    blocks: usize,
    current: usize,
}

// SAFETY: the mapping belongs to this value alone; nothing in it is tied to a
// thread.
unsafe impl Send for Ring {}

/// Where `block_status` is in `struct tpacket_block_desc`.
const STATUS_OFFSET: usize = 8;

impl Ring {
    fn status(&self) -> &AtomicU32 {
        let offset = self.current * self.block_bytes + STATUS_OFFSET;
        // SAFETY: `current` is below `blocks`, so the word is inside the
        // mapping; blocks begin on a page, so it is aligned. Both sides access
        // it atomically while a block changes hands.
        unsafe { AtomicU32::from_ptr(self.base.as_ptr().add(offset).cast()) }
    }

    /// Whether the kernel has handed over the current block.
    #[inline]
    pub fn is_ready(&self) -> bool {
        // Acquire: what the kernel wrote before the status is seen after it.
        self.status().load(Ordering::Acquire) & libc::TP_STATUS_USER != 0
    }

    /// The current block; `None` while it is the kernel's.
    #[inline]
    pub fn block(&self) -> Option<&[u8]> {
        if !self.is_ready() {
            return None;
        }
        // SAFETY: the block is inside the mapping, which lives as long as
        // `self`. The kernel does not write to a block that it handed over
        // until `release` gives it back, which needs `&mut self`.
        Some(unsafe {
            std::slice::from_raw_parts(
                self.base.as_ptr().add(self.current * self.block_bytes),
                self.block_bytes,
            )
        })
    }

    /// Gives the current block back to the kernel and goes on to the next.
    #[inline]
    pub fn release(&mut self) {
        // Release: our reads are over before the kernel sees the status.
        self.status().store(libc::TP_STATUS_KERNEL, Ordering::Release);
        self.current = (self.current + 1) % self.blocks;
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by `map_ring`, and no slice into it can
        // outlive `self`. Nothing can be done about a failure.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.block_bytes * self.blocks) };
    }
}

/// What the kernel said about a frame that it put into a buffer of ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// Bytes of the frame, the virtio header not counted.
    pub len: usize,
    /// The frame was longer than the buffer.
    pub truncated: bool,
    /// The virtio header.
    pub vnet: vnet::Raw,
    /// The VLAN tag that the kernel took out: protocol and tag control.
    pub vlan: Option<(u16, u16)>,
}

/// Room for the one control message that packet sockets send: 16 bytes of
/// `cmsghdr` and 20 of `tpacket_auxdata`, aligned.
type Control = [u64; 6];

/// Message headers for a burst, kept so that no call allocates.
pub struct Batch {
    messages: Box<[libc::mmsghdr]>,
    vectors: Box<[[libc::iovec; 2]]>,
    vnet: Box<[vnet::Raw]>,
    control: Box<[Control]>,
}

// SAFETY: the pointers in the headers are set anew in every call and read only
// during it; nothing is tied to a thread.
unsafe impl Send for Batch {}

impl Batch {
    pub fn new() -> Self {
        let empty = libc::iovec { iov_base: ptr::null_mut(), iov_len: 0 };
        // SAFETY: all zero is a valid `mmsghdr`: no buffers.
        let message = unsafe { mem::zeroed::<libc::mmsghdr>() };
        Self {
            messages: vec![message; BURST].into(),
            vectors: vec![[empty; 2]; BURST].into(),
            vnet: vec![[0; vnet::BYTES]; BURST].into(),
            control: vec![[0; 6]; BURST].into(),
        }
    }

    /// Points message `at` to a virtio header and the data of a frame.
    fn aim(&mut self, at: usize, arena: &mut Arena, frame: &mut Frame, control: bool) {
        let data = arena.bytes_mut(frame);
        self.vectors[at] = [
            libc::iovec { iov_base: self.vnet[at].as_mut_ptr().cast(), iov_len: vnet::BYTES },
            libc::iovec { iov_base: data.as_mut_ptr().cast(), iov_len: data.len() },
        ];
        let header = &mut self.messages[at].msg_hdr;
        header.msg_iov = self.vectors[at].as_mut_ptr();
        header.msg_iovlen = 2;
        header.msg_flags = 0;
        if control {
            header.msg_control = self.control[at].as_mut_ptr().cast();
            header.msg_controllen = size_of::<Control>();
        } else {
            header.msg_control = ptr::null_mut();
            header.msg_controllen = 0;
        }
    }

    /// Receives into up to [`BURST`] of the frames, each at its whole length,
    /// and returns how many were filled; [`Batch::arrival`] tells about each.
    pub fn receive(
        &mut self,
        socket: &Socket,
        arena: &mut Arena,
        frames: &mut [Frame],
    ) -> io::Result<usize> {
        let count = frames.len().min(BURST);
        for (at, frame) in frames.iter_mut().take(count).enumerate() {
            self.aim(at, arena, frame, true);
        }
        // SAFETY: every header points to live buffers of the lengths given:
        // different frames of an arena that is borrowed until we return, and
        // slots of our own.
        let received = check(unsafe {
            libc::recvmmsg(
                socket.0.as_raw_fd(),
                self.messages.as_mut_ptr(),
                count as libc::c_uint,
                libc::MSG_DONTWAIT as _,
                ptr::null_mut(),
            )
        })?;
        Ok(received as usize)
    }

    /// What arrived in frame `at` of the last [`Batch::receive`].
    pub fn arrival(&self, at: usize) -> Arrival {
        let message = &self.messages[at];
        Arrival {
            len: (message.msg_len as usize).saturating_sub(vnet::BYTES),
            truncated: message.msg_hdr.msg_flags & libc::MSG_TRUNC != 0,
            vnet: self.vnet[at],
            vlan: vlan_of(&self.control[at], message.msg_hdr.msg_controllen),
        }
    }

    /// Sends up to [`BURST`] frames and returns how many the kernel took.
    pub fn send<'f>(
        &mut self,
        socket: &Socket,
        arena: &mut Arena,
        frames: impl Iterator<Item = &'f mut Frame>,
    ) -> io::Result<usize> {
        let mut count = 0;
        for (at, frame) in frames.take(BURST).enumerate() {
            self.vnet[at] = vnet::encode(Medium::Ethernet, frame, arena.bytes(frame));
            self.aim(at, arena, frame, false);
            count += 1;
        }
        // SAFETY: as in `receive`; the kernel only reads the buffers.
        let sent = check(unsafe {
            libc::sendmmsg(
                socket.0.as_raw_fd(),
                self.messages.as_mut_ptr(),
                count,
                libc::MSG_DONTWAIT as _,
            )
        })?;
        Ok(sent as usize)
    }
}

/// Reads the tag out of a `PACKET_AUXDATA` control message.
fn vlan_of(control: &Control, len: usize) -> Option<(u16, u16)> {
    // `cmsghdr` is length (8 bytes), level and type (4 each); `tpacket_auxdata`
    // begins with status, len and snaplen (4 each), mac and net (2 each), then
    // tag control and tag protocol (2 each).
    let mut bytes = [0; size_of::<Control>()];
    for (to, word) in bytes.chunks_exact_mut(8).zip(control) {
        to.copy_from_slice(&word.to_ne_bytes());
    }
    let word = |at: usize| u32::from_ne_bytes([0, 1, 2, 3].map(|i| bytes[at + i]));
    let half = |at: usize| u16::from_ne_bytes([0, 1].map(|i| bytes[at + i]));
    let whole = len >= 16 + 20
        && word(8) == libc::SOL_PACKET as u32
        && word(12) == libc::PACKET_AUXDATA as u32;
    if !whole || word(16) & libc::TP_STATUS_VLAN_VALID == 0 {
        return None;
    }
    let protocol = if word(16) & libc::TP_STATUS_VLAN_TPID_VALID != 0 { half(34) } else { 0x8100 };
    Some((protocol, half(32)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tag_is_read_from_the_control_message_only_when_it_is_there() {
        // SAFETY: all zero is a valid `tpacket_auxdata`.
        let mut aux: libc::tpacket_auxdata = unsafe { mem::zeroed() };
        aux.tp_status = libc::TP_STATUS_VLAN_VALID | libc::TP_STATUS_VLAN_TPID_VALID;
        (aux.tp_vlan_tci, aux.tp_vlan_tpid) = (0x2005, 0x88a8);
        let mut control: Control = [0; 6];
        control[0] = 36;
        let kind = [libc::SOL_PACKET as u32, libc::PACKET_AUXDATA as u32].map(u32::to_ne_bytes);
        control[1] = u64::from_ne_bytes([kind[0], kind[1]].concat().try_into().unwrap());
        // SAFETY: both are plain data, and 16 + 20 bytes fit in 48.
        unsafe {
            let to = control.as_mut_ptr().cast::<u8>().add(16);
            ptr::copy_nonoverlapping(ptr::from_ref(&aux).cast(), to, size_of_val(&aux));
        }
        assert_eq!(vlan_of(&control, 36), Some((0x88a8, 0x2005)));
        assert_eq!(vlan_of(&control, 20), None, "cut short");
        assert_eq!(vlan_of(&[0; 6], 48), None, "not an auxdata message");
    }
}
