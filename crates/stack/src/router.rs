//! Router: several interfaces that forward packets to each other.

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr};

use tidegate_memory::{Arena, Fifo, Frame};
use tidegate_wire::DropReason;

use crate::Stack;
use crate::ip::address::AddressKind;
use crate::ip::packet::ForwardError;
use crate::ip::transit::{LocalPacket, TransitPacket};
use crate::random::{HashKey, SecretRng};

/// Size of the cache of egress interfaces.
const EGRESS_CACHE_SLOTS: usize = 1024;

/// Egress interface of a destination.
#[derive(Clone, Copy)]
struct CachedEgress {
    destination: IpAddr,
    egress: usize,
}

/// Router: interfaces with their own addresses and routes. The egress interface of a packet is the
/// one with the most specific route to its destination; on a tie, the first interface.
///
/// Frames of all interfaces are in one arena, so that forwarding copies nothing. The stacks must be
/// created with [`crate::Config::forwarding`].
///
/// Packets to forward wait in [`Router::poll_transit`]. The caller passes each packet on to
/// [`Router::forward`] or [`Router::discard`], and can inspect or delay it before.
pub struct Router {
    stacks: Vec<Stack>,
    transits: VecDeque<TransitPacket>,
    /// Direct-mapped cache; entries stay valid because routes do not change.
    egress_cache: Box<[Option<CachedEgress>]>,
    key: HashKey,
}

impl Router {
    /// Creates a router of these interfaces. The seed keys the cache against chosen addresses.
    pub fn new(stacks: Vec<Stack>, seed: [u8; 16]) -> Self {
        let key = SecretRng::new(seed).hash_key();
        Self {
            stacks,
            transits: VecDeque::new(),
            egress_cache: vec![None; EGRESS_CACHE_SLOTS].into(),
            key,
        }
    }

    /// All interfaces, in the order passed to [`Router::new`].
    pub fn stacks(&self) -> &[Stack] {
        &self.stacks
    }

    /// One interface, mutably.
    ///
    /// # Panics
    /// When the index is out of range.
    pub fn stack_mut(&mut self, interface: usize) -> &mut Stack {
        &mut self.stacks[interface]
    }

    /// Processes a frame received on an interface.
    ///
    /// # Panics
    /// When the index is out of range.
    pub fn handle_frame(&mut self, now_ns: u64, interface: usize, frame: Frame, arena: &mut Arena) {
        let stack = &mut self.stacks[interface];
        stack.handle_frame(now_ns, frame, arena);
        while let Some(mut transit) = stack.interface.forwarding.transits.pop_front() {
            transit.ingress = interface;
            self.transits.push_back(transit);
        }
        self.send_local_packets(now_ns, interface, arena);
    }

    /// Removes the next packet to forward from the queue.
    #[inline]
    pub fn poll_transit(&mut self) -> Option<TransitPacket> {
        self.transits.pop_front()
    }

    /// Forwards a packet. If that fails, its sender gets an ICMP error.
    pub fn forward(&mut self, now_ns: u64, transit: TransitPacket, arena: &mut Arena) {
        let destination = transit.forward_meta.destination;
        let Some(egress) = self.egress(destination) else {
            return self.reject(now_ns, transit, ForwardError::NoRoute, arena);
        };
        let stack = &mut self.stacks[egress];
        if stack.interface.addresses.kind(destination) == AddressKind::Local {
            stack.handle_transit(now_ns, transit, arena);
            return self.send_local_packets(now_ns, egress, arena);
        }
        if let Err((transit, error)) = stack.interface.send_transit(now_ns, transit, arena) {
            self.reject(now_ns, transit, error, arena);
        }
    }

    /// Drops a packet silently; the reason is counted at its ingress interface.
    pub fn discard(&mut self, transit: TransitPacket, reason: DropReason, arena: &mut Arena) {
        self.stacks[transit.ingress].interface.counters.count_transmit_drop(reason);
        arena.free(transit.frame);
    }

    fn reject(
        &mut self,
        now_ns: u64,
        transit: TransitPacket,
        error: ForwardError,
        arena: &mut Arena,
    ) {
        let ingress = transit.ingress;
        self.stacks[ingress].interface.send_forward_error(now_ns, arena, &transit.frame, error);
        self.discard(transit, error.drop_reason(), arena);
        self.send_local_packets(now_ns, ingress, arena);
    }

    /// Time in nanoseconds at which to call [`Router::handle_timeout`].
    pub fn next_timeout(&self) -> Option<u64> {
        self.stacks.iter().filter_map(Stack::next_timeout).min()
    }

    /// Processes all timers that have expired at `now_ns`.
    pub fn handle_timeout(&mut self, now_ns: u64, arena: &mut Arena) {
        for interface in 0..self.stacks.len() {
            self.stacks[interface].handle_timeout(now_ns, arena);
            self.send_local_packets(now_ns, interface, arena);
        }
    }

    /// Transmit queue of an interface, oldest frame first.
    ///
    /// # Panics
    /// When the index is out of range.
    #[inline]
    pub fn transmit_queue(&mut self, interface: usize) -> &mut Fifo<Frame> {
        self.stacks[interface].transmit_queue()
    }

    /// Returns all frames to the arena. Call before dropping the router.
    pub fn release(self, arena: &mut Arena) {
        self.transits.into_iter().for_each(|transit| arena.free(transit.frame));
        self.stacks.into_iter().for_each(|stack| stack.release(arena));
    }

    /// Sends the locally originated packets of an interface by their egress interfaces.
    fn send_local_packets(&mut self, now_ns: u64, interface: usize, arena: &mut Arena) {
        while let Some(local) = self.stacks[interface].interface.forwarding.local.pop_front() {
            self.send_local_packet(now_ns, interface, &local, arena);
        }
    }

    #[cold]
    fn send_local_packet(
        &mut self,
        now_ns: u64,
        interface: usize,
        local: &LocalPacket,
        arena: &mut Arena,
    ) {
        match self.egress(local.packet.destination) {
            Some(egress) => self.stacks[egress].interface.send_local_packet(now_ns, arena, local),
            None => {
                let counters = &mut self.stacks[interface].interface.counters;
                counters.count_transmit_drop(DropReason::NoRoute);
            }
        }
    }

    /// Egress interface of a destination, from the cache or the routing tables.
    fn egress(&mut self, destination: IpAddr) -> Option<usize> {
        let slot = self.key.hash_address(destination) as usize % EGRESS_CACHE_SLOTS;
        match self.egress_cache[slot] {
            Some(cached) if cached.destination == destination => Some(cached.egress),
            _ => {
                let egress = self.find_egress(destination)?;
                self.egress_cache[slot] = Some(CachedEgress { destination, egress });
                Some(egress)
            }
        }
    }

    fn find_egress(&self, destination: IpAddr) -> Option<usize> {
        if destination == IpAddr::V4(Ipv4Addr::BROADCAST) {
            return None;
        }
        let bits = |stack: &Stack| stack.interface.routes.prefix_bits_to(destination);
        let candidates =
            self.stacks.iter().enumerate().filter_map(|(at, stack)| Some((bits(stack)?, at)));
        // The first interface with the longest prefix.
        candidates.max_by_key(|&(bits, at)| (bits, std::cmp::Reverse(at))).map(|(_, at)| at)
    }
}
