//! An `io_uring` and its connections. It owns the buffers that the kernel reads and writes.

use std::io;
use std::mem;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::Duration;

use io_uring::{IoUring, cqueue, opcode, squeue, types};

use crate::slots::Slots;

/// Entries of the submission queue.
const RING_ENTRIES: u32 = 4096;
/// Bytes read from a connection at a time.
const BUFFER_BYTES: usize = 16 << 10;

/// User-data flag of an accept entry; the other bits are the listener's index.
const ACCEPT_TAG: u64 = 1 << 62;
/// User-data flag of a send entry. Only failures are reported, and the linked read fails too then.
const SEND_TAG: u64 = 1 << 61;

/// Events of completed entries.
pub(super) enum RingEvent {
    /// New connection.
    Accepted(TcpStream),
    /// `len` bytes were received on connection `slot` and are to be sent back.
    Received { slot: usize, len: usize },
}

struct Connection {
    stream: TcpStream,
    buffer: Box<[u8]>,
}

/// Listeners, connections, and the ring that serves them.
pub(super) struct ConnectionRing {
    ring: IoUring,
    listeners: Vec<TcpListener>,
    /// A connection stays until its last entry has completed.
    connections: Slots<Connection>,
}

impl ConnectionRing {
    pub(super) fn new(listeners: Vec<TcpListener>) -> io::Result<Self> {
        // One thread uses the ring, and the kernel defers its work until that thread asks.
        let ring = IoUring::builder()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_cqsize(4 * RING_ENTRIES)
            .build(RING_ENTRIES)?;
        let mut ring = Self { ring, listeners, connections: Slots::default() };
        (0..ring.listeners.len()).try_for_each(|index| ring.accept(index))?;
        Ok(ring)
    }

    fn accept(&mut self, index: usize) -> io::Result<()> {
        let fd = types::Fd(self.listeners[index].as_raw_fd());
        let entry = opcode::AcceptMulti::new(fd).flags(libc::SOCK_CLOEXEC).build();
        // SAFETY: the entry has no buffers, and the listener stays open as long as the ring.
        unsafe { self.push(&entry.user_data(ACCEPT_TAG | index as u64)) }
    }

    /// Adds a connection and starts reading from it.
    pub(super) fn add_connection(&mut self, stream: TcpStream) -> io::Result<()> {
        let slot = self.connections.next_slot();
        self.connections.insert(Connection { stream, buffer: vec![0; BUFFER_BYTES].into() });
        let Some(connection) = self.connections.get_mut(slot) else { return Ok(()) };
        let entry = connection.receive(slot);
        // SAFETY: the buffer belongs to the connection, which stays until the entry completes.
        unsafe { self.push(&entry) }
    }

    /// Sends `len` received bytes back, then reads on.
    pub(super) fn send_back(&mut self, slot: usize, len: usize) -> io::Result<()> {
        let Some(connection) = self.connections.get_mut(slot) else { return Ok(()) };
        let (send, receive) = (connection.send(len), connection.receive(slot));
        // Both entries must fit, or the send would be linked to some other entry.
        let queue = self.ring.submission();
        let free_entries = queue.capacity() - queue.len();
        drop(queue);
        if free_entries < 2 {
            self.ring.submit()?;
        }
        // SAFETY: the buffer belongs to the connection, which stays until the receive entry
        // completes. That entry is linked to the send entry: the kernel starts it only after the
        // send has ended.
        unsafe {
            self.push(&send)?;
            self.push(&receive)
        }
    }

    /// Pushes an entry to the submission queue, and submits the queue when it is full.
    ///
    /// # Safety
    /// The memory that the entry points to must stay valid until the entry completes, and must
    /// not be used otherwise meanwhile.
    unsafe fn push(&mut self, entry: &squeue::Entry) -> io::Result<()> {
        loop {
            // SAFETY: guaranteed by the caller.
            if unsafe { self.ring.submission().push(entry) }.is_ok() {
                return Ok(());
            }
            self.ring.submit()?;
        }
    }

    /// Submits the queued entries and waits for completions, for at most `timeout`.
    pub(super) fn wait(
        &mut self,
        timeout: Duration,
        events: &mut Vec<RingEvent>,
    ) -> io::Result<()> {
        let timeout = types::Timespec::from(timeout);
        let args = types::SubmitArgs::new().timespec(&timeout);
        match self.ring.submitter().submit_with_args(1, &args) {
            Ok(_) => {}
            // Time-out, signal, or so many completions that they must be collected first.
            Err(error)
                if matches!(
                    error.raw_os_error(),
                    Some(libc::ETIME | libc::EINTR | libc::EBUSY)
                ) => {}
            Err(error) => return Err(error),
        }
        let mut stopped_accepts = Vec::new();
        for completion in self.ring.completion() {
            let (user_data, result) = (completion.user_data(), completion.result());
            if user_data & ACCEPT_TAG != 0 {
                if result >= 0 {
                    // SAFETY: the kernel has just opened this descriptor for this process.
                    let stream = unsafe { OwnedFd::from_raw_fd(result) };
                    events.push(RingEvent::Accepted(stream.into()));
                }
                if !cqueue::more(completion.flags()) {
                    stopped_accepts.push((user_data & !ACCEPT_TAG) as usize);
                }
            } else if user_data & SEND_TAG == 0 {
                let slot = user_data as usize;
                match usize::try_from(result) {
                    Ok(len @ 1..) => events.push(RingEvent::Received { slot, len }),
                    // The end or error of this connection only.
                    _ => self.connections.remove(slot),
                }
            }
        }
        stopped_accepts.into_iter().try_for_each(|index| self.accept(index))
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
        entry.flags(squeue::Flags::IO_LINK | squeue::Flags::SKIP_SUCCESS).user_data(SEND_TAG)
    }
}

impl Drop for ConnectionRing {
    fn drop(&mut self) {
        // The kernel may write to the buffers until it has cancelled all entries in flight, some
        // time after the ring is closed.
        mem::forget(mem::take(&mut self.connections));
    }
}
