//! The system calls of packet sockets (packet(7)), the mapped ring, and batches of messages.

use std::io;
use std::mem;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, Ordering};

use tidegate_memory::{Arena, Frame};
use tidegate_wire::Medium;

use super::filter::Instruction;
use crate::segments::MAX_MERGED_BYTES;
use crate::sys::interface_request;
use crate::vnet;

/// Maximum number of frames in one system call.
pub const BURST_FRAMES: usize = 64;

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// A packet socket.
pub struct Socket(OwnedFd);

/// Fanout flag that the `libc` crate does not have yet: the kernel chooses the group.
const PACKET_FANOUT_FLAG_UNIQUEID: libc::c_uint = 0x2000;

/// A protocol that no program uses: the first of IEEE 802 for local experiments. No protocol at all
/// would keep the current one.
const UNUSED_PROTOCOL: u16 = 0x88b5;

impl Socket {
    /// Opens a socket that receives nothing until it is bound.
    pub fn open() -> io::Result<Self> {
        let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // SAFETY: socket(2) takes no pointers.
        let fd = check(unsafe { libc::socket(libc::AF_PACKET, kind, 0) })?;
        // SAFETY: the descriptor is new and has no other owner.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    fn set_option<T>(&self, level: i32, option: i32, value: &T) -> io::Result<()> {
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

    /// Sets an integer option of packet(7).
    pub fn set_packet(&self, option: i32, value: i32) -> io::Result<()> {
        self.set_option(libc::SOL_PACKET, option, &value)
    }

    /// Requests socket buffers of `bytes` bytes; the system may limit them.
    pub fn set_buffers(&self, bytes: usize) -> io::Result<()> {
        let bytes = i32::try_from(bytes).unwrap_or(i32::MAX);
        for (force, plain) in
            [(libc::SO_RCVBUFFORCE, libc::SO_RCVBUF), (libc::SO_SNDBUFFORCE, libc::SO_SNDBUF)]
        {
            if self.set_option(libc::SOL_SOCKET, force, &bytes).is_err() {
                self.set_option(libc::SOL_SOCKET, plain, &bytes)?;
            }
        }
        Ok(())
    }

    /// Attaches a filter: the socket receives only frames that the filter accepts.
    pub fn attach_filter(&self, program: &[Instruction]) -> io::Result<()> {
        let mut code: Vec<_> = program
            .iter()
            .map(|i| libc::sock_filter { code: i.code, jt: i.if_true, jf: i.if_false, k: i.k })
            .collect();
        let filter =
            libc::sock_fprog { len: code.len() as libc::c_ushort, filter: code.as_mut_ptr() };
        self.set_option(libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, &filter)
    }

    /// Joins every link-layer multicast group of the interface, or turns on promiscuous mode,
    /// until the socket is closed.
    pub fn add_membership(&self, index: u32, kind: i32) -> io::Result<()> {
        let request = libc::packet_mreq {
            mr_ifindex: index as i32,
            mr_type: kind as libc::c_ushort,
            mr_alen: 0,
            mr_address: [0; 8],
        };
        self.set_option(libc::SOL_PACKET, libc::PACKET_ADD_MEMBERSHIP, &request)
    }

    /// Second descriptor of the socket.
    #[cfg(feature = "xdp")]
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self(self.0.try_clone()?))
    }

    /// Starts to receive every protocol from the interface.
    pub fn bind(&self, index: u32) -> io::Result<()> {
        self.bind_to(index, libc::ETH_P_ALL as u16)
    }

    /// Stops receiving. Frames that have arrived stay readable. Waits until no processor hands a
    /// frame to the socket.
    pub fn unbind(&self, index: u32) -> io::Result<()> {
        self.bind_to(index, UNUSED_PROTOCOL)
    }

    fn bind_to(&self, index: u32, protocol: u16) -> io::Result<()> {
        // SAFETY: all zero is a valid `sockaddr_ll`.
        let mut address: libc::sockaddr_ll = unsafe { mem::zeroed() };
        address.sll_family = libc::AF_PACKET as libc::c_ushort;
        address.sll_protocol = protocol.to_be();
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

    /// Returns true while the interface that the socket is bound to exists.
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

    /// True if the interface of this name is up (`IFF_UP`).
    pub fn is_up(&self, interface: &str) -> io::Result<bool> {
        let mut request = interface_request(interface);
        // SAFETY: SIOCGIFFLAGS reads and writes one `ifreq`, which is live.
        check(unsafe { libc::ioctl(self.0.as_raw_fd(), libc::SIOCGIFFLAGS, &mut request) })?;
        // SAFETY: SIOCGIFFLAGS has set the flags.
        let flags = unsafe { request.ifr_ifru.ifru_flags };
        Ok(libc::c_int::from(flags) & libc::IFF_UP != 0)
    }

    /// Frames that the kernel dropped since the last call, because the ring or the socket buffer
    /// was full.
    pub fn take_drops(&self) -> io::Result<u64> {
        self.take_statistics().map(|(_, dropped)| dropped)
    }

    /// Frames that the filter has accepted since the last call, and those of them that the kernel
    /// dropped.
    pub fn take_statistics(&self) -> io::Result<(u64, u64)> {
        // SAFETY: all zero is a valid `tpacket_stats_v3`.
        let mut stats: libc::tpacket_stats_v3 = unsafe { mem::zeroed() };
        // Sockets without a V3 ring fill the first two of its fields.
        self.read_packet(libc::PACKET_STATISTICS, &mut stats)?;
        Ok((u64::from(stats.tp_packets), u64::from(stats.tp_drops)))
    }

    /// Joins a fanout group that distributes flows by hash: this group, or a new one. Returns the
    /// group.
    pub fn join_fanout(&self, group: Option<u16>) -> io::Result<u16> {
        let kind = match group {
            Some(_) => libc::PACKET_FANOUT_HASH,
            None => libc::PACKET_FANOUT_HASH | PACKET_FANOUT_FLAG_UNIQUEID,
        };
        let value = i32::from(group.unwrap_or(0)) | (kind as i32) << 16;
        self.set_packet(libc::PACKET_FANOUT, value)?;
        let mut joined = 0_u32;
        self.read_packet(libc::PACKET_FANOUT, &mut joined)?;
        Ok(joined as u16)
    }

    /// Reads an option of packet(7).
    fn read_packet<T>(&self, option: i32, value: &mut T) -> io::Result<()> {
        let mut len = size_of::<T>() as libc::socklen_t;
        // SAFETY: the kernel writes at most `len` bytes into the live value; every caller passes a
        // type that the option asks for, and for which any bytes are valid.
        check(unsafe {
            libc::getsockopt(
                self.0.as_raw_fd(),
                libc::SOL_PACKET,
                option,
                ptr::from_mut(value).cast(),
                &mut len,
            )
        })?;
        Ok(())
    }

    /// Creates a TPACKET_V3 receive ring and maps it. `block_bytes` is a power of two and at least
    /// a page.
    pub fn map_ring(&self, block_bytes: usize, blocks: usize, timeout_ms: u32) -> io::Result<Ring> {
        self.set_packet(libc::PACKET_VERSION, libc::tpacket_versions::TPACKET_V3 as i32)?;
        // V3 does not use the frame size, but the frame size has to divide the block.
        let request = libc::tpacket_req3 {
            tp_block_size: block_bytes as u32,
            tp_block_nr: blocks as u32,
            tp_frame_size: block_bytes as u32,
            tp_frame_nr: blocks as u32,
            tp_retire_blk_tov: timeout_ms,
            tp_sizeof_priv: 0,
            tp_feature_req_word: 0,
        };
        self.set_option(libc::SOL_PACKET, libc::PACKET_RX_RING, &request)?;
        let len = block_bytes * blocks;
        // SAFETY: a new shared mapping at an address that the kernel chooses aliases no memory of
        // this process.
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
        let base =
            NonNull::new(base.cast()).ok_or_else(|| io::Error::other("mmap returned null"))?;
        Ok(Ring { base, block_bytes, blocks, current: 0 })
    }

    /// Pending error of the socket, if any; reading clears the error.
    pub fn take_error(&self) -> io::Result<Option<io::Error>> {
        Ok(rustix::net::sockopt::socket_error(&self.0)?.err().map(io::Error::from))
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A mapped TPACKET_V3 receive ring: blocks that user space and the kernel own in turn.
pub struct Ring {
    base: NonNull<u8>,
    block_bytes: usize,
    blocks: usize,
    current: usize,
}

// SAFETY: the mapping belongs to this value alone; nothing in it is tied to a
// thread.
unsafe impl Send for Ring {}

/// Offset of `block_status` in `struct tpacket_block_desc`.
const STATUS_OFFSET: usize = 8;

impl Ring {
    fn status(&self) -> &AtomicU32 {
        let offset = self.current * self.block_bytes + STATUS_OFFSET;
        // SAFETY: `current` is below `blocks`, so the word is inside the
        // mapping; blocks begin on a page, so it is aligned. Both sides access
        // it atomically while a block changes hands.
        unsafe { AtomicU32::from_ptr(self.base.as_ptr().add(offset).cast()) }
    }

    /// Returns true when the kernel has handed over the current block.
    #[inline]
    pub fn is_ready(&self) -> bool {
        // Acquire: what the kernel wrote before the status is seen after it.
        self.status().load(Ordering::Acquire) & libc::TP_STATUS_USER != 0
    }

    /// The current block; `None` while the kernel owns the block.
    #[inline]
    pub fn block(&self) -> Option<&[u8]> {
        if !self.is_ready() {
            return None;
        }
        // SAFETY: the block is inside the mapping, which lives as long as `self`. The kernel does
        // not write to a block that was handed over until `release` returns the block, which needs
        // `&mut self`.
        Some(unsafe {
            std::slice::from_raw_parts(
                self.base.as_ptr().add(self.current * self.block_bytes),
                self.block_bytes,
            )
        })
    }

    /// Returns the current block to the kernel and advances to the next.
    #[inline]
    pub fn release(&mut self) {
        // Release: the reads of the block are done before the kernel sees the status.
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

/// Metadata of a frame that the kernel wrote into a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReceivedFrame {
    /// Bytes of the frame, without the virtio header.
    pub len: usize,
    /// True when the frame was longer than the buffer and the overflow buffer together.
    pub truncated: bool,
    /// The virtio header.
    pub vnet: vnet::RawHeader,
    /// VLAN tag that the kernel removed: protocol and tag control information.
    pub vlan: Option<(u16, u16)>,
}

/// Buffer for the only control message that packet sockets send: 16 bytes of `cmsghdr` and 20
/// of `tpacket_auxdata`, aligned.
type ControlBuffer = [u64; 6];

/// Message headers for a batch, reused so that no call allocates.
pub struct Batch {
    messages: Box<[libc::mmsghdr]>,
    vectors: Box<[[libc::iovec; 3]]>,
    vnet: Box<[vnet::RawHeader]>,
    control: Box<[ControlBuffer]>,
    /// [`MAX_MERGED_BYTES`] for each message: the rest of a received frame that is longer than its
    /// buffer. The kernel provides the memory when the first such frame is received.
    overflow: Box<[u8]>,
}

// SAFETY: the pointers in the headers are set anew in every call and read only during the call;
// nothing is tied to a thread.
unsafe impl Send for Batch {}

impl Batch {
    pub fn new() -> Self {
        let empty = libc::iovec { iov_base: ptr::null_mut(), iov_len: 0 };
        // SAFETY: all zero is a valid `mmsghdr`: no buffers.
        let message = unsafe { mem::zeroed::<libc::mmsghdr>() };
        Self {
            messages: vec![message; BURST_FRAMES].into(),
            vectors: vec![[empty; 3]; BURST_FRAMES].into(),
            vnet: vec![[0; vnet::HEADER_BYTES]; BURST_FRAMES].into(),
            control: vec![[0; 6]; BURST_FRAMES].into(),
            overflow: vec![0; BURST_FRAMES * MAX_MERGED_BYTES].into(),
        }
    }

    /// Points message `at` to a virtio header and the data of a frame, and to receive also to the
    /// overflow and control buffers.
    fn set_message(&mut self, at: usize, arena: &mut Arena, frame: &mut Frame, receives: bool) {
        let vector = |bytes: &mut [u8]| libc::iovec {
            iov_base: bytes.as_mut_ptr().cast(),
            iov_len: bytes.len(),
        };
        let overflow = &mut self.overflow[at * MAX_MERGED_BYTES..][..MAX_MERGED_BYTES];
        self.vectors[at] =
            [vector(&mut self.vnet[at]), vector(arena.bytes_mut(frame)), vector(overflow)];
        let header = &mut self.messages[at].msg_hdr;
        header.msg_iov = self.vectors[at].as_mut_ptr();
        header.msg_iovlen = if receives { 3 } else { 2 };
        header.msg_flags = 0;
        if receives {
            header.msg_control = self.control[at].as_mut_ptr().cast();
            header.msg_controllen = size_of::<ControlBuffer>();
        } else {
            header.msg_control = ptr::null_mut();
            header.msg_controllen = 0;
        }
    }

    /// Receives into up to [`BURST_FRAMES`] of the frames, each at its full length, and returns
    /// the number of frames filled; [`Batch::received_frame`] has the metadata of each.
    pub fn receive(
        &mut self,
        socket: &Socket,
        arena: &mut Arena,
        frames: &mut [Frame],
    ) -> io::Result<usize> {
        let count = frames.len().min(BURST_FRAMES);
        for (at, frame) in frames.iter_mut().take(count).enumerate() {
            self.set_message(at, arena, frame, true);
        }
        // SAFETY: every header points to live buffers of the lengths given: distinct frames of an
        // arena that is borrowed until this call returns, and elements of `self`.
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

    /// Metadata of frame `at` of the last [`Batch::receive`].
    pub fn received_frame(&self, at: usize) -> ReceivedFrame {
        let message = &self.messages[at];
        ReceivedFrame {
            len: (message.msg_len as usize).saturating_sub(vnet::HEADER_BYTES),
            truncated: message.msg_hdr.msg_flags & libc::MSG_TRUNC != 0,
            vnet: self.vnet[at],
            vlan: parse_vlan_tag(&self.control[at], message.msg_hdr.msg_controllen),
        }
    }

    /// The last `bytes` bytes of frame `at`, which did not fit into the frame's buffer.
    pub fn overflow(&self, at: usize, bytes: usize) -> &[u8] {
        &self.overflow[at * MAX_MERGED_BYTES..][..bytes.min(MAX_MERGED_BYTES)]
    }

    /// Sends up to [`BURST_FRAMES`] frames and returns the number that the kernel took.
    pub fn send<'f>(
        &mut self,
        socket: &Socket,
        arena: &mut Arena,
        frames: impl Iterator<Item = &'f mut Frame>,
    ) -> io::Result<usize> {
        let mut count = 0;
        for (at, frame) in frames.take(BURST_FRAMES).enumerate() {
            self.vnet[at] = vnet::encode(Medium::Ethernet, frame, arena.bytes(frame));
            self.set_message(at, arena, frame, false);
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

/// Parses the VLAN tag in a `PACKET_AUXDATA` control message.
fn parse_vlan_tag(control: &ControlBuffer, len: usize) -> Option<(u16, u16)> {
    // `cmsghdr` is length (8 bytes), level and type (4 each); `tpacket_auxdata`
    // begins with status, len and snaplen (4 each), mac and net (2 each), then
    // tag control and tag protocol (2 each).
    let mut bytes = [0; size_of::<ControlBuffer>()];
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
    fn parses_vlan_tag_only_when_present() {
        // SAFETY: all zero is a valid `tpacket_auxdata`.
        let mut aux: libc::tpacket_auxdata = unsafe { mem::zeroed() };
        aux.tp_status = libc::TP_STATUS_VLAN_VALID | libc::TP_STATUS_VLAN_TPID_VALID;
        (aux.tp_vlan_tci, aux.tp_vlan_tpid) = (0x2005, 0x88a8);
        let mut control: ControlBuffer = [0; 6];
        control[0] = 36;
        let kind = [libc::SOL_PACKET as u32, libc::PACKET_AUXDATA as u32].map(u32::to_ne_bytes);
        control[1] = u64::from_ne_bytes([kind[0], kind[1]].concat().try_into().unwrap());
        // SAFETY: both are plain data, and 16 + 20 bytes fit in 48.
        unsafe {
            let to = control.as_mut_ptr().cast::<u8>().add(16);
            ptr::copy_nonoverlapping(ptr::from_ref(&aux).cast(), to, size_of_val(&aux));
        }
        assert_eq!(parse_vlan_tag(&control, 36), Some((0x88a8, 0x2005)));
        assert_eq!(parse_vlan_tag(&control, 20), None, "truncated");
        assert_eq!(parse_vlan_tag(&[0; 6], 48), None, "not an auxdata message");
    }
}
