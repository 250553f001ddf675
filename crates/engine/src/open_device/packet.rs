//! AF_PACKET device of a stack.

use tidegate_device::packet::{PacketConfig, PacketDevice, Steering};
use tidegate_device::{Device, HandoverState};
use tidegate_memory::Arena;
use tidegate_stack::AddressOwnership;
use tidegate_wire::IpCidr;

use super::kernel_addresses::reject_kernel_addresses;
use crate::{NetConfig, OpenError};

/// Opens the device for the addresses of the stack. On shared addresses it receives the packets to
/// diverted ports.
pub(super) fn open(
    packet: PacketConfig,
    config: &NetConfig,
    handover_state: &mut Option<HandoverState>,
    arena: &mut Arena,
) -> Result<Box<dyn Device>, OpenError> {
    if config.ownership == AddressOwnership::Exclusive {
        reject_kernel_addresses(&packet.interface, &config.addresses)?;
        return open_unchecked(packet, config, arena);
    }
    open_shared(packet, config, handover_state, arena)
}

#[cfg(feature = "xdp")]
fn open_shared(
    packet: PacketConfig,
    config: &NetConfig,
    handover_state: &mut Option<HandoverState>,
    arena: &mut Arena,
) -> Result<Box<dyn Device>, OpenError> {
    let packet = packet.steering(Steering::Ports { vlan: config.vlan });
    Ok(Box::new(match handover_state.take() {
        Some(HandoverState::Packet(diverter)) => {
            PacketDevice::open_diverted(&packet, *diverter, arena)?
        }
        _ => PacketDevice::open(&packet, arena)?,
    }))
}

#[cfg(not(feature = "xdp"))]
fn open_shared(
    _: PacketConfig,
    _: &NetConfig,
    _: &mut Option<HandoverState>,
    _: &mut Arena,
) -> Result<Box<dyn Device>, OpenError> {
    Err(OpenError::CannotShareAddress)
}

/// Opens the device for the addresses of the stack, which the kernel is known not to have.
pub(super) fn open_unchecked(
    mut packet: PacketConfig,
    config: &NetConfig,
    arena: &mut Arena,
) -> Result<Box<dyn Device>, OpenError> {
    packet.steering = match config.vlan {
        // The filter matches untagged frames only.
        Some(_) => Steering::Everything,
        None => Steering::Addresses(config.addresses.iter().map(IpCidr::address).collect()),
    };
    Ok(Box::new(PacketDevice::open(&packet, arena)?))
}
