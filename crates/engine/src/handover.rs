//! Handover of an engine's device and stack to another process.

use std::io;
use std::os::fd::OwnedFd;

use tidegate_device::xdp::XdpLink;
use tidegate_device::{Burst, Capabilities, Device, DeviceCounters, HandoverState};
use tidegate_memory::Arena;
use tidegate_stack::StackSnapshot;

use crate::Engine;
use crate::open::{NetConfig, OpenError, open_wrapped_device};

/// Kernel object that one process's device passes to its successor.
#[derive(Debug)]
pub enum InheritedDevice {
    /// BPF link that keeps the XDP program attached to the interface.
    Link(XdpLink),
    /// Descriptor of a TAP or TUN device.
    Tap(OwnedFd),
}

/// Placeholder of a closed device: receives nothing, and transmit frames stay queued.
struct ClosedDevice {
    capabilities: Capabilities,
    counters: DeviceCounters,
}

impl Device for ClosedDevice {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn receive(&mut self, _: &mut Arena, _: &mut Burst, _: usize) -> io::Result<usize> {
        Ok(0)
    }

    fn transmit(&mut self, _: &mut Arena, _: &mut Burst) -> io::Result<usize> {
        Ok(0)
    }

    fn counters(&mut self) -> DeviceCounters {
        self.counters.clone()
    }
}

impl Engine {
    /// Saves the stack as plain data for another process. Queued frames are transmitted first, as
    /// many as the device takes.
    ///
    /// # Errors
    /// If the device is no longer usable.
    pub fn save(&mut self) -> io::Result<StackSnapshot> {
        self.flush()?;
        let now_ns = self.read_clock();
        Ok(self.stack.save(now_ns, &self.arena))
    }

    /// Closes the device, so that another process can open the interface. The stack and a sharding
    /// device in front stay as they are.
    ///
    /// With `keep`, the kernel does not receive the frames that the device took: they are lost as
    /// long as any process holds [`Engine::handover_state`].
    ///
    /// # Errors
    /// If the device is no longer usable.
    pub fn close_device(&mut self, keep: bool) -> io::Result<()> {
        let closed = ClosedDevice {
            capabilities: self.device.capabilities().clone(),
            counters: self.device.counters(),
        };
        let device = self.replace_device(Box::new(closed))?;
        self.handover_state = device.close_for_handover(&mut self.arena, keep);
        Ok(())
    }

    /// State that the closed device left for its successor.
    pub fn handover_state(&self) -> Option<&HandoverState> {
        self.handover_state.as_ref()
    }

    /// As [`Device::take_over`].
    ///
    /// # Errors
    /// As [`Device::take_over`].
    pub fn take_over(&mut self) -> io::Result<()> {
        self.device.take_over()
    }

    fn replace_device(&mut self, device: Box<dyn Device>) -> io::Result<Box<dyn Device>> {
        match self.device.as_sharded() {
            Some(sharded) => sharded.replace_inner(device),
            None => Ok(std::mem::replace(&mut self.device, device)),
        }
    }

    /// Reopens the device that [`Engine::close_device`] closed, with the configuration of the engine.
    /// Callers must fetch [`Engine::wake_fds`] again.
    ///
    /// # Errors
    /// See [`OpenError`]; the call can be repeated.
    pub fn reopen_device(&mut self, mut config: NetConfig) -> Result<(), OpenError> {
        let device = open_wrapped_device(&mut config, &mut self.handover_state, &mut self.arena)?;
        self.replace_device(device).map_err(OpenError::Io)?;
        if let Some(admission) = &config.admission {
            self.set_admission(admission, crate::open::random_seed()?)?;
        }
        Ok(())
    }
}
