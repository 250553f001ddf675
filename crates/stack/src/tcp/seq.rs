//! Sequence numbers: 32 bits that wrap (RFC 9293 section 3.4).

use std::ops::{Add, AddAssign, Sub};

/// A sequence number. "Before" and "after" mean less than half the circle away.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub(crate) struct Seq(pub(crate) u32);

impl Seq {
    #[inline]
    pub(crate) fn is_before(self, other: Seq) -> bool {
        (self.0.wrapping_sub(other.0) as i32) < 0
    }

    #[inline]
    pub(crate) fn is_after(self, other: Seq) -> bool {
        other.is_before(self)
    }

    /// True if `self` is at or before `other`.
    #[inline]
    pub(crate) fn is_at_or_before(self, other: Seq) -> bool {
        !other.is_before(self)
    }

    /// Returns the later of two sequence numbers.
    #[inline]
    pub(crate) fn max(self, other: Seq) -> Seq {
        if self.is_before(other) { other } else { self }
    }

    /// Returns the earlier of two sequence numbers.
    #[inline]
    pub(crate) fn min(self, other: Seq) -> Seq {
        if self.is_before(other) { self } else { other }
    }

    /// Distance from `earlier` to `self`; 0 if `self` is before `earlier`.
    #[inline]
    pub(crate) fn since(self, earlier: Seq) -> u32 {
        if self.is_before(earlier) { 0 } else { self.0.wrapping_sub(earlier.0) }
    }
}

impl Add<u32> for Seq {
    type Output = Seq;

    #[inline]
    fn add(self, n: u32) -> Seq {
        Seq(self.0.wrapping_add(n))
    }
}

impl AddAssign<u32> for Seq {
    #[inline]
    fn add_assign(&mut self, n: u32) {
        *self = *self + n;
    }
}

impl Sub<u32> for Seq {
    type Output = Seq;

    #[inline]
    fn sub(self, n: u32) -> Seq {
        Seq(self.0.wrapping_sub(n))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ordering_handles_wrap() {
        let (low, high) = (Seq(u32::MAX - 1), Seq(3));
        assert!(low.is_before(high) && high.is_after(low) && !high.is_before(low));
        assert!(
            low.is_at_or_before(low) && low.is_at_or_before(high) && !high.is_at_or_before(low)
        );
        assert_eq!((low.max(high), low.min(high)), (high, low));
        assert_eq!((high.since(low), low.since(high)), (5, 0));
        assert_eq!((low + 5, high - 5), (high, low));
    }
}
