//! Placement of packet memory on the NUMA node of the card.

use tidegate_device::topology::Topology;
use tidegate_memory::NodePreference;

use crate::DeviceConfig;

/// Nodes of what an engine works with; `None` where the kernel does not tell the node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineNodes {
    /// Node of the card.
    pub device: Option<usize>,
    /// Node of the packet buffers.
    pub memory: Option<usize>,
}

/// Node of the card that a device opens.
pub(crate) fn node_of_device(device: &DeviceConfig) -> Option<usize> {
    let node = Topology::of_machine().node_of_interface(device.interface()?)?.number;
    Some(node)
}

/// Allocates memory on a node, as far as that has any. Without a node, or the right to choose one,
/// the memory is on the node of the thread.
pub(crate) fn on_node<T>(node: Option<usize>, allocate: impl FnOnce() -> T) -> T {
    let _preference = node.and_then(|node| NodePreference::set(node).ok());
    allocate()
}
