//! Bytes of a connection.

use std::io;

use tidegate_stack::{Shutdown, TcpOptions};

use super::Attachment;
use crate::contract::command::{Command, Handle};
use crate::contract::layout::StreamIn;
use crate::contract::status::Phase;

impl Attachment {
    /// Reads what has come; 0 is the end. With `peek` it
    /// stays there.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] when there is nothing;
    /// [`io::ErrorKind::NotConnected`] before it is connected; the error that the
    /// connection ended with, once.
    pub fn recv(&mut self, handle: Handle, buf: &mut [u8], peek: bool) -> io::Result<usize> {
        let socket = self.socket(handle)?;
        let _turn = socket.begin()?;
        // The status first: what it says has ended is in the stream then.
        let status = socket.status();
        let Some(read) = &mut socket.read else { return Err(io::ErrorKind::NotConnected.into()) };
        if buf.is_empty() {
            return Ok(0);
        }
        if socket.is_read_shut {
            return Ok(0);
        }
        let len = match read.peek(0, buf) {
            Ok(len) => len,
            Err(broken) => return Err(self.end(broken)),
        };
        if len > 0 {
            if !peek {
                read.skip(len);
                read.release();
                if socket.place.space.take() {
                    self.command(Command::Look(handle))?;
                }
            }
            return Ok(len);
        }
        if let Some(kind) = socket.take_error(&status) {
            return Err(kind.into());
        }
        match status.phase {
            Phase::Connecting => Err(io::ErrorKind::NotConnected.into()),
            _ if status.read_closed || status.phase == Phase::Over => Ok(0),
            _ => Err(io::ErrorKind::WouldBlock.into()),
        }
    }

    /// Writes some of `data`.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] when there is no room;
    /// [`io::ErrorKind::NotConnected`] before it is connected;
    /// [`io::ErrorKind::BrokenPipe`]; the error that the connection ended with, once.
    pub fn send(&mut self, handle: Handle, data: &[u8]) -> io::Result<usize> {
        let socket = self.socket(handle)?;
        let _turn = socket.begin()?;
        let status = socket.status();
        if let Some(kind) = socket.take_error(&status) {
            return Err(kind.into());
        }
        if status.write_closed || socket.is_write_shut || status.phase == Phase::Over {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        if status.phase == Phase::Connecting {
            return Err(io::ErrorKind::NotConnected.into());
        }
        let Some(write) = &mut socket.write else { return Err(io::ErrorKind::NotConnected.into()) };
        // No more than the program wants to be on its way.
        let limit = socket.options.send_buffer_bytes as usize;
        let mut written = write.write_within(limit, data);
        if written == Ok(0) && !data.is_empty() {
            socket.place.room.ask();
            written = write.write_within(limit, data);
        }
        let len = match written {
            Ok(0) if !data.is_empty() => return Err(io::ErrorKind::WouldBlock.into()),
            Ok(len) => len,
            Err(broken) => return Err(self.end(broken)),
        };
        write.publish();
        if socket.place.looks.take() {
            self.command(Command::Look(handle))?;
        }
        Ok(len)
    }

    /// How much can be read at once.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotConnected`] when it was closed.
    pub fn readable(&mut self, handle: Handle) -> io::Result<usize> {
        let socket = self.socket(handle)?;
        let _turn = socket.begin()?;
        match socket.read.as_mut().map_or(Ok(0), StreamIn::available) {
            Ok(len) => Ok(len),
            Err(broken) => Err(self.end(broken)),
        }
    }

    /// How much can be written at once.
    ///
    /// # Errors
    /// As [`Attachment::send`].
    pub fn room(&mut self, handle: Handle) -> io::Result<usize> {
        // Asks to be told of room if there is none.
        self.send(handle, &[])?;
        self.readiness(handle);
        let socket = self.socket(handle)?;
        let _turn = socket.begin()?;
        let limit = socket.options.send_buffer_bytes as usize;
        match socket.write.as_mut().map_or(Ok(0), |write| write.room_within(limit)) {
            Ok(room) => Ok(room),
            Err(broken) => Err(self.end(broken)),
        }
    }

    /// Shuts reading, writing or both.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotConnected`].
    pub fn shutdown(&mut self, handle: Handle, how: Shutdown) -> io::Result<()> {
        let socket = self.socket(handle)?;
        if socket.status().phase != Phase::Connected {
            return Err(io::ErrorKind::NotConnected.into());
        }
        socket.is_read_shut |= how != Shutdown::Write;
        socket.is_write_shut |= how != Shutdown::Read;
        self.command(Command::Shut { socket: handle, how })
    }

    /// The options of a connection, or of those that a listener takes.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotConnected`] when it was closed.
    pub fn options(&mut self, handle: Handle) -> io::Result<TcpOptions> {
        Ok(self.socket(handle)?.options)
    }

    /// Changes the options of a connection.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotConnected`] when it was closed.
    pub fn set_options(&mut self, handle: Handle, options: TcpOptions) -> io::Result<()> {
        let options = options.within_limits();
        self.socket(handle)?.options = options;
        self.command(Command::Set { socket: handle, options })
    }
}
