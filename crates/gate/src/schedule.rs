//! Round-robin schedule of rings.

use crate::config::{Config, Mode};

/// Ring to which the gate allots CPU time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Ring {
    /// Received packets of a device.
    Receive(usize),
    /// Packets to a device, and buffers that the device has sent.
    Transmit(usize),
    /// Requests of an application.
    Application(usize),
}

/// Number of rings of each kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingCounts {
    /// Receive rings.
    pub receive: usize,
    /// Transmit rings.
    pub transmit: usize,
    /// Application rings.
    pub application: usize,
}

/// Turn of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn {
    /// The ring to serve.
    pub ring: Ring,
    /// Maximum number of packets or requests to take from the ring.
    pub quota: u32,
}

/// Rings in round-robin order, each with its quota and ready flag.
#[derive(Clone, Debug)]
pub(crate) struct Schedule {
    rings: Vec<RingSlot>,
    next: usize,
}

#[derive(Clone, Debug)]
struct RingSlot {
    ring: Ring,
    quota: u32,
    ready: bool,
}

impl Schedule {
    /// Creates the order: receive and transmit rings alternate, application rings follow.
    pub(crate) fn new(rings: RingCounts, config: &Config) -> Self {
        let devices = (0..rings.receive.max(rings.transmit)).flat_map(|device| {
            let receive = (device < rings.receive).then_some(Ring::Receive(device));
            let transmit = (device < rings.transmit).then_some(Ring::Transmit(device));
            receive.into_iter().chain(transmit)
        });
        let order = devices.chain((0..rings.application).map(Ring::Application));
        let slot = |ring| RingSlot { ring, quota: 0, ready: false };
        let mut schedule = Self { rings: order.map(slot).collect(), next: 0 };
        schedule.set_quotas(config);
        schedule
    }

    /// Sets the quotas from the settings.
    pub(crate) fn set_quotas(&mut self, config: &Config) {
        for slot in &mut self.rings {
            slot.quota = match slot.ring {
                Ring::Receive(_) if config.mode == Mode::Napi => config.weight,
                Ring::Receive(_) => config.receive_quota.packets(),
                Ring::Transmit(_) => config.transmit_quota.packets(),
                Ring::Application(_) => config.application_quota.packets(),
            };
        }
    }

    /// Marks a ring as ready: it has or may have work.
    #[inline]
    pub(crate) fn on_ready(&mut self, ring: Ring) {
        self.set_ready(ring, true);
    }

    /// Marks all rings as ready.
    #[inline]
    pub(crate) fn on_all_ready(&mut self) {
        for slot in &mut self.rings {
            slot.ready = true;
        }
    }

    /// Marks a ring as empty, because it had fewer packets than its quota.
    #[inline]
    pub(crate) fn on_empty(&mut self, ring: Ring) {
        // In most cases this is the ring of the last turn.
        let last = self.next.checked_sub(1).unwrap_or(self.rings.len().saturating_sub(1));
        match self.rings.get_mut(last) {
            Some(slot) if slot.ring == ring => slot.ready = false,
            _ => self.set_ready(ring, false),
        }
    }

    fn set_ready(&mut self, ring: Ring, ready: bool) {
        if let Some(slot) = self.rings.iter_mut().find(|slot| slot.ring == ring) {
            slot.ready = ready;
        }
    }

    /// True if a receive ring is ready.
    pub(crate) fn has_ready_receive_ring(&self) -> bool {
        self.rings.iter().any(|slot| slot.ready && matches!(slot.ring, Ring::Receive(_)))
    }

    /// Returns the next ready ring; receive rings only if `may_receive`.
    #[inline]
    pub(crate) fn next(&mut self, may_receive: bool) -> Option<Turn> {
        let count = self.rings.len();
        for _ in 0..count {
            let slot = &self.rings[self.next];
            self.next = if self.next + 1 == count { 0 } else { self.next + 1 };
            if slot.ready && (may_receive || !matches!(slot.ring, Ring::Receive(_))) {
                return Some(Turn { ring: slot.ring, quota: slot.quota });
            }
        }
        None
    }
}
