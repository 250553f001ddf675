//! Signals for event descriptors that other processes have, too.
//!
//! A process can fill the counter of an `eventfd` and make its file blocking, whoever else has it:
//! a plain write would then wait for that process. The kernel itself signals a descriptor without
//! waiting. It does so at the end of an asynchronous operation, here of a poll that ends at once.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use libc::{SYS_io_destroy, SYS_io_getevents, SYS_io_setup, SYS_io_submit, c_long, syscall};
use rustix::event::{EventfdFlags, eventfd};

/// Operations whose results the kernel keeps until they are read.
const CAPACITY: usize = 64;

const OPERATION_POLL: u16 = 5;
const FLAG_RESULT_FD: u32 = 1;

/// Operation, as the kernel has it (`struct iocb`).
#[repr(C)]
#[derive(Default)]
struct Operation {
    data: u64,
    /// Two fields whose order depends on the byte order; both are zero.
    key_and_rw_flags: u64,
    opcode: u16,
    priority: i16,
    fd: u32,
    events: u64,
    bytes: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    result_fd: u32,
}

/// Result of an operation, as the kernel has it (`struct io_event`).
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct OperationResult {
    data: u64,
    operation: u64,
    results: [i64; 2],
}

/// Signals event descriptors that other processes may have filled or made blocking, without ever
/// waiting for them.
///
/// ```
/// use rustix::event::{EventfdFlags, eventfd};
/// use tidegate_memory::shared::EventSignal;
///
/// let shared = eventfd(0, EventfdFlags::empty())?;
/// // The other process leaves space for no further signal.
/// rustix::io::write(&shared, &(u64::MAX - 1).to_ne_bytes())?;
/// EventSignal::new()?.signal(&shared)?;
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct EventSignal {
    context: u64,
    /// Descriptor that is always readable.
    ready: OwnedFd,
    /// Results that the kernel keeps.
    unread: usize,
}

fn checked(result: c_long) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

impl EventSignal {
    /// Opens the kernel's asynchronous operations.
    ///
    /// # Errors
    /// The kernel was built without them, or no more may be opened (`fs.aio-max-nr`).
    pub fn new() -> io::Result<Self> {
        let ready = eventfd(1, EventfdFlags::CLOEXEC)?;
        let mut context = 0_u64;
        // SAFETY: the kernel writes a number of this size.
        checked(unsafe { syscall(SYS_io_setup, CAPACITY, &raw mut context) })?;
        Ok(Self { context, ready, unread: 0 })
    }

    /// Signals a descriptor: it is readable, and edge-triggered waits for it end.
    ///
    /// # Errors
    /// The descriptor is not an `eventfd`, or the kernel has no memory.
    pub fn signal(&mut self, event_fd: impl AsFd) -> io::Result<()> {
        if self.unread == CAPACITY {
            self.discard_results()?;
        }
        let number = |fd: BorrowedFd<'_>| fd.as_raw_fd().cast_unsigned();
        let mut operation = Operation {
            opcode: OPERATION_POLL,
            fd: number(self.ready.as_fd()),
            events: libc::POLLIN.cast_unsigned().into(),
            flags: FLAG_RESULT_FD,
            result_fd: number(event_fd.as_fd()),
            ..Operation::default()
        };
        let mut operations = [&raw mut operation];
        // SAFETY: the list has one operation, which the kernel has copied when the call returns.
        checked(unsafe { syscall(SYS_io_submit, self.context, 1, operations.as_mut_ptr()) })?;
        self.unread += 1;
        Ok(())
    }

    /// Makes room for further results.
    fn discard_results(&mut self) -> io::Result<()> {
        let mut results = [OperationResult::default(); CAPACITY];
        let at_once = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        let list = results.as_mut_ptr();
        // SAFETY: the list has space for as many results as the kernel is told, and the time lives
        // as long as the call.
        let read = checked(unsafe {
            syscall(SYS_io_getevents, self.context, 0, CAPACITY, list, &raw const at_once)
        })?;
        self.unread -= read;
        Ok(())
    }
}

impl Drop for EventSignal {
    fn drop(&mut self) {
        // SAFETY: closes what `new` has opened; all operations have ended.
        unsafe { syscall(SYS_io_destroy, self.context) };
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;

    /// Counter of an event descriptor, which is zero afterwards.
    fn take(event_fd: &OwnedFd) -> u64 {
        let mut counter = [0; 8];
        rustix::io::read(event_fd, &mut counter).unwrap();
        u64::from_ne_bytes(counter)
    }

    #[test]
    fn every_signal_counts_beyond_what_the_kernel_keeps() {
        let (first, second) = (event(), event());
        let mut signal = EventSignal::new().unwrap();
        for _ in 0..3 * CAPACITY + 1 {
            signal.signal(&first).unwrap();
        }
        signal.signal(&second).unwrap();
        assert_eq!((take(&first), take(&second)), (3 * CAPACITY as u64 + 1, 1));
    }

    #[test]
    fn full_and_blocking_descriptor_is_signalled_without_waiting() {
        let full = event();
        rustix::io::write(&full, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        let mut signal = EventSignal::new().unwrap();
        for _ in 0..2 {
            signal.signal(&full).unwrap();
        }
        assert_eq!(take(&full), u64::MAX);
    }

    #[test]
    fn other_descriptor_is_refused() {
        let file = std::fs::File::open("/dev/null").unwrap();
        let mut signal = EventSignal::new().unwrap();
        assert!(signal.signal(&file).is_err());
        let good = event();
        signal.signal(&good).unwrap();
        assert_eq!(take(&good), 1);
    }

    /// Blocking event descriptor.
    fn event() -> OwnedFd {
        eventfd(0, EventfdFlags::CLOEXEC).unwrap()
    }
}
