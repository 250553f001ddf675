//! Flows of fragmented packets. Only the first fragment has the ports; later ones follow it, and
//! earlier ones wait for it.

use std::hash::{BuildHasher, RandomState};
use std::time::{Duration, Instant};

use tidegate_memory::Frame;

use super::destination::FragmentKey;
use super::flow::Flow;
use crate::Burst;

/// Number of fragmented packets whose flow is remembered; a power of two.
const FLOW_SLOTS: usize = 256;

/// Number of packets of which fragments wait for the first one; a power of two.
const EARLY_SLOTS: usize = 64;

/// Time for which a flow is remembered, and for which fragments wait: as long as a stack reassembles
/// a packet (RFC 8200 section 4.5). Later fragments with the same identification are another
/// packet's.
const LIFETIME: Duration = Duration::from_secs(60);

/// Maximum number of fragments that wait, of one packet and of all.
const MAX_EARLY_FRAGMENTS: usize = 16;
const MAX_EARLY_FRAGMENTS_TOTAL: usize = 128;

/// Flow of a packet whose first fragment has arrived.
#[derive(Clone, Copy)]
struct KnownFlow {
    key: FragmentKey,
    flow: Flow,
    until: Instant,
}

/// Fragments of one packet that have arrived before its first fragment.
#[derive(Default)]
struct EarlyFragments {
    /// Packet, and the end of its time, if fragments of one wait.
    packet: Option<(FragmentKey, Instant)>,
    frames: Vec<Frame>,
}

impl EarlyFragments {
    fn is_of(&self, key: FragmentKey) -> bool {
        self.packet.is_some_and(|(packet, _)| packet == key)
    }

    /// Takes all frames; the slot is free then.
    fn take(&mut self) -> std::vec::Drain<'_, Frame> {
        self.packet = None;
        self.frames.drain(..)
    }
}

/// Flows of fragmented packets, and fragments whose flow is not known yet.
pub(super) struct FragmentTable {
    flows: Box<[Option<KnownFlow>]>,
    early: Box<[EarlyFragments]>,
    early_total: usize,
    /// Time at which the first fragments have waited long enough, or an earlier one; `None` if no
    /// fragment waits.
    next_expiry: Option<Instant>,
    /// Keyed hash of the slots: a peer cannot choose packets that collide.
    hasher: RandomState,
}

impl FragmentTable {
    pub(super) fn new() -> Self {
        Self {
            flows: vec![None; FLOW_SLOTS].into_boxed_slice(),
            early: (0..EARLY_SLOTS).map(|_| EarlyFragments::default()).collect(),
            early_total: 0,
            next_expiry: None,
            hasher: RandomState::new(),
        }
    }

    /// Remembers the flow of a packet, whose first fragment has arrived. Appends the fragments that
    /// arrived before to `early`.
    pub(super) fn begin(&mut self, now: Instant, key: FragmentKey, flow: Flow, early: &mut Burst) {
        let hash = self.hasher.hash_one(key) as usize;
        let known = KnownFlow { key, flow, until: now + LIFETIME };
        self.flows[hash & (FLOW_SLOTS - 1)] = Some(known);
        let waiting = &mut self.early[hash & (EARLY_SLOTS - 1)];
        if waiting.is_of(key) {
            self.early_total -= waiting.frames.len();
            waiting.take().for_each(|frame| early.push_back(frame));
            if self.early_total == 0 {
                self.next_expiry = None;
            }
        }
    }

    /// Flow of a packet whose first fragment has arrived.
    pub(super) fn flow(&self, now: Instant, key: FragmentKey) -> Option<Flow> {
        let hash = self.hasher.hash_one(key) as usize;
        let known = self.flows[hash & (FLOW_SLOTS - 1)];
        known.filter(|known| known.key == key && now < known.until).map(|known| known.flow)
    }

    /// True while fragments wait for the first one of their packet.
    #[inline]
    pub(super) fn has_waiting(&self) -> bool {
        self.next_expiry.is_some()
    }

    /// Takes the fragments that have waited long enough.
    pub(super) fn expire(&mut self, now: Instant, mut on_expired: impl FnMut(Frame)) {
        if self.next_expiry.is_none_or(|next| now < next) {
            return;
        }
        for waiting in &mut self.early {
            if waiting.packet.is_some_and(|(_, until)| until <= now) {
                self.early_total -= waiting.frames.len();
                waiting.take().for_each(&mut on_expired);
            }
        }
        let left = self.early.iter().filter_map(|waiting| Some(waiting.packet?.1));
        self.next_expiry = left.min();
    }

    /// Keeps a fragment until the first one of its packet arrives. Fragments for which there is no
    /// space, of this packet or an older one, go to `burst`.
    pub(super) fn wait(&mut self, now: Instant, key: FragmentKey, frame: Frame, burst: &mut Burst) {
        let hash = self.hasher.hash_one(key) as usize;
        let waiting = &mut self.early[hash & (EARLY_SLOTS - 1)];
        if !waiting.is_of(key) {
            self.early_total -= waiting.frames.len();
            waiting.take().for_each(|frame| burst.push_back(frame));
            waiting.packet = Some((key, now + LIFETIME));
            self.next_expiry.get_or_insert(now + LIFETIME);
        }
        if waiting.frames.len() < MAX_EARLY_FRAGMENTS
            && self.early_total < MAX_EARLY_FRAGMENTS_TOTAL
        {
            self.early_total += 1;
            waiting.frames.push(frame);
        } else {
            burst.push_back(frame);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use tidegate_memory::{Arena, ArenaConfig, FrameSize};

    use super::*;
    use crate::steering::TransportProtocol;

    fn packet(is_v6: bool, identification: u32) -> (FragmentKey, Flow) {
        let [own, peer]: [IpAddr; 2] = match is_v6 {
            false => [[192, 0, 2, 1].into(), [192, 0, 2, 9].into()],
            true => ["fd00::1", "fd00::9"].map(|text| text.parse().unwrap()),
        };
        let flow = Flow::new(TransportProtocol::Udp, (own, 53).into(), (peer, 4000).into());
        (FragmentKey::of_udp(peer, own, identification), flow)
    }

    #[test]
    fn flow_is_forgotten_after_its_time() {
        let (mut table, now) = (FragmentTable::new(), Instant::now());
        for is_v6 in [false, true] {
            let (key, flow) = packet(is_v6, 7);
            table.begin(now, key, flow, &mut Burst::new());
            assert_eq!(table.flow(now + LIFETIME - Duration::from_nanos(1), key), Some(flow));
            assert_eq!(table.flow(now + LIFETIME, key), None, "this is another packet's fragment");
            table.begin(now + LIFETIME, key, flow, &mut Burst::new());
            assert_eq!(table.flow(now + LIFETIME, key), Some(flow));
        }
    }

    #[test]
    fn fragments_wait_for_a_limited_time() {
        let arena = ArenaConfig { frames: 8, frame_size: FrameSize::K2, hugepages: false };
        let mut arena = Arena::new(arena).unwrap();
        let (mut table, now) = (FragmentTable::new(), Instant::now());
        let mut burst = Burst::new();
        assert!(!table.has_waiting());
        let later = now + Duration::from_secs(1);
        for (at, identification) in [(now, 1), (later, 1), (later, 2)] {
            let (key, _) = packet(false, identification);
            table.wait(at, key, arena.alloc().unwrap(), &mut burst);
        }
        // Packets that share a slot displace one another.
        let displaced = burst.len();
        let mut expired = Vec::new();
        table.expire(now + LIFETIME - Duration::from_nanos(1), |frame| expired.push(frame));
        assert!(expired.is_empty() && table.has_waiting());
        table.expire(now + LIFETIME, |frame| expired.push(frame));
        assert_eq!(expired.len(), 2 - displaced, "their time begins with the first of them");
        table.expire(later + LIFETIME, |frame| expired.push(frame));
        assert_eq!((expired.len(), table.early_total), (3 - displaced, 0));
        assert!(!table.has_waiting());
        expired.into_iter().chain(burst.drain(..)).for_each(|frame| arena.free(frame));
    }
}
