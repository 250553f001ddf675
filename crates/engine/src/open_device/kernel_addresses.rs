//! Addresses that the kernel has on an interface.

use tidegate_device::netlink::{self, Interface};
use tidegate_wire::IpCidr;

use crate::OpenError;

/// Rejects an own address that the kernel has too.
pub(super) fn reject_kernel_addresses(
    interface: &str,
    addresses: &[IpCidr],
) -> Result<(), OpenError> {
    let interface = Interface::by_name(interface)?;
    for kernel_address in netlink::addresses(interface.index)? {
        let address = kernel_address.address();
        if addresses.iter().any(|own| own.address() == address) {
            return Err(OpenError::KernelHasAddress { address, interface: interface.name });
        }
    }
    Ok(())
}
