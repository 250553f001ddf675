//! What is said to a core, and how.

use std::io;
use std::sync::{Arc, mpsc};

use tidegate_gate::Settings;
use tidegate_memory::Doorbell;
use tidegate_port::spread::{LocalPort, Sharing};

use super::application::Application;
use super::family::Family;
use super::handover::HandOver;
use super::passing::Request;
use super::report::{GateState, Report};
use crate::contract::ticket::Ticket;

/// What others want of the core.
pub(super) enum Message {
    /// An application has attached. One that inherits looks for its parent, core by
    /// core: so many have been asked.
    Joined(Box<Application>, usize),
    /// An application shows the descriptor of a socket that is on its way.
    Pass(Box<Request>),
    /// A core wants a port, for one of its applications.
    Wanted(WantedPort),
    /// Applications come from another core.
    Adopt(Box<Family>),
    /// Applications go to another core that have so much of this one to do.
    Shed { to: usize, busy: u32 },
    /// The application of a process goes to another core.
    Give { pid: u32, to: usize },
    /// How things stand.
    Report(mpsc::Sender<Report>),
    /// Receive scheduling, with these settings from now on if there are any.
    Gate(Option<Settings>, mpsc::Sender<io::Result<GateState>>),
    /// Everything goes to the core with the card, which is told when it has gone.
    Gather,
    /// A core has done so; so many applications and sockets could not go.
    Gathered { left: usize },
    /// Another daemon is to go on in this one's place.
    HandOver(HandOver),
    /// It ends.
    Stop,
}

/// A port that an application wants and another core has.
#[derive(Clone, Copy)]
pub(super) struct WantedPort {
    pub(super) port: LocalPort,
    /// With whom it may be shared.
    pub(super) sharing: Sharing,
    /// The core that the application was on.
    pub(super) by: usize,
    /// The application's.
    pub(super) ticket: Ticket,
    /// A core that was asked had the port, or nobody.
    pub(super) is_found: bool,
    /// How often all may be asked again.
    pub(super) laps: u32,
}

/// How others reach the core.
#[derive(Clone)]
pub(super) struct Post {
    pub(super) messages: mpsc::Sender<Message>,
    pub(super) bell: Arc<Doorbell>,
}

/// Where messages to a core arrive.
pub(super) struct Inbox {
    pub(super) messages: mpsc::Receiver<Message>,
    pub(super) bell: Arc<Doorbell>,
}

impl Post {
    /// A way to a core, and its end.
    ///
    /// # Errors
    /// When the process has no descriptor left.
    pub(super) fn new() -> io::Result<(Self, Inbox)> {
        let (sender, messages) = mpsc::channel();
        let bell = Arc::new(Doorbell::new()?);
        Ok((Self { messages: sender, bell: Arc::clone(&bell) }, Inbox { messages, bell }))
    }

    /// # Errors
    /// When the core has ended.
    pub(super) fn send(&self, message: Message) -> io::Result<()> {
        self.messages.send(message).map_err(|_| io::Error::other("the network core has ended"))?;
        self.bell.ring();
        Ok(())
    }

    /// How things stand.
    ///
    /// # Errors
    /// When the core has ended.
    pub(super) fn report(&self) -> io::Result<Report> {
        let (sender, receiver) = mpsc::channel();
        self.send(Message::Report(sender))?;
        receiver.recv().map_err(|_| io::Error::other("the network core has ended"))
    }
}
