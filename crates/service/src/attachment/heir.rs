//! What a child of this process gets when it is forked.

use std::io;
use std::os::unix::net::UnixStream;

use super::{Attachment, be_welcomed};
use crate::contract::greeting::Hello;

impl Attachment {
    /// A second attachment, with all sockets of this one by the same names: for a
    /// child that is about to be forked. Whoever has it closes its sockets by
    /// itself, and a socket ends when nobody has it any more. It is to be dropped
    /// in the process that does not use it.
    ///
    /// # Errors
    /// As [`Attachment::connect`]; [`io::ErrorKind::ConnectionAborted`] when the
    /// daemon has ended.
    pub fn heir(&mut self) -> io::Result<Self> {
        // What was closed before is not inherited.
        self.ping()?;
        let hello = Hello::Inherit(self.ticket, self.name.clone());
        let (connection, welcome) = be_welcomed(&self.path, &hello)?;
        let mut heir = Self::new(connection, welcome, &self.path, &self.name)?;
        heir.sockets.resize_with(self.sockets.len(), || None);
        for (own, place) in self.sockets.iter_mut().zip(&mut heir.sockets) {
            let Some(socket) = own else { continue };
            *place = Some(Box::new(socket.for_heir(&heir.memory)?));
            // What happened so far was told to others.
            heir.changed.push_back(socket.handle);
        }
        Ok(heir)
    }

    /// In a child that got no attachment of its own: the daemon knows by the
    /// connection that the parent is there, and by nothing else.
    pub fn abandon(&mut self) {
        self.is_over = true;
        // Without another descriptor the parent seems to live until the child ends.
        if let Ok((connection, _)) = UnixStream::pair() {
            self.connection = connection.into();
        }
    }
}
