//! Changing a daemon while it runs.

use std::io;
use std::sync::{Arc, mpsc};

use tidegate_gate::{GateCounters, Settings};

use super::cores::Cores;
use super::post::Message;
use super::report::GateState;

/// How a daemon is changed while it runs.
#[derive(Clone)]
pub struct Controls {
    pub(super) cores: Arc<Cores>,
}

impl Controls {
    /// Receive scheduling on all cores, with these settings from now on if there are
    /// any.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] for another mode, and when a core has ended.
    pub fn gate(&self, settings: Option<&Settings>) -> io::Result<GateState> {
        let ended = || io::Error::other("the network core has ended");
        let ask = |core| {
            let (answer, answered) = mpsc::channel();
            self.cores.post(core).send(Message::Gate(settings.cloned(), answer))?;
            answered.recv().map_err(|_| ended())?
        };
        let mut states = (0..self.cores.count()).map(ask);
        let first: io::Result<GateState> = states.next().unwrap_or_else(|| Err(ended()));
        states.try_fold(first?, |all, core| {
            let GateCounters { interrupts, receive_turns, yields, .. } = all.counters;
            let GateCounters { held_by_feedback, held_by_share, lifted, .. } = all.counters;
            let core = core?.counters;
            let counters = GateCounters {
                interrupts: interrupts + core.interrupts,
                receive_turns: receive_turns + core.receive_turns,
                yields: yields + core.yields,
                held_by_feedback: held_by_feedback + core.held_by_feedback,
                held_by_share: held_by_share + core.held_by_share,
                lifted: lifted + core.lifted,
            };
            Ok(GateState { counters, ..all })
        })
    }

    /// Lets a whole program go to another core: it may have attached once for each.
    ///
    /// # Errors
    /// As [`Controls::move_application`].
    pub fn move_program(&self, pid: u32, core: usize) -> io::Result<()> {
        (0..self.cores.count()).try_for_each(|_| self.move_application(pid, core))
    }

    /// Lets one application of a process on each core go to another core, and those that
    /// it shares sockets or ports with. If it is there already, or there is no such
    /// process, nothing happens.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotFound`] when there is no such core, and when one has
    /// ended.
    pub fn move_application(&self, pid: u32, core: usize) -> io::Result<()> {
        let count = self.cores.count();
        if core >= count {
            let what = format!("there is no network core {core}: they are 0 to {}", count - 1);
            return Err(io::Error::new(io::ErrorKind::NotFound, what));
        }
        (0..count).try_for_each(|from| self.cores.post(from).send(Message::Give { pid, to: core }))
    }
}
