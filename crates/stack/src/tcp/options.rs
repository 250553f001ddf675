//! The options of segments: read (RFC 9293 section 3.2, RFC 7323, RFC 2018) and
//! written.

use tidegate_wire::tcp::{SackBlocks, TcpOption, TcpOptions};
use tidegate_wire::{DropReason, TcpHeader};

use super::seq::Seq;

/// RFC 7323 section 2.3: a larger shift is taken as this.
pub(crate) const MAX_WINDOW_SHIFT: u8 = 14;

/// What the options of a received segment say. Of an option that stands twice
/// the last counts.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Options<'a> {
    pub(crate) mss: Option<u16>,
    pub(crate) window_shift: Option<u8>,
    pub(crate) sack_permitted: bool,
    /// Value and echo.
    pub(crate) timestamps: Option<(u32, u32)>,
    pub(crate) sack: Option<SackBlocks<'a>>,
}

impl<'a> Options<'a> {
    /// Reads them.
    ///
    /// # Errors
    /// [`DropReason::TcpOptions`] when a length is impossible.
    #[inline]
    pub(crate) fn parse(options: TcpOptions<'a>) -> Result<Self, DropReason> {
        let mut known = Self::default();
        // What most segments have.
        if let &[1, 1, 8, 10, a, b, c, d, e, f, g, h] = options.as_bytes() {
            let (value, echo) = ([a, b, c, d], [e, f, g, h]);
            known.timestamps = Some((u32::from_be_bytes(value), u32::from_be_bytes(echo)));
            return Ok(known);
        }
        for option in options {
            match option? {
                TcpOption::MaximumSegmentSize(size) => known.mss = Some(size),
                TcpOption::WindowScale(shift) => {
                    known.window_shift = Some(shift.min(MAX_WINDOW_SHIFT));
                }
                TcpOption::SackPermitted => known.sack_permitted = true,
                TcpOption::Timestamps { value, echo } => known.timestamps = Some((value, echo)),
                TcpOption::Sack(blocks) => known.sack = Some(blocks),
                TcpOption::Other(..) => {}
            }
        }
        Ok(known)
    }
}

/// Bytes that the time stamps take, padded.
pub(crate) const TIMESTAMPS_BYTES: usize = 12;

/// The options of a segment to send, padded to multiples of four bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OptionBytes {
    bytes: [u8; TcpHeader::MAX_OPTION_BYTES],
    len: u8,
}

impl OptionBytes {
    pub(crate) fn new() -> Self {
        Self { bytes: [1; TcpHeader::MAX_OPTION_BYTES], len: 0 }
    }

    pub(crate) fn as_bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }

    /// Appends bytes that are a multiple of four, if they fit.
    fn push<const N: usize>(&mut self, bytes: [u8; N]) {
        let at = usize::from(self.len);
        if let Some(place) = self.bytes.get_mut(at..at + N) {
            place.copy_from_slice(&bytes);
            self.len += N as u8;
        }
    }

    pub(crate) fn mss(&mut self, size: u16) {
        let [high, low] = size.to_be_bytes();
        self.push([2, 4, high, low]);
    }

    pub(crate) fn window_shift(&mut self, shift: u8) {
        self.push([1, 3, 3, shift]);
    }

    pub(crate) fn sack_permitted(&mut self) {
        self.push([1, 1, 4, 2]);
    }

    pub(crate) fn timestamps(&mut self, value: u32, echo: u32) {
        let ([a, b, c, d], [e, f, g, h]) = (value.to_be_bytes(), echo.to_be_bytes());
        self.push([1, 1, 8, 10, a, b, c, d, e, f, g, h]);
    }

    /// Appends as many of the blocks as fit.
    pub(crate) fn sack(&mut self, blocks: &[(Seq, Seq)]) {
        let room = (TcpHeader::MAX_OPTION_BYTES - usize::from(self.len)).saturating_sub(4) / 8;
        let blocks = &blocks[..room.min(blocks.len())];
        if blocks.is_empty() {
            return;
        }
        self.push([1, 1, 5, 2 + 8 * blocks.len() as u8]);
        for &(start, end) in blocks {
            self.push(start.0.to_be_bytes());
            self.push(end.0.to_be_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(bytes: &OptionBytes) -> Options<'_> {
        Options::parse(TcpOptions::new(bytes.as_bytes())).unwrap()
    }

    #[test]
    fn what_is_written_is_read() {
        let mut bytes = OptionBytes::new();
        bytes.mss(1460);
        bytes.sack_permitted();
        bytes.timestamps(7, 9);
        bytes.window_shift(20);
        let options = read(&bytes);
        assert_eq!((options.mss, options.sack_permitted), (Some(1460), true));
        assert_eq!(options.timestamps, Some((7, 9)));
        assert_eq!(options.window_shift, Some(14), "RFC 7323 section 2.3");
    }

    #[test]
    fn rfc2018_three_blocks_fit_beside_time_stamps_and_four_without() {
        let blocks: Vec<_> = (0..6).map(|n| (Seq(n * 10), Seq(n * 10 + 5))).collect();
        let mut with = OptionBytes::new();
        with.timestamps(1, 2);
        with.sack(&blocks);
        assert_eq!(read(&with).sack.unwrap().count(), 3);
        let mut without = OptionBytes::new();
        without.sack(&blocks);
        assert_eq!(read(&without).sack.unwrap().collect::<Vec<_>>()[3], (30, 35));
    }
}
