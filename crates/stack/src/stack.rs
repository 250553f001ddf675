//! The stack as a whole: what it holds, and the way in.

use std::collections::{HashSet, VecDeque};
use std::net::IpAddr;

use tidegate_memory::{Arena, Frame};
use tidegate_wire::{ArpPacket, DropReason, EtherType, EthernetHeader, MacAddr, Medium, VlanTag};

use crate::address::{Addresses, Kind};
use crate::chance::{Chance, HashKey};
use crate::ethernet::Arrival;
use crate::neighbour::{Claimed, Expired, Lost, Neighbours};
use crate::output::IDENTIFICATIONS;
use crate::path::Paths;
use crate::route::Routes;
use crate::udp::{Delivery, Payload, UdpTable};
use crate::{Config, ConfigError, Counters, Event, Limits, Ownership, Route};

/// One interface of one host. See the [crate documentation](crate).
pub struct Stack {
    pub(crate) medium: Medium,
    pub(crate) mac: MacAddr,
    pub(crate) mtu: usize,
    pub(crate) vlan: Option<VlanTag>,
    pub(crate) ownership: Ownership,
    pub(crate) transmit_checksum: bool,
    pub(crate) hop_limit: u8,
    pub(crate) limits: Limits,
    pub(crate) chance: Chance,
    pub(crate) addresses: Addresses,
    pub(crate) routes: Routes,
    pub(crate) neighbours: Neighbours,
    pub(crate) paths: Paths,
    pub(crate) udp: UdpTable,
    pub(crate) transmit: VecDeque<Frame>,
    pub(crate) events: VecDeque<Event>,
    /// Neighbours and conflicts with an event in the queue.
    pub(crate) told: HashSet<(bool, IpAddr)>,
    pub(crate) counters: Counters,
    pub(crate) hash_key: HashKey,
    pub(crate) identifications: Box<[u32]>,
}

/// What is to become of a received packet.
pub(crate) enum Fate {
    /// It goes to a socket.
    Deliver(Delivery),
    /// It was for the stack itself, and all is done.
    Handled,
    /// It is an ARP packet.
    Arp(ArpPacket),
}

impl Stack {
    /// Makes a stack.
    ///
    /// # Errors
    /// When the configuration contradicts itself.
    pub fn new(config: Config, now_ns: u64) -> Result<Stack, ConfigError> {
        config.check()?;
        let _ = now_ns;
        let limits = config.limits;
        let mut chance = Chance::new(config.seed);
        let mut addresses = Addresses::new(chance.hash_key());
        let mut routes = Routes::new(chance.hash_key());
        for &cidr in &config.addresses {
            addresses.add(cidr, Kind::Ours);
            routes.add(Route { prefix: cidr, gateway: None });
        }
        for &route in &config.routes {
            routes.add(route);
        }
        let neighbours = Neighbours::new(
            chance.hash_key(),
            limits.neighbours,
            limits.unresolved_frames,
            limits.unresolved_frames_total,
        );
        Ok(Stack {
            medium: config.medium,
            mac: config.mac,
            mtu: config.mtu,
            vlan: config.vlan.map(VlanTag::new),
            ownership: config.ownership,
            transmit_checksum: config.transmit_checksum,
            hop_limit: config.hop_limit,
            addresses,
            routes,
            neighbours,
            paths: Paths::new(chance.hash_key()),
            udp: UdpTable::new(chance.hash_key(), limits.sockets),
            transmit: VecDeque::with_capacity(limits.transmit_frames.min(1 << 16)),
            events: VecDeque::new(),
            told: HashSet::new(),
            counters: Counters::default(),
            hash_key: chance.hash_key(),
            identifications: (0..IDENTIFICATIONS).map(|_| chance.random()).collect(),
            chance,
            limits,
        })
    }

    /// Takes a received frame: uses it, answers it, keeps it for a socket, or
    /// drops it for a reason that is counted.
    #[inline]
    pub fn ingest(&mut self, now_ns: u64, mut frame: Frame, arena: &mut Arena) {
        self.counters.received += 1;
        match self.link_input(now_ns, &mut frame, arena) {
            Ok(Fate::Deliver(delivery)) => {
                self.udp_deliver(arena, Payload::Frame(frame), &delivery);
            }
            Ok(fate) => {
                arena.free(frame);
                self.finish(now_ns, arena, fate);
            }
            Err(reason) => {
                arena.free(frame);
                self.counters.drops.count(reason);
            }
        }
    }

    fn finish(&mut self, now_ns: u64, arena: &mut Arena, fate: Fate) {
        let result = match fate {
            Fate::Arp(packet) => self.arp_input(now_ns, arena, &packet),
            Fate::Handled | Fate::Deliver(_) => Ok(()),
        };
        match result {
            Ok(()) => self.counters.handled += 1,
            Err(reason) => self.counters.drops.count(reason),
        }
    }

    #[inline]
    fn link_input(
        &mut self,
        now_ns: u64,
        frame: &mut Frame,
        arena: &Arena,
    ) -> Result<Fate, DropReason> {
        let (ethertype, arrival) = match self.medium {
            Medium::Ethernet => {
                let (header, _) = EthernetHeader::parse(arena.bytes(frame))?;
                let arrival = self.ethernet_input(&header, frame.checksum)?;
                frame.advance(header.header_bytes());
                (header.ethertype, arrival)
            }
            Medium::Ip => Arrival::without_link(arena.bytes(frame), frame.checksum)?,
        };
        let packet = arena.bytes(frame);
        match ethertype {
            EtherType::IPV4 => self.ipv4_input(now_ns, packet, &arrival),
            EtherType::ARP if self.medium == Medium::Ethernet => {
                ArpPacket::parse(packet).map(|(packet, _)| Fate::Arp(packet))
            }
            _ => Err(DropReason::EtherTypeUnknown),
        }
    }

    /// When [`Stack::handle_timeout`] wants to be called; `None` when nothing
    /// waits for time to pass.
    pub fn next_timeout(&self) -> Option<u64> {
        self.neighbours.next_timeout()
    }

    /// Does everything that is due at `now_ns`.
    pub fn handle_timeout(&mut self, now_ns: u64, arena: &mut Arena) {
        while let Some(expired) = self.neighbours.poll_expired(now_ns) {
            match expired {
                Expired::Ask(action) => self.ask_neighbour(arena, action),
                Expired::Lost(lost) => self.neighbour_lost(arena, lost),
            }
        }
    }

    /// The frames for the port, oldest first. Take them from the front.
    #[inline]
    pub fn transmit_queue(&mut self) -> &mut VecDeque<Frame> {
        &mut self.transmit
    }

    /// What became of every packet.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Tells the hardware address of a neighbour, or that it has none: for
    /// [`Ownership::Shared`], and for entries that shall be there from the
    /// start.
    pub fn set_neighbour(
        &mut self,
        now_ns: u64,
        ip: IpAddr,
        mac: Option<MacAddr>,
        arena: &mut Arena,
    ) {
        match self.neighbours.tell(now_ns, &mut self.chance, ip, mac) {
            Ok(claimed) => {
                // Whoever tells has the last word, so there is no error here.
                let _ = self.neighbour_claimed(arena, ip, claimed);
            }
            Err(lost) => self.neighbour_lost(arena, lost),
        }
    }

    /// The next thing that the outside should know.
    pub fn poll_event(&mut self) -> Option<Event> {
        let event = self.events.pop_front()?;
        match event {
            Event::NeighbourWanted(ip) => {
                self.told.remove(&(false, ip));
            }
            Event::AddressConflict(ip) => {
                self.told.remove(&(true, ip));
            }
            Event::Readable(id) => {
                if let Some(socket) = self.udp.get_mut(id) {
                    socket.readable_told = false;
                }
            }
            Event::Error(id) => {
                if let Some(socket) = self.udp.get_mut(id) {
                    socket.error_told = false;
                }
            }
        }
        Some(event)
    }

    /// Gives every frame that the stack holds back to the arena: before it is
    /// dropped.
    pub fn release(mut self, arena: &mut Arena) {
        let queued = self.neighbours.drain().chain(self.transmit.drain(..));
        queued.for_each(|frame| arena.free(frame));
        self.udp.drain().for_each(|datagram| datagram.release(arena));
    }

    /// Does what the neighbour cache asks for after a claim.
    pub(crate) fn neighbour_claimed(
        &mut self,
        arena: &mut Arena,
        ip: IpAddr,
        claimed: Claimed,
    ) -> Result<(), DropReason> {
        match claimed {
            Claimed::Noted => {}
            Claimed::Changed => self.paths.forget(),
            Claimed::Doubted(action) => self.ask_neighbour(arena, action),
            Claimed::Resolved(mac, waiting) => {
                for frame in waiting {
                    self.send_to(arena, mac, ip.is_ipv4(), frame);
                }
            }
            Claimed::Unsolicited if ip.is_ipv4() => return Err(DropReason::ArpUnsolicited),
            Claimed::Unsolicited => return Err(DropReason::NdpUnsolicited),
        }
        Ok(())
    }

    fn neighbour_lost(&mut self, arena: &mut Arena, lost: Lost) {
        self.paths.forget();
        for frame in lost.waiting {
            self.counters.transmit_drops.count(DropReason::NeighbourUnreachable);
            arena.free(frame);
        }
    }

    /// Queues an event about an address, unless it is in the queue already.
    pub(crate) fn tell_once(&mut self, event: Event) {
        let key = match event {
            Event::NeighbourWanted(ip) => (false, ip),
            Event::AddressConflict(ip) => (true, ip),
            Event::Readable(_) | Event::Error(_) => return,
        };
        // Addresses come from the wire, so even the events about them need a
        // bound: a lost event is asked for again with the next packet.
        if self.told.len() < self.limits.neighbours.max(1024) && self.told.insert(key) {
            self.events.push_back(event);
        }
    }
}
