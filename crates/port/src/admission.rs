//! Dropping early: classes of frames, and how much of each is let in.
//!
//! Who decides that is not known here. A port that can look at frames before
//! they cost anything takes rules and limits through [`Early`] and drops what
//! is over them.

use std::io;

/// The most classes.
pub const CLASSES_MAX: usize = 16;
/// The most rules.
pub const RULES_MAX: usize = 32;

/// Which frames belong to a class. All conditions have to hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rule {
    /// The class of frames that match.
    pub class: u8,
    /// The family of the source: 4 or 6; 0 when the source does not matter.
    pub family: u8,
    /// 1 for known sources, 2 for strangers; 0 when that does not matter.
    pub known: u8,
    /// The protocol above IP, 1 for both ICMPs; 256 for ARP and neighbour
    /// discovery; [`u16::MAX`] for any.
    pub protocol: u16,
    /// The first destination port. Packets without one count as port 65,536.
    pub port_low: u32,
    /// The last destination port.
    pub port_high: u32,
    /// The fewest bytes, IP header included.
    pub size_low: u32,
    /// The most bytes.
    pub size_high: u32,
    /// The network of the source as a number; IPv4 in the lowest 32 bits.
    pub source: u128,
    /// The bits of it that count.
    pub source_mask: u128,
}

/// How frames are sorted into classes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    /// Tried one after the other; the first that matches says the class. At
    /// most [`RULES_MAX`].
    pub rules: Vec<Rule>,
    /// The class of what cannot be read.
    pub rest_class: u8,
    /// Added to what is hashed. A secret.
    pub key_start: u64,
    /// Multiplies what is hashed; odd. A secret.
    pub key_factor: u64,
}

/// How much is let in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pace {
    /// Everything.
    #[default]
    Open,
    /// A packet each `interval_ns`; packets may come `burst_ns` before their
    /// time. Both are under an hour.
    Limited {
        /// The time that one packet takes.
        interval_ns: u64,
        /// How far packets may come before their time.
        burst_ns: u64,
    },
    /// Nothing.
    Closed,
}

/// How much of a class is let in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClassLimit {
    /// How much of the class.
    pub class: Pace,
    /// How much of each source in it, if the class is limited.
    pub source: Pace,
}

/// What was done with the frames of a class since the port was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClassCounts {
    /// Let in.
    pub admitted: u64,
    /// Dropped: nothing of the class was let in.
    pub refused_closed: u64,
    /// Dropped: the class was at its rate.
    pub refused_rate: u64,
    /// Dropped: the source had had its share.
    pub refused_source_share: u64,
}

impl ClassCounts {
    /// Frames that were looked at.
    pub fn arrived(&self) -> u64 {
        self.admitted + self.refused()
    }

    /// Frames that were dropped.
    pub fn refused(&self) -> u64 {
        self.refused_closed + self.refused_rate + self.refused_source_share
    }
}

/// Drops frames before they cost anything.
///
/// Nothing is looked at or counted until limits are set.
pub trait Early {
    /// Says which classes there are.
    ///
    /// # Errors
    /// When there are more than the port can take, or the kernel refuses.
    fn set_program(&mut self, program: &Program) -> io::Result<()>;

    /// Says who is known: a Bloom filter of a power of two of bits, with four
    /// places for each source.
    ///
    /// # Errors
    /// When the filter is too large, or the kernel refuses.
    fn set_known(&mut self, words: &[u64]) -> io::Result<()>;

    /// Says how much of each class is let in, or that everything is. Cheap
    /// enough for every millisecond.
    ///
    /// # Errors
    /// When the kernel refuses.
    fn set_limits(&mut self, limits: Option<&[ClassLimit]>) -> io::Result<()>;

    /// What was done with the frames of each class.
    ///
    /// # Errors
    /// When the kernel refuses.
    fn counts(&mut self) -> io::Result<[ClassCounts; CLASSES_MAX]>;

    /// Frames that the device has lost before anybody looked at them, because
    /// its ring was full; 0 where that cannot be known.
    ///
    /// # Errors
    /// When the kernel refuses.
    fn unseen(&mut self) -> io::Result<u64> {
        Ok(0)
    }
}
