//! A socket as the application has it.

use std::io;
use std::net::SocketAddr;
use std::sync::atomic::Ordering;

use tidegate_memory::shared::{Broken, Words};
use tidegate_stack::{TcpOptions, TcpReadiness};

use super::Attachment;
use crate::contract::command::{Command, Handle};
use crate::contract::layout::{Carries, Memory, Place, StreamIn, StreamOut, Turn};
use crate::contract::notice::Granted;
use crate::contract::status::{Phase, Status};

/// What a socket is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A UDP socket.
    Datagrams,
    /// It listens for connections.
    Listener,
    /// A connection.
    Stream,
}

/// A socket as the application has it.
pub(super) struct Socket {
    pub(super) handle: Handle,
    pub(super) kind: Kind,
    pub(super) place: Place,
    /// What comes; a listener has none.
    pub(super) read: Option<StreamIn>,
    /// What goes; a listener has none.
    pub(super) write: Option<StreamOut>,
    pub(super) local: Option<SocketAddr>,
    pub(super) peer: Option<SocketAddr>,
    pub(super) options: TcpOptions,
    /// How many errors were taken.
    errors_taken: u8,
    /// Another process had it too, and may have it still.
    pub(super) is_inherited: bool,
    /// Reading was shut here.
    pub(super) is_read_shut: bool,
    /// Writing was shut here.
    pub(super) is_write_shut: bool,
}

impl Socket {
    pub(super) fn new(
        memory: &Memory,
        granted: &Granted,
        kind: Kind,
        options: TcpOptions,
    ) -> io::Result<Self> {
        let place = memory.place(granted.socket.place)?;
        Self::at(place, granted, kind, options.within_limits())
    }

    /// One that is in a place of another application's memory; changes are told by
    /// `own`. Its streams are somewhere in the midst.
    pub(super) fn of_another(
        memory: &Memory,
        place: u32,
        own: &Memory,
        granted: &Granted,
        kind: Kind,
    ) -> io::Result<Self> {
        let place = memory.place(place)?.told_by(own, granted.socket.place)?;
        let socket = Self::at(place, granted, kind, TcpOptions::default())?;
        Ok(Self { is_inherited: true, ..socket })
    }

    fn at(place: Place, granted: &Granted, kind: Kind, options: TcpOptions) -> io::Result<Self> {
        let (read, write) = ends(kind, &place)?;
        Ok(Self {
            handle: granted.socket,
            kind,
            place,
            read,
            write,
            local: granted.local,
            peer: granted.peer,
            options,
            errors_taken: 0,
            is_inherited: false,
            is_read_shut: false,
            is_write_shut: false,
        })
    }

    /// The same socket for a child, who is told of changes by `memory`.
    pub(super) fn for_heir(&mut self, memory: &Memory) -> io::Result<Self> {
        let place = self.place.told_by(memory, self.handle.place)?;
        let (read, write) = ends(self.kind, &place)?;
        self.is_inherited = true;
        Ok(Self { place, read, write, ..*self })
    }

    /// Before the streams are used: they go on where the last process left them.
    /// While there are several of them, each waits for its turn.
    ///
    /// # Errors
    /// [`io::ErrorKind::ConnectionAborted`] when another process has written
    /// nonsense there.
    pub(super) fn begin(&mut self) -> io::Result<Option<Turn>> {
        if !self.is_inherited || self.read.is_none() {
            return Ok(None);
        }
        let turn = self.status().shared.then(|| self.place.turn()).transpose()?;
        let aborted = |_: Broken| io::ErrorKind::ConnectionAborted;
        if let (Some(read), Some(write)) = (&mut self.read, &mut self.write) {
            read.resume().and_then(|()| write.resume()).map_err(aborted)?;
        }
        Ok(turn)
    }

    /// How it stands. What came before the status was written is there when it
    /// is read.
    pub(super) fn status(&self) -> Status {
        let word = self.place.status.words().first();
        Status::from_word(word.map_or(0, |word| word.load(Ordering::Acquire)))
    }

    /// The last error, if it was not taken yet.
    pub(super) fn take_error(&mut self, status: &Status) -> Option<io::ErrorKind> {
        let is_new = self.has_error(status);
        self.errors_taken = status.errors;
        status.error.filter(|_| is_new)
    }

    pub(super) fn has_error(&self, status: &Status) -> bool {
        status.errors != self.errors_taken
    }
}

/// Our ends of the streams of a socket, if it has any.
fn ends(kind: Kind, place: &Place) -> io::Result<(Option<StreamIn>, Option<StreamOut>)> {
    let carries = match kind {
        Kind::Datagrams => Some(Carries::Datagrams),
        Kind::Stream => Some(Carries::Bytes),
        Kind::Listener => None,
    };
    Ok(carries.map(|carries| place.application_ends(carries)).transpose()?.unzip())
}

impl Attachment {
    /// How far a socket has come.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotConnected`] when it was closed.
    pub fn phase(&mut self, handle: Handle) -> io::Result<Phase> {
        Ok(self.socket(handle)?.status().phase)
    }

    /// What a socket is ready for. One that was closed is ready for its error.
    pub fn readiness(&mut self, handle: Handle) -> TcpReadiness {
        self.look(handle).unwrap_or(TcpReadiness {
            readable: true,
            writable: true,
            read_closed: true,
            write_closed: true,
            failed: true,
        })
    }

    fn look(&mut self, handle: Handle) -> io::Result<TcpReadiness> {
        let socket = self.socket(handle)?;
        let status = socket.status();
        let _turn = socket.begin()?;
        let has_error = socket.has_error(&status);
        let is_over = status.phase == Phase::Over;
        let read_closed = status.read_closed || is_over || socket.is_read_shut;
        let write_closed = status.write_closed || is_over || socket.is_write_shut;
        let available = socket.read.as_mut().map_or(Ok(0), StreamIn::available);
        let limit = match socket.kind {
            Kind::Stream => socket.options.send_buffer_bytes as usize,
            // As much as the longest datagram takes is no little.
            _ => usize::MAX,
        };
        let room = |write: &mut StreamOut| write.room_within(limit);
        let found = socket.write.as_mut().map_or(Ok(0), room);
        let is_connecting = status.phase == Phase::Connecting;
        let mut has_room = matches!(found, Ok(1..)) && !is_connecting;
        if !has_room && !is_connecting && socket.write.is_some() {
            // Whoever was told that there is none waits for it.
            socket.place.room.ask();
            has_room = matches!(socket.write.as_mut().map_or(Ok(0), room), Ok(1..));
        }
        let has_data = !matches!(available, Ok(0));
        Ok(TcpReadiness {
            readable: has_data || status.acceptable || read_closed || has_error,
            writable: has_room || write_closed || has_error,
            read_closed,
            write_closed,
            failed: has_error,
        })
    }

    /// The error of a socket, once.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotConnected`] when it was closed.
    pub fn take_error(&mut self, handle: Handle) -> io::Result<Option<io::ErrorKind>> {
        let socket = self.socket(handle)?;
        let status = socket.status();
        Ok(socket.take_error(&status))
    }

    /// Its own address.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotConnected`] when it was closed.
    pub fn local_addr(&mut self, handle: Handle) -> io::Result<SocketAddr> {
        self.socket(handle)?.local.ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    /// Whom it is connected to.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotConnected`] when it is not.
    pub fn peer_addr(&mut self, handle: Handle) -> io::Result<SocketAddr> {
        self.socket(handle)?.peer.ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    /// Has no use for a socket any more. A connection is broken off if `abrupt`;
    /// else what was written still goes out.
    pub fn close(&mut self, handle: Handle, abrupt: bool) {
        if self.get(handle).is_none() {
            return;
        }
        self.sockets[handle.place as usize] = None;
        // A daemon that has ended has closed everything.
        let _ = self.command(Command::Close { socket: handle, abrupt });
    }
}
