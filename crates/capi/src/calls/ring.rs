//! Rings: vectors of operations, and their completions.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use libc::{c_int, c_uint, c_void, sockaddr, sockaddr_in6, socklen_t};
use tidegate::Net;
use tidegate::ring::{BufferIndex, Completion, RingConfig, Submission};
use tidegate_posix::{arguments, errno};

use super::read_address;
use crate::descriptors::{self, Entry, InUse};
use crate::ring::{RingInner, SocketRing};
use crate::socket::{Endpoint, Protocol, Socket, os_error};

/// Operation, as in the header.
#[repr(C)]
pub struct RingEntry {
    opcode: c_int,
    flags: c_uint,
    fd: c_int,
    buffer: c_uint,
    user_data: u64,
    target: u64,
    address: *const sockaddr,
    address_length: socklen_t,
    length: u32,
}

/// Result of an operation, as in the header.
#[repr(C)]
pub struct RingCompletion {
    user_data: u64,
    result: c_int,
    flags: c_uint,
    buffer: c_uint,
    from_length: socklen_t,
    from: sockaddr_in6,
}

/// Opcodes, as in the header.
mod opcode {
    use libc::c_int;

    pub(super) const NOP: c_int = 0;
    pub(super) const ACCEPT: c_int = 1;
    pub(super) const CONNECT: c_int = 2;
    pub(super) const RECV: c_int = 3;
    pub(super) const SEND: c_int = 4;
    pub(super) const CLOSE: c_int = 5;
    pub(super) const CANCEL: c_int = 6;
}

/// Flags of an operation, as in the header.
const MULTISHOT: c_uint = 1;
const SKIP_SUCCESS: c_uint = 2;

/// Flags of a completion, as in the header.
const HAS_MORE: c_uint = 1;
const HAS_BUFFER: c_uint = 2;
const IS_TRUNCATED: c_uint = 4;

/// Creates a ring; 0 selects the default of a limit.
///
/// # Errors
/// `EINVAL` for limits out of range, `EMFILE` and the like.
pub(crate) fn create(
    net: &Net,
    entries: c_uint,
    buffers: c_uint,
    buffer_bytes: c_uint,
) -> io::Result<c_int> {
    let or_default = |value, default| if value == 0 { default } else { value };
    let default = RingConfig::default();
    let config = default.entries(or_default(entries, default.entries)).buffers(
        or_default(buffers, default.buffers),
        or_default(buffer_bytes, default.buffer_bytes),
    );
    descriptors::install(Entry::Ring(Arc::new(SocketRing::new(net, config)?)))
}

/// Queues operations. Returns how many; an error only if it is the first one's.
///
/// # Errors
/// `EBUSY` when the submission queue is full, `EINVAL` for an unknown opcode or a buffer that the
/// program does not hold, and those of the socket.
///
/// # Safety
/// `entries` is null or points to `count` entries, with valid addresses.
pub(crate) unsafe fn push(
    ring: c_int,
    entries: *const RingEntry,
    count: c_uint,
) -> io::Result<usize> {
    let ring = descriptors::ring(ring)?;
    let entries = match (entries.is_null(), count as usize) {
        (_, 0) => return Ok(0),
        (true, _) => return Err(os_error(libc::EFAULT)),
        // SAFETY: guaranteed by the caller.
        (false, count) => unsafe { std::slice::from_raw_parts(entries, count) },
    };
    let inner = &mut *ring.lock();
    for (pushed, entry) in entries.iter().enumerate() {
        // SAFETY: guaranteed by the caller.
        match unsafe { push_one(inner, entry) } {
            Err(error) if pushed == 0 => return Err(error),
            Err(_) => return Ok(pushed),
            Ok(()) => {}
        }
    }
    Ok(entries.len())
}

/// Queues one operation.
///
/// # Safety
/// The address of the entry is null or valid.
unsafe fn push_one(inner: &mut RingInner, entry: &RingEntry) -> io::Result<()> {
    if entry.flags & !(MULTISHOT | SKIP_SUCCESS) != 0 {
        return Err(os_error(libc::EINVAL));
    }
    let with_flags = |submission: Submission| {
        let mut submission = submission.user_data(entry.user_data);
        if entry.flags & MULTISHOT != 0 {
            submission = submission.multishot();
        }
        if entry.flags & SKIP_SUCCESS != 0 {
            submission = submission.skip_success();
        }
        submission
    };
    let buffer = BufferIndex(entry.buffer);
    let submission = match entry.opcode {
        opcode::NOP => Submission::nop(),
        opcode::CANCEL => Submission::cancel(entry.target),
        opcode::ACCEPT => {
            let listener = descriptors::socket(entry.fd)?;
            match listener.endpoint() {
                Some(Endpoint::Listener(_)) => Submission::accept(inner.key_of(&listener)?),
                _ => return Err(os_error(libc::EINVAL)),
            }
        }
        opcode::RECV => {
            let socket = data_socket(entry.fd)?;
            Submission::recv(inner.key_of(&socket)?)
        }
        opcode::SEND => {
            let socket = data_socket(entry.fd)?;
            let (key, len) = (inner.key_of(&socket)?, entry.length as usize);
            match entry.address.is_null() || socket.protocol == Protocol::Tcp {
                true => Submission::send(key, buffer, len),
                false => {
                    // SAFETY: guaranteed by the caller.
                    let to = unsafe { read_address(entry.address, entry.address_length) }?;
                    let to = SocketAddr::new(to.ip().to_canonical(), to.port());
                    Submission::send_to(key, buffer, len, to)
                }
            }
        }
        opcode::CONNECT => {
            let socket = descriptors::socket(entry.fd)?;
            // SAFETY: guaranteed by the caller.
            let peer = unsafe { read_address(entry.address, entry.address_length) }?;
            if socket.protocol == Protocol::Udp {
                // Ends at once.
                socket.connect(Some(peer))?;
                Submission::nop()
            } else {
                socket.begin_connect(peer)?;
                Submission::finish_connect(inner.key_of(&socket)?)
            }
        }
        opcode::CLOSE => {
            let socket = descriptors::socket(entry.fd)?;
            if socket.endpoint().is_some() {
                let key = inner.key_of(&socket)?;
                inner.ring.push(with_flags(Submission::close(key)))?;
                // From here on only the ring has the socket.
                inner.forget(key);
                drop(socket);
                return descriptors::close(entry.fd);
            }
            descriptors::close(entry.fd)?;
            Submission::nop()
        }
        _ => return Err(os_error(libc::EINVAL)),
    };
    inner.ring.push(with_flags(submission))
}

/// Socket that receives and sends; a UDP socket that is not bound is bound.
fn data_socket(fd: c_int) -> io::Result<InUse<Arc<Socket>>> {
    let socket = descriptors::socket(fd)?;
    match (socket.protocol, socket.endpoint()) {
        (Protocol::Udp, None) => _ = socket.udp()?,
        (Protocol::Tcp, None | Some(Endpoint::Listener(_))) => {
            return Err(os_error(libc::ENOTCONN));
        }
        _ => {}
    }
    Ok(socket)
}

/// Submits. Returns the number of operations started.
///
/// # Errors
/// `EBUSY` when none could start.
pub(crate) fn submit(ring: c_int) -> io::Result<usize> {
    descriptors::ring(ring)?.lock().ring.submit()
}

/// Submits, and waits for completions. Returns how many can be taken.
///
/// # Errors
/// `EINVAL` for more than the ring has entries, `ENOBUFS` when only the program can free a buffer,
/// `EINTR`.
pub(crate) fn submit_and_wait(
    ring: c_int,
    count: c_uint,
    timeout: Option<Duration>,
) -> io::Result<usize> {
    descriptors::ring(ring)?.lock().submit_and_wait(count as usize, timeout)
}

/// Takes completions. Returns their number.
///
/// # Errors
/// `EFAULT` without space.
///
/// # Safety
/// `completions` is null or has space for `max` entries.
pub(crate) unsafe fn completions(
    ring: c_int,
    completions: *mut RingCompletion,
    max: c_uint,
) -> io::Result<usize> {
    let ring = descriptors::ring(ring)?;
    if completions.is_null() && max > 0 {
        return Err(os_error(libc::EFAULT));
    }
    let inner = &mut *ring.lock();
    let mut taken = 0;
    while taken < max as usize
        && let Some(completion) = inner.ring.completion()
    {
        let completion = to_c(inner, completion);
        // SAFETY: the caller guarantees the space.
        unsafe { completions.add(taken).write(completion) };
        taken += 1;
    }
    Ok(taken)
}

/// Completion as in the header. An accepted connection gets a descriptor.
fn to_c(inner: &mut RingInner, completion: Completion) -> RingCompletion {
    let socket = inner.socket_of(&completion).cloned();
    let mut flags = 0;
    for (flag, is_set) in [
        (HAS_MORE, completion.has_more),
        (HAS_BUFFER, completion.buffer.is_some()),
        (IS_TRUNCATED, completion.is_truncated),
    ] {
        flags |= if is_set { flag } else { 0 };
    }
    // SAFETY: an all-zero address is valid.
    let mut from: sockaddr_in6 = unsafe { std::mem::zeroed() };
    let mut from_length = 0;
    if let (Some(address), Some(socket)) = (completion.from, &socket) {
        from_length = size_of::<sockaddr_in6>() as socklen_t;
        // SAFETY: the space is as long as the longest address.
        unsafe {
            arguments::write_address(
                (&raw mut from).cast(),
                &raw mut from_length,
                socket.to_program_family(address),
            );
        }
    }
    let result = match (completion.accepted, &socket) {
        (Some(key), Some(listener)) => inner
            .open_accepted(key, listener)
            .and_then(|accepted| descriptors::install(Entry::Socket(accepted)))
            .inspect_err(|_| inner.discard(key)),
        _ => completion.result.map(|count| c_int::try_from(count).unwrap_or(c_int::MAX)),
    };
    if let Some(socket) = socket.filter(|socket| socket.is_connecting()) {
        socket.note_connected(result.is_ok());
    }
    RingCompletion {
        user_data: completion.user_data,
        result: result.unwrap_or_else(|error| -errno::code(&error)),
        flags,
        buffer: completion.buffer.map_or(0, |buffer| buffer.0),
        from_length,
        from,
    }
}

/// Takes a free buffer.
///
/// # Errors
/// `ENOBUFS` if there is none.
pub(crate) fn take_buffer(ring: c_int) -> io::Result<c_int> {
    let taken = descriptors::ring(ring)?.lock().ring.take_buffer();
    taken.map(|buffer| buffer.0 as c_int).ok_or_else(|| os_error(libc::ENOBUFS))
}

/// Frees a buffer that the program holds.
///
/// # Errors
/// `EBADF` and `EINVAL` without a ring.
pub(crate) fn release_buffer(ring: c_int, buffer: c_uint) -> io::Result<()> {
    descriptors::ring(ring)?.lock().ring.release_buffer(BufferIndex(buffer));
    Ok(())
}

/// Memory of a buffer.
///
/// # Errors
/// `EINVAL` if there is no such buffer.
pub(crate) fn buffer(ring: c_int, buffer: c_uint) -> io::Result<*mut c_void> {
    let ring = descriptors::ring(ring)?;
    let inner = &mut *ring.lock();
    match buffer < inner.ring.config().buffers {
        true => Ok(inner.ring.buffer_mut(BufferIndex(buffer)).as_mut_ptr().cast()),
        false => Err(os_error(libc::EINVAL)),
    }
}
