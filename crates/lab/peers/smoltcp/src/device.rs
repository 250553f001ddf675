//! smoltcp's device on a packet socket.

use smoltcp::phy::{Device, DeviceCapabilities, Medium, RxToken, TxToken};
use smoltcp::time::Instant;

use crate::sys::{PacketSocket, Transmitter};

/// Bytes of a frame on an Ethernet.
const FRAME_BYTES: usize = 1514;

/// Device whose frames are those of the last batch.
pub struct PacketDevice(pub PacketSocket);

/// Received frame.
pub struct Received<'d>(&'d [u8]);

impl RxToken for Received<'_> {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, read: F) -> R {
        read(self.0)
    }
}

/// Place of a frame to send.
pub struct Staged<'d>(Transmitter<'d>);

impl TxToken for Staged<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(mut self, len: usize, write: F) -> R {
        self.0.stage(len, write)
    }
}

impl Device for PacketDevice {
    type RxToken<'d> = Received<'d>;
    type TxToken<'d> = Staged<'d>;

    fn receive(&mut self, _now: Instant) -> Option<(Received<'_>, Staged<'_>)> {
        let (frame, transmitter) = self.0.take()?;
        Some((Received(frame), Staged(transmitter)))
    }

    fn transmit(&mut self, _now: Instant) -> Option<Staged<'_>> {
        Some(Staged(self.0.transmitter()))
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = DeviceCapabilities::default();
        capabilities.medium = Medium::Ethernet;
        capabilities.max_transmission_unit = FRAME_BYTES;
        capabilities
    }
}
