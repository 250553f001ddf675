//! One port for several cores.
//!
//! The core that has the card, core 0, reads of each frame which local port it is
//! for, and gives it to the core that has claimed the port: flows are spread by
//! software, whatever the card can do. What core 0 gets for itself and sends itself
//! is not copied; the others are at the end of a wire in memory. A port that several
//! cores share is divided among them flow by flow.

mod branch;
mod crossing;
mod destination;
mod directory;
mod flow;
mod shared_port;
mod slots;
mod trunk;

use std::io;
use std::sync::Arc;

use tidegate_memory::Doorbell;

pub use self::branch::Branch;
pub use self::crossing::Crossing;
pub use self::flow::Flow;
pub use self::shared_port::Sharing;
pub use self::trunk::Trunk;
use crate::buffer::LINK_HEADER_BYTES;
use crate::mem::{MAX_FRAME_BYTES, MemConfig, wire_between};
use crate::steering::Protocol;
use crate::{Capabilities, Port};

/// A local port.
pub type LocalPort = (Protocol, u16);

/// The most cores behind one port.
pub const MOST_CORES: usize = 64;

/// Frames on their way between two cores: as many as a card's ring has.
const WIRE_FRAMES: usize = 1024;

/// Spreads a port over `cores` cores, itself and others.
///
/// # Errors
/// [`io::ErrorKind::InvalidInput`] says what is wrong with the port or the number;
/// and when the process has no descriptor left.
pub fn spread(port: Box<dyn Port>, cores: usize) -> io::Result<(Trunk, Vec<Branch>)> {
    let wrong = |what: String| Err(io::Error::new(io::ErrorKind::InvalidInput, what));
    let capabilities = port.capabilities();
    let most = MAX_FRAME_BYTES - LINK_HEADER_BYTES;
    if !(1..=MOST_CORES).contains(&cores) {
        return wrong(format!("there can be 1 to {MOST_CORES} network cores"));
    }
    if capabilities.segmentation {
        return wrong(
            "frames of several segments do not go from core to core: leave out --segmentation, or \
             use one network core"
                .into(),
        );
    }
    if capabilities.mtu > most {
        return wrong(format!(
            "the interface's MTU is {}: frames that go from core to core can have {most}; use one \
             network core, or lower the MTU",
            capabilities.mtu
        ));
    }
    let bell = Arc::new(Doorbell::new()?);
    let crossing = Arc::new(Crossing::new(cores, Arc::clone(&bell)));
    let capabilities = Capabilities { segmentation: false, ..capabilities.clone() };
    let config = MemConfig {
        medium: capabilities.medium,
        macs: [capabilities.mac; 2],
        mtu: capabilities.mtu,
        capacity: WIRE_FRAMES,
    };
    let mut branches = Vec::new();
    let mut wires = Vec::new();
    for core in 1..cores {
        let (near, far) = wire_between(&config, Arc::clone(&bell), Arc::new(Doorbell::new()?))?;
        wires.push(near);
        branches.push(Branch {
            core,
            wire: far,
            capabilities: capabilities.clone(),
            crossing: Arc::clone(&crossing),
        });
    }
    Ok((Trunk::new(port, wires, bell, crossing)?, branches))
}

#[cfg(test)]
mod tests;
