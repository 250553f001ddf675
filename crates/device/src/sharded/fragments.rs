//! Flows of fragmented packets. Only the first fragment has the ports; later ones follow it, and
//! earlier ones wait for it.

use std::hash::{BuildHasher, RandomState};

use tidegate_memory::Frame;

use super::destination::FragmentKey;
use super::flow::Flow;
use crate::Burst;

/// Number of fragmented packets whose flow is remembered; a power of two.
const FLOW_SLOTS: usize = 256;

/// Number of packets of which fragments wait for the first one; a power of two.
const EARLY_SLOTS: usize = 64;

/// Maximum number of fragments that wait, of one packet and of all. A packet whose first fragment
/// is lost keeps them until another packet takes the slot.
const MAX_EARLY_FRAGMENTS: usize = 16;
const MAX_EARLY_FRAGMENTS_TOTAL: usize = 128;

/// Fragments of one packet that have arrived before its first fragment.
#[derive(Default)]
struct EarlyFragments {
    key: Option<FragmentKey>,
    frames: Vec<Frame>,
}

/// Flows of fragmented packets, and fragments whose flow is not known yet.
pub(super) struct FragmentTable {
    flows: Box<[Option<(FragmentKey, Flow)>]>,
    early: Box<[EarlyFragments]>,
    early_total: usize,
    /// Keyed hash of the slots: a peer cannot choose packets that collide.
    hasher: RandomState,
}

impl FragmentTable {
    pub(super) fn new() -> Self {
        Self {
            flows: vec![None; FLOW_SLOTS].into_boxed_slice(),
            early: (0..EARLY_SLOTS).map(|_| EarlyFragments::default()).collect(),
            early_total: 0,
            hasher: RandomState::new(),
        }
    }

    /// Remembers the flow of a packet, whose first fragment has arrived. Appends the fragments that
    /// arrived before to `early`.
    pub(super) fn begin(&mut self, key: FragmentKey, flow: Flow, early: &mut Burst) {
        let hash = self.hasher.hash_one(key) as usize;
        self.flows[hash & (FLOW_SLOTS - 1)] = Some((key, flow));
        let waiting = &mut self.early[hash & (EARLY_SLOTS - 1)];
        if waiting.key == Some(key) {
            waiting.key = None;
            self.early_total -= waiting.frames.len();
            waiting.frames.drain(..).for_each(|frame| early.push_back(frame));
        }
    }

    /// Flow of a packet whose first fragment has arrived.
    pub(super) fn flow(&self, key: FragmentKey) -> Option<Flow> {
        let hash = self.hasher.hash_one(key) as usize;
        let known = self.flows[hash & (FLOW_SLOTS - 1)];
        known.filter(|(packet, _)| *packet == key).map(|(_, flow)| flow)
    }

    /// Keeps a fragment until the first one of its packet arrives. Fragments for which there is no
    /// space, of this packet or an older one, go to `burst`.
    pub(super) fn wait(&mut self, key: FragmentKey, frame: Frame, burst: &mut Burst) {
        let hash = self.hasher.hash_one(key) as usize;
        let waiting = &mut self.early[hash & (EARLY_SLOTS - 1)];
        if waiting.key != Some(key) {
            self.early_total -= waiting.frames.len();
            waiting.frames.drain(..).for_each(|frame| burst.push_back(frame));
            waiting.key = Some(key);
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
