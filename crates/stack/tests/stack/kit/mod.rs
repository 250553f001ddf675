//! The test kit: hosts with a stack and an arena, a wire between two of them,
//! and a clock that is moved by hand.

pub mod packets;

use std::net::{IpAddr, SocketAddr};

use tidegate_memory::{Arena, ArenaConfig, Fifo, Frame, FrameSize};
use tidegate_stack::{Config, Event, Stack, UdpId, UdpOptions};
use tidegate_wire::{DropReason, MacAddr};

pub const SECOND_NS: u64 = 1_000_000_000;
pub const FRAMES: u32 = 512;

/// Every test of a socket runs for both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    V4,
    V6,
}

/// Runs a test for both families.
pub fn both(test: impl Fn(Family)) {
    test(Family::V4);
    test(Family::V6);
}

impl Family {
    /// Host `n` of the network that all hosts are in.
    pub fn host(self, n: u8) -> IpAddr {
        match self {
            Family::V4 => format!("192.0.2.{n}").parse().unwrap(),
            Family::V6 => format!("2001:db8::{n}").parse().unwrap(),
        }
    }

    /// A host behind the router, which is host 254.
    pub fn far_host(self) -> IpAddr {
        match self {
            Family::V4 => "198.51.100.7".parse().unwrap(),
            Family::V6 => "2001:db8:ffff::7".parse().unwrap(),
        }
    }

    pub fn any(self) -> IpAddr {
        match self {
            Family::V4 => "0.0.0.0".parse().unwrap(),
            Family::V6 => "::".parse().unwrap(),
        }
    }

    /// The bytes of an IP header without options.
    pub fn header_bytes(self) -> usize {
        if self == Family::V4 { 20 } else { 40 }
    }
}

pub fn mac(n: u8) -> MacAddr {
    MacAddr([2, 0, 0, 0, 0, n])
}

/// Host `n` with addresses of both families on Ethernet, and routes.
pub fn config(n: u8) -> Config {
    let mut config = Config::ethernet(mac(n), [n; 16]);
    for (family, bits, everywhere) in [(Family::V4, 24, "0.0.0.0/0"), (Family::V6, 64, "::/0")] {
        config.addresses.push(format!("{}/{bits}", family.host(n)).parse().unwrap());
        config.routes.push(tidegate_stack::Route {
            prefix: everywhere.parse().unwrap(),
            gateway: Some(family.host(254)),
        });
    }
    config
}

/// A stack, its arena and its time.
pub struct Host {
    pub stack: Stack,
    pub arena: Arena,
    pub now_ns: u64,
}

impl Host {
    pub fn new(config: Config) -> Self {
        let arena =
            Arena::new(ArenaConfig { frames: FRAMES, frame_size: FrameSize::K2, hugepages: false })
                .unwrap();
        let now_ns = 1_000 * SECOND_NS;
        let stack = Stack::new(config, now_ns).unwrap();
        Self { stack, arena, now_ns }
    }

    /// Host 1, past its first reports, so that it has nothing to say unasked.
    pub fn quiet(config: Config) -> Self {
        let mut host = Self::new(config);
        host.pass(3 * SECOND_NS);
        host.sent();
        host
    }

    /// Host 1, which knows neighbour `n`.
    pub fn with_neighbour(n: u8) -> Self {
        let mut host = Self::quiet(config(1));
        for family in [Family::V4, Family::V6] {
            host.stack.set_neighbour(host.now_ns, family.host(n), Some(mac(n)), &mut host.arena);
        }
        host
    }

    /// Gives the stack a frame.
    pub fn feed(&mut self, bytes: &[u8]) {
        let frame = self.arena.alloc_from(bytes).expect("the arena has a frame to receive into");
        self.stack.ingest(self.now_ns, frame, &mut self.arena);
        assert_eq!(self.stack.counters().balance(), 0, "{:?}", self.stack.counters());
    }

    /// Gives the stack a frame that it must drop for this reason, and nothing
    /// else but this frame.
    #[track_caller]
    pub fn feed_dropped(&mut self, bytes: &[u8], reason: DropReason) {
        let before = self.stack.counters().drops.clone();
        self.feed(bytes);
        let after = &self.stack.counters().drops;
        let total = after.total() - before.total();
        let counted: Vec<_> = after.nonzero().filter(|&(r, n)| n > before.get(r)).collect();
        assert_eq!((after.get(reason) - before.get(reason), total), (1, 1), "{counted:?}");
    }

    /// The frames that the stack wants to send.
    pub fn sent(&mut self) -> Vec<Vec<u8>> {
        let frames: Vec<_> = self.stack.transmit_queue().drain(..).collect();
        let bytes = frames.iter().map(|frame| self.arena.bytes(frame).to_vec()).collect();
        frames.into_iter().for_each(|frame| self.arena.free(frame));
        bytes
    }

    /// The one frame that the stack wants to send.
    #[track_caller]
    pub fn sent_one(&mut self) -> Vec<u8> {
        let mut sent = self.sent();
        assert_eq!(sent.len(), 1, "frames sent: {sent:02x?}");
        sent.remove(0)
    }

    /// Lets the frames to the host itself come back in, as far as they
    /// are there now, and returns how many.
    pub fn loop_once(&mut self) -> usize {
        let mut burst: Fifo<Frame> = self.stack.looped_queue().drain(..).collect();
        let came = burst.len();
        self.stack.ingest_burst(self.now_ns, &mut burst, &mut self.arena);
        assert_eq!(self.stack.counters().balance(), 0, "{:?}", self.stack.counters());
        came
    }

    /// Lets time pass, with every timer at its time.
    pub fn pass(&mut self, ns: u64) {
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
        panic!("the stack's timers never come to rest");
    }

    pub fn bind(&mut self, local: SocketAddr) -> UdpId {
        self.stack.udp_bind(local, UdpOptions::default()).unwrap()
    }

    pub fn send(&mut self, id: UdpId, to: Option<SocketAddr>, payload: &[u8]) {
        self.stack.udp_send(self.now_ns, &mut self.arena, id, to, None, payload).unwrap();
    }

    /// The next datagram: who sent it, where to, and what.
    pub fn receive(&mut self, id: UdpId) -> Option<(SocketAddr, IpAddr, Vec<u8>)> {
        let datagram = self.stack.udp_receive(&self.arena, id)?;
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

    /// Takes the host down and proves that every frame came back.
    pub fn finish(mut self) {
        assert_eq!(self.stack.counters().balance(), 0);
        self.stack.release(&mut self.arena);
        assert_eq!(self.arena.available(), FRAMES as usize, "frames were lost");
    }
}

/// Two hosts and the wire between them.
pub struct Pair {
    pub a: Host,
    pub b: Host,
}

impl Pair {
    pub fn new() -> Self {
        Self { a: Host::new(config(1)), b: Host::new(config(2)) }
    }

    /// Carries frames to and fro until nobody has more to say.
    pub fn run(&mut self) {
        self.run_through(|_| true);
    }

    /// Like [`Pair::run`], but frames for which `keep` says no are lost.
    pub fn run_through(&mut self, mut keep: impl FnMut(&[u8]) -> bool) {
        for _ in 0..1000 {
            let (from_a, from_b) = (self.a.sent(), self.b.sent());
            if from_a.is_empty() && from_b.is_empty() {
                return;
            }
            from_a.iter().filter(|frame| keep(frame)).for_each(|frame| self.b.feed(frame));
            from_b.iter().filter(|frame| keep(frame)).for_each(|frame| self.a.feed(frame));
        }
        panic!("the hosts never stop talking");
    }

    pub fn pass(&mut self, ns: u64) {
        self.a.pass(ns);
        self.b.pass(ns);
    }

    pub fn finish(self) {
        self.a.finish();
        self.b.finish();
    }
}
