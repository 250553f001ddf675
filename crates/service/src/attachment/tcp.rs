//! TCP byte streams of an attachment.

use std::io;

use tidegate_stack::{Shutdown, TcpOptions};

use super::Attachment;
use crate::ipc::command::{Command, Handle};
use crate::ipc::layout::StreamIn;
use crate::ipc::status::SocketState;

impl Attachment {
    /// Reads received bytes; 0 means end of stream. With `peek` the bytes stay in the stream.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] if no bytes have arrived;
    /// [`io::ErrorKind::NotConnected`] before the connection is established; the error that
    /// ended the connection, once.
    pub fn recv(&mut self, handle: Handle, buf: &mut [u8], peek: bool) -> io::Result<usize> {
        let socket = self.socket(handle)?;
        let _lock = socket.lock_streams()?;
        // Read the status first: the stream then holds all data that precedes the end.
        let status = socket.status();
        let Some(read) = &mut socket.read else { return Err(io::ErrorKind::NotConnected.into()) };
        if buf.is_empty() {
            return Ok(0);
        }
        if socket.is_read_shut_down {
            return Ok(0);
        }
        let len = match read.peek(0, buf) {
            Ok(len) => len,
            Err(broken) => return Err(self.disconnect(broken)),
        };
        if len > 0 {
            if !peek {
                read.skip(len);
                read.release();
                if socket.slot.poll_on_rx_space.take() {
                    self.send_command(Command::Poll(handle))?;
                }
            }
            return Ok(len);
        }
        // The end of the peer's data stays the end, whatever error follows.
        if status.read_closed {
            return Ok(0);
        }
        let is_ended = status.state == SocketState::Over;
        // The daemon may still hold bytes that were received before the error.
        if is_ended && let Some(kind) = socket.take_error(&status) {
            return Err(kind.into());
        }
        match status.state {
            SocketState::Connecting => Err(io::ErrorKind::NotConnected.into()),
            _ if is_ended => Ok(0),
            _ => Err(io::ErrorKind::WouldBlock.into()),
        }
    }

    /// Writes as much of `data` as fits. Returns the number of bytes written.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] if there is no space;
    /// [`io::ErrorKind::NotConnected`] before the connection is established;
    /// [`io::ErrorKind::BrokenPipe`] after writing has ended; the error that ended the
    /// connection, once.
    pub fn send(&mut self, handle: Handle, data: &[u8]) -> io::Result<usize> {
        let socket = self.socket(handle)?;
        let _lock = socket.lock_streams()?;
        let status = socket.status();
        if let Some(kind) = socket.take_error(&status) {
            return Err(kind.into());
        }
        if status.write_closed || socket.is_write_shut_down || status.state == SocketState::Over {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        if status.state == SocketState::Connecting {
            return Err(io::ErrorKind::NotConnected.into());
        }
        let Some(write) = &mut socket.write else { return Err(io::ErrorKind::NotConnected.into()) };
        // Limits unsent data to the application's send buffer size.
        let limit = socket.options.send_buffer_bytes as usize;
        let mut written = write.write_within(limit, data);
        if written == Ok(0) && !data.is_empty() {
            socket.slot.notify_on_tx_space.request();
            written = write.write_within(limit, data);
        }
        let len = match written {
            Ok(0) if !data.is_empty() => return Err(io::ErrorKind::WouldBlock.into()),
            Ok(len) => len,
            Err(broken) => return Err(self.disconnect(broken)),
        };
        write.publish();
        if socket.slot.poll_on_write.take() {
            self.send_command(Command::Poll(handle))?;
        }
        Ok(len)
    }

    /// Bytes that can be read at once.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotConnected`] if the socket is closed.
    pub fn readable_bytes(&mut self, handle: Handle) -> io::Result<usize> {
        let socket = self.socket(handle)?;
        let _lock = socket.lock_streams()?;
        match socket.read.as_mut().map_or(Ok(0), StreamIn::available) {
            Ok(len) => Ok(len),
            Err(broken) => Err(self.disconnect(broken)),
        }
    }

    /// Bytes that can be written at once. The error of an ended connection stays for other calls.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotConnected`] if the socket is closed.
    pub fn writable_bytes(&mut self, handle: Handle) -> io::Result<usize> {
        // Requests a notification if there is no space.
        let is_closed = self.readiness(handle).write_closed;
        let socket = self.socket(handle)?;
        if is_closed || socket.status().state != SocketState::Connected {
            return Ok(0);
        }
        let _lock = socket.lock_streams()?;
        let limit = socket.options.send_buffer_bytes as usize;
        match socket.write.as_mut().map_or(Ok(0), |write| write.space_within(limit)) {
            Ok(space) => Ok(space),
            Err(broken) => Err(self.disconnect(broken)),
        }
    }

    /// Shuts down reading, writing or both. Ends an attempt to connect.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotConnected`] if the connection has ended.
    pub fn shutdown(&mut self, handle: Handle, how: Shutdown) -> io::Result<()> {
        let socket = self.socket(handle)?;
        match socket.status().state {
            // The daemon ends the attempt, and has reported the error when the call returns.
            SocketState::Connecting => {
                self.send_command(Command::Shutdown { socket: handle, how })?;
                return self.ping().map(|_| ());
            }
            SocketState::Connected => {
                socket.is_read_shut_down |= how != Shutdown::Write;
                socket.is_write_shut_down |= how != Shutdown::Read;
            }
            _ => return Err(io::ErrorKind::NotConnected.into()),
        }
        self.send_command(Command::Shutdown { socket: handle, how })
    }

    /// Options of a connection, or those that a listener passes on to its connections.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotConnected`] if the socket is closed.
    pub fn options(&mut self, handle: Handle) -> io::Result<TcpOptions> {
        Ok(self.socket(handle)?.options)
    }

    /// Sets the options of a connection.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotConnected`] if the socket is closed.
    pub fn set_options(&mut self, handle: Handle, options: TcpOptions) -> io::Result<()> {
        let options = options.within_limits();
        self.socket(handle)?.options = options;
        self.send_command(Command::SetOptions { socket: handle, options })
    }
}
