//! Flow table: the core of each flow on ports that cores share. Cores write to it, and those with a
//! queue read it for each frame. Nobody takes a lock: a core that is preempted while it writes stops
//! no other core.

use std::collections::hash_map::RandomState;
use std::net::{IpAddr, SocketAddr};

use papaya::HashMap;

use super::flow::Flow;
use crate::steering::TransportProtocol;

/// A flow as words, which are hashed fast: both addresses, then ports, protocol and family.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct FlowWords([u64; 5]);

impl FlowWords {
    fn new(flow: &Flow) -> Self {
        let (local, remote) = (flow.local(), flow.remote());
        let bits = |end: SocketAddr| match end.ip() {
            IpAddr::V4(ip) => u128::from(ip.to_bits()),
            IpAddr::V6(ip) => ip.to_bits(),
        };
        let (protocol, _) = flow.local_port();
        let protocol = match protocol {
            TransportProtocol::Udp => 0,
            TransportProtocol::Tcp => 1,
        };
        let family = u64::from(local.is_ipv6());
        let ports = u64::from(local.port()) << 16 | u64::from(remote.port());
        let [own, peer] = [bits(local), bits(remote)];
        let rest = (protocol << 1 | family) << 32 | ports;
        Self([own as u64, (own >> 64) as u64, peer as u64, (peer >> 64) as u64, rest])
    }
}

/// Cores of flows. At most as many flows as the stacks have sockets.
pub(super) struct FlowTable(
    // The hash is keyed: peers choose their addresses.
    HashMap<FlowWords, usize, RandomState>,
);

impl FlowTable {
    pub(super) fn new() -> Self {
        Self(HashMap::with_hasher(RandomState::new()))
    }

    /// Core of a flow.
    pub(super) fn core(&self, flow: &Flow) -> Option<usize> {
        self.0.pin().get(&FlowWords::new(flow)).copied()
    }

    /// Adds a flow of a core. Returns false when a core already has the flow.
    pub(super) fn begin(&self, flow: &Flow, core: usize) -> bool {
        self.0.pin().try_insert(FlowWords::new(flow), core).is_ok()
    }

    /// Gives a flow to a core, whichever had it.
    pub(super) fn take_over(&self, flow: &Flow, core: usize) {
        self.0.pin().insert(FlowWords::new(flow), core);
    }

    /// Removes a flow of this core.
    pub(super) fn end(&self, flow: &Flow, of_core: usize) {
        // An error means that another core has the flow.
        let _ = self.0.pin().remove_if(&FlowWords::new(flow), |_, core| *core == of_core);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    /// A flow of either family.
    fn flow(number: u32) -> Flow {
        let (own, peer) = match number % 2 {
            0 => (IpAddr::from([192, 0, 2, 1]), IpAddr::from((number | 0x0a00_0000).to_be_bytes())),
            _ => (
                IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, 1]),
                IpAddr::from([0xfd00, 0, 0, 0, 0, 0, (number >> 16) as u16, number as u16]),
            ),
        };
        Flow::new(TransportProtocol::Tcp, (own, 80).into(), (peer, 4000).into())
    }

    #[test]
    fn finds_flows_while_the_table_grows_and_shrinks() {
        let table = FlowTable::new();
        assert!((0..20_000).all(|n| table.begin(&flow(n), n as usize % 64)));
        assert!((0..20_000).all(|n| !table.begin(&flow(n), 1)), "each flow is known");
        assert!((0..20_000).all(|n| table.core(&flow(n)) == Some(n as usize % 64)));
        (0..20_000).for_each(|n| table.end(&flow(n), n as usize % 64 + n as usize % 2));
        for n in 0..20_000 {
            let expected = (n % 2 == 1).then_some(n as usize % 64);
            assert_eq!(table.core(&flow(n)), expected, "a flow of another core stays");
        }
        (0..20_000).for_each(|n| table.take_over(&flow(n), 5));
        assert!((0..20_000).all(|n| table.core(&flow(n)) == Some(5)));
        (0..20_000).for_each(|n| table.end(&flow(n), 5));
        for round in 0..20_000 {
            assert!(table.begin(&flow(round), 1));
            table.end(&flow(round), 1);
        }
        assert!(table.0.is_empty());
    }

    /// A reader finds a lasting flow and never another core for it, whatever writers do.
    #[test]
    fn reads_are_right_while_cores_write() {
        let (table, stop) = (FlowTable::new(), AtomicBool::new(false));
        (0..100).for_each(|n| assert!(table.begin(&flow(n), 3)));
        std::thread::scope(|scope| {
            for core in 0..2 {
                let (table, stop) = (&table, &stop);
                scope.spawn(move || {
                    while !stop.load(Ordering::Relaxed) {
                        let own = (0..300).map(|n| flow(1000 + 1000 * core + n));
                        own.clone().for_each(|flow| assert!(table.begin(&flow, core as usize)));
                        own.for_each(|flow| table.end(&flow, core as usize));
                    }
                });
            }
            for n in 0..200_000 {
                assert_eq!(table.core(&flow(n % 100)), Some(3));
                let changing = table.core(&flow(1000 + n % 300));
                assert!(matches!(changing, None | Some(0)), "{changing:?}");
            }
            stop.store(true, Ordering::Relaxed);
        });
    }
}
