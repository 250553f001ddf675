//! Inbox of a network core.

use std::io;
use std::sync::{Arc, mpsc};

use tidegate_memory::Doorbell;

use super::message::{CoreMessage, ReportAnswer};

/// Sender to a core's inbox.
#[derive(Clone)]
pub(in crate::daemon) struct InboxSender {
    pub(in crate::daemon) messages: mpsc::Sender<CoreMessage>,
    pub(in crate::daemon) bell: Arc<Doorbell>,
}

/// Inbox of a core.
pub(in crate::daemon) struct Inbox {
    pub(in crate::daemon) messages: mpsc::Receiver<CoreMessage>,
    pub(in crate::daemon) bell: Arc<Doorbell>,
}

impl InboxSender {
    /// Creates an inbox and its sender.
    ///
    /// # Errors
    /// When no file descriptor is left in the process.
    pub(in crate::daemon) fn new() -> io::Result<(Self, Inbox)> {
        let (sender, messages) = mpsc::channel();
        let bell = Arc::new(Doorbell::new()?);
        Ok((Self { messages: sender, bell: Arc::clone(&bell) }, Inbox { messages, bell }))
    }

    /// # Errors
    /// When the core has ended.
    pub(in crate::daemon) fn send(&self, message: CoreMessage) -> io::Result<()> {
        self.messages.send(message).map_err(|_| io::Error::other("the network core has ended"))?;
        self.bell.ring();
        Ok(())
    }

    /// Report of the core.
    ///
    /// # Errors
    /// When the core has ended.
    pub(in crate::daemon) fn report(&self) -> io::Result<ReportAnswer> {
        let (sender, receiver) = mpsc::channel();
        self.send(CoreMessage::Report(sender))?;
        receiver.recv().map_err(|_| io::Error::other("the network core has ended"))
    }
}
