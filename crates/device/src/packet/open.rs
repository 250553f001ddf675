//! Opening of packet sockets: checks of the configuration, and the options of the socket.

use std::io;

use tidegate_wire::Medium;

#[cfg(feature = "xdp")]
use super::PortDiverter;
use super::config::{PacketConfig, PacketError, ReceiveMode, Steering};
use super::ring::RingReader;
use super::sys::Socket;
use super::{Receiver, filter};
use crate::capabilities::RequiredCapabilities;
use crate::netlink::{self, Interface};

/// Size of a ring block in bytes. A frame must fit in a block, also one that stands for several
/// packets; small blocks fill early and so wait less.
pub(super) const BLOCK_BYTES: usize = 128 << 10;

/// Block timeout: the shortest that the kernel supports.
pub(super) const BLOCK_TIMEOUT_MS: u32 = 1;

/// Socket option that the `libc` crate does not have yet.
pub(super) const PACKET_IGNORE_OUTGOING: i32 = 23;

/// Checks that a packet device can have this configuration.
pub(super) fn validate(config: &PacketConfig, interface: &Interface) -> Result<(), PacketError> {
    if interface.medium != Some(Medium::Ethernet) {
        return Err(PacketError::NotEthernet(interface.name.clone()));
    }
    if !interface.up {
        return Err(PacketError::Down(interface.name.clone()));
    }
    if !((64 << 10)..=(1 << 30)).contains(&config.buffer_bytes) {
        return Err(PacketError::BufferSize(config.buffer_bytes));
    }
    let Steering::Addresses(wanted) = &config.steering else { return Ok(()) };
    // The kernel answers for its addresses on every interface.
    for other in Interface::all()? {
        for owned in netlink::addresses(other.index)? {
            if wanted.contains(&owned.address()) {
                return Err(PacketError::SharedAddress {
                    address: owned.address(),
                    interface: other.name,
                });
            }
        }
    }
    Ok(())
}

/// Opens a socket that gives frames with virtio headers.
pub(super) fn open_raw_socket(interface: &Interface) -> Result<Socket, PacketError> {
    let step = |step| {
        let interface = interface.name.clone();
        move |source| PacketError::Setup { step, interface, source }
    };
    let socket = Socket::open().map_err(|source| match source.kind() {
        io::ErrorKind::PermissionDenied => {
            PacketError::Permission(RequiredCapabilities::PACKET.explain())
        }
        _ => step("open a packet socket")(source),
    })?;
    let with_headers = socket.set_packet(libc::PACKET_VNET_HDR, 1);
    with_headers.map_err(step("turn on virtio headers (PACKET_VNET_HDR)"))?;
    Ok(socket)
}

/// Opens and configures the socket, in the order that the kernel requires.
pub(super) fn open_socket(
    config: &PacketConfig,
    interface: &Interface,
    #[cfg(feature = "xdp")] diverter: Option<&mut PortDiverter>,
) -> Result<(Socket, Receiver), PacketError> {
    let step = |step: &'static str| {
        let interface = interface.name.clone();
        move |source| PacketError::Setup { step, interface, source }
    };
    let socket = open_raw_socket(interface)?;
    socket
        .set_packet(libc::PACKET_AUXDATA, 1)
        .map_err(step("turn on VLAN tags (PACKET_AUXDATA)"))?;
    socket
        .set_packet(PACKET_IGNORE_OUTGOING, 1)
        .map_err(step("ignore sent frames (PACKET_IGNORE_OUTGOING, Linux 4.20)"))?;
    // The kernel does not segment frames that bypass the queueing discipline.
    if config.qdisc_bypass && !config.segmentation {
        socket
            .set_packet(libc::PACKET_QDISC_BYPASS, 1)
            .map_err(step("bypass the queueing discipline"))?;
    }
    if let Steering::Addresses(addresses) = &config.steering {
        socket
            .attach_filter(&filter::for_addresses(addresses))
            .map_err(step("attach a socket filter"))?;
    }
    #[cfg(feature = "xdp")]
    if let Some(diverter) = diverter {
        diverter.filter(&socket).map_err(step("attach a socket filter"))?;
    }
    socket.set_buffers(config.buffer_bytes).map_err(step("set the socket buffers"))?;
    let receiver = match config.receive {
        ReceiveMode::Syscalls => Receiver::Syscalls,
        ReceiveMode::Ring => {
            let blocks = config.buffer_bytes.div_ceil(BLOCK_BYTES).max(2);
            let ring = socket
                .map_ring(BLOCK_BYTES, blocks, BLOCK_TIMEOUT_MS)
                .map_err(step("create a TPACKET_V3 ring (use a smaller buffer)"))?;
            Receiver::Ring(RingReader::new(ring))
        }
    };
    Ok((socket, receiver))
}
