//! System calls that no safe crate wraps: batches of datagrams.

use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Reusable buffers for a batch of datagrams on a connected socket.
pub(crate) struct DatagramBatch {
    bytes: Vec<u8>,
    slot_bytes: usize,
    lengths: Vec<usize>,
    vectors: Vec<libc::iovec>,
    headers: Vec<libc::mmsghdr>,
}

impl DatagramBatch {
    /// Allocates buffers for `count` datagrams of up to `slot_bytes` bytes.
    pub(crate) fn new(count: usize, slot_bytes: usize) -> Self {
        Self {
            bytes: vec![0; count * slot_bytes],
            slot_bytes,
            lengths: vec![0; count],
            vectors: Vec::with_capacity(count),
            headers: Vec::with_capacity(count),
        }
    }

    /// Number of datagrams in the batch.
    pub(crate) fn capacity(&self) -> usize {
        self.lengths.len()
    }

    /// Whole buffer of datagram `index`.
    pub(crate) fn slot_mut(&mut self, index: usize) -> &mut [u8] {
        &mut self.bytes[index * self.slot_bytes..][..self.slot_bytes]
    }

    /// Sets the number of bytes of datagram `index` to send.
    pub(crate) fn set_len(&mut self, index: usize, len: usize) {
        self.lengths[index] = len.min(self.slot_bytes);
    }

    /// Bytes of datagram `index`.
    pub(crate) fn get(&self, index: usize) -> &[u8] {
        &self.bytes[index * self.slot_bytes..][..self.lengths[index]]
    }

    /// Sends the datagrams of `range` without blocking; returns the number sent.
    pub(crate) fn send(&mut self, fd: BorrowedFd<'_>, range: Range<usize>) -> io::Result<usize> {
        self.prepare_headers(range);
        let count = self.headers.len() as libc::c_uint;
        // SAFETY: `prepare_headers` made every header point to one of our vectors and every vector
        // into `bytes`, within bounds. None of them moves or is used otherwise during the call,
        // which only reads the bytes.
        let sent = unsafe {
            libc::sendmmsg(fd.as_raw_fd(), self.headers.as_mut_ptr(), count, libc::MSG_DONTWAIT)
        };
        usize::try_from(sent).map_err(|_| io::Error::last_os_error())
    }

    /// Receives as many datagrams as fit into the batch, without blocking; returns the number
    /// received.
    pub(crate) fn receive(&mut self, fd: BorrowedFd<'_>) -> io::Result<usize> {
        self.lengths.fill(self.slot_bytes);
        self.prepare_headers(0..self.capacity());
        let count = self.headers.len() as libc::c_uint;
        // SAFETY: as in `send`; the kernel writes through each vector at most its length, and
        // nothing else accesses the bytes during the call.
        let received = unsafe {
            libc::recvmmsg(
                fd.as_raw_fd(),
                self.headers.as_mut_ptr(),
                count,
                libc::MSG_DONTWAIT,
                std::ptr::null_mut(),
            )
        };
        let received = usize::try_from(received).map_err(|_| io::Error::last_os_error())?;
        for (length, header) in self.lengths.iter_mut().zip(&self.headers).take(received) {
            *length = (header.msg_len as usize).min(self.slot_bytes);
        }
        Ok(received)
    }

    /// Builds one header and one vector for each datagram of `range`.
    fn prepare_headers(&mut self, range: Range<usize>) {
        self.vectors.clear();
        self.headers.clear();
        let slots = self.bytes.chunks_exact_mut(self.slot_bytes).zip(&self.lengths);
        for (slot, length) in slots.skip(range.start).take(range.len()) {
            self.vectors.push(libc::iovec { iov_base: slot.as_mut_ptr().cast(), iov_len: *length });
        }
        for vector in &mut self.vectors {
            // SAFETY: an all-zero header is valid: no name, no vectors, no control data.
            let mut header: libc::mmsghdr = unsafe { std::mem::zeroed() };
            header.msg_hdr.msg_iov = vector;
            header.msg_hdr.msg_iovlen = 1;
            self.headers.push(header);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, UdpSocket};
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn datagrams_are_sent_and_received_whole() {
        for address in ["127.0.0.1", "::1"] {
            let address: IpAddr = address.parse().unwrap();
            let a = UdpSocket::bind((address, 0)).unwrap();
            let b = UdpSocket::bind((address, 0)).unwrap();
            a.connect(b.local_addr().unwrap()).unwrap();
            b.connect(a.local_addr().unwrap()).unwrap();
            let mut tx = DatagramBatch::new(4, 16);
            for index in 0..4 {
                tx.slot_mut(index).fill(index as u8);
                tx.set_len(index, index * 5);
            }
            assert_eq!(tx.send(a.as_fd(), 1..4).unwrap(), 3);
            let mut rx = DatagramBatch::new(8, 12);
            assert_eq!(rx.receive(b.as_fd()).unwrap(), 3);
            assert_eq!(rx.get(0), [1; 5]);
            assert_eq!(rx.get(1), [2; 10]);
            assert_eq!(rx.get(2), [3; 12], "truncated to the buffer");
            let error = rx.receive(b.as_fd()).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        }
    }
}
