//! Pairs of sockets on Tidegate, used by a call for each message and by a ring.

use std::io;

use tidegate::ring::{BufferIndex, Ring, RingConfig, Socket, SocketKey, Submission};
use tidegate::{Net, Poll, TcpListener, TcpStream, Token, UdpSocket};

use super::{BATCH_MESSAGES, MESSAGE_BYTES, Transport};

/// Port of the listener.
const LISTENER_PORT: u16 = 7;

/// Opens pairs of connected sockets.
fn open(net: &Net, transport: Transport, address: &str) -> io::Result<Vec<[Socket; 2]>> {
    let listener = TcpListener::bind(net, (address, LISTENER_PORT))?;
    let open_pair = |_| match transport {
        Transport::Udp => {
            let bind = || UdpSocket::bind(net, (address, 0));
            let pair = [bind()?, bind()?];
            pair[0].connect(pair[1].local_addr()?)?;
            pair[1].connect(pair[0].local_addr()?)?;
            Ok(pair.map(Socket::from))
        }
        Transport::Tcp => {
            let connected = TcpStream::connect(net, (address, LISTENER_PORT))?;
            let (accepted, _) = listener.accept()?;
            [&connected, &accepted].into_iter().try_for_each(|end| end.set_nodelay(true))?;
            Ok([connected, accepted].map(Socket::from))
        }
    };
    (0..BATCH_MESSAGES).map(open_pair).collect()
}

fn wrong_message() -> io::Error {
    io::Error::other("a message arrived in pieces, or is another one")
}

/// Pairs used by a call for each message.
pub(super) struct PlainPairs {
    pairs: Vec<[Socket; 2]>,
    messages: Vec<[u8; MESSAGE_BYTES]>,
    poll: Poll,
    ready: Vec<Token>,
}

fn send(socket: &Socket, message: &[u8; MESSAGE_BYTES]) -> io::Result<()> {
    let len = match socket {
        Socket::Udp(socket) => socket.send(message)?,
        Socket::Stream(stream) => stream.send(message)?,
        Socket::Listener(_) => 0,
    };
    if len == MESSAGE_BYTES { Ok(()) } else { Err(wrong_message()) }
}

/// Receives message number `n`.
fn recv(socket: &Socket, n: usize, message: &mut [u8; MESSAGE_BYTES]) -> io::Result<()> {
    message[0] = u8::MAX;
    let len = match socket {
        Socket::Udp(socket) => socket.recv(message)?,
        Socket::Stream(stream) => stream.recv(message)?,
        Socket::Listener(_) => 0,
    };
    if len == MESSAGE_BYTES && message[0] == n as u8 { Ok(()) } else { Err(wrong_message()) }
}

impl PlainPairs {
    pub(super) fn new(net: &Net, transport: Transport, address: &str) -> io::Result<Self> {
        let messages = (0..BATCH_MESSAGES).map(|n| [n as u8; MESSAGE_BYTES]).collect();
        let pairs = open(net, transport, address)?;
        let mut poll = Poll::new(net);
        for (n, end) in pairs.iter().flatten().enumerate() {
            match end {
                Socket::Udp(socket) => poll.register(socket, Token(n / 2))?,
                Socket::Stream(stream) => poll.register(stream, Token(n / 2))?,
                Socket::Listener(_) => {}
            }
        }
        Ok(Self { pairs, messages, poll, ready: Vec::new() })
    }

    /// Sends a message on each pair, and sends them back. Each is received in its turn.
    pub(super) fn echo_in_order(&mut self) -> io::Result<()> {
        let Self { pairs, messages, .. } = self;
        for (from, to) in [(0, 1), (1, 0)] {
            for (pair, message) in pairs.iter().zip(&*messages) {
                send(&pair[from], message)?;
            }
            for (n, (pair, message)) in pairs.iter().zip(&mut *messages).enumerate() {
                recv(&pair[to], n, message)?;
            }
        }
        Ok(())
    }

    /// Sends a message on each pair, and sends them back. Each is received when its socket is ready.
    pub(super) fn echo_ready(&mut self) -> io::Result<()> {
        let Self { pairs, messages, poll, ready } = self;
        for (from, to) in [(0, 1), (1, 0)] {
            for (pair, message) in pairs.iter().zip(&*messages) {
                send(&pair[from], message)?;
            }
            let mut received = 0;
            while received < BATCH_MESSAGES {
                poll.wait(ready, None)?;
                for &Token(n) in &*ready {
                    recv(&pairs[n][to], n, &mut messages[n])?;
                }
                received += ready.len();
            }
        }
        Ok(())
    }
}

/// Pairs used by a ring.
pub(super) struct RingPairs {
    ring: Ring,
    pairs: Vec<[SocketKey; 2]>,
    messages: Vec<BufferIndex>,
}

impl RingPairs {
    pub(super) fn new(net: &Net, transport: Transport, address: &str) -> io::Result<Self> {
        let config = RingConfig::default().entries(2 * BATCH_MESSAGES as u32);
        let mut ring = Ring::new(net, config)?;
        let mut pairs = Vec::new();
        for [first, second] in open(net, transport, address)? {
            pairs.push([ring.add(first)?, ring.add(second)?]);
        }
        let messages = (0..BATCH_MESSAGES).map(|n| {
            let buffer = ring.take_buffer().ok_or_else(|| io::Error::other("no buffer"))?;
            ring.buffer_mut(buffer)[..MESSAGE_BYTES].fill(n as u8);
            Ok(buffer)
        });
        let messages = messages.collect::<io::Result<_>>()?;
        Ok(Self { ring, pairs, messages })
    }

    /// Sends a message on each pair, and sends them back.
    pub(super) fn echo(&mut self) -> io::Result<()> {
        let Self { ring, pairs, messages } = self;
        for (from, to) in [(0, 1), (1, 0)] {
            for (n, (pair, &message)) in pairs.iter().zip(&*messages).enumerate() {
                let send = Submission::send(pair[from], message, MESSAGE_BYTES);
                ring.push(send.skip_success())?;
                ring.push(Submission::recv(pair[to]).user_data(n as u64))?;
            }
            ring.submit_and_wait(BATCH_MESSAGES, None)?;
            for _ in 0..BATCH_MESSAGES {
                let completion = ring.completion().ok_or_else(wrong_message)?;
                let (n, len) = (completion.user_data, completion.result?);
                let message = completion.buffer.ok_or_else(wrong_message)?;
                if len != MESSAGE_BYTES || ring.buffer(message)[0] != n as u8 {
                    return Err(wrong_message());
                }
                messages[n as usize] = message;
            }
        }
        Ok(())
    }
}
