//! The port of a core without a card.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use tidegate_memory::Arena;

use super::crossing::Crossing;
use crate::mem::MemPort;
use crate::{Burst, Capabilities, Port, PortCounters};

/// What a core without a card receives from and sends to: the core that has it.
pub struct Branch {
    pub(super) core: usize,
    pub(super) wire: MemPort,
    pub(super) capabilities: Capabilities,
    pub(super) crossing: Arc<Crossing>,
}

impl Port for Branch {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn receive(&mut self, arena: &mut Arena, burst: &mut Burst, quota: usize) -> io::Result<usize> {
        if self.wire.is_closed() {
            return Err(io::Error::new(
                io::ErrorKind::BrokenPipe,
                "the core with the card has ended",
            ));
        }
        self.wire.receive(arena, burst, quota)
    }

    /// The core with the card knows who has which port, and in which order: it gets
    /// all of them.
    fn loop_back(
        &mut self,
        arena: &mut Arena,
        looped: &mut Burst,
        _burst: &mut Burst,
        _quota: usize,
    ) -> io::Result<usize> {
        self.transmit(arena, looped)?;
        Ok(0)
    }

    fn transmit(&mut self, arena: &mut Arena, burst: &mut Burst) -> io::Result<usize> {
        let sent = self.wire.transmit(arena, burst)?;
        self.crossing.on_sent(self.core, sent);
        Ok(sent)
    }

    fn prepare_sleep(&mut self) -> io::Result<bool> {
        self.wire.prepare_sleep()
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        self.wire.wake_fd()
    }

    fn counters(&mut self) -> PortCounters {
        self.wire.counters()
    }
}
