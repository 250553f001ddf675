//! The daemon: engines on network cores, and a Unix socket where applications attach.
//!
//! A network core owns everything it uses: an engine, the daemon's ends of the rings and the
//! sockets of applications. It takes no lock. The attach listener has a thread of its own,
//! which creates the shared memory of new applications and sends them to a core. With several
//! cores, applications migrate, so that as many cores are used as needed. Whatever an application
//! can delay is done by worker threads, for which nobody waits.
//!
//! Each folder uses only the folders before it in this list:
//!
//! * `workers`: threads for work that an application can delay;
//! * `socket`: one application socket, its streams and the stack;
//! * `application`: one attached application, its rings and its slots;
//! * `transfer`: sockets that pass from one process to another;
//! * `core`: the loop of a network core, and the commands that it executes;
//! * `migrate`: applications that change their core, and when they do;
//! * `upgrade`: another daemon takes over;
//! * `attach`: the listener, and the admission of applications.
//!
//! [`Daemon`] starts and stops the threads; `dispatch` connects the core to the folders above it.

mod application;
mod attach;
mod attachment_counts;
mod controls;
mod core;
mod dispatch;
mod ids;
mod log;
mod migrate;
mod options;
mod peer;
mod quota;
mod report;
mod snapshot_error;
mod socket;
mod transfer;
mod upgrade;
mod versions;
mod workers;

/// Bodies of the fuzz targets.
#[cfg(any(test, fuzzing))]
pub mod fuzz {
    pub use super::core::fuzz as attachment;
    pub use super::upgrade::fuzz as daemon_state;
}

use std::io;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use tidegate_engine::{
    AddressReservations, NetConfig, PreparedEngines, ShardedStacks, open_sharded,
};
use tidegate_wire::MacAddr;

pub use attach::bound_socket::AttachConfig;
pub use controls::Controls;
pub use ids::Identity;
pub use log::Log;
pub use options::{StartError, StartOptions};
pub use quota::Quota;
pub use report::{ApplicationReport, CoreNodes, CoreReport, DaemonReport, GateState, SocketReport};
pub use upgrade::check::UpgradeImpossible;
pub use upgrade::handover::{ConfigFactory, UpgradeMode};
pub use upgrade::protocol::OutputFds;
pub use versions::Versions;

use self::attach::bound_socket::BoundSocket;
use self::attach::listener::AttachListener;
use self::attachment_counts::AttachmentCounts;
use self::core::cores::Cores;
use self::core::inbox::InboxSender;
use self::core::message::CoreMessage;
use self::core::server::SocketServer;
use self::core::{CoreSlot, NetworkCore};
use self::dispatch::Dispatcher;
use self::log::RunningWriter;
use self::migrate::balancer::Balancer;
use self::options::check_options;
use self::quota::AppSettings;
use self::upgrade::handover::open_released_device;
use self::upgrade::protocol::{ReceivedState, Successor};
use self::upgrade::restore::{RestoredCore, restore};
use self::upgrade::snapshot::DaemonSnapshot;
use self::workers::{JobDispatcher, UserWorkers};

/// Default minimum time between two wake-ups of an application with several peers.
pub const DEFAULT_COALESCING: Duration = Duration::from_micros(100);

/// Network stacks on their cores, and the applications attached to them. Dropping the daemon
/// stops it.
pub struct Daemon {
    // Closed first: no application is sent to a core that has ended.
    attach_listener: Option<AttachListener>,
    balancer: Option<Balancer>,
    cores: Arc<Cores>,
    threads: Vec<JoinHandle<io::Result<Option<u32>>>>,
    // Dropped last: it waits for the lines of the threads above.
    log_writer: Option<RunningWriter>,
}

impl Daemon {
    /// Opens a stack on one network core, and the attach listener. The core's thread calls
    /// `begin` first, to pin itself and set its priority.
    ///
    /// # Errors
    /// [`StartError`]; nothing stays behind.
    pub fn start(
        net: NetConfig,
        attach: AttachConfig,
        begin: impl Fn() -> io::Result<()> + Clone + Send + 'static,
        log: Log,
    ) -> Result<Self, StartError> {
        let upgrade = UpgradeMode::Refused("this daemon does not support upgrades");
        let on_core_start = move |_| begin();
        Self::start_with(
            net,
            StartOptions {
                attach,
                cores: 1..=1,
                on_core_start,
                drop_privileges: || Ok(()),
                upgrade,
                measure_rounds: false,
                log,
            },
        )
    }

    /// Like [`Daemon::start`], with all options.
    ///
    /// # Errors
    /// Like [`Daemon::start`].
    pub fn start_with(
        net: NetConfig,
        options: StartOptions<
            impl Fn(usize) -> io::Result<()> + Clone + Send + 'static,
            impl Fn() -> io::Result<()> + Clone + Send + 'static,
        >,
    ) -> Result<Self, StartError> {
        let net = check_options(net, &options)?;
        let socket = BoundSocket::bind(options.attach.clone())?;
        let stacks = open_sharded(net, *options.cores.end())?;
        Self::spawn(stacks, None, UserWorkers::new(), socket, options, || Ok(()))
    }

    /// Takes over from the daemon that listens at the configured path, with its sockets, its
    /// connections and its applications, which notice a pause. The old daemon has ended when this
    /// returns; on failure it continues. Also returns the output descriptors of the old daemon.
    ///
    /// # Errors
    /// [`StartError`], with the reason of the old daemon if it refused.
    pub fn take_over(
        net: NetConfig,
        options: StartOptions<
            impl Fn(usize) -> io::Result<()> + Clone + Send + 'static,
            impl Fn() -> io::Result<()> + Clone + Send + 'static,
        >,
    ) -> Result<(Self, OutputFds), StartError> {
        let mut prepared =
            PreparedEngines::new(check_options(net, &options)?, *options.cores.end())?;
        prepared.primary().start_interim_capture()?;
        // The old daemon limits the time until the first message of a connection.
        let mut predecessor = Successor::connect(&options.attach.path)?;
        prepared.primary().discard_interim_frames()?;
        let ReceivedState { state, listener, output, descriptors } = predecessor.request_state()?;
        let state = DaemonSnapshot::decode(&state).map_err(io::Error::from)?;
        prepared.keep_mac(MacAddr(state.mac));
        let attachments = AttachmentCounts::default();
        let terms = AppSettings {
            coalescing: options.attach.coalescing,
            quota: options.attach.quota,
            attachments: attachments.clone(),
        };
        let (workers, dispatcher) = UserWorkers::new();
        let (stack, restored, inherited) = restore(state, descriptors, terms, &workers)?;
        let reservations = AddressReservations::inherit(inherited.reservations)?;
        prepared.primary().inherit_reservations(reservations);
        if let Some(device) = inherited.device {
            prepared.primary().inherit(device);
        }
        open_released_device(|| prepared.primary().open_device())?;
        let stacks = prepared.go_on(stack)?;
        let socket = BoundSocket::inherit(options.attach.clone(), listener, attachments)?;
        let workers = (workers, dispatcher);
        let commit = || predecessor.commit();
        let daemon = Self::spawn(stacks, Some(restored), workers, socket, options, commit)?;
        Ok((daemon, output))
    }

    /// Starts the threads; the first core gets the `restored` state. They run once `commit` has
    /// succeeded.
    fn spawn(
        stacks: ShardedStacks,
        mut restored: Option<RestoredCore>,
        (workers, dispatcher): (UserWorkers, JobDispatcher),
        socket: BoundSocket,
        options: StartOptions<
            impl Fn(usize) -> io::Result<()> + Clone + Send + 'static,
            impl Fn() -> io::Result<()> + Clone + Send + 'static,
        >,
        commit: impl FnOnce() -> io::Result<()>,
    ) -> Result<Self, StartError> {
        let measures = options.measure_rounds;
        let StartOptions { cores: limits, on_core_start, drop_privileges, upgrade, log, .. } =
            options;
        let (log, log_writer) = log::without_waiting(log);
        let ShardedStacks { stacks, flow_steering } = stacks;
        let channels = stacks.iter().map(|_| InboxSender::new()).collect::<io::Result<Vec<_>>>()?;
        let (posts, inboxes): (Vec<_>, Vec<_>) = channels.into_iter().unzip();
        let cores = Arc::new(Cores::new(posts, &limits, flow_steering, workers)?);
        // Created before the channels: a dropped channel ends its thread.
        let mut daemon = Self {
            attach_listener: None,
            balancer: None,
            cores: Arc::clone(&cores),
            threads: Vec::new(),
            log_writer: None,
        };
        let mut upgrade = Some(upgrade);
        let mut begin_senders = Vec::new();
        for (index, ((engine, claims), inbox)) in stacks.into_iter().zip(inboxes).enumerate() {
            let slot = CoreSlot { index, inbox, cores: Arc::clone(&cores) };
            let (server, log) = (SocketServer::new(engine, claims), Arc::clone(&log));
            let upgrade = upgrade
                .take()
                .unwrap_or(UpgradeMode::Refused("a secondary core hands nothing over"));
            let mut core = match restored.take() {
                Some(restored) => restored.into_core(slot, server, log)?,
                None => NetworkCore::new(slot, server, log)?,
            };
            let (started, has_started) = mpsc::channel();
            let (begin_sender, may_begin) = mpsc::channel();
            let (begin, settle) = (on_core_start.clone(), drop_privileges.clone());
            let run = move || {
                let begun = begin(index).and_then(|()| settle());
                let begun = begun.and_then(|()| core.measure_rounds(measures));
                let has_started_up = begun.is_ok();
                // The starting thread waits for this result.
                let _ = started.send(begun);
                if has_started_up && may_begin.recv().is_ok() {
                    core.run(Dispatcher::new(upgrade))
                } else {
                    Ok(None)
                }
            };
            let name = match index {
                0 => "tidegate-core".to_owned(),
                _ => format!("tidegate-core-{index}"),
            };
            daemon.threads.push(std::thread::Builder::new().name(name).spawn(run)?);
            has_started.recv().map_err(io::Error::other)??;
            begin_senders.push(begin_sender);
        }
        drop_privileges()?;
        dispatcher.start()?;
        daemon.log_writer = Some(log_writer.start()?);
        let (attach_begin, may_accept) = mpsc::channel();
        daemon.attach_listener =
            Some(AttachListener::open(socket, Arc::clone(&cores), log, may_accept)?);
        if limits.end() > &1 {
            daemon.balancer = Some(Balancer::start(cores, limits)?);
        }
        commit()?;
        // A thread that has already ended is found out by `is_running`.
        for begin_sender in begin_senders.iter().chain([&attach_begin]) {
            let _ = begin_sender.send(());
        }
        Ok(daemon)
    }

    /// Report of all cores and applications.
    ///
    /// # Errors
    /// When a core has ended.
    pub fn report(&self) -> io::Result<DaemonReport> {
        Ok(self.cores.report()?.of_daemon(Versions::own()))
    }

    /// Control handle for changes at run time.
    pub fn controls(&self) -> Controls {
        Controls { cores: Arc::clone(&self.cores) }
    }

    /// True while all cores run. [`Daemon::stop`] returns the error of a core that has ended.
    pub fn is_running(&self) -> bool {
        self.threads.iter().all(|core| !core.is_finished())
    }

    /// Stops the daemon. Returns the process ID of the daemon that has taken over, if any.
    ///
    /// # Errors
    /// The error of the core that ended before.
    pub fn stop(mut self) -> io::Result<Option<u32>> {
        self.shut_down()
    }

    /// Blocks all workers of a user until the returned value is dropped.
    #[cfg(test)]
    pub(crate) fn block_workers(&self, uid: u32) -> Vec<mpsc::Sender<()>> {
        self.cores.workers().block(uid)
    }

    fn shut_down(&mut self) -> io::Result<Option<u32>> {
        (self.attach_listener, self.balancer) = (None, None);
        let mut successor = Ok(None);
        // The primary core comes last: it sends the final segments of the other cores.
        while let Some(core) = self.threads.pop() {
            // A core that has already ended needs no message.
            let _ = self.cores.inbox(self.threads.len()).send(CoreMessage::Stop);
            let ended = core.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            // When the primary core has ended, the other cores end with an error too: the primary
            // core's result names the cause.
            if !matches!(ended, Ok(None)) {
                successor = ended;
            }
        }
        successor
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // The error can only be returned by `stop`.
        let _ = self.shut_down();
    }
}
