//! An `io_uring` for batches of messages.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use io_uring::{IoUring, opcode, squeue, types};

use super::MESSAGE_BYTES;

/// User data of sends.
const SEND: u64 = 1;

/// An `io_uring` that sends and receives batches of messages.
pub(super) struct BatchRing {
    ring: IoUring,
    received: Vec<[u8; MESSAGE_BYTES]>,
}

impl BatchRing {
    /// Creates a ring for `entries` operations at once.
    pub(super) fn new(entries: u32) -> io::Result<Self> {
        // One thread uses the ring, and the kernel defers its work until that thread asks.
        let ring = IoUring::builder().setup_single_issuer().setup_defer_taskrun().build(entries)?;
        Ok(Self { ring, received: Vec::new() })
    }

    /// Sends each message on the first socket of its pair, and receives one on the second socket
    /// in its place. All operations are submitted together.
    ///
    /// # Errors
    /// When an operation fails or a message arrives in pieces.
    pub(super) fn pass<'f>(
        &mut self,
        pairs: impl Iterator<Item = [BorrowedFd<'f>; 2]>,
        messages: &mut Vec<[u8; MESSAGE_BYTES]>,
    ) -> io::Result<()> {
        let Self { ring, received } = self;
        received.resize(messages.len(), [0; MESSAGE_BYTES]);
        let len = MESSAGE_BYTES as u32;
        let mut in_flight: usize = 0;
        for ([from, to], (message, space)) in pairs.zip(messages.iter().zip(received.iter_mut())) {
            let (from, to) = (types::Fd(from.as_raw_fd()), types::Fd(to.as_raw_fd()));
            let send = opcode::Send::new(from, message.as_ptr(), len).build();
            let send = send.flags(squeue::Flags::SKIP_SUCCESS).user_data(SEND);
            let receive = opcode::Recv::new(to, space.as_mut_ptr(), len).build();
            // SAFETY: the buffers are not moved, read or written until this function returns, which
            // is after all receives have completed. Those complete after the sends.
            unsafe { ring.submission().push_multiple(&[send, receive]) }
                .map_err(io::Error::other)?;
            in_flight += 1;
        }
        let mut result = Ok(());
        while in_flight > 0 {
            match ring.submit_and_wait(in_flight) {
                Err(error) if error.kind() != io::ErrorKind::Interrupted => {
                    // The kernel holds the buffers and will not report their completion.
                    panic!("io_uring failed: {error}");
                }
                _ => {}
            }
            for done in ring.completion() {
                // Its receive does not complete.
                assert!(done.user_data() != SEND, "a send of io_uring failed: {}", done.result());
                in_flight -= 1;
                result = match done.result() {
                    error @ ..0 => result.and(Err(io::Error::from_raw_os_error(-error))),
                    len if len as usize == MESSAGE_BYTES => result,
                    _ => result.and(Err(io::Error::other("a message arrived in pieces"))),
                };
            }
        }
        std::mem::swap(messages, received);
        result
    }
}
