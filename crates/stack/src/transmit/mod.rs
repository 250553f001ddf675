//! Transmit classes: frames wait by class and flow, and leave when it is their turn.
//!
//! Frames reach the classes from the transmit queue of the interface, which holds them for no
//! longer than a burst. TCP makes segments only while their flow has few bytes waiting: data waits
//! in the send buffer, where it delays no other flow.

mod packet;

use std::collections::HashMap;
use std::hash::BuildHasher;

use tidegate_gate::transmit::{
    ClassCounters, Config, ConfigError, FlowId, Program, Queued, RuleSet, Scheduler,
};
use tidegate_memory::{Arena, Checksum, Fifo, Frame};
use tidegate_wire::{DropReason, EtherType, Medium, Protocol};

use self::packet::{OutgoingPacket, set_dscp};
use crate::Transport;
use crate::interface::Interface;
use crate::random::HashKey;
use crate::stack::Stack;
use crate::tcp::FourTuple;

/// Frames that are handed to the device at once. What the device has cannot be overtaken.
const MAX_READY_FRAMES: usize = 64;

/// Time on the link of the largest TSO segment, in nanoseconds: a small answer waits for no longer
/// one.
const MAX_TSO_TIME_NS: u64 = 50_000;
/// The same in bytes, for a link of unknown rate.
const MAX_TSO_BYTES: u64 = 16 << 10;

/// Time on the link of the segments of a connection that wait here, in nanoseconds, so that there
/// are some when the next acknowledgement comes.
const FLOW_TIME_NS: u64 = 200_000;
/// The same in bytes, for a link of unknown rate.
const FLOW_BYTES: u64 = 64 << 10;

/// Classes of an interface and the frames that wait in them.
pub(crate) struct TransmitClasses {
    names: Vec<String>,
    rules: RuleSet,
    set_dscp: Vec<Option<u8>>,
    scheduler: Scheduler<Frame>,
    /// Frames whose turn has come, for the device.
    ready: Fifo<Frame>,
    /// Connections whose flow has space again.
    unblocked: Vec<u32>,
    key: HashKey,
    /// Rules of the programs that have bound ports ([`RuleSet::rules_of`]).
    rules_of_ports: HashMap<(Transport, u16), u32>,
    rules_without_program: u32,
    max_delay_ns: u64,
    max_flow_bytes: usize,
}

impl TransmitClasses {
    fn new(config: &Config, max_frames: usize, key: HashKey, mtu: usize) -> Self {
        let rules = config.rule_set();
        let bytes = bytes_in(config.ceiling_bps, FLOW_TIME_NS, FLOW_BYTES);
        let code_points = config.classes.iter().map(|class| class.set_dscp);
        Self {
            names: config.names().map(str::to_owned).collect(),
            rules_without_program: rules.rules_of(None),
            rules,
            set_dscp: code_points.collect(),
            scheduler: config.scheduler(max_frames),
            ready: Fifo::with_capacity(MAX_READY_FRAMES),
            unblocked: Vec::new(),
            key,
            rules_of_ports: HashMap::new(),
            max_delay_ns: config.max_delay_ms.saturating_mul(1_000_000),
            max_flow_bytes: bytes.max(2 * mtu),
        }
    }

    fn flow_of(&self, packet: &OutgoingPacket) -> (u8, FlowId) {
        let transport = match packet.protocol() {
            Protocol::UDP => Some(Transport::Udp),
            Protocol::TCP => Some(Transport::Tcp),
            _ => None,
        };
        let of_port = transport
            .zip(packet.local_port())
            .and_then(|port| self.rules_of_ports.get(&port).copied());
        let class =
            self.rules.class_of(&packet.meta(), of_port.unwrap_or(self.rules_without_program));
        (class, FlowId::new(class, self.key.hash_one(packet.key)))
    }

    /// Frames whose turn has come.
    #[inline]
    pub(crate) fn ready(&mut self) -> &mut Fifo<Frame> {
        &mut self.ready
    }

    /// Number of frames whose turn has come.
    #[inline]
    pub(crate) fn ready_len(&self) -> usize {
        self.ready.len()
    }

    /// Takes a connection whose flow has space again.
    #[inline]
    pub(crate) fn take_unblocked(&mut self) -> Option<u32> {
        self.unblocked.pop()
    }

    /// Bytes that a connection may still queue; 0 makes the connection `index` wait for
    /// [`TransmitClasses::take_unblocked`].
    pub(crate) fn space_or_wait(
        &mut self,
        tuple: &FourTuple,
        traffic_class: u8,
        index: u32,
    ) -> usize {
        let (_, flow) = self.flow_of(&OutgoingPacket::of_connection(tuple, traffic_class));
        let space = self.max_flow_bytes.saturating_sub(self.scheduler.flow_bytes(flow));
        if space == 0 {
            self.scheduler.wait(flow, index);
        }
        space
    }

    /// Queues a frame with an IP packet behind `link_bytes` of header. Returns frames that find no
    /// space.
    fn queue(
        &mut self,
        now_ns: u64,
        arena: &mut Arena,
        link_bytes: usize,
        mut frame: Frame,
    ) -> Result<(), Frame> {
        let packet = arena.bytes(&frame).get(link_bytes..).unwrap_or_default();
        let Some(outgoing) = OutgoingPacket::parse(packet) else {
            self.ready.push_back(frame);
            return Ok(());
        };
        let (class, flow) = self.flow_of(&outgoing);
        if let Some(&Some(dscp)) = self.set_dscp.get(usize::from(class))
            && let Some(packet) = arena.bytes_mut(&mut frame).get_mut(link_bytes..)
        {
            set_dscp(packet, dscp);
        }
        // Segments of TCP are few, and sent again if they are lost.
        let expires_ns = match outgoing.protocol() {
            Protocol::TCP => u64::MAX,
            _ => now_ns.saturating_add(self.max_delay_ns),
        };
        let bytes = bytes_on_link(arena, &frame);
        self.scheduler.push(flow, Queued { value: frame, bytes, expires_ns })
    }

    /// Returns all frames to the arena.
    pub(crate) fn release(&mut self, arena: &mut Arena) {
        let frames = self.scheduler.drain().chain(self.ready.drain(..));
        frames.for_each(|frame| arena.free(frame));
    }
}

/// Bytes that take `time_ns` on a link; `otherwise` for a link of unknown rate.
fn bytes_in(rate_bps: Option<u64>, time_ns: u64, otherwise: u64) -> usize {
    let bytes = |bps: u64| bps.saturating_mul(time_ns) / 8_000_000_000;
    rate_bps.map_or(otherwise, bytes).min(u64::from(u32::MAX)) as usize
}

/// Bytes of a frame on the link, where each segment of a TSO frame has headers of its own.
fn bytes_on_link(arena: &Arena, frame: &Frame) -> u32 {
    let (bytes, segment_bytes) = (frame.len(), frame.segment_bytes());
    let more_headers = match frame.checksum() {
        Checksum::Partial { start, .. } if segment_bytes > 0 => {
            let tcp_at = usize::from(start);
            let tcp_words = arena.bytes(frame).get(tcp_at + 12).map_or(5, |byte| byte >> 4);
            let header_bytes = tcp_at + 4 * usize::from(tcp_words);
            let segments = bytes.saturating_sub(header_bytes).div_ceil(segment_bytes);
            segments.saturating_sub(1) * header_bytes
        }
        _ => 0,
    };
    (bytes + more_headers) as u32
}

impl Interface {
    /// Moves frames from the transmit queue to the classes. Does nothing without classes.
    #[inline]
    pub(crate) fn queue_by_class(&mut self, now_ns: u64, arena: &mut Arena) {
        if self.transmit_classes.is_some() {
            self.queue_all_by_class(now_ns, arena);
        }
    }

    fn queue_all_by_class(&mut self, now_ns: u64, arena: &mut Arena) {
        let link_bytes = self.link_header_bytes();
        let Some(classes) = &mut self.transmit_classes else { return };
        while let Some(frame) = self.transmit.pop_front() {
            let is_ip =
                self.medium == Medium::Ip || has_ip_ethertype(arena.bytes(&frame), link_bytes);
            let queued = match is_ip {
                true => classes.queue(now_ns, arena, link_bytes, frame),
                false => {
                    classes.ready.push_back(frame);
                    Ok(())
                }
            };
            if let Err(dropped) = queued {
                self.counters.transmitted -= 1;
                self.counters.transmit_drops.count(DropReason::TransmitQueueFull);
                arena.free(dropped);
            }
        }
    }

    /// Takes the frames whose turn has come at `now_ns`, as many as the device is given at once.
    fn take_turns(&mut self, now_ns: u64, arena: &mut Arena) {
        let Some(classes) = &mut self.transmit_classes else { return };
        while classes.ready.len() < MAX_READY_FRAMES
            && let Some(released) = classes.scheduler.pop(now_ns)
        {
            if released.is_expired {
                self.counters.transmitted -= 1;
                self.counters.transmit_drops.count(DropReason::TransmitQueueFull);
                arena.free(released.value);
            } else {
                classes.ready.push_back(released.value);
            }
            if classes.scheduler.flow_bytes(released.flow) < classes.max_flow_bytes {
                while let Some(index) = classes.scheduler.take_waiting(released.flow) {
                    classes.unblocked.push(index);
                }
            }
        }
    }
}

/// True if an Ethernet frame holds an IP packet behind a link header of `link_bytes` bytes.
fn has_ip_ethertype(frame: &[u8], link_bytes: usize) -> bool {
    let ethertype = frame.get(..link_bytes).and_then(|header| header.last_chunk());
    ethertype.is_some_and(|bytes| {
        matches!(EtherType(u16::from_be_bytes(*bytes)), EtherType::IPV4 | EtherType::IPV6)
    })
}

impl Stack {
    /// Sorts the frames to send into classes from now on, and sends them in turn. Call
    /// [`Stack::take_turns`] before [`Stack::transmit_queue`].
    ///
    /// # Errors
    /// [`ConfigError`] if the settings are invalid.
    pub fn set_transmit_classes(&mut self, config: &Config) -> Result<(), ConfigError> {
        config.check()?;
        let interface = &mut self.interface;
        let max_frames = (interface.limits.transmit_frames / 2).max(1);
        let key = interface.rng.hash_key();
        let classes = TransmitClasses::new(config, max_frames, key, interface.mtu);
        let max_tso_bytes = bytes_in(config.ceiling_bps, MAX_TSO_TIME_NS, MAX_TSO_BYTES);
        interface.max_tso_bytes = interface.max_tso_bytes.min(max_tso_bytes);
        interface.transmit_classes = Some(Box::new(classes));
        Ok(())
    }

    /// True if frames are sent by classes.
    #[inline]
    pub fn has_transmit_classes(&self) -> bool {
        self.interface.transmit_classes.is_some()
    }

    /// Queues new frames by class, and puts the frames whose turn has come into
    /// [`Stack::transmit_queue`]. Does nothing without classes.
    pub fn take_turns(&mut self, now_ns: u64, arena: &mut Arena) {
        loop {
            self.interface.queue_by_class(now_ns, arena);
            self.interface.take_turns(now_ns, arena);
            let has_unblocked = |classes: &TransmitClasses| !classes.unblocked.is_empty();
            if !self.interface.transmit_classes.as_deref().is_some_and(has_unblocked) {
                return;
            }
            self.tcp_flush(now_ns, arena);
        }
    }

    /// Time in nanoseconds at which the next frame has its turn; `None` if none waits.
    pub fn next_turn_ns(&self) -> Option<u64> {
        self.interface.transmit_classes.as_ref()?.scheduler.next_due_ns()
    }

    /// Names and counters of the transmit classes; none without classes.
    pub fn transmit_classes(&self) -> impl Iterator<Item = (&str, ClassCounters)> {
        let classes = self.interface.transmit_classes.as_deref().into_iter();
        classes.flat_map(|classes| {
            classes.names.iter().map(String::as_str).zip(classes.scheduler.counters())
        })
    }

    /// Sets the program that has a local port: rules may name it. The port keeps its program until
    /// another one has it.
    pub fn set_port_program(&mut self, transport: Transport, port: u16, program: Program<'_>) {
        let Some(classes) = &mut self.interface.transmit_classes else { return };
        if classes.rules.names_programs() {
            let rules = classes.rules.rules_of(Some(program));
            classes.rules_of_ports.insert((transport, port), rules);
        }
    }
}
