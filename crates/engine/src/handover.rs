//! Handover of an engine's device and stack to another process.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use tidegate_device::{Burst, Capabilities, Device, DeviceCounters, HandoverState};
use tidegate_memory::Arena;
use tidegate_stack::StackSnapshot;

use crate::open::{NetConfig, OpenError};
use crate::open_device::open_wrapped_device;
use crate::{AddressReservations, Engine};

/// Kind of a kernel object that one process's device passes to its successor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InheritedKind {
    /// BPF link that keeps the XDP program attached to the interface.
    XdpLink {
        /// True if the program runs in the driver.
        native: bool,
    },
    /// TAP or TUN device.
    Tap,
}

/// Kernel object that one process's device passes to its successor.
#[derive(Debug)]
pub struct InheritedDevice {
    kind: InheritedKind,
    fd: OwnedFd,
}

impl InheritedDevice {
    /// Wraps the descriptor of a kernel object of this kind.
    pub fn new(kind: InheritedKind, fd: OwnedFd) -> Self {
        Self { kind, fd }
    }

    /// Adds the object to the state from which a device continues. An object of another kind of
    /// device is closed.
    pub(crate) fn apply_to(self, state: &mut Option<HandoverState>) {
        match (self.kind, state) {
            #[cfg(feature = "xdp")]
            (InheritedKind::XdpLink { native }, Some(HandoverState::Xdp(loaded))) => {
                loaded.inherit(tidegate_device::xdp::XdpLink::inherited(self.fd, native));
            }
            (InheritedKind::Tap, state @ None) => *state = Some(HandoverState::Tap(self.fd)),
            _ => {}
        }
    }
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
    pub fn save(&mut self) -> io::Result<StackSnapshot<'static>> {
        self.flush()?;
        let now_ns = self.read_clock();
        Ok(self.stack.save(now_ns, &self.arena))
    }

    /// Closes the device, so that another process can open the interface. The stack and a sharding
    /// device in front stay as they are.
    ///
    /// With `keep`, the kernel does not receive the frames that the device took: they are lost as
    /// long as any process holds [`Engine::inheritable`].
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

    /// Kernel object that the closed device left for its successor.
    pub fn inheritable(&self) -> Option<(InheritedKind, BorrowedFd<'_>)> {
        match self.handover_state.as_ref()? {
            #[cfg(feature = "xdp")]
            HandoverState::Xdp(loaded) => {
                let link = loaded.link()?;
                Some((InheritedKind::XdpLink { native: link.native() }, link.as_fd()))
            }
            #[cfg(all(feature = "packet", feature = "xdp"))]
            HandoverState::Packet(_) => None,
            HandoverState::Tap(tap_fd) => Some((InheritedKind::Tap, tap_fd.as_fd())),
        }
    }

    /// Reservations of the own addresses, for the successor.
    pub fn reservations(&self) -> &AddressReservations {
        &self.reservations
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
        if let Some(sharded) = self.device.as_sharded()
            && config.wrappers.is_empty()
        {
            config.device.share_queues(sharded.queue_cores());
        }
        let device = open_wrapped_device(&mut config, &mut self.handover_state, &mut self.arena)?;
        self.replace_device(device).map_err(OpenError::Io)?;
        // A successor that has failed may have shown itself.
        self.reservations.show_this_process().map_err(OpenError::Io)?;
        if let Some(admission) = &config.admission {
            self.set_admission(admission, crate::open::random_seed()?)?;
        }
        Ok(())
    }
}
