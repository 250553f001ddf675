//! Event descriptors by which both sides of an attachment wake each other.

use std::io;
use std::os::fd::OwnedFd;

use rustix::event::{EventfdFlags, eventfd};

/// Event descriptor of each side of an attachment. Who writes a number to it ends a sleep of that
/// side. An edge-triggered wait finds each number without reading it.
#[derive(Clone, Debug)]
pub struct EventFds<Fd> {
    /// Descriptor on which the network core sleeps.
    pub daemon: Fd,
    /// Descriptor on which the application sleeps.
    pub application: Fd,
}

impl EventFds<OwnedFd> {
    /// Creates the descriptors.
    ///
    /// # Errors
    /// When the process has no file descriptor left.
    pub(crate) fn new() -> io::Result<Self> {
        let create = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        Ok(Self { daemon: create()?, application: create()? })
    }
}

impl<Fd> EventFds<Fd> {
    /// Changes the type of both descriptors.
    pub(crate) fn map<Other>(self, mut convert: impl FnMut(Fd) -> Other) -> EventFds<Other> {
        let Self { daemon, application } = self;
        EventFds { daemon: convert(daemon), application: convert(application) }
    }

    /// Both descriptors, in the order in which they are sent.
    pub(crate) fn in_order(&self) -> [&Fd; 2] {
        [&self.daemon, &self.application]
    }
}
