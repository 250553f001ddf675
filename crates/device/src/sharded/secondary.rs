//! Device of a secondary core.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use tidegate_memory::Arena;

use super::flow_steering::FlowSteering;
use crate::mem::MemDevice;
use crate::{Burst, Capabilities, Device, DeviceCounters};

/// Device of a secondary core: exchanges frames with the primary core.
pub struct SecondaryDevice {
    pub(super) core: usize,
    pub(super) wire: MemDevice,
    pub(super) capabilities: Capabilities,
    pub(super) flow_steering: Arc<FlowSteering>,
}

impl Device for SecondaryDevice {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn receive(&mut self, arena: &mut Arena, burst: &mut Burst, quota: usize) -> io::Result<usize> {
        if self.wire.is_closed() {
            return Err(io::Error::new(io::ErrorKind::BrokenPipe, "the primary core has stopped"));
        }
        self.wire.receive(arena, burst, quota)
    }

    /// Sends every loopback frame to the primary core, which knows the core of each port and
    /// keeps the frames in order.
    fn loop_back(
        &mut self,
        arena: &mut Arena,
        loopback: &mut Burst,
        _burst: &mut Burst,
        _quota: usize,
    ) -> io::Result<usize> {
        self.transmit(arena, loopback)?;
        Ok(0)
    }

    fn transmit(&mut self, arena: &mut Arena, burst: &mut Burst) -> io::Result<usize> {
        let sent = self.wire.transmit(arena, burst)?;
        self.flow_steering.on_sent(self.core, sent);
        Ok(sent)
    }

    fn has_passed_frames(&mut self) -> bool {
        self.wire.has_frame()
    }

    fn prepare_sleep(&mut self) -> io::Result<bool> {
        self.wire.prepare_sleep()
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        self.wire.wake_fd()
    }

    fn counters(&mut self) -> DeviceCounters {
        self.wire.counters()
    }
}
