//! AF_PACKET device of a host configuration.

use tidegate_device::packet::PacketConfig;
use tidegate_engine::DeviceConfig;

use super::config::HostConfig;
use super::error::HostConfigError;

impl HostConfig {
    pub(super) fn packet_device(&self) -> Result<DeviceConfig, HostConfigError> {
        let packet = PacketConfig::new(self.required_iface()?);
        Ok(packet.segmentation(self.segmentation).into())
    }
}
