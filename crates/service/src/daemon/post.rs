//! What is said to a core, and how.

use std::io;
use std::sync::{Arc, mpsc};

use tidegate_gate::Settings;
use tidegate_memory::Doorbell;

use super::application::Application;
use super::family::Family;
use super::passing::Request;
use super::report::{GateState, Report};
use super::save::Belongings;
use super::wanted_port::WantedPort;

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

/// How the core and who asks it to hand over hear of each other.
pub(super) struct HandOver {
    /// What there is to be handed over, or why it is not.
    pub(super) offer: mpsc::Sender<Result<Parcel, String>>,
    /// The process that has taken it and goes on, if any. The core waits for this
    /// word.
    pub(super) outcome: mpsc::Receiver<Option<u32>>,
}

impl HandOver {
    /// Says why nothing is handed over.
    pub(super) fn refuse(&self, why: &str) {
        // Who asked may have gone.
        let _ = self.offer.send(Err(why.to_owned()));
    }
}

/// Everything that another daemon needs.
pub(super) struct Parcel {
    pub(super) state: Vec<u8>,
    pub(super) belongings: Belongings,
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
