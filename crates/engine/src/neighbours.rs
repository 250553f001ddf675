//! The kernel's neighbour table, for a stack that shares the kernel's address.
//!
//! On a shared address the kernel resolves addresses: it receives the replies, and duplicate
//! requests would confuse the network. The stack sends its requests here, this module passes them
//! to the kernel, and changes of the kernel's table go back to the stack.

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use tidegate_device::netlink::{self, Change, Monitor, Neighbour, NeighbourState, NetlinkError};
use tidegate_memory::Arena;
use tidegate_stack::Stack;

/// Interval of checks for changes while busy; a sleeping engine is woken.
const CHECK_INTERVAL_NS: u64 = 10_000_000;
/// Interval of checks while a resolution is pending.
const PENDING_CHECK_INTERVAL_NS: u64 = 100_000;
/// Time that a resolution stays pending: as long as the kernel tries.
const RESOLUTION_TIMEOUT_NS: u64 = 3_000_000_000;

/// Interval of attempts to read the whole table.
const REREAD_INTERVAL_NS: u64 = 1_000_000_000;

/// Function that asks the kernel to resolve an address, for a process that has dropped its
/// privileges.
pub type NeighbourResolver = Arc<dyn Fn(IpAddr) + Send + Sync>;

/// The kernel's neighbours on one interface.
pub struct KernelNeighbours {
    interface: u32,
    resolver: Option<NeighbourResolver>,
    monitor: Monitor,
    /// Neighbours of the table that the stack has not received yet.
    known: Vec<Neighbour>,
    next_check_ns: u64,
    pending_until_ns: Option<u64>,
    requested: bool,
    /// Time of the next attempt to read the whole table, after notifications were lost.
    reread_ns: Option<u64>,
}

impl KernelNeighbours {
    /// Reads the neighbour table of the interface with index `interface` and follows its changes.
    /// Asks the kernel through `resolver`, or directly without one.
    ///
    /// # Errors
    /// If netlink does not work here.
    pub fn follow(
        interface: u32,
        resolver: Option<NeighbourResolver>,
    ) -> Result<Self, NetlinkError> {
        // Subscribe before reading the table: a change in between is seen twice, not missed.
        let monitor = Monitor::open()?;
        let known = netlink::neighbours(interface)?;
        Ok(Self {
            interface,
            resolver,
            monitor,
            known,
            next_check_ns: 0,
            pending_until_ns: None,
            requested: false,
            reread_ns: None,
        })
    }

    /// Asks the kernel to resolve an address; the reply arrives as a table change. The stack
    /// repeats lost requests.
    pub(crate) fn resolve(&mut self, address: IpAddr) {
        self.next_check_ns = 0;
        // An entry that the kernel's own traffic confirms, or that was set by hand, stays valid
        // without a change. A request would make a dynamic entry of one that was set by hand.
        let entry = netlink::neighbour(self.interface, address).ok().flatten();
        if let Some(known) = entry.filter(|entry| entry.state.is_usable() && entry.mac.is_some()) {
            let is_confirmed = known.state != NeighbourState::Stale;
            self.known.push(known);
            if is_confirmed {
                return;
            }
        }
        self.requested = true;
        if let Some(resolver) = &self.resolver {
            return resolver(address);
        }
        // Fails only if the kernel's table is full or the interface is going away. The queue of the
        // stack then times out with its own drop reason.
        let _ = netlink::resolve(self.interface, address);
    }

    /// Makes the next [`KernelNeighbours::update`] check for changes at once.
    pub(crate) fn on_sleep(&mut self) {
        self.next_check_ns = 0;
    }

    /// Passes changes of the kernel's table to the stack.
    ///
    /// # Errors
    /// If the netlink monitor is no longer usable, or the interface is gone.
    pub(crate) fn update(
        &mut self,
        now_ns: u64,
        stack: &mut Stack,
        arena: &mut Arena,
    ) -> io::Result<()> {
        if now_ns < self.next_check_ns {
            return Ok(());
        }
        if std::mem::take(&mut self.requested) {
            self.pending_until_ns = Some(now_ns + RESOLUTION_TIMEOUT_NS);
        }
        self.pending_until_ns = self.pending_until_ns.filter(|&until_ns| now_ns < until_ns);
        let interval_ns =
            self.pending_until_ns.map_or(CHECK_INTERVAL_NS, |_| PENDING_CHECK_INTERVAL_NS);
        self.next_check_ns = now_ns + interval_ns;
        for neighbour in self.known.drain(..) {
            update_stack(now_ns, stack, arena, &neighbour);
        }
        while let Some(change) = self.monitor.poll_change()? {
            match change {
                Change::Neighbour(index, neighbour) if index == self.interface => {
                    update_stack(now_ns, stack, arena, &neighbour);
                }
                Change::NeighbourRemoved(index, neighbour) if index == self.interface => {
                    stack.set_neighbour(now_ns, neighbour.address, None, arena);
                }
                Change::LinkRemoved(index) if index == self.interface => {
                    return Err(io::Error::new(io::ErrorKind::NotFound, "the interface is gone"));
                }
                Change::Lost => self.reread_ns = Some(now_ns),
                _ => {}
            }
        }
        if self.reread_ns.is_some_and(|at_ns| now_ns >= at_ns) {
            self.reread(now_ns, stack, arena);
        }
        Ok(())
    }

    /// Reads the whole table. An attempt that fails is repeated: until then the stack uses the
    /// neighbours that it knows.
    fn reread(&mut self, now_ns: u64, stack: &mut Stack, arena: &mut Arena) {
        match netlink::neighbours(self.interface) {
            Ok(neighbours) => {
                self.reread_ns = None;
                for neighbour in &neighbours {
                    update_stack(now_ns, stack, arena, neighbour);
                }
            }
            Err(_) => self.reread_ns = Some(now_ns.saturating_add(REREAD_INTERVAL_NS)),
        }
    }

    /// Number of messages of the kernel that were skipped since they could not be parsed.
    pub(crate) fn unreadable(&self) -> u64 {
        self.monitor.unreadable()
    }
}

fn update_stack(now_ns: u64, stack: &mut Stack, arena: &mut Arena, neighbour: &Neighbour) {
    match neighbour.state {
        // Resolution is still in progress: the queued packets stay queued.
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

#[cfg(test)]
mod tests {
    use std::process::Command;

    use tidegate_device::mem::{MemConfig, wire};
    use tidegate_device::netlink::Interface;

    use super::*;
    use crate::{NetConfig, open};

    const NAMESPACE: &str = "TIDEGATE_TEST_NAMESPACE";

    fn ip(arguments: &str) {
        let status = Command::new("ip").args(arguments.split(' ')).status().unwrap();
        assert!(status.success(), "ip {arguments}");
    }

    /// The kernel keeps an entry valid that its own traffic confirms, and reports no change of it.
    #[test]
    fn valid_entry_of_the_kernel_answers_a_request() {
        if std::env::var_os(NAMESPACE).is_none() {
            let test = "neighbours::tests::valid_entry_of_the_kernel_answers_a_request";
            let mut again = Command::new("unshare");
            again.arg("-rn").arg(std::env::current_exe().unwrap()).args(["--exact", test]);
            let output = again.env(NAMESPACE, "1").output().unwrap();
            let text = String::from_utf8_lossy(&output.stdout);
            assert!(output.status.success() && text.contains("1 passed"), "{text}");
            return;
        }
        ip("link add tg0 type veth peer name tg1");
        ip("link set tg0 up");
        let index = Interface::by_name("tg0").unwrap().index;
        let (device, _peer) = wire(&MemConfig::default()).unwrap();
        let config = NetConfig::new(device)
            .address("192.0.2.1/24".parse().unwrap())
            .address("2001:db8::1/64".parse().unwrap());
        let mut engine = open(config).unwrap().0;
        let (stack, arena, _) = engine.parts();
        for address in ["192.0.2.2", "2001:db8::2"] {
            ip(&format!("neigh add {address} lladdr 02:00:00:00:00:02 nud permanent dev tg0"));
            let address: IpAddr = address.parse().unwrap();
            let mut neighbours = KernelNeighbours::follow(index, None).unwrap();
            neighbours.update(0, stack, arena).unwrap();
            let mac = stack.neighbour(address);
            assert!(mac.is_some());
            stack.set_neighbour(0, address, None, arena);
            neighbours.resolve(address);
            neighbours.update(0, stack, arena).unwrap();
            assert_eq!(stack.neighbour(address), mac);
            let entry = netlink::neighbour(index, address).unwrap().unwrap();
            assert_eq!(entry.state, NeighbourState::Permanent, "it stays as it was set");
        }
    }
}
