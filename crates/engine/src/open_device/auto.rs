//! AF_XDP device of a stack, or AF_PACKET beside an XDP program of another process.

use tidegate_device::packet::PacketConfig;
use tidegate_device::xdp::{XdpConfig, XdpError};
use tidegate_device::{Device, HandoverState};
use tidegate_memory::Arena;

use super::{packet, xdp};
use crate::{NetConfig, OpenError};

/// Opens AF_XDP, or AF_PACKET if another process has a program on the interface. The frames that
/// the program passes reach the packet socket.
pub(super) fn open(
    config: XdpConfig,
    net: &mut NetConfig,
    handover_state: &mut Option<HandoverState>,
    arena: &mut Arena,
) -> Result<Box<dyn Device>, OpenError> {
    let interface = config.interface.clone();
    // A device closed for handover has left diverted ports, or the link of its XDP program.
    let was_packet = matches!(handover_state, Some(HandoverState::Packet(_)));
    let was_xdp = matches!(handover_state, Some(HandoverState::Xdp(xdp)) if xdp.link().is_some());
    let mut reason = None;
    if !was_packet {
        match xdp::open(config, net, handover_state, arena) {
            Err(OpenError::Xdp(XdpError::AlreadyAttached { holder, .. })) if !was_xdp => {
                let holder = holder.map_or_else(|| "another process".to_owned(), |h| h.to_string());
                reason = Some(format!("AF_XDP on {interface} is held by {holder}"));
            }
            opened => return opened,
        }
    }
    let packet = PacketConfig::new(interface).reason(reason);
    net.device = packet.clone().into();
    packet::open(packet, net, handover_state, arena)
}
