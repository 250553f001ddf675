//! Entries of the two queues of a ring.

use std::io;
use std::net::SocketAddr;

use tidegate_stack::TcpOptions;

use super::buffers::BufferIndex;
use super::sockets::SocketKey;

/// Operation to submit, as a submission queue entry of `io_uring`.
#[derive(Clone, Debug)]
#[must_use]
pub struct Submission {
    pub(super) operation: Operation,
    pub(super) user_data: u64,
    pub(super) is_multishot: bool,
    pub(super) skips_success: bool,
}

/// Operation of a submission.
#[derive(Clone, Debug)]
pub(super) enum Operation {
    Nop,
    Accept { listener: SocketKey },
    Connect { remote: SocketAddr, settings: Option<Box<ConnectSettings>> },
    FinishConnect { stream: SocketKey },
    Recv { socket: SocketKey },
    Send { socket: SocketKey, buffer: BufferIndex, len: usize, to: Option<SocketAddr> },
    Close { socket: SocketKey },
    Cancel { user_data: u64 },
}

/// Local address and options of a new connection.
#[derive(Clone, Debug)]
pub(super) struct ConnectSettings {
    pub(super) local: Option<SocketAddr>,
    pub(super) options: TcpOptions,
}

impl Submission {
    fn new(operation: Operation) -> Self {
        Self { operation, user_data: 0, is_multishot: false, skips_success: false }
    }

    /// Does nothing, and completes with 0.
    pub fn nop() -> Self {
        Self::new(Operation::Nop)
    }

    /// Accepts a connection, and adds it to the ring. The completion has the new socket in
    /// [`Completion::accepted`], and the address of the peer in [`Completion::from`].
    pub fn accept(listener: SocketKey) -> Self {
        Self::new(Operation::Accept { listener })
    }

    /// Connects to an address. The completion has the socket of the connection.
    pub fn connect(remote: SocketAddr) -> Self {
        Self::new(Operation::Connect { remote, settings: None })
    }

    /// Like [`Submission::connect`], from a local address if given, with options.
    pub fn connect_from(
        local: Option<SocketAddr>,
        remote: SocketAddr,
        options: TcpOptions,
    ) -> Self {
        let settings = Some(Box::new(ConnectSettings { local, options }));
        Self::new(Operation::Connect { remote, settings })
    }

    /// Completes when a stream that is being connected is established or has failed, as one of
    /// [`TcpStream::connect_nonblocking`](crate::TcpStream::connect_nonblocking).
    pub fn finish_connect(stream: SocketKey) -> Self {
        Self::new(Operation::FinishConnect { stream })
    }

    /// Receives a datagram, or at least one byte of a connection, into a free buffer of the
    /// ring, as much as the buffer holds. The completion has the number of bytes, the buffer, and
    /// the sender of the datagram. At the end of a stream it has 0 and no buffer. A receive that
    /// finds no free buffer stays in flight until there is one.
    pub fn recv(socket: SocketKey) -> Self {
        Self::new(Operation::Recv { socket })
    }

    /// Sends the first `len` bytes of a buffer that the program holds: as a datagram to the
    /// connected peer, or all of them on a connection. The completion returns the buffer.
    pub fn send(socket: SocketKey, buffer: BufferIndex, len: usize) -> Self {
        Self::new(Operation::Send { socket, buffer, len, to: None })
    }

    /// Like [`Submission::send`], as a datagram to an address.
    pub fn send_to(socket: SocketKey, buffer: BufferIndex, len: usize, to: SocketAddr) -> Self {
        Self::new(Operation::Send { socket, buffer, len, to: Some(to) })
    }

    /// Removes a socket from the ring, and closes the socket if the program has no other handle. Sends
    /// that were submitted before finish first; receives in flight complete with `ECANCELED`.
    pub fn close(socket: SocketKey) -> Self {
        Self::new(Operation::Close { socket })
    }

    /// Cancels the operations in flight with this user data: each completes with `ECANCELED`, but a
    /// send on a connection with the number of bytes that it has sent, if any. The completion of the
    /// cancel itself has the number of operations, or `ENOENT`.
    pub fn cancel(user_data: u64) -> Self {
        Self::new(Operation::Cancel { user_data })
    }

    /// Sets the value that the completion carries; the default is 0.
    pub fn user_data(self, user_data: u64) -> Self {
        Self { user_data, ..self }
    }

    /// Keeps a receive or an accept in flight: each datagram, piece of a stream or connection is a
    /// completion of its own, until one has [`Completion::has_more`] unset.
    pub fn multishot(self) -> Self {
        Self { is_multishot: true, ..self }
    }

    /// Makes no completion if a send, close, cancel or nop succeeds. The buffer of a send is free
    /// then.
    pub fn skip_success(self) -> Self {
        Self { skips_success: true, ..self }
    }

    /// True if the operation may stay in flight.
    pub(super) fn may_stay(&self) -> bool {
        !self.may_overtake()
    }

    /// True if the operation need not wait for those before it.
    pub(super) fn may_overtake(&self) -> bool {
        matches!(self.operation, Operation::Nop | Operation::Cancel { .. })
    }
}

/// Result of an operation, as a completion queue entry of `io_uring`.
#[derive(Debug)]
pub struct Completion {
    /// Value of the submission.
    pub user_data: u64,
    /// Number of bytes or operations, or the error.
    pub result: io::Result<usize>,
    /// Buffer with the received bytes, or the buffer of a send. The program holds it until it
    /// sends or releases it.
    pub buffer: Option<BufferIndex>,
    /// Sender of a datagram, or peer of an accepted connection.
    pub from: Option<SocketAddr>,
    /// Socket of the operation; the new one of a connect.
    pub socket: Option<SocketKey>,
    /// Accepted socket.
    pub accepted: Option<SocketKey>,
    /// The datagram was longer than the buffer; the rest is lost.
    pub is_truncated: bool,
    /// The operation stays in flight and has further completions.
    pub has_more: bool,
}

impl Completion {
    /// Completion with a result and nothing else.
    pub(super) fn new(user_data: u64, result: io::Result<usize>) -> Self {
        Self {
            user_data,
            result,
            buffer: None,
            from: None,
            socket: None,
            accepted: None,
            is_truncated: false,
            has_more: false,
        }
    }
}
