//! Sockets of an attachment.

use std::io;
use std::net::SocketAddr;
use std::sync::atomic::Ordering;

use tidegate_memory::shared::{PeerError, SharedWords};
use tidegate_stack::{TcpOptions, TcpReadiness};

use super::Attachment;
use super::udp_errors::ErrorReports;
use crate::ipc::command::{Command, Handle};
use crate::ipc::layout::{MemoryLock, SharedMemory, SocketSlot, StreamIn, StreamKind, StreamOut};
use crate::ipc::notification::OpenedSocket;
use crate::ipc::status::{SocketState, Status};

/// Type of a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SocketType {
    /// UDP socket.
    Udp,
    /// Listener.
    Listener,
    /// TCP connection.
    Stream,
}

/// Socket with a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChangedSocket {
    /// The socket.
    pub handle: Handle,
    /// Its type.
    pub socket_type: SocketType,
    /// Bytes have arrived or the status has changed since the last change of the socket. False
    /// only if nothing but space for sending can be new.
    pub has_news: bool,
}

/// Application's side of a socket: its slot and its ends of the streams.
pub(super) struct AttachedSocket {
    pub(super) handle: Handle,
    pub(super) socket_type: SocketType,
    pub(super) slot: SocketSlot,
    /// Stream from the daemon; `None` for a listener.
    pub(super) read: Option<StreamIn>,
    /// Stream to the daemon; `None` for a listener.
    pub(super) write: Option<StreamOut>,
    pub(super) local: Option<SocketAddr>,
    pub(super) peer: Option<SocketAddr>,
    pub(super) options: TcpOptions,
    /// Value of the status's error counter when the last error was taken.
    errors_taken: u8,
    /// Bytes that had arrived, and the status, when a change was last reported.
    last_news: Option<(u64, Status)>,
    /// Another process held the socket too, and may still hold it.
    pub(super) may_be_shared: bool,
    /// The memory of the socket is not locked although others hold it.
    pub(super) forgoes_lock: bool,
    /// Errors about datagrams that the socket has sent.
    pub(super) error_reports: ErrorReports,
    /// The application has shut down reading.
    pub(super) is_read_shut_down: bool,
    /// The application has shut down writing.
    pub(super) is_write_shut_down: bool,
}

impl AttachedSocket {
    pub(super) fn new(
        memory: &SharedMemory,
        opened: &OpenedSocket,
        socket_type: SocketType,
        options: TcpOptions,
    ) -> io::Result<Self> {
        let slot = memory.slot(opened.handle.slot)?;
        Self::in_slot(slot, opened, socket_type, options.within_limits())
    }

    /// Socket in a slot of another application's memory, with the change flag in `own`. Its
    /// streams are already in use.
    pub(super) fn in_foreign_memory(
        memory: &SharedMemory,
        slot: u32,
        own: &SharedMemory,
        opened: &OpenedSocket,
        socket_type: SocketType,
    ) -> io::Result<Self> {
        let slot = memory.slot(slot)?.with_change_flag_in(own, opened.handle.slot)?;
        let socket = Self::in_slot(slot, opened, socket_type, TcpOptions::default())?;
        let mut error_reports = ErrorReports::default();
        // The options of a foreign socket are not known here. Streams have no reports.
        error_reports.expect(socket_type == SocketType::Udp);
        Ok(Self { may_be_shared: true, error_reports, ..socket })
    }

    fn in_slot(
        slot: SocketSlot,
        opened: &OpenedSocket,
        socket_type: SocketType,
        options: TcpOptions,
    ) -> io::Result<Self> {
        let (read, write) = open_streams(socket_type, &slot)?;
        Ok(Self {
            handle: opened.handle,
            socket_type,
            slot,
            read,
            write,
            local: opened.local,
            peer: opened.peer,
            options,
            errors_taken: 0,
            last_news: None,
            may_be_shared: false,
            forgoes_lock: false,
            error_reports: ErrorReports::default(),
            is_read_shut_down: false,
            is_write_shut_down: false,
        })
    }

    /// Same socket for a fork child, with the change flag in the child's `memory`.
    pub(super) fn for_fork_child(&mut self, memory: &SharedMemory) -> io::Result<Self> {
        let slot = self.slot.with_change_flag_in(memory, self.handle.slot)?;
        let (read, write) = open_streams(self.socket_type, &slot)?;
        self.may_be_shared = true;
        let error_reports = self.error_reports.for_other_holder();
        Ok(Self { slot, read, write, error_reports, ..*self })
    }

    /// Prepares the streams for use: they continue where the last process left them. While
    /// several processes hold the socket, also locks its memory.
    ///
    /// # Errors
    /// [`io::ErrorKind::ConnectionAborted`] if another process has written invalid stream
    /// indices.
    pub(super) fn lock_streams(&mut self) -> io::Result<Option<MemoryLock>> {
        if !self.may_be_shared || self.read.is_none() {
            return Ok(None);
        }
        let is_locked = self.status().shared && !self.forgoes_lock;
        let lock = is_locked.then(|| self.slot.lock()).transpose()?;
        let aborted = |_: PeerError| io::ErrorKind::ConnectionAborted;
        if let (Some(read), Some(write)) = (&mut self.read, &mut self.write) {
            read.resume().and_then(|()| write.resume()).map_err(aborted)?;
        }
        Ok(lock)
    }

    /// Status of the socket. Stream data written before the status is visible after this read.
    pub(super) fn status(&self) -> Status {
        let word = self.slot.status.words().first();
        Status::from_word(word.map_or(0, |word| word.load(Ordering::Acquire)))
    }

    /// True if bytes have arrived or the status has changed since the last call. Always true for
    /// datagrams and listeners.
    pub(super) fn take_news(&mut self) -> bool {
        let Some(read) = self.read.as_ref().filter(|_| self.socket_type == SocketType::Stream)
        else {
            return true;
        };
        let now = Some((read.published(), self.status()));
        std::mem::replace(&mut self.last_news, now) != now
    }

    /// Last error, if it has not been taken yet.
    pub(super) fn take_error(&mut self, status: &Status) -> Option<io::ErrorKind> {
        let is_new = self.has_error(status);
        self.errors_taken = status.error_count;
        status.error.filter(|_| is_new)
    }

    pub(super) fn has_error(&self, status: &Status) -> bool {
        status.error_count != self.errors_taken
    }
}

/// Application's ends of a socket's streams, if the socket has any.
fn open_streams(
    socket_type: SocketType,
    slot: &SocketSlot,
) -> io::Result<(Option<StreamIn>, Option<StreamOut>)> {
    let stream_kind = match socket_type {
        SocketType::Udp => Some(StreamKind::Datagrams),
        SocketType::Stream => Some(StreamKind::Bytes),
        SocketType::Listener => None,
    };
    Ok(stream_kind.map(|carries| slot.application_streams(carries)).transpose()?.unzip())
}

impl Attachment {
    /// State of a socket.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotConnected`] if the socket is closed.
    pub fn state(&mut self, handle: Handle) -> io::Result<SocketState> {
        Ok(self.socket(handle)?.status().state)
    }

    /// Readiness of a socket. A closed socket is ready in every way, to return its error.
    pub fn readiness(&mut self, handle: Handle) -> TcpReadiness {
        self.try_readiness(handle).unwrap_or(TcpReadiness {
            readable: true,
            writable: true,
            read_closed: true,
            write_closed: true,
            failed: true,
        })
    }

    fn try_readiness(&mut self, handle: Handle) -> io::Result<TcpReadiness> {
        let socket = self.socket(handle)?;
        let status = socket.status();
        let _lock = socket.lock_streams()?;
        let socket = match socket.error_reports.are_expected() {
            true => {
                self.collect_error_reports(handle)?;
                self.socket(handle)?
            }
            false => socket,
        };
        let has_error = socket.has_error(&status);
        let is_closed = status.state == SocketState::Over;
        let read_closed = status.read_closed || is_closed || socket.is_read_shut_down;
        let write_closed = status.write_closed || is_closed || socket.is_write_shut_down;
        let available = socket.read.as_mut().map_or(Ok(0), StreamIn::available);
        let limit = match socket.socket_type {
            SocketType::Stream => socket.options.send_buffer_bytes as usize,
            // The longest datagram needs much space: any space counts as writable.
            _ => usize::MAX,
        };
        let send_space = |write: &mut StreamOut| write.space_within(limit);
        let space = socket.write.as_mut().map_or(Ok(0), send_space);
        let is_connecting = status.state == SocketState::Connecting;
        let mut has_space = matches!(space, Ok(1..)) && !is_connecting;
        if !has_space && !is_connecting && socket.write.is_some() {
            // The application waits for space after it has learned that there is none.
            socket.slot.notify_on_tx_space.request();
            has_space = matches!(socket.write.as_mut().map_or(Ok(0), send_space), Ok(1..));
        }
        let has_data = !matches!(available, Ok(0));
        Ok(TcpReadiness {
            readable: has_data || status.accept_ready || read_closed || has_error,
            writable: has_space || write_closed || has_error,
            read_closed,
            write_closed,
            failed: has_error,
        })
    }

    /// Takes the last error of a socket. The same error is returned once.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotConnected`] if the socket is closed.
    pub fn take_error(&mut self, handle: Handle) -> io::Result<Option<io::ErrorKind>> {
        let socket = self.socket(handle)?;
        let status = socket.status();
        let error = socket.take_error(&status);
        error.inspect(|&kind| self.note_datagram_error(kind));
        Ok(error)
    }

    /// Local address of a socket.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotConnected`] if the socket is closed.
    pub fn local_addr(&mut self, handle: Handle) -> io::Result<SocketAddr> {
        self.socket(handle)?.local.ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    /// Remote address of a socket.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotConnected`] if the socket is not connected.
    pub fn peer_addr(&mut self, handle: Handle) -> io::Result<SocketAddr> {
        self.socket(handle)?.peer.ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    /// Closes a socket. With `reset_on_close` a connection is reset (RST). Otherwise unsent data
    /// is still sent.
    pub fn close(&mut self, handle: Handle, reset_on_close: bool) {
        if self.get(handle).is_none() {
            return;
        }
        self.sockets[handle.slot as usize] = None;
        // A daemon that has exited has closed all sockets.
        let _ = self.send_command(Command::Close { socket: handle, reset_on_close });
    }
}
