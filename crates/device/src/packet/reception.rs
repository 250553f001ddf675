//! Start and end of receiving, apart from the device.

use std::io;

use super::sys::Socket;

/// Start and end of what a packet device receives. Both may wait for other processors.
pub(crate) struct PacketReception {
    pub(super) socket: Socket,
    pub(super) interface_index: u32,
}

impl PacketReception {
    /// Starts to receive.
    ///
    /// # Errors
    /// The interface is gone.
    pub(crate) fn start(&self) -> io::Result<()> {
        self.socket.bind(self.interface_index)
    }

    /// Stops to receive. The device still has the frames that have arrived.
    ///
    /// # Errors
    /// The interface is gone.
    pub(crate) fn stop(&self) -> io::Result<()> {
        self.socket.unbind(self.interface_index)
    }
}
