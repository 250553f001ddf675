//! Segment options: parsing and writing (RFC 9293 section 3.2, RFC 7323, RFC 2018).

use tidegate_wire::tcp::{SackBlocks, TcpOption, TcpOptions};
use tidegate_wire::{DropReason, TcpHeader};

use super::seq::Seq;

/// Largest window shift; larger received shifts are taken as 14 (RFC 7323 section 2.3).
pub(crate) const MAX_WINDOW_SHIFT: u8 = 14;

/// Options of a received segment. If an option occurs twice, the last one counts.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ParsedOptions<'a> {
    pub(crate) mss: Option<u16>,
    pub(crate) window_shift: Option<u8>,
    pub(crate) sack_permitted: bool,
    /// TSval and TSecr (RFC 7323 section 3).
    pub(crate) timestamps: Option<(u32, u32)>,
    pub(crate) sack: Option<SackBlocks<'a>>,
}

impl<'a> ParsedOptions<'a> {
    /// Parses the option bytes of a header.
    ///
    /// # Errors
    /// [`DropReason::TcpOptions`] when the length of an option is impossible.
    #[inline]
    pub(crate) fn parse(options: TcpOptions<'a>) -> Result<Self, DropReason> {
        let mut parsed = Self::default();
        // Fast case, as in most segments: only time stamps, behind two NOPs.
        if let &[1, 1, 8, 10, a, b, c, d, e, f, g, h] = options.as_bytes() {
            let (value, echo) = ([a, b, c, d], [e, f, g, h]);
            parsed.timestamps = Some((u32::from_be_bytes(value), u32::from_be_bytes(echo)));
            return Ok(parsed);
        }
        for option in options {
            match option? {
                TcpOption::MaximumSegmentSize(size) => parsed.mss = Some(size),
                TcpOption::WindowScale(shift) => {
                    parsed.window_shift = Some(shift.min(MAX_WINDOW_SHIFT));
                }
                TcpOption::SackPermitted => parsed.sack_permitted = true,
                TcpOption::Timestamps { value, echo } => parsed.timestamps = Some((value, echo)),
                TcpOption::Sack(blocks) => parsed.sack = Some(blocks),
                TcpOption::Other(..) => {}
            }
        }
        Ok(parsed)
    }
}

/// Bytes of the time stamp option with its padding.
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

    /// Appends `bytes`, a multiple of four, if there is space for them.
    fn push<const N: usize>(&mut self, bytes: [u8; N]) {
        let at = usize::from(self.len);
        if let Some(space) = self.bytes.get_mut(at..at + N) {
            space.copy_from_slice(&bytes);
            self.len += N as u8;
        }
    }

    pub(crate) fn push_mss(&mut self, size: u16) {
        let [high, low] = size.to_be_bytes();
        self.push([2, 4, high, low]);
    }

    pub(crate) fn push_window_shift(&mut self, shift: u8) {
        self.push([1, 3, 3, shift]);
    }

    pub(crate) fn push_sack_permitted(&mut self) {
        self.push([1, 1, 4, 2]);
    }

    pub(crate) fn push_timestamps(&mut self, value: u32, echo: u32) {
        let ([a, b, c, d], [e, f, g, h]) = (value.to_be_bytes(), echo.to_be_bytes());
        self.push([1, 1, 8, 10, a, b, c, d, e, f, g, h]);
    }

    /// Appends as many of the SACK blocks as fit.
    pub(crate) fn push_sack(&mut self, blocks: &[(Seq, Seq)]) {
        let max_blocks =
            (TcpHeader::MAX_OPTION_BYTES - usize::from(self.len)).saturating_sub(4) / 8;
        let blocks = &blocks[..max_blocks.min(blocks.len())];
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

    fn parse(bytes: &OptionBytes) -> ParsedOptions<'_> {
        ParsedOptions::parse(TcpOptions::new(bytes.as_bytes())).unwrap()
    }

    #[test]
    fn parses_written_options() {
        let mut bytes = OptionBytes::new();
        bytes.push_mss(1460);
        bytes.push_sack_permitted();
        bytes.push_timestamps(7, 9);
        bytes.push_window_shift(20);
        let options = parse(&bytes);
        assert_eq!((options.mss, options.sack_permitted), (Some(1460), true));
        assert_eq!(options.timestamps, Some((7, 9)));
        assert_eq!(options.window_shift, Some(14), "RFC 7323 section 2.3");
    }

    #[test]
    fn rfc2018_three_blocks_fit_with_timestamps_and_four_without() {
        let blocks: Vec<_> = (0..6).map(|n| (Seq(n * 10), Seq(n * 10 + 5))).collect();
        let mut with = OptionBytes::new();
        with.push_timestamps(1, 2);
        with.push_sack(&blocks);
        assert_eq!(parse(&with).sack.unwrap().count(), 3);
        let mut without = OptionBytes::new();
        without.push_sack(&blocks);
        assert_eq!(parse(&without).sack.unwrap().collect::<Vec<_>>()[3], (30, 35));
    }
}
