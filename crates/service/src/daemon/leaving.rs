//! How a daemon lets another one go on in its place.

use std::io;
use std::time::{Duration, Instant};

use tidegate_engine::OpenError;

use super::Upgrade;
use super::core::Core;
use super::handover::{HandOver, Leaving, Parcel};
use super::post::Message;
use super::save::save;

/// Before it hands over, the core listens for so long without an answer: some
/// round trips in one network.
const HUSH_NS: u64 = 2_000_000;

/// How long a port may be busy that another process has closed, and how often to
/// look.
const BUSY_LIMIT: Duration = Duration::from_secs(2);
const BUSY_RETRY: Duration = Duration::from_millis(1);

/// Everything is asked for so often: what was between two other cores the first
/// time has arrived at one of them the second time.
const LAPS: usize = 2;

/// Why a daemon with several cores is not replaced.
const NO_ROOM: &str = "one network core has no room for what all of them have: restart it instead";

/// Opens a port that another process has closed: the kernel takes its time to let
/// go of it.
///
/// # Errors
/// As `open`, when it fails for another reason or for too long.
pub(super) fn open_closed(
    mut open: impl FnMut() -> Result<(), OpenError>,
) -> Result<(), OpenError> {
    let began = Instant::now();
    loop {
        match open() {
            Err(error) if error.is_busy() && began.elapsed() < BUSY_LIMIT => {
                std::thread::sleep(BUSY_RETRY);
            }
            opened => return opened,
        }
    }
}

impl Core {
    /// Another daemon is to go on in this one's place. Everything comes to this core
    /// first.
    pub(super) fn step_down(&mut self, to: HandOver) -> io::Result<()> {
        let refusal = match &self.upgrade {
            Upgrade::Refused(why) => Some(*why),
            _ => None,
        };
        match refusal {
            Some(why) => to.refuse(&format!("{why}: restart it instead")),
            None if self.cores.count() == 1 => return self.hand_over(&to),
            None => {
                self.cores.set_gathers(true);
                self.leaving = Some(Leaving { to, awaited: 0, laps: LAPS, left: 0 });
                self.ask_all()?;
            }
        }
        Ok(())
    }

    /// Asks the other cores for all that they have, unless that was done often
    /// enough.
    fn ask_all(&mut self) -> io::Result<()> {
        let Some(leaving) = &mut self.leaving else { return Ok(()) };
        if leaving.laps > 0 {
            leaving.laps -= 1;
            leaving.left = 0;
            leaving.awaited = self.cores.count() - 1;
            return (1..self.cores.count())
                .try_for_each(|core| self.cores.post(core).send(Message::Gather));
        }
        let Some(Leaving { to, left, .. }) = self.leaving.take() else { return Ok(()) };
        match left {
            0 => self.hand_over(&to)?,
            _ => to.refuse(NO_ROOM),
        }
        self.cores.set_gathers(false);
        Ok(())
    }

    /// Gives all to the core with the card.
    pub(super) fn gather(&mut self) -> io::Result<()> {
        let left = self.give_all(0)?;
        self.cores.post(0).send(Message::Gathered { left })
    }

    /// A core has given all that it could.
    pub(super) fn on_gathered(&mut self, left: usize) -> io::Result<()> {
        let Some(leaving) = &mut self.leaving else { return Ok(()) };
        leaving.left += left;
        leaving.awaited -= 1;
        if leaving.awaited == 0 { self.ask_all() } else { Ok(()) }
    }

    /// Offers everything to another daemon, and waits whether that goes on. If it
    /// does not, this one does, as if nothing had happened.
    fn hand_over(&mut self, to: &HandOver) -> io::Result<()> {
        self.hush()?;
        self.tell_applications();
        let stack = self.host.engine.save()?;
        if matches!(self.upgrade, Upgrade::Anew(_)) {
            // The kernel would break off what others have with us on its addresses.
            self.host.engine.close_port(self.host.claims.is_shared())?;
        }
        let saved = save(stack, &mut self.host, &mut self.apps);
        let offer =
            saved.and_then(|(state, belongings)| Ok(Parcel { state: state.encode()?, belongings }));
        let _ = to.offer.send(offer.map_err(|error| error.to_string()));
        // Who asked says nothing when it got nothing.
        self.successor = to.outcome.recv().ok().flatten();
        if self.successor.is_none() {
            self.open_again()?;
        }
        Ok(())
    }

    /// Hears what is on its way, and lets nobody say more: those who wait for an
    /// answer send nothing meanwhile, so nothing of theirs is lost while nobody has
    /// the port.
    fn hush(&mut self) -> io::Result<()> {
        let until_ns = self.host.engine.read_clock() + HUSH_NS;
        while self.host.engine.read_clock() < until_ns {
            self.host.engine.poll()?;
        }
        Ok(())
    }

    /// Opens the port again that another daemon was to have.
    fn open_again(&mut self) -> io::Result<()> {
        let Upgrade::Anew(config) = &mut self.upgrade else { return Ok(()) };
        let engine = &mut self.host.engine;
        let opened = open_closed(|| engine.open_port_again(config().map_err(OpenError::Io)?));
        opened.map_err(|error| {
            let what = "an upgrade has failed, and then the port could not be opened";
            io::Error::other(format!("{what}: {error}"))
        })?;
        self.wake = self.host.engine.wake_fds()?;
        Ok(())
    }
}
