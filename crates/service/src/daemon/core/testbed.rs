//! Network core on the calling thread, for tests and fuzz targets. Not compiled into a daemon.

use std::io;
use std::ops::ControlFlow;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use tidegate_device::mem::{MemConfig, MemDevice, wire};
use tidegate_engine::{NetConfig, ShardedStacks, open_sharded};
use tidegate_memory::FrameSize;
use tidegate_memory::shared::{Receiver, Region, Sender, WordRange};

use super::cores::Cores;
use super::inbox::InboxSender;
use super::message::CoreMessage;
use super::server::SocketServer;
use super::{CoreSlot, MessageHandler, NetworkCore};
use crate::daemon::Quota;
use crate::daemon::application::Application;
use crate::daemon::attachment_counts::AttachmentCounts;
use crate::daemon::ids::{AppNumber, Identity};
use crate::daemon::quota::AppSettings;
use crate::daemon::workers::{AppFd, JobDispatcher, UserWorkers};
use crate::ipc::command::{COMMAND_WORDS, Command};
use crate::ipc::event_fds::EventFds;
use crate::ipc::layout::{Geometry, SharedMemory};
use crate::ipc::notification::{NOTIFICATION_WORDS, Notification};
use crate::ipc::version::Library;

const OWN_ADDRESSES: [&str; 2] = ["192.0.2.1/24", "2001:db8::1/64"];
/// User of the applications.
const UID: u32 = 1000;

/// Network core on this thread, with an honest application.
pub(super) struct Testbed {
    pub(super) core: NetworkCore,
    other_end: MemDevice,
    jobs: JobDispatcher,
    attachments: AttachmentCounts,
    geometry: Geometry,
    quota: Quota,
    honest: Program,
}

/// Handler of messages that do not occur here.
struct NoMessages;

impl MessageHandler for NoMessages {
    fn on_message(
        &mut self,
        _: &mut NetworkCore,
        _: CoreMessage,
    ) -> io::Result<ControlFlow<Option<u32>>> {
        Ok(ControlFlow::Continue(()))
    }

    fn count_migration_sets(&self, _: &NetworkCore) -> usize {
        1
    }
}

/// Application's end of an attachment.
pub(super) struct Program {
    pub(super) number: AppNumber,
    pub(super) memory: SharedMemory,
    pub(super) connection: UnixStream,
    /// Descriptor that wakes the daemon.
    daemon_event_fd: OwnedFd,
    commands: Sender<WordRange, COMMAND_WORDS>,
    notifications: Receiver<WordRange, NOTIFICATION_WORDS>,
}

impl Program {
    /// Pushes a command, and wakes the daemon if it asks for that.
    pub(super) fn push(&mut self, words: &[u64; COMMAND_WORDS]) {
        // A corrupted or full ring takes nothing.
        let _ = self.commands.push(words);
        self.commands.publish();
        if self.memory.daemon_sleeps().unwrap().take() {
            self.wake_daemon();
        }
    }

    pub(super) fn wake_daemon(&self) {
        // Fails when the counter is full.
        let _ = rustix::io::write(&self.daemon_event_fd, &1_u64.to_ne_bytes());
    }

    /// Next notification. `None` if there is none, or if the ring is corrupted.
    pub(super) fn next_notification(&mut self) -> Option<Notification> {
        let words = self.notifications.pop().ok()??;
        self.notifications.release();
        Notification::from_words(words)
    }
}

impl Testbed {
    /// Starts a core for applications with this memory and these limits.
    pub(super) fn new(geometry: Geometry, quota: Quota) -> Self {
        let (device, other_end) = wire(&MemConfig::default().capacity(256)).unwrap();
        let net = OWN_ADDRESSES
            .iter()
            .fold(NetConfig::new(device), |net, address| net.address(address.parse().unwrap()))
            .frames(1024, FrameSize::K2);
        let ShardedStacks { mut stacks, flow_steering } = open_sharded(net, 1).unwrap();
        let (engine, claims) = stacks.pop().unwrap();
        let (sender, inbox) = InboxSender::new().unwrap();
        let (workers, jobs) = UserWorkers::new();
        let cores = Cores::new(vec![sender], &(1..=1), flow_steering, workers).unwrap();
        let slot = CoreSlot { index: 0, inbox, cores: Arc::new(cores) };
        let server = SocketServer::new(engine, claims);
        let mut core = NetworkCore::new(slot, server, Arc::new(|_: &str| {})).unwrap();
        core.server.engine.take_over().unwrap();
        let attachments = AttachmentCounts::default();
        let honest = attach(&mut core, &attachments, geometry, quota);
        Self { core, other_end, jobs, attachments, geometry, quota, honest }
    }

    /// Attaches one more application.
    pub(super) fn attach(&mut self) -> Program {
        attach(&mut self.core, &self.attachments, self.geometry, self.quota)
    }

    /// Runs one round; returns the number of frames sent. A round without a command could wait for one.
    ///
    /// # Panics
    /// If the core does not answer the honest application.
    pub(super) fn run_round(&mut self) -> usize {
        self.honest.push(&Command::Ping { tag: Some(1) }.to_words());
        self.core.run_round(0, &NoMessages).unwrap();
        let answer = self.honest.next_notification();
        assert!(matches!(answer, Some(Notification::Pong { tag: 1, .. })), "{answer:?}");
        self.jobs.run_queued();
        self.other_end.receive_bytes(usize::MAX, |_| ())
    }
}

/// Attaches an application.
fn attach(
    core: &mut NetworkCore,
    attachments: &AttachmentCounts,
    geometry: Geometry,
    quota: Quota,
) -> Program {
    let (near, connection) = UnixStream::pair().unwrap();
    for end in [&near, &connection] {
        end.set_nonblocking(true).unwrap();
    }
    let shared = |fd| AppFd::new(fd, UID, core.cores.workers());
    let (near, event_fds) = (shared(OwnedFd::from(near)), EventFds::new().unwrap());
    let daemon_event_fd = event_fds.daemon.try_clone().unwrap();
    let event_fds = event_fds.map(shared);
    let region = |words| Region::reserve(words).unwrap();
    let (control, data) = (region(geometry.control_words()), region(geometry.data_words()));
    let memory = SharedMemory::new(geometry, control, data).unwrap();
    let identity = Identity { pid: 1, uid: UID, name: "test".into(), library: Library::default() };
    let settings =
        AppSettings { quota, attachments: attachments.clone(), ..AppSettings::default() };
    let count = attachments.add(UID);
    let app = Application::new(identity, memory.clone(), near, event_fds, None, count, &settings);
    core.cores.load(core.index).add_applications(1);
    let number = core.insert_application(Box::new(app.unwrap()));
    Program {
        number,
        connection,
        daemon_event_fd,
        commands: memory.command_sender().unwrap(),
        notifications: memory.notification_receiver().unwrap(),
        memory,
    }
}
