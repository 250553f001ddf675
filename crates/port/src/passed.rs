//! Copies of frames that are offered to a port, for wrappers that tell of
//! those that it took.

use tidegate_memory::Arena;

use crate::Burst;

/// Copies of the frames of one burst. Kept between bursts, so that copying
/// does not allocate.
#[derive(Debug, Default)]
pub struct Copies {
    bytes: Vec<u8>,
    /// Where each frame ends in `bytes`, and how long it was.
    frames: Vec<(usize, usize)>,
}

impl Copies {
    /// Copies at most `snap_bytes` of each frame.
    pub fn take(&mut self, arena: &Arena, burst: &Burst, snap_bytes: usize) {
        self.bytes.clear();
        self.frames.clear();
        for frame in burst.iter() {
            let data = arena.bytes(frame);
            self.bytes.extend_from_slice(&data[..data.len().min(snap_bytes)]);
            self.frames.push((self.bytes.len(), data.len()));
        }
    }

    /// The first `count` frames: what was kept of each, and how long it was.
    pub fn first(&self, count: usize) -> impl Iterator<Item = (&[u8], usize)> {
        let mut start = 0;
        self.frames.iter().take(count).map(move |&(end, original)| {
            let kept = &self.bytes[start..end];
            start = end;
            (kept, original)
        })
    }
}
