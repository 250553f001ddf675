//! Admission control in front of the simulated NIC.

use tidegate_gate::admission::{
    Admission, AdmissionVerdict, Config, PacketKind, PacketMeta, Pressure,
};
use tidegate_wire::Protocol;

use crate::error::SetupError;
use crate::load::IpFamily;
use crate::load::{Packet, flow_endpoints};
use crate::report::DropPoint;
use crate::setup::{HostRole, Setup};
use crate::sim_core::{Service, SimCore, Timer};

/// Sampling interval in packets while no limits are in force, as in the engine.
const SAMPLE_INTERVAL: u64 = 16;

/// Admission controller with the counts at the start of the period.
pub(crate) struct AdmissionStage {
    admission: Admission,
    family: IpFamily,
    readers: u32,
    /// Packets served, and packets lost after work was spent on them or for want of a descriptor,
    /// when the period began.
    served: u64,
    late_drops: u64,
}

impl AdmissionStage {
    pub(crate) fn new(setup: &Setup, seed: u64) -> Result<Option<Self>, SetupError> {
        let Some(config) = &setup.admission else { return Ok(None) };
        let mut key = [0; 16];
        key[..8].copy_from_slice(&seed.to_le_bytes());
        let family = match setup.role {
            HostRole::Udp { family, .. } | HostRole::Closed { family } => family,
            HostRole::Router { .. } => IpFamily::V4,
        };
        let admission = Admission::new(config, key)?;
        Ok(Some(Self { admission, family, readers: setup.readers, served: 0, late_drops: 0 }))
    }

    fn packet_meta(&self, packet: Packet) -> PacketMeta {
        let ((source, _), (_, port)) = flow_endpoints(self.family, packet.flow, self.readers);
        let packet_bytes = match self.family {
            IpFamily::V4 => 46,
            IpFamily::V6 => 56,
        };
        let kind = PacketKind::Ip(Protocol::UDP);
        PacketMeta { kind, source: Some(source), destination_port: Some(port), packet_bytes }
    }
}

impl SimCore {
    /// Returns true if the packet reaches the NIC. Refusing a packet costs the host nothing.
    #[inline]
    pub(crate) fn is_admitted(&mut self, packet: Packet) -> bool {
        let clock_ns = self.clock_ns();
        let Some(stage) = &mut self.admission_stage else { return true };
        if stage.admission.is_limiting() {
            let meta = stage.packet_meta(packet);
            return matches!(
                stage.admission.decide(clock_ns, &meta),
                AdmissionVerdict::Admit { .. }
            );
        }
        if self.offered.is_multiple_of(SAMPLE_INTERVAL) {
            let meta = stage.packet_meta(packet);
            stage.admission.learn(&meta);
        }
        true
    }

    pub(crate) fn set_admission_timer(&mut self) {
        if self.admission_stage.is_some() {
            self.set_timer(Timer::Admission, self.now_ns() + Config::PERIOD_NS);
        }
    }

    /// Reports the measurements of a period to the admission controller.
    pub(crate) fn on_admission_period(&mut self) {
        self.set_admission_timer();
        let clock_ns = self.clock_ns();
        let refused = self.drops[DropPoint::Admission as usize];
        let own_drops: u64 = self.drops.iter().sum::<u64>() - refused;
        let (in_sockets, level_percent) = match &self.service {
            Service::Udp { udp, .. } => {
                let levels = (0..udp.readers()).map(|reader| udp.level(reader));
                (udp.socket_drops(), levels.map(percent).max())
            }
            Service::Router(router) => {
                let filter = router.filter.as_ref();
                let level = |queue: &crate::router::FilterQueue| {
                    percent((queue.waiting.len() as u32, queue.capacity))
                };
                (0, filter.map(level))
            }
        };
        let Some(stage) = &mut self.admission_stage else { return };
        let late_drops = own_drops + in_sockets;
        let pressure = Pressure {
            served: self.delivered - stage.served,
            late_drops: late_drops - stage.late_drops,
            level_percent: level_percent.unwrap_or(0),
            rx_missed_permille: 0,
        };
        (stage.served, stage.late_drops) = (self.delivered, late_drops);
        stage.admission.on_period(clock_ns, &pressure);
    }
}

fn percent((packets, capacity): (u32, u32)) -> u32 {
    (u64::from(packets) * 100 / u64::from(capacity.max(1))) as u32
}
