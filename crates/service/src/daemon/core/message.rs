//! Messages to a network core, with all that they carry.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, mpsc};

use tidegate_device::sharded::{LocalPort, PortSharing};
use tidegate_engine::capture::CaptureTap;
use tidegate_engine::{HeldSocket, PortClaim};
use tidegate_gate::{Settings, admission, transmit};
use tidegate_stack::{ExtractedSockets, OwnAddresses, TcpId};
use tidegate_wire::{DropCounters, Medium};

use crate::daemon::application::Application;
use crate::daemon::ids::{AppNumber, SocketKey};
use crate::daemon::report::{DaemonReport, GateState};
use crate::daemon::socket::AppSocket;
use crate::daemon::transfer::request::TransferRequest;
use crate::daemon::transfer::table::{FdCookie, SocketTransfer};
use crate::daemon::workers::AppFd;
use crate::ipc::layout::SharedMemory;
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
    /// Move these applications to another core, a part of them at a time: the part before has
    /// arrived.
    MoveNext { to: usize, apps: Vec<LeavingApp> },
    /// Migrate the application of a process to another core.
    MigrateProcess { pid: u32, to: usize },
    /// Report on this core and its applications.
    Report(mpsc::Sender<ReportAnswer>),
    /// Apply receive-scheduling settings, if given, and return the state.
    Gate(Option<Settings>, mpsc::Sender<io::Result<GateState>>),
    /// Enable admission control, or replace its configuration.
    Admission(Box<admission::Config>, mpsc::Sender<io::Result<()>>),
    /// Send by transmit classes, or by others.
    TransmitClasses(Box<transmit::Config>, mpsc::Sender<io::Result<()>>),
    /// Return whether the own addresses are unique.
    OwnAddresses(mpsc::Sender<OwnAddresses>),
    /// Return the drops at the device and in the stack.
    Drops(mpsc::Sender<DropCounters>),
    /// Return the medium of the device.
    Medium(mpsc::Sender<Medium>),
    /// Begin a capture.
    StartCapture(Box<CaptureTap>, mpsc::Sender<io::Result<()>>),
    /// End the capture with this number.
    EndCapture(u64, mpsc::Sender<()>),
    /// Move everything to the primary core, then answer with `Gathered`.
    Gather,
    /// A core has moved all it could; `unmoved` applications and sockets remain there, for a reason
    /// if the core could not send them.
    Gathered { unmoved: usize, why: Option<NotMigrated> },
    /// Hand over to another daemon.
    HandOver(HandoverRequest),
    /// Stop.
    Stop,
}

/// Reason for which sockets stay on their core.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(in crate::daemon) enum NotMigrated {
    #[error("another network core does not run")]
    CoreHangs,
    #[error("no frame is free for the packets that have arrived for the sockets")]
    NoFreeFrame,
}

/// Report of a core, with the shared memory of each application in it.
pub(in crate::daemon) struct ReportAnswer {
    pub(in crate::daemon) report: DaemonReport,
    pub(in crate::daemon) memories: Vec<SharedMemory>,
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
    /// Time that the other cores have spent so far, for the application's account.
    pub(in crate::daemon) spent_ns: u64,
}

/// Application that is to leave its core.
#[derive(Clone, Copy)]
pub(in crate::daemon) struct LeavingApp {
    pub(in crate::daemon) number: AppNumber,
    /// Token of the application: its number may meanwhile be another one's.
    pub(in crate::daemon) token: TakeoverToken,
}

/// Applications in migration between two cores, with all they hold.
pub(in crate::daemon) struct MigrationBatch {
    /// Applications, with their index on the previous core.
    pub(in crate::daemon) apps: Vec<(AppNumber, Box<Application>)>,
    /// Sockets, with their key on the previous core.
    pub(in crate::daemon) sockets: Vec<(SocketKey, Box<AppSocket>)>,
    pub(in crate::daemon) stack: ExtractedSockets,
    /// Local ports, with the number of claims of each.
    pub(in crate::daemon) ports: Vec<(LocalPort, u32)>,
    /// Closed connections that have not ended yet.
    pub(in crate::daemon) closing: Vec<(TcpId, Arc<PortClaim>)>,
    /// Transfers in transit of these sockets.
    pub(in crate::daemon) transfers: Vec<(FdCookie, SocketTransfer)>,
    /// Previous core.
    pub(in crate::daemon) from_core: usize,
    /// The target core has sent the batch back.
    pub(in crate::daemon) is_returned: bool,
    /// Applications that leave the previous core once this batch has arrived.
    pub(in crate::daemon) next: Vec<LeavingApp>,
}

/// Request to hand over, with the channels between its sender and the core.
pub(in crate::daemon) struct HandoverRequest {
    /// The package to hand over, or the reason for a refusal.
    pub(in crate::daemon) offer: mpsc::Sender<Result<HandoverPackage, String>>,
    /// Process that has taken over, if any. The core waits for this message.
    pub(in crate::daemon) outcome: mpsc::Receiver<Option<u32>>,
}

impl HandoverRequest {
    /// Refuses the handover.
    pub(in crate::daemon) fn refuse(&self, why: &str) {
        // The requester may have gone.
        let _ = self.offer.send(Err(why.to_owned()));
    }
}

/// Everything that the next daemon needs.
pub(in crate::daemon) struct HandoverPackage {
    /// Sealed memory file with the state.
    pub(in crate::daemon) state: OwnedFd,
    pub(in crate::daemon) fds: StateFds,
}

/// File descriptors that belong to the handed-over state.
#[derive(Default)]
pub(in crate::daemon) struct StateFds {
    pub(in crate::daemon) memories: Vec<SharedMemory>,
    /// Connection and wake-up descriptors of each application.
    pub(in crate::daemon) connections: Vec<AppFd>,
    /// Kernel sockets that applications have registered, in the order of the applications.
    pub(in crate::daemon) kernel_sockets: Vec<AppFd>,
    /// Kernel sockets of the port claims.
    pub(in crate::daemon) claims: Vec<Arc<dyn HeldSocket>>,
    /// Descriptor left of the device.
    pub(in crate::daemon) device: Option<OwnedFd>,
    /// Sockets that reserve the own addresses.
    pub(in crate::daemon) reservations: Vec<OwnedFd>,
}

impl StateFds {
    /// All descriptors, in the order in which the next daemon takes them.
    pub(in crate::daemon) fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        let memories = self.memories.iter().flat_map(SharedMemory::regions).map(AsFd::as_fd);
        let of_apps = self.connections.iter().chain(&self.kernel_sockets).map(AsFd::as_fd);
        let claims = self.claims.iter().map(AsFd::as_fd);
        let of_engine = self.device.iter().chain(&self.reservations).map(AsFd::as_fd);
        memories.chain(of_apps).chain(claims).chain(of_engine).collect()
    }
}
