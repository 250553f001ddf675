//! Pairs of sockets of the kernel, used by a call for each message and by `io_uring`.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::epoll;

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

impl KernelSocket {
    fn send(&self, message: &[u8; MESSAGE_BYTES]) -> io::Result<()> {
        match self {
            Self::Udp(socket) => socket.send(message).map(|_| ()),
            Self::Tcp(stream) => (&*stream).write_all(message),
        }
    }

    fn recv(&self, message: &mut [u8; MESSAGE_BYTES]) -> io::Result<()> {
        message[0] = u8::MAX;
        match self {
            Self::Udp(socket) => socket.recv(message).map(|_| ()),
            Self::Tcp(stream) => (&*stream).read_exact(message),
        }
    }
}

/// Pairs of connected sockets on the loopback device, with the message of each.
pub(super) struct KernelPairs {
    pairs: Vec<[KernelSocket; 2]>,
    messages: Vec<[u8; MESSAGE_BYTES]>,
    ring: BatchRing,
    epoll: OwnedFd,
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
        let pairs: Vec<[KernelSocket; 2]> =
            (0..BATCH_MESSAGES).map(open_pair).collect::<io::Result<_>>()?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        for (n, end) in pairs.iter().flatten().enumerate() {
            let data = epoll::EventData::new_u64(n as u64 / 2);
            epoll::add(&epoll, end, data, epoll::EventFlags::IN)?;
        }
        Ok(Self {
            pairs,
            epoll,
            messages: (0..BATCH_MESSAGES).map(|n| [n as u8; MESSAGE_BYTES]).collect(),
            ring: BatchRing::new(2 * BATCH_MESSAGES as u32)?,
        })
    }

    /// Sends a message on each pair, and sends them back. Each is received in its turn.
    pub(super) fn echo_in_order(&mut self) -> io::Result<()> {
        for (from, to) in [(0, 1), (1, 0)] {
            for (pair, message) in self.pairs.iter().zip(&self.messages) {
                pair[from].send(message)?;
            }
            for (pair, message) in self.pairs.iter().zip(&mut self.messages) {
                pair[to].recv(message)?;
            }
            self.check()?;
        }
        Ok(())
    }

    /// Sends a message on each pair, and sends them back. Each is received when its socket is ready.
    pub(super) fn echo_ready(&mut self) -> io::Result<()> {
        let mut events = Vec::with_capacity(BATCH_MESSAGES);
        for (from, to) in [(0, 1), (1, 0)] {
            for (pair, message) in self.pairs.iter().zip(&self.messages) {
                pair[from].send(message)?;
            }
            let mut received = 0;
            while received < BATCH_MESSAGES {
                epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), None)?;
                received += events.len();
                for event in events.drain(..) {
                    let n = event.data.u64() as usize;
                    self.pairs[n][to].recv(&mut self.messages[n])?;
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
