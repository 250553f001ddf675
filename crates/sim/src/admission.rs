//! The gate's admission, before the card.

use tidegate_gate::admission::{Admission, Config, Facts, Kind, Pressure, Verdict};
use tidegate_wire::Protocol;

use crate::core::{Core, Service, Timer};
use crate::error::SetupError;
use crate::load::Family;
use crate::load::{Packet, ends};
use crate::report::Place;
use crate::setup::{Role, Setup};

/// One packet of so many is looked at in calm time, as the engine does it.
const SAMPLE: u64 = 16;

/// Who decides what is let in.
pub(crate) struct Gatekeeper {
    admission: Admission,
    family: Family,
    readers: u32,
    /// What had been served, and lost after work was spent on it or for want
    /// of a descriptor, when the period began.
    served: u64,
    lost_late: u64,
}

impl Gatekeeper {
    pub(crate) fn new(setup: &Setup, seed: u64) -> Result<Option<Self>, SetupError> {
        let Some(config) = &setup.admission else { return Ok(None) };
        let mut key = [0; 16];
        key[..8].copy_from_slice(&seed.to_le_bytes());
        let family = match setup.role {
            Role::Udp { family, .. } | Role::Closed { family } => family,
            Role::Router { .. } => Family::V4,
        };
        let admission = Admission::new(config, key)?;
        Ok(Some(Self { admission, family, readers: setup.readers, served: 0, lost_late: 0 }))
    }

    fn facts(&self, packet: Packet) -> Facts {
        let ((source, _), (_, port)) = ends(self.family, packet.flow, self.readers);
        let packet_bytes = match self.family {
            Family::V4 => 46,
            Family::V6 => 56,
        };
        let kind = Kind::Ip(Protocol::UDP);
        Facts { kind, source: Some(source), port: Some(port), packet_bytes }
    }
}

impl Core {
    /// Whether the packet gets to the card. Refusing it costs the host nothing.
    #[inline]
    pub(crate) fn is_admitted(&mut self, packet: Packet) -> bool {
        let clock_ns = self.clock_ns();
        let Some(keeper) = &mut self.gatekeeper else { return true };
        if keeper.admission.is_limiting() {
            let facts = keeper.facts(packet);
            return matches!(keeper.admission.decide(clock_ns, &facts), Verdict::Admit { .. });
        }
        if self.offered.is_multiple_of(SAMPLE) {
            let facts = keeper.facts(packet);
            keeper.admission.learn(&facts);
        }
        true
    }

    pub(crate) fn set_admission_timer(&mut self) {
        if self.gatekeeper.is_some() {
            self.set_timer(Timer::Admission, self.now_ns() + Config::PERIOD_NS);
        }
    }

    /// Tells admission how things went.
    pub(crate) fn on_admission_period(&mut self) {
        self.set_admission_timer();
        let clock_ns = self.clock_ns();
        let refused = self.drops[Place::Admission as usize];
        let own: u64 = self.drops.iter().sum::<u64>() - refused;
        let (in_sockets, level_percent) = match &self.service {
            Service::Udp { udp, .. } => {
                let levels = (0..udp.readers()).map(|reader| udp.level(reader));
                (udp.socket_drops(), levels.map(percent).max())
            }
            Service::Router(router) => {
                let screen = router.screen.as_ref();
                let level = |screen: &crate::router::ScreenQueue| {
                    percent((screen.waiting.len() as u32, screen.capacity))
                };
                (0, screen.map(level))
            }
        };
        let Some(keeper) = &mut self.gatekeeper else { return };
        let lost_late = own + in_sockets;
        let pressure = Pressure {
            served: self.delivered - keeper.served,
            lost_late: lost_late - keeper.lost_late,
            level_percent: level_percent.unwrap_or(0),
            unseen_permille: 0,
        };
        (keeper.served, keeper.lost_late) = (self.delivered, lost_late);
        keeper.admission.on_period(clock_ns, &pressure);
    }
}

fn percent((packets, capacity): (u32, u32)) -> u32 {
    (u64::from(packets) * 100 / u64::from(capacity.max(1))) as u32
}
