//! Early drop: frames are classified, and each class has a rate limit.
//!
//! The policy is decided elsewhere. A device that can inspect frames before they cost processor
//! time takes class rules and rate limits through [`EarlyDrop`], and drops frames over the
//! limits.

use std::io;

/// Maximum number of classes.
pub const MAX_CLASSES: usize = 16;
/// Maximum number of rules.
pub const MAX_RULES: usize = 32;

/// Bytes from the start of a payload that rules compare.
pub const PAYLOAD_WINDOW: usize = 48;

/// Match rule of a class. A frame matches when all conditions hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClassRule {
    /// Class of the frames that match.
    pub class: u8,
    /// Address family of the source: 4 or 6; 0 matches any.
    pub family: u8,
    /// 1 matches known sources, 2 unknown sources, 0 any.
    pub known: u8,
    /// Protocol above IP, 1 for both ICMPs; 256 for ARP and neighbour discovery; [`u16::MAX`]
    /// for any.
    pub protocol: u16,
    /// First destination port. Packets without ports count as port 65,536.
    pub port_low: u32,
    /// Last destination port.
    pub port_high: u32,
    /// Minimum packet size in bytes, IP header included.
    pub size_low: u32,
    /// Maximum packet size in bytes, IP header included.
    pub size_high: u32,
    /// Network of the source as a number; IPv4 in the lowest 32 bits.
    pub source: u128,
    /// Mask of the bits of `source` that are compared.
    pub source_mask: u128,
    /// Payload of UDP or TCP from its start.
    pub payload: [u8; PAYLOAD_WINDOW],
    /// Mask of the bits of `payload` that are compared.
    pub payload_mask: [u8; PAYLOAD_WINDOW],
    /// Number of bytes that the payload has at least; 0 compares no payload.
    pub payload_end: u8,
}

/// Rules that sort frames into classes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Classifier {
    /// Rules in order; the first match decides the class. At most [`MAX_RULES`].
    pub rules: Vec<ClassRule>,
    /// Class of frames that cannot be parsed.
    pub default_class: u8,
    /// Secret that is added to the hash input.
    pub hash_seed: u64,
    /// Secret odd factor that multiplies the hash input.
    pub hash_multiplier: u64,
}

/// Rate limit in packets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RateLimit {
    /// No limit.
    #[default]
    Unlimited,
    /// One packet each `interval_ns`; packets may come up to `burst_ns` early. Both are under an
    /// hour.
    Limited {
        /// Nanoseconds per packet.
        interval_ns: u64,
        /// Nanoseconds that packets may come before their time.
        burst_ns: u64,
    },
    /// As `Limited`, and above that while the total is half free.
    Shared {
        /// Nanoseconds per packet.
        interval_ns: u64,
        /// Nanoseconds that packets may come before their time.
        burst_ns: u64,
    },
    /// Admits packets only while the total is half free; without a total, none.
    Closed,
}

/// Rate limits of a class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClassLimit {
    /// Limit of the whole class.
    pub class: RateLimit,
    /// Share of each source in the class; applies only when the class is limited. Above its share a
    /// source is admitted while the class is half free.
    pub source: RateLimit,
}

/// Rate limits of all classes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Rate of all classes with a limit that is [`RateLimit::Shared`] or [`RateLimit::Closed`].
    pub total: RateLimit,
    /// Limits of the classes.
    pub classes: [ClassLimit; MAX_CLASSES],
}

impl Limits {
    /// True if classes share a total, so that many frames may be dropped. Otherwise frames are only
    /// counted, apart from those above a fixed rate.
    pub fn has_total(&self) -> bool {
        self.total != RateLimit::Unlimited
    }
}

/// Admitted and dropped frames of a class since the device was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClassCounts {
    /// Admitted.
    pub admitted: u64,
    /// Those of the admitted frames whose source had used its share.
    pub admitted_over_share: u64,
    /// Dropped: the class was closed.
    pub refused_closed: u64,
    /// Dropped: the class was at its rate.
    pub refused_rate: u64,
    /// Dropped: the source had used its share.
    pub refused_source_share: u64,
}

impl ClassCounts {
    /// Frames that were inspected.
    pub fn arrived(&self) -> u64 {
        self.admitted + self.refused()
    }

    /// Frames that were dropped.
    pub fn refused(&self) -> u64 {
        self.refused_closed + self.refused_rate + self.refused_source_share
    }
}

/// Drops frames before they cost processor time in the stack.
///
/// Frames are neither inspected nor counted until limits are set.
pub trait EarlyDrop {
    /// Sets the classes.
    ///
    /// # Errors
    /// When the device cannot hold as many or cannot compare payloads, or the kernel refuses.
    fn set_classifier(&mut self, classifier: &Classifier) -> io::Result<()>;

    /// Sets the known sources: a Bloom filter whose size in bits is a power of two, with four
    /// bits for each source.
    ///
    /// # Errors
    /// When the filter is too large, or the kernel refuses.
    fn set_known_sources(&mut self, words: &[u64]) -> io::Result<()>;

    /// Sets the limits of all classes, or turns early drop off (`None`). Cheap enough for every
    /// millisecond.
    ///
    /// # Errors
    /// When the kernel refuses.
    fn set_limits(&mut self, limits: Option<&Limits>) -> io::Result<()>;

    /// Counters of each class.
    ///
    /// # Errors
    /// When the kernel refuses.
    fn counts(&mut self) -> io::Result<[ClassCounts; MAX_CLASSES]>;

    /// Number of times that the device was found without admitted frames, before it looked for
    /// more; `None` where this cannot be known.
    fn times_emptied(&self) -> Option<u64> {
        None
    }

    /// Frames that the NIC lost before they were inspected, because its receive ring was full; 0
    /// where this cannot be known.
    ///
    /// # Errors
    /// When the kernel refuses.
    fn rx_missed(&mut self) -> io::Result<u64> {
        Ok(0)
    }
}
