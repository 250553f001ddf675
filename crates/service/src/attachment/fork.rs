//! Attachments for fork children.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use super::{Attachment, handshake};
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
        let (connection, welcome) = handshake(&self.path, &hello)?;
        let mut child = Self::new(connection, welcome, &self.path, &self.name)?;
        child.sockets.resize_with(self.sockets.len(), || None);
        for (own, slot) in self.sockets.iter_mut().zip(&mut child.sockets) {
            let Some(socket) = own else { continue };
            *slot = Some(Box::new(socket.for_fork_child(&child.memory)?));
            // Earlier changes were notified to the parent only: check every socket.
            child.changed.push_back(socket.handle);
        }
        Ok(child)
    }

    /// Abandons the attachment in a child that has none of its own. The daemon monitors the
    /// parent by this connection only.
    pub fn abandon(&mut self) {
        self.is_disconnected = true;
        // If the child kept its copy, the daemon would see the parent alive until the child exits.
        if let Ok((connection, _)) = UnixStream::pair() {
            self.connection = OwnedFd::from(connection).into();
        }
    }
}
