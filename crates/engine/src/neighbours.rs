//! The kernel's neighbour table, for a stack that shares the kernel's address.
//!
//! On a shared address the kernel does the address resolution: it gets the
//! answers, and asking twice would confuse the network. The stack asks here,
//! this asks the kernel, and the kernel's changes are told to the stack.

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};

use tidegate_memory::Arena;
use tidegate_port::netlink::{self, Change, Monitor, Neighbour, NeighbourState, NetlinkError};
use tidegate_stack::Stack;

/// How often to look for changes while busy; a sleeping engine is woken.
const CHECK_NS: u64 = 10_000_000;
/// How often to look while an answer is awaited.
const CHECK_AWAITING_NS: u64 = 100_000;
/// How long an answer is awaited: as long as the kernel tries.
const AWAIT_NS: u64 = 3_000_000_000;

/// The kernel's neighbours on one interface.
pub struct KernelNeighbours {
    interface: u32,
    monitor: Monitor,
    /// Known when the table was read, to be told to the stack.
    known: Vec<Neighbour>,
    check_at_ns: u64,
    awaiting_until_ns: Option<u64>,
    asked: bool,
}

impl KernelNeighbours {
    /// Reads the table of an interface and begins to follow its changes.
    ///
    /// # Errors
    /// When netlink does not work here.
    pub fn follow(interface: u32) -> Result<Self, NetlinkError> {
        // Listening before reading: a change in between is seen twice, not
        // missed.
        let monitor = Monitor::open()?;
        let known = netlink::neighbours(interface)?;
        Ok(Self {
            interface,
            monitor,
            known,
            check_at_ns: 0,
            awaiting_until_ns: None,
            asked: false,
        })
    }

    /// Asks the kernel to resolve an address; the answer comes as a change.
    /// Lost questions are asked again by the stack.
    pub(crate) fn resolve(&mut self, address: IpAddr) {
        self.asked = true;
        self.check_at_ns = 0;
        // The kernel refuses only when its table is full or the interface is
        // going away; the stack's queue then times out with its own reason.
        let _ = netlink::resolve(self.interface, address);
    }

    /// The next [`KernelNeighbours::update`] looks for changes at once.
    pub(crate) fn on_sleep(&mut self) {
        self.check_at_ns = 0;
    }

    /// Tells the stack what has changed.
    ///
    /// # Errors
    /// When the monitor is of no further use, or the interface is gone.
    pub(crate) fn update(
        &mut self,
        now_ns: u64,
        stack: &mut Stack,
        arena: &mut Arena,
    ) -> io::Result<()> {
        if now_ns < self.check_at_ns {
            return Ok(());
        }
        if std::mem::take(&mut self.asked) {
            self.awaiting_until_ns = Some(now_ns + AWAIT_NS);
        }
        self.awaiting_until_ns = self.awaiting_until_ns.filter(|&until_ns| now_ns < until_ns);
        let pause_ns = self.awaiting_until_ns.map_or(CHECK_NS, |_| CHECK_AWAITING_NS);
        self.check_at_ns = now_ns + pause_ns;
        for neighbour in self.known.drain(..) {
            tell(now_ns, stack, arena, &neighbour);
        }
        while let Some(change) = self.monitor.poll_change()? {
            match change {
                Change::Neighbour(index, neighbour) if index == self.interface => {
                    tell(now_ns, stack, arena, &neighbour);
                }
                Change::NeighbourRemoved(index, neighbour) if index == self.interface => {
                    stack.set_neighbour(now_ns, neighbour.address, None, arena);
                }
                Change::LinkRemoved(index) if index == self.interface => {
                    return Err(io::Error::new(io::ErrorKind::NotFound, "the interface is gone"));
                }
                Change::Lost => {
                    let known = netlink::neighbours(self.interface).map_err(io::Error::other)?;
                    for neighbour in &known {
                        tell(now_ns, stack, arena, neighbour);
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }
}

fn tell(now_ns: u64, stack: &mut Stack, arena: &mut Arena, neighbour: &Neighbour) {
    match neighbour.state {
        // Still being asked: the packets that wait go on waiting.
        NeighbourState::Incomplete | NeighbourState::Other => {}
        NeighbourState::Failed => stack.set_neighbour(now_ns, neighbour.address, None, arena),
        _ => stack.set_neighbour(now_ns, neighbour.address, neighbour.mac, arena),
    }
}

impl AsFd for KernelNeighbours {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.monitor.as_fd()
    }
}
