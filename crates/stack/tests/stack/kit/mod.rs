//! Test kit: hosts with a stack and an arena, an in-memory link between two of them, and a virtual
//! clock.

pub mod packets;

use std::net::{IpAddr, SocketAddr};

use tidegate_memory::{Arena, ArenaConfig, Fifo, Frame, FrameSize};
use tidegate_stack::{Config, Event, Stack, UdpId, UdpOptions};
use tidegate_wire::{DropReason, MacAddr};

pub const SECOND_NS: u64 = 1_000_000_000;
pub const FRAMES: u32 = 512;

/// Address family; socket tests run for both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    V4,
    V6,
}

/// Runs a test for both families.
pub fn for_each_family(test: impl Fn(Family)) {
    test(Family::V4);
    test(Family::V6);
}

impl Family {
    /// Address of host `n` in the network of all hosts.
    pub fn host(self, n: u8) -> IpAddr {
        match self {
            Family::V4 => format!("192.0.2.{n}").parse().unwrap(),
            Family::V6 => format!("2001:db8::{n}").parse().unwrap(),
        }
    }

    /// Address of a host behind the router, which is host 254.
    pub fn far_host(self) -> IpAddr {
        match self {
            Family::V4 => "198.51.100.7".parse().unwrap(),
            Family::V6 => "2001:db8:ffff::7".parse().unwrap(),
        }
    }

    pub fn unspecified(self) -> IpAddr {
        match self {
            Family::V4 => "0.0.0.0".parse().unwrap(),
            Family::V6 => "::".parse().unwrap(),
        }
    }

    /// Length in bytes of an IP header without options.
    pub fn header_bytes(self) -> usize {
        if self == Family::V4 { 20 } else { 40 }
    }
}

pub fn mac(n: u8) -> MacAddr {
    MacAddr([2, 0, 0, 0, 0, n])
}

/// Configuration of host `n` on Ethernet, with addresses of both families and default routes.
pub fn config(n: u8) -> Config {
    let mut config = Config::ethernet(mac(n), [n; 16]);
    for (family, bits, default_route) in [(Family::V4, 24, "0.0.0.0/0"), (Family::V6, 64, "::/0")] {
        config.addresses.push(format!("{}/{bits}", family.host(n)).parse().unwrap());
        config.routes.push(tidegate_stack::Route {
            prefix: default_route.parse().unwrap(),
            gateway: Some(family.host(254)),
        });
    }
    config
}

/// Stack with an arena and a virtual clock.
pub struct TestHost {
    pub stack: Stack,
    pub arena: Arena,
    pub now_ns: u64,
}

impl TestHost {
    pub fn new(config: Config) -> Self {
        let arena =
            Arena::new(ArenaConfig { frames: FRAMES, frame_size: FrameSize::K2, hugepages: false })
                .unwrap();
        let now_ns = 1_000 * SECOND_NS;
        let stack = Stack::new(config, now_ns).unwrap();
        Self { stack, arena, now_ns }
    }

    /// Host 1 after its initial reports: it sends nothing unsolicited any more.
    pub fn quiet(config: Config) -> Self {
        let mut host = Self::new(config);
        host.advance(3 * SECOND_NS);
        host.sent();
        host
    }

    /// Host 1 with a resolved entry for neighbour `n`.
    pub fn with_neighbour(n: u8) -> Self {
        let mut host = Self::quiet(config(1));
        for family in [Family::V4, Family::V6] {
            host.stack.set_neighbour(host.now_ns, family.host(n), Some(mac(n)), &mut host.arena);
        }
        host
    }

    /// Passes a frame to the stack.
    pub fn feed(&mut self, bytes: &[u8]) {
        let frame = self.arena.alloc_from(bytes).expect("the arena has a frame to receive into");
        self.stack.handle_frame(self.now_ns, frame, &mut self.arena);
        assert_eq!(self.stack.counters().balance(), 0, "{:?}", self.stack.counters());
    }

    /// Passes frames to the stack that were received together.
    pub fn feed_burst(&mut self, frames: impl IntoIterator<Item = Vec<u8>>) {
        let arena = &mut self.arena;
        let allocated = frames.into_iter().map(|bytes| arena.alloc_from(&bytes));
        let mut burst: Fifo<Frame> =
            allocated.map(|frame| frame.expect("the arena has frames to receive into")).collect();
        self.stack.handle_burst(self.now_ns, &mut burst, &mut self.arena);
        assert_eq!(self.stack.counters().balance(), 0, "{:?}", self.stack.counters());
    }

    /// Passes a frame to the stack, which must drop it for this reason and drop nothing else.
    #[track_caller]
    pub fn feed_dropped(&mut self, bytes: &[u8], reason: DropReason) {
        let before = self.stack.counters().drops.clone();
        self.feed(bytes);
        let after = &self.stack.counters().drops;
        let total = after.total() - before.total();
        let counted: Vec<_> = after.nonzero().filter(|&(r, n)| n > before.get(r)).collect();
        assert_eq!((after.get(reason) - before.get(reason), total), (1, 1), "{counted:?}");
    }

    /// Drains the transmit queue.
    pub fn sent(&mut self) -> Vec<Vec<u8>> {
        let frames: Vec<_> = self.stack.transmit_queue().drain(..).collect();
        let bytes = frames.iter().map(|frame| self.arena.bytes(frame).to_vec()).collect();
        frames.into_iter().for_each(|frame| self.arena.free(frame));
        bytes
    }

    /// Drains the transmit queue, which must hold one frame.
    #[track_caller]
    pub fn sent_one(&mut self) -> Vec<u8> {
        let mut sent = self.sent();
        assert_eq!(sent.len(), 1, "frames sent: {sent:02x?}");
        sent.remove(0)
    }

    /// Passes the frames in the loopback queue back to the stack; returns their number.
    pub fn deliver_loopback(&mut self) -> usize {
        let mut burst: Fifo<Frame> = self.stack.loopback_queue().drain(..).collect();
        let count = burst.len();
        self.stack.handle_burst(self.now_ns, &mut burst, &mut self.arena);
        assert_eq!(self.stack.counters().balance(), 0, "{:?}", self.stack.counters());
        count
    }

    /// Advances the clock by `ns`; every timer fires on time.
    pub fn advance(&mut self, ns: u64) {
        let end_ns = self.now_ns + ns;
        for _ in 0..100_000 {
            match self.stack.next_timeout().filter(|&due_ns| due_ns <= end_ns) {
                Some(due_ns) => {
                    self.now_ns = self.now_ns.max(due_ns);
                    self.stack.handle_timeout(self.now_ns, &mut self.arena);
                }
                None => {
                    self.now_ns = end_ns;
                    return;
                }
            }
        }
        panic!("the stack's timers never stop");
    }

    pub fn bind(&mut self, local: SocketAddr) -> UdpId {
        self.stack.udp_bind(local, UdpOptions::default()).unwrap()
    }

    pub fn send(&mut self, id: UdpId, to: Option<SocketAddr>, payload: &[u8]) {
        self.stack.udp_send(self.now_ns, &mut self.arena, id, to, None, payload).unwrap();
    }

    /// Takes the next datagram: sender, destination address and payload.
    pub fn receive(&mut self, id: UdpId) -> Option<(SocketAddr, IpAddr, Vec<u8>)> {
        let datagram = self.stack.udp_recv(&self.arena, id)?;
        let bytes = datagram.bytes(&self.arena).to_vec();
        let received = (datagram.remote, datagram.local, bytes);
        datagram.release(&mut self.arena);
        Some(received)
    }

    pub fn events(&mut self) -> Vec<Event> {
        std::iter::from_fn(|| self.stack.poll_event()).collect()
    }

    pub fn drops(&self, reason: DropReason) -> u64 {
        self.stack.counters().drops.get(reason)
    }

    pub fn transmit_drops(&self, reason: DropReason) -> u64 {
        self.stack.counters().transmit_drops.get(reason)
    }

    /// Releases the host and checks that every frame was freed.
    pub fn finish(mut self) {
        assert_eq!(self.stack.counters().balance(), 0);
        self.stack.release(&mut self.arena);
        assert_eq!(self.arena.available(), FRAMES as usize, "frames were lost");
    }
}

/// Two hosts on an in-memory link.
pub struct HostPair {
    pub a: TestHost,
    pub b: TestHost,
}

impl HostPair {
    pub fn new() -> Self {
        Self { a: TestHost::new(config(1)), b: TestHost::new(config(2)) }
    }

    /// Carries frames in both directions until both hosts are quiet.
    pub fn run(&mut self) {
        self.run_filtered(|_| true);
    }

    /// As [`HostPair::run`], but loses the frames for which `keep` returns false.
    pub fn run_filtered(&mut self, mut keep: impl FnMut(&[u8]) -> bool) {
        for _ in 0..1000 {
            let (from_a, from_b) = (self.a.sent(), self.b.sent());
            if from_a.is_empty() && from_b.is_empty() {
                return;
            }
            from_a.iter().filter(|frame| keep(frame)).for_each(|frame| self.b.feed(frame));
            from_b.iter().filter(|frame| keep(frame)).for_each(|frame| self.a.feed(frame));
        }
        panic!("the hosts never become quiet");
    }

    pub fn advance(&mut self, ns: u64) {
        self.a.advance(ns);
        self.b.advance(ns);
    }

    pub fn finish(self) {
        self.a.finish();
        self.b.finish();
    }
}
