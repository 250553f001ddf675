//! Byte ranges of a shared region.

use std::sync::Arc;

use super::{Region, SharedBytes};

/// A byte range of a region, for one of the streams in it.
#[derive(Clone)]
pub struct ByteRange {
    region: Arc<Region>,
    start: usize,
    len: usize,
}

impl ByteRange {
    /// The `len` bytes of a region from byte `start` on; `None` when the range is out of bounds.
    /// The range must not be accessed as words.
    pub fn new(region: &Arc<Region>, start: usize, len: usize) -> Option<Self> {
        let end = start.checked_add(len)?;
        (end <= region.bytes()).then(|| Self { region: Arc::clone(region), start, len })
    }

    /// Number of the `bytes` bytes from `offset` on that are inside the range.
    fn clamp_len(&self, offset: usize, bytes: usize) -> usize {
        bytes.min(self.len.saturating_sub(offset))
    }
}

impl SharedBytes for ByteRange {
    fn len(&self) -> usize {
        self.len
    }

    #[inline]
    fn write_at(&self, offset: usize, from: &[u8]) {
        let from = &from[..self.clamp_len(offset, from.len())];
        if !from.is_empty() {
            self.region.write_at(self.start + offset, from);
        }
    }

    #[inline]
    fn read_at(&self, offset: usize, to: &mut [u8]) {
        let len = self.clamp_len(offset, to.len());
        if len > 0 {
            self.region.read_at(self.start + offset, &mut to[..len]);
        }
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn writes_reach_the_other_mapping_within_the_range_only() {
        let ours = Arc::new(Region::reserve(2).unwrap());
        let fd = ours.as_fd().try_clone_to_owned().unwrap();
        let theirs = Arc::new(Region::open(fd, 2).unwrap());
        assert!(ByteRange::new(&ours, 3, 14).is_none());
        assert!(ByteRange::new(&ours, usize::MAX, 2).is_none());
        let range = ByteRange::new(&ours, 3, 9).unwrap();
        let whole = ByteRange::new(&theirs, 0, 16).unwrap();
        assert_eq!((range.len(), whole.len()), (9, 16));
        range.write_at(2, b"abcdefghijk");
        range.write_at(9, b"x");
        let mut seen = [b'-'; 20];
        whole.read_at(0, &mut seen);
        assert_eq!(&seen, b"\0\0\0\0\0abcdefg\0\0\0\0----");
        ours.discard(0, 16).unwrap();
        whole.read_at(0, &mut seen);
        assert_eq!(seen[..16], [0; 16]);
    }
}
