//! Pairs of sockets of the kernel, used by plain calls and by `io_uring`.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};

use super::sys::BatchRing;
use super::{BATCH_MESSAGES, MESSAGE_BYTES, Transport};

/// Socket of the kernel.
enum KernelSocket {
    Udp(UdpSocket),
    Tcp(TcpStream),
}

impl AsFd for KernelSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Udp(socket) => socket.as_fd(),
            Self::Tcp(stream) => stream.as_fd(),
        }
    }
}

/// Pairs of connected sockets on the loopback device, with the message of each.
pub(super) struct KernelPairs {
    pairs: Vec<[KernelSocket; 2]>,
    messages: Vec<[u8; MESSAGE_BYTES]>,
    ring: BatchRing,
}

impl KernelPairs {
    pub(super) fn new(transport: Transport, address: &str) -> io::Result<Self> {
        let listener = TcpListener::bind((address, 0))?;
        let open_pair = |_| match transport {
            Transport::Udp => {
                let bind = || UdpSocket::bind((address, 0));
                let pair = [bind()?, bind()?];
                pair[0].connect(pair[1].local_addr()?)?;
                pair[1].connect(pair[0].local_addr()?)?;
                Ok(pair.map(KernelSocket::Udp))
            }
            Transport::Tcp => {
                let connected = TcpStream::connect(listener.local_addr()?)?;
                let (accepted, _) = listener.accept()?;
                [&connected, &accepted].into_iter().try_for_each(|end| end.set_nodelay(true))?;
                Ok([connected, accepted].map(KernelSocket::Tcp))
            }
        };
        Ok(Self {
            pairs: (0..BATCH_MESSAGES).map(open_pair).collect::<io::Result<_>>()?,
            messages: (0..BATCH_MESSAGES).map(|n| [n as u8; MESSAGE_BYTES]).collect(),
            ring: BatchRing::new(2 * BATCH_MESSAGES as u32)?,
        })
    }

    /// Sends a message on each pair, and sends them back, by a call for each message.
    pub(super) fn echo_plainly(&mut self) -> io::Result<()> {
        for (from, to) in [(0, 1), (1, 0)] {
            for (pair, message) in self.pairs.iter().zip(&self.messages) {
                match &pair[from] {
                    KernelSocket::Udp(socket) => _ = socket.send(message)?,
                    KernelSocket::Tcp(stream) => (&*stream).write_all(message)?,
                }
            }
            for (pair, message) in self.pairs.iter().zip(&mut self.messages) {
                message[0] = u8::MAX;
                match &pair[to] {
                    KernelSocket::Udp(socket) => _ = socket.recv(message)?,
                    KernelSocket::Tcp(stream) => (&*stream).read_exact(message)?,
                }
            }
            self.check()?;
        }
        Ok(())
    }

    /// Sends a message on each pair, and sends them back, by `io_uring`.
    pub(super) fn echo(&mut self) -> io::Result<()> {
        for (from, to) in [(0, 1), (1, 0)] {
            let ends = self.pairs.iter().map(|pair| [pair[from].as_fd(), pair[to].as_fd()]);
            self.ring.pass(ends, &mut self.messages)?;
            self.check()?;
        }
        Ok(())
    }

    fn check(&self) -> io::Result<()> {
        match self.messages.iter().enumerate().all(|(n, message)| message[0] == n as u8) {
            true => Ok(()),
            false => Err(io::Error::other("a message is another one")),
        }
    }
}
