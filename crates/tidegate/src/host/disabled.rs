//! Devices that are not part of this build.

use tidegate_engine::DeviceConfig;

use super::config::HostConfig;
use super::error::HostConfigError;

#[cfg(not(feature = "packet"))]
impl HostConfig {
    pub(super) fn packet_device(&self) -> Result<DeviceConfig, HostConfigError> {
        Err(HostConfigError::FeatureDisabled("packet"))
    }
}

#[cfg(not(feature = "xdp"))]
impl HostConfig {
    pub(super) fn auto_device(
        &self,
        _: &tidegate_gate::Config,
    ) -> Result<DeviceConfig, HostConfigError> {
        self.packet_device()
    }

    pub(super) fn xdp_device(
        &self,
        _: &tidegate_gate::Config,
    ) -> Result<DeviceConfig, HostConfigError> {
        Err(HostConfigError::FeatureDisabled("xdp"))
    }
}
