//! Frames that wait while their ports migrate between cores.

use std::collections::{HashSet, VecDeque};

use tidegate_memory::Frame;

use super::LocalPort;
use super::flow::Flow;

/// Maximum number of frames that wait.
const MAX_PARKED_FRAMES: usize = 1024;

/// A frame whose local port is known.
pub(super) struct SteeredFrame {
    pub(super) local_port: LocalPort,
    /// Flow of a fragment, which the frame's own headers do not have.
    pub(super) flow: Option<Flow>,
    pub(super) frame: Frame,
}

/// Parked frames in the order of their arrival, and their ports.
pub(super) struct ParkedFrames {
    frames: VecDeque<SteeredFrame>,
    ports: HashSet<LocalPort>,
}

impl ParkedFrames {
    pub(super) fn new() -> Self {
        Self { frames: VecDeque::new(), ports: HashSet::new() }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// True if a frame for this port is parked, which later ones must not overtake.
    pub(super) fn has(&self, port: LocalPort) -> bool {
        !self.is_empty() && self.ports.contains(&port)
    }

    /// Parks a frame. Returns the frame if too many are parked.
    pub(super) fn push(&mut self, steered: SteeredFrame) -> Option<Frame> {
        if self.frames.len() == MAX_PARKED_FRAMES {
            return Some(steered.frame);
        }
        self.ports.insert(steered.local_port);
        self.frames.push_back(steered);
        None
    }

    /// Takes all frames.
    pub(super) fn take(&mut self) -> VecDeque<SteeredFrame> {
        self.ports.clear();
        std::mem::take(&mut self.frames)
    }
}
