//! Attachments for fork children.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use super::{Attachment, SocketType, handshake};
use crate::ipc::handshake::Hello;

impl Attachment {
    /// Opens a second attachment with all sockets of this attachment and the same handles, for
    /// a child that is about to be forked. Parent and child close their sockets independently.
    /// A socket is freed when its last holder closes it. Each process must drop the attachment
    /// that it does not use.
    ///
    /// # Errors
    /// As [`Attachment::connect`]; [`io::ErrorKind::ConnectionAborted`] if the daemon has
    /// exited.
    pub fn fork_child(&mut self) -> io::Result<Self> {
        // Sockets closed before must not be inherited.
        self.ping()?;
        let hello = Hello::Inherit(self.token, self.name.clone());
        let (connection, welcome) = handshake(&self.path, self.protocol, &hello)?;
        let mut child = Self::new(connection, welcome, self.protocol, &self.path, &self.name)?;
        child.sockets.resize_with(self.sockets.len(), || None);
        for (own, slot) in self.sockets.iter_mut().zip(&mut child.sockets) {
            let Some(socket) = own else { continue };
            *slot = Some(Box::new(socket.for_fork_child(&child.memory)?));
            // Earlier changes were notified to the parent only: check every socket.
            child.changed.push_back(socket.handle);
        }
        Ok(child)
    }

    /// Locks the memory of the present connections no longer, although other processes hold them: for
    /// a process that is about to filter its system calls. The process vouches that no other one uses
    /// the connections at the same time; what they carry is undefined otherwise. UDP sockets, which
    /// several workers use, stay locked.
    pub fn forgo_locks(&mut self) {
        let connections = self
            .sockets
            .iter_mut()
            .flatten()
            .filter(|socket| socket.socket_type == SocketType::Stream);
        connections.for_each(|socket| socket.forgoes_lock = true);
    }

    /// Abandons the attachment in a child that has none of its own. The daemon monitors the
    /// parent by this connection only.
    pub fn abandon(&mut self) {
        self.is_disconnected = true;
        // If the child kept its copy, the daemon would see the parent alive until the child exits.
        if let Ok((connection, _)) = UnixStream::pair() {
            self.connection = Arc::new(OwnedFd::from(connection).into());
        }
    }
}
