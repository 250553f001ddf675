//! Tokens of frames: position of the data, checksum and segment size in two words.

use std::fmt;

/// Largest payload that [`Frame::set_segment_bytes`] accepts, in bytes.
pub const MAX_SEGMENT_BYTES: usize = (1 << 14) - 1;

/// State of a frame's transport checksum.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Checksum {
    /// Received: not verified. To send: complete.
    #[default]
    Unknown,
    /// Received: verified by the NIC or the kernel, or the frame never left this machine, so that
    /// there is nothing to verify.
    Verified,
    /// The checksum field holds only the sum of the pseudo-header.
    ///
    /// To send: the device sums from `start` to the end of the frame and stores the result at
    /// `start + offset`. Received: the sender is on this machine and left the sum to a NIC that
    /// does not exist; the data is good.
    Partial {
        /// Start of the summed range, in bytes from the start of the frame.
        start: u16,
        /// Position of the checksum field, in bytes from `start`.
        offset: u16,
    },
}

/// A [`Checksum`] packed into one word, for code that only passes it on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PackedChecksum(u64);

impl PackedChecksum {
    const VERIFIED: u64 = 1 << 16;
    const PARTIAL: u64 = 2 << 16;
    const KIND_MASK: u64 = 3 << 16;
    /// The bits of [`Frame::meta`] that belong to the checksum.
    const MASK: u64 = !0xffff;
    /// Verified and loopback ([`Frame::is_loopback`]): marked by a bit of the start, which only a
    /// partial checksum uses otherwise.
    const LOOPBACK: u64 = Self::VERIFIED | 1 << 32;
    /// Bit position of [`Frame::segment_bytes`]: the bits of the kind field that the kind does not
    /// need.
    const SEGMENT_SHIFT: u32 = 18;

    /// Packs a checksum. From the top: offset and start of a partial checksum, and the kind, 16
    /// bits each.
    #[inline(always)]
    pub const fn new(checksum: Checksum) -> Self {
        Self(match checksum {
            Checksum::Unknown => 0,
            Checksum::Verified => Self::VERIFIED,
            Checksum::Partial { start, offset } => {
                Self::PARTIAL | (start as u64) << 32 | (offset as u64) << 48
            }
        })
    }

    /// Unpacks the checksum.
    #[inline(always)]
    pub const fn unpack(self) -> Checksum {
        match self.0 & Self::KIND_MASK {
            0 => Checksum::Unknown,
            Self::VERIFIED => Checksum::Verified,
            _ => Checksum::Partial { start: (self.0 >> 32) as u16, offset: (self.0 >> 48) as u16 },
        }
    }
}

/// Token for one frame of an arena, with the position of its data.
///
/// A frame that is dropped instead of freed is lost to its arena.
///
/// The token is two words, so that it moves through queues in two registers.
#[must_use = "a frame that is not freed is lost to its arena"]
pub struct Frame {
    /// From the top: offset of the data from the start of the mapping in bytes (48 bits), and
    /// length of the data (16 bits).
    pub(super) span: u64,
    /// From the top: the [`PackedChecksum`] (48 bits) and the headroom (16 bits).
    pub(super) meta: u64,
}

impl Frame {
    /// Token for `len` bytes of data at `offset`, with `headroom` bytes in front.
    #[inline(always)]
    pub(super) fn new(offset: usize, headroom: u16, len: u16) -> Self {
        Self { span: (offset as u64) << 16 | u64::from(len), meta: u64::from(headroom) }
    }

    /// Offset of the data from the start of the mapping, in bytes.
    #[inline(always)]
    pub(super) fn offset(&self) -> usize {
        (self.span >> 16) as usize
    }

    /// Length of the data in bytes.
    #[inline(always)]
    pub fn len(&self) -> usize {
        usize::from(self.span as u16)
    }

    /// True if there is no data.
    #[inline(always)]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes free in front of the data.
    #[inline(always)]
    pub fn headroom(&self) -> usize {
        usize::from(self.meta as u16)
    }

    /// State of the transport checksum.
    #[inline(always)]
    pub fn checksum(&self) -> Checksum {
        self.packed_checksum().unpack()
    }

    /// Sets the state of the transport checksum.
    #[inline(always)]
    pub fn set_checksum(&mut self, checksum: Checksum) {
        self.set_packed_checksum(PackedChecksum::new(checksum));
    }

    /// Payload bytes of each TCP segment that the frame stands for (GSO size); 0 for an ordinary
    /// packet. Only a frame with a partial checksum can stand for several segments.
    #[inline(always)]
    pub fn segment_bytes(&self) -> usize {
        (self.meta >> PackedChecksum::SEGMENT_SHIFT) as usize & MAX_SEGMENT_BYTES
    }

    /// Marks the frame as several segments with `bytes` of payload each, at most
    /// [`MAX_SEGMENT_BYTES`]; the last segment may have less.
    ///
    /// Call this after [`Frame::set_checksum`], which clears the mark. Has no effect on a frame
    /// without a partial checksum.
    #[inline(always)]
    pub fn set_segment_bytes(&mut self, bytes: u16) {
        if self.meta & PackedChecksum::KIND_MASK == PackedChecksum::PARTIAL {
            let bits = (MAX_SEGMENT_BYTES as u64) << PackedChecksum::SEGMENT_SHIFT;
            let bytes = u64::from(bytes) << PackedChecksum::SEGMENT_SHIFT;
            self.meta = self.meta & !bits | bytes & bits;
        }
    }

    /// True if nothing is known about the transport checksum ([`Checksum::Unknown`]).
    #[inline(always)]
    pub fn is_unchecked(&self) -> bool {
        // `Checksum::Unknown` packs to zero.
        self.meta & PackedChecksum::MASK == 0
    }

    /// Marks the frame as loopback: sent by a host to itself. The frame never leaves the host, so
    /// its checksum counts as verified. [`Frame::set_checksum`] clears the mark.
    #[inline(always)]
    pub fn set_loopback(&mut self) {
        self.set_packed_checksum(PackedChecksum(PackedChecksum::LOOPBACK));
    }

    /// True if the host sent the frame to itself. A frame from a wire is never loopback, whatever
    /// its bytes say.
    #[inline(always)]
    pub fn is_loopback(&self) -> bool {
        self.meta & PackedChecksum::MASK == PackedChecksum::LOOPBACK
    }

    /// Same as [`Frame::checksum`], packed.
    #[inline(always)]
    pub fn packed_checksum(&self) -> PackedChecksum {
        PackedChecksum(self.meta & PackedChecksum::MASK)
    }

    /// Same as [`Frame::set_checksum`], from the packed form.
    #[inline(always)]
    pub fn set_packed_checksum(&mut self, checksum: PackedChecksum) {
        self.meta = self.meta & !PackedChecksum::MASK | checksum.0;
    }

    /// Drops `n` bytes from the front, at most all; they become headroom.
    #[inline(always)]
    pub fn advance(&mut self, n: usize) {
        let n = n.min(self.len()) as u64;
        // The length is at least `n`, so that the subtraction borrows nothing from the offset. The
        // headroom never exceeds the usable bytes of a frame, which fit in 16 bits.
        self.span = self.span + (n << 16) - n;
        self.meta += n;
    }

    /// Shortens the data to `len` bytes; shorter data stays as it is.
    #[inline(always)]
    pub fn truncate(&mut self, len: usize) {
        let len = self.len().min(len) as u64;
        self.span = self.span & !0xffff | len;
    }

    /// Extends the data by `n` bytes of headroom in front of it, or by all the headroom if there
    /// is less. The added bytes hold whatever was there.
    #[inline(always)]
    pub fn retreat(&mut self, n: usize) {
        let n = n.min(self.headroom()) as u64;
        self.span = self.span - (n << 16) + n;
        self.meta -= n;
    }
}

impl fmt::Debug for Frame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let start = self.offset() - self.headroom();
        write!(f, "Frame@{start:#x}[{}..+{}]", self.headroom(), self.len())
    }
}
