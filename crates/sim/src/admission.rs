//! Admission control of the simulated host, in front of the NIC or in the polling loop.

use std::net::IpAddr;

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
    /// Totals when the period began.
    totals: LoadTotals,
}

/// Totals of a core since its start.
#[derive(Clone, Copy, Default)]
pub(crate) struct LoadTotals {
    /// Packets served.
    pub(crate) served: u64,
    /// Packets lost after work was spent on them.
    pub(crate) late_drops: u64,
    /// Packets that arrived.
    pub(crate) offered: u64,
    /// Packets lost on a full receive ring.
    pub(crate) rx_missed: u64,
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
        let admission = Admission::new(config, key)?.with_samples_under_limits();
        Ok(Some(Self { admission, family, readers: setup.readers, totals: LoadTotals::default() }))
    }

    fn packet_meta(&self, packet: Packet) -> PacketMeta<'static> {
        let (_, (_, port)) = flow_endpoints(self.family, packet.flow, self.readers);
        let source = source_of(self.family, packet.flow);
        let packet_bytes = match self.family {
            IpFamily::V4 => 46,
            IpFamily::V6 => 56,
        };
        let kind = PacketKind::Ip(Protocol::UDP);
        let (source, destination_port) = (Some(source), Some(port));
        PacketMeta { kind, source, destination_port, packet_bytes, payload: &[] }
    }

    /// Returns true if the packet is admitted; `offered` is its number.
    #[inline]
    pub(crate) fn is_admitted(&mut self, clock_ns: u64, offered: u64, packet: Packet) -> bool {
        if self.admission.is_learning() && offered.is_multiple_of(SAMPLE_INTERVAL) {
            let meta = self.packet_meta(packet);
            self.admission.learn(&meta);
        }
        if !self.admission.is_limiting() {
            return true;
        }
        let meta = self.packet_meta(packet);
        matches!(self.admission.decide(clock_ns, &meta), AdmissionVerdict::Admit { .. })
    }

    /// Reports the measurements of a period to the admission controller. `level_percent` is the
    /// fill level of the fullest queue; `backlog_percent` is the share of the
    /// receive turns that left packets.
    pub(crate) fn on_period(
        &mut self,
        clock_ns: u64,
        totals: LoadTotals,
        level_percent: u32,
        backlog_percent: u32,
    ) {
        let before = std::mem::replace(&mut self.totals, totals);
        let rx_missed = totals.rx_missed - before.rx_missed;
        let arrived = (totals.offered - before.offered).max(1);
        let pressure = Pressure {
            served: totals.served - before.served,
            late_drops: totals.late_drops - before.late_drops,
            level_percent,
            backlog_percent,
            rx_missed_permille: (rx_missed * 1000 / arrived).min(1000) as u32,
        };
        self.admission.on_period(clock_ns, &pressure);
    }
}

/// Source address of a flow for admission control, in the networks of [`flow_endpoints`]: each
/// flow is a source of its own.
fn source_of(family: IpFamily, flow: u32) -> IpAddr {
    let (high, low) = ((flow >> 8) as u8, flow as u8);
    match family {
        IpFamily::V4 => [198, 18, high, low].into(),
        IpFamily::V6 => [0x2001, 2, 0, flow as u16, 0, 0, 0, 1].into(),
    }
}
