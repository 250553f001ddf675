//! Datagrams.

use std::io;
use std::net::{IpAddr, SocketAddr};

use tidegate_memory::shared::Broken;

use super::Attachment;
use crate::contract::command::{Command, Handle};
use crate::contract::datagram::{HEAD_BYTES, Head, MOST_PAYLOAD_BYTES, record_bytes};

/// A datagram that was received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Received {
    /// Bytes that were written to the buffer.
    pub len: usize,
    /// Bytes that it has; more than `len` when the buffer was shorter.
    pub whole: usize,
    /// Who sent it.
    pub from: SocketAddr,
    /// The address of ours that it was sent to.
    pub to: IpAddr,
}

impl Attachment {
    /// Receives one datagram. With `peek` it stays there.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] when there is none; an error that the peer's
    /// host reported, once.
    pub fn recv_datagram(
        &mut self,
        handle: Handle,
        buf: &mut [u8],
        peek: bool,
    ) -> io::Result<Received> {
        let socket = self.socket(handle)?;
        let _turn = socket.begin()?;
        let status = socket.status();
        if let Some(kind) = socket.take_error(&status) {
            return Err(kind.into());
        }
        let Some(read) = &mut socket.read else { return Err(io::ErrorKind::NotConnected.into()) };
        let mut head = [0; HEAD_BYTES];
        let parsed = match read.peek(0, &mut head) {
            Ok(0) => return Err(io::ErrorKind::WouldBlock.into()),
            Ok(_) => Head::from_bytes(&head),
            Err(broken) => return Err(self.end(broken)),
        };
        let Some(Head { len: whole, remote: Some(from), local: Some(to) }) = parsed else {
            return Err(self.end(Broken));
        };
        let len = buf.len().min(whole);
        if let Err(broken) = read.peek(HEAD_BYTES, &mut buf[..len]) {
            return Err(self.end(broken));
        }
        if !peek {
            read.skip(record_bytes(whole));
            read.release();
            if socket.place.space.take() {
                self.command(Command::Look(handle))?;
            }
        }
        Ok(Received { len, whole, from, to })
    }

    /// Sends one datagram, to whom the socket is connected if `to` is none. `from`
    /// chooses among our addresses.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] when there is no room;
    /// [`io::ErrorKind::InvalidInput`] for more bytes than a datagram can hold;
    /// [`io::ErrorKind::NotConnected`] without an address; an error that came of
    /// an earlier one, once.
    pub fn send_datagram(
        &mut self,
        handle: Handle,
        payload: &[u8],
        to: Option<SocketAddr>,
        from: Option<IpAddr>,
    ) -> io::Result<()> {
        let socket = self.socket(handle)?;
        let _turn = socket.begin()?;
        let status = socket.status();
        if let Some(kind) = socket.take_error(&status) {
            return Err(kind.into());
        }
        if to.is_none() && socket.peer.is_none() {
            return Err(io::ErrorKind::NotConnected.into());
        }
        let len = payload.len();
        if len > MOST_PAYLOAD_BYTES {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let Some(write) = &mut socket.write else { return Err(io::ErrorKind::NotConnected.into()) };
        let mut has_room = || write.room().map(|room| room >= record_bytes(len));
        let mut room = has_room();
        if room == Ok(false) {
            socket.place.room.ask();
            room = has_room();
        }
        let head = Head { len, remote: to, local: from }.to_bytes();
        let padding = [0; 8];
        let padding = &padding[..record_bytes(len) - HEAD_BYTES - len];
        let written = match room {
            Ok(false) => return Err(io::ErrorKind::WouldBlock.into()),
            Ok(true) => [&head, payload, padding]
                .iter()
                .try_for_each(|piece| write.write(piece).map(|_| ())),
            Err(broken) => Err(broken),
        };
        if let Err(broken) = written {
            return Err(self.end(broken));
        }
        write.publish();
        if socket.place.looks.take() {
            self.command(Command::Look(handle))?;
        }
        Ok(())
    }
}
