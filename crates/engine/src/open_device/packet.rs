//! AF_PACKET device of a stack.

use tidegate_device::Device;
use tidegate_device::packet::{PacketConfig, PacketDevice, Steering};
use tidegate_memory::Arena;
use tidegate_wire::IpCidr;

use super::kernel_addresses::reject_kernel_addresses;
use crate::{NetConfig, OpenError};

/// Opens the device for the addresses of the stack.
pub(super) fn open(
    packet: PacketConfig,
    config: &NetConfig,
    arena: &mut Arena,
) -> Result<Box<dyn Device>, OpenError> {
    reject_kernel_addresses(&packet.interface, &config.addresses)?;
    open_unchecked(packet, config, arena)
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
