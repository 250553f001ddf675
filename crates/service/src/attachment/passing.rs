//! Sockets that come from other processes, or go there, with a descriptor of the
//! kernel's.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use super::ask::PATIENCE;
use super::socket::{Kind, Socket};
use super::{Attachment, call_at};
use crate::contract::command::Handle;
use crate::contract::greeting::{Hello, Part, Passing, send_hello};
use crate::contract::layout::Memory;
use crate::contract::taken::{Carried, Taken, receive_outcome};

/// A socket that came from another process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrived {
    /// Its name.
    pub socket: Handle,
    /// What it is.
    pub kind: Kind,
    /// This attachment did not have it before.
    pub is_new: bool,
    /// How many sockets go with the descriptor.
    pub parts: u8,
}

impl Attachment {
    /// Before a descriptor of the kernel's is handed to another process: whoever
    /// shows it, by [`Attachment::take`], gets this socket. One process can take it
    /// for each time it was offered, and for a minute it stays open for that.
    ///
    /// # Errors
    /// [`io::ErrorKind::QuotaExceeded`] when too many of this user's are on their
    /// way; [`io::ErrorKind::InvalidInput`] when the socket was offered with another
    /// descriptor; what [`Attachment::connect`] says, as the daemon is called.
    pub fn offer(
        &mut self,
        socket: Handle,
        part: Part,
        descriptor: BorrowedFd<'_>,
    ) -> io::Result<()> {
        // From now on others may use its streams.
        self.socket(socket)?.is_inherited = true;
        self.pass(Passing::Offer(socket, part), descriptor).map(|_| ())
    }

    /// The descriptor was not handed on after all, and so the part of this number was
    /// not.
    ///
    /// # Errors
    /// As [`Attachment::offer`].
    pub fn withdraw(&mut self, part: u8, descriptor: BorrowedFd<'_>) -> io::Result<()> {
        self.pass(Passing::Withdraw(part), descriptor).map(|_| ())
    }

    /// The part of this number that was offered with this descriptor, or the listener
    /// that is on it.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotConnected`] when there is none,
    /// [`io::ErrorKind::PermissionDenied`] when it is another user's,
    /// [`io::ErrorKind::QuotaExceeded`] when there is no place for it.
    pub fn take(&mut self, part: u8, descriptor: BorrowedFd<'_>) -> io::Result<Arrived> {
        let taken = self.pass(Passing::Take(part), descriptor)?;
        let Taken { granted, carries, is_new, parts, place, memory } =
            taken.ok_or(io::ErrorKind::InvalidData)?;
        let kind = match carries {
            Carried::Datagrams => Kind::Datagrams,
            Carried::Listener => Kind::Listener,
            Carried::Stream => Kind::Stream,
        };
        let arrived = Arrived { socket: granted.socket, kind, is_new, parts };
        if is_new {
            if !self.elsewhere.iter().any(|known| known.is_same(&memory)) {
                self.elsewhere.push(memory.clone());
            }
            let socket = Socket::of_another(&memory, place, &self.memory, &granted, kind)?;
            self.insert(socket);
        }
        Ok(arrived)
    }

    /// Before a port is bound here that the program has bound at the kernel itself, by
    /// this descriptor. Only so it gets one of the kernel's addresses; and a listener
    /// is then, as at the kernel, that of all who have the descriptor: they get it by
    /// [`Attachment::take`], as this part.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] when the descriptor is not that of a bound
    /// socket, and as [`Attachment::offer`].
    pub fn hold(&mut self, part: Part, descriptor: BorrowedFd<'_>) -> io::Result<()> {
        self.pass(Passing::Hold(part), descriptor).map(|_| ())
    }

    fn pass(&mut self, passing: Passing, descriptor: BorrowedFd<'_>) -> io::Result<Option<Taken>> {
        let connection = call_at(&self.path)?;
        connection.set_read_timeout(Some(PATIENCE))?;
        let descriptor = descriptor.try_clone_to_owned()?;
        send_hello(connection.as_fd(), &Hello::Pass(self.ticket, passing, descriptor))?;
        self.elsewhere.retain(Memory::is_in_use);
        let all = std::iter::once(&self.memory).chain(&self.elsewhere);
        let known = |piece: BorrowedFd<'_>| {
            let mut all = all;
            all.find(|memory| memory.has(piece)).cloned()
        };
        receive_outcome(connection.as_fd(), known)
    }
}
