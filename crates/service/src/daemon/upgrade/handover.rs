//! Handover to another daemon: the part of the primary core.

use std::io;
use std::time::{Duration, Instant};

use tidegate_engine::{NetConfig, OpenError};
use tidegate_memory::shared::SealedBytes;

use super::save::save;
use crate::daemon::core::NetworkCore;
use crate::daemon::core::message::{CoreMessage, HandoverPackage, HandoverRequest, NotMigrated};

/// Time before the handover in which received frames are processed without an answer: some
/// round trips in one network.
const DRAIN_NS: u64 = 2_000_000;

/// Time limit for a device that another process has closed and that is still busy, and the
/// interval between attempts to open it.
const DEVICE_BUSY_TIMEOUT: Duration = Duration::from_secs(2);
const DEVICE_BUSY_RETRY_INTERVAL: Duration = Duration::from_millis(1);

/// Times that all cores are asked to move everything: a batch that was between two other
/// cores the first time has arrived at one of them the second time.
const GATHER_LAPS: usize = 2;

/// Refusal of an upgrade when the primary core cannot hold everything.
const NO_CAPACITY: &str =
    "one network core has no space for the sockets of all cores: restart it instead";

/// Refusal of an upgrade when a core could not send its sockets to the primary core.
const NOT_GATHERED: &str = "the sockets of a network core cannot move to core 0 now";

/// Creates the configuration of a daemon's stack once more.
pub type ConfigFactory = Box<dyn FnMut() -> io::Result<NetConfig> + Send>;

/// Ability of a running daemon to be replaced by another one ([`crate::daemon::Daemon::take_over`]).
pub enum UpgradeMode {
    /// No upgrade, for this reason.
    Refused(&'static str),
    /// The next daemon opens the device while the old daemon still has it.
    Concurrent,
    /// The next daemon opens the device after the old daemon has closed it and handed over its
    /// state. If the upgrade fails, the old daemon reopens the device by this configuration.
    Reopen(ConfigFactory),
}

/// Opens a device that another process has closed; the kernel releases it with a delay.
///
/// # Errors
/// The error of `open`, if it is another one than "busy" or the time limit is over.
pub(in crate::daemon) fn open_released_device(
    mut open: impl FnMut() -> Result<(), OpenError>,
) -> Result<(), OpenError> {
    let began = Instant::now();
    loop {
        match open() {
            Err(error) if error.is_busy() && began.elapsed() < DEVICE_BUSY_TIMEOUT => {
                std::thread::sleep(DEVICE_BUSY_RETRY_INTERVAL);
            }
            opened => return opened,
        }
    }
}

/// Handovers of a core to other daemons.
pub(in crate::daemon) struct Handover {
    mode: UpgradeMode,
    /// Handover that waits until all applications are on this core.
    pending: Option<PendingHandover>,
}

/// Handover that waits while all cores move their applications to the primary core.
struct PendingHandover {
    request: HandoverRequest,
    /// Cores that have not answered.
    awaited_cores: usize,
    /// Times that all cores are still to be asked.
    laps_left: usize,
    /// Applications and sockets that could not move, the last time.
    unmoved: usize,
    /// Reason of a core that could not send them.
    why: Option<NotMigrated>,
}

impl Handover {
    pub(in crate::daemon) fn new(mode: UpgradeMode) -> Self {
        Self { mode, pending: None }
    }

    /// Starts a handover to another daemon. Everything moves to this core first. Returns the
    /// process ID of the daemon if it has taken over.
    ///
    /// # Errors
    /// When this core cannot continue.
    pub(in crate::daemon) fn start(
        &mut self,
        core: &mut NetworkCore,
        request: HandoverRequest,
    ) -> io::Result<Option<u32>> {
        if let UpgradeMode::Refused(why) = &self.mode {
            request.refuse(&format!("{why}: restart it instead"));
            return Ok(None);
        }
        if core.cores.count() == 1 {
            return self.hand_over(core, &request);
        }
        core.cores.set_gathering(true);
        self.pending = Some(PendingHandover {
            request,
            awaited_cores: 0,
            laps_left: GATHER_LAPS,
            unmoved: 0,
            why: None,
        });
        self.gather(core)
    }

    /// Asks the other cores to move everything here, or hands over if they were asked often
    /// enough.
    fn gather(&mut self, core: &mut NetworkCore) -> io::Result<Option<u32>> {
        let Some(leaving) = &mut self.pending else { return Ok(None) };
        if leaving.laps_left > 0 {
            leaving.laps_left -= 1;
            (leaving.unmoved, leaving.why) = (0, None);
            leaving.awaited_cores = core.cores.count() - 1;
            (1..core.cores.count())
                .try_for_each(|other| core.cores.inbox(other).send(CoreMessage::Gather))?;
            return Ok(None);
        }
        let Some(PendingHandover { request, unmoved, why, .. }) = self.pending.take() else {
            return Ok(None);
        };
        let mut successor = None;
        match why {
            _ if unmoved == 0 => successor = self.hand_over(core, &request)?,
            Some(why) => request.refuse(&format!("{NOT_GATHERED}: {why}")),
            None => request.refuse(NO_CAPACITY),
        }
        core.cores.set_gathering(false);
        Ok(successor)
    }

    /// Counts a core that has moved all it could, and the reason for the rest. Returns the process ID of the daemon that has
    /// taken over, if any.
    ///
    /// # Errors
    /// When this core cannot continue.
    pub(in crate::daemon) fn on_gathered(
        &mut self,
        core: &mut NetworkCore,
        unmoved: usize,
        why: Option<NotMigrated>,
    ) -> io::Result<Option<u32>> {
        let Some(leaving) = &mut self.pending else { return Ok(None) };
        leaving.unmoved += unmoved;
        leaving.why = leaving.why.or(why);
        leaving.awaited_cores -= 1;
        if leaving.awaited_cores == 0 { self.gather(core) } else { Ok(None) }
    }

    /// Offers everything to the next daemon, and waits for the outcome. If the next daemon does
    /// not take over, this one continues unchanged.
    fn hand_over(
        &mut self,
        core: &mut NetworkCore,
        to: &HandoverRequest,
    ) -> io::Result<Option<u32>> {
        drain_rx(core)?;
        core.notify_applications();
        let server = &mut core.server;
        let stack = server.engine.save()?;
        if matches!(self.mode, UpgradeMode::Reopen(_)) {
            // On a shared address the kernel would reset the connections of peers.
            server.engine.close_device(server.claims.shares_kernel_addresses())?;
        }
        let saved = save(stack, server, &mut core.apps);
        let offer = saved.and_then(|(state, fds)| {
            let state = SealedBytes::create(|file| state.encode(file))?;
            Ok(HandoverPackage { state, fds })
        });
        let _ = to.offer.send(offer.map_err(|error| error.to_string()));
        // A dropped channel means that the handover has failed.
        let successor = to.outcome.recv().ok().flatten();
        if successor.is_none() {
            self.reopen_device(core)?;
        }
        Ok(successor)
    }

    /// Reopens the device that the next daemon was to have.
    fn reopen_device(&mut self, core: &mut NetworkCore) -> io::Result<()> {
        let UpgradeMode::Reopen(config) = &mut self.mode else { return Ok(()) };
        let engine = &mut core.server.engine;
        let opened =
            open_released_device(|| engine.reopen_device(config().map_err(OpenError::Io)?));
        opened.map_err(|error| {
            let what = "the upgrade failed, and then the device could not be reopened";
            io::Error::other(format!("{what}: {error}"))
        })?;
        core.wake_fds = engine.wake_fds()?;
        Ok(())
    }
}

/// Processes frames in flight without an answer. Peers that wait for an answer send nothing
/// meanwhile, so none of their data is lost while the device is closed.
fn drain_rx(core: &mut NetworkCore) -> io::Result<()> {
    let engine = &mut core.server.engine;
    let until_ns = engine.read_clock() + DRAIN_NS;
    while engine.read_clock() < until_ns {
        engine.poll()?;
    }
    Ok(())
}
