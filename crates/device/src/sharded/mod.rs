//! One device shared by several cores: software flow steering, as RPS in the kernel.
//!
//! A core with a receive queue parses the local port of each frame and passes the frame to the core
//! that has claimed the port: flows are distributed in software, whatever the NIC supports. Frames
//! that such a core receives for itself or sends itself are not copied; in-memory links connect the
//! cores. Flows of a port that several cores share are distributed over these cores.
//!
//! The primary core, core 0, owns the device. A device that offers further queues
//! ([`Device::offer_queues`]) has one for each of the next cores, which read and send by their own
//! queue. The other cores send through the primary core.

mod claimed_port;
mod core_device;
mod destination;
mod dispatcher;
mod flow;
mod flow_steering;
mod flow_table;
mod fragments;
mod indirection_table;
mod parked;
mod queue_requests;
mod steering_table;
mod uplinks;

use std::io;
use std::net::IpAddr;
use std::sync::Arc;

use tidegate_memory::Doorbell;

pub use self::claimed_port::PortSharing;
pub use self::core_device::CoreDevice;
use self::core_device::CoreLinks;
use self::dispatcher::{Dispatcher, Link, Usage};
pub use self::flow::Flow;
pub use self::flow_steering::FlowSteering;
use self::uplinks::Uplinks;
use crate::buffer::LINK_HEADER_BYTES;
use crate::mem::{MAX_FRAME_BYTES, MemConfig, MemDevice, wire_between};
use crate::steering::TransportProtocol;
use crate::{Capabilities, Device};

/// A local port and its protocol.
pub type LocalPort = (TransportProtocol, u16);

/// Maximum number of cores of one device.
pub const MAX_CORES: usize = 64;

/// Capacity of the link from the primary core to each other core in frames, and back: as many as a
/// NIC's ring has.
const LINK_FRAMES: usize = 1024;

/// Minimum capacity of a link, and the frames of all links to one core together: the memory of links
/// between all pairs grows with the square of the number of cores.
const MIN_LINK_FRAMES: usize = 64;
const LINK_FRAMES_TOTAL: usize = 4096;

/// Capacity of a link that no frame takes.
const NO_FRAMES: usize = 1;

/// Shards a device over `cores` cores, and returns the device of each, the primary core's first. A
/// core whose queue the device offers has yet to open it ([`CoreDevice::open_queue`]).
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
/// let cores = shard(Box::new(device), 4)?;
/// assert_eq!(cores.len(), 4);
/// assert_eq!(cores[0].flow_steering().cores(), 4);
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn shard(device: Box<dyn Device>, cores: usize) -> io::Result<Vec<CoreDevice>> {
    shard_for(device, cores, Usage::Host)
}

/// As [`shard`] for a router with these addresses on the link: each core forwards what it receives,
/// answers of neighbours go to all cores, and what else is for the router alone to the primary core.
///
/// # Errors
/// As [`shard`]. A core without a queue receives nothing: see [`CoreDevice::has_queue`].
pub fn shard_router(
    device: Box<dyn Device>,
    cores: usize,
    addresses: impl IntoIterator<Item = IpAddr>,
) -> io::Result<Vec<CoreDevice>> {
    shard_for(device, cores, Usage::Router(addresses.into_iter().collect()))
}

fn shard_for(
    mut device: Box<dyn Device>,
    cores: usize,
    usage: Usage,
) -> io::Result<Vec<CoreDevice>> {
    check(device.capabilities(), cores)?;
    let capabilities = device.capabilities().clone();
    let mut offered = device.offer_queues();
    let mut links = connect(&capabilities, cores, 1 + offered.len(), &usage)?;
    let bells = links.iter().map(|links| Arc::clone(&links.bell)).collect();
    let flow_steering = Arc::new(FlowSteering::new(bells));
    flow_steering.set_rules(device.shared_rules());
    offered.truncate(cores - 1);
    let mut offered = offered.into_iter();
    let mut devices = Vec::with_capacity(cores);
    for (core, links) in links.drain(..).enumerate() {
        let open_queue = if core == 0 { None } else { offered.next() };
        let flow_steering = Arc::clone(&flow_steering);
        let capabilities = Capabilities {
            // A link to another core would cut what the stack has put together.
            segmentation: capabilities.segmentation && (core == 0 || open_queue.is_some()),
            ..capabilities.clone()
        };
        devices.push(CoreDevice::new(core, capabilities, links, open_queue, flow_steering)?);
    }
    devices[0].set_queue(Some(device))?;
    Ok(devices)
}

fn check(capabilities: &Capabilities, cores: usize) -> io::Result<()> {
    let invalid = |what: String| Err(io::Error::new(io::ErrorKind::InvalidInput, what));
    let max_mtu = MAX_FRAME_BYTES - LINK_HEADER_BYTES;
    if !(1..=MAX_CORES).contains(&cores) {
        return invalid(format!("the number of network cores must be 1 to {MAX_CORES}"));
    }
    if capabilities.mtu > max_mtu {
        return invalid(format!(
            "the interface's MTU is {}: with several network cores the maximum is {max_mtu}; use one \
             network core, or lower the MTU",
            capabilities.mtu
        ));
    }
    Ok(())
}

/// Connects the cores by links. With several `queues` any core may receive from a queue of its own;
/// otherwise only the primary core does.
fn connect(
    capabilities: &Capabilities,
    cores: usize,
    queues: usize,
    usage: &Usage,
) -> io::Result<Vec<CoreLinks>> {
    let doorbell = |_| Doorbell::new().map(Arc::new);
    let bells = (0..cores).map(doorbell).collect::<io::Result<Vec<_>>>()?;
    let doorbells = (0..cores).map(doorbell).collect::<io::Result<Vec<_>>>()?;
    let wire = |ends: [&Arc<Doorbell>; 2], capacities| {
        let config = MemConfig {
            medium: capabilities.medium,
            macs: [capabilities.mac; 2],
            mtu: capabilities.mtu,
            segmentation: capabilities.segmentation,
            ..MemConfig::default()
        };
        wire_between(&config, ends.map(Arc::clone), capacities)
    };
    let dispatches = |core| core == 0 || queues > 1;
    let link_frames = match queues {
        1 => LINK_FRAMES,
        _ => (LINK_FRAMES_TOTAL / cores.next_power_of_two()).clamp(MIN_LINK_FRAMES, LINK_FRAMES),
    };
    let capacity_from = |core| if dispatches(core) { link_frames } else { NO_FRAMES };
    let mut links: Vec<Vec<Option<Link>>> =
        (0..cores).map(|_| (0..cores).map(|_| None).collect()).collect();
    for one in (0..cores).filter(|&core| dispatches(core)) {
        for other in one + 1..cores {
            let ends = [&doorbells[one], &doorbells[other]];
            let (near, far) = wire(ends, [one, other].map(capacity_from))?;
            links[one][other] = Some(Link::new(near, dispatches(other)));
            links[other][one] = Some(Link::new(far, true));
        }
    }
    let mut to_primary = Vec::with_capacity(cores);
    let mut uplinks: Vec<Option<MemDevice>> = vec![None];
    for bell in &bells[1..] {
        let (near, far) = wire([&bells[0], bell], [NO_FRAMES, LINK_FRAMES])?;
        to_primary.push(near);
        uplinks.push(Some(far));
    }
    let medium = capabilities.medium;
    let mut to_primary = Some(to_primary);
    let all = links.into_iter().zip(uplinks).zip(bells.into_iter().zip(doorbells)).enumerate();
    let core_links = |(core, ((links, uplink), (bell, doorbell)))| CoreLinks {
        dispatcher: Dispatcher::new(core, medium, usage.clone(), links),
        uplink,
        uplinks: Uplinks::new(to_primary.take().unwrap_or_default()),
        bell,
        doorbell,
    };
    Ok(all.map(core_links).collect())
}

#[cfg(test)]
mod tests;
