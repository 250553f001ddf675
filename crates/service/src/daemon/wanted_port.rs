//! Ports that an application wants and another core has.
//!
//! Who had the port may have just ended, or only closed connections may have it still:
//! with one core it is free then. So before it is refused, the other cores are asked,
//! one after the other, and the command waits meanwhile. One that may be shared stays
//! where it is, too.

use std::io;

use tidegate_port::spread::Crossing;

use super::core::Core;
use super::family::Kin;
use super::names::AppNumber;
use super::passing::with_ticket;
use super::post::{Message, WantedPort};
use crate::contract::command::Command;

/// Whoever has the port may be on the way from one core to the next: so many times
/// around they are asked.
const LAPS: u32 = 64;

impl Core {
    /// Has the other cores asked for a port that one of them has, if that was not done.
    /// Whether the command waits for that.
    pub(super) fn asks_for_port(&mut self, number: AppNumber, command: Command) -> bool {
        let (Some(port), Some(crossing)) = (command.wanted_port(), self.cores.crossing()) else {
            return false;
        };
        let Some(Some(app)) = self.apps.get_mut(number as usize) else { return false };
        if !crossing.is_foreign(self.number, port) || app.has_asked() {
            return false;
        }
        let (ticket, by) = (app.ticket, self.number);
        let sharing = command.sharing(app.identity.uid);
        let wanted = WantedPort { port, sharing, by, ticket, is_found: false, laps: LAPS };
        let sent = self.pass_on(wanted).is_ok();
        if let Some(Some(app)) = self.apps.get_mut(number as usize)
            && sent
        {
            app.hold_back(command);
        }
        sent
    }

    fn pass_on(&self, wanted: WantedPort) -> io::Result<()> {
        let next = (self.number + 1) % self.cores.count();
        self.cores.post(next).send(Message::Wanted(wanted))
    }

    /// Another core wants a port, or all have been asked for one that this core wants.
    pub(super) fn on_wanted(&mut self, mut wanted: WantedPort) -> io::Result<()> {
        let Some(crossing) = self.cores.crossing() else { return Ok(()) };
        let port = wanted.port;
        wanted.is_found |= crossing.is_at(self.number, port);
        if wanted.by == self.number {
            wanted.is_found |= crossing.is_open_to(self.number, port, wanted.sharing);
            // It may have gone to another core, where it asks again.
            let Some((_, app)) = with_ticket(&mut self.apps, wanted.ticket) else { return Ok(()) };
            if wanted.is_found || wanted.laps == 0 {
                app.on_asked();
                return Ok(());
            }
            wanted.laps -= 1;
            return self.pass_on(wanted);
        }
        self.bury_dead_but(None);
        self.host.release_closed();
        let claims = self.host.sockets.entries().filter_map(|(_, socket)| socket.claim.as_ref());
        let is_used = claims.map(|claim| claim.local_port()).any(|used| used == port);
        let is_open = |crossing: &Crossing| crossing.is_open_to(wanted.by, port, wanted.sharing);
        let may_stay = self.cores.crossing().is_some_and(is_open);
        if !is_used && !may_stay && self.host.claims.has_ending(port) {
            let ports = vec![port];
            self.give(Kin { apps: Vec::new(), sockets: Vec::new(), ports }, wanted.by)?;
        }
        self.pass_on(wanted)
    }
}
