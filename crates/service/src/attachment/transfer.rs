//! Transfer of sockets between processes, together with a kernel file descriptor.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use super::Attachment;
use super::requests::REPLY_TIMEOUT;
use super::socket::{AttachedSocket, SocketType};
use crate::ipc::command::Handle;
use crate::ipc::connect::connect_to_daemon;
use crate::ipc::handshake::{Hello, Shard, TransferOperation, send_hello};
use crate::ipc::layout::SharedMemory;
use crate::ipc::transfer_reply::{TransferReply, TransferredType, receive_outcome};

/// Socket received from another process: a shard of the transferred socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReceivedShard {
    /// Handle at this attachment.
    pub socket: Handle,
    /// Type of the socket.
    pub socket_type: SocketType,
    /// False if this attachment held the socket before.
    pub is_new: bool,
    /// Number of shards that belong to the descriptor.
    pub shards: u8,
}

impl Attachment {
    /// Registers a socket for transfer, before its kernel descriptor is sent to another process.
    /// A process that presents the descriptor to [`Attachment::receive_socket`] receives the
    /// socket. Each call allows one process to receive it. The daemon keeps the socket open for
    /// one minute.
    ///
    /// # Errors
    /// [`io::ErrorKind::QuotaExceeded`] if this user has too many sockets in transit;
    /// [`io::ErrorKind::InvalidInput`] if the socket was sent with another descriptor; errors of
    /// [`Attachment::connect`], because the daemon is connected again.
    pub fn send_socket(
        &mut self,
        socket: Handle,
        shard: Shard,
        fd: BorrowedFd<'_>,
    ) -> io::Result<()> {
        // From now on other processes may use the socket's streams.
        self.socket(socket)?.may_be_shared = true;
        self.transfer(TransferOperation::Send(socket, shard), fd).map(|_| ())
    }

    /// Cancels the transfer of a shard, because the descriptor was not sent.
    ///
    /// # Errors
    /// As [`Attachment::send_socket`].
    pub fn withdraw_socket(&mut self, index: u8, fd: BorrowedFd<'_>) -> io::Result<()> {
        self.transfer(TransferOperation::Withdraw(index), fd).map(|_| ())
    }

    /// Receives the shard that was sent with this descriptor, or shares the listener on it.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotConnected`] if there is none;
    /// [`io::ErrorKind::PermissionDenied`] if the socket belongs to another user;
    /// [`io::ErrorKind::QuotaExceeded`] if this attachment has no free slot.
    pub fn receive_socket(&mut self, index: u8, fd: BorrowedFd<'_>) -> io::Result<ReceivedShard> {
        let reply = self.transfer(TransferOperation::Receive(index), fd)?;
        let TransferReply {
            socket: opened,
            socket_type: transferred_type,
            is_new,
            shards,
            slot,
            memory,
        } = reply.ok_or(io::ErrorKind::InvalidData)?;
        let socket_type = match transferred_type {
            TransferredType::Udp => SocketType::Udp,
            TransferredType::Listener => SocketType::Listener,
            TransferredType::Stream => SocketType::Stream,
        };
        let received = ReceivedShard { socket: opened.handle, socket_type, is_new, shards };
        if is_new {
            if !self.foreign_memories.iter().any(|other| other.is_same(&memory)) {
                self.foreign_memories.push(memory.clone());
            }
            let socket = AttachedSocket::in_foreign_memory(
                &memory,
                slot,
                &self.memory,
                &opened,
                socket_type,
            )?;
            self.insert(socket);
        }
        Ok(received)
    }

    /// Reserves a port before it is bound here: the application has bound the same port at the
    /// kernel, with this descriptor. The kernel's addresses can be bound only this way. As at
    /// the kernel, a listener then belongs to all processes that have the descriptor: they
    /// receive it by [`Attachment::receive_socket`], as this shard.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] if the descriptor is not a bound socket; errors of
    /// [`Attachment::send_socket`].
    pub fn reserve_port(&mut self, shard: Shard, fd: BorrowedFd<'_>) -> io::Result<()> {
        self.transfer(TransferOperation::ReservePort(shard), fd).map(|_| ())
    }

    fn transfer(
        &mut self,
        operation: TransferOperation,
        fd: BorrowedFd<'_>,
    ) -> io::Result<Option<TransferReply>> {
        let connection = connect_to_daemon(&self.path)?;
        connection.set_read_timeout(Some(REPLY_TIMEOUT))?;
        let fd = fd.try_clone_to_owned()?;
        let hello = Hello::Transfer(self.token, operation, fd);
        send_hello(connection.as_fd(), self.protocol, &hello)?;
        self.foreign_memories.retain(SharedMemory::is_in_use);
        let memories = std::iter::once(&self.memory).chain(&self.foreign_memories);
        let find_known = |fd: BorrowedFd<'_>| {
            let mut memories = memories;
            memories.find(|memory| memory.is_backed_by(fd)).cloned()
        };
        receive_outcome(connection.as_fd(), find_known)
    }
}
