//! AF_XDP device of a host configuration.

use tidegate_device::xdp::{BusyPoll, XdpConfig};
use tidegate_engine::DeviceConfig;
use tidegate_gate as gate;

use super::config::HostConfig;
use super::error::HostConfigError;

impl HostConfig {
    pub(super) fn xdp_device(&self, gate: &gate::Config) -> Result<DeviceConfig, HostConfigError> {
        Ok(self.xdp_config(gate)?.into())
    }

    /// AF_XDP, or AF_PACKET beside an XDP program of another process.
    pub(super) fn auto_device(&self, gate: &gate::Config) -> Result<DeviceConfig, HostConfigError> {
        #[cfg(feature = "packet")]
        return Ok(DeviceConfig::Auto(self.xdp_config(gate)?));
        #[cfg(not(feature = "packet"))]
        self.xdp_device(gate)
    }

    fn xdp_config(&self, gate: &gate::Config) -> Result<XdpConfig, HostConfigError> {
        let mut xdp = XdpConfig::new(self.required_iface()?);
        xdp.mode = self.xdp_mode;
        xdp.queues = (!self.queues.is_empty()).then(|| self.queues.clone());
        let is_polling = matches!(gate.mode, gate::Mode::Polled | gate::Mode::Dedicated);
        if gate.mode == gate::Mode::Moderated {
            // The kernel's ring sizes are powers of two.
            let descriptors = gate.descriptors.next_power_of_two();
            xdp.rings.receive = descriptors;
            xdp.rings.fill = descriptors;
        }
        xdp.busy_poll = match self.busy_poll {
            Some(0) => None,
            // The other modes depend on the device's interrupts.
            _ if !is_polling => None,
            Some(budget) => Some(BusyPoll::default().budget(budget)),
            None => Some(BusyPoll::default()),
        };
        Ok(xdp)
    }
}
