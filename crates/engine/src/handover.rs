//! What an engine does when another process is to go on in its place.

use std::io;
use std::os::fd::OwnedFd;

use tidegate_memory::Arena;
use tidegate_port::xdp::Link;
use tidegate_port::{Burst, Capabilities, Left, Port, PortCounters};
use tidegate_stack::SavedStack;

use crate::Engine;
use crate::open::{NetConfig, OpenError};
use crate::prepared::open_wrapped;

/// What goes from the port of one process to that of the next.
#[derive(Debug)]
pub enum Inherited {
    /// What keeps a program at the interface.
    Link(Link),
    /// The descriptor of a TAP or TUN device.
    Tap(OwnedFd),
}

/// Where a port was that was closed. Nothing arrives, and what is to be sent
/// waits.
struct Closed {
    capabilities: Capabilities,
    counters: PortCounters,
}

impl Port for Closed {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn receive(&mut self, _: &mut Arena, _: &mut Burst, _: usize) -> io::Result<usize> {
        Ok(0)
    }

    fn transmit(&mut self, _: &mut Arena, _: &mut Burst) -> io::Result<usize> {
        Ok(0)
    }

    fn counters(&mut self) -> PortCounters {
        self.counters.clone()
    }
}

impl Engine {
    /// The stack as plain data, for another process to go on with. What is still
    /// to be sent is sent first, as much as the port takes.
    ///
    /// # Errors
    /// When the port is of no further use.
    pub fn save(&mut self) -> io::Result<SavedStack> {
        self.flush()?;
        let now_ns = self.read_clock();
        Ok(self.stack.save(now_ns, &self.arena))
    }

    /// Closes the port, so that another process can have the interface. The stack
    /// stays as it is, and so does what stands before the port. With `keep` the kernel
    /// does not get what the port took, which is lost: as long as any process has what
    /// is [`Engine::left`].
    ///
    /// # Errors
    /// When the port is of no further use.
    pub fn close_port(&mut self, keep: bool) -> io::Result<()> {
        let closed = Closed {
            capabilities: self.port.capabilities().clone(),
            counters: self.port.counters(),
        };
        let port = self.exchange_port(Box::new(closed))?;
        self.left = port.close_for_now(&mut self.arena, keep);
        Ok(())
    }

    /// What is left of a port that was closed.
    pub fn left(&self) -> Option<&Left> {
        self.left.as_ref()
    }

    /// As [`Port::go_live`].
    ///
    /// # Errors
    /// As [`Port::go_live`].
    pub fn go_live(&mut self) -> io::Result<()> {
        self.port.go_live()
    }

    fn exchange_port(&mut self, port: Box<dyn Port>) -> io::Result<Box<dyn Port>> {
        match self.port.front() {
            Some(front) => front.replace(port),
            None => Ok(std::mem::replace(&mut self.port, port)),
        }
    }

    /// Opens the port again that [`Engine::close_port`] closed, by the
    /// configuration that the engine was made of. [`Engine::wake_fds`] are others
    /// afterwards.
    ///
    /// # Errors
    /// [`OpenError`] says what is wrong; it may be tried again.
    pub fn open_port_again(&mut self, mut config: NetConfig) -> Result<(), OpenError> {
        let port = open_wrapped(&mut config, &mut self.left, &mut self.arena)?;
        self.exchange_port(port).map_err(OpenError::Io)?;
        if let Some(admission) = &config.admission {
            self.set_admission(admission, crate::open::random_seed()?)?;
        }
        Ok(())
    }
}
