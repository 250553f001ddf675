//! Opening a device: the steps that depend on its kind.

#[cfg(all(feature = "packet", feature = "xdp"))]
mod auto;
#[cfg(any(feature = "packet", feature = "xdp"))]
mod kernel_addresses;
#[cfg(feature = "packet")]
mod packet;
#[cfg(feature = "xdp")]
mod xdp;

use tidegate_device::tap::TapDevice;
use tidegate_device::{Device, HandoverState, dpdk, rdma};
use tidegate_memory::Arena;

use crate::placement::on_node;
use crate::{DeviceConfig, NetConfig, OpenError};

/// Preparations for a device that another process still has.
#[derive(Default)]
pub(crate) struct TakeoverState {
    /// Interim device: receives while no device of the stack takes the frames.
    pub(crate) interim_device: Option<Box<dyn Device>>,
    /// State from which the device continues.
    pub(crate) handover_state: Option<HandoverState>,
}

/// Does the slow steps of opening that are possible while another process has the device, and
/// opens an interim device if the kind of device needs one.
pub(crate) fn prepare_takeover(
    config: &NetConfig,
    _arena: &mut Arena,
) -> Result<TakeoverState, OpenError> {
    match &config.device {
        #[cfg(feature = "xdp")]
        DeviceConfig::Xdp(xdp) => return xdp::prepare_takeover(xdp, config, _arena),
        #[cfg(all(feature = "packet", feature = "xdp"))]
        DeviceConfig::Auto(xdp) => return xdp::prepare_takeover(xdp, config, _arena),
        DeviceConfig::Dpdk(dpdk) => dpdk::start(dpdk)?,
        _ => {}
    }
    Ok(TakeoverState::default())
}

/// Opens the device of a configuration, without its wrappers.
fn open(
    config: &mut NetConfig,
    handover_state: &mut Option<HandoverState>,
    arena: &mut Arena,
) -> Result<Box<dyn Device>, OpenError> {
    #[cfg(any(feature = "packet", feature = "xdp"))]
    if config.device.interface().is_some() {
        // Also settings that this device does not change.
        tidegate_device::interface_settings::restore_left_behind();
    }
    Ok(match config.device.clone_or_take() {
        #[cfg(feature = "xdp")]
        DeviceConfig::Xdp(xdp) => xdp::open(xdp, config, handover_state, arena)?,
        #[cfg(all(feature = "packet", feature = "xdp"))]
        DeviceConfig::Auto(xdp) => auto::open(xdp, config, handover_state, arena)?,
        #[cfg(feature = "packet")]
        DeviceConfig::Packet(packet) => packet::open(packet, config, handover_state, arena)?,
        DeviceConfig::Tap(tap) => Box::new(match handover_state.take() {
            Some(HandoverState::Tap(tap_fd)) => TapDevice::open_from_handover(tap_fd, &tap, arena)?,
            _ => TapDevice::open(&tap, arena)?,
        }),
        DeviceConfig::Dpdk(config) => dpdk::open(&config, arena)?,
        DeviceConfig::Rdma(config) => rdma::open(&config, arena)?,
        DeviceConfig::Mem(device) => device,
        DeviceConfig::Custom(open) => open(arena).map_err(OpenError::Io)?,
    })
}

/// Opens the device of a configuration with its wrappers.
pub(crate) fn open_wrapped_device(
    config: &mut NetConfig,
    handover_state: &mut Option<HandoverState>,
    arena: &mut Arena,
) -> Result<Box<dyn Device>, OpenError> {
    let mut device = on_node(config.node, || open(config, handover_state, arena))?;
    for wrapper in std::mem::take(&mut config.wrappers) {
        device = wrapper(device).map_err(OpenError::Io)?;
    }
    Ok(device)
}
