//! Admission control in front of the simulated NIC.

use tidegate_gate::admission::{Admission, AdmissionVerdict, PacketKind, PacketMeta, Pressure};
use tidegate_wire::Protocol;

use crate::error::SetupError;
use crate::load::{IpFamily, Packet, flow_endpoints};
use crate::setup::{HostRole, Setup};

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

    /// Returns true if the packet is admitted; `offered` is its number.
    #[inline]
    pub(crate) fn is_admitted(&mut self, clock_ns: u64, offered: u64, packet: Packet) -> bool {
        if self.admission.is_limiting() {
            let meta = self.packet_meta(packet);
            return matches!(
                self.admission.decide(clock_ns, &meta),
                AdmissionVerdict::Admit { .. }
            );
        }
        if offered.is_multiple_of(SAMPLE_INTERVAL) {
            let meta = self.packet_meta(packet);
            self.admission.learn(&meta);
        }
        true
    }

    /// Reports the measurements of a period to the admission controller. `served` and
    /// `late_drops` are totals; `level_percent` is the fill level of the fullest queue.
    pub(crate) fn on_period(
        &mut self,
        clock_ns: u64,
        served: u64,
        late_drops: u64,
        level_percent: u32,
    ) {
        let pressure = Pressure {
            served: served - self.served,
            late_drops: late_drops - self.late_drops,
            level_percent,
            rx_missed_permille: 0,
        };
        (self.served, self.late_drops) = (served, late_drops);
        self.admission.on_period(clock_ns, &pressure);
    }
}
