//! Raw system calls and shared memory. The only file of this module with `unsafe` code.

use std::io;
use std::mem::{size_of, transmute, zeroed};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU32;

use io_uring::{IoUring, Parameters, opcode, squeue, types};
use rustix::mm::{MapFlags, ProtFlags};
use rustix::net::xdp::XdpRingOffset;

use crate::sys::interface_request;

/// `XDP_MAX_TX_SKB_BUDGET` of `linux/if_xdp.h`, since Linux 6.17.
const XDP_MAX_TX_SKB_BUDGET: libc::c_int = 9;
/// `BPF_PROG_TEST_RUN` of `linux/bpf.h`.
const BPF_PROG_TEST_RUN: libc::c_int = 10;
/// `BPF_LINK_CREATE` of `linux/bpf.h`.
const BPF_LINK_CREATE: libc::c_int = 28;
/// `BPF_LINK_UPDATE` of `linux/bpf.h`.
const BPF_LINK_UPDATE: libc::c_int = 29;
#[cfg(feature = "packet")]
const BPF_LINK_DETACH: libc::c_int = 34;
/// `BPF_XDP` of `enum bpf_attach_type` in `linux/bpf.h`.
const BPF_XDP: u32 = 37;
/// `SIOCETHTOOL` of `linux/sockios.h`.
const SIOCETHTOOL: libc::c_ulong = 0x8946;
/// `ETHTOOL_GCHANNELS` of `linux/ethtool.h`.
const ETHTOOL_GCHANNELS: u32 = 0x3c;

/// Ring entry: plain bytes, any value of which is a valid `Entry`.
///
/// # Safety
/// Only for types without padding, references or invalid bit patterns.
pub(super) unsafe trait Entry: Copy {}

// SAFETY: an integer.
unsafe impl Entry for u64 {}

/// Descriptor of the RX and TX rings (`struct xdp_desc`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(super) struct Descriptor {
    /// Byte offset from the start of the umem.
    pub address: u64,
    /// Length of the data in bytes.
    pub len: u32,
    /// `XDP_PKT_CONTD` and other flags; 0 for a packet in one descriptor.
    pub options: u32,
}

// SAFETY: integers, 8 + 4 + 4 bytes without padding.
unsafe impl Entry for Descriptor {}

/// Memory of one ring, shared with the kernel.
pub(super) struct RingMemory<T> {
    base: NonNull<u8>,
    bytes: usize,
    producer: NonNull<AtomicU32>,
    consumer: NonNull<AtomicU32>,
    flags: NonNull<AtomicU32>,
    entries: NonNull<T>,
    size: u32,
}

// SAFETY: the mapping belongs to this value alone and is not tied to a thread.
unsafe impl<T: Send> Send for RingMemory<T> {}

impl Descriptor {
    /// `XDP_PKT_CONTD`: the packet continues in the next descriptor.
    pub(super) const CONTINUES: u32 = 1;
}

impl<T: Entry> RingMemory<T> {
    /// Maps the ring of `socket` at `page_offset`, with `size` entries (a power of two).
    pub(super) fn map(
        socket: BorrowedFd<'_>,
        page_offset: u64,
        offsets: &XdpRingOffset,
        size: u32,
    ) -> io::Result<Self> {
        let flags = offsets.flags.ok_or_else(|| io::Error::from(io::ErrorKind::Unsupported))?;
        let bytes = offsets.desc as usize + size as usize * size_of::<T>();
        // SAFETY: a new mapping at an address chosen by the kernel aliases nothing.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::POPULATE,
                socket,
                page_offset,
            )?
        };
        let base =
            NonNull::new(base.cast()).ok_or_else(|| io::Error::other("mmap returned null"))?;
        Self::from_mapping(
            base,
            bytes,
            [offsets.producer, offsets.consumer, flags, offsets.desc],
            size,
        )
    }

    /// Ring in private memory, for tests that simulate the kernel.
    #[cfg(test)]
    pub(super) fn private(size: u32) -> Self {
        let bytes = 192 + size as usize * size_of::<T>();
        // SAFETY: as in `map`.
        let base = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )
        }
        .unwrap();
        Self::from_mapping(NonNull::new(base.cast()).unwrap(), bytes, [0, 64, 128, 192], size)
            .unwrap()
    }

    fn from_mapping(
        base: NonNull<u8>,
        bytes: usize,
        offsets: [u64; 4],
        size: u32,
    ) -> io::Result<Self> {
        let fits = offsets[..3].iter().all(|&o| o.is_multiple_of(4) && o as usize + 4 <= bytes)
            && offsets[3].is_multiple_of(8)
            && size.is_power_of_two();
        let at = |offset: u64| {
            // SAFETY: only used below, after `fits` showed the offset to be inside the mapping of
            // `bytes` bytes.
            unsafe { base.add(offset as usize) }
        };
        if !fits {
            // SAFETY: mapped by the caller with this length, not used after.
            let _ = unsafe { rustix::mm::munmap(base.as_ptr().cast(), bytes) };
            return Err(io::Error::other("the kernel reported an unsupported ring layout"));
        }
        Ok(Self {
            base,
            bytes,
            producer: at(offsets[0]).cast(),
            consumer: at(offsets[1]).cast(),
            flags: at(offsets[2]).cast(),
            entries: at(offsets[3]).cast(),
            size,
        })
    }

    /// Number of entries, a power of two.
    pub(super) fn size(&self) -> u32 {
        self.size
    }

    /// Index that the producer writes.
    #[inline]
    pub(super) fn producer(&self) -> &AtomicU32 {
        // SAFETY: inside the mapping and aligned (`from_mapping`); both sides access the index
        // only atomically.
        unsafe { self.producer.as_ref() }
    }

    /// Index that the consumer writes.
    #[inline]
    pub(super) fn consumer(&self) -> &AtomicU32 {
        // SAFETY: as for `producer`.
        unsafe { self.consumer.as_ref() }
    }

    /// Flags that the kernel writes.
    #[inline]
    pub(super) fn flags(&self) -> &AtomicU32 {
        // SAFETY: as for `producer`.
        unsafe { self.flags.as_ref() }
    }

    /// Reads the entry at `index` modulo the size.
    #[inline]
    pub(super) fn read(&self, index: u32) -> T {
        // SAFETY: the masked index is inside the ring. The kernel may write
        // the entry at the same time only if it breaks the protocol of the
        // ring; the read is volatile, and any bytes are a valid `T`.
        unsafe { self.entries.add((index & (self.size - 1)) as usize).read_volatile() }
    }

    /// Writes the entry at `index` modulo the size.
    #[inline]
    pub(super) fn write(&mut self, index: u32, entry: T) {
        // SAFETY: as in `read`; the exclusive borrow makes this the only writer in this process.
        unsafe { self.entries.add((index & (self.size - 1)) as usize).write_volatile(entry) }
    }
}

impl<T> Drop for RingMemory<T> {
    fn drop(&mut self) {
        // SAFETY: the range was mapped with this length, and no reference into
        // it outlives `self`.
        if let Err(error) = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.bytes) } {
            debug_assert!(false, "munmap of a ring failed: {error}");
        }
    }
}

/// Socket options with a value of type `int`.
#[derive(Clone, Copy, Debug)]
pub(super) enum IntOption {
    /// Keeps interrupts off while the application polls.
    PreferBusyPoll,
    /// Poll time of a blocking call, in microseconds; a value other than 0 makes non-blocking
    /// calls poll once.
    BusyPoll,
    /// Maximum packets per poll.
    BusyPollBudget,
    /// Maximum packets per `sendto` in copy mode.
    TransmitBudget,
    /// A virtio header before each frame of a packet socket.
    PacketVirtioHeader,
}

/// Sets a socket option.
pub(super) fn set_option(fd: BorrowedFd<'_>, option: IntOption, value: u32) -> io::Result<()> {
    let (level, name) = match option {
        IntOption::PreferBusyPoll => (libc::SOL_SOCKET, libc::SO_PREFER_BUSY_POLL),
        IntOption::BusyPoll => (libc::SOL_SOCKET, libc::SO_BUSY_POLL),
        IntOption::BusyPollBudget => (libc::SOL_SOCKET, libc::SO_BUSY_POLL_BUDGET),
        IntOption::TransmitBudget => (libc::SOL_XDP, XDP_MAX_TX_SKB_BUDGET),
        IntOption::PacketVirtioHeader => (libc::SOL_PACKET, libc::PACKET_VNET_HDR),
    };
    // SAFETY: the pointer and the length are of a live integer, which the
    // kernel only reads.
    let rc = unsafe {
        libc::setsockopt(
            fd.as_raw_fd(),
            level,
            name,
            (&raw const value).cast(),
            size_of::<u32>() as libc::socklen_t,
        )
    };
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Binds a packet socket to an interface, to send only.
pub(super) fn bind_packet_socket(fd: BorrowedFd<'_>, interface_index: u32) -> io::Result<()> {
    // SAFETY: all zero is a valid `sockaddr_ll`; without a protocol it receives nothing.
    let mut address: libc::sockaddr_ll = unsafe { zeroed() };
    address.sll_family = libc::AF_PACKET as libc::c_ushort;
    address.sll_ifindex = interface_index as i32;
    // SAFETY: the address is live and of the length given.
    let rc = unsafe {
        libc::bind(
            fd.as_raw_fd(),
            (&raw const address).cast(),
            size_of::<libc::sockaddr_ll>() as libc::socklen_t,
        )
    };
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// NAPI ID of the instance that the socket's calls poll; 0 if unknown to the kernel.
pub(super) fn napi_id(fd: BorrowedFd<'_>) -> u32 {
    let mut value = 0_u32;
    let mut len = size_of::<u32>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes to a live integer.
    let rc = unsafe {
        libc::getsockopt(
            fd.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_INCOMING_NAPI_ID,
            (&raw mut value).cast(),
            &raw mut len,
        )
    };
    if rc == 0 { value } else { 0 }
}

/// Attaches an XDP program to an interface by a BPF link. The kernel detaches the program
/// when the descriptor is closed, and so also when the process dies.
///
/// `flags` are `XDP_FLAGS_*` of `linux/if_link.h`.
pub(super) fn create_xdp_link(
    program: BorrowedFd<'_>,
    interface_index: u32,
    flags: u32,
) -> io::Result<OwnedFd> {
    /// `union bpf_attr`, member `link_create`, as far as XDP needs it.
    #[repr(C)]
    struct LinkCreate {
        program: u32,
        interface_index: u32,
        attach_type: u32,
        flags: u32,
    }
    let mut create = LinkCreate {
        program: program.as_raw_fd() as u32,
        interface_index,
        attach_type: BPF_XDP,
        flags,
    };
    // SAFETY: the pointer and the length are of a live structure with the layout that the
    // command requires; the kernel only reads it.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            BPF_LINK_CREATE,
            &raw mut create,
            size_of::<LinkCreate>() as libc::c_uint,
        )
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call succeeded, so this is a new descriptor without another owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as libc::c_int) })
}

/// Detaches the program of a BPF link (`BPF_LINK_DETACH`), whoever else has the link.
#[cfg(feature = "packet")]
pub(super) fn detach_link(link: BorrowedFd<'_>) -> io::Result<()> {
    let mut link_fd = link.as_raw_fd() as u32;
    // SAFETY: the command reads the number of a descriptor from a live integer of the length given.
    let rc = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            BPF_LINK_DETACH,
            &raw mut link_fd,
            size_of::<u32>() as libc::c_uint,
        )
    };
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Replaces the program of a BPF link (`BPF_LINK_UPDATE`).
pub(super) fn update_link(link: BorrowedFd<'_>, program: BorrowedFd<'_>) -> io::Result<()> {
    /// `union bpf_attr`, member `link_update`.
    #[repr(C)]
    struct LinkUpdate {
        link: u32,
        new_program: u32,
        flags: u32,
        old_program: u32,
    }
    let mut update = LinkUpdate {
        link: link.as_raw_fd() as u32,
        new_program: program.as_raw_fd() as u32,
        flags: 0,
        old_program: 0,
    };
    // SAFETY: the pointer and the length are of a live structure with the layout that the
    // command requires; the kernel only reads it.
    let rc = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            BPF_LINK_UPDATE,
            &raw mut update,
            size_of::<LinkUpdate>() as libc::c_uint,
        )
    };
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// XDP action of a frame that the program passes to the kernel.
pub(super) const XDP_PASS: u32 = 2;

/// Runs an XDP program on a frame (`BPF_PROG_TEST_RUN`) and returns its action.
pub(super) fn test_run(program: BorrowedFd<'_>, frame: &[u8]) -> io::Result<u32> {
    /// `union bpf_attr`, member `test`.
    #[repr(C)]
    #[derive(Default)]
    struct Test {
        program: u32,
        result: u32,
        in_bytes: u32,
        out_bytes: u32,
        input: u64,
        output: u64,
        repeat: u32,
        duration_ns: u32,
        context: [u64; 3],
        flags: [u32; 2],
        batch: [u32; 2],
    }
    let mut test = Test {
        program: program.as_raw_fd() as u32,
        in_bytes: frame.len() as u32,
        input: frame.as_ptr().expose_provenance() as u64,
        ..Test::default()
    };
    // SAFETY: the pointer and the length are of a live structure with the layout that the
    // command requires. The structure points to `in_bytes` live bytes, which the kernel only
    // reads, and requests no output.
    let rc = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            BPF_PROG_TEST_RUN,
            &raw mut test,
            size_of::<Test>() as libc::c_uint,
        )
    };
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(test.result) }
}

/// Number of active receive queues, not the maximum of the device: a veth pair has one active
/// queue and offers as many as it was created with. `socket` is any socket of the interface's
/// network namespace.
pub(super) fn active_receive_queues(socket: BorrowedFd<'_>, interface: &str) -> io::Result<u32> {
    /// `struct ethtool_channels` of `linux/ethtool.h`.
    #[derive(Default)]
    #[repr(C)]
    struct Channels {
        command: u32,
        max_channels: [u32; 4],
        receive: u32,
        transmit: u32,
        other: u32,
        combined: u32,
    }
    let mut channels = Channels { command: ETHTOOL_GCHANNELS, ..Channels::default() };
    let mut request = interface_request(interface);
    request.ifr_ifru.ifru_data = (&raw mut channels).cast();
    // SAFETY: the command reads an `ifreq` whose data points to the live
    // structure that the command fills in.
    match unsafe { libc::ioctl(socket.as_raw_fd(), SIOCETHTOOL, &raw mut request) } {
        0 => Ok((channels.receive + channels.combined).max(1)),
        _ => match io::Error::last_os_error() {
            error if error.raw_os_error() == Some(libc::EOPNOTSUPP) => Ok(1),
            error => Err(error),
        },
    }
}

/// Upper half of the first argument by which a filter of system calls recognizes the rings of a
/// device, in a process that may have no others. The kernel ignores this half.
pub const URING_MARK: u32 = 0x7469_6467;

/// Creates an `io_uring` for `entries` requests. It is disabled, which lets restrictions be set.
/// With `deferred`, only the thread that enables it may use it, and requests complete in waits of
/// that thread (Linux 6.1). Bears [`URING_MARK`].
pub(super) fn create_uring(entries: u32, deferred: bool) -> io::Result<IoUring> {
    const R_DISABLED: u32 = 1 << 6;
    const SINGLE_ISSUER: u32 = 1 << 12;
    const DEFER_TASKRUN: u32 = 1 << 13;
    let entries = u64::from(URING_MARK) << 32 | u64::from(entries);
    // `struct io_uring_params`: all fields may be zero, the third is that of the flags.
    type RawParameters = [u32; size_of::<Parameters>() / 4];
    let mut parameters: RawParameters = [0; size_of::<RawParameters>() / 4];
    parameters[2] = R_DISABLED | if deferred { SINGLE_ISSUER | DEFER_TASKRUN } else { 0 };
    // SAFETY: the kernel reads and writes one `io_uring_params` in the live
    // array, which has its size and whose entries are its fields or halves of them.
    let fd = unsafe { libc::syscall(libc::SYS_io_uring_setup, entries, parameters.as_mut_ptr()) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: `Parameters` is a transparent wrapper of `io_uring_params`, which may be created so.
    // The call succeeded: the descriptor is that of a new ring without another owner, and the
    // kernel has filled in the ring's parameters.
    unsafe {
        IoUring::from_fd(fd as libc::c_int, transmute::<RawParameters, Parameters>(parameters))
    }
}

/// Queues a request that completes each time that `fd` becomes readable. Completions bear
/// `number`.
///
/// # Errors
/// The queue is full.
pub(super) fn watch(ring: &mut IoUring, fd: BorrowedFd<'_>, number: u64) -> io::Result<()> {
    let events = libc::POLLIN as u32;
    let request = opcode::PollAdd::new(types::Fd(fd.as_raw_fd()), events).multi(true).build();
    push(ring, request.user_data(number))
}

/// Queues a request that ends the one with `number`. Its completion bears `number`, too.
///
/// # Errors
/// The queue is full.
pub(super) fn unwatch(ring: &mut IoUring, number: u64) -> io::Result<()> {
    push(ring, opcode::PollRemove::new(number).build().user_data(number))
}

pub(super) fn push(ring: &mut IoUring, request: squeue::Entry) -> io::Result<()> {
    // SAFETY: the requests of this module have no pointers to memory.
    unsafe { ring.submission().push(&request) }.map_err(io::Error::other)
}
