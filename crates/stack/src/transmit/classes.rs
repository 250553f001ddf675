//! The classes of an interface: frames that wait, and frames whose turn has come.

use std::collections::HashMap;
use std::hash::BuildHasher;

use tidegate_gate::transmit::{ClassCounters, Config, FlowId, Program, Queued, RuleSet, Scheduler};
use tidegate_memory::{Arena, Checksum, Fifo, Frame};
use tidegate_wire::{EtherType, Protocol};

use super::packet::{OutgoingPacket, set_dscp};
use crate::Transport;
use crate::random::HashKey;
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
    /// Empty classes for valid settings, with space for `max_frames` frames.
    pub(crate) fn new(config: &Config, max_frames: usize, key: HashKey, mtu: usize) -> Self {
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

    /// Takes over from classes with other settings: the connections that wait, and the counters of the
    /// classes of the same name. Returns the frames, those of a flow in their order.
    pub(crate) fn take_over(&mut self, old: Self) -> Vec<Frame> {
        for (name, counters) in old.counters() {
            if let Some(class) = self.names.iter().position(|own| own == name) {
                self.scheduler.continue_counters(class, counters);
            }
        }
        let Self { scheduler, mut ready, unblocked, .. } = old;
        let (waiting_frames, waiting_connections) = scheduler.into_parts();
        self.unblocked.extend(unblocked.into_iter().chain(waiting_connections));
        ready.drain(..).chain(waiting_frames).collect()
    }

    /// Bytes of the largest TSO segment.
    pub(crate) fn max_tso_bytes(config: &Config) -> usize {
        bytes_in(config.ceiling_bps, MAX_TSO_TIME_NS, MAX_TSO_BYTES)
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

    /// Queues a frame with a link header of `link_bytes` bytes. Returns false if there was no space,
    /// and the frame was freed.
    pub(super) fn queue(
        &mut self,
        now_ns: u64,
        arena: &mut Arena,
        link_bytes: usize,
        mut frame: Frame,
    ) -> bool {
        let Some(outgoing) = ip_packet(arena.bytes(&frame), link_bytes) else {
            self.ready.push_back(frame);
            return true;
        };
        let (class, flow) = self.flow_of(&outgoing);
        if let Some(&Some(dscp)) = self.set_dscp.get(usize::from(class))
            && let Some(packet) = arena.bytes_mut(&mut frame).get_mut(link_bytes..)
        {
            set_dscp(packet, dscp);
        }
        // Segments of TCP are few, and would be sent again.
        let expires_ns = match outgoing.protocol() {
            Protocol::TCP => u64::MAX,
            _ => now_ns.saturating_add(self.max_delay_ns),
        };
        let bytes = bytes_on_link(arena, &frame);
        let queued = self.scheduler.push(flow, Queued { value: frame, bytes, expires_ns });
        queued.map_err(|dropped| arena.free(dropped)).is_ok()
    }

    /// Makes the frames ready whose turn has come, as many as the device is given at once. Returns
    /// the number of frames that had waited too long and were freed.
    pub(super) fn take_turns(&mut self, now_ns: u64, arena: &mut Arena) -> u64 {
        let mut expired = 0;
        while self.ready.len() < MAX_READY_FRAMES
            && let Some(released) = self.scheduler.pop(now_ns)
        {
            if released.is_expired {
                expired += 1;
                arena.free(released.value);
            } else {
                self.ready.push_back(released.value);
            }
            if self.scheduler.flow_bytes(released.flow) < self.max_flow_bytes {
                while let Some(index) = self.scheduler.take_waiting(released.flow) {
                    self.unblocked.push(index);
                }
            }
        }
        expired
    }

    /// True if connections wait for [`TransmitClasses::take_unblocked`].
    pub(crate) fn has_unblocked(&self) -> bool {
        !self.unblocked.is_empty()
    }

    /// Time at which the next frame has its turn; `None` if none waits, or the device has to take
    /// others first.
    pub(crate) fn next_turn_ns(&self) -> Option<u64> {
        let has_space = self.ready.len() < MAX_READY_FRAMES;
        if has_space { self.scheduler.next_due_ns() } else { None }
    }

    /// Names and counters of all classes.
    pub(crate) fn counters(&self) -> impl Iterator<Item = (&str, ClassCounters)> {
        self.names.iter().map(String::as_str).zip(self.scheduler.counters())
    }

    /// Sets the program that has a local port.
    pub(crate) fn set_port_program(
        &mut self,
        transport: Transport,
        port: u16,
        program: Program<'_>,
    ) {
        if self.rules.names_programs() {
            let rules = self.rules.rules_of(Some(program));
            self.rules_of_ports.insert((transport, port), rules);
        }
    }

    /// Returns all frames to the arena.
    pub(crate) fn release(&mut self, arena: &mut Arena) {
        let frames = self.scheduler.drain().chain(self.ready.drain(..));
        frames.for_each(|frame| arena.free(frame));
    }
}

/// The IP packet of a frame; `None` for frames that belong to the link's own work.
fn ip_packet(frame: &[u8], link_bytes: usize) -> Option<OutgoingPacket> {
    let (header, packet) = frame.split_at_checked(link_bytes)?;
    let ethertype = header.last_chunk().map(|bytes| EtherType(u16::from_be_bytes(*bytes)));
    let is_ip = matches!(ethertype, None | Some(EtherType::IPV4 | EtherType::IPV6));
    if is_ip { OutgoingPacket::parse(packet) } else { None }
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
