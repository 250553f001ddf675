//! Attempt at an operation: one call of the stack, which never waits.

use std::io;
use std::net::SocketAddr;

use rustix::io::Errno;
use tidegate_stack::UdpSendOptions;

use super::buffers::{BufferIndex, BufferTable};
use super::in_flight::{Op, OpKind};
use super::sockets::Socket;
use crate::tcp::TcpStream;
use crate::types::errors::OpError;
use crate::types::socket_ops::SocketOps;
use crate::udp::UdpSocket;

/// Reason for which an operation stays in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stall {
    /// The socket is not ready.
    Blocked,
    /// The ring has no free buffer, or the stack no space to send a datagram. No event of the socket
    /// tells when that changes.
    NoSpace,
}

/// Result of an operation, or of a part of a multishot operation.
pub(super) struct Outcome {
    pub(super) result: io::Result<usize>,
    pub(super) buffer: Option<BufferIndex>,
    pub(super) from: Option<SocketAddr>,
    pub(super) is_truncated: bool,
    pub(super) accepted: Option<TcpStream>,
}

impl Outcome {
    pub(super) fn new(result: io::Result<usize>) -> Self {
        Self { result, buffer: None, from: None, is_truncated: false, accepted: None }
    }

    fn received(result: io::Result<usize>, buffer: BufferIndex) -> Self {
        Self { buffer: Some(buffer), ..Self::new(result) }
    }
}

fn wrong_kind() -> Outcome {
    Outcome::new(Err(io::Error::new(
        io::ErrorKind::Unsupported,
        "the operation is not for this kind of socket: listeners accept, all others receive and send",
    )))
}

/// Attempts an operation on its socket. `has_socket_space`: the ring can have another socket.
#[inline]
pub(super) fn attempt(
    ops: &mut dyn SocketOps,
    socket: &Socket,
    op: &mut Op,
    buffers: &mut BufferTable,
    has_socket_space: bool,
) -> Result<Outcome, Stall> {
    let outcome = match (&mut op.kind, socket) {
        (OpKind::Recv, Socket::Udp(udp)) => return recv_datagram(ops, udp, buffers),
        (OpKind::Recv, Socket::Stream(stream)) => return recv_bytes(ops, stream, buffers),
        (OpKind::Send { buffer, len, to, .. }, Socket::Udp(udp)) => {
            let payload = &buffers.bytes(*buffer)[..*len];
            if udp.is_write_closed() {
                return Ok(Outcome::new(Err(io::ErrorKind::BrokenPipe.into())));
            }
            match ops.udp_send(udp.udp_id(), payload, *to, UdpSendOptions::default()) {
                Err(OpError::WouldBlock) => return Err(Stall::NoSpace),
                sent => sent.map(|()| Outcome::new(Ok(*len))),
            }
        }
        (OpKind::Send { buffer, len, sent, .. }, Socket::Stream(stream)) => {
            let data = &buffers.bytes(*buffer)[*sent..*len];
            ops.tcp_send(stream.tcp_id(), data).and_then(|accepted| {
                *sent += accepted;
                // The stack notifies only sockets whose last call found no space.
                match *sent < *len {
                    true => send_rest(ops, stream, sent, &buffers.bytes(*buffer)[..*len]),
                    false => Ok(()),
                }
                .map(|()| Outcome::new(Ok(*len)))
            })
        }
        (OpKind::Accept, Socket::Listener(_)) if !has_socket_space => {
            return Ok(Outcome::new(Err(Errno::MFILE.into())));
        }
        (OpKind::Accept, Socket::Listener(listener)) => {
            ops.tcp_accept(listener.listener_id()).map(|(id, peer)| Outcome {
                from: Some(peer),
                accepted: Some(listener.stream(id)),
                ..Outcome::new(Ok(0))
            })
        }
        (OpKind::Connect { .. }, Socket::Stream(stream)) => {
            ops.tcp_finish_connect(stream.tcp_id()).map(|()| Outcome::new(Ok(0)))
        }
        _ => Ok(wrong_kind()),
    };
    match outcome {
        Ok(outcome) => Ok(outcome),
        Err(OpError::WouldBlock) => Err(Stall::Blocked),
        Err(OpError::Failed(error)) => Ok(Outcome::new(Err(error))),
    }
}

/// Sends the rest of `data` on a connection, until there is no space.
fn send_rest(
    ops: &mut dyn SocketOps,
    stream: &TcpStream,
    sent: &mut usize,
    data: &[u8],
) -> Result<(), OpError> {
    while *sent < data.len() {
        *sent += ops.tcp_send(stream.tcp_id(), &data[*sent..])?;
    }
    Ok(())
}

fn recv_datagram(
    ops: &mut dyn SocketOps,
    udp: &UdpSocket,
    buffers: &mut BufferTable,
) -> Result<Outcome, Stall> {
    let received = buffers.fill(|bytes| ops.udp_recv(udp.udp_id(), bytes, false));
    match received {
        Some(Ok((buffer, meta))) => Ok(Outcome {
            from: Some(meta.from),
            is_truncated: meta.truncated,
            ..Outcome::received(Ok(meta.len), buffer)
        }),
        Some(Err(OpError::WouldBlock)) if udp.is_read_closed() => {
            Ok(Outcome::new(Err(io::ErrorKind::UnexpectedEof.into())))
        }
        Some(Err(OpError::WouldBlock)) => Err(Stall::Blocked),
        Some(Err(OpError::Failed(error))) => Ok(Outcome::new(Err(error))),
        None => match ops.udp_recv(udp.udp_id(), &mut [], true) {
            Ok(_) => Err(Stall::NoSpace),
            Err(OpError::WouldBlock) => Err(Stall::Blocked),
            Err(OpError::Failed(error)) => Ok(Outcome::new(Err(error))),
        },
    }
}

fn recv_bytes(
    ops: &mut dyn SocketOps,
    stream: &TcpStream,
    buffers: &mut BufferTable,
) -> Result<Outcome, Stall> {
    let id = stream.tcp_id();
    // The end of the stream takes no buffer.
    let received = buffers.fill(|bytes| match ops.tcp_recv(id, bytes) {
        Ok(0) => Err(None),
        Ok(len) => Ok(len),
        Err(error) => Err(Some(error)),
    });
    match received {
        Some(Ok((buffer, len))) => Ok(Outcome::received(Ok(len), buffer)),
        Some(Err(None)) => Ok(Outcome::new(Ok(0))),
        Some(Err(Some(OpError::WouldBlock))) => Err(Stall::Blocked),
        Some(Err(Some(OpError::Failed(error)))) => Ok(Outcome::new(Err(error))),
        None => match ops.tcp_peek(id, &mut [0]) {
            Ok(0) => Ok(Outcome::new(Ok(0))),
            Ok(_) => Err(Stall::NoSpace),
            Err(OpError::WouldBlock) => Err(Stall::Blocked),
            Err(OpError::Failed(error)) => Ok(Outcome::new(Err(error))),
        },
    }
}
