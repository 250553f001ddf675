//! Copies of frames offered to a device, for wrappers that report the frames that were
//! transmitted.

use tidegate_memory::Arena;

use crate::Burst;

/// Copies of the frames of one burst. The buffers are reused between bursts, so that copying
/// does not allocate.
#[derive(Debug, Default)]
pub struct TxCopies {
    bytes: Vec<u8>,
    /// End of each frame in `bytes`, and its original length.
    frames: Vec<(usize, usize)>,
}

impl TxCopies {
    /// Copies at most `snap_bytes` of each frame of the burst.
    pub fn copy_burst(&mut self, arena: &Arena, burst: &Burst, snap_bytes: usize) {
        self.bytes.clear();
        self.frames.clear();
        for frame in burst.iter() {
            let data = arena.bytes(frame);
            self.bytes.extend_from_slice(&data[..data.len().min(snap_bytes)]);
            self.frames.push((self.bytes.len(), data.len()));
        }
    }

    /// The first `count` frames: the copied bytes and the original length of each.
    pub fn first(&self, count: usize) -> impl Iterator<Item = (&[u8], usize)> {
        let mut start = 0;
        self.frames.iter().take(count).map(move |&(end, original)| {
            let kept = &self.bytes[start..end];
            start = end;
            (kept, original)
        })
    }
}
