//! Whose turn it is.

use crate::config::{Config, Mode};

/// A ring that the gate shares the processor out to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Ring {
    /// Packets from a card.
    Receive(usize),
    /// Packets to a card, and buffers that it has sent.
    Transmit(usize),
    /// Requests of an application.
    Application(usize),
}

/// How many rings of each kind there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rings {
    /// Receive rings.
    pub receive: usize,
    /// Transmit rings.
    pub transmit: usize,
    /// Rings of applications.
    pub application: usize,
}

/// One ring's turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn {
    /// The ring to serve.
    pub ring: Ring,
    /// The most packets or requests to take from it.
    pub quota: u32,
}

/// The rings in the order of their turns, and which of them may have work.
#[derive(Clone, Debug)]
pub(crate) struct Schedule {
    rings: Vec<Slot>,
    next: usize,
}

#[derive(Clone, Debug)]
struct Slot {
    ring: Ring,
    quota: u32,
    waiting: bool,
}

impl Schedule {
    /// Receive and transmit rings take turns, applications come after them.
    pub(crate) fn new(rings: Rings, config: &Config) -> Self {
        let cards = (0..rings.receive.max(rings.transmit)).flat_map(|card| {
            let receive = (card < rings.receive).then_some(Ring::Receive(card));
            let transmit = (card < rings.transmit).then_some(Ring::Transmit(card));
            receive.into_iter().chain(transmit)
        });
        let order = cards.chain((0..rings.application).map(Ring::Application));
        let slot = |ring| Slot { ring, quota: 0, waiting: false };
        let mut schedule = Self { rings: order.map(slot).collect(), next: 0 };
        schedule.set(config);
        schedule
    }

    /// Changes the quotas.
    pub(crate) fn set(&mut self, config: &Config) {
        for slot in &mut self.rings {
            slot.quota = match slot.ring {
                Ring::Receive(_) if config.mode == Mode::Napi => config.weight,
                Ring::Receive(_) => config.receive_quota.packets(),
                Ring::Transmit(_) => config.transmit_quota.packets(),
                Ring::Application(_) => config.application_quota.packets(),
            };
        }
    }

    /// A ring has work, or may have some.
    #[inline]
    pub(crate) fn on_ready(&mut self, ring: Ring) {
        self.set_waiting(ring, true);
    }

    /// Every ring may have work.
    #[inline]
    pub(crate) fn on_all_ready(&mut self) {
        for slot in &mut self.rings {
            slot.waiting = true;
        }
    }

    /// A ring had less than its quota: nothing is left.
    #[inline]
    pub(crate) fn on_empty(&mut self, ring: Ring) {
        // It is nearly always the ring that had its turn last.
        let last = self.next.checked_sub(1).unwrap_or(self.rings.len().saturating_sub(1));
        match self.rings.get_mut(last) {
            Some(slot) if slot.ring == ring => slot.waiting = false,
            _ => self.set_waiting(ring, false),
        }
    }

    fn set_waiting(&mut self, ring: Ring, waiting: bool) {
        if let Some(slot) = self.rings.iter_mut().find(|slot| slot.ring == ring) {
            slot.waiting = waiting;
        }
    }

    /// Whether a receive ring waits for its turn.
    pub(crate) fn receive_waits(&self) -> bool {
        self.rings.iter().any(|slot| slot.waiting && matches!(slot.ring, Ring::Receive(_)))
    }

    /// The next waiting ring in the round; receive rings only if they may.
    #[inline]
    pub(crate) fn next(&mut self, may_receive: bool) -> Option<Turn> {
        let count = self.rings.len();
        for _ in 0..count {
            let slot = &self.rings[self.next];
            self.next = if self.next + 1 == count { 0 } else { self.next + 1 };
            if slot.waiting && (may_receive || !matches!(slot.ring, Ring::Receive(_))) {
                return Some(Turn { ring: slot.ring, quota: slot.quota });
            }
        }
        None
    }
}
