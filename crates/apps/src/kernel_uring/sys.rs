//! An `io_uring` with the connections that it works on: it owns the buffers that
//! the kernel reads and writes.

use std::io;
use std::mem;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::Duration;

use io_uring::{IoUring, cqueue, opcode, squeue, types};

use crate::slots::Slots;

/// What can be handed over at once.
const ENTRIES: u32 = 4096;
/// How much of a connection is read at once.
const BUFFER_BYTES: usize = 16 << 10;

/// What an entry is about: a listener, by its number.
const ACCEPT: u64 = 1 << 62;
/// An answer, of which only a failure is told: the read behind it fails then too.
const SEND: u64 = 1 << 61;

/// What has happened.
pub(super) enum Step {
    /// Somebody has connected.
    Accepted(TcpStream),
    /// So many bytes have come: they are to be sent back.
    Received { slot: usize, len: usize },
}

struct Connection {
    stream: TcpStream,
    buffer: Box<[u8]>,
}

/// Listeners and connections, and the ring that serves them.
pub(super) struct Ring {
    ring: IoUring,
    listeners: Vec<TcpListener>,
    /// A connection is there until the last entry about it has come back.
    connections: Slots<Connection>,
}

impl Ring {
    pub(super) fn new(listeners: Vec<TcpListener>) -> io::Result<Self> {
        // One thread uses it, and the kernel's part of the work is done when it asks.
        let ring = IoUring::builder()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_cqsize(4 * ENTRIES)
            .build(ENTRIES)?;
        let mut ring = Self { ring, listeners, connections: Slots::default() };
        (0..ring.listeners.len()).try_for_each(|index| ring.accept(index))?;
        Ok(ring)
    }

    fn accept(&mut self, index: usize) -> io::Result<()> {
        let fd = types::Fd(self.listeners[index].as_raw_fd());
        let entry = opcode::AcceptMulti::new(fd).flags(libc::SOCK_CLOEXEC).build();
        // SAFETY: it has no buffers, and the listener is open as long as the ring.
        unsafe { self.push(&entry.user_data(ACCEPT | index as u64)) }
    }

    /// Reads from a new connection.
    pub(super) fn add(&mut self, stream: TcpStream) -> io::Result<()> {
        let slot = self.connections.next();
        self.connections.insert(Connection { stream, buffer: vec![0; BUFFER_BYTES].into() });
        let Some(connection) = self.connections.get_mut(slot) else { return Ok(()) };
        let entry = connection.receive(slot);
        // SAFETY: the buffer is the connection's, which stays until this has come back.
        unsafe { self.push(&entry) }
    }

    /// Sends back what was received, then reads on.
    pub(super) fn send_back(&mut self, slot: usize, len: usize) -> io::Result<()> {
        let Some(connection) = self.connections.get_mut(slot) else { return Ok(()) };
        let (send, receive) = (connection.send(len), connection.receive(slot));
        // Both fit, or the first would be linked to something else.
        let queue = self.ring.submission();
        let room = queue.capacity() - queue.len();
        drop(queue);
        if room < 2 {
            self.ring.submit()?;
        }
        // SAFETY: the buffer is the connection's, which stays until the second has
        // come back; it does so after the first, to which it is linked, and the kernel
        // does not begin it before the first has ended.
        unsafe {
            self.push(&send)?;
            self.push(&receive)
        }
    }

    /// # Safety
    /// What the entry points to stays until it has come back, and nobody else uses
    /// it.
    unsafe fn push(&mut self, entry: &squeue::Entry) -> io::Result<()> {
        loop {
            // SAFETY: the caller says so.
            if unsafe { self.ring.submission().push(entry) }.is_ok() {
                return Ok(());
            }
            self.ring.submit()?;
        }
    }

    /// Hands over what is to be done, and waits until something has happened.
    pub(super) fn wait(&mut self, limit: Duration, steps: &mut Vec<Step>) -> io::Result<()> {
        let limit = types::Timespec::from(limit);
        let args = types::SubmitArgs::new().timespec(&limit);
        match self.ring.submitter().submit_with_args(1, &args) {
            Ok(_) => {}
            // Nothing happened; or so much that it has to be taken first.
            Err(error)
                if matches!(
                    error.raw_os_error(),
                    Some(libc::ETIME | libc::EINTR | libc::EBUSY)
                ) => {}
            Err(error) => return Err(error),
        }
        let mut ended = Vec::new();
        for done in self.ring.completion() {
            let (about, result) = (done.user_data(), done.result());
            if about & ACCEPT != 0 {
                if result >= 0 {
                    // SAFETY: the kernel has just opened it for us.
                    let stream = unsafe { OwnedFd::from_raw_fd(result) };
                    steps.push(Step::Accepted(stream.into()));
                }
                if !cqueue::more(done.flags()) {
                    ended.push((about & !ACCEPT) as usize);
                }
            } else if about & SEND == 0 {
                let slot = about as usize;
                match usize::try_from(result) {
                    Ok(len @ 1..) => steps.push(Step::Received { slot, len }),
                    // The end of this connection alone.
                    _ => self.connections.remove(slot),
                }
            }
        }
        ended.into_iter().try_for_each(|index| self.accept(index))
    }
}

impl Connection {
    fn receive(&mut self, slot: usize) -> squeue::Entry {
        let fd = types::Fd(self.stream.as_raw_fd());
        let (buffer, len) = (self.buffer.as_mut_ptr(), self.buffer.len() as u32);
        opcode::Recv::new(fd, buffer, len).build().user_data(slot as u64)
    }

    fn send(&self, len: usize) -> squeue::Entry {
        let fd = types::Fd(self.stream.as_raw_fd());
        let len = len.min(self.buffer.len()) as u32;
        let flags = libc::MSG_WAITALL | libc::MSG_NOSIGNAL;
        let entry = opcode::Send::new(fd, self.buffer.as_ptr(), len).flags(flags).build();
        entry.flags(squeue::Flags::IO_LINK | squeue::Flags::SKIP_SUCCESS).user_data(SEND)
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // The kernel may still write to the buffers until it has called off all that
        // is under way, some time after the ring is closed.
        mem::forget(mem::take(&mut self.connections));
    }
}
