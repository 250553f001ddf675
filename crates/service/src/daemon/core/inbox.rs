//! Messages to a network core, and its inbox.

use std::io;
use std::sync::{Arc, mpsc};

use tidegate_device::sharded::{LocalPort, PortSharing};
use tidegate_gate::Settings;
use tidegate_memory::Doorbell;

use crate::daemon::application::Application;
use crate::daemon::migrate::sets::MigrationBatch;
use crate::daemon::report::{DaemonReport, GateState};
use crate::daemon::transfer::request::TransferRequest;
use crate::daemon::upgrade::request::HandoverRequest;
use crate::ipc::takeover_token::TakeoverToken;

/// Message to a network core.
pub(in crate::daemon) enum CoreMessage {
    /// An application has attached. A fork child searches its parent core by core; the number
    /// counts the cores asked so far.
    Attach(Box<Application>, usize),
    /// An application presents the descriptor of a transferred socket.
    Transfer(Box<TransferRequest>),
    /// A core queries a port for one of its applications.
    PortQuery(PortQuery),
    /// Applications arrive from another core.
    InsertBatch(Box<MigrationBatch>),
    /// Move applications that cause up to this much load to another core.
    MoveLoad { to: usize, busy_permille: u32 },
    /// Migrate the application of a process to another core.
    MigrateProcess { pid: u32, to: usize },
    /// Report on this core and its applications.
    Report(mpsc::Sender<DaemonReport>),
    /// Apply receive-scheduling settings, if given, and return the state.
    Gate(Option<Settings>, mpsc::Sender<io::Result<GateState>>),
    /// Move everything to the primary core, then answer with `Gathered`.
    Gather,
    /// A core has moved all it could; `unmoved` applications and sockets remain there.
    Gathered { unmoved: usize },
    /// Hand over to another daemon.
    HandOver(HandoverRequest),
    /// Stop.
    Stop,
}

/// Query of a core for a port that another core has.
#[derive(Clone, Copy)]
pub(in crate::daemon) struct PortQuery {
    pub(in crate::daemon) port: LocalPort,
    /// Sharing under which the application wants the port.
    pub(in crate::daemon) sharing: PortSharing,
    /// Core of the application when the query started.
    pub(in crate::daemon) asking_core: usize,
    /// Takeover token of the application.
    pub(in crate::daemon) token: TakeoverToken,
    /// A queried core has the port or finds it free, or the asking core can claim it.
    pub(in crate::daemon) is_resolved: bool,
    /// Times that all cores may still be queried.
    pub(in crate::daemon) laps_left: u32,
}

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
    pub(in crate::daemon) fn report(&self) -> io::Result<DaemonReport> {
        let (sender, receiver) = mpsc::channel();
        self.send(CoreMessage::Report(sender))?;
        receiver.recv().map_err(|_| io::Error::other("the network core has ended"))
    }
}
