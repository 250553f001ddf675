//! System calls for batches of datagrams: `recvmmsg`, `sendmmsg`, and the control messages that
//! carry a datagram's destination address.

use std::io;
use std::mem;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;

use super::BATCH_DATAGRAMS;

/// Time that a call polls the device for, in microseconds; a call that may not block polls once.
const BUSY_POLL_US: libc::c_int = 50;

/// Buffer for one control message with a packet-info structure, aligned as the kernel requires.
#[derive(Clone, Copy)]
#[repr(C, align(8))]
struct ControlBuffer([u8; 64]);

/// Makes the kernel report each datagram's destination address (`IP_PKTINFO`).
pub(super) fn enable_packet_info(fd: BorrowedFd<'_>, ipv6: bool) -> io::Result<()> {
    let (level, option) = if ipv6 {
        (libc::IPPROTO_IPV6, libc::IPV6_RECVPKTINFO)
    } else {
        (libc::IPPROTO_IP, libc::IP_PKTINFO)
    };
    set_option(fd, level, option, 1)
}

/// Makes calls of the socket poll its device, instead of softirqs (`SO_PREFER_BUSY_POLL`).
pub(super) fn prefer_busy_poll(fd: BorrowedFd<'_>) -> io::Result<()> {
    set_option(fd, libc::SOL_SOCKET, libc::SO_PREFER_BUSY_POLL, 1)?;
    set_option(fd, libc::SOL_SOCKET, libc::SO_BUSY_POLL, BUSY_POLL_US)?;
    set_option(fd, libc::SOL_SOCKET, libc::SO_BUSY_POLL_BUDGET, BATCH_DATAGRAMS as libc::c_int)
}

fn set_option(
    fd: BorrowedFd<'_>,
    level: libc::c_int,
    option: libc::c_int,
    value: libc::c_int,
) -> io::Result<()> {
    // SAFETY: `value` is a c_int that lives through the call, and its size is given.
    let result = unsafe {
        libc::setsockopt(
            fd.as_raw_fd(),
            level,
            option,
            ptr::from_ref(&value).cast(),
            size_of_val(&value) as libc::socklen_t,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Length and sender of one received datagram.
#[derive(Clone, Copy)]
struct ReceivedDatagram {
    len: usize,
    /// `None` when the datagram was truncated or its sender cannot be read.
    from: Option<SocketAddr>,
}

/// Buffers for one batch of requests and replies, allocated once.
pub(super) struct Batch {
    stride: usize,
    max_datagram_bytes: usize,
    requests: Box<[u8]>,
    replies: Box<[u8]>,
    peers: Box<[libc::sockaddr_storage; BATCH_DATAGRAMS]>,
    controls: Box<[ControlBuffer; BATCH_DATAGRAMS]>,
    received: Box<[ReceivedDatagram; BATCH_DATAGRAMS]>,
    /// Queued replies: index of the request and length in bytes.
    queued: Vec<(usize, usize)>,
}

impl Batch {
    pub(super) fn new(max_datagram_bytes: usize) -> Self {
        // An odd number of cache lines, so that the first bytes of the buffers do not all map to
        // the same cache sets.
        let stride = (max_datagram_bytes.div_ceil(64) | 1) * 64;
        // SAFETY: sockaddr_storage is plain old data, all zeros is a value of it.
        let zeroed: libc::sockaddr_storage = unsafe { mem::zeroed() };
        Batch {
            stride,
            max_datagram_bytes,
            requests: vec![0; stride * BATCH_DATAGRAMS].into_boxed_slice(),
            replies: vec![0; stride * BATCH_DATAGRAMS].into_boxed_slice(),
            peers: Box::new([zeroed; BATCH_DATAGRAMS]),
            controls: Box::new([ControlBuffer([0; 64]); BATCH_DATAGRAMS]),
            received: Box::new([ReceivedDatagram { len: 0, from: None }; BATCH_DATAGRAMS]),
            queued: Vec::with_capacity(BATCH_DATAGRAMS),
        }
    }

    /// Receives waiting datagrams without blocking, at most a batch. Returns the number received.
    pub(super) fn receive(&mut self, fd: BorrowedFd<'_>) -> io::Result<usize> {
        self.queued.clear();
        let mut vectors = [libc::iovec { iov_base: ptr::null_mut(), iov_len: 0 }; BATCH_DATAGRAMS];
        // SAFETY: mmsghdr is plain old data, all zeros is a value of it.
        let mut headers: [libc::mmsghdr; BATCH_DATAGRAMS] = unsafe { mem::zeroed() };
        for index in 0..BATCH_DATAGRAMS {
            vectors[index] = libc::iovec {
                iov_base: self.requests[index * self.stride..].as_mut_ptr().cast(),
                iov_len: self.max_datagram_bytes,
            };
            let header = &mut headers[index].msg_hdr;
            header.msg_name = ptr::from_mut(&mut self.peers[index]).cast();
            header.msg_namelen = size_of::<libc::sockaddr_storage>() as libc::socklen_t;
            header.msg_iov = &raw mut vectors[index];
            header.msg_iovlen = 1;
            header.msg_control = self.controls[index].0.as_mut_ptr().cast();
            header.msg_controllen = size_of::<ControlBuffer>();
        }
        // SAFETY: every header points to a name, a control buffer and an iovec
        // that live through the call, with their true sizes; each iovec covers
        // bytes of `requests` of its own (`stride` is at least
        // `max_datagram_bytes`).
        let count = unsafe {
            libc::recvmmsg(
                fd.as_raw_fd(),
                headers.as_mut_ptr(),
                BATCH_DATAGRAMS as libc::c_uint,
                libc::MSG_DONTWAIT,
                ptr::null_mut(),
            )
        };
        if count < 0 {
            let error = io::Error::last_os_error();
            return match error.raw_os_error() {
                // ECONNREFUSED, EHOSTUNREACH and ENETUNREACH report an earlier reply that did not
                // arrive: this socket is fine.
                Some(
                    libc::EAGAIN
                    | libc::EINTR
                    | libc::ECONNREFUSED
                    | libc::EHOSTUNREACH
                    | libc::ENETUNREACH,
                ) => Ok(0),
                _ => Err(error),
            };
        }
        let count = count as usize;
        for (index, message) in headers.iter().enumerate().take(count) {
            let truncated = message.msg_hdr.msg_flags & libc::MSG_TRUNC != 0;
            let from = if truncated { None } else { read_address(&self.peers[index]) };
            self.received[index] = ReceivedDatagram { len: message.msg_len as usize, from };
            self.controls[index] = reply_control(&message.msg_hdr);
        }
        Ok(count)
    }

    /// Request with this index, its sender and the buffer for its reply; `None` when the request
    /// was longer than the buffer.
    pub(super) fn exchange(&mut self, index: usize) -> Option<(&[u8], SocketAddr, &mut [u8])> {
        let ReceivedDatagram { len, from } = self.received[index];
        let start = index * self.stride;
        let reply = &mut self.replies[start..start + self.max_datagram_bytes];
        Some((&self.requests[start..start + len], from?, reply))
    }

    /// Queues the reply to the request with this index.
    pub(super) fn queue_reply(&mut self, index: usize, len: usize) {
        self.queued.push((index, len.min(self.max_datagram_bytes)));
    }

    /// Sends the queued replies. Returns how many were sent and how many were not: the kernel's
    /// send buffer was full, or there is no route.
    pub(super) fn send(&mut self, fd: BorrowedFd<'_>) -> (u64, u64) {
        let mut vectors = [libc::iovec { iov_base: ptr::null_mut(), iov_len: 0 }; BATCH_DATAGRAMS];
        // SAFETY: mmsghdr is plain old data, all zeros is a value of it.
        let mut headers: [libc::mmsghdr; BATCH_DATAGRAMS] = unsafe { mem::zeroed() };
        for (slot, &(index, len)) in self.queued.iter().enumerate() {
            vectors[slot] = libc::iovec {
                iov_base: self.replies[index * self.stride..].as_mut_ptr().cast(),
                iov_len: len,
            };
            let header = &mut headers[slot].msg_hdr;
            header.msg_name = ptr::from_mut(&mut self.peers[index]).cast();
            header.msg_namelen = address_len(&self.peers[index]);
            header.msg_iov = &raw mut vectors[slot];
            header.msg_iovlen = 1;
            let control_len = control_len(&self.controls[index]);
            if control_len > 0 {
                header.msg_control = self.controls[index].0.as_mut_ptr().cast();
                header.msg_controllen = control_len;
            }
        }
        let (mut next, mut sent) = (0, 0);
        while next < self.queued.len() {
            // SAFETY: every header from `next` on was filled above with
            // pointers to parts of `self` and `vectors` that live through the
            // call.
            let count = unsafe {
                libc::sendmmsg(
                    fd.as_raw_fd(),
                    headers[next..].as_mut_ptr(),
                    (self.queued.len() - next) as libc::c_uint,
                    0,
                )
            };
            if count > 0 {
                sent += count as u64;
                next += count as usize;
            } else if io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
                // The first remaining reply cannot be sent: skip it.
                next += 1;
            }
        }
        let unsent = self.queued.len() as u64 - sent;
        self.queued.clear();
        (sent, unsent)
    }
}

/// Sender of a datagram.
fn read_address(storage: &libc::sockaddr_storage) -> Option<SocketAddr> {
    match i32::from(storage.ss_family) {
        libc::AF_INET => {
            // SAFETY: the family says that the kernel wrote a sockaddr_in, for
            // which sockaddr_storage is large and aligned enough.
            let name = unsafe { &*ptr::from_ref(storage).cast::<libc::sockaddr_in>() };
            let address = Ipv4Addr::from(u32::from_be(name.sin_addr.s_addr));
            Some(SocketAddr::from((address, u16::from_be(name.sin_port))))
        }
        libc::AF_INET6 => {
            // SAFETY: as above, for sockaddr_in6.
            let name = unsafe { &*ptr::from_ref(storage).cast::<libc::sockaddr_in6>() };
            Some(SocketAddr::V6(SocketAddrV6::new(
                Ipv6Addr::from(name.sin6_addr.s6_addr),
                u16::from_be(name.sin6_port),
                name.sin6_flowinfo,
                name.sin6_scope_id,
            )))
        }
        _ => None,
    }
}

/// Length in bytes of the socket address in `storage`.
fn address_len(storage: &libc::sockaddr_storage) -> libc::socklen_t {
    let len = match i32::from(storage.ss_family) {
        libc::AF_INET => size_of::<libc::sockaddr_in>(),
        _ => size_of::<libc::sockaddr_in6>(),
    };
    len as libc::socklen_t
}

/// Turns the control message of a request into the control message of its reply: the request's
/// destination becomes the reply's source. Empty when there is none.
fn reply_control(header: &libc::msghdr) -> ControlBuffer {
    // SAFETY: the kernel filled the control buffer of this header and set its
    // length, so the first control message, if there is one, lies within it.
    let message = unsafe { libc::CMSG_FIRSTHDR(header).as_ref() };
    let Some(message) = message else { return ControlBuffer([0; 64]) };
    // SAFETY: `message` is a whole control message header.
    let data = unsafe { libc::CMSG_DATA(message) };
    match (message.cmsg_level, message.cmsg_type) {
        (libc::IPPROTO_IP, libc::IP_PKTINFO) => {
            // SAFETY: the type says that an in_pktinfo follows; read_unaligned
            // needs no alignment.
            let mut info = unsafe { data.cast::<libc::in_pktinfo>().read_unaligned() };
            // The routing table chooses the reply's interface, not the request's arrival.
            info.ipi_ifindex = 0;
            write_control(libc::IPPROTO_IP, libc::IP_PKTINFO, info)
        }
        (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO) => {
            // SAFETY: as above, for in6_pktinfo.
            let mut info = unsafe { data.cast::<libc::in6_pktinfo>().read_unaligned() };
            let destination = Ipv6Addr::from(info.ipi6_addr.s6_addr);
            if destination.is_multicast() {
                return ControlBuffer([0; 64]);
            }
            // Only a link-local source needs an interface index.
            if !destination.is_unicast_link_local() {
                info.ipi6_ifindex = 0;
            }
            write_control(libc::IPPROTO_IPV6, libc::IPV6_PKTINFO, info)
        }
        _ => ControlBuffer([0; 64]),
    }
}

/// Control buffer with one message.
fn write_control<T: Copy>(level: libc::c_int, kind: libc::c_int, value: T) -> ControlBuffer {
    const { assert!(size_of::<libc::cmsghdr>() + size_of::<T>() <= 64) };
    let mut control = ControlBuffer([0; 64]);
    let header = libc::cmsghdr {
        cmsg_len: size_of::<libc::cmsghdr>() + size_of::<T>(),
        cmsg_level: level,
        cmsg_type: kind,
    };
    let start = control.0.as_mut_ptr();
    // SAFETY: the header and the value fit into the 64 bytes (asserted above);
    // on 64-bit Linux CMSG_DATA follows the header without padding, and
    // write_unaligned needs no alignment.
    unsafe {
        start.cast::<libc::cmsghdr>().write_unaligned(header);
        start.add(size_of::<libc::cmsghdr>()).cast::<T>().write_unaligned(value);
    }
    control
}

/// Used bytes of a control buffer: its first field is the length.
fn control_len(control: &ControlBuffer) -> usize {
    let (len, _) = control.0.split_at(size_of::<usize>());
    usize::from_ne_bytes(len.try_into().unwrap_or_default())
}
