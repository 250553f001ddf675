//! One device shared by several cores: software flow steering, as RPS in the kernel.
//!
//! The primary core, core 0, owns the device. It parses the local port of each frame and passes the
//! frame to the core that has claimed the port: flows are distributed in software, whatever the
//! NIC supports. Frames that the primary core receives for itself or sends itself are not copied;
//! each secondary core is at the far end of an in-memory link. Flows of a port that several cores
//! share are distributed over these cores.

mod claimed_port;
mod destination;
mod flow;
mod flow_steering;
mod flow_table;
mod fragments;
mod indirection_table;
mod parked;
mod primary;
mod secondary;
mod steering_table;

use std::io;
use std::sync::Arc;

use tidegate_memory::Doorbell;

pub use self::claimed_port::PortSharing;
pub use self::flow::Flow;
pub use self::flow_steering::FlowSteering;
pub use self::primary::PrimaryDevice;
pub use self::secondary::SecondaryDevice;
use crate::buffer::LINK_HEADER_BYTES;
use crate::mem::{MAX_FRAME_BYTES, MemConfig, wire_between};
use crate::steering::TransportProtocol;
use crate::{Capabilities, Device};

/// A local port and its protocol.
pub type LocalPort = (TransportProtocol, u16);

/// Maximum number of cores of one device.
pub const MAX_CORES: usize = 64;

/// Capacity of the link to each secondary core in frames: as many as a NIC's ring has.
const WIRE_FRAMES: usize = 1024;

/// Shards a device over `cores` cores: the primary core, and `cores - 1` secondary cores.
///
/// # Errors
/// [`io::ErrorKind::InvalidInput`] when the device or the number of cores is not suitable; and
/// when the process has no file descriptor left.
///
/// # Examples
/// ```
/// use tidegate_device::mem::{MemConfig, wire};
/// use tidegate_device::sharded::shard;
///
/// let (device, _peer) = wire(&MemConfig::default())?;
/// let (primary, secondaries) = shard(Box::new(device), 4)?;
/// assert_eq!(secondaries.len(), 3);
/// assert_eq!(primary.flow_steering().cores(), 4);
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn shard(
    device: Box<dyn Device>,
    cores: usize,
) -> io::Result<(PrimaryDevice, Vec<SecondaryDevice>)> {
    let invalid = |what: String| Err(io::Error::new(io::ErrorKind::InvalidInput, what));
    let capabilities = device.capabilities();
    let max_mtu = MAX_FRAME_BYTES - LINK_HEADER_BYTES;
    if !(1..=MAX_CORES).contains(&cores) {
        return invalid(format!("the number of network cores must be 1 to {MAX_CORES}"));
    }
    if capabilities.segmentation {
        return invalid(
            "segmentation offload works on a single network core only: omit --segmentation, or \
             use one network core"
                .into(),
        );
    }
    if capabilities.mtu > max_mtu {
        return invalid(format!(
            "the interface's MTU is {}: with several network cores the maximum is {max_mtu}; use one \
             network core, or lower the MTU",
            capabilities.mtu
        ));
    }
    let doorbell = Arc::new(Doorbell::new()?);
    let flow_steering = Arc::new(FlowSteering::new(cores, Arc::clone(&doorbell)));
    let capabilities = Capabilities { segmentation: false, ..capabilities.clone() };
    let config = MemConfig {
        medium: capabilities.medium,
        macs: [capabilities.mac; 2],
        mtu: capabilities.mtu,
        capacity: WIRE_FRAMES,
        ..MemConfig::default()
    };
    let mut secondaries = Vec::new();
    let mut wires = Vec::new();
    for core in 1..cores {
        let (near, far) = wire_between(&config, Arc::clone(&doorbell), Arc::new(Doorbell::new()?))?;
        wires.push(near);
        secondaries.push(SecondaryDevice {
            core,
            wire: far,
            capabilities: capabilities.clone(),
            flow_steering: Arc::clone(&flow_steering),
        });
    }
    Ok((PrimaryDevice::new(device, wires, doorbell, flow_steering)?, secondaries))
}

#[cfg(test)]
mod tests;
