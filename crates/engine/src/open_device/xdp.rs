//! AF_XDP device of a stack.

use tidegate_device::xdp::{SteeringRule, XdpConfig, XdpDevice};
use tidegate_device::{Device, HandoverState};
use tidegate_memory::Arena;
use tidegate_stack::AddressOwnership;

use super::TakeoverState;
use super::kernel_addresses::reject_kernel_addresses;
use crate::{NetConfig, OpenError};

/// Opens the device for the addresses of the stack, with a program loaded before if there is one.
pub(super) fn open(
    mut xdp: XdpConfig,
    config: &NetConfig,
    handover_state: &mut Option<HandoverState>,
    arena: &mut Arena,
) -> Result<Box<dyn Device>, OpenError> {
    if config.ownership == AddressOwnership::Exclusive {
        reject_kernel_addresses(&xdp.interface, &config.addresses)?;
        let own = config.addresses.iter().map(|address| SteeringRule::Address(address.address()));
        xdp.steering.rules.extend(own);
    }
    xdp.steering.vlan = config.vlan;
    Ok(Box::new(match handover_state {
        Some(HandoverState::Xdp(loaded)) => XdpDevice::open_loaded(xdp, loaded, arena)?,
        _ => XdpDevice::open(xdp, arena)?,
    }))
}

/// Loads the program and, for addresses that the kernel does not have, opens the interim device.
pub(super) fn prepare_takeover(
    xdp: &XdpConfig,
    config: &NetConfig,
    arena: &mut Arena,
) -> Result<TakeoverState, OpenError> {
    let handover_state = Some(HandoverState::Xdp(Box::new(XdpDevice::load()?)));
    let interim_device = match config.ownership {
        AddressOwnership::Exclusive => open_interim(&xdp.interface, config, arena)?,
        AddressOwnership::Shared => None,
    };
    Ok(TakeoverState { interim_device, handover_state })
}

/// Opens an AF_PACKET device, which receives the frames that no program takes.
#[cfg(feature = "packet")]
fn open_interim(
    interface: &str,
    config: &NetConfig,
    arena: &mut Arena,
) -> Result<Option<Box<dyn Device>>, OpenError> {
    let packet = tidegate_device::packet::PacketConfig::new(interface);
    super::packet::open_unchecked(packet, config, arena).map(Some)
}

/// Opens no interim device, since AF_PACKET is not part of this build.
#[cfg(not(feature = "packet"))]
fn open_interim(
    _: &str,
    _: &NetConfig,
    _: &mut Arena,
) -> Result<Option<Box<dyn Device>>, OpenError> {
    Ok(None)
}
