//! Handover to another daemon: the core's part.

use std::io;
use std::time::{Duration, Instant};

use tidegate_engine::OpenError;

use super::request::{HandoverPackage, HandoverRequest, PendingHandover};
use super::save::save;
use crate::daemon::UpgradeMode;
use crate::daemon::core::NetworkCore;
use crate::daemon::core::inbox::CoreMessage;

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

impl NetworkCore {
    /// Starts a handover to another daemon. Everything moves to this core first.
    pub(in crate::daemon) fn start_handover(&mut self, request: HandoverRequest) -> io::Result<()> {
        let refusal = match &self.upgrade {
            UpgradeMode::Refused(why) => Some(*why),
            _ => None,
        };
        match refusal {
            Some(why) => request.refuse(&format!("{why}: restart it instead")),
            None if self.cores.count() == 1 => return self.hand_over(&request),
            None => {
                self.cores.set_gathering(true);
                self.pending_handover = Some(PendingHandover {
                    request,
                    awaited_cores: 0,
                    laps_left: GATHER_LAPS,
                    unmoved: 0,
                });
                self.gather_cores()?;
            }
        }
        Ok(())
    }

    /// Asks the other cores to move everything here, or hands over if they were asked often
    /// enough.
    fn gather_cores(&mut self) -> io::Result<()> {
        let Some(leaving) = &mut self.pending_handover else { return Ok(()) };
        if leaving.laps_left > 0 {
            leaving.laps_left -= 1;
            leaving.unmoved = 0;
            leaving.awaited_cores = self.cores.count() - 1;
            return (1..self.cores.count())
                .try_for_each(|core| self.cores.inbox(core).send(CoreMessage::Gather));
        }
        let Some(PendingHandover { request, unmoved, .. }) = self.pending_handover.take() else {
            return Ok(());
        };
        match unmoved {
            0 => self.hand_over(&request)?,
            _ => request.refuse(NO_CAPACITY),
        }
        self.cores.set_gathering(false);
        Ok(())
    }

    /// Moves everything to the primary core.
    pub(in crate::daemon) fn move_all_to_primary(&mut self) -> io::Result<()> {
        let unmoved = self.migrate_all(0)?;
        self.cores.inbox(0).send(CoreMessage::Gathered { unmoved })
    }

    /// Counts a core that has moved all it could.
    pub(in crate::daemon) fn on_gathered(&mut self, left: usize) -> io::Result<()> {
        let Some(leaving) = &mut self.pending_handover else { return Ok(()) };
        leaving.unmoved += left;
        leaving.awaited_cores -= 1;
        if leaving.awaited_cores == 0 { self.gather_cores() } else { Ok(()) }
    }

    /// Offers everything to the next daemon, and waits for the outcome. If the next daemon does
    /// not take over, this one continues unchanged.
    fn hand_over(&mut self, to: &HandoverRequest) -> io::Result<()> {
        self.drain_rx()?;
        self.notify_applications();
        let stack = self.server.engine.save()?;
        if matches!(self.upgrade, UpgradeMode::Reopen(_)) {
            // On a shared address the kernel would reset the connections of peers.
            self.server.engine.close_device(self.server.claims.shares_kernel_addresses())?;
        }
        let saved = save(stack, &mut self.server, &mut self.apps);
        let offer =
            saved.and_then(|(state, fds)| Ok(HandoverPackage { state: state.encode()?, fds }));
        let _ = to.offer.send(offer.map_err(|error| error.to_string()));
        // A dropped channel means that the handover has failed.
        self.successor = to.outcome.recv().ok().flatten();
        if self.successor.is_none() {
            self.reopen_device()?;
        }
        Ok(())
    }

    /// Processes frames in flight without an answer. Peers that wait for an answer send nothing
    /// meanwhile, so none of their data is lost while the device is closed.
    fn drain_rx(&mut self) -> io::Result<()> {
        let until_ns = self.server.engine.read_clock() + DRAIN_NS;
        while self.server.engine.read_clock() < until_ns {
            self.server.engine.poll()?;
        }
        Ok(())
    }

    /// Reopens the device that the next daemon was to have.
    fn reopen_device(&mut self) -> io::Result<()> {
        let UpgradeMode::Reopen(config) = &mut self.upgrade else { return Ok(()) };
        let engine = &mut self.server.engine;
        let opened =
            open_released_device(|| engine.reopen_device(config().map_err(OpenError::Io)?));
        opened.map_err(|error| {
            let what = "the upgrade failed, and then the device could not be reopened";
            io::Error::other(format!("{what}: {error}"))
        })?;
        self.wake_fds = self.server.engine.wake_fds()?;
        Ok(())
    }
}
