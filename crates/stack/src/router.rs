//! Several interfaces that forward between each other.

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr};

use tidegate_memory::{Arena, Fifo, Frame};
use tidegate_wire::DropReason;

use crate::Stack;
use crate::address::Kind;
use crate::chance::{Chance, HashKey};
use crate::forward::{OwnPacket, Transit};
use crate::packet::Refusal;

/// Destinations whose interface is kept at hand.
const WAYS: usize = 1024;

/// The interface that a destination is reached by.
#[derive(Clone, Copy)]
struct Way {
    destination: IpAddr,
    egress: usize,
}

/// A router: interfaces with addresses and routes of their own. A packet leaves
/// by the interface whose route to its destination is the most specific; among
/// equals, by the first.
///
/// Frames of all interfaces live in one arena, so that none is copied. The
/// stacks are made with [`crate::Config::forwarding`].
///
/// What came in and may go on waits in [`Router::poll_transit`] until it is
/// given back to [`Router::forward`] or [`Router::discard`]: whoever runs the
/// router can look at it first, or make it wait.
pub struct Router {
    stacks: Vec<Stack>,
    transits: VecDeque<Transit>,
    /// A table where each destination has one place; routes do not change.
    ways: Box<[Option<Way>]>,
    key: HashKey,
}

impl Router {
    /// Joins interfaces. The seed keys a table against chosen addresses.
    pub fn new(stacks: Vec<Stack>, seed: [u8; 16]) -> Self {
        let key = Chance::new(seed).hash_key();
        Self { stacks, transits: VecDeque::new(), ways: vec![None; WAYS].into(), key }
    }

    /// The interfaces, in the order that they were given in.
    pub fn stacks(&self) -> &[Stack] {
        &self.stacks
    }

    /// One interface, to be changed.
    ///
    /// # Panics
    /// When there is none of this number.
    pub fn stack_mut(&mut self, interface: usize) -> &mut Stack {
        &mut self.stacks[interface]
    }

    /// Takes a frame that arrived at an interface.
    ///
    /// # Panics
    /// When there is no such interface.
    pub fn ingest(&mut self, now_ns: u64, interface: usize, frame: Frame, arena: &mut Arena) {
        let stack = &mut self.stacks[interface];
        stack.ingest(now_ns, frame, arena);
        while let Some(mut transit) = stack.forwarding.transits.pop_front() {
            transit.ingress = interface;
            self.transits.push_back(transit);
        }
        self.send_own(now_ns, interface, arena);
    }

    /// The next packet that may be forwarded.
    #[inline]
    pub fn poll_transit(&mut self) -> Option<Transit> {
        self.transits.pop_front()
    }

    /// Sends a packet on its way. If it cannot go, its sender is told.
    pub fn forward(&mut self, now_ns: u64, transit: Transit, arena: &mut Arena) {
        let destination = transit.onward.destination;
        let Some(egress) = self.way(destination) else {
            return self.refuse(now_ns, transit, Refusal::NoRoute, arena);
        };
        let stack = &mut self.stacks[egress];
        if stack.addresses.kind(destination) == Kind::Ours {
            stack.ingest_transit(now_ns, transit, arena);
            return self.send_own(now_ns, egress, arena);
        }
        if let Err((transit, refusal)) = stack.send_transit(now_ns, transit, arena) {
            self.refuse(now_ns, transit, refusal, arena);
        }
    }

    /// Drops a packet, silently, for a reason that is counted at the interface
    /// that it came in by.
    pub fn discard(&mut self, transit: Transit, reason: DropReason, arena: &mut Arena) {
        self.stacks[transit.ingress].counters.transmit_drops.count(reason);
        arena.free(transit.frame);
    }

    fn refuse(&mut self, now_ns: u64, transit: Transit, refusal: Refusal, arena: &mut Arena) {
        let ingress = transit.ingress;
        self.stacks[ingress].refuse(now_ns, arena, &transit.frame, refusal);
        self.discard(transit, refusal.reason(), arena);
        self.send_own(now_ns, ingress, arena);
    }

    /// When [`Router::handle_timeout`] wants to be called.
    pub fn next_timeout(&self) -> Option<u64> {
        self.stacks.iter().filter_map(Stack::next_timeout).min()
    }

    /// Does everything that is due at `now_ns`.
    pub fn handle_timeout(&mut self, now_ns: u64, arena: &mut Arena) {
        for interface in 0..self.stacks.len() {
            self.stacks[interface].handle_timeout(now_ns, arena);
            self.send_own(now_ns, interface, arena);
        }
    }

    /// The frames for the port of an interface, oldest first.
    ///
    /// # Panics
    /// When there is no such interface.
    #[inline]
    pub fn transmit_queue(&mut self, interface: usize) -> &mut Fifo<Frame> {
        self.stacks[interface].transmit_queue()
    }

    /// Gives every frame back to the arena: before the router is dropped.
    pub fn release(self, arena: &mut Arena) {
        self.transits.into_iter().for_each(|transit| arena.free(transit.frame));
        self.stacks.into_iter().for_each(|stack| stack.release(arena));
    }

    /// Sends what an interface had to say itself by the interface that leads
    /// to its destination.
    fn send_own(&mut self, now_ns: u64, interface: usize, arena: &mut Arena) {
        while let Some(own) = self.stacks[interface].forwarding.own.pop_front() {
            self.send_own_packet(now_ns, interface, &own, arena);
        }
    }

    #[cold]
    fn send_own_packet(
        &mut self,
        now_ns: u64,
        interface: usize,
        own: &OwnPacket,
        arena: &mut Arena,
    ) {
        match self.way(own.packet.destination) {
            Some(egress) => self.stacks[egress].send_own(now_ns, arena, own),
            None => {
                let counters = &mut self.stacks[interface].counters;
                counters.transmit_drops.count(DropReason::NoRoute);
            }
        }
    }

    /// The interface that leads to a destination.
    fn way(&mut self, destination: IpAddr) -> Option<usize> {
        let slot = self.key.address(destination) as usize % WAYS;
        match self.ways[slot] {
            Some(way) if way.destination == destination => Some(way.egress),
            _ => {
                let egress = self.find_way(destination)?;
                self.ways[slot] = Some(Way { destination, egress });
                Some(egress)
            }
        }
    }

    fn find_way(&self, destination: IpAddr) -> Option<usize> {
        if destination == IpAddr::V4(Ipv4Addr::BROADCAST) {
            return None;
        }
        let bits = |stack: &Stack| stack.routes.prefix_bits_to(destination);
        let ways =
            self.stacks.iter().enumerate().filter_map(|(at, stack)| Some((bits(stack)?, at)));
        // The first of the longest.
        ways.max_by_key(|&(bits, at)| (bits, std::cmp::Reverse(at))).map(|(_, at)| at)
    }
}
